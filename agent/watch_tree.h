/* The folders a WATCH covers: which inotify watch stands for which path. */
#ifndef SLOPLET_WATCH_TREE_H
#define SLOPLET_WATCH_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WATCH_BUCKETS 64

struct watch_node {
    int wd;
    struct watch_node *parent; /* NULL: the root */
    char *name;                /* in its parent */
    struct watch_node *next;   /* hash chain */
    struct watch_node *next_scan;
    bool queued, announce; /* to be scanned; what the scan finds is news */
    bool doomed;
};

struct watch_tree {
    int inotify, root_fd;
    struct watch_node *bucket[WATCH_BUCKETS];
    struct watch_node *scan_head, *scan_tail;
    size_t count;
    /* the scan in progress */
    struct watch_node *scanning;
    int scan_fd;
    char *buf;
    size_t at, len;
};

struct watch_node *watch_node_of(struct watch_tree *t, int wd);
/* Watches the folder `dir` (an fd that stays the caller's). NULL with errno. */
struct watch_node *watch_node_add(struct watch_tree *t, int dir, struct watch_node *parent, const char *name);
struct watch_node *watch_child(struct watch_tree *t, const struct watch_node *parent, const char *name);
/* Forgets a node and all below it. */
void watch_drop(struct watch_tree *t, struct watch_node *n);
void watch_queue(struct watch_tree *t, struct watch_node *n, bool announce);
/* The path of `name` in the node's folder, relative to the root. Its length, or 0 if over cap. */
size_t watch_path(const struct watch_node *n, const char *name, char *out, size_t cap);
/* An fd of the node's folder, or -1. */
int watch_node_open(const struct watch_tree *t, const struct watch_node *n);
/* One entry of the folders queued. NULL at the end; *error is set where watching one failed. */
const char *watch_scan(struct watch_tree *t, struct watch_node **in, bool *is_dir, int *error);
void watch_tree_free(struct watch_tree *t);

#endif
