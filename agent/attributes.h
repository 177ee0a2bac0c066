/* Extended attributes of files: those that begin with "user.", but not overlayfs' own among them. */
#ifndef SLOPLET_ATTRIBUTES_H
#define SLOPLET_ATTRIBUTES_H

#include "ops.h"

#define ATTRIBUTE_NAME_MAX 255
#define ATTRIBUTE_VALUE_MAX 61440  /* fits a record */
#define ATTRIBUTES_MAX (1u << 20)  /* names and values of one file */
#define ATTRIBUTES_BESIDE 16384    /* of them, beside other facts of a file */
#define ATTRIBUTES_CHANGED 40960   /* of them, in a record of CHANGES */

/* Whose attributes: an open file's, or with a name that of an entry of the current folder (a link is not followed). */
struct attributes_of {
    int fd;
    const char *name;
};

/* PREFIX, or all that there may be. False: the stream was closed. `out` holds ATTRIBUTE_NAME_MAX + 1 bytes. */
bool want_prefix(struct stream *s, const struct fields *f, char *out);
/* One ATTRIBUTE field for each that begins with the prefix, up to `most` bytes of them and so that `reserve` bytes are left in
 * w, and COUNT if some were left out. What cannot be read is not told. */
void attributes_fields(struct fw *w, struct attributes_of of, const char *prefix, size_t most, size_t reserve);

/* For UNPACK. Whether all ATTRIBUTE fields may be set; and setting each: 0, or the first errno but for those that say that
 * this disk has none, not such a one, or no room for it: the file is worth more than they are. */
bool attributes_good(const struct fields *f);
int attributes_set(int fd, const struct fields *f);

#endif
