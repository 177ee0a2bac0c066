/* WRITE: a file's bytes from a stream, to a temporary file beside the target or to the file itself. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "files.h"
#include "loop.h"
#include "path.h"

struct writing {
    struct source out; /* the open file; watched only where it can be full */
    struct stream *stream;
    struct user user, owner; /* who writes; whom what is new is given to, if `giving` */
    bool giving;
    int dir;                   /* holds name and temp */
    char name[256], temp[24];  /* temp is empty when written in place */
    mode_t mode;
    bool exclusive, keep_owner;
    uid_t uid;
    gid_t gid;
    int64_t bytes;
    uint8_t *pending; /* what a pipe or device has not taken yet */
    size_t pending_len;
};

static void write_failed(struct stream *s, int error)
{
    stream_fail(s, error, "path", "writing failed: %s", strerror(error));
}

/* Where system calls that change modes are refused (the process rung), the mode given at creation must do. */
static bool has_mode(int fd, mode_t mode)
{
    struct stat st;

    return !fstat(fd, &st) && (st.st_mode & 07777) == mode;
}

static void write_finish(struct stream *s)
{
    struct writing *w = s->ctx;
    uint8_t buf[16];
    struct fw answer = {buf, 0, sizeof buf, false};
    int error = 0;

    if (w->temp[0]) {
        error = user_enter(&w->user);
        if (!error && w->keep_owner && fchown(w->out.fd, w->uid, w->gid) < 0)
            w->keep_owner = false; /* only root may give files away */
        if (!error && w->giving && !w->keep_owner && fchown(w->out.fd, w->owner.uid, w->owner.gid) < 0)
            error = errno;
        if (!error && !has_mode(w->out.fd, w->mode) && fchmod(w->out.fd, w->mode) < 0)
            error = errno;
        if (!error && w->exclusive)
            error = rename_noreplace(w->dir, w->temp, w->dir, w->name);
        else if (!error && renameat(w->dir, w->temp, w->dir, w->name) < 0)
            error = errno;
        user_leave();
        if (!error)
            w->temp[0] = 0;
    }
    if (error) {
        write_failed(s, error);
        return;
    }
    fw_int(&answer, TAG_BYTES, w->bytes);
    stream_close(s, &answer);
}

/* Writes as much as goes. Bytes written, or -1 with errno. */
static ssize_t write_some(int fd, const uint8_t *p, size_t n)
{
    size_t done = 0;

    while (done < n) {
        ssize_t got = write(fd, p + done, n - done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EAGAIN)
            break;
        if (got < 0)
            return -1;
        done += (size_t)got;
    }
    return (ssize_t)done;
}

static void on_room(struct source *src, uint32_t events)
{
    struct writing *w = OWNER(src, struct writing, out);
    ssize_t n = write_some(src->fd, w->pending, w->pending_len);
    struct stream *s = w->stream;

    (void)events;
    if (n < 0) {
        write_failed(s, errno);
        return;
    }
    w->bytes += n;
    w->pending_len -= (size_t)n;
    memmove(w->pending, w->pending + n, w->pending_len);
    stream_consumed(s, (uint32_t)n);
    if (w->pending_len)
        return;
    loop_want(src, 0);
    if (s->host_ended)
        write_finish(s);
}

static void write_data(struct stream *s, const uint8_t *p, uint32_t n)
{
    struct writing *w = s->ctx;
    ssize_t done = w->pending_len ? 0 : write_some(w->out.fd, p, n);
    uint8_t *more;

    if (done < 0) {
        write_failed(s, errno);
        return;
    }
    w->bytes += done;
    stream_consumed(s, (uint32_t)done);
    if ((uint32_t)done == n)
        return;
    more = realloc(w->pending, w->pending_len + n - (size_t)done);
    if (!more) {
        write_failed(s, ENOMEM);
        return;
    }
    memcpy(more + w->pending_len, p + done, n - (size_t)done);
    w->pending = more;
    w->pending_len += n - (size_t)done;
    loop_want(&w->out, EPOLLOUT);
}

static void write_end(struct stream *s)
{
    struct writing *w = s->ctx;

    if (!w->pending_len)
        write_finish(s);
}

static void write_release(struct stream *s)
{
    struct writing *w = s->ctx;

    loop_close(&w->out);
    if (w->temp[0] && user_enter(&w->user) == 0) {
        unlinkat(w->dir, w->temp, 0);
        user_leave();
    }
    if (w->dir >= 0)
        close(w->dir);
    free(w->pending);
    free(w);
}

/* Follows links at the last part by their text, until w->dir and w->name are where the file is or
 * will be. Who acts for another follows none there, and above only root's: he would be led to what the other may not write.
 * 0 or an errno. */
static int find_target(struct writing *w, const char *path, struct stat *st)
{
    char text[PATH_LIMIT];
    int base = AT_FDCWD;

    for (int links = 0; links < 40; links++) {
        bool slash;
        ssize_t n;
        int dir = (w->giving ? path_parent_wary : path_parent)(base, path, w->name, &slash);

        if (base >= 0)
            close(base);
        w->dir = base = dir;
        if (dir < 0)
            return errno;
        if (slash)
            return EISDIR;
        if (fstatat(dir, w->name, st, AT_SYMLINK_NOFOLLOW) < 0) {
            st->st_mode = 0;
            return errno == ENOENT ? 0 : errno;
        }
        if (!S_ISLNK(st->st_mode))
            return 0;
        if (w->giving)
            return ELOOP;
        /* one hop through the kernel tells a magic link from a plain one */
        n = path_open(dir, w->name, O_PATH, 0);
        if (n < 0 && errno != ENOENT && errno != EACCES)
            return errno;
        if (n >= 0)
            close((int)n);
        n = readlinkat(dir, w->name, text, sizeof text - 1);
        if (n < 0)
            return errno;
        text[n] = 0;
        path = text;
    }
    return ELOOP;
}

void temp_name(char *out)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz234567";
    uint8_t bytes[10];

    if (syscall(SYS_getrandom, bytes, sizeof bytes, 1 /* GRND_NONBLOCK */) != (long)sizeof bytes) {
        int64_t seed = now_ns(); /* O_EXCL protects, not the name */
        memcpy(bytes, &seed, 8);
        bytes[8] = bytes[9] = 0;
    }
    strcpy(out, ".sloplet-");
    for (size_t i = 0; i < sizeof bytes; i++)
        out[9 + i] = letters[bytes[i] % 32];
    out[9 + sizeof bytes] = 0;
}

static int open_in_place(struct writing *w, int flags)
{
    return openat(w->dir, w->name, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW | O_CLOEXEC | flags, w->mode);
}

static int open_failed(struct writing *w, int fd, bool made)
{
    int error = errno;

    if (made)
        unlinkat(w->dir, w->name, 0);
    close(fd);
    errno = error;
    return -1;
}

/* The file itself. A new one is the user's, or whom it is given to: said also where it is so by itself, so that watchers see
 * one change of attributes. Another's file that may be written stays his where only root could take it. Emptied last: a write
 * that is refused leaves it as it was. The fd, or -1 with errno. */
static int open_and_own(struct writing *w, int64_t flags, bool mode_given)
{
    int append = flags & WRITE_FLAG_APPEND ? O_APPEND : 0;
    const struct user *to = w->giving ? &w->owner : &w->user;
    mode_t mask = umask(0);
    int fd = open_in_place(w, O_CREAT | O_EXCL | append);
    bool made = fd >= 0;
    struct stat st;

    umask(mask);
    if (!made && errno == EEXIST && !w->exclusive)
        fd = open_in_place(w, append);
    if (fd < 0)
        return -1;
    if (fstat(fd, &st) < 0)
        return open_failed(w, fd, made);
    if (made || (!w->giving && (st.st_uid != to->uid || st.st_gid != to->gid)))
        if (fchown(fd, to->uid, to->gid) < 0 && w->giving)
            return open_failed(w, fd, made);
    if ((mode_given || made) && !has_mode(fd, w->mode) && fchmod(fd, w->mode) < 0)
        return open_failed(w, fd, made);
    if (!made && !append && ftruncate(fd, 0) < 0)
        return open_failed(w, fd, made);
    if (mode_given && !has_mode(fd, w->mode)) /* emptying may clear setuid */
        fchmod(fd, w->mode);
    return fd;
}

/* Opens what will be written. The fd, or -1 with errno. */
static int open_target(struct writing *w, int64_t flags, bool mode_given, const struct stat *old)
{
    bool exists = old->st_mode != 0, regular = S_ISREG(old->st_mode);
    mode_t mask;
    int fd;

    errno = EISDIR;
    if (S_ISDIR(old->st_mode))
        return -1;
    errno = EEXIST;
    if (exists && w->exclusive)
        return -1;
    if (exists && !mode_given)
        w->mode = old->st_mode & 07777;
    if (flags & WRITE_FLAG_IN_PLACE && (!exists || regular))
        return open_and_own(w, flags, mode_given);
    if ((flags & WRITE_FLAG_APPEND) || (exists && !regular))
        return open_in_place(w, (exists ? 0 : O_CREAT) | (w->exclusive ? O_EXCL : 0) |
                                    (flags & WRITE_FLAG_APPEND ? O_APPEND : 0));
    if (exists) {
        /* Replacing by rename must not need fewer rights than writing. */
        fd = open_in_place(w, 0);
        if (fd < 0 && errno != ETXTBSY)
            return -1;
        if (fd >= 0)
            close(fd);
        w->keep_owner = true;
        w->uid = old->st_uid;
        w->gid = old->st_gid;
    }
    temp_name(w->temp);
    mask = umask(0);
    fd = openat(w->dir, w->temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, w->mode);
    umask(mask);
    if (fd < 0) {
        int error = errno;
        w->temp[0] = 0;
        /* A file we may write in a folder we may not: in place, or not at all. */
        if (exists && (error == EACCES || error == EPERM || error == EROFS))
            return open_in_place(w, O_TRUNC);
        errno = error;
    }
    return fd;
}

/* As whoever has been entered. The fd, or -1 with errno. */
static int begin(struct writing *w, const struct call *c, bool mode_given)
{
    struct user nobody = {.uid = (uid_t)-1};
    struct stat old;
    int fd = -1, error = 0;

    if (c->flags & WRITE_FLAG_PARENTS)
        error = make_parents(c->path, 0755, false, w->giving ? &w->owner : &nobody);
    if (!error)
        error = find_target(w, c->path, &old);
    if (!error) {
        fd = open_target(w, c->flags, mode_given, &old);
        error = fd < 0 ? errno : 0;
    }
    if (error && w->dir >= 0) {
        close(w->dir);
        w->dir = -1;
    }
    errno = error;
    return fd;
}

/* As the owner, and only where he may not as who asks, who gives it to him. The fd, or -1 with errno. */
static int begin_for(struct writing *w, const struct call *c, bool mode_given)
{
    mode_t mode = w->mode;
    int fd;

    if (c->user.uid != 0 && c->user.uid != w->owner.uid) {
        errno = EPERM;
        return -1;
    }
    user_leave();
    errno = user_enter(&w->owner);
    w->user = w->owner;
    fd = errno ? -1 : begin(w, c, mode_given);
    if (fd >= 0 || (errno != EACCES && errno != EPERM) || c->user.uid != 0)
        return fd;
    user_leave();
    errno = user_enter(&c->user);
    w->user = c->user;
    w->mode = mode;
    w->giving = true;
    return errno ? -1 : begin(w, c, mode_given);
}

void op_write(struct stream *s, const struct fields *f)
{
    static const struct stream_ops ops = {.data = write_data, .end = write_end, .release = write_release};
    struct call c;
    struct writing *w = calloc(1, sizeof *w);
    mode_t mode;
    int fd, error;

    if (!w) {
        stream_fail(s, ENOMEM, NULL, "the agent has no memory");
        return;
    }
    if (!want_mode(s, f, 0644, &mode) || !want_owner(s, f, &w->owner) ||
        !call_begin(s, f, WRITE_FLAG_APPEND | WRITE_FLAG_EXCLUSIVE | WRITE_FLAG_PARENTS | WRITE_FLAG_IN_PLACE, &c)) {
        free(w);
        return;
    }
    w->out.fd = w->dir = -1;
    w->stream = s;
    w->user = c.user;
    w->mode = mode;
    w->exclusive = c.flags & WRITE_FLAG_EXCLUSIVE;
    fd = (w->owner.uid == (uid_t)-1 ? begin : begin_for)(w, &c, fields_have(f, TAG_MODE));
    error = fd < 0 ? errno : 0;
    user_leave();
    if (error) {
        free(w);
        call_fail(s, error, "write", c.path);
        return;
    }
    loop_add(&w->out, fd, 0, on_room);
    s->ctx = w;
    s->ops = &ops;
}
