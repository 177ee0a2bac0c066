/* CHANGES: the files that differ from the image, as records; see docs/wire.md and layers.h.
 *
 * Three kinds of walk: over the layers where writes go (complete: O(changes)), over one folder (everything in it is an
 * addition), and over the whole root where the layer cannot be seen (a listing, from which the host finds out the rest).
 * Nothing is followed, no other filesystem is entered, and what is kept in memory does not grow with the tree. */
#define _GNU_SOURCE
#include "changes.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "guest.h"
#include "path.h"

#define ENTRIES_PER_TURN 300
#define OWN_FOLDER "run/sloplet"

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
        changes_failed(c, errno);
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

    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !changes_name(c, name))
        return; /* gone since */
    if ((c->layers || c->listing) && (!strcmp(changes_path, OWN_FOLDER) || in_volume(changes_path)))
        return;
    if (S_ISDIR(st.st_mode)) {
        if (st.st_dev == c->dev && !(c->listing && untouched(c, &st)))
            enter(c, dir, name, &st);
        return;
    }
    if (st.st_dev != (c->listing ? c->upper : c->dev) || (c->layers && baseline_same(changes_path, &st)))
        return;
    if (c->layer.overlay && is_whiteout(&st))
        tell_removed(c);
    else if (S_ISLNK(st.st_mode))
        tell_symlink(c, dir, name, &st);
    else if (S_ISREG(st.st_mode))
        tell_file(c, dir, name, &st);
    else
        tell(c, &st, NULL, NULL, 0, NULL);
}

/* Takes over c->layer. */
static bool begin_walk(struct changes *c)
{
    struct stat st;
    int fd = c->layer.fd;

    if (fstat(fd, &st) < 0 || !walk_open(&c->walk, fd, false)) {
        changes_failed(c, errno ? errno : ENOMEM);
        return false;
    }
    c->walking = true;
    c->dev = st.st_dev;
    if (changes_name(c, ""))
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
        strncpy(changes_path, gone, sizeof changes_path - 1);
        tell_removed(c);
    } else if (!c->walking) {
        if (!c->layers)
            return false;
        if (!layer_open(c->next_layer++, &c->layer)) {
            if (errno)
                changes_failed(c, errno);
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
                changes_path[0] = 0;
                changes_failed(c, c->walk.first_error);
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
        if (c->attributes && chdir("/") < 0)
            changes_failed(c, errno); /* a layer's folder must not be held */
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

    if (!want_flags(s, f, CHANGES_FLAG_CONTENTS | CHANGES_FLAG_ATTRIBUTES, &flags) || (named && !want_path(s, f, TAG_PATH, folder)))
        return;
    c = calloc(1, sizeof *c);
    if (!c) {
        stream_fail(s, ENOMEM, NULL, "the agent has no memory");
        return;
    }
    c->file = c->names = -1;
    c->contents = flags & CHANGES_FLAG_CONTENTS;
    c->attributes = flags & CHANGES_FLAG_ATTRIBUTES;
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
