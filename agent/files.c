/* The file operations that end in one go: STAT, MKDIR, MOVE, CHMOD, CHOWN, SYMLINK. */
#define _GNU_SOURCE
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "extras.h"
#include "linuxapi.h"
#include "path.h"
#include "records.h"

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif

bool call_begin(struct stream *s, const struct fields *f, int64_t known_flags, struct call *c)
{
    int error;

    if (!want_flags(s, f, known_flags, &c->flags) || !want_path(s, f, TAG_PATH, c->path) ||
        !want_user(s, f, &c->user))
        return false;
    error = user_enter(&c->user);
    if (error)
        stream_fail(s, error, "user", "cannot act as the user %s", c->user.name);
    return !error;
}

void call_fail(struct stream *s, int error, const char *verb, const char *path)
{
    user_leave();
    stream_fail(s, error, "path", "cannot %s %.300s: %s", verb, path, strerror(error));
}

static void call_end(struct stream *s, int error, const char *verb, const char *path)
{
    if (error) {
        call_fail(s, error, verb, path);
        return;
    }
    user_leave();
    stream_done(s);
}

int file_type(const struct stat *st)
{
    return S_ISREG(st->st_mode)   ? FILE_TYPE_FILE
           : S_ISDIR(st->st_mode) ? FILE_TYPE_DIR
           : S_ISLNK(st->st_mode) ? FILE_TYPE_SYMLINK
                                  : FILE_TYPE_OTHER;
}

void stat_fields(struct fw *w, const struct stat *st, const char *link)
{
    fw_int(w, TAG_TYPE, file_type(st));
    fw_int(w, TAG_SIZE, st->st_size);
    fw_int(w, TAG_MODE, st->st_mode & 07777);
    fw_int(w, TAG_UID, st->st_uid);
    fw_int(w, TAG_GID, st->st_gid);
    fw_int(w, TAG_MTIME_NS, (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec);
    if (link)
        fw_text(w, TAG_LINK, link);
}

bool want_mode(struct stream *s, const struct fields *f, mode_t otherwise, mode_t *mode)
{
    int64_t asked = fields_int(f, TAG_MODE, otherwise);

    *mode = (mode_t)asked;
    if (asked >= 0 && asked <= 07777)
        return true;
    stream_fail(s, EINVAL, NULL, "a mode out of range");
    return false;
}

bool want_owner(struct stream *s, const struct fields *f, struct user *owner)
{
    const char *spec = (const char *)f->text[TAG_OWNER].p;
    size_t n = f->text[TAG_OWNER].len;
    int error;

    owner->uid = (uid_t)-1;
    if (!fields_have(f, TAG_OWNER))
        return true;
    error = n ? user_resolve(spec, n, owner) : ESRCH;
    if (error)
        stream_fail(s, error, "user", "no such user in this sandbox: %.*s", (int)(n < 64 ? n : 64), spec);
    return !error;
}

static bool is_empty(int dir)
{
    _Alignas(8) char buf[1024];
    long n;

    while ((n = syscall(SYS_getdents64, dir, buf, sizeof buf)) > 0)
        for (long at = 0; at < n;) {
            const struct dirent64_ *d = (const void *)(buf + at);
            at += d->reclen;
            if (strcmp(d->name, ".") && strcmp(d->name, ".."))
                return false;
        }
    return n == 0;
}

/* Gives a folder that was just made to its owner; but if the name is another folder's by now, that stays as it is: one that
 * is not ours, or has something in it. Its fd, or -1 and an errno in error. */
static int own_folder(int dir, const char *name, const struct user *owner, int *error)
{
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0)
        *error = errno;
    else if (st.st_uid == geteuid() && is_empty(fd) && fchown(fd, owner->uid, owner->gid) < 0)
        *error = errno;
    return fd;
}

int make_parents(const char *path, mode_t mode, bool whole, const struct user *owner)
{
    int (*opener)(int, const char *, int, mode_t) = owner->uid != (uid_t)-1 ? path_open_wary : path_open;
    int at = path_open(AT_FDCWD, "/", O_PATH | O_DIRECTORY, 0), error = at < 0 ? errno : 0;

    while (at >= 0) {
        char part[256];
        size_t len;
        bool last;
        int next;

        path += strspn(path, "/");
        len = strcspn(path, "/");
        last = path[len + strspn(path + len, "/")] == 0;
        if (!len || (last && !whole))
            break;
        if (len >= sizeof part) {
            error = ENAMETOOLONG;
            break;
        }
        memcpy(part, path, len);
        part[len] = 0;
        path += len;
        next = opener(at, part, O_PATH | O_DIRECTORY, 0);
        if (next < 0 && errno == ENOENT) {
            bool made = mkdirat(at, part, last ? mode : 0755) == 0;
            if (!made && errno != EEXIST)
                error = errno;
            else if (made && owner->uid != (uid_t)-1) /* what was made here, not what somebody has put in its place */
                next = own_folder(at, part, owner, &error);
            else
                next = opener(at, part, O_PATH | O_DIRECTORY, 0);
        }
        if (next < 0 && !error)
            error = errno;
        if (last && (error == ENOTDIR || error == ENOENT))
            error = EEXIST; /* something else has the name: as mkdir itself would say */
        close(at);
        at = next;
        if (error)
            break;
    }
    if (at >= 0)
        close(at);
    return error;
}

/* Makes the name, as a file or folder, if it is free. */
static int claim(int dir, const char *name, bool folder)
{
    int fd;

    if (folder)
        return mkdirat(dir, name, 0700) < 0 ? errno : 0;
    fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno;
    close(fd);
    return 0;
}

int rename_noreplace(int from_dir, const char *from, int to_dir, const char *to)
{
    struct stat st;
    bool folder;
    int error;

    if (syscall(SYS_renameat2, from_dir, from, to_dir, to, RENAME_NOREPLACE) == 0)
        return 0;
    error = errno;
    /* gVisor's overlay takes its own mark of a removed file for a file: EEXIST where nothing is. */
    if (error == EEXIST && (fstatat(to_dir, to, &st, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT))
        return EEXIST;
    if (error != EEXIST && error != EINVAL && error != ENOSYS)
        return error;
    if (fstatat(from_dir, from, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno;
    folder = S_ISDIR(st.st_mode);
    error = claim(to_dir, to, folder);
    if (error || renameat(from_dir, from, to_dir, to) == 0)
        return error;
    error = errno;
    unlinkat(to_dir, to, folder ? AT_REMOVEDIR : 0);
    return error;
}

void op_stat(struct stream *s, const struct fields *f)
{
    struct call c;
    struct extras e;
    struct stat st;
    char link[PATH_LIMIT];
    struct fw w = record_begin();
    ssize_t n = -1;
    int fd, last;

    if (!want_extras(s, f, &e) || !call_begin(s, f, STAT_FLAG_NOFOLLOW | STAT_FLAG_NAMES | STAT_FLAG_TARGET, &c))
        return;
    e.names = c.flags & STAT_FLAG_NAMES;
    e.target = c.flags & STAT_FLAG_TARGET;
    last = c.flags & STAT_FLAG_NOFOLLOW ? O_NOFOLLOW : 0;
    fd = path_open(AT_FDCWD, c.path, O_PATH | last, 0);
    if (fd < 0 || fstat(fd, &st) < 0) {
        int error = errno;
        if (fd >= 0)
            close(fd);
        call_fail(s, error, "stat", c.path);
        return;
    }
    if (S_ISLNK(st.st_mode))
        n = readlinkat(fd, "", link, sizeof link - 1);
    close(fd);
    if (n >= 0)
        link[n] = 0;
    stat_fields(&w, &st, n >= 0 ? link : NULL);
    extras_fields(&w, &e, AT_FDCWD, c.path, c.path, &st);
    fd = extras_attributed(&e, &st) ? path_open(AT_FDCWD, c.path, O_RDONLY | O_NONBLOCK | O_NOCTTY | last, 0) : -1;
    if (fd >= 0) {
        attributes_fields(&w, (struct attributes_of){fd, NULL}, e.prefix, ATTRIBUTES_BESIDE, 0);
        close(fd);
    }
    user_leave();
    stream_close(s, &w);
}

/* As whoever has been entered; what is made is given to the owner, if there is one (its uid is not -1). 0 or an errno. */
static int make_folders(const struct call *c, mode_t mode, const struct user *owner)
{
    char name[256];
    bool slash;
    int dir, error = 0;

    if (c->flags & MKDIR_FLAG_PARENTS)
        return make_parents(c->path, mode, true, owner);
    dir = (owner->uid != (uid_t)-1 ? path_parent_wary : path_parent)(AT_FDCWD, c->path, name, &slash);
    if (dir < 0 || mkdirat(dir, name, mode) < 0) {
        error = errno;
    } else if (owner->uid != (uid_t)-1) {
        int made = own_folder(dir, name, owner, &error);
        if (made >= 0)
            close(made);
    }
    if (dir >= 0)
        close(dir);
    return error;
}

void op_mkdir(struct stream *s, const struct fields *f)
{
    struct user owner, nobody = {.uid = (uid_t)-1};
    struct call c;
    mode_t mode;
    int error;

    if (!want_mode(s, f, 0755, &mode) || !want_owner(s, f, &owner) || !call_begin(s, f, MKDIR_FLAG_PARENTS, &c))
        return;
    if (owner.uid == (uid_t)-1) {
        error = make_folders(&c, mode, &nobody);
    } else if (c.user.uid != 0 && c.user.uid != owner.uid) {
        error = EPERM;
    } else { /* as the owner, and only where he may not as who asks */
        user_leave();
        error = user_enter(&owner);
        if (!error)
            error = make_folders(&c, mode, &nobody);
        if ((error == EACCES || error == EPERM) && c.user.uid == 0) {
            user_leave();
            error = user_enter(&c.user);
            if (!error)
                error = make_folders(&c, mode, &owner);
        }
    }
    call_end(s, error, "make folder", c.path);
}

void op_move(struct stream *s, const struct fields *f)
{
    struct call c;
    char target[2 * PATH_LIMIT], from[256], to[256];
    bool slash;
    int from_dir, to_dir = -1, error = 0;

    if (!want_path(s, f, TAG_PATH2, target) || !call_begin(s, f, MOVE_FLAG_REPLACE, &c))
        return;
    from_dir = path_parent(AT_FDCWD, c.path, from, &slash);
    if (from_dir >= 0)
        to_dir = path_parent(AT_FDCWD, target, to, &slash);
    if (to_dir < 0)
        error = errno;
    else if (c.flags & MOVE_FLAG_REPLACE)
        error = renameat(from_dir, from, to_dir, to) < 0 ? errno : 0;
    else
        error = rename_noreplace(from_dir, from, to_dir, to);
    if (from_dir >= 0)
        close(from_dir);
    if (to_dir >= 0)
        close(to_dir);
    call_end(s, error, "move", c.path);
}

/* An O_PATH fd cannot be chmod-ed, and /proc may be out of reach: so the way is checked for magic
 * links first, and then walked by name. It stays within the user's rights either way. */
void op_chmod(struct stream *s, const struct fields *f)
{
    struct call c;
    mode_t mode;
    int fd, error = 0;

    if (!want_mode(s, f, 0, &mode) || !call_begin(s, f, 0, &c))
        return;
    fd = path_open(AT_FDCWD, c.path, O_PATH, 0);
    if (fd < 0 || fchmodat(AT_FDCWD, c.path, mode, 0) < 0)
        error = errno;
    if (fd >= 0)
        close(fd);
    if (error == EPERM) { /* a fence may forbid it by name (the process rung does), but not for an open file */
        fd = path_open(AT_FDCWD, c.path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
        if (fd >= 0 && fchmod(fd, mode) == 0)
            error = 0;
        if (fd >= 0)
            close(fd);
    }
    call_end(s, error, "change the mode of", c.path);
}

void op_chown(struct stream *s, const struct fields *f)
{
    struct call c;
    struct user owner;
    const char *spec = (const char *)f->text[TAG_OWNER].p;
    size_t n = f->text[TAG_OWNER].len;
    bool with_group = n && memchr(spec, ':', n);
    int fd, error;

    error = n ? user_resolve(spec, n, &owner) : ESRCH;
    if (error) {
        stream_fail(s, error, "user", "no such user in this sandbox: %.*s", (int)(n < 64 ? n : 64), spec);
        return;
    }
    if (!call_begin(s, f, 0, &c))
        return;
    fd = path_open(AT_FDCWD, c.path, O_PATH, 0);
    if (fd < 0 || fchownat(fd, "", owner.uid, with_group || owner.listed ? owner.gid : (gid_t)-1, AT_EMPTY_PATH) < 0)
        error = errno;
    if (fd >= 0)
        close(fd);
    call_end(s, error, "change the owner of", c.path);
}

void op_symlink(struct stream *s, const struct fields *f)
{
    struct call c;
    char text[PATH_LIMIT], name[256];
    size_t n = f->text[TAG_PATH2].len;
    bool slash;
    int dir, error = 0;

    if (n == 0 || n >= sizeof text) {
        stream_fail(s, n ? ENAMETOOLONG : EINVAL, "path", "a link's text must have 1 to 4095 bytes");
        return;
    }
    memcpy(text, f->text[TAG_PATH2].p, n);
    text[n] = 0;
    if (!call_begin(s, f, 0, &c))
        return;
    dir = path_parent(AT_FDCWD, c.path, name, &slash);
    if (dir < 0 || symlinkat(text, dir, name) < 0)
        error = errno;
    if (dir >= 0)
        close(dir);
    call_end(s, error, "link", c.path);
}
