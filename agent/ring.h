/* The last bytes a process wrote on one channel, addressed by absolute offset since its start. */
#ifndef SLOPLET_RING_H
#define SLOPLET_RING_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

struct ring {
    uint8_t *buf; /* mapped when the first byte comes */
    size_t size;  /* a power of two, at least one page */
    uint64_t total;
};

/* Smallest legal size that holds `bytes`. */
size_t ring_round(uint64_t bytes);
/* Offset of the oldest byte still kept. */
uint64_t ring_oldest(const struct ring *r);
size_t ring_kept(const struct ring *r);
/* Where the next `want` bytes (at most size) go: 1 or 2 pieces, or 0 if there is no memory. */
int ring_space(struct ring *r, size_t want, struct iovec iov[2]);
void ring_advance(struct ring *r, size_t n);
/* Copies n bytes from absolute offset `from`; the caller keeps within oldest..total. */
void ring_copy(const struct ring *r, uint64_t from, void *out, size_t n);
void ring_free(struct ring *r);

#endif
