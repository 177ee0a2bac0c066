/* The frame parser and the out queue: see frames.h. */
#include "frames.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto.h"

/* On whose streams the host may send a type: on the connection itself, on those it opened, on those we opened, on both. */
enum whose { CONNECTION, THEIRS, OURS, ANY };

static bool fits(enum whose whose, uint32_t stream)
{
    switch (whose) {
    case CONNECTION:
        return stream == 0;
    case THEIRS:
        return stream % 2 == 1;
    case OURS:
        return stream && stream % 2 == 0;
    default:
        return stream != 0;
    }
}

static const char *check_header(const struct frame *f, const uint8_t *p)
{
    uint32_t most = WIRE_MAX_PAYLOAD, least = 0;
    uint8_t channel = CHANNEL_IN;
    enum whose whose = ANY;

    switch (f->type) {
    case FRAME_HELLO:
        whose = CONNECTION;
        most = WIRE_MAX_OPEN;
        break;
    case FRAME_OPEN:
        whose = THEIRS;
        most = WIRE_MAX_OPEN;
        break;
    case FRAME_DATA:
        least = 1;
        channel = f->stream % 2 ? CHANNEL_IN : CHANNEL_OUT;
        break;
    case FRAME_END:
        most = 0;
        if (f->channel == CHANNEL_OUT && f->stream % 2 == 0)
            channel = CHANNEL_OUT;
        break;
    case FRAME_RESET:
        whose = THEIRS;
        most = 0;
        break;
    case FRAME_CREDIT:
        least = most = 4;
        break;
    case FRAME_CTRL:
        whose = THEIRS;
        break;
    case FRAME_REPLY:
    case FRAME_CLOSE:
        whose = OURS;
        break;
    case FRAME_PING:
    case FRAME_PONG:
        whose = CONNECTION;
        most = WIRE_MAX_PING;
        break;
    default:
        return "a frame type the host may not send";
    }
    if (f->length > most || f->length < least)
        return "a frame length out of bounds";
    if (p[6] || p[7])
        return "a header whose spare bytes are not zero";
    if (f->channel != channel)
        return "a channel the host may not send on";
    return fits(whose, f->stream) ? NULL : "a stream id that does not fit the frame type";
}

int frame_parse(const uint8_t *p, size_t n, struct frame *f, size_t *used, const char **why)
{
    if (n < WIRE_HEADER_SIZE)
        return FRAME_MORE;
    f->length = get32(p);
    f->type = p[4];
    f->channel = p[5];
    f->stream = get32(p + 8);
    f->payload = p + WIRE_HEADER_SIZE;
    *why = check_header(f, p);
    if (*why)
        return FRAME_BAD;
    if (n - WIRE_HEADER_SIZE < f->length)
        return FRAME_MORE;
    *used = WIRE_HEADER_SIZE + (size_t)f->length;
    return FRAME_READY;
}

void frame_header(uint8_t *p, uint8_t type, uint8_t channel, uint32_t stream, uint32_t length)
{
    put32(p, length);
    p[4] = type;
    p[5] = channel;
    p[6] = p[7] = 0;
    put32(p + 8, stream);
}

size_t outq_len(const struct outq *q)
{
    return q->tail - q->head;
}

uint8_t *outq_reserve(struct outq *q, size_t n)
{
    if (!q->buf) {
        void *p = mmap(NULL, OUT_CAP, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED)
            return NULL;
        madvise(p, OUT_CAP, MADV_DONTFORK); /* shims have no use for it */
        q->buf = p;
    }
    if (n > OUT_CAP - outq_len(q))
        return NULL;
    if (n > OUT_CAP - q->tail) {
        memmove(q->buf, q->buf + q->head, outq_len(q));
        q->tail -= q->head;
        q->head = 0;
    }
    return q->buf + q->tail;
}

void outq_commit(struct outq *q, size_t n)
{
    q->tail += n;
    if (q->tail > q->touched)
        q->touched = q->tail;
}

int outq_flush(struct outq *q, int fd)
{
    while (q->head < q->tail) {
        ssize_t n = write(fd, q->buf + q->head, q->tail - q->head);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (n <= 0)
            return -1;
        q->head += (size_t)n;
    }
    q->head = q->tail = 0;
    return 0;
}

void outq_trim(struct outq *q)
{
    if (q->buf && q->head == q->tail && q->touched > 8192) {
        madvise(q->buf, OUT_CAP, MADV_DONTNEED);
        q->touched = 0;
    }
}
