/* The name server's TCP connections: messages with two bytes of length before each, several on one connection. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dns_server.h"

#define CONNS 32
#define AT_ONCE 8 /* answers that a connection waits for, or has not read */
#define ANSWER (2 + DNS_ANSWER_MAX)
#define RETRY (1000 * MSEC)

struct dns_conn {
    struct source source;
    struct dns_conn *next;
    int64_t until;    /* closed then, unless something waits */
    unsigned waiting; /* messages that are to be answered */
    bool ended;       /* the program sends no more */
    size_t in_len, out_len;
    uint8_t in[2 + DNS_QUERY_MAX], out[AT_ONCE * ANSWER];
};

static struct source listener = {.fd = -1};
static struct dns_conn *conns;
static unsigned conn_count;
static int64_t next_due = NEVER, listen_again = NEVER;

static void conn_lives(struct dns_conn *c)
{
    c->until = now_ns() + DNS_PATIENCE;
    next_due = earlier(next_due, c->until);
}

static void conn_close(struct dns_conn *c)
{
    struct dns_conn **p = &conns;

    while (*p != c)
        p = &(*p)->next;
    *p = c->next;
    asks_forget(c);
    loop_close(&c->source);
    free(c);
    conn_count--;
    loop_want(&listener, EPOLLIN);
}

static bool conn_flush(struct dns_conn *c)
{
    ssize_t n;

    if (!c->out_len)
        return true;
    n = send(c->source.fd, c->out, c->out_len, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR;
    c->out_len -= (size_t)n;
    memmove(c->out, c->out + n, c->out_len);
    return true;
}

static bool conn_read(struct dns_conn *c)
{
    ssize_t n;

    if (c->ended || c->in_len == sizeof c->in)
        return true;
    n = recv(c->source.fd, c->in + c->in_len, sizeof c->in - c->in_len, MSG_DONTWAIT);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR;
    c->ended = n == 0;
    c->in_len += (size_t)n;
    return true;
}

/* The messages that are there, as long as there is room for their answers. False: this is no DNS. */
static bool conn_serve(struct dns_conn *c)
{
    const struct dns_client client = {.conn = c};

    while (c->in_len >= 2 && c->out_len + (c->waiting + 1) * ANSWER <= sizeof c->out) {
        size_t n = (size_t)c->in[0] << 8 | c->in[1];

        if (n > DNS_QUERY_MAX)
            return false;
        if (c->in_len < 2 + n)
            break;
        c->waiting++; /* conns_answer may come within */
        if (dns_take(&client, c->in + 2, n) == DNS_IGNORED)
            return false;
        c->in_len -= 2 + n;
        memmove(c->in, c->in + 2 + n, c->in_len);
        conn_lives(c);
    }
    return true;
}

/* Serves and sends until nothing more can be done now. False: it is over. */
static bool conn_turn(struct dns_conn *c)
{
    if (!conn_flush(c) || !conn_read(c))
        return false;
    do {
        if (!conn_serve(c))
            return false;
        if (!c->out_len) /* all that came is served, or waits */
            return !c->ended || c->waiting;
        if (!conn_flush(c))
            return false;
    } while (!c->out_len);
    return true;
}

static void on_conn(struct source *src, uint32_t events)
{
    struct dns_conn *c = OWNER(src, struct dns_conn, source);

    (void)events;
    if (conn_turn(c))
        loop_want(src, (c->ended || c->in_len == sizeof c->in ? 0 : EPOLLIN) | (c->out_len ? EPOLLOUT : 0));
    else
        conn_close(c);
}

void conns_answer(struct dns_conn *c, const uint8_t *p, size_t n)
{
    uint8_t *out = c->out + c->out_len;

    out[0] = (uint8_t)(n >> 8);
    out[1] = (uint8_t)n;
    memcpy(out + 2, p, n);
    c->out_len += 2 + n;
    c->waiting--;
    conn_lives(c);
    loop_want(&c->source, c->source.want | EPOLLOUT); /* on_conn sends it, and looks what else has come */
}

void conns_serve(int fd)
{
    struct dns_conn *c = conn_count < CONNS ? calloc(1, sizeof *c) : NULL;

    fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (!c || loop_add(&c->source, fd, EPOLLIN, on_conn) < 0) {
        free(c);
        close(fd);
        return;
    }
    c->next = conns;
    conns = c;
    conn_count++;
    conn_lives(c);
    if (conn_count == CONNS)
        loop_want(&listener, 0); /* the others wait in the kernel */
}

static void on_listener(struct source *src, uint32_t events)
{
    (void)events;
    while (conn_count < CONNS) {
        int fd = accept4(src->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (fd >= 0) {
            conns_serve(fd);
            continue;
        }
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) { /* it would only fail again and again */
            loop_want(src, 0);
            listen_again = now_ns() + RETRY;
            next_due = earlier(next_due, listen_again);
        }
        return;
    }
}

int conns_begin(int fd)
{
    return listener.fd >= 0 ? 0 : loop_add(&listener, fd, EPOLLIN, on_listener);
}

int64_t conns_timers(int64_t now)
{
    if (now < next_due)
        return next_due;
    next_due = NEVER;
    if (listen_again <= now) {
        listen_again = NEVER;
        loop_want(&listener, conn_count < CONNS ? EPOLLIN : 0);
    }
    next_due = listen_again;
    for (struct dns_conn *c = conns, *next; c; c = next) {
        next = c->next;
        if (c->until > now)
            next_due = earlier(next_due, c->until);
        else if (c->waiting)
            conn_lives(c);
        else
            conn_close(c);
    }
    return next_due;
}
