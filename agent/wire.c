/* The connection: serving frames, turns, holding. See wire.h and docs/wire.md. */
#define _GNU_SOURCE
#include "streams.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "intake.h"
#include "loop.h"
#include "net.h"

static struct source out_source = {.fd = -1};
struct outq wire_out;
static bool greeted, finishing, over, held;
static int exit_code;
static uint32_t last_id;

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
void wire_send(uint8_t type, uint8_t channel, uint32_t stream, const void *payload, size_t n)
{
    uint8_t *p = outq_reserve(&wire_out, WIRE_HEADER_SIZE + n);

    if (!p) {
        wire_abort(1, "the queue to the host overflowed");
        return;
    }
    frame_header(p, type, channel, stream, (uint32_t)n);
    if (n)
        memcpy(p + WIRE_HEADER_SIZE, payload, n);
    outq_commit(&wire_out, WIRE_HEADER_SIZE + n);
}

void wire_hello(const struct fw *w)
{
    wire_send(FRAME_HELLO, 0, 0, w->p, w->len);
}

static const char *on_open(const struct frame *f)
{
    struct stream *s;

    if (f->stream <= last_id)
        return "a stream id that was used before";
    last_id = f->stream;
    s = streams_theirs() < WIRE_MAX_STREAMS && !finishing ? stream_new(f->stream) : NULL;
    if (!s) {
        uint8_t buf[128];
        struct fw w = {buf, 0, sizeof buf, false};

        fw_int(&w, TAG_ERRNO, finishing ? ESHUTDOWN : streams_theirs() < WIRE_MAX_STREAMS ? ENOMEM : EMFILE);
        fw_text(&w, TAG_MESSAGE, "the sandbox takes no more streams now");
        wire_send(FRAME_CLOSE, 0, f->stream, w.p, w.len);
        return NULL;
    }
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

/* The host's REPLY or CLOSE on a stream of ours. */
static const char *on_answer(struct stream *s, const struct frame *f)
{
    static const tag_set known = TAG_BIT(TAG_ERRNO) | TAG_BIT(TAG_MESSAGE) | TAG_BIT(TAG_WHAT) |
                                  TAG_BIT(TAG_ADDRESS) | TAG_BIT(TAG_PORT);
    struct fields fields;
    const char *why;

    if (fields_parse(f->payload, f->length, known, &fields, &why))
        return "an answer that cannot be understood";
    if (f->type == FRAME_REPLY) {
        if (s->ops && s->ops->reply)
            s->ops->reply(s, &fields);
        return NULL;
    }
    if (s->ops && s->ops->closed)
        s->ops->closed(s, &fields);
    stream_free(s);
    return NULL;
}

/* A second HELLO begins the connection anew: the sandbox was restored from a checkpoint and another
 * host holds it. Streams of the old one are forgotten without a word; processes live on. */
void wire_forget(void)
{
    streams_forget();
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
        if (greeted) {
            net_restored();
            wire_forget();
        }
        greeted = true;
        if (hello_handle(f->payload, f->length, &why))
            return why;
        return NULL;
    case FRAME_PING:
        wire_send(FRAME_PONG, 0, 0, f->payload, f->length);
        return NULL;
    case FRAME_PONG:
        return NULL;
    case FRAME_OPEN:
        return on_open(f);
    default:
        break;
    }
    if (stream_is_own(f->stream) ? !stream_was_own(f->stream) : f->stream > last_id)
        return "a frame for a stream that was never opened";
    s = stream_find(f->stream);
    if (!s || (s->abandoned && f->type != FRAME_CLOSE))
        return NULL; /* over already: it crossed ours on the wire */
    switch (f->type) {
    case FRAME_REPLY:
    case FRAME_CLOSE:
        return on_answer(s, f);
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
    default: /* RESET of one of the host's: the parser lets nothing else through */
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

bool wire_going(void)
{
    return !held && !over;
}

bool wire_open(void)
{
    return wire_going() && greeted && !finishing;
}

bool wire_full(void)
{
    return outq_len(&wire_out) >= OUT_STOP;
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
    return (streams_ready() && outq_len(&wire_out) < OUT_HIGH) || (intake_stalled() && !wire_full());
}

bool wire_turn(void)
{
    if (intake_stalled() && !held)
        intake_go_on();
    streams_turn();
    if (!over && outq_len(&wire_out) && outq_flush(&wire_out, out_source.fd) < 0)
        wire_abort(0, NULL);
    streams_tell();
    loop_want(&out_source, outq_len(&wire_out) ? EPOLLOUT : 0);
    loop_want(&intake_source, (held || !wire_full()) && !finishing ? EPOLLIN : 0);
    if (finishing && outq_len(&wire_out) == 0)
        over = true;
    return !over;
}

void wire_trim(void)
{
    outq_trim(&wire_out);
    intake_trim();
}
