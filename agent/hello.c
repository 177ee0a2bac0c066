/* HELLO: the host says who runs commands and where, and the agent makes the sandbox fit. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dns.h"
#include "egress.h"
#include "freeze.h"
#include "guest.h"
#include "identity.h"
#include "layers.h"
#include "memory.h"
#include "net.h"
#include "path.h"
#include "ring.h"
#include "spare.h"
#include "sudo.h"
#include "wire.h"

#define B(tag) TAG_BIT(TAG_##tag)
#define FIRST_UID 1000

static bool text_of(const struct fields *f, int tag, char *out, size_t cap)
{
    if (!fields_have(f, tag))
        return true;
    if (f->text[tag].len >= cap)
        return false;
    memcpy(out, f->text[tag].p, f->text[tag].len);
    out[f->text[tag].len] = 0;
    return true;
}

/* ENV of HELLO, and where the generation can be read if it can. */
static bool keep_env(const struct fields *f, bool published)
{
    int64_t count = fields_int(f, TAG_ENV, 0), i = 0;
    char **env = calloc((size_t)count + 2, sizeof *env);
    const uint8_t *p;
    uint32_t n;

    if (!env)
        return false;
    if (published && (env[0] = strdup("SLOPLET_GENERATION_FILE=" GENERATION_FILE)))
        i = 1;
    for (size_t pos = 0; fields_next(f, TAG_ENV, &pos, &p, &n);) {
        if (!n || p[0] == '=' || !memchr(p, '=', n))
            continue; /* there is nothing below the defaults that could be unset */
        env[i] = strndup((const char *)p, n);
        if (env[i])
            i++;
    }
    for (char **old = guest.env; old && *old; old++)
        free(*old);
    free(guest.env);
    guest.env = env;
    return true;
}

/* Makes a folder and its parents; what was made last belongs to the default user. */
static void make_folder(const char *path, const struct user *owner)
{
    int at = path_open(AT_FDCWD, "/", O_PATH | O_DIRECTORY, 0);
    bool made = false;

    while (at >= 0) {
        char part[256];
        size_t len;
        int next;

        path += strspn(path, "/");
        len = strcspn(path, "/");
        if (!len || len >= sizeof part)
            break;
        memcpy(part, path, len);
        part[len] = 0;
        path += len;
        made = mkdirat(at, part, 0755) == 0;
        next = path_open(at, part, O_PATH | O_DIRECTORY, 0);
        close(at);
        at = next;
    }
    if (made && at >= 0 && owner && user_differs(owner) &&
        fchownat(at, "", owner->uid, owner->gid, AT_EMPTY_PATH) < 0)
        dprintf(2, "sloplet-agent: a folder could not be given to its user: errno %d\n", errno);
    if (at >= 0)
        close(at);
}

/* Appends a line; a file that lacks its last newline gets it first. A read-only /etc is no error:
 * the fallback user serves then. */
static void append_line(const char *path, const char *text, size_t n, const char *line)
{
    int fd = path_open(AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_NOCTTY, 0644);
    struct stat st;
    char whole[1024];
    int len = snprintf(whole, sizeof whole, "%s%s", n && text[n - 1] != '\n' ? "\n" : "", line);

    if (fd < 0)
        return;
    if (!fstat(fd, &st) && S_ISREG(st.st_mode) && write(fd, whole, (size_t)len) != len)
        dprintf(2, "sloplet-agent: %s could not be written\n", path);
    close(fd);
}

/* The `agent` user, where the image knows none: the first free uid from 1000 on. Where we are not init
 * the files may be a machine's own: they are left alone, and the fallback serves. */
static void add_agent_user(const char *home)
{
    size_t passwd_len = 0, group_len = 0;
    char *passwd = read_small("/etc/passwd", &passwd_len), *group = read_small("/etc/group", &group_len);
    struct user *u = &guest.fallback, other;
    gid_t gid;
    char line[1024];

    if (!passwd_find(passwd, passwd_len, "agent", 0, u)) {
        u->uid = guest.no_users ? guest.uid : FIRST_UID;
        while (!guest.no_users && passwd_find(passwd, passwd_len, NULL, u->uid, &other))
            u->uid++;
        u->gid = guest.no_users ? guest.gid : (gid_t)u->uid;
        if (group_find(group, group_len, "agent", &gid))
            u->gid = gid;
        strcpy(u->name, "agent");
        snprintf(u->home, sizeof u->home, "%s", home);
        strcpy(u->shell, access("/bin/bash", X_OK) == 0 ? "/bin/bash" : "/bin/sh");
        snprintf(line, sizeof line, "agent:x:%u:%u::%s:%s\n", (unsigned)u->uid, (unsigned)u->gid, u->home, u->shell);
        if (guest.pid1)
            append_line("/etc/passwd", passwd, passwd_len, line);
        if (guest.pid1 && !group_find(group, group_len, "agent", &gid)) {
            snprintf(line, sizeof line, "agent:x:%u:\n", (unsigned)u->gid);
            append_line("/etc/group", group, group_len, line);
        }
    }
    free(passwd);
    free(group);
}

static void stir(const struct fields *f)
{
    int fd;

    if (!fields_have(f, TAG_ENTROPY) || !f->text[TAG_ENTROPY].len)
        return;
    fd = path_open(AT_FDCWD, "/dev/urandom", O_WRONLY | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0)
        return;
    if (write(fd, f->text[TAG_ENTROPY].p, f->text[TAG_ENTROPY].len) < 0)
        dprintf(2, "sloplet-agent: the entropy was not taken: errno %d\n", errno);
    close(fd);
}

static const char *take(const struct fields *f)
{
    char hostname[65] = "";
    int64_t flags = fields_int(f, TAG_FLAGS, 0), ring = fields_int(f, TAG_RING, RING_DEFAULT);

    if (flags & ~(int64_t)(HELLO_FLAG_NO_USERS | HELLO_FLAG_EGRESS | HELLO_FLAG_STILL))
        return "HELLO has a flag that is not known";
    if (ring < 0 || ring > RING_MAX)
        return "HELLO asks for rings out of range";
    if (fields_have(f, TAG_GENERATION) && !generation_valid(f->text[TAG_GENERATION].p, f->text[TAG_GENERATION].len))
        return "HELLO has a GENERATION that is not 1 to 64 visible characters";
    if (fields_have(f, TAG_MEMORY) && fields_int(f, TAG_MEMORY, 0) <= 0)
        return "HELLO has a memory limit out of range";
    strcpy(guest.workdir, "/workspace");
    strcpy(guest.default_user, "agent");
    guest.home[0] = 0;
    if (!text_of(f, TAG_USER, guest.default_user, sizeof guest.default_user) || !guest.default_user[0] ||
        !text_of(f, TAG_WORKDIR, guest.workdir, sizeof guest.workdir) || guest.workdir[0] != '/' ||
        !text_of(f, TAG_HOME, guest.home, sizeof guest.home) || !text_of(f, TAG_HOSTNAME, hostname, sizeof hostname))
        return "HELLO has a text that is too long, or a WORKDIR that is not absolute";
    guest.no_users = flags & HELLO_FLAG_NO_USERS;
    guest.ring = (size_t)ring;
    memory_limit(fields_int(f, TAG_MEMORY, 0));
    if (hostname[0] && guest.pid1)
        identity_hostname(hostname);
    return keep_env(f, identity_generation(f)) ? NULL : "there is no memory for HELLO";
}

/* Serves what leaves the sandbox, if that is asked for and the launcher has laid the way. */
static bool serve_network(const struct fields *f)
{
    if (!(fields_int(f, TAG_FLAGS, 0) & HELLO_FLAG_EGRESS)) {
        egress_end();
        return false;
    }
    return agent_dns_fd >= 0 && egress_begin() == 0;
}

int hello_handle(const uint8_t *payload, uint32_t n, const char **why)
{
    static const tag_set known = B(VERSION) | B(USER) | B(WORKDIR) | B(HOME) | B(ENV) | B(HOSTNAME) |
                                  B(RING) | B(FLAGS) | B(ENTROPY) | B(TAG) | B(MEMORY) | B(GENERATION);
    uint8_t buf[256];
    struct fw w = {buf, 0, sizeof buf, false};
    struct fields f;
    struct user u;
    bool network;
    int unknown;

    if (fields_parse(payload, n, known, &f, why))
        return -1;
    fw_int(&w, TAG_VERSION, WIRE_VERSION);
    if (fields_int(&f, TAG_VERSION, 0) != WIRE_VERSION) {
        wire_hello(&w);
        wire_finish(3);
        return 0;
    }
    *why = fields_have(&f, TAG_TAG) && f.text[TAG_TAG].len > 64 ? "HELLO has a TAG over 64 bytes" : take(&f);
    if (*why)
        return -1;
    memset(&guest.fallback, 0, sizeof guest.fallback);
    if (!strcmp(guest.default_user, "agent"))
        add_agent_user(guest.home[0] ? guest.home : "/home/agent");
    unknown = user_resolve("", 0, &u);
    make_folder(guest.workdir, unknown ? NULL : &u);
    if (!unknown)
        make_folder(u.home, &u);
    stir(&f);
    baseline_due();
    if (wire_held() && fields_int(&f, TAG_FLAGS, 0) & HELLO_FLAG_STILL)
        freeze_serve();
    else if (wire_held() || freeze_serving()) /* a restored copy: it is someone else by now, and may go on */
        freeze_end(false);
    fw_int(&w, TAG_PID, guest.self);
    fw_int(&w, TAG_UID, unknown ? -1 : (int64_t)u.uid);
    network = serve_network(&f);
    fw_int(&w, TAG_FEATURES, network ? FEATURE_EGRESS : 0);
    if (fields_have(&f, TAG_TAG)) /* by it the host knows this answer from bytes that commands made up */
        fw_bytes(&w, TAG_TAG, f.text[TAG_TAG].p, f.text[TAG_TAG].len);
    wire_hello(&w);
    if (network)
        dns_begin(); /* behind the answer: it may ask the host something at once */
    sudo_begin();
    spare_soon();
    return 0;
}
