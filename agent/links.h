/* Hard links met on a walk: which earlier name a file has. Bounded: what does not fit is told as a file of its own. */
#ifndef SLOPLET_LINKS_H
#define SLOPLET_LINKS_H

#include <stddef.h>
#include <sys/stat.h>

#define LINK_BUCKETS 512

struct link_seen;

struct links {
    struct link_seen *bucket[LINK_BUCKETS];
    size_t bytes;
};

/* The path under which this file was told before, or NULL. */
const char *links_find(const struct links *l, const struct stat *st);
void links_remember(struct links *l, const struct stat *st, const char *path);
void links_free(struct links *l);

#endif
