/* Frames: a pure parser of what the host sends, and the bounded queue of what we send.
 * Nothing here knows about streams or does more I/O than flushing the queue. */
#ifndef SLOPLET_FRAMES_H
#define SLOPLET_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct frame {
    uint8_t type, channel;
    uint32_t stream, length;
    const uint8_t *payload; /* points into the parsed buffer */
};

enum { FRAME_BAD = -1, FRAME_MORE = 0, FRAME_READY = 1 };

/* Looks at the first frame in p[0..n). READY: *f is filled and *used says how long it was. MORE:
 * there is not all of it yet. BAD: *why names the broken rule. Rules that need no memory of earlier
 * frames are checked here and as soon as the header is there, so a lying length costs nothing. */
int frame_parse(const uint8_t *p, size_t n, struct frame *f, size_t *used, const char **why);

void frame_header(uint8_t *p, uint8_t type, uint8_t channel, uint32_t stream, uint32_t length);

/* Bytes on their way to the host. DATA is queued only below OUT_HIGH; control frames are bounded by
 * count, and no more requests are read above OUT_STOP, so OUT_CAP is never reached. */
#define OUT_HIGH (256u * 1024)
#define OUT_STOP (512u * 1024)
#define OUT_CAP (2u * 1024 * 1024)

struct outq {
    uint8_t *buf;
    size_t head, tail, touched;
};

size_t outq_len(const struct outq *q);
/* Room for n bytes at the end, or NULL if that would pass OUT_CAP or memory is short. */
uint8_t *outq_reserve(struct outq *q, size_t n);
void outq_commit(struct outq *q, size_t n);
/* Writes what the fd takes now. 0, or -1 when the host is gone. */
int outq_flush(struct outq *q, int fd);
/* Gives memory back to the kernel when the queue is empty. */
void outq_trim(struct outq *q);

static inline uint32_t get32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

#endif
