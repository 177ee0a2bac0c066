/* epoll behind a very small face: see loop.h. */
#define _GNU_SOURCE
#include "loop.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define BATCH 64

static int epoll_fd = -1;
static struct epoll_event batch[BATCH];
static int batch_len, batch_at;

int loop_init(void)
{
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    return epoll_fd < 0 ? -1 : 0;
}

int loop_add(struct source *s, int fd, uint32_t events, source_fn *fn)
{
    struct epoll_event ev = {.events = events, .data.ptr = s};

    s->fd = fd;
    s->fn = fn;
    s->want = 0;
    if (events && epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &ev) < 0) {
        s->fd = -1;
        return -1;
    }
    s->want = events;
    return 0;
}

/* A source may go or pause while its event still waits in the batch being handled. */
static void drop_pending(const struct source *s)
{
    for (int i = batch_at + 1; i < batch_len; i++)
        if (batch[i].data.ptr == s)
            batch[i].data.ptr = NULL;
}

void loop_want(struct source *s, uint32_t events)
{
    struct epoll_event ev = {.events = events, .data.ptr = s};

    if (s->fd < 0 || s->want == events)
        return;
    if (!events) {
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, s->fd, &ev);
        drop_pending(s);
    } else {
        epoll_ctl(epoll_fd, s->want ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, s->fd, &ev);
    }
    s->want = events;
}

void loop_close(struct source *s)
{
    if (s->fd < 0)
        return;
    loop_want(s, 0);
    drop_pending(s);
    close(s->fd);
    s->fd = -1;
}

int loop_wait(int64_t timeout_ns)
{
    int ms = -1, count;

    if (timeout_ns != NEVER) {
        int64_t rounded = timeout_ns <= 0 ? 0 : (timeout_ns + MSEC - 1) / MSEC;
        ms = rounded > 3600000 ? 3600000 : (int)rounded;
    }
    count = batch_len = epoll_wait(epoll_fd, batch, BATCH, ms);
    if (batch_len < 0) {
        batch_len = 0;
        return errno == EINTR ? 1 : -1;
    }
    for (batch_at = 0; batch_at < batch_len; batch_at++) {
        struct source *s = batch[batch_at].data.ptr;
        if (s && s->fd >= 0)
            s->fn(s, batch[batch_at].events);
    }
    batch_len = 0;
    return count;
}

int loop_wait_pair(struct source *a, struct source *b)
{
    struct source *both[2] = {a, b};
    struct pollfd fds[2];
    int count;

    for (int i = 0; i < 2; i++) /* a source that nothing is wanted of must not wake us by hanging up */
        fds[i] = (struct pollfd){.fd = both[i]->want ? both[i]->fd : -1, .events = (short)both[i]->want};
    count = poll(fds, 2, -1);
    if (count < 0)
        return errno == EINTR ? 1 : -1;
    for (int i = 0; i < 2; i++)
        if (fds[i].revents && both[i]->fd == fds[i].fd)
            both[i]->fn(both[i], (uint32_t)fds[i].revents);
    return count;
}

void loop_cut(void)
{
    batch_at = batch_len;
}

int64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}
