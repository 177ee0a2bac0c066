/* A TCP socket inside the sandbox and a stream, joined: bytes both ways under credit, half closes, resets. DIAL and egress
 * use it. */
#ifndef SLOPLET_SOCKS_H
#define SLOPLET_SOCKS_H

#include "loop.h"
#include "wire.h"

struct sock {
    struct source src;
    struct stream *stream; /* NULL: the host is done with it, and only `rest` is still on its way to the program */
    int channel;           /* of what we send */
    bool connecting, starved, hung; /* starved: what it has to say waits for credit; hung: epoll would tell of a hang-up for ever */
    bool read_ended, shut, orderly; /* END was sent; the host's was passed on; closed without a reset */
    int error;                      /* broken, but what it had said before is still read */
    uint8_t *rest;                  /* what the kernel has not taken yet: at most one window */
    size_t rest_at, rest_len, rest_cap;
    /* Both directions have ended in order, or it is broken. Either must end in sock_free, by way of the stream's release or (where
     * there is no stream) directly. */
    void (*ended)(struct sock *k);
    void (*broken)(struct sock *k, int error);
    struct sock *next; /* these are the owner's */
    int64_t deadline;
    uint16_t also_v6;
};

/* Takes over fd, which is non-blocking; `connecting` if connect has not finished yet, and then call sock_connected or
 * sock_free after the first event. NULL: fd was reset and closed. */
struct sock *sock_new(int fd, int channel, source_fn *fn);
/* Closes it: with a reset unless `orderly`. */
void sock_free(struct sock *k);
void sock_reset_fd(int fd);
/* Small pieces are sent at once, and an other end that does not exist any more is noticed. */
void sock_tune(int fd);

/* For stream_ops, with the sock as ctx. */
void sock_data(struct stream *s, const uint8_t *p, uint32_t n);
void sock_end(struct stream *s);
enum pump sock_pump(struct stream *s);
void sock_release(struct stream *s);

/* The usual source_fn. */
void sock_event(struct source *src, uint32_t events);
/* Says anew what is waited for, after something has changed. */
void sock_want(struct sock *k);
/* Writes what rests, as far as it goes, and passes the host's END on behind it. */
void sock_flush(struct sock *k);

#endif
