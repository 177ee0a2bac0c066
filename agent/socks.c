/* Sockets joined to streams: see socks.h. What is read goes straight into the queue to the host; what the host sends is
 * written at once, and credit is given back only for what the kernel took. */
#define _GNU_SOURCE
#include "socks.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define FRAMES_A_TURN 4

/* Seconds. A program that closes its end, or is gone, looks like one that has only said all it has to say. Its kernel forgets
 * such a connection after a minute, and answers the next probe with a reset. */
#define PROBE_AFTER 20
#define PROBE_AGAIN 10
#define PROBES 3

struct sock *sock_new(int fd, int channel, source_fn *fn)
{
    struct sock *k = calloc(1, sizeof *k);

    if (!k || loop_add(&k->src, fd, 0, fn) < 0) {
        free(k);
        sock_reset_fd(fd);
        return NULL;
    }
    k->channel = channel;
    return k;
}

void sock_tune(int fd)
{
    static const struct {
        int level, option, value;
    } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},
        {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, PROBE_AFTER},
        {IPPROTO_TCP, TCP_KEEPINTVL, PROBE_AGAIN},
        {IPPROTO_TCP, TCP_KEEPCNT, PROBES},
    };

    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        setsockopt(fd, options[i].level, options[i].option, &options[i].value, sizeof options[i].value);
}

void sock_reset_fd(int fd)
{
    struct linger now = {.l_onoff = 1, .l_linger = 0};

    setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    close(fd);
}

void sock_free(struct sock *k)
{
    struct linger now = {.l_onoff = 1, .l_linger = 0};

    if (!k->orderly && k->src.fd >= 0)
        setsockopt(k->src.fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    loop_close(&k->src);
    free(k->rest);
    free(k);
}

void sock_release(struct stream *s)
{
    if (s->ctx)
        sock_free(s->ctx);
    s->ctx = NULL;
}

/* A reset is noticed at any time, also while nothing is read. */
void sock_want(struct sock *k)
{
    uint32_t events = 0;

    if (k->stream && !k->read_ended && !k->starved && !k->connecting)
        events |= EPOLLIN;
    if (k->rest_len || k->connecting)
        events |= EPOLLOUT;
    if (!events && !k->hung)
        events = EPOLLERR;
    loop_want(&k->src, events);
}

static void give_up(struct sock *k, int error)
{
    k->broken(k, error == EPIPE ? ECONNRESET : error);
}

static void check_ended(struct sock *k)
{
    if (k->shut && (k->read_ended || !k->stream))
        k->ended(k);
    else
        sock_want(k);
}

/* Nothing more can be written. What the other end has said before it went away is still told. */
static void writing_failed(struct sock *k, int error)
{
    free(k->rest);
    k->rest = NULL;
    k->rest_at = k->rest_len = k->rest_cap = 0;
    if (!k->stream || k->read_ended) {
        give_up(k, error);
        return;
    }
    k->error = error;
    stream_ready(k->stream);
    sock_want(k);
}

/* What the kernel takes now; -1 with errno. */
static ssize_t send_some(int fd, const uint8_t *p, size_t n)
{
    size_t done = 0;

    while (done < n) {
        ssize_t got = send(fd, p + done, n - done, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EAGAIN)
            break;
        if (got < 0)
            return -1;
        done += (size_t)got;
    }
    return (ssize_t)done;
}

static void pass_end_on(struct sock *k)
{
    if (k->stream && k->stream->host_ended && !k->rest_len && !k->shut && !k->connecting) {
        shutdown(k->src.fd, SHUT_WR);
        k->shut = true;
    }
    check_ended(k);
}

void sock_flush(struct sock *k)
{
    ssize_t n = send_some(k->src.fd, k->rest + k->rest_at, k->rest_len);

    if (n < 0) {
        writing_failed(k, errno);
        return;
    }
    k->rest_at += (size_t)n;
    k->rest_len -= (size_t)n;
    if (!k->rest_len) {
        free(k->rest);
        k->rest = NULL;
        k->rest_at = k->rest_cap = 0;
        if (!k->stream)
            k->shut = true;
    }
    if (k->stream)
        stream_consumed(k->stream, (uint32_t)n);
    pass_end_on(k);
}

/* Behind what waits already. There is never more than the host has credit for. */
static bool keep(struct sock *k, const uint8_t *p, size_t n)
{
    if (k->rest_at && k->rest_at + k->rest_len + n > k->rest_cap) {
        memmove(k->rest, k->rest + k->rest_at, k->rest_len);
        k->rest_at = 0;
    }
    if (k->rest_len + n > k->rest_cap) {
        size_t cap = k->rest_cap ? k->rest_cap : 16384;
        uint8_t *more;

        while (cap < k->rest_len + n)
            cap *= 2;
        more = realloc(k->rest, cap);
        if (!more)
            return false;
        k->rest = more;
        k->rest_cap = cap;
    }
    memcpy(k->rest + k->rest_at + k->rest_len, p, n);
    k->rest_len += n;
    return true;
}

void sock_data(struct stream *s, const uint8_t *p, uint32_t n)
{
    struct sock *k = s->ctx;
    ssize_t done = 0;

    if (k->error) {
        stream_consumed(s, n); /* nobody takes it any more */
        return;
    }
    if (!k->rest_len && !k->connecting && (done = send_some(k->src.fd, p, n)) < 0) {
        stream_consumed(s, n);
        writing_failed(k, errno);
        return;
    }
    if (done)
        stream_consumed(s, (uint32_t)done);
    if ((uint32_t)done == n)
        return;
    if (!keep(k, p + done, n - (size_t)done))
        give_up(k, ENOMEM);
    else
        sock_want(k);
}

void sock_end(struct stream *s)
{
    pass_end_on(s->ctx);
}

/* Reads until there is nothing, or no room. */
enum pump sock_pump(struct stream *s)
{
    struct sock *k = s->ctx;

    if (k->read_ended || k->connecting)
        return PUMP_WAIT;
    for (int frames = 0; frames < FRAMES_A_TURN; frames++) {
        size_t max;
        uint8_t *to = stream_data_begin(s, &max);
        ssize_t n;

        k->starved = !to;
        if (!to) {
            sock_want(k);
            return s->send_credit ? PUMP_AGAIN : PUMP_WAIT;
        }
        n = recv(k->src.fd, to, max, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN && !k->error) {
            sock_want(k);
            return PUMP_WAIT;
        }
        if (n < 0 || (n == 0 && k->error)) {
            give_up(k, k->error ? k->error : errno);
            return PUMP_GONE;
        }
        if (n == 0) {
            k->read_ended = true;
            stream_end(s, k->channel);
            check_ended(k);
            return PUMP_GONE;
        }
        stream_data_commit(s, k->channel, (size_t)n);
        if ((size_t)n < max && !k->error) {
            sock_want(k);
            return PUMP_WAIT;
        }
    }
    return PUMP_AGAIN;
}

/* Hung up: both directions have ended, or it was reset. 0, or why it is broken. */
static int trouble(struct sock *k)
{
    int error = 0;
    socklen_t len = sizeof error;

    return getsockopt(k->src.fd, SOL_SOCKET, SO_ERROR, &error, &len) < 0 ? errno : error;
}

void sock_event(struct source *src, uint32_t events)
{
    struct sock *k = OWNER(src, struct sock, src);

    if (events & (EPOLLERR | EPOLLHUP)) {
        int error = trouble(k);

        k->hung = true;
        if (error) {
            writing_failed(k, error);
            return;
        }
    }
    if (k->stream && !k->read_ended)
        stream_ready(k->stream);
    if (k->rest_len)
        sock_flush(k);
    else
        sock_want(k);
}
