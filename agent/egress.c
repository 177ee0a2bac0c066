/* Egress: see egress.h. The host judges, dials and may refuse; here bytes are passed on, and the number of connections is
 * bounded: those that come while there are too many wait in the listener's backlog. */
#define _GNU_SOURCE
#include "egress.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "dns.h"
#include "names.h"
#include "net.h"
#include "socks.h"

#define CONNECTIONS 960 /* of the 1,000 streams: names can still be looked up */
#define ACCEPTS_A_TURN 32
#define NO_FDS_PAUSE (100 * MSEC)
#define LAST_BYTES (60000 * MSEC) /* for a program that does not read what the host sent before its CLOSE */

static struct source listener = {.fd = -1};
static bool serving;
static unsigned connections;
static struct sock *leaving; /* the host is done with them; their last bytes are not with the program yet */
static int64_t resume_at = NEVER;

static void resume(void)
{
    resume_at = NEVER;
    if (serving)
        loop_want(&listener, EPOLLIN);
}

static void gone(struct sock *k)
{
    sock_free(k);
    connections--;
    resume();
}

static void connect_release(struct stream *s)
{
    if (s->ctx)
        gone(s->ctx);
}

/* Both directions have ended. The host knows, and its CLOSE follows. */
static void connect_ended(struct sock *k)
{
    k->orderly = true;
    loop_close(&k->src);
}

static void connect_broken(struct sock *k, int error)
{
    (void)error; /* the host has no use for it */
    stream_abandon(k->stream);
}

static void unlink_leaving(struct sock *k)
{
    struct sock **p = &leaving;

    while (*p != k)
        p = &(*p)->next;
    *p = k->next;
    gone(k);
}

static void left(struct sock *k)
{
    k->orderly = true;
    unlink_leaving(k);
}

static void left_broken(struct sock *k, int error)
{
    (void)error;
    unlink_leaving(k);
}

/* CLOSE: refused, broken, or over. */
static void connect_closed(struct stream *s, const struct fields *f)
{
    struct sock *k = s->ctx;

    if (fields_int(f, TAG_ERRNO, 0))
        return;
    k->orderly = true;
    if (!k->rest_len)
        return;
    s->ctx = k->stream = NULL;
    k->orderly = false; /* until the last byte is with the program */
    k->ended = left;
    k->broken = left_broken;
    k->deadline = now_ns() + LAST_BYTES;
    k->next = leaving;
    leaving = k;
    sock_want(k);
}

static const struct stream_ops connect_ops = {
    .data = sock_data,
    .end = sock_end,
    .pump = sock_pump,
    .closed = connect_closed,
    .release = connect_release,
};

/* False: the host cannot be asked. */
static bool ask(struct sock *k, uint32_t address, uint16_t port)
{
    struct in_addr in = {htonl(address)};
    const char *name = names_find(address);
    char text[INET_ADDRSTRLEN];
    uint8_t buf[512];
    struct fw w = {buf, 0, sizeof buf, false};

    fw_int(&w, TAG_OP, OP_CONNECT);
    fw_text(&w, TAG_ADDRESS, inet_ntop(AF_INET, &in, text, sizeof text) ? text : "");
    if (name)
        fw_text(&w, TAG_NAME, name);
    fw_int(&w, TAG_PORT, port);
    k->stream = stream_open(&w, &connect_ops, k);
    return k->stream != NULL;
}

static void take(int fd)
{
    uint32_t address;
    uint16_t port;
    struct sock *k;

    if (net_destination(fd, &address, &port) < 0) {
        sock_reset_fd(fd);
        return;
    }
    if (port == 53) {
        dns_serve_tcp(fd);
        return;
    }
    sock_tune(fd);
    k = sock_new(fd, CHANNEL_IN, sock_event);
    if (!k)
        return;
    k->ended = connect_ended;
    k->broken = connect_broken;
    if (!ask(k, address, port)) {
        sock_free(k);
        return;
    }
    connections++;
    sock_want(k);
}

static void on_connection(struct source *src, uint32_t events)
{
    (void)events;
    for (int i = 0; i < ACCEPTS_A_TURN; i++) {
        int fd;

        if (connections >= CONNECTIONS || !stream_possible()) {
            loop_want(src, 0);
            if (connections < CONNECTIONS)
                stream_when_possible(resume);
            return;
        }
        fd = accept4(src->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            take(fd);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            loop_want(src, 0); /* until one ends, or a while has passed */
            resume_at = now_ns() + NO_FDS_PAUSE;
            return;
        } else if (errno != EINTR && errno != ECONNABORTED) {
            return;
        }
    }
}

int64_t egress_timers(int64_t now)
{
    int64_t next = NEVER;

    for (struct sock *k = leaving, *after; k; k = after) {
        after = k->next;
        if (now >= k->deadline)
            unlink_leaving(k);
        else
            next = earlier(next, k->deadline);
    }
    if (now >= resume_at)
        resume();
    return earlier(next, resume_at);
}

void egress_end(void)
{
    serving = false;
    loop_want(&listener, 0);
    while (leaving)
        unlink_leaving(leaving);
}

int egress_begin(void)
{
    egress_end();
    if (agent_egress_fd < 0 || (listener.fd < 0 && loop_add(&listener, agent_egress_fd, 0, on_connection) < 0))
        return -1;
    serving = true;
    resume();
    return 0;
}
