/* Lists on the wire: records (u32 length + fields) buffered until credit lets them go. */
#ifndef SLOPLET_RECORDS_H
#define SLOPLET_RECORDS_H

#include "wire.h"

#define RECORD_MAX 65532
#define RECORDS_ENOUGH (32u * 1024) /* stop producing above this until the host has read */

struct records {
    uint8_t *buf;
    size_t head, len, cap;
};

/* A writer for one record, in shared scratch memory: finish it before the next begin. */
struct fw record_begin(void);
/* False if memory is short or the record was too long: it is left out then. */
bool record_add(struct records *r, const struct fw *w);
size_t records_pending(const struct records *r);
/* Sends what credit and queue allow. */
void records_flush(struct records *r, struct stream *s);
/* What a pump returns while records wait: AGAIN if only the queue is full. */
enum pump records_wait(const struct stream *s);
void records_free(struct records *r);

#endif
