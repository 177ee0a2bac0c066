/* LIST and REMOVE, a bounded number of entries a turn. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "extras.h"
#include "files.h"
#include "path.h"
#include "records.h"
#include "tree.h"

#define ENTRIES_PER_TURN 500

struct listing {
    struct walk walk;
    struct records records;
    struct user user;
    int64_t depth; /* levels to show; 1: the folder's own entries */
    struct extras extras;
    char *path; /* of the folder, if targets of links are told */
};

static void entry_extras(struct listing *l, struct fw *w, int dir, const char *name, const char *below, const struct stat *st)
{
    char whole[PATH_LIMIT];
    bool fits = l->path && (size_t)snprintf(whole, sizeof whole, "%s/%s", l->path, below) < sizeof whole;

    extras_fields(w, &l->extras, dir, name, fits ? whole : NULL, st);
    if (extras_attributed(&l->extras, st) && fchdir(dir) == 0)
        attributes_fields(w, (struct attributes_of){-1, name}, l->extras.prefix, ATTRIBUTES_BESIDE, 0);
}

static void list_entry(struct listing *l, int dir, const char *name, const struct stat *st)
{
    char path[RECORD_MAX / 2], link[PATH_LIMIT];
    struct fw w = record_begin();
    size_t n, name_len = strlen(name);
    const char *prefix = walk_prefix(&l->walk, &n);
    ssize_t got = -1;

    if (n + name_len + 2 > sizeof path)
        return; /* deeper than any path can name */
    memcpy(path, prefix ? prefix : "", n);
    if (n)
        path[n++] = '/';
    memcpy(path + n, name, name_len);
    path[n + name_len] = 0;
    if (S_ISLNK(st->st_mode))
        got = readlinkat(dir, name, link, sizeof link - 1);
    if (got >= 0)
        link[got] = 0;
    fw_bytes(&w, TAG_NAME, path, n + name_len);
    stat_fields(&w, st, got >= 0 ? link : NULL);
    entry_extras(l, &w, dir, name, path, st);
    record_add(&l->records, &w);
}

/* True while there is more to walk. */
static bool list_some(struct listing *l)
{
    for (int i = 0; i < ENTRIES_PER_TURN; i++) {
        const char *name;
        struct stat st;
        uint8_t type;
        int dir;

        if (records_pending(&l->records) >= RECORDS_ENOUGH)
            return true;
        switch (walk_next(&l->walk, &dir, &name, &type)) {
        case WALK_END:
            return false;
        case WALK_LEFT:
            break;
        case WALK_ENTRY:
            if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
                break; /* gone since */
            list_entry(l, dir, name, &st);
            if (S_ISDIR(st.st_mode) && (int64_t)walk_depth(&l->walk) < l->depth)
                walk_enter(&l->walk); /* one that may not be read is shown, but not its contents */
            break;
        }
    }
    return true;
}

static enum pump list_pump(struct stream *s)
{
    struct listing *l = s->ctx;
    bool more = true;

    if (records_pending(&l->records) < RECORDS_ENOUGH) {
        if (user_enter(&l->user)) {
            stream_fail(s, EPERM, "user", "cannot act as the user");
            return PUMP_GONE;
        }
        more = list_some(l);
        user_leave();
        if (l->extras.prefix[0] && chdir("/") < 0) {
            /* attributes are read by name, from their folder; nothing else here depends on the current one */
        }
    }
    records_flush(&l->records, s);
    if (records_pending(&l->records))
        return records_wait(s);
    if (more)
        return PUMP_AGAIN;
    stream_done(s);
    return PUMP_GONE;
}

static void list_release(struct stream *s)
{
    struct listing *l = s->ctx;

    walk_close(&l->walk);
    records_free(&l->records);
    free(l->path);
    free(l);
}

void op_list(struct stream *s, const struct fields *f)
{
    static const struct stream_ops ops = {.pump = list_pump, .release = list_release};
    struct call c;
    struct extras extras;
    struct listing *l;
    int fd;

    if (fields_int(f, TAG_DEPTH, 1) < 1) {
        stream_fail(s, EINVAL, NULL, "a depth below 1");
        return;
    }
    if (!want_extras(s, f, &extras) || !call_begin(s, f, LIST_FLAG_RECURSIVE | LIST_FLAG_NAMES | LIST_FLAG_TARGET, &c))
        return;
    fd = path_open(AT_FDCWD, c.path, O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0) {
        call_fail(s, errno, "list", c.path);
        return;
    }
    user_leave();
    l = calloc(1, sizeof *l);
    if (!l || !walk_open(&l->walk, fd, false)) {
        if (!l)
            close(fd);
        free(l);
        stream_fail(s, ENOMEM, NULL, "the agent has no memory");
        return;
    }
    extras.names = c.flags & LIST_FLAG_NAMES;
    extras.target = c.flags & LIST_FLAG_TARGET;
    l->extras = extras;
    if (extras.target)
        l->path = strdup(c.path);
    l->user = c.user;
    l->depth = c.flags & LIST_FLAG_RECURSIVE ? fields_int(f, TAG_DEPTH, INT64_MAX) : 1;
    s->ctx = l;
    s->ops = &ops;
    stream_ready(s);
}

struct removal {
    struct walk walk;
    struct user user;
    int dir;
    char name[256];
    int64_t count;
};

static void remove_entry(struct walk *w, int64_t *count, int dir, const char *name, int flags)
{
    if (unlinkat(dir, name, flags) == 0)
        ++*count;
    else if (errno != ENOENT)
        walk_kept(w, errno);
}

/* A folder is entered whatever its type said: the open decides. */
bool tree_remove_some(struct walk *w, int64_t *count)
{
    for (int i = 0; i < ENTRIES_PER_TURN; i++) {
        const char *name;
        uint8_t type;
        int dir;

        switch (walk_next(w, &dir, &name, &type)) {
        case WALK_END:
            return false;
        case WALK_LEFT:
            remove_entry(w, count, dir, name, AT_REMOVEDIR);
            break;
        case WALK_ENTRY:
            if (type != DT_DIR && type != DT_UNKNOWN)
                remove_entry(w, count, dir, name, 0);
            else if (!walk_enter(w))
                /* no folder after all, or one that may not be read: empty ones still go */
                remove_entry(w, count, dir, name, errno == ENOTDIR || errno == ELOOP ? 0 : AT_REMOVEDIR);
            break;
        }
    }
    return true;
}

static enum pump remove_pump(struct stream *s)
{
    struct removal *r = s->ctx;
    uint8_t buf[16];
    struct fw w = {buf, 0, sizeof buf, false};
    int error = user_enter(&r->user);

    if (!error && tree_remove_some(&r->walk, &r->count)) {
        user_leave();
        return PUMP_AGAIN;
    }
    if (!error) {
        error = r->walk.first_error;
        if (unlinkat(r->dir, r->name, AT_REMOVEDIR) == 0) {
            r->count++;
            error = 0;
        } else if (!error) {
            error = errno;
        }
    }
    user_leave();
    if (error) {
        stream_fail(s, error, "path", "not everything could be removed: %s", strerror(error));
        return PUMP_GONE;
    }
    fw_int(&w, TAG_COUNT, r->count);
    stream_close(s, &w);
    return PUMP_GONE;
}

static void remove_release(struct stream *s)
{
    struct removal *r = s->ctx;

    walk_close(&r->walk);
    close(r->dir);
    free(r);
}

static void remove_simple(struct stream *s, const struct call *c, int dir, const char *name, bool is_dir)
{
    uint8_t buf[16];
    struct fw w = {buf, 0, sizeof buf, false};
    int error = unlinkat(dir, name, is_dir ? AT_REMOVEDIR : 0) < 0 ? errno : 0;

    close(dir);
    if (error) {
        call_fail(s, error, "remove", c->path);
        return;
    }
    user_leave();
    fw_int(&w, TAG_COUNT, 1);
    stream_close(s, &w);
}

void op_remove(struct stream *s, const struct fields *f)
{
    static const struct stream_ops ops = {.pump = remove_pump, .release = remove_release};
    struct call c;
    struct removal *r;
    struct stat st;
    char name[256];
    bool slash;
    int dir, fd, error;

    if (!call_begin(s, f, REMOVE_FLAG_RECURSIVE | REMOVE_FLAG_MISSING_OK, &c))
        return;
    dir = path_parent(AT_FDCWD, c.path, name, &slash);
    error = dir < 0 || fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0 ? errno : 0;
    if (!error && slash && !S_ISDIR(st.st_mode))
        error = ENOTDIR; /* "link/" is not the link, and not for us to follow */
    if (error) {
        if (dir >= 0)
            close(dir);
        if (error == ENOENT && (c.flags & REMOVE_FLAG_MISSING_OK)) {
            uint8_t buf[16];
            struct fw w = {buf, 0, sizeof buf, false};
            user_leave();
            fw_int(&w, TAG_COUNT, 0);
            stream_close(s, &w);
        } else {
            call_fail(s, error, "remove", c.path);
        }
        return;
    }
    if (!S_ISDIR(st.st_mode) || !(c.flags & REMOVE_FLAG_RECURSIVE)) {
        remove_simple(s, &c, dir, name, S_ISDIR(st.st_mode));
        return;
    }
    fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        remove_simple(s, &c, dir, name, true); /* an empty one needs no reading */
        return;
    }
    user_leave();
    r = calloc(1, sizeof *r);
    if (!r || !walk_open(&r->walk, fd, true)) {
        if (!r)
            close(fd);
        close(dir);
        free(r);
        stream_fail(s, ENOMEM, NULL, "the agent has no memory");
        return;
    }
    r->user = c.user;
    r->dir = dir;
    strcpy(r->name, name);
    s->ctx = r;
    s->ops = &ops;
    stream_ready(s);
}
