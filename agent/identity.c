/* Name and generation: see identity.h. */
#define _GNU_SOURCE
#include "identity.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "guest.h"
#include "path.h"
#include "users.h"

bool generation_valid(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] <= ' ' || p[i] > '~')
            return false;
    return n >= 1 && n <= 64;
}

/* In place, so that whoever has the file open or watches it sees the change. False if it is not a file we may write. */
static bool overwrite(const char *path, mode_t mode, const char *text, size_t n)
{
    int fd = path_open(AT_FDCWD, path, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, mode);
    struct stat st;
    bool done;

    if (fd < 0)
        return false;
    done = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && pwrite(fd, text, n, 0) == (ssize_t)n &&
           ftruncate(fd, (off_t)n) == 0;
    close(fd);
    return done;
}

bool identity_generation(const struct fields *f)
{
    char line[128];
    int n;

    if (fields_have(f, TAG_GENERATION)) {
        size_t len = f->text[TAG_GENERATION].len;
        if (strlen(guest.generation) != len || memcmp(guest.generation, f->text[TAG_GENERATION].p, len)) {
            memcpy(guest.generation, f->text[TAG_GENERATION].p, len);
            guest.generation[len] = 0;
            guest.generations++;
        }
    }
    if (!guest.pid1 || !guest.generations)
        return false;
    mkdir("/run", 0755);
    mkdir("/run/sloplet", 0755);
    n = snprintf(line, sizeof line, "%lld %s\n", (long long)guest.generations, guest.generation);
    return overwrite(GENERATION_FILE, 0644, line, (size_t)n);
}

static bool blank(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* Puts `name` for the word `old` throughout a text. The new text (malloc'd), or NULL if nothing changed. */
static char *rename_word(const char *text, size_t n, const char *old, const char *name, size_t *out_len)
{
    size_t old_len = strlen(old), name_len = strlen(name), used = 0;
    bool changed = false;
    char *out = malloc(n / (old_len + 1) * (name_len + 1) + n + name_len + 1);

    for (size_t i = 0; out && i < n;) {
        bool begins = i == 0 || blank(text[i - 1]), fits = n - i >= old_len && !memcmp(text + i, old, old_len);
        if (begins && fits && (i + old_len == n || blank(text[i + old_len]))) {
            memcpy(out + used, name, name_len);
            used += name_len;
            i += old_len;
            changed = true;
        } else {
            out[used++] = text[i++];
        }
    }
    *out_len = used;
    if (changed)
        return out;
    free(out);
    return NULL;
}

void identity_hostname(const char *name)
{
    struct utsname old;
    size_t n = 0, len;
    char *hosts, *fresh;
    char line[80];

    if (uname(&old) < 0 || !strcmp(old.nodename, name) || sethostname(name, strlen(name)) < 0)
        return; /* not ours to set on every rung */
    len = (size_t)snprintf(line, sizeof line, "%s\n", name);
    overwrite("/etc/hostname", 0644, line, len);
    hosts = read_small("/etc/hosts", &n);
    if (!hosts || !old.nodename[0] || !strcmp(old.nodename, "localhost")) {
        free(hosts);
        return;
    }
    fresh = rename_word(hosts, n, old.nodename, name, &len);
    if (fresh)
        overwrite("/etc/hosts", 0644, fresh, len);
    free(fresh);
    free(hosts);
}
