/* DIAL: the host connects to a port inside the sandbox. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ops.h"
#include "socks.h"

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

static socklen_t make_address(union address *a, const char *text, uint16_t port)
{
    memset(a, 0, sizeof *a);
    if (inet_pton(AF_INET, text, &a->v4.sin_addr) == 1) {
        a->v4.sin_family = AF_INET;
        a->v4.sin_port = htons(port);
        return sizeof a->v4;
    }
    if (inet_pton(AF_INET6, text, &a->v6.sin6_addr) == 1) {
        a->v6.sin6_family = AF_INET6;
        a->v6.sin6_port = htons(port);
        return sizeof a->v6;
    }
    return 0;
}

/* A socket that connects or has connected (*done); -1 with errno. */
static int begin(const char *text, uint16_t port, bool *done)
{
    union address a;
    socklen_t len = make_address(&a, text, port);
    int fd = socket(a.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), error;

    if (fd < 0)
        return -1;
    sock_tune(fd);
    *done = connect(fd, &a.any, len) == 0;
    if (*done || errno == EINPROGRESS)
        return fd;
    error = errno;
    close(fd);
    errno = error;
    return -1;
}

static void dial_failed(struct stream *s, int error)
{
    stream_fail(s, error, "port", "the port cannot be reached: %s", strerror(error));
}

static void dial_ended(struct sock *k)
{
    k->orderly = true;
    stream_done(k->stream);
}

static void dial_broken(struct sock *k, int error)
{
    stream_fail(k->stream, error, "port", "the connection broke: %s", strerror(error));
}

static void dial_connected(struct sock *k)
{
    struct fw w = {NULL, 0, 0, false};

    k->connecting = false;
    stream_reply(k->stream, &w);
    sock_flush(k); /* what the host sent meanwhile, and perhaps its END */
}

static void on_connect(struct source *src, uint32_t events);

/* Goes on with fd, of a connect that has finished or not. */
static void wait_for(struct sock *k, int fd, bool done)
{
    loop_add(&k->src, fd, 0, done ? sock_event : on_connect);
    if (done)
        dial_connected(k);
    else
        sock_want(k);
}

static void on_connect(struct source *src, uint32_t events)
{
    struct sock *k = OWNER(src, struct sock, src);
    int error = 0, fd = -1;
    socklen_t len = sizeof error;
    uint16_t port = k->also_v6;
    bool done;

    (void)events;
    if (getsockopt(src->fd, SOL_SOCKET, SO_ERROR, &error, &len) < 0)
        error = errno;
    k->also_v6 = 0;
    if (error == ECONNREFUSED && port)
        fd = begin("::1", port, &done);
    if (fd >= 0) {
        loop_close(src);
        wait_for(k, fd, done);
    } else if (error) { /* the first one's reason is as good as the second one's, and all know it */
        dial_failed(k->stream, error);
    } else {
        src->fn = sock_event;
        dial_connected(k);
    }
}

void op_dial(struct stream *s, const struct fields *f)
{
    static const struct stream_ops ops = {.data = sock_data, .end = sock_end, .pump = sock_pump, .release = sock_release};
    int64_t port = fields_int(f, TAG_PORT, 0);
    char text[INET6_ADDRSTRLEN] = "127.0.0.1";
    union address a;
    bool done = false;
    struct sock *k;
    int fd;

    if (fields_have(f, TAG_ADDRESS) && f->text[TAG_ADDRESS].len < sizeof text) {
        memcpy(text, f->text[TAG_ADDRESS].p, f->text[TAG_ADDRESS].len);
        text[f->text[TAG_ADDRESS].len] = 0;
    } else if (fields_have(f, TAG_ADDRESS)) {
        text[0] = 0;
    }
    if (port < 1 || port > 65535 || !make_address(&a, text, (uint16_t)port)) {
        stream_fail(s, EINVAL, "port", "not an address and a port that can be connected to");
        return;
    }
    fd = begin(text, (uint16_t)port, &done);
    if (fd < 0 && errno == ECONNREFUSED && !fields_have(f, TAG_ADDRESS)) {
        fd = begin("::1", (uint16_t)port, &done);
        if (fd < 0)
            errno = ECONNREFUSED;
    }
    k = fd < 0 ? NULL : sock_new(fd, CHANNEL_OUT, done ? sock_event : on_connect);
    if (!k) {
        dial_failed(s, fd < 0 ? errno : ENOMEM);
        return;
    }
    k->stream = s;
    k->connecting = true;
    k->also_v6 = fields_have(f, TAG_ADDRESS) ? 0 : (uint16_t)port;
    k->ended = dial_ended;
    k->broken = dial_broken;
    s->ctx = k;
    s->ops = &ops;
    if (done)
        dial_connected(k);
    else
        sock_want(k);
}
