/* What the file operations share. */
#ifndef SLOPLET_FILES_H
#define SLOPLET_FILES_H

#include <sys/stat.h>

#include "ops.h"

struct call {
    struct user user;
    int64_t flags;
    char path[2 * PATH_LIMIT];
};

/* Reads USER, PATH and FLAGS and becomes the user. False: the stream was closed. After true the
 * caller must user_leave() before it returns to the loop. */
bool call_begin(struct stream *s, const struct fields *f, int64_t known_flags, struct call *c);
/* Leaves the user and closes the stream: with an error about the path, or without. */
void call_fail(struct stream *s, int error, const char *verb, const char *path);

/* TYPE of the stat fields. */
int file_type(const struct stat *st);
/* Stat fields; link may be NULL. */
void stat_fields(struct fw *w, const struct stat *st, const char *link);
/* MODE of the request, or `otherwise`. False if it is no mode. */
bool want_mode(struct stream *s, const struct fields *f, mode_t otherwise, mode_t *mode);
/* OWNER of the request: whom what is made is given to; uid -1: nobody said. False: the stream was closed. */
bool want_owner(struct stream *s, const struct fields *f, struct user *owner);
/* Makes the missing folders above (`whole`: and at) the path, and gives them to the owner, if there is one (its uid is
 * not -1): then only root's links are followed. 0 or an errno. */
int make_parents(const char *path, mode_t mode, bool whole, const struct user *owner);
/* A name for a file that is not there yet, at most 24 bytes. */
void temp_name(char *out);
/* rename without replacing; falls back where the kernel cannot do it at once. */
int rename_noreplace(int from_dir, const char *from, int to_dir, const char *to);

#endif
