/* Streams over the one connection: who gets which frame, credit both ways, and fair turns. */
#ifndef SLOPLET_WIRE_H
#define SLOPLET_WIRE_H

#include "fields.h"
#include "frames.h"

struct stream;

enum pump { PUMP_WAIT, PUMP_AGAIN, PUMP_GONE };

/* What an operation does with its stream. Any may be NULL. A callback that closes the stream must
 * not touch it afterwards.
 *
 * A stream is either the host's (odd id: it asked, we answer by stream_reply and one stream_close), or our own
 * (stream_open: we ask, it answers, and then closed is called). */
struct stream_ops {
    void (*data)(struct stream *s, const uint8_t *p, uint32_t n);
    void (*end)(struct stream *s);
    void (*ctrl)(struct stream *s, const struct fields *f);
    /* The host gave up: must lead to a close. NULL: CLOSE ECANCELED at once. */
    void (*reset)(struct stream *s);
    /* A turn to make progress, given when there may be credit and room: small steps only.
     * GONE says that the stream was closed within. */
    enum pump (*pump)(struct stream *s);
    /* Of our own: the host's REPLY, and its CLOSE; after closed the stream is freed. Neither may free it. */
    void (*reply)(struct stream *s, const struct fields *f);
    void (*closed)(struct stream *s, const struct fields *f);
    /* Releases ctx, whatever the reason the stream ended. */
    void (*release)(struct stream *s);
};

struct stream {
    uint32_t id;
    uint32_t send_credit;            /* DATA bytes we may still send */
    uint32_t recv_window, recv_owed; /* DATA bytes the host may send; consumed, not granted yet */
    bool host_ended, queued, abandoned;
    const struct stream_ops *ops;
    void *ctx;
    struct stream *next, *next_ready; /* hash chain; ready queue */
};

/* Called for each OPEN, with the payload: must close the stream or set ops. */
void op_dispatch(struct stream *s, const uint8_t *payload, uint32_t n);
/* Called for each HELLO. Non-zero ends the agent after the answer was flushed. */
int hello_handle(const uint8_t *payload, uint32_t n, const char **why);

int wire_init(int in_fd, int out_fd);
/* For intake.c. Serves one frame: NULL, or the rule that it breaks. */
const char *wire_take(const struct frame *f);
bool wire_stopped(void); /* nothing is served any more */
bool wire_full(void);    /* the host must read before it may ask for more */
/* Runs the streams that are ready, once each, and flushes. False when the connection is over. */
bool wire_turn(void);
/* True if some stream could go on right now. */
bool wire_busy(void);
/* While held nothing is sent but what is queued already, and nothing served but a THAW or HELLO: what else comes is
 * read, kept, and served after the hold. */
void wire_hold(bool held);
bool wire_held(void);
/* Instead of loop_wait while held. */
int wire_wait(void);
void wire_trim(void);
/* Ends the agent's loop, with an exit code, once everything queued is flushed. */
void wire_finish(int code);
void wire_abort(int code, const char *why);
int wire_exit_code(void);
/* Drops all streams without a word: half-written files go, processes stay. */
void wire_forget(void);
void wire_hello(const struct fw *w);

/* Opens a stream of our own; w holds OP and the other fields. NULL: not possible now (too many, frozen, or the host
 * does not read). The host forgets none: each counts until its CLOSE has come. */
struct stream *stream_open(const struct fw *w, const struct stream_ops *ops, void *ctx);
bool stream_possible(void);
/* Calls fn once, from wire_turn, as soon as stream_open may work again. There is one who waits. */
void stream_when_possible(void (*fn)(void));
/* Gives one of our own up, at any moment: released at once, RESET is sent, whatever still comes for it is dropped. */
void stream_abandon(struct stream *s);
/* No more DATA from us. */
void stream_end(struct stream *s, int channel);

void stream_ready(struct stream *s);
void stream_reply(struct stream *s, const struct fw *w);
void stream_close(struct stream *s, const struct fw *w);
void stream_done(struct stream *s); /* CLOSE without fields */
/* CLOSE with ERRNO and MESSAGE; what may be NULL. */
void stream_fail(struct stream *s, int error, const char *what, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Room for up to *max DATA bytes right now (credit and queue permitting), else NULL. */
uint8_t *stream_data_begin(struct stream *s, size_t *max);
void stream_data_commit(struct stream *s, int channel, size_t n);
/* The operation has taken n DATA bytes: grants credit back in lumps. */
void stream_consumed(struct stream *s, uint32_t n);

#endif
