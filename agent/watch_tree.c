/* Watched folders: see watch_tree.h. */
#define _GNU_SOURCE
#include "watch_tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "linuxapi.h"

#define NODES_MAX 16384
#define BUF_SIZE 4096
#define MASK                                                                                       \
    (IN_CREATE | IN_CLOSE_WRITE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB |            \
     IN_DELETE_SELF | IN_MOVE_SELF | IN_EXCL_UNLINK | IN_ONLYDIR)

struct watch_node *watch_node_of(struct watch_tree *t, int wd)
{
    struct watch_node *n = t->bucket[(unsigned)wd % WATCH_BUCKETS];

    while (n && n->wd != wd)
        n = n->next;
    return n;
}

struct watch_node *watch_node_add(struct watch_tree *t, int dir, struct watch_node *parent, const char *name)
{
    struct watch_node *n;
    char *copy;
    int wd;

    if (t->count >= NODES_MAX) {
        errno = ENOSPC;
        return NULL;
    }
    /* inotify wants a name: the folder's own "." needs neither /proc nor a path that may change. */
    if (fchdir(dir) < 0)
        return NULL;
    wd = inotify_add_watch(t->inotify, ".", MASK);
    if (wd < 0)
        return NULL;
    copy = strdup(name);
    n = watch_node_of(t, wd);
    if (!n && copy) {
        n = calloc(1, sizeof *n);
        if (n) {
            n->wd = wd;
            n->next = t->bucket[(unsigned)wd % WATCH_BUCKETS];
            t->bucket[(unsigned)wd % WATCH_BUCKETS] = n;
            t->count++;
        }
    }
    if (!n || !copy) {
        free(copy);
        errno = ENOMEM;
        return NULL;
    }
    free(n->name);
    n->name = copy;
    n->parent = parent;
    return n;
}

struct watch_node *watch_child(struct watch_tree *t, const struct watch_node *parent, const char *name)
{
    for (int i = 0; i < WATCH_BUCKETS; i++)
        for (struct watch_node *n = t->bucket[i]; n; n = n->next)
            if (n->parent == parent && !strcmp(n->name, name))
                return n;
    return NULL;
}

static void end_scan(struct watch_tree *t)
{
    if (t->scan_fd >= 0)
        close(t->scan_fd);
    t->scan_fd = -1;
    t->scanning = NULL;
    t->at = t->len = 0;
}

static void unqueue(struct watch_tree *t, struct watch_node *n)
{
    struct watch_node **p = &t->scan_head, *before = NULL;

    if (!n->queued)
        return;
    for (; *p != n; p = &(*p)->next_scan)
        before = *p;
    *p = n->next_scan;
    if (t->scan_tail == n)
        t->scan_tail = before;
    n->queued = false;
}

static void node_free(struct watch_tree *t, struct watch_node *n)
{
    struct watch_node **p = &t->bucket[(unsigned)n->wd % WATCH_BUCKETS];

    if (t->scanning == n)
        end_scan(t);
    unqueue(t, n);
    while (*p != n)
        p = &(*p)->next;
    *p = n->next;
    t->count--;
    inotify_rm_watch(t->inotify, n->wd);
    free(n->name);
    free(n);
}

static bool below(const struct watch_node *n, const struct watch_node *above)
{
    while (n && n != above)
        n = n->parent;
    return n != NULL;
}

void watch_drop(struct watch_tree *t, struct watch_node *above)
{
    /* Marked first, freed after: a node is found by its way up, which must be whole till then. */
    for (int i = 0; i < WATCH_BUCKETS; i++)
        for (struct watch_node *n = t->bucket[i]; n; n = n->next)
            n->doomed = below(n, above);
    for (int i = 0; i < WATCH_BUCKETS; i++)
        for (struct watch_node *n = t->bucket[i], *next; n; n = next) {
            next = n->next;
            if (n->doomed)
                node_free(t, n);
        }
}

void watch_queue(struct watch_tree *t, struct watch_node *n, bool announce)
{
    n->announce = announce;
    if (n->queued)
        return;
    n->queued = true;
    n->next_scan = NULL;
    if (t->scan_head)
        t->scan_tail->next_scan = n;
    else
        t->scan_head = n;
    t->scan_tail = n;
}

size_t watch_path(const struct watch_node *n, const char *name, char *out, size_t cap)
{
    size_t total = strlen(name), at;

    for (const struct watch_node *up = n; up && up->parent; up = up->parent)
        total += strlen(up->name) + 1;
    if (total + 1 > cap) {
        *out = 0;
        return 0;
    }
    at = total - strlen(name);
    memcpy(out + at, name, strlen(name));
    for (const struct watch_node *up = n; up && up->parent; up = up->parent) {
        size_t len = strlen(up->name);
        out[--at] = '/';
        at -= len;
        memcpy(out + at, up->name, len);
    }
    if (!*name && total) /* the folder itself: without the slash behind it */
        total--;
    out[total] = 0;
    return total;
}

int watch_node_open(const struct watch_tree *t, const struct watch_node *n)
{
    int up, fd;

    if (!n->parent)
        return openat(t->root_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    up = watch_node_open(t, n->parent);
    if (up < 0)
        return -1;
    fd = openat(up, n->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    close(up);
    return fd;
}

static bool next_folder(struct watch_tree *t)
{
    while (t->scan_head) {
        struct watch_node *n = t->scan_head;
        unqueue(t, n);
        t->scan_fd = watch_node_open(t, n);
        if (t->scan_fd < 0)
            continue; /* gone again, or not to be read */
        t->scanning = n;
        return true;
    }
    return false;
}

const char *watch_scan(struct watch_tree *t, struct watch_node **in, bool *is_dir, int *error)
{
    *error = 0;
    if (!t->buf && !(t->buf = malloc(BUF_SIZE)))
        return NULL;
    while (t->scanning || next_folder(t)) {
        struct dirent64_ *d;

        if (t->at >= t->len) {
            long n = syscall(SYS_getdents64, t->scan_fd, t->buf, BUF_SIZE);
            if (n <= 0) {
                end_scan(t);
                continue;
            }
            t->at = 0;
            t->len = (size_t)n;
        }
        d = (struct dirent64_ *)(t->buf + t->at);
        t->at += d->reclen;
        if (!strcmp(d->name, ".") || !strcmp(d->name, ".."))
            continue;
        *in = t->scanning;
        *is_dir = false;
        if (d->type == DT_DIR || d->type == DT_UNKNOWN) {
            int fd = openat(t->scan_fd, d->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (fd >= 0) {
                struct watch_node *n = watch_node_add(t, fd, t->scanning, d->name);
                *is_dir = true;
                if (n)
                    watch_queue(t, n, t->scanning->announce);
                else if (errno != EACCES)
                    *error = errno;
                close(fd);
            }
        }
        return d->name;
    }
    free(t->buf);
    t->buf = NULL;
    return NULL;
}

void watch_tree_free(struct watch_tree *t)
{
    end_scan(t);
    for (int i = 0; i < WATCH_BUCKETS; i++)
        while (t->bucket[i]) {
            struct watch_node *n = t->bucket[i];
            t->bucket[i] = n->next;
            free(n->name);
            free(n);
        }
    if (t->root_fd >= 0)
        close(t->root_fd);
    free(t->buf);
}
