/* CHANGES: the files that differ from the image, as records; see docs/wire.md and layers.h.
 *
 * Three kinds of walk: over the layers where writes go (complete: O(changes)), over one folder (everything in it is an
 * addition), and over the whole root where the layer cannot be seen (a listing, from which the host finds out the rest).
 * Nothing is followed, no other filesystem is entered, and what is kept in memory does not grow with the tree. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "files.h"
#include "guest.h"
#include "layers.h"
#include "links.h"
#include "path.h"
#include "records.h"
#include "tree.h"

#define PIECE 61440
#define NAMES_BUF 16384
#define NAME_MAX_BYTES (RECORD_MAX / 4)
#define ENTRIES_PER_TURN 300
#define OWN_FOLDER "run/sloplet"

struct changes {
    struct walk walk;
    struct records records;
    struct links links;
    struct layer layer;
    bool walking, contents, listing, layers;
    int next_layer;
    size_t next_gone;
    dev_t dev, upper;  /* of the folders to enter; of files that are not the image's (a listing) */
    off_t folder_unit; /* a listing: folders that were written to have a multiple of it as size and no blocks; 0: who knows */
    int file; /* whose content is being told, or -1 */
    int64_t offset, size;
    int names; /* the folder whose entries are being told, or -1 */
    char *names_buf;
    int64_t count, bytes;
    int error;
    char wrong[256]; /* what the error is about */
};

static char path[NAME_MAX_BYTES + 512]; /* of the entry at hand */

static void failed(struct changes *c, int error)
{
    if (c->error)
        return;
    c->error = error;
    strncpy(c->wrong, path, sizeof c->wrong - 1);
}

/* Puts together where the layer shows, the folder being walked, and a name in it ("": the folder itself). */
static bool name_entry(struct changes *c, const char *name)
{
    const char *part[3] = {c->layer.at, NULL, name};
    size_t len[3] = {strlen(c->layer.at), 0, strlen(name)}, n = 0;

    part[1] = walk_prefix(&c->walk, &len[1]);
    path[0] = 0;
    if (len[0] + len[1] + len[2] + 3 > NAME_MAX_BYTES) {
        failed(c, ENAMETOOLONG);
        return false;
    }
    for (int i = 0; i < 3; i++) {
        if (!len[i])
            continue;
        if (n)
            path[n++] = '/';
        memcpy(path + n, part[i], len[i]);
        n += len[i];
    }
    path[n] = 0;
    return true;
}

static struct fw begin_record(void)
{
    struct fw w = record_begin();

    fw_text(&w, TAG_NAME, *path ? path : ".");
    return w;
}

static void end_record(struct changes *c, const struct fw *w)
{
    if (!record_add(&c->records, w))
        failed(c, ENOMEM);
}

static void tell(struct changes *c, const struct stat *st, const char *link, int64_t flags, const char *same_as)
{
    struct fw w = begin_record();

    stat_fields(&w, st, link);
    if (flags)
        fw_int(&w, TAG_FLAGS, flags);
    if (same_as)
        fw_text(&w, TAG_PATH2, same_as);
    end_record(c, &w);
    c->count++;
}

static void tell_removed(struct changes *c)
{
    struct fw w = begin_record();

    fw_int(&w, TAG_TYPE, FILE_TYPE_REMOVED);
    end_record(c, &w);
    c->count++;
}

static void tell_symlink(struct changes *c, int dir, const char *name, const struct stat *st)
{
    char link[PATH_LIMIT];
    ssize_t n = readlinkat(dir, name, link, sizeof link - 1);

    if (n < 0)
        return; /* gone since */
    link[n] = 0;
    tell(c, st, link, 0, NULL);
}

/* Gone, or replaced by a link or another type, while we looked. */
static bool vanished(int error)
{
    return error == ENOENT || error == ELOOP || error == ENOTDIR || error == ENXIO;
}

/* Without root's rights, an owner can read what is his only after allowing it to himself. */
static bool lend_rights(int dir, const char *name, const struct stat *st, mode_t more)
{
    return errno == EACCES && st->st_uid == geteuid() && (st->st_mode & more) != more &&
           fchmodat(dir, name, (st->st_mode & 07777) | more, 0) == 0;
}

static void take_back_rights(int dir, const char *name, const struct stat *st)
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

static void tell_file(struct changes *c, int dir, const char *name, struct stat *st)
{
    const char *same_as = st->st_nlink > 1 ? links_meet(&c->links, st, path) : NULL;

    if (same_as || !c->contents || !st->st_size) {
        tell(c, st, NULL, same_as ? CHANGE_FLAG_HARD_LINK : 0, same_as);
        return;
    }
    c->file = open_file(dir, name, st);
    if (c->file < 0 && vanished(errno))
        return;
    if (c->file < 0 || fstat(c->file, st) < 0) {
        failed(c, errno);
        return;
    }
    c->offset = 0;
    c->size = st->st_size;
    tell(c, st, NULL, 0, NULL);
}

/* The next piece of the file at hand, holes left out. */
static void tell_piece(struct changes *c)
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
        failed(c, errno);
    if (n <= 0 || c->offset >= c->size) {
        close(c->file);
        c->file = -1;
    }
}

/* The names in the folder being walked, some of them: one record. `st`: the first of its records. */
static void tell_names(struct changes *c, const struct stat *st)
{
    long n = syscall(SYS_getdents64, c->names, c->names_buf, NAMES_BUF);
    struct fw w;

    if (!name_entry(c, ""))
        return;
    w = begin_record();
    if (st) {
        stat_fields(&w, st, NULL);
        c->count++;
    }
    for (long at = 0; at < n;) {
        const struct dirent64_ {
            uint64_t ino;
            int64_t off;
            uint16_t reclen;
            uint8_t type;
            char name[];
        } *d = (const void *)(c->names_buf + at);
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
static void tell_folder(struct changes *c, const struct stat *st)
{
    if (c->listing) {
        c->names = openat(walk_fd(&c->walk), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (c->names < 0)
            failed(c, errno);
        else
            tell_names(c, st);
    } else if (!c->layers || !baseline_same(path, st)) {
        tell(c, st, NULL, c->layer.overlay && is_opaque(walk_fd(&c->walk)) ? CHANGE_FLAG_OPAQUE : 0, NULL);
    }
}

static void enter(struct changes *c, int dir, const char *name, const struct stat *st)
{
    bool entered = walk_enter(&c->walk);

    if (!entered && lend_rights(dir, name, st, 0700)) {
        entered = walk_enter(&c->walk);
        take_back_rights(dir, name, st);
    }
    if (entered)
        tell_folder(c, st);
    else if (!vanished(errno) && !(c->listing && errno == EACCES)) /* what root may not read is the image's */
        failed(c, errno);
}

/* In a listing: a folder that is the image's with all that is in it. A change anywhere makes gVisor copy every folder above
 * it to its own file system, and that one's folders are told by their size. */
static bool untouched(const struct changes *c, const struct stat *st)
{
    return c->folder_unit && (st->st_blocks || st->st_size % c->folder_unit);
}

static void visit(struct changes *c, int dir, const char *name)
{
    struct stat st;

    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !name_entry(c, name))
        return; /* gone since */
    if ((c->layers || c->listing) && !strcmp(path, OWN_FOLDER))
        return;
    if (S_ISDIR(st.st_mode)) {
        if (st.st_dev == c->dev && !(c->listing && untouched(c, &st)))
            enter(c, dir, name, &st);
        return;
    }
    if (st.st_dev != (c->listing ? c->upper : c->dev) || (c->layers && baseline_same(path, &st)))
        return;
    if (c->layer.overlay && is_whiteout(&st))
        tell_removed(c);
    else if (S_ISLNK(st.st_mode))
        tell_symlink(c, dir, name, &st);
    else if (S_ISREG(st.st_mode))
        tell_file(c, dir, name, &st);
    else
        tell(c, &st, NULL, 0, NULL);
}

/* Takes over c->layer. */
static bool begin_walk(struct changes *c)
{
    struct stat st;
    int fd = c->layer.fd;

    if (fstat(fd, &st) < 0 || !walk_open(&c->walk, fd, false)) {
        failed(c, errno ? errno : ENOMEM);
        return false;
    }
    c->walking = true;
    c->dev = st.st_dev;
    if (name_entry(c, ""))
        tell_folder(c, &st);
    return true;
}

/* One small step. False at the end. */
static bool step(struct changes *c)
{
    const char *name, *gone;
    uint8_t type;
    int dir;

    if (c->file >= 0) {
        tell_piece(c);
    } else if (c->names >= 0) {
        tell_names(c, NULL);
    } else if (c->layers && (gone = baseline_gone(&c->next_gone))) {
        strncpy(path, gone, sizeof path - 1);
        tell_removed(c);
    } else if (!c->walking) {
        if (!c->layers)
            return false;
        if (!layer_open(c->next_layer++, &c->layer)) {
            if (errno)
                failed(c, errno);
            return false;
        }
        return begin_walk(c);
    } else {
        switch (walk_next(&c->walk, &dir, &name, &type)) {
        case WALK_ENTRY:
            visit(c, dir, name);
            break;
        case WALK_LEFT:
            break;
        case WALK_END:
            if (c->walk.first_error) {
                path[0] = 0;
                failed(c, c->walk.first_error);
            }
            walk_close(&c->walk);
            c->walking = false;
            break;
        }
    }
    return true;
}

static enum pump changes_pump(struct stream *s)
{
    struct changes *c = s->ctx;
    uint8_t buf[64];
    struct fw w = {buf, 0, sizeof buf, false};
    bool more = true;

    for (int i = 0; i < ENTRIES_PER_TURN && more && !c->error; i++) {
        if (records_pending(&c->records) >= RECORDS_ENOUGH)
            records_flush(&c->records, s);
        if (records_pending(&c->records) >= RECORDS_ENOUGH)
            return records_wait(s);
        more = step(c);
    }
    if (c->error) {
        stream_fail(s, c->error, "path", "cannot tell the changes at /%s: %s", c->wrong, strerror(c->error));
        return PUMP_GONE;
    }
    records_flush(&c->records, s);
    if (records_pending(&c->records))
        return records_wait(s);
    if (more)
        return PUMP_AGAIN;
    fw_int(&w, TAG_COUNT, c->count);
    fw_int(&w, TAG_BYTES, c->bytes);
    stream_close(s, &w);
    return PUMP_GONE;
}

static void changes_release(struct stream *s)
{
    struct changes *c = s->ctx;

    if (c->walking)
        walk_close(&c->walk);
    if (c->file >= 0)
        close(c->file);
    if (c->names >= 0)
        close(c->names);
    links_free(&c->links);
    records_free(&c->records);
    free(c->names_buf);
    free(c);
}

/* How files and folders that are written now look: some are made to see. */
static void probe_in(struct changes *c, int dir)
{
    struct stat empty, one, file;
    int fd;

    if (fstat(dir, &empty) < 0 || (fd = openat(dir, "f", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600)) < 0)
        return;
    if (fstat(fd, &file) == 0 && fstat(dir, &one) == 0) {
        off_t unit = one.st_size - empty.st_size;
        c->upper = file.st_dev;
        if (unit > 8 && empty.st_size == 2 * unit && !empty.st_blocks && !one.st_blocks)
            c->folder_unit = unit;
    }
    close(fd);
    unlinkat(dir, "f", 0);
}

/* The root's time is put back afterwards. */
static void probe(struct changes *c, const struct stat *root)
{
    char name[32] = "/";
    struct timespec times[2] = {root->st_atim, root->st_mtim};
    int dir;

    c->upper = root->st_dev;
    temp_name(name + 1);
    if (mkdir(name, 0700) < 0)
        return;
    dir = open(name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (dir >= 0) {
        probe_in(c, dir);
        close(dir);
    }
    rmdir(name);
    utimensat(AT_FDCWD, "/", times, 0);
}

/* Where there is neither a layer nor a folder named: the whole root. 0 or an errno. */
static int begin(struct changes *c, const char *folder)
{
    c->layers = !folder && layers_known();
    c->listing = !folder && !c->layers;
    if (c->layers)
        return 0;
    if (c->listing && !guest.pid1)
        return EOPNOTSUPP;
    c->layer = (struct layer){path_open(AT_FDCWD, folder ? folder : "/", O_RDONLY | O_DIRECTORY | O_NONBLOCK, 0), "", false};
    if (c->layer.fd < 0)
        return errno;
    if (c->listing) {
        struct stat st;
        c->names_buf = malloc(NAMES_BUF);
        if (!c->names_buf || fstat(c->layer.fd, &st) < 0) {
            close(c->layer.fd);
            return ENOMEM;
        }
        probe(c, &st);
    }
    return begin_walk(c) ? 0 : c->error;
}

void op_changes(struct stream *s, const struct fields *f)
{
    static const struct stream_ops ops = {.pump = changes_pump, .release = changes_release};
    char folder[2 * PATH_LIMIT];
    uint8_t buf[16];
    struct fw w = {buf, 0, sizeof buf, false};
    bool named = fields_have(f, TAG_PATH);
    struct changes *c;
    int64_t flags;
    int error;

    if (!want_flags(s, f, CHANGES_FLAG_CONTENTS, &flags) || (named && !want_path(s, f, TAG_PATH, folder)))
        return;
    c = calloc(1, sizeof *c);
    if (!c) {
        stream_fail(s, ENOMEM, NULL, "the agent has no memory");
        return;
    }
    c->file = c->names = -1;
    c->contents = flags & CHANGES_FLAG_CONTENTS;
    s->ctx = c;
    s->ops = &ops;
    error = begin(c, named ? folder : NULL);
    if (error == EOPNOTSUPP) {
        stream_fail(s, error, NULL, "this sandbox has no root of its own: name a folder");
        return;
    }
    if (error) {
        stream_fail(s, error, "path", "cannot look at %s: %s", named ? folder : "/", strerror(error));
        return;
    }
    fw_int(&w, TAG_FLAGS, c->listing ? 0 : LISTING_FLAG_COMPLETE);
    stream_reply(s, &w);
    stream_ready(s);
}
