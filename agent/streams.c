/* The table of streams, who is ready to go on, and what an operation does with its stream. See wire.h and streams.h. */
#define _GNU_SOURCE
#include "streams.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define BUCKETS 128
#define GRANT_LUMP (WIRE_INITIAL_CREDIT / 2)
#define OWN_MAX 1000 /* fewer than the host takes */

static struct stream *table[BUCKETS];
static struct stream *ready_head, **ready_tail = &ready_head;
static uint32_t next_own = 2;
static unsigned their_count, own_count;
static void (*when_possible)(void);

static struct stream **slot_of(uint32_t id)
{
    return &table[(id >> 1) % BUCKETS];
}

struct stream *stream_find(uint32_t id)
{
    struct stream *s = *slot_of(id);

    while (s && s->id != id)
        s = s->next;
    return s;
}

static void unqueue(struct stream *s)
{
    struct stream **p = &ready_head;

    if (!s->queued)
        return;
    while (*p != s)
        p = &(*p)->next_ready;
    *p = s->next_ready;
    if (ready_tail == &s->next_ready)
        ready_tail = p;
    s->queued = false;
}

void stream_ready(struct stream *s)
{
    if (s->queued || !s->ops || !s->ops->pump)
        return;
    s->queued = true;
    s->next_ready = NULL;
    *ready_tail = s;
    ready_tail = &s->next_ready;
}

bool stream_is_own(uint32_t id)
{
    return id % 2 == 0;
}

struct stream *stream_new(uint32_t id)
{
    struct stream *s = calloc(1, sizeof *s);

    if (!s)
        return NULL;
    s->id = id;
    s->send_credit = s->recv_window = WIRE_INITIAL_CREDIT;
    s->next = *slot_of(id);
    *slot_of(id) = s;
    ++*(stream_is_own(id) ? &own_count : &their_count);
    return s;
}

void stream_free(struct stream *s)
{
    struct stream **p = slot_of(s->id);

    unqueue(s);
    while (*p != s)
        p = &(*p)->next;
    *p = s->next;
    --*(stream_is_own(s->id) ? &own_count : &their_count);
    if (s->ops && s->ops->release)
        s->ops->release(s);
    free(s);
}

void stream_reply(struct stream *s, const struct fw *w)
{
    wire_send(FRAME_REPLY, 0, s->id, w->p, w->len);
}

void stream_close(struct stream *s, const struct fw *w)
{
    wire_send(FRAME_CLOSE, 0, s->id, w ? w->p : NULL, w ? w->len : 0);
    stream_free(s);
}

void stream_done(struct stream *s)
{
    stream_close(s, NULL);
}

static void fail_fields(struct fw *w, int error, const char *what, const char *format, va_list args)
{
    char text[512];

    vsnprintf(text, sizeof text, format, args);
    fw_int(w, TAG_ERRNO, error);
    fw_text(w, TAG_MESSAGE, text);
    if (what)
        fw_text(w, TAG_WHAT, what);
}

void stream_fail(struct stream *s, int error, const char *what, const char *format, ...)
{
    uint8_t buf[640];
    struct fw w = {buf, 0, sizeof buf, false};
    va_list args;

    va_start(args, format);
    fail_fields(&w, error, what, format, args);
    va_end(args);
    stream_close(s, &w);
}

bool stream_possible(void)
{
    return wire_open() && own_count < OWN_MAX && next_own && outq_len(&wire_out) < OUT_STOP;
}

void stream_when_possible(void (*fn)(void))
{
    when_possible = fn;
}

struct stream *stream_open(const struct fw *w, const struct stream_ops *ops, void *ctx)
{
    struct stream *s = stream_possible() && !w->overflow && w->len <= WIRE_MAX_PAYLOAD ? stream_new(next_own) : NULL;

    if (!s)
        return NULL;
    s->ops = ops;
    s->ctx = ctx;
    next_own += 2; /* 0 when all are used: no more then */
    wire_send(FRAME_OPEN, 0, s->id, w->p, w->len);
    return s;
}

void stream_abandon(struct stream *s)
{
    unqueue(s);
    if (s->ops && s->ops->release)
        s->ops->release(s);
    s->ops = NULL;
    s->ctx = NULL;
    s->abandoned = true;
    wire_send(FRAME_RESET, 0, s->id, NULL, 0);
}

void stream_end(struct stream *s, int channel)
{
    wire_send(FRAME_END, (uint8_t)channel, s->id, NULL, 0);
}

uint8_t *stream_data_begin(struct stream *s, size_t *max)
{
    size_t n = s->send_credit < WIRE_MAX_PAYLOAD ? s->send_credit : WIRE_MAX_PAYLOAD;
    uint8_t *p;

    if (!n || outq_len(&wire_out) >= OUT_HIGH)
        return NULL;
    p = outq_reserve(&wire_out, WIRE_HEADER_SIZE + n);
    *max = n;
    return p ? p + WIRE_HEADER_SIZE : NULL;
}

void stream_data_commit(struct stream *s, int channel, size_t n)
{
    uint8_t *p = outq_reserve(&wire_out, WIRE_HEADER_SIZE + n);

    frame_header(p, FRAME_DATA, (uint8_t)channel, s->id, (uint32_t)n);
    outq_commit(&wire_out, WIRE_HEADER_SIZE + n);
    s->send_credit -= (uint32_t)n;
}

void stream_consumed(struct stream *s, uint32_t n)
{
    uint8_t grant[4];

    s->recv_owed += n;
    if (s->recv_owed < GRANT_LUMP || s->host_ended)
        return;
    put32(grant, s->recv_owed);
    s->recv_window += s->recv_owed;
    s->recv_owed = 0;
    wire_send(FRAME_CREDIT, 0, s->id, grant, sizeof grant);
}

bool stream_was_own(uint32_t id)
{
    return !next_own || id < next_own;
}

unsigned streams_theirs(void)
{
    return their_count;
}

void streams_forget(void)
{
    for (int i = 0; i < BUCKETS; i++)
        while (table[i])
            stream_free(table[i]);
    next_own = 2;
}

bool streams_ready(void)
{
    return ready_head != NULL;
}

void streams_turn(void)
{
    unsigned turns = 0;

    /* Everyone queued now gets one turn; who asks for more goes behind the others. */
    for (struct stream *s = ready_head; s; s = s->next_ready)
        turns++;
    while (turns-- && ready_head && outq_len(&wire_out) < OUT_HIGH && wire_going()) {
        struct stream *s = ready_head;
        unqueue(s);
        if (s->ops->pump(s) == PUMP_AGAIN)
            stream_ready(s);
    }
}

void streams_tell(void)
{
    void (*fn)(void) = when_possible;

    if (!fn || !stream_possible())
        return;
    when_possible = NULL;
    fn();
}
