/* epoll behind a very small face: see loop.h. */
#define _GNU_SOURCE
#include "loop.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define BATCH 64
#define SLOTS_MAX (1 << 20)

static int epoll_fd = -1;
static struct epoll_event batch[BATCH];
static int batch_len, batch_at;

/* Events name an fd and which use of its number they are of, never memory: gVisor, when it restores a state, tells some of fds
 * that were taken from under watch before it was saved, and whose sources are long gone. */
static struct slot {
    struct source *source; /* NULL: nobody's */
    uint32_t serial;
} *slots;
static int slot_count;

static struct epoll_event event_of(int fd, uint32_t events)
{
    return (struct epoll_event){.events = events, .data.u64 = (uint64_t)slots[fd].serial << 32 | (uint32_t)fd};
}

/* Whose it is; NULL: nobody's any more. */
static struct source *source_of(const struct epoll_event *ev)
{
    uint32_t fd = (uint32_t)ev->data.u64;

    if (fd >= (uint32_t)slot_count || slots[fd].serial != ev->data.u64 >> 32)
        return NULL;
    return slots[fd].source;
}

int loop_init(void)
{
    struct rlimit most;

    if (getrlimit(RLIMIT_NOFILE, &most) < 0)
        return -1;
    slot_count = most.rlim_max > SLOTS_MAX ? SLOTS_MAX : (int)most.rlim_max; /* untouched pages cost nothing */
    slots = calloc((size_t)slot_count, sizeof *slots);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    return !slots || epoll_fd < 0 ? -1 : 0;
}

int loop_add(struct source *s, int fd, uint32_t events, source_fn *fn)
{
    struct epoll_event ev;

    s->fd = -1;
    s->fn = fn;
    s->want = 0;
    if (fd < 0 || fd >= slot_count)
        return -1;
    slots[fd].source = s;
    slots[fd].serial++;
    ev = event_of(fd, events);
    if (events && epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &ev) < 0) {
        slots[fd].source = NULL;
        return -1;
    }
    s->fd = fd;
    s->want = events;
    return 0;
}

/* A source may go or pause while its event still waits in the batch being handled. */
static void drop_pending(const struct source *s)
{
    for (int i = batch_at + 1; i < batch_len; i++)
        if (source_of(&batch[i]) == s)
            batch[i].data.u64 = UINT64_MAX;
}

void loop_want(struct source *s, uint32_t events)
{
    struct epoll_event ev;

    if (s->fd < 0 || s->want == events)
        return;
    ev = event_of(s->fd, events);
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
    slots[s->fd].source = NULL;
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
        struct source *s = source_of(&batch[batch_at]);
        if (s && s->want) /* it may have gone or paused since */
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
