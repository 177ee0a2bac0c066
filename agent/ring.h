/* The last bytes a process wrote on one channel, addressed by absolute offset since its start. */
#ifndef SLOPLET_RING_H
#define SLOPLET_RING_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

struct ring {
    uint8_t *buf; /* from the first byte on: a small one, until there is more to keep */
    size_t size;  /* a power of two, at least one page */
    size_t cap;   /* of buf: another, up to size */
    uint64_t total, from; /* from: nothing before it was kept, for want of memory */
};

/* Smallest legal size that holds `bytes`. */
size_t ring_round(uint64_t bytes);
/* Offset of the oldest byte still kept. */
uint64_t ring_oldest(const struct ring *r);
size_t ring_kept(const struct ring *r);
/* Adds n bytes (at most size). Without memory for them all that was kept is lost. */
void ring_append(struct ring *r, const uint8_t *data, size_t n);
/* Where the next `want` bytes (at most size) go: 1 or 2 pieces; 0 if it is not of full size yet: append then. */
int ring_space(const struct ring *r, size_t want, struct iovec iov[2]);
void ring_advance(struct ring *r, size_t n);
/* Copies n bytes from absolute offset `from`; the caller keeps within oldest..total. */
void ring_copy(const struct ring *r, uint64_t from, void *out, size_t n);
void ring_free(struct ring *r);

#endif
