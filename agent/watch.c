/* WATCH: one inotify instance a stream. Events are taken from the kernel only while the host has
 * credit for them: its queue is the buffer, and its overflow is told, not hidden. */
#define _GNU_SOURCE
#include "watch.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "files.h"
#include "loop.h"
#include "path.h"
#include "records.h"
#include "watch_tree.h"

#define PER_TURN 500
#define HALF_RENAME (20 * MSEC) /* how long the first half of a rename waits for the second */
#define NAME_CAP 16384

struct watching {
    struct source events;
    struct stream *stream;
    struct user user;
    struct watch_tree tree;
    struct records records;
    bool recursive, armed;
    /* a rename whose target has not shown up yet */
    uint32_t cookie;
    char *from;
    struct watch_node *from_node; /* the folder's own node, where it is watched */
    int64_t from_until;
    struct watching *next;
};

static struct watching *all;

static void tell(struct watching *w, int mask, const char *name, const char *name2)
{
    struct fw fw = record_begin();

    fw_int(&fw, TAG_MASK, mask);
    fw_text(&fw, TAG_NAME, name);
    if (name2)
        fw_text(&fw, TAG_NAME2, name2);
    record_add(&w->records, &fw);
    stream_ready(w->stream);
}

static void rename_unpaired(struct watching *w)
{
    if (!w->from)
        return;
    tell(w, WATCH_MASK_REMOVED, w->from, NULL); /* it left what we watch */
    if (w->from_node)
        watch_drop(&w->tree, w->from_node);
    w->from_node = NULL;
    free(w->from);
    w->from = NULL;
}

/* A folder appeared: watch it, and look for what came into it before we did. */
static void adopt(struct watching *w, struct watch_node *parent, const char *name)
{
    struct watch_node *n = NULL;
    int up, fd = -1;

    if (!w->recursive)
        return;
    up = watch_node_open(&w->tree, parent);
    if (up >= 0)
        fd = openat(up, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0)
        n = watch_node_add(&w->tree, fd, parent, name);
    if (n)
        watch_queue(&w->tree, n, true);
    else if (fd >= 0)
        tell(w, WATCH_MASK_OVERFLOW, "", NULL); /* no more watches: changes there go unseen */
    if (fd >= 0)
        close(fd);
    if (up >= 0)
        close(up);
}

static void moved_to(struct watching *w, struct watch_node *n, const struct inotify_event *e, const char *path)
{
    if (!w->from) {
        tell(w, WATCH_MASK_CREATED, path, NULL);
        if (e->mask & IN_ISDIR)
            adopt(w, n, e->name);
        return;
    }
    tell(w, WATCH_MASK_RENAMED, w->from, path);
    if (w->from_node) {
        char *copy = strdup(e->name);
        if (copy) {
            free(w->from_node->name);
            w->from_node->name = copy;
            w->from_node->parent = n;
        }
    }
    w->from_node = NULL;
    free(w->from);
    w->from = NULL;
}

static void on_event(struct watching *w, const struct inotify_event *e)
{
    const char *name = e->len ? e->name : "";
    struct watch_node *n;
    char path[NAME_CAP];

    if (w->from && (!(e->mask & IN_MOVED_TO) || w->cookie != e->cookie))
        rename_unpaired(w); /* first: it may drop the node of this very event */
    n = watch_node_of(&w->tree, e->wd);
    if (e->mask & IN_Q_OVERFLOW) {
        tell(w, WATCH_MASK_OVERFLOW, "", NULL);
        for (int i = 0; i < WATCH_BUCKETS && w->recursive; i++)
            for (n = w->tree.bucket[i]; n; n = n->next)
                watch_queue(&w->tree, n, false); /* folders may have come unseen */
        return;
    }
    if (!n)
        return;
    if (e->mask & IN_IGNORED) {
        if (n->parent)
            watch_drop(&w->tree, n);
        return;
    }
    if (!*name && n->parent)
        return; /* its parent's watch says the same, with a name */
    watch_path(n, name, path, sizeof path);
    if (e->mask & IN_MOVED_FROM) {
        w->from = strdup(path);
        w->cookie = e->cookie;
        w->from_node = e->mask & IN_ISDIR ? watch_child(&w->tree, n, name) : NULL;
        w->from_until = now_ns() + HALF_RENAME;
    } else if (e->mask & IN_MOVED_TO) {
        moved_to(w, n, e, path);
    } else if (e->mask & IN_CREATE) {
        tell(w, WATCH_MASK_CREATED, path, NULL);
        if (e->mask & IN_ISDIR)
            adopt(w, n, name);
    } else if (e->mask & IN_CLOSE_WRITE) {
        tell(w, WATCH_MASK_MODIFIED, path, NULL);
    } else if (e->mask & (IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF)) {
        tell(w, WATCH_MASK_REMOVED, path, NULL);
    } else if (e->mask & IN_ATTRIB) {
        tell(w, WATCH_MASK_ATTRIBUTES, path, NULL);
    }
}

static void take_events(struct watching *w)
{
    _Alignas(struct inotify_event) char buf[4096];

    while (records_pending(&w->records) < RECORDS_ENOUGH) {
        ssize_t n = read(w->events.fd, buf, sizeof buf);
        if (n <= 0)
            return;
        for (ssize_t at = 0; at < n;) {
            struct inotify_event *e = (struct inotify_event *)(buf + at);
            on_event(w, e);
            at += (ssize_t)(sizeof *e + e->len);
        }
    }
}

/* True when nothing is left to scan. */
static bool scan_some(struct watching *w, int *error)
{
    for (int i = 0; i < PER_TURN && records_pending(&w->records) < RECORDS_ENOUGH; i++) {
        struct watch_node *in;
        char path[NAME_CAP];
        bool is_dir;
        const char *name = watch_scan(&w->tree, &in, &is_dir, error);

        if (!name)
            return true;
        if (*error && !w->armed)
            return true;
        if (*error)
            tell(w, WATCH_MASK_OVERFLOW, "", NULL);
        if (in->announce && watch_path(in, name, path, sizeof path))
            tell(w, WATCH_MASK_CREATED, path, NULL);
    }
    return false;
}

static enum pump watch_pump(struct stream *s)
{
    struct watching *w = s->ctx;
    bool scanned = true;
    int error = user_enter(&w->user);

    if (!error) {
        if (w->armed)
            take_events(w);
        if (w->recursive)
            scanned = scan_some(w, &error);
        user_leave();
    }
    if (chdir("/") < 0) {
        /* watching needs a current folder for a moment only; nothing else here depends on it */
    }
    if (error && !w->armed) {
        stream_fail(s, error, "path", "cannot watch everything below: %s", strerror(error));
        return PUMP_GONE;
    }
    if (!w->armed && scanned) {
        struct fw none = {NULL, 0, 0, false};
        w->armed = true;
        stream_reply(s, &none);
    }
    if (w->armed)
        records_flush(&w->records, s);
    if (records_pending(&w->records)) {
        loop_want(&w->events, 0);
        return w->armed ? records_wait(s) : PUMP_AGAIN;
    }
    records_free(&w->records);
    loop_want(&w->events, w->armed ? EPOLLIN : 0);
    return scanned ? PUMP_WAIT : PUMP_AGAIN;
}

static void on_inotify(struct source *src, uint32_t events)
{
    (void)events;
    stream_ready(OWNER(src, struct watching, events)->stream);
    loop_want(src, 0); /* until the pump has had its turn */
}

static void watch_release(struct stream *s)
{
    struct watching *w = s->ctx, **p = &all;

    while (*p != w)
        p = &(*p)->next;
    *p = w->next;
    watch_tree_free(&w->tree);
    loop_close(&w->events);
    records_free(&w->records);
    free(w->from);
    free(w);
}

int64_t watch_timers(int64_t now)
{
    int64_t next = NEVER;

    for (struct watching *w = all; w; w = w->next) {
        if (w->from && w->from_until <= now)
            rename_unpaired(w);
        if (w->from)
            next = earlier(next, w->from_until);
    }
    return next;
}

/* A single file: watched by its name in its folder, once. */
static int watch_file(struct watching *w, int inotify, const char *path)
{
    char name[256];
    bool slash;
    int dir = path_parent(AT_FDCWD, path, name, &slash), wd = -1, error = 0;
    struct watch_node *n = calloc(1, sizeof *n);

    if (dir < 0 || !n || fchdir(dir) < 0)
        error = n ? errno : ENOMEM;
    else if ((wd = inotify_add_watch(inotify, name, IN_CLOSE_WRITE | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF)) < 0)
        error = errno;
    if (dir >= 0)
        close(dir);
    if (error) {
        free(n);
        return error;
    }
    n->wd = wd;
    n->name = strdup("");
    w->tree.bucket[(unsigned)wd % WATCH_BUCKETS] = n;
    w->tree.count = 1;
    return 0;
}

static int watch_begin(struct watching *w, const char *path, int inotify, bool folder_only)
{
    struct watch_node *root;
    int fd = path_open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_NOCTTY, 0);

    if (fd < 0 && errno == ENOTDIR && !folder_only) {
        fd = path_open(AT_FDCWD, path, O_PATH, 0); /* checks the way for magic links */
        if (fd < 0)
            return errno;
        close(fd);
        w->recursive = false;
        return watch_file(w, inotify, path);
    }
    if (fd < 0)
        return errno;
    w->tree.root_fd = fd;
    root = watch_node_add(&w->tree, fd, NULL, "");
    if (!root)
        return errno;
    if (w->recursive)
        watch_queue(&w->tree, root, false);
    return 0;
}

void op_watch(struct stream *s, const struct fields *f)
{
    static const struct stream_ops ops = {.pump = watch_pump, .release = watch_release};
    struct call c;
    struct watching *w;
    int error = 0, inotify;

    if (!call_begin(s, f, WATCH_FLAG_RECURSIVE | WATCH_FLAG_FOLDER, &c))
        return;
    w = calloc(1, sizeof *w);
    inotify = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (!w || inotify < 0)
        error = w ? errno : ENOMEM;
    if (w)
        w->tree.root_fd = w->tree.scan_fd = w->events.fd = -1;
    if (!error) {
        w->tree.inotify = inotify;
        w->recursive = c.flags & WATCH_FLAG_RECURSIVE;
        w->user = c.user;
        w->stream = s;
        error = watch_begin(w, c.path, inotify, c.flags & WATCH_FLAG_FOLDER);
    }
    user_leave();
    if (chdir("/") < 0)
        error = error ? error : errno;
    if (error) {
        if (w)
            watch_tree_free(&w->tree);
        if (inotify >= 0)
            close(inotify);
        free(w);
        call_fail(s, error, "watch", c.path);
        return;
    }
    loop_add(&w->events, inotify, 0, on_inotify);
    w->next = all;
    all = w;
    s->ctx = w;
    s->ops = &ops;
    stream_ready(s);
}
