/* Ring buffers: see ring.h. */
#include "ring.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SMALLEST 1024

size_t ring_round(uint64_t bytes)
{
    size_t size = 4096;

    while (size < bytes)
        size *= 2;
    return size;
}

size_t ring_kept(const struct ring *r)
{
    uint64_t since = r->total - r->from;

    if (!r->buf)
        return 0;
    return since < r->size ? (size_t)since : r->size;
}

uint64_t ring_oldest(const struct ring *r)
{
    return r->total - ring_kept(r);
}

static uint8_t *map(size_t size)
{
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED)
        return NULL;
    madvise(p, size, MADV_DONTFORK); /* forking a shim must not copy its page tables */
    return p;
}

/* Most commands say little, and mapping memory for much is dear where gVisor does it. */
static size_t fitting(const struct ring *r, size_t n)
{
    size_t cap = SMALLEST;

    if (!r->buf && r->total)
        return r->size;
    while (cap < r->total + n)
        cap *= 2;
    return cap > r->size / 4 ? r->size : cap;
}

static bool make_room(struct ring *r, size_t n)
{
    size_t cap;
    uint8_t *buf;

    if (r->buf && (r->cap == r->size || r->total + n <= r->cap))
        return true;
    cap = fitting(r, n);
    buf = cap == r->size ? map(cap) : malloc(cap);
    if (!buf)
        return false;
    if (r->buf)
        memcpy(buf, r->buf, (size_t)r->total); /* all of it, from the first byte */
    else
        r->from = r->total;
    ring_free(r);
    r->buf = buf;
    r->cap = cap;
    return true;
}

void ring_append(struct ring *r, const uint8_t *data, size_t n)
{
    size_t at, first;

    if (make_room(r, n)) {
        at = (size_t)(r->total & (r->cap - 1));
        first = n < r->cap - at ? n : r->cap - at;
        memcpy(r->buf + at, data, first);
        memcpy(r->buf, data + first, n - first);
    } else {
        ring_free(r);
    }
    r->total += n;
}

int ring_space(const struct ring *r, size_t want, struct iovec iov[2])
{
    size_t at = (size_t)(r->total & (r->size - 1));

    if (!r->buf || r->cap < r->size)
        return 0;
    if (want > r->size)
        want = r->size;
    iov[0].iov_base = r->buf + at;
    iov[0].iov_len = want < r->size - at ? want : r->size - at;
    iov[1].iov_base = r->buf;
    iov[1].iov_len = want - iov[0].iov_len;
    return iov[1].iov_len ? 2 : 1;
}

void ring_advance(struct ring *r, size_t n)
{
    r->total += n;
}

void ring_copy(const struct ring *r, uint64_t from, void *out, size_t n)
{
    size_t at = (size_t)(from & (r->cap - 1));
    size_t first = n < r->cap - at ? n : r->cap - at;

    memcpy(out, r->buf + at, first);
    memcpy((uint8_t *)out + first, r->buf, n - first);
}

void ring_free(struct ring *r)
{
    if (r->buf && r->cap == r->size)
        munmap(r->buf, r->size);
    else
        free(r->buf);
    r->buf = NULL;
}
