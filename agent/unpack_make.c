/* Making files for UNPACK: see unpack.h. Names are walked part by part from the root and never through a link. */
#define _GNU_SOURCE
#include "unpack.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attributes.h"
#include "guest.h"
#include "path.h"

#define KEEP_FOLDERS 4096 /* deeper ones than this get no times */

char unpack_wrong[256];

int unpack_protocol(struct unpack *u, const char *why)
{
    u->why = why;
    return EPROTO;
}

/* One part down, made if missing. The fd, or -1. */
static int descend(int dir, const char *part)
{
    const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    int fd = openat(dir, part, flags);

    if (fd < 0 && errno == ENOENT && mkdirat(dir, part, 0755) == 0)
        fd = openat(dir, part, flags);
    if (fd < 0 && errno == EACCES)
        fd = openat(dir, part, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return fd;
}

/* The folder that holds the last part of a path, kept in u->dir, and that part. 0 or an errno. */
int unpack_find(struct unpack *u, const char *path, char *name)
{
    const char *slash = strrchr(path, '/');
    size_t above = slash ? (size_t)(slash - path) : 0;
    char *kept;
    int dir;

    strcpy(name, slash ? slash + 1 : path);
    if (u->dir >= 0 && strlen(u->dir_path) == above && !memcmp(u->dir_path, path, above))
        return 0;
    dir = fcntl(u->root, F_DUPFD_CLOEXEC, 3);
    for (size_t at = 0; at < above && dir >= 0;) {
        char part[256];
        size_t len = strcspn(path + at, "/");
        int next;

        memcpy(part, path + at, len);
        part[len] = 0;
        next = descend(dir, part);
        close(dir);
        dir = next;
        at += len + 1;
    }
    if (dir < 0)
        return errno == ENOTDIR || errno == ELOOP ? ELOOP : errno;
    kept = strndup(path, above);
    if (!kept) {
        close(dir);
        return ENOMEM;
    }
    if (u->dir >= 0)
        close(u->dir);
    free(u->dir_path);
    u->dir = dir;
    u->dir_path = kept;
    return 0;
}

void unpack_forget(struct unpack *u)
{
    if (u->dir >= 0)
        close(u->dir);
    free(u->dir_path);
    u->dir = -1;
    u->dir_path = NULL;
}

/* Where the agent is not the sandbox's init, changing modes, owners and times may be forbidden: then it is as it is. */
static int forgive(int result)
{
    return result == 0 || (!guest.pid1 && (errno == EPERM || errno == EACCES)) ? 0 : errno;
}

/* Owner first: that clears the bits of mode that matter. 0 or an errno. */
static int dress(int fd, const struct facts *f)
{
    struct timespec times[2] = {f->mtime, f->mtime};
    struct stat st;
    int error;

    if (fstat(fd, &st) < 0)
        return errno;
    if ((st.st_uid != f->uid || st.st_gid != f->gid) && (error = forgive(fchown(fd, f->uid, f->gid))))
        return error;
    if ((error = forgive(fchmod(fd, f->mode))))
        return error;
    return forgive(futimens(fd, times));
}

/* The innermost folder of the stack is done. 0 or an errno. */
int unpack_leave(struct unpack *u)
{
    struct folder *top = &u->stack[--u->depth];
    char name[256];
    int error, fd;

    u->at[top->len] = 0;
    strncpy(unpack_wrong, u->at, sizeof unpack_wrong - 1);
    if (!top->len) {
        fd = openat(u->root, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    } else {
        error = unpack_find(u, u->at, name);
        if (error)
            return error;
        fd = openat(u->dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    }
    if (fd < 0)
        return errno;
    error = dress(fd, &top->facts);
    close(fd);
    if (u->depth)
        u->at[u->stack[u->depth - 1].len] = 0;
    return error;
}

/* Leaves the folders that this path is not in. 0 or an errno. */
int unpack_leave_to(struct unpack *u, const char *path)
{
    while (u->depth) {
        size_t len = u->stack[u->depth - 1].len;
        int error;

        if (!len || (!strncmp(u->at, path, len) && path[len] == '/'))
            break;
        error = unpack_leave(u);
        if (error)
            return error;
    }
    return 0;
}

int unpack_push(struct unpack *u, const char *path, const struct facts *f)
{
    size_t len = strlen(path);

    if (u->depth == KEEP_FOLDERS)
        return 0;
    if (u->depth == u->cap) {
        size_t cap = u->cap ? u->cap * 2 : 16;
        struct folder *stack = realloc(u->stack, cap * sizeof *stack);
        if (!stack)
            return ENOMEM;
        u->stack = stack;
        u->cap = cap;
    }
    if (len + 1 > u->at_cap) {
        char *at = realloc(u->at, len + 256);
        if (!at)
            return ENOMEM;
        u->at = at;
        u->at_cap = len + 256;
    }
    memcpy(u->at, path, len + 1);
    u->stack[u->depth++] = (struct folder){len, *f};
    return 0;
}

/* The file being written is complete. 0 or an errno. */
int unpack_finish_file(struct unpack *u)
{
    int error;

    if (u->file < 0)
        return 0;
    strcpy(unpack_wrong, u->name);
    error = ftruncate(u->file, u->facts.size) < 0 ? errno : dress(u->file, &u->facts);
    if (!error && renameat(u->file_dir, u->temp, u->file_dir, u->name) < 0)
        error = errno;
    if (error)
        unlinkat(u->file_dir, u->temp, 0);
    close(u->file);
    close(u->file_dir);
    u->file = u->file_dir = -1;
    return error;
}

int unpack_attributes(int fd, const struct fields *f)
{
    int error = attributes_set(fd, f);

    errno = error;
    return forgive(error ? -1 : 0);
}

static int begin_file(struct unpack *u, const struct fields *fields, const char *name, const struct facts *f)
{
    u->file_dir = fcntl(u->dir, F_DUPFD_CLOEXEC, 3);
    if (u->file_dir < 0)
        return errno;
    temp_name(u->temp);
    u->file = openat(u->file_dir, u->temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, guest.pid1 ? 0600 : f->mode);
    if (u->file < 0) {
        int error = errno;
        close(u->file_dir);
        u->file_dir = -1;
        return error;
    }
    strcpy(u->name, name);
    u->facts = *f;
    u->written = 0;
    return unpack_attributes(u->file, fields);
}

int unpack_piece(struct unpack *u, const struct fields *f)
{
    int64_t offset = f->num[TAG_OFFSET];
    const uint8_t *p = f->text[TAG_BODY].p;
    size_t n = f->text[TAG_BODY].len;

    if (u->file < 0 || offset < u->written || offset > u->facts.size || (int64_t)n > u->facts.size - offset)
        return unpack_protocol(u, "content that belongs to no file, or lies outside it");
    u->written = offset + (int64_t)n;
    u->bytes += (int64_t)n;
    while (n) {
        ssize_t done = pwrite(u->file, p, n, offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return errno;
        p += done;
        offset += done;
        n -= (size_t)done;
    }
    return 0;
}

/* A folder is kept if it is there and may be: its entries are the image's. */
static int make_folder_here(struct unpack *u, const struct fields *fields, const char *path, const char *name, const struct facts *f)
{
    int fd, error = 0;

    if (mkdirat(u->dir, name, guest.pid1 ? 0700 : f->mode | 0700) < 0 && errno != EEXIST)
        return errno;
    if (fields_have(fields, TAG_ATTRIBUTE)) {
        fd = openat(u->dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        error = fd < 0 ? forgive(-1) : unpack_attributes(fd, fields);
        if (fd >= 0)
            close(fd);
    }
    return error ? error : unpack_push(u, path, f);
}

static int make_symlink(struct unpack *u, const struct fields *f, const char *name, const struct facts *facts)
{
    struct timespec times[2] = {facts->mtime, facts->mtime};
    char text[PATH_LIMIT];
    uint32_t n = fields_have(f, TAG_LINK) ? f->text[TAG_LINK].len : 0;
    struct stat st;
    int error = 0;

    if (!n || n >= sizeof text)
        return unpack_protocol(u, "a symlink without a text, or with one too long");
    memcpy(text, f->text[TAG_LINK].p, n);
    text[n] = 0;
    if (symlinkat(text, u->dir, name) < 0 || fstatat(u->dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno;
    if (st.st_uid != facts->uid || st.st_gid != facts->gid)
        error = forgive(fchownat(u->dir, name, facts->uid, facts->gid, AT_SYMLINK_NOFOLLOW));
    return error ? error : forgive(utimensat(u->dir, name, times, AT_SYMLINK_NOFOLLOW));
}

/* gVisor's overlay gives a file to whoever links it, which no other kernel does. 0 or an errno. */
static int keep_owner(int dir, const char *name, const struct facts *facts)
{
    struct stat st;

    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno;
    if (st.st_uid == facts->uid && st.st_gid == facts->gid)
        return 0;
    if (forgive(fchownat(dir, name, facts->uid, facts->gid, AT_SYMLINK_NOFOLLOW)))
        return errno;
    return forgive(fchmodat(dir, name, facts->mode, 0)); /* a change of owner clears bits of it */
}

static int make_link(struct unpack *u, const struct fields *f, const char *name, const struct facts *facts)
{
    char *other = fields_have(f, TAG_PATH2) ? strndup((const char *)f->text[TAG_PATH2].p, f->text[TAG_PATH2].len) : NULL;
    char target[256];
    int dir = fcntl(u->dir, F_DUPFD_CLOEXEC, 3), error;

    if (!other || !path_inside(other, strlen(other)) || !strcmp(other, "."))
        error = unpack_protocol(u, "a hard link to no name");
    else
        error = dir < 0 ? errno : unpack_find(u, other, target);
    if (!error && linkat(u->dir, target, dir, name, 0) < 0)
        error = errno;
    if (!error)
        error = keep_owner(dir, name, facts);
    if (dir >= 0)
        close(dir);
    free(other);
    return error;
}

int unpack_make(struct unpack *u, const struct fields *f, const char *path, const char *name, const struct facts *facts)
{
    switch (facts->type) {
    case FILE_TYPE_DIR:
        return make_folder_here(u, f, path, name, facts);
    case FILE_TYPE_SYMLINK:
        return make_symlink(u, f, name, facts);
    case FILE_TYPE_FILE:
        return facts->flags & CHANGE_FLAG_HARD_LINK ? make_link(u, f, name, facts) : begin_file(u, f, name, facts);
    default:
        return 0; /* removed; or a socket or pipe, which is nothing without whoever served it */
    }
}
