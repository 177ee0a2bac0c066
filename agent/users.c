/* Users and groups: see users.h. The files belong to the sandbox, so they are read as hostile:
 * bounded, regular files only, and a line that makes no sense is skipped. */
#define _GNU_SOURCE
#include "users.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guest.h"
#include "path.h"

#define SMALL_MAX (1u << 20)

/* Cuts the next line, then fields by ':'. Returns the number of fields found, at most `max`. */
struct span {
    const char *p;
    size_t n;
};

static bool next_line(const char **at, const char *end, struct span *line)
{
    const char *nl;

    if (*at >= end)
        return false;
    nl = memchr(*at, '\n', (size_t)(end - *at));
    line->p = *at;
    line->n = (size_t)((nl ? nl : end) - *at);
    *at = nl ? nl + 1 : end;
    return true;
}

static int split(struct span line, struct span *out, int max)
{
    int count = 0;

    while (count < max) {
        const char *colon = memchr(line.p, ':', line.n);
        out[count].p = line.p;
        out[count].n = colon ? (size_t)(colon - line.p) : line.n;
        count++;
        if (!colon)
            break;
        line.n -= (size_t)(colon + 1 - line.p);
        line.p = colon + 1;
    }
    return count;
}

static bool same(struct span s, const char *text)
{
    return strlen(text) == s.n && !memcmp(s.p, text, s.n);
}

/* The largest id is "no change" to the kernel: not a user. */
static bool number(struct span s, uint32_t *out)
{
    uint64_t v = 0;

    if (!s.n || s.n > 10)
        return false;
    for (size_t i = 0; i < s.n; i++) {
        if (s.p[i] < '0' || s.p[i] > '9')
            return false;
        v = v * 10 + (uint64_t)(s.p[i] - '0');
    }
    if (v >= UINT32_MAX)
        return false;
    *out = (uint32_t)v;
    return true;
}

static bool copy(char *out, size_t cap, struct span s)
{
    if (s.n >= cap || memchr(s.p, 0, s.n))
        return false;
    memcpy(out, s.p, s.n);
    out[s.n] = 0;
    return true;
}

bool passwd_find(const char *text, size_t n, const char *name, uid_t uid, struct user *out)
{
    const char *at = text, *end = text + n;
    struct span line, f[7];

    while (text && next_line(&at, end, &line)) {
        uint32_t u, g;
        if (split(line, f, 7) < 7 || !number(f[2], &u) || !number(f[3], &g))
            continue;
        if (name ? !same(f[0], name) : u != uid)
            continue;
        if (!copy(out->name, sizeof out->name, f[0]) || !copy(out->home, sizeof out->home, f[5]) ||
            !copy(out->shell, sizeof out->shell, f[6]))
            continue;
        out->uid = u;
        out->gid = g;
        out->listed = true;
        return true;
    }
    return false;
}

bool group_find(const char *text, size_t n, const char *name, gid_t *gid)
{
    const char *at = text, *end = text + n;
    struct span line, f[4];
    uint32_t g;

    while (text && next_line(&at, end, &line))
        if (split(line, f, 4) >= 3 && same(f[0], name) && number(f[2], &g)) {
            *gid = g;
            return true;
        }
    return false;
}

bool group_find_id(const char *text, size_t n, gid_t gid, char *name, size_t cap)
{
    const char *at = text, *end = text + n;
    struct span line, f[4];
    uint32_t g;

    while (text && next_line(&at, end, &line))
        if (split(line, f, 4) >= 3 && number(f[2], &g) && g == gid && copy(name, cap, f[0]))
            return true;
    return false;
}

static bool lists(struct span members, const char *name)
{
    size_t n = strlen(name);

    while (n && members.n) {
        const char *comma = memchr(members.p, ',', members.n);
        size_t len = comma ? (size_t)(comma - members.p) : members.n;
        if (len == n && !memcmp(members.p, name, n))
            return true;
        if (!comma)
            break;
        members.n -= len + 1;
        members.p = comma + 1;
    }
    return false;
}

void group_members(const char *text, size_t n, struct user *out)
{
    const char *at = text, *end = text + n;
    struct span line, f[4];
    uint32_t g;

    out->groups[0] = out->gid;
    out->ngroups = 1;
    while (text && out->ngroups < USER_GROUPS && next_line(&at, end, &line))
        if (split(line, f, 4) == 4 && number(f[2], &g) && g != out->gid && lists(f[3], out->name))
            out->groups[out->ngroups++] = g;
}

char *read_small(const char *path, size_t *n)
{
    int fd = path_open(AT_FDCWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    struct stat st;
    char *text = NULL;
    size_t len = 0;

    if (fd < 0)
        return NULL;
    if (!fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_size <= SMALL_MAX)
        text = malloc((size_t)st.st_size + 1);
    while (text && len < (size_t)st.st_size) {
        ssize_t got = read(fd, text + len, (size_t)st.st_size - len);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        len += (size_t)got;
    }
    close(fd);
    *n = len;
    return text;
}

static void nobody_known(struct user *out, uid_t uid)
{
    memset(out, 0, sizeof *out);
    out->uid = uid;
    snprintf(out->name, sizeof out->name, "%u", (unsigned)uid);
    strcpy(out->home, "/");
    strcpy(out->shell, "/bin/sh");
}

static bool resolve_name(const char *passwd, size_t n, const char *name, struct user *out)
{
    uint32_t uid;

    if (passwd_find(passwd, n, name, 0, out))
        return true;
    if (guest.fallback.name[0] && !strcmp(name, guest.fallback.name)) {
        *out = guest.fallback;
        return true;
    }
    if (!strcmp(name, "root")) { /* also where no file says so: an image of one program */
        nobody_known(out, 0);
        strcpy(out->name, name);
        return true;
    }
    if (!number((struct span){name, strlen(name)}, &uid))
        return false;
    if (!passwd_find(passwd, n, NULL, uid, out)) {
        /* As container engines do: an unlisted uid belongs to group 0. */
        nobody_known(out, uid);
    }
    return true;
}

int user_resolve(const char *spec, size_t n, struct user *out)
{
    char name[256], *group;
    size_t passwd_len = 0, group_len = 0;
    char *passwd, *groups;
    int error = 0;
    bool spec_is_default;

    memset(out, 0, sizeof *out);
    if (!n) {
        spec = guest.default_user;
        n = strlen(spec);
    }
    spec_is_default = same((struct span){spec, n}, guest.default_user);
    if (!copy(name, sizeof name, (struct span){spec, n}))
        return ESRCH;
    group = strchr(name, ':');
    if (group)
        *group++ = 0;
    passwd = read_small("/etc/passwd", &passwd_len);
    groups = read_small("/etc/group", &group_len);
    if (!resolve_name(passwd, passwd_len, name, out)) {
        error = ESRCH;
    } else if (group) {
        uint32_t gid;
        if (number((struct span){group, strlen(group)}, &gid))
            out->gid = gid;
        else if (!group_find(groups, group_len, group, &out->gid))
            error = ESRCH;
    }
    group_members(groups, group_len, out);
    if (!out->shell[0])
        strcpy(out->shell, "/bin/sh");
    if (guest.home[0] && spec_is_default)
        strcpy(out->home, guest.home);
    if (!out->home[0])
        strcpy(out->home, "/");
    if (guest.no_users) {
        out->uid = guest.uid;
        out->gid = guest.gid;
        out->ngroups = 0;
    }
    free(passwd);
    free(groups);
    return error;
}

bool user_differs(const struct user *u)
{
    if (guest.no_users)
        return false;
    return u->uid != guest.uid || u->gid != guest.gid;
}

/* Raw calls: libc's wrappers may signal threads, and setfsuid is missing in gVisor, so the effective
 * ids are changed. Real and saved ids stay ours: the user can neither signal nor trace us. */
static bool entered;

int user_enter(const struct user *u)
{
    if (!user_differs(u))
        return 0;
    entered = true;
    if (syscall(SYS_setgroups, u->ngroups, u->groups) < 0 ||
        syscall(SYS_setresgid, -1, u->gid, -1) < 0 || syscall(SYS_setresuid, -1, u->uid, -1) < 0) {
        int error = errno;
        user_leave();
        return error;
    }
    return 0;
}

void user_leave(void)
{
    if (!entered)
        return;
    entered = false;
    if (syscall(SYS_setresuid, -1, guest.uid, -1) < 0 || syscall(SYS_setresgid, -1, guest.gid, -1) < 0)
        _exit(1); /* going on with the wrong ids would be worse */
    syscall(SYS_setgroups, 0, NULL);
    prctl(PR_SET_DUMPABLE, 0); /* a change of ids may have set it, by fs.suid_dumpable */
}
