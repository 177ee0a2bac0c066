/* The state of an UNPACK, shared by its stream (unpack.c) and the making of files (unpack_make.c). */
#ifndef SLOPLET_UNPACK_H
#define SLOPLET_UNPACK_H

#include "files.h"
#include "tree.h"

/* What a record says of a file. */
struct facts {
    int64_t type, size, flags;
    mode_t mode;
    uid_t uid;
    gid_t gid;
    struct timespec mtime;
};
struct folder {
    size_t len; /* of its path in `at` */
    struct facts facts;
};
struct unpack {
    int root;
    uint8_t *in; /* bytes not worked off yet */
    size_t in_len, in_cap, in_pos;
    char *at; /* path of the innermost folder of the stack */
    size_t at_cap;
    struct folder *stack;
    size_t depth, cap;
    int dir; /* the folder of the last name, for the next one; its path is dir_path */
    char *dir_path;
    int file; /* being written as `temp` in file_dir, or -1 */
    int file_dir;
    char temp[24], name[256];
    struct facts facts;
    int64_t written; /* offset behind the last content */
    struct walk walk; /* what is in the way, while `removing` */
    bool removing, left_out; /* left_out: what came last is a volume's */
    int64_t count, bytes;
    const char *why; /* of EPROTO */
};

extern char unpack_wrong[256]; /* what the last error is about */

/* All of these return 0 or an errno. */
int unpack_protocol(struct unpack *u, const char *why); /* EPROTO, with the reason */
/* The folder that holds the last part of a path, into u->dir, and that part; missing folders are made. */
int unpack_find(struct unpack *u, const char *path, char *name);
void unpack_forget(struct unpack *u);
/* What is in this folder will come next; it gets its facts when that is done. */
int unpack_push(struct unpack *u, const char *path, const struct facts *f);
/* Leaves the innermost folder; or all that the path is not in. */
int unpack_leave(struct unpack *u);
int unpack_leave_to(struct unpack *u, const char *path);
/* Makes what a record tells of at a name in u->dir, where nothing is in the way. A regular file is only begun. */
int unpack_make(struct unpack *u, const struct fields *f, const char *path, const char *name, const struct facts *facts);
/* Gives an open file or folder the attributes that a record tells of. */
int unpack_attributes(int fd, const struct fields *f);
int unpack_piece(struct unpack *u, const struct fields *f);
int unpack_finish_file(struct unpack *u);

#endif
