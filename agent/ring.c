/* Ring buffers: see ring.h. */
#include "ring.h"

#include <string.h>
#include <sys/mman.h>

size_t ring_round(uint64_t bytes)
{
    size_t size = 4096;

    while (size < bytes)
        size *= 2;
    return size;
}

size_t ring_kept(const struct ring *r)
{
    if (!r->buf)
        return 0;
    return r->total < r->size ? (size_t)r->total : r->size;
}

uint64_t ring_oldest(const struct ring *r)
{
    return r->total - ring_kept(r);
}

int ring_space(struct ring *r, size_t want, struct iovec iov[2])
{
    size_t at = (size_t)(r->total & (r->size - 1));

    if (!r->buf) {
        void *p = mmap(NULL, r->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED)
            return 0;
        madvise(p, r->size, MADV_DONTFORK); /* forking a shim must not copy its page tables */
        r->buf = p;
    }
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
    size_t at = (size_t)(from & (r->size - 1));
    size_t first = n < r->size - at ? n : r->size - at;

    memcpy(out, r->buf + at, first);
    memcpy((uint8_t *)out + first, r->buf, n - first);
}

void ring_free(struct ring *r)
{
    if (r->buf)
        munmap(r->buf, r->size);
    r->buf = NULL;
}
