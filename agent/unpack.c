/* UNPACK: makes the files that records of CHANGES tell of; see docs/wire.md.
 *
 * Names are walked part by part from the root and never through a link. Records come depth first, so the folders above the
 * one at hand are a stack: each gets its mode and times when what is in it is done. Bytes wait in a buffer that the stream's
 * credit bounds, and are worked off in turns: a removal may be long. */
#define _GNU_SOURCE
#include "unpack.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attributes.h"
#include "guest.h"
#include "layers.h"
#include "path.h"
#include "records.h"

#define B(tag) TAG_BIT(TAG_##tag)
#define RECORDS_PER_TURN 64

/* Begins to remove what is at a name. 0: it is gone (or `removing` says that it will be); or an errno. */
static int clear(struct unpack *u, const char *name)
{
    int fd;

    if (unlinkat(u->dir, name, 0) == 0 || errno == ENOENT)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return errno;
    if (unlinkat(u->dir, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
        return 0;
    if (errno != ENOTEMPTY && errno != EEXIST)
        return errno;
    fd = openat(u->dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return errno;
    if (!walk_open(&u->walk, fd, true))
        return ENOMEM;
    u->removing = true;
    return 0;
}

static bool facts_of(const struct fields *f, struct facts *out)
{
    int64_t mode = fields_int(f, TAG_MODE, 0), uid = fields_int(f, TAG_UID, 0), gid = fields_int(f, TAG_GID, 0);
    int64_t mtime = fields_int(f, TAG_MTIME_NS, 0), part = mtime % 1000000000;

    out->type = fields_int(f, TAG_TYPE, -1);
    out->size = fields_int(f, TAG_SIZE, 0);
    out->flags = fields_int(f, TAG_FLAGS, 0);
    out->mode = (mode_t)mode;
    out->uid = (uid_t)uid;
    out->gid = (gid_t)gid;
    out->mtime.tv_nsec = part < 0 ? part + 1000000000 : part;
    out->mtime.tv_sec = (mtime - out->mtime.tv_nsec) / 1000000000;
    return out->type >= FILE_TYPE_FILE && out->type <= FILE_TYPE_REMOVED && out->size >= 0 && mode >= 0 && mode <= 07777 &&
           uid >= 0 && uid < UINT32_MAX && gid >= 0 && gid < UINT32_MAX &&
           !(out->flags & ~(int64_t)(CHANGE_FLAG_OPAQUE | CHANGE_FLAG_HARD_LINK));
}

/* Whether what is at the name must go before the record can be obeyed. */
static bool in_the_way(struct unpack *u, const char *name, const struct facts *f)
{
    struct stat st;

    if (fstatat(u->dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return false;
    if (f->type == FILE_TYPE_OTHER) /* nothing is made, but what it took the place of must not come back */
        return S_ISREG(st.st_mode) || S_ISDIR(st.st_mode) || S_ISLNK(st.st_mode);
    if (f->type == FILE_TYPE_DIR)
        return !S_ISDIR(st.st_mode) || f->flags & CHANGE_FLAG_OPAQUE;
    return f->type != FILE_TYPE_FILE || f->flags & CHANGE_FLAG_HARD_LINK || S_ISDIR(st.st_mode);
}

/* A record about a name. `cleared`: what was in its way is gone. 0 or an errno; with `removing` set it comes again. */
static int obey(struct unpack *u, const struct fields *f, const char *path, bool cleared)
{
    struct facts facts;
    char name[256];
    int error;

    if (!facts_of(f, &facts) || !attributes_good(f))
        return unpack_protocol(u, "a file that cannot be");
    if (!strcmp(path, ".")) {
        if (facts.type != FILE_TYPE_DIR || u->depth)
            return unpack_protocol(u, "a root that is no folder, or comes late");
        u->count++;
        error = unpack_attributes(u->root, f);
        return error ? error : unpack_push(u, "", &facts);
    }
    error = unpack_leave_to(u, path);
    if (!error)
        error = unpack_find(u, path, name);
    if (!error && !cleared && in_the_way(u, name, &facts)) {
        error = clear(u, name);
        if (error || u->removing)
            return error;
    }
    if (!error && cleared && unlinkat(u->dir, name, AT_REMOVEDIR) < 0 && errno != ENOENT && facts.type != FILE_TYPE_DIR)
        error = errno; /* a folder with a mount point in it cannot go */
    if (!error)
        error = unpack_make(u, f, path, name, &facts);
    u->count += !error;
    return error;
}

/* One record. 0 or an errno. */
static int record(struct unpack *u, const uint8_t *p, size_t n, bool cleared)
{
    static const tag_set known = B(NAME) | B(TYPE) | B(SIZE) | B(MODE) | B(UID) | B(GID) | B(MTIME_NS) | B(LINK) | B(FLAGS) |
                                 B(PATH2) | B(OFFSET) | B(BODY) | B(ATTRIBUTE) | B(COUNT);
    static char path[RECORD_MAX + 1];
    struct fields f;
    const char *why;
    int error;

    if (fields_parse(p, n, known, &f, &why))
        return unpack_protocol(u, why);
    if (!fields_have(&f, TAG_NAME) && u->left_out)
        return 0;
    if (!fields_have(&f, TAG_NAME))
        return fields_have(&f, TAG_OFFSET) && fields_have(&f, TAG_BODY) ? unpack_piece(u, &f) : unpack_protocol(u, "a record of nothing");
    if (!path_inside((const char *)f.text[TAG_NAME].p, f.text[TAG_NAME].len))
        return unpack_protocol(u, "a NAME that is none");
    if (!cleared) {
        error = unpack_finish_file(u);
        if (error)
            return error;
    }
    memcpy(path, f.text[TAG_NAME].p, f.text[TAG_NAME].len);
    path[f.text[TAG_NAME].len] = 0;
    strncpy(unpack_wrong, path, sizeof unpack_wrong - 1);
    u->left_out = in_volume(path);
    return u->left_out ? 0 : obey(u, &f, path, cleared);
}

/* Goes on with a removal. 0 or an errno; `removing` is false when it is done. */
static int remove_on(struct unpack *u)
{
    int64_t count = 0;
    int error;

    if (tree_remove_some(&u->walk, &count))
        return 0;
    error = u->walk.first_error;
    walk_close(&u->walk);
    u->removing = false;
    unpack_forget(u); /* it may have been in there */
    return error == EBUSY ? 0 : error; /* a mount point stays, and what is around it is kept */
}

/* Works off some of what has come. 0 or an errno. */
static int work(struct unpack *u, struct stream *s)
{
    bool cleared = false;
    size_t begun = u->in_pos;
    int error = 0;

    for (int i = 0; i < RECORDS_PER_TURN && !error; i++) {
        size_t left = u->in_len - u->in_pos, n = left < 4 ? 0 : get32(u->in + u->in_pos);

        if (u->removing) {
            error = remove_on(u);
            if (error || u->removing)
                break;
            cleared = true;
            continue;
        }
        if (n > RECORD_MAX)
            error = unpack_protocol(u, "a record that is too long");
        else if (left < 4 || left - 4 < n)
            break;
        else
            error = record(u, u->in + u->in_pos + 4, n, cleared);
        cleared = false;
        if (!error && !u->removing)
            u->in_pos += 4 + n;
    }
    if (u->in_pos > begun)
        stream_consumed(s, (uint32_t)(u->in_pos - begun));
    return error;
}

/* Everything has come and is done. 0 or an errno. */
static int finish(struct unpack *u)
{
    int error = unpack_finish_file(u);

    if (u->in_pos < u->in_len)
        return unpack_protocol(u, "a record that is cut short");
    while (!error && u->depth)
        error = unpack_leave(u);
    return error;
}

static enum pump unpack_pump(struct stream *s)
{
    struct unpack *u = s->ctx;
    uint8_t buf[64];
    struct fw w = {buf, 0, sizeof buf, false};
    size_t before = u->in_pos;
    int error = work(u, s);

    if (!error && (u->removing || u->in_pos > before))
        return PUMP_AGAIN;
    if (!error && !s->host_ended)
        return PUMP_WAIT;
    if (!error)
        error = finish(u);
    if (error == EPROTO && u->why)
        stream_fail(s, EPROTO, NULL, "bad record: %s", u->why);
    else if (error)
        stream_fail(s, error, "path", "cannot unpack /%s: %s", unpack_wrong, strerror(error));
    else {
        fw_int(&w, TAG_COUNT, u->count);
        fw_int(&w, TAG_BYTES, u->bytes);
        stream_close(s, &w);
    }
    return PUMP_GONE;
}

static void unpack_data(struct stream *s, const uint8_t *p, uint32_t n)
{
    struct unpack *u = s->ctx;

    if (u->in_pos) {
        memmove(u->in, u->in + u->in_pos, u->in_len - u->in_pos);
        u->in_len -= u->in_pos;
        u->in_pos = 0;
    }
    if (u->in_len + n > u->in_cap) {
        size_t cap = (u->in_len + n + 65535) & ~(size_t)65535;
        uint8_t *in = realloc(u->in, cap);
        if (!in) {
            stream_fail(s, ENOMEM, NULL, "the agent has no memory");
            return;
        }
        u->in = in;
        u->in_cap = cap;
    }
    memcpy(u->in + u->in_len, p, n);
    u->in_len += n;
    stream_ready(s);
}

static void unpack_end(struct stream *s)
{
    stream_ready(s);
}

static void unpack_release(struct stream *s)
{
    struct unpack *u = s->ctx;

    if (u->file >= 0) {
        unlinkat(u->file_dir, u->temp, 0);
        close(u->file);
        close(u->file_dir);
    }
    if (u->removing)
        walk_close(&u->walk);
    unpack_forget(u);
    close(u->root);
    free(u->stack);
    free(u->at);
    free(u->in);
    free(u);
}

void op_unpack(struct stream *s, const struct fields *f)
{
    static const struct stream_ops ops = {
        .data = unpack_data, .end = unpack_end, .pump = unpack_pump, .release = unpack_release};
    char folder[2 * PATH_LIMIT] = "/";
    struct unpack *u;
    int root;

    if (fields_have(f, TAG_PATH) && !want_path(s, f, TAG_PATH, folder))
        return;
    if (!fields_have(f, TAG_PATH) && !guest.pid1) {
        stream_fail(s, EOPNOTSUPP, NULL, "this sandbox has no root of its own: name a folder");
        return;
    }
    root = path_open(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY | O_NONBLOCK, 0);
    if (root < 0) {
        stream_fail(s, errno, "path", "cannot unpack to %.200s: %s", folder, strerror(errno));
        return;
    }
    u = calloc(1, sizeof *u);
    if (!u) {
        close(root);
        stream_fail(s, ENOMEM, NULL, "the agent has no memory");
        return;
    }
    u->root = root;
    u->dir = u->file = u->file_dir = -1;
    s->ctx = u;
    s->ops = &ops;
}
