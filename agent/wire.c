/* The connection: reading frames, the table of streams, turns. See wire.h and docs/wire.md. */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "intake.h"
#include "loop.h"

#define BUCKETS 128
#define GRANT_LUMP (WIRE_INITIAL_CREDIT / 2)

static struct source out_source = {.fd = -1};
static struct outq out;
static bool greeted, finishing, over, held;
static int exit_code;
static uint32_t last_id;
static unsigned stream_count;
static struct stream *table[BUCKETS];
static struct stream *ready_head, **ready_tail = &ready_head;

static struct stream **slot_of(uint32_t id)
{
    return &table[(id >> 1) % BUCKETS];
}

static struct stream *find(uint32_t id)
{
    struct stream *s = *slot_of(id);

    while (s && s->id != id)
        s = s->next;
    return s;
}

void wire_abort(int code, const char *why)
{
    if (over)
        return;
    over = true;
    exit_code = code;
    if (why)
        dprintf(2, "sloplet-agent: %s\n", why);
}

void wire_finish(int code)
{
    finishing = true;
    exit_code = code;
}

int wire_exit_code(void)
{
    return exit_code;
}

/* A frame that is never split by credit: control, or DATA whose credit the caller has checked. */
static void send_frame(uint8_t type, uint32_t stream, const void *payload, size_t n)
{
    uint8_t *p = outq_reserve(&out, WIRE_HEADER_SIZE + n);

    if (!p) {
        wire_abort(1, "the queue to the host overflowed");
        return;
    }
    frame_header(p, type, 0, stream, (uint32_t)n);
    if (n)
        memcpy(p + WIRE_HEADER_SIZE, payload, n);
    outq_commit(&out, WIRE_HEADER_SIZE + n);
}

void wire_hello(const struct fw *w)
{
    send_frame(FRAME_HELLO, 0, w->p, w->len);
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

static void stream_free(struct stream *s)
{
    struct stream **p = slot_of(s->id);

    unqueue(s);
    while (*p != s)
        p = &(*p)->next;
    *p = s->next;
    stream_count--;
    if (s->ops && s->ops->release)
        s->ops->release(s);
    free(s);
}

void stream_reply(struct stream *s, const struct fw *w)
{
    send_frame(FRAME_REPLY, s->id, w->p, w->len);
}

void stream_close(struct stream *s, const struct fw *w)
{
    send_frame(FRAME_CLOSE, s->id, w ? w->p : NULL, w ? w->len : 0);
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

uint8_t *stream_data_begin(struct stream *s, size_t *max)
{
    size_t n = s->send_credit < WIRE_MAX_PAYLOAD ? s->send_credit : WIRE_MAX_PAYLOAD;
    uint8_t *p;

    if (!n || outq_len(&out) >= OUT_HIGH)
        return NULL;
    p = outq_reserve(&out, WIRE_HEADER_SIZE + n);
    *max = n;
    return p ? p + WIRE_HEADER_SIZE : NULL;
}

void stream_data_commit(struct stream *s, int channel, size_t n)
{
    uint8_t *p = outq_reserve(&out, WIRE_HEADER_SIZE + n);

    frame_header(p, FRAME_DATA, (uint8_t)channel, s->id, (uint32_t)n);
    outq_commit(&out, WIRE_HEADER_SIZE + n);
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
    send_frame(FRAME_CREDIT, s->id, grant, sizeof grant);
}

static const char *on_open(const struct frame *f)
{
    struct stream *s;

    if (f->stream <= last_id)
        return "a stream id that was used before";
    last_id = f->stream;
    s = stream_count < WIRE_MAX_STREAMS && !finishing ? calloc(1, sizeof *s) : NULL;
    if (!s) {
        uint8_t buf[128];
        struct fw w = {buf, 0, sizeof buf, false};

        fw_int(&w, TAG_ERRNO, finishing ? ESHUTDOWN : stream_count < WIRE_MAX_STREAMS ? ENOMEM : EMFILE);
        fw_text(&w, TAG_MESSAGE, "the sandbox takes no more streams now");
        send_frame(FRAME_CLOSE, f->stream, w.p, w.len);
        return NULL;
    }
    s->id = f->stream;
    s->send_credit = s->recv_window = WIRE_INITIAL_CREDIT;
    s->next = *slot_of(s->id);
    *slot_of(s->id) = s;
    stream_count++;
    op_dispatch(s, f->payload, f->length);
    return NULL;
}

static const char *on_credit(struct stream *s, const struct frame *f)
{
    uint32_t n = get32(f->payload);

    if (n > WIRE_MAX_CREDIT - s->send_credit)
        return "more credit than may be outstanding";
    s->send_credit += n;
    stream_ready(s);
    return NULL;
}

static const char *on_data(struct stream *s, const struct frame *f)
{
    if (s->host_ended)
        return "DATA after END";
    if (f->length > s->recv_window)
        return "DATA without credit";
    s->recv_window -= f->length;
    if (s->ops && s->ops->data)
        s->ops->data(s, f->payload, f->length);
    else
        stream_consumed(s, f->length);
    return NULL;
}

static void on_ctrl(struct stream *s, const struct frame *f)
{
    static const tag_set known = TAG_BIT(TAG_KIND) | TAG_BIT(TAG_ROWS) | TAG_BIT(TAG_COLS) |
                                  TAG_BIT(TAG_SIGNUM) | TAG_BIT(TAG_FLAGS);
    struct fields fields;
    const char *why;

    if (fields_parse(f->payload, f->length, known, &fields, &why) || !fields_have(&fields, TAG_KIND))
        wire_abort(2, "protocol error: a CTRL frame that cannot be understood");
    else if (s->ops && s->ops->ctrl)
        s->ops->ctrl(s, &fields);
}

/* A second HELLO begins the connection anew: the sandbox was restored from a checkpoint and another
 * host holds it. Streams of the old one are forgotten without a word; processes live on. */
void wire_forget(void)
{
    for (int i = 0; i < BUCKETS; i++)
        while (table[i])
            stream_free(table[i]);
    last_id = 0;
}

const char *wire_take(const struct frame *f)
{
    const char *why = NULL;
    struct stream *s;

    if (!greeted && f->type != FRAME_HELLO)
        return "the first frame was not HELLO";
    switch (f->type) {
    case FRAME_HELLO:
        if (greeted)
            wire_forget();
        greeted = true;
        if (hello_handle(f->payload, f->length, &why))
            return why;
        return NULL;
    case FRAME_PING:
        send_frame(FRAME_PONG, 0, f->payload, f->length);
        return NULL;
    case FRAME_PONG:
        return NULL;
    case FRAME_OPEN:
        return on_open(f);
    default:
        break;
    }
    if (f->stream > last_id)
        return "a frame for a stream that was never opened";
    s = find(f->stream);
    if (!s)
        return NULL; /* closed already: it crossed ours on the wire */
    switch (f->type) {
    case FRAME_DATA:
        return on_data(s, f);
    case FRAME_END:
        if (s->host_ended)
            return "END twice";
        s->host_ended = true;
        if (s->ops && s->ops->end)
            s->ops->end(s);
        return NULL;
    case FRAME_CREDIT:
        return on_credit(s, f);
    case FRAME_CTRL:
        on_ctrl(s, f);
        return NULL;
    default: /* RESET: the parser lets nothing else through */
        if (s->ops && s->ops->reset)
            s->ops->reset(s);
        else
            stream_fail(s, ECANCELED, NULL, "the host gave up");
        return NULL;
    }
}

bool wire_stopped(void)
{
    return over || finishing;
}

bool wire_full(void)
{
    return outq_len(&out) >= OUT_STOP;
}

void wire_hold(bool hold)
{
    held = hold;
    loop_cut();
}

bool wire_held(void)
{
    return held;
}

int wire_wait(void)
{
    return loop_wait_pair(&intake_source, &out_source);
}

static void on_writable(struct source *src, uint32_t events)
{
    (void)src;
    (void)events; /* wire_turn flushes */
}

int wire_init(int in_fd, int out_fd)
{
    fcntl(out_fd, F_SETFL, fcntl(out_fd, F_GETFL) | O_NONBLOCK);
    if (intake_init(in_fd) < 0)
        return -1;
    return loop_add(&out_source, out_fd, 0, on_writable);
}

bool wire_busy(void)
{
    return (ready_head && outq_len(&out) < OUT_HIGH) || (intake_stalled() && !wire_full());
}

bool wire_turn(void)
{
    unsigned turns = 0;

    if (intake_stalled() && !held)
        intake_go_on();
    /* Everyone queued now gets one turn; who asks for more goes behind the others. */
    for (struct stream *s = ready_head; s; s = s->next_ready)
        turns++;
    while (turns-- && ready_head && outq_len(&out) < OUT_HIGH && !over && !held) {
        struct stream *s = ready_head;
        unqueue(s);
        if (s->ops->pump(s) == PUMP_AGAIN)
            stream_ready(s);
    }
    if (!over && outq_len(&out) && outq_flush(&out, out_source.fd) < 0)
        wire_abort(0, NULL);
    loop_want(&out_source, outq_len(&out) ? EPOLLOUT : 0);
    loop_want(&intake_source, (held || !wire_full()) && !finishing ? EPOLLIN : 0);
    if (finishing && outq_len(&out) == 0)
        over = true;
    return !over;
}

void wire_trim(void)
{
    outq_trim(&out);
    intake_trim();
}
