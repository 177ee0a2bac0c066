/* The records of CHANGES: see changes.h and docs/wire.md. */
#define _GNU_SOURCE
#include "changes.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "linuxapi.h"

#define PIECE 61440

char changes_path[NAME_MAX_BYTES + 512];

void changes_failed(struct changes *c, int error)
{
    if (c->error)
        return;
    c->error = error;
    strncpy(c->wrong, changes_path, sizeof c->wrong - 1);
}

/* Puts together where the layer shows, the folder being walked, and a name in it ("": the folder itself). */
bool changes_name(struct changes *c, const char *name)
{
    const char *part[3] = {c->layer.at, NULL, name};
    size_t len[3] = {strlen(c->layer.at), 0, strlen(name)}, n = 0;

    part[1] = walk_prefix(&c->walk, &len[1]);
    changes_path[0] = 0;
    if (len[0] + len[1] + len[2] + 3 > NAME_MAX_BYTES) {
        changes_failed(c, ENAMETOOLONG);
        return false;
    }
    for (int i = 0; i < 3; i++) {
        if (!len[i])
            continue;
        if (n)
            changes_path[n++] = '/';
        memcpy(changes_path + n, part[i], len[i]);
        n += len[i];
    }
    changes_path[n] = 0;
    return true;
}

static struct fw begin_record(void)
{
    struct fw w = record_begin();

    fw_text(&w, TAG_NAME, *changes_path ? changes_path : ".");
    return w;
}

static void end_record(struct changes *c, const struct fw *w)
{
    if (!record_add(&c->records, w))
        changes_failed(c, ENOMEM);
}

/* `reserve`: bytes of the record that are for what follows. */
static void tell_attributes(const struct changes *c, struct fw *w, const struct attributes_of *of, size_t reserve)
{
    if (c->attributes && of)
        attributes_fields(w, *of, "user.", ATTRIBUTES_CHANGED, reserve);
}

void tell(struct changes *c, const struct stat *st, const struct attributes_of *of, const char *link, int64_t flags, const char *same_as)
{
    struct fw w = begin_record();

    stat_fields(&w, st, link);
    tell_attributes(c, &w, of, 64); /* no PATH2: what is the same as another has been told with that */
    if (flags)
        fw_int(&w, TAG_FLAGS, flags);
    if (same_as)
        fw_text(&w, TAG_PATH2, same_as);
    end_record(c, &w);
    c->count++;
}

void tell_removed(struct changes *c)
{
    struct fw w = begin_record();

    fw_int(&w, TAG_TYPE, FILE_TYPE_REMOVED);
    end_record(c, &w);
    c->count++;
}

void tell_symlink(struct changes *c, int dir, const char *name, const struct stat *st)
{
    char link[PATH_LIMIT];
    ssize_t n = readlinkat(dir, name, link, sizeof link - 1);

    if (n < 0)
        return; /* gone since */
    link[n] = 0;
    tell(c, st, NULL, link, 0, NULL);
}

/* Gone, or replaced by a link or another type, while we looked. */
bool vanished(int error)
{
    return error == ENOENT || error == ELOOP || error == ENOTDIR || error == ENXIO;
}

/* Without root's rights, an owner can read what is his only after allowing it to himself. */
bool lend_rights(int dir, const char *name, const struct stat *st, mode_t more)
{
    return errno == EACCES && st->st_uid == geteuid() && (st->st_mode & more) != more &&
           fchmodat(dir, name, (st->st_mode & 07777) | more, 0) == 0;
}

void take_back_rights(int dir, const char *name, const struct stat *st)
{
    int error = errno;

    fchmodat(dir, name, st->st_mode & 07777, 0);
    errno = error;
}

static int open_file(int dir, const char *name, const struct stat *st)
{
    const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    int fd = openat(dir, name, flags);

    if (fd < 0 && lend_rights(dir, name, st, 0400)) {
        fd = openat(dir, name, flags);
        take_back_rights(dir, name, st);
    }
    return fd;
}

/* Where holes cannot be asked for, a file larger than the disk would be read for years: there is nothing in most of it. */
static bool readable(int fd, const struct stat *st)
{
    struct statvfs fs;

    return lseek(fd, 0, SEEK_DATA) >= 0 || errno == ENXIO || fstatvfs(fd, &fs) < 0 || !fs.f_blocks ||
           (uint64_t)st->st_size <= (uint64_t)fs.f_blocks * fs.f_frsize;
}

static bool begin_content(struct changes *c, int dir, const char *name, struct stat *st)
{
    c->file = open_file(dir, name, st);
    if (c->file < 0 && vanished(errno))
        return false;
    if (c->file < 0 || fstat(c->file, st) < 0)
        changes_failed(c, errno);
    else if (!readable(c->file, st))
        changes_failed(c, EFBIG);
    c->offset = 0;
    c->size = st->st_size;
    return !c->error;
}

void tell_file(struct changes *c, int dir, const char *name, struct stat *st)
{
    const char *same_as = st->st_nlink > 1 ? links_find(&c->links, st) : NULL;
    struct attributes_of of = {-1, name};

    if (!same_as && c->contents && st->st_size && !begin_content(c, dir, name, st))
        return;
    if (c->attributes && fchdir(dir) < 0)
        changes_failed(c, errno);
    tell(c, st, same_as ? NULL : &of, NULL, same_as ? CHANGE_FLAG_HARD_LINK : 0, same_as);
    if (st->st_nlink > 1 && !same_as)
        links_remember(&c->links, st, changes_path);
}

/* The next piece of the file at hand, holes left out. */
void tell_piece(struct changes *c)
{
    static uint8_t piece[PIECE];
    struct fw w = record_begin();
    off_t at = lseek(c->file, c->offset, SEEK_DATA);
    ssize_t n = 0;

    if (at < 0 && errno != ENXIO)
        at = c->offset; /* a filesystem that knows no holes */
    if (at >= 0 && at < c->size) {
        off_t hole = lseek(c->file, at, SEEK_HOLE);
        int64_t most = (hole > at && hole < c->size ? hole : c->size) - at;
        do
            n = pread(c->file, piece, most < PIECE ? (size_t)most : PIECE, at);
        while (n < 0 && errno == EINTR);
    }
    if (n > 0 && (piece[0] || memcmp(piece, piece + 1, (size_t)n - 1))) { /* nothing but zeros: as good as a hole */
        fw_int(&w, TAG_OFFSET, at);
        fw_bytes(&w, TAG_BODY, piece, (size_t)n);
        end_record(c, &w);
        c->bytes += n;
    }
    if (n > 0)
        c->offset = at + n;
    if (n < 0)
        changes_failed(c, errno);
    if (n <= 0 || c->offset >= c->size) {
        close(c->file);
        c->file = -1;
    }
}

/* The names in the folder being walked, some of them: one record. `st`: the first of its records. */
void tell_names(struct changes *c, const struct stat *st)
{
    long n = syscall(SYS_getdents64, c->names, c->names_buf, NAMES_BUF);
    struct fw w;

    if (!changes_name(c, ""))
        return;
    w = begin_record();
    if (st) {
        stat_fields(&w, st, NULL);
        tell_attributes(c, &w, &(struct attributes_of){c->names, NULL}, NAMES_BUF + 64); /* an ENTRY is shorter than a dirent */
        c->count++;
    }
    for (long at = 0; at < n;) {
        const struct dirent64_ *d = (const void *)(c->names_buf + at);
        at += d->reclen;
        if (strcmp(d->name, ".") && strcmp(d->name, ".."))
            fw_text(&w, TAG_ENTRY, d->name);
    }
    if (n > 0 || st)
        end_record(c, &w);
    if (n <= 0) {
        close(c->names);
        c->names = -1;
    }
}

static bool is_opaque(int fd)
{
    char value[2];

    return (fgetxattr(fd, "user.overlay.opaque", value, sizeof value) == 1 ||
            fgetxattr(fd, "trusted.overlay.opaque", value, sizeof value) == 1) &&
           value[0] == 'y';
}

/* A folder that the walk has entered, or begins with. */
void tell_folder(struct changes *c, const struct stat *st)
{
    if (c->listing) {
        c->names = openat(walk_fd(&c->walk), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (c->names < 0)
            changes_failed(c, errno);
        else
            tell_names(c, st);
    } else if (!c->layers || !baseline_same(changes_path, st)) {
        struct attributes_of of = {walk_fd(&c->walk), NULL};
        tell(c, st, &of, NULL, c->layer.overlay && is_opaque(walk_fd(&c->walk)) ? CHANGE_FLAG_OPAQUE : 0, NULL);
    }
}
