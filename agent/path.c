/* Path resolution: see path.h. */
#define _GNU_SOURCE
#include "path.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#define NO_MAGICLINKS 0x02 /* RESOLVE_NO_MAGICLINKS: musl ships no linux/openat2.h */
#define PROC_MAGIC 0x9fa0
#define MAX_LINKS 40

struct how {
    uint64_t flags, mode, resolve;
};

static bool on_proc(int fd)
{
    struct statfs fs;

    return !fstatfs(fd, &fs) && fs.f_type == PROC_MAGIC;
}

/* One part below dirfd, never a link. */
static int step(int dirfd, const char *name, int flags, mode_t mode)
{
    int fd;

    do
        fd = openat(dirfd, name, flags | O_NOFOLLOW | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* The text of a link, if root has made it: of the very link that was looked at. Bytes, or -1 with errno. */
static ssize_t roots_text(int dirfd, const char *name, char *out, size_t cap)
{
    int fd = step(dirfd, name, O_PATH, 0), error;
    struct stat st;
    ssize_t n = -1;

    if (fd < 0)
        return -1;
    errno = ELOOP;
    if (fstat(fd, &st) == 0 && S_ISLNK(st.st_mode) && st.st_uid == 0)
        n = readlinkat(fd, "", out, cap);
    error = errno;
    close(fd);
    errno = error;
    return n;
}

static int link_text(int dirfd, const char *name, char *out, size_t cap, bool wary)
{
    ssize_t n = wary ? roots_text(dirfd, name, out, cap - 1) : readlinkat(dirfd, name, out, cap - 1);

    if (n < 0)
        return errno;
    out[n] = 0;
    /* "self" and "net" are plain links; magic ones read like "/a/path" or "pipe:[1]" */
    if (on_proc(dirfd) && (out[0] == '/' || strchr(out, ':')))
        return ELOOP;
    return 0;
}

/* Part by part, links read as text, so there is no jump: for kernels without openat2, and for who is wary of links. */
static int walk(int dirfd, const char *path, int flags, mode_t mode, bool wary)
{
    char rest[4096], text[4096];
    int links = 0, at, error = 0;

    if (strlen(path) >= sizeof rest) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(rest, path);
    at = path[0] == '/' ? step(AT_FDCWD, "/", O_PATH | O_DIRECTORY, 0)
                        : step(dirfd, ".", O_PATH | O_DIRECTORY, 0);
    while (at >= 0) {
        char part[256], *from = rest + strspn(rest, "/");
        size_t len = strcspn(from, "/");
        bool last = from[len + strspn(from + len, "/")] == 0;
        bool slash = from[len] == '/';
        struct stat st;
        int next = -1;

        if (len >= sizeof part) {
            error = ENAMETOOLONG;
            break;
        }
        memcpy(part, from, len);
        part[len] = 0;
        if (!len) { /* the root, or a trailing slash */
            next = openat(at, ".", flags | O_CLOEXEC, mode);
            error = next < 0 ? errno : 0;
            close(at);
            at = next;
            break;
        }
        if (fstatat(at, part, &st, AT_SYMLINK_NOFOLLOW) < 0)
            st.st_mode = 0;
        if (S_ISLNK(st.st_mode) && (!last || slash || !(flags & O_NOFOLLOW))) {
            size_t tail = strlen(from + len);
            error = ++links > MAX_LINKS ? ELOOP : link_text(at, part, text, sizeof text, wary);
            if (!error && strlen(text) + tail >= sizeof rest)
                error = ENAMETOOLONG;
            if (error)
                break;
            memmove(rest + strlen(text), from + len, tail + 1);
            memcpy(rest, text, strlen(text));
            if (text[0] == '/') {
                close(at);
                at = step(AT_FDCWD, "/", O_PATH | O_DIRECTORY, 0);
            }
            continue;
        }
        if (last)
            next = step(at, part, flags | (slash ? O_DIRECTORY : 0), mode);
        else
            next = step(at, part, O_PATH | O_DIRECTORY, 0);
        error = next < 0 ? errno : 0;
        close(at);
        at = next;
        if (last || next < 0)
            break;
        memmove(rest, from + len, strlen(from + len) + 1);
    }
    if (error) {
        if (at >= 0)
            close(at);
        errno = error;
        return -1;
    }
    return at;
}

int path_open(int dirfd, const char *path, int flags, mode_t mode)
{
    static int missing; /* openat2 is not there */
    struct how how = {(uint64_t)(flags | O_CLOEXEC), mode, NO_MAGICLINKS};
    long fd;

    if (!(flags & O_CREAT))
        how.mode = 0;
    while (!missing) {
        fd = syscall(SYS_openat2, dirfd, path, &how, sizeof how);
        if (fd < 0 && errno == EINTR)
            continue;
        if (fd < 0 && errno == ENOSYS) {
            missing = 1;
            break;
        }
        return (int)fd;
    }
    return walk(dirfd, path, flags, mode, false);
}

int path_open_wary(int dirfd, const char *path, int flags, mode_t mode)
{
    return walk(dirfd, path, flags, mode, true);
}

static int open_parent(int dirfd, const char *path, char *name, bool *slash, bool wary)
{
    char parent[4096];
    size_t end = strlen(path), start;

    *slash = end > 0 && path[end - 1] == '/';
    while (end > 0 && path[end - 1] == '/')
        end--;
    start = end;
    while (start > 0 && path[start - 1] != '/')
        start--;
    if (end - start > 255 || start >= sizeof parent) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(name, path + start, end - start);
    name[end - start] = 0;
    if (!strcmp(name, ".") || !strcmp(name, "..") || !*path) {
        errno = EINVAL;
        return -1;
    }
    if (end == 0)
        strcpy(name, ".");
    if (start == 0 && end > 0)
        strcpy(parent, ".");
    else if (end == 0)
        strcpy(parent, "/");
    else {
        memcpy(parent, path, start);
        parent[start] = 0;
    }
    return (wary ? path_open_wary : path_open)(dirfd, parent, O_PATH | O_DIRECTORY, 0);
}

int path_parent(int dirfd, const char *path, char *name, bool *slash)
{
    return open_parent(dirfd, path, name, slash, false);
}

int path_parent_wary(int dirfd, const char *path, char *name, bool *slash)
{
    return open_parent(dirfd, path, name, slash, true);
}

bool path_inside(const char *p, size_t n)
{
    if (n == 1 && p[0] == '.')
        return true;
    for (size_t at = 0; at <= n;) {
        size_t len = 0;
        while (at + len < n && p[at + len] != '/')
            len++;
        if (!len || len > 255 || (p[at] == '.' && (len == 1 || (len == 2 && p[at + 1] == '.'))))
            return false;
        at += len + 1;
    }
    return true;
}
