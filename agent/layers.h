/* What the launcher laid out, and what has been written since: the folders where changes lie, and how they were in the
 * beginning. */
#ifndef SLOPLET_LAYERS_H
#define SLOPLET_LAYERS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

struct layer {
    int fd;         /* a readable folder, the caller's to close */
    const char *at; /* where it shows, without a leading slash; "" is the root */
    bool overlay;   /* an overlay's: whiteouts are removals, and folders may be opaque */
};

/* Whether changes can be told at all without looking at every file. */
bool layers_known(void);
/* The number-th layer: the root before what is mounted in it. False when there are no more, with errno 0, or it cannot be opened. */
bool layer_open(int number, struct layer *out);
/* A whiteout of an overlay's upper folder. */
/* Whether a path (without a leading slash) is a volume's: at or below where one is mounted. */
bool in_volume(const char *path);
bool is_whiteout(const struct stat *st);

/* HELLO has laid out all there is: what baseline_take, as soon as there is time but before the first request, remembers once. */
void baseline_due(void);
void baseline_take(void);
/* Whether this is as it was then. */
bool baseline_same(const char *path, const struct stat *st);
/* What was there then and is no more, from *next on: its path, or NULL at the end. */
const char *baseline_gone(size_t *next);

#endif
