/* Fields (tag, length, value): decoding of requests and encoding of answers. Pure. */
#ifndef SLOPLET_FIELDS_H
#define SLOPLET_FIELDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto.h"

#define TAG_LIMIT 128 /* every tag is smaller: a set of tags is one word */
typedef unsigned __int128 tag_set;
#define TAG_BIT(tag) ((tag_set)1 << (tag))

struct fields {
    tag_set have;
    const uint8_t *raw;
    size_t raw_len;
    int64_t num[TAG_LIMIT]; /* integers, and for repeatable tags their count */
    struct {
        const uint8_t *p;
        uint32_t len;
    } text[TAG_LIMIT]; /* for repeatable tags the last one */
};

/* Decodes p[0..n): 0, or EPROTO with *why. Every field must be in `allowed`; text may hold no NUL. */
int fields_parse(const uint8_t *p, size_t n, tag_set allowed, struct fields *out, const char **why);

static inline bool fields_have(const struct fields *f, int tag)
{
    return (f->have & TAG_BIT(tag)) != 0;
}

/* The integer, or `otherwise` when absent. */
int64_t fields_int(const struct fields *f, int tag, int64_t otherwise);

/* Walks a repeatable tag: start with *pos 0; false at the end. */
bool fields_next(const struct fields *f, int tag, size_t *pos, const uint8_t **p, uint32_t *len);

/* A writer into memory of the caller's. It never overruns: `overflow` is set instead. */
struct fw {
    uint8_t *p;
    size_t len, cap;
    bool overflow;
};

void fw_int(struct fw *w, int tag, int64_t v);
void fw_bytes(struct fw *w, int tag, const void *p, size_t n);
void fw_text(struct fw *w, int tag, const char *s);

#endif
