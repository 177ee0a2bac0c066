/* The operations of OPEN, one function each, and what they have in common. Each function either
 * closes its stream or gives it ops to go on with. */
#ifndef SLOPLET_OPS_H
#define SLOPLET_OPS_H

#include "users.h"
#include "wire.h"

#define PATH_LIMIT 4096 /* with the NUL */

/* The user the request names, or the default. False: the stream was closed with the reason. */
bool want_user(struct stream *s, const struct fields *f, struct user *u);
/* A path out of PATH or PATH2, made absolute by WORKDIR. `out` holds 2 * PATH_LIMIT bytes. */
bool want_path(struct stream *s, const struct fields *f, int tag, char *out);
/* FLAGS, when none but `known` are set. */
bool want_flags(struct stream *s, const struct fields *f, int64_t known, int64_t *flags);

void op_read(struct stream *s, const struct fields *f);
void op_write(struct stream *s, const struct fields *f);
void op_list(struct stream *s, const struct fields *f);
void op_stat(struct stream *s, const struct fields *f);
void op_mkdir(struct stream *s, const struct fields *f);
void op_remove(struct stream *s, const struct fields *f);
void op_move(struct stream *s, const struct fields *f);
void op_chmod(struct stream *s, const struct fields *f);
void op_chown(struct stream *s, const struct fields *f);
void op_symlink(struct stream *s, const struct fields *f);
void op_watch(struct stream *s, const struct fields *f);
void op_getxattrs(struct stream *s, const struct fields *f);
void op_setxattrs(struct stream *s, const struct fields *f);
void op_metrics(struct stream *s, const struct fields *f);
void op_shutdown(struct stream *s, const struct fields *f);
bool shutdown_begun(void);
void op_changes(struct stream *s, const struct fields *f);
void op_unpack(struct stream *s, const struct fields *f);
void op_dial(struct stream *s, const struct fields *f);

#endif
