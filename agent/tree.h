/* Walking a folder tree by fds: no path is ever put together, links are never followed, depth is not
 * bounded by fds or path length, and every step is small. */
#ifndef SLOPLET_TREE_H
#define SLOPLET_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

enum walk_event { WALK_END, WALK_ENTRY, WALK_LEFT };

struct walk_level;

struct walk {
    struct walk_level *levels;
    size_t depth, cap;
    bool removing;    /* entries vanish as we go: read folders again from the start after a descent */
    char *names;      /* the parts from the root of the walk down to the current folder, by '/' */
    size_t names_len, names_cap;
    char *buf;        /* one getdents buffer for all levels */
    size_t buf_at, buf_len;
    int first_error;
};

/* Takes over fd, which must be a readable folder. False without memory; the fd is closed then. */
bool walk_open(struct walk *w, int fd, bool removing);
/* ENTRY: *name in *dir. LEFT: the folder *name in *dir was walked to its end (or could not be). The
 * strings live until the next call. */
enum walk_event walk_next(struct walk *w, int *dir, const char **name, uint8_t *type);
/* After ENTRY: go into it. False (errno) if it cannot be opened; the walk goes on behind it. */
bool walk_enter(struct walk *w);
/* After ENTRY or LEFT in removing mode: this one stays, so do not come back to it. */
void walk_kept(struct walk *w, int error);
/* Parts above the current folder, for building relative names; ends without a slash. */
const char *walk_prefix(const struct walk *w, size_t *n);
size_t walk_depth(const struct walk *w);
/* The folder being read: the root before the first entry, and after walk_enter the one entered. */
int walk_fd(const struct walk *w);
void walk_close(struct walk *w);

/* Removes a bounded number of entries of a removing walk, counting them. True while there are more. */
bool tree_remove_some(struct walk *w, int64_t *count);

#endif
