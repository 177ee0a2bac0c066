/* What STAT and LIST tell of a file beyond its stat fields, where the host asks for it. */
#ifndef SLOPLET_EXTRAS_H
#define SLOPLET_EXTRAS_H

#include <sys/stat.h>

#include "attributes.h"
#include "ops.h"

struct extras {
    bool names, target;
    char prefix[ATTRIBUTE_NAME_MAX + 1]; /* of the attributes to tell; empty: none */
};

/* PREFIX as asked for. False: the stream was closed. */
bool want_extras(struct stream *s, const struct fields *f, struct extras *e);
/* Who owns it, by name; and if it is a link (`name` in `dir`), where it leads. `path` is its whole path, or NULL. */
void extras_fields(struct fw *w, const struct extras *e, int dir, const char *name, const char *path, const struct stat *st);
/* Whether the kernel has attributes of ours for such a file at all. */
bool extras_attributed(const struct extras *e, const struct stat *st);

#endif
