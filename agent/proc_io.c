/* A process's bytes: pipes into rings, rings into streams, streams into stdin. */
#define _GNU_SOURCE
#include "proc.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#define READ_MAX (64u * 1024)
#define SETTLE (20 * MSEC)

static void wake(struct proc *p)
{
    for (struct attach *a = p->attached; a; a = a->next)
        stream_ready(a->stream);
}

/* Bytes that may be read now without pushing out what an attached stream has not sent yet. */
static size_t may_read(const struct channel *c)
{
    const struct proc *p = c->proc;
    int i = (int)(c - p->ch);
    size_t space = c->ring.size;

    for (struct attach *a = p->attached; a; a = a->next) {
        uint64_t lag = c->ring.total - a->pos[i];
        if (a->lossy || a->discard)
            continue;
        if (lag >= c->ring.size)
            return 0;
        if (c->ring.size - lag < space)
            space = (size_t)(c->ring.size - lag);
    }
    return space;
}

static void channel_done(struct channel *c)
{
    c->final = c->ring.total;
    c->done = true;
    wake(c->proc);
}

/* One read. False when nothing came: EAGAIN, the end, or a stream holds us back. */
static bool channel_read(struct channel *c)
{
    static uint8_t first[READ_MAX];
    size_t room = may_read(c), want = room < READ_MAX ? room : READ_MAX;
    struct iovec iov[2];
    int pieces;
    ssize_t n;

    if (!room || c->source.fd < 0)
        return false;
    pieces = ring_space(&c->ring, want, iov);
    if (!pieces)
        iov[0] = (struct iovec){first, want};
    do
        n = readv(c->source.fd, iov, pieces ? pieces : 1);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN)
        return false;
    if (n <= 0) { /* a terminal whose other side is closed says EIO */
        loop_close(&c->source);
        if (!c->done)
            channel_done(c);
        return false;
    }
    if (pieces)
        ring_advance(&c->ring, (size_t)n);
    else
        ring_append(&c->ring, first, (size_t)n);
    if (!c->done && c->proc->state == PROC_EXITED && !c->proc->pty && c->ring.total >= c->final)
        c->done = true;
    wake(c->proc);
    return true;
}

static void on_output(struct source *src, uint32_t events)
{
    struct channel *c = OWNER(src, struct channel, source);

    (void)events;
    channel_read(c);
    io_update(c->proc);
}

void io_update(struct proc *p)
{
    for (int i = 0; i < 2; i++)
        loop_want(&p->ch[i].source, may_read(&p->ch[i]) ? EPOLLIN : 0);
}

/* The main process has ended. What it wrote is in the pipe already, so the pipe's fill level now
 * marks the end of its output, however much a background child may add later. */
void io_main_ended(struct proc *p)
{
    loop_close(&p->in);
    for (int i = 0; i < 2; i++) {
        struct channel *c = &p->ch[i];
        int pending = 0;

        if (c->done)
            continue;
        if (c->source.fd < 0) {
            channel_done(c);
        } else if (p->pty) {
            p->settle = now_ns() + SETTLE; /* a terminal delivers late: until EIO, or a pause */
        } else {
            if (ioctl(c->source.fd, FIONREAD, &pending) < 0)
                pending = 0;
            c->final = c->ring.total + (uint64_t)pending;
            c->done = pending == 0;
        }
        while (!c->done && channel_read(c))
            ;
    }
    io_update(p);
    wake(p);
}

int64_t io_settle(struct proc *p, int64_t now)
{
    struct channel *c = &p->ch[0];

    if (c->done)
        return NEVER;
    if (now < p->settle)
        return p->settle;
    if (may_read(c) && !channel_read(c)) {
        if (!c->done)
            channel_done(c);
        return NEVER;
    }
    return now + SETTLE;
}

void io_close_all(struct proc *p)
{
    loop_close(&p->in);
    loop_close(&p->ch[0].source);
    loop_close(&p->ch[1].source);
}

static void drop_input(struct proc *p)
{
    loop_close(&p->in);
    for (struct attach *a = p->attached; a; a = a->next) {
        stream_consumed(a->stream, (uint32_t)a->in_len);
        free(a->in);
        a->in = NULL;
        a->in_len = a->in_cap = 0;
    }
}

static void end_input(struct proc *p)
{
    if (p->pty) {
        if (write(p->in.fd, "\4", 1) < 0) /* what a person types to end input */
            return;
    } else {
        drop_input(p);
    }
}

static void feed(struct proc *p)
{
    for (struct attach *a = p->attached; a && p->in.fd >= 0; a = a->next) {
        while (a->in_len) {
            ssize_t n = write(p->in.fd, a->in, a->in_len);
            if (n < 0 && errno == EINTR)
                continue;
            if (n < 0 && errno == EAGAIN) {
                loop_want(&p->in, EPOLLOUT);
                return;
            }
            if (n < 0) {
                drop_input(p); /* nobody reads it any more */
                return;
            }
            a->in_len -= (size_t)n;
            memmove(a->in, a->in + n, a->in_len);
            stream_consumed(a->stream, (uint32_t)n);
        }
        free(a->in);
        a->in = NULL;
        a->in_cap = 0;
        if (a->in_end) {
            a->in_end = false;
            end_input(p);
        }
    }
    loop_want(&p->in, 0);
}

static void on_input(struct source *src, uint32_t events)
{
    (void)events;
    feed(OWNER(src, struct proc, in));
}

void io_start(struct proc *p, int out_fd, int err_fd, int in_fd)
{
    int fds[2] = {out_fd, err_fd};

    for (int i = 0; i < 2; i++) {
        struct channel *c = &p->ch[i];
        c->done = fds[i] < 0;
        if (fds[i] >= 0 && loop_add(&c->source, fds[i], EPOLLIN, on_output) < 0) {
            close(fds[i]); /* the kernel watches no more fds for us: the writer sees a broken pipe */
            c->done = true;
        }
    }
    if (in_fd >= 0)
        loop_add(&p->in, in_fd, 0, on_input); /* cannot fail: nothing is waited for yet */
}

static const struct stream_ops attach_ops;

struct attach *io_attach(struct proc *p, struct stream *s, int64_t flags)
{
    struct attach *a = calloc(1, sizeof *a), **at = &p->attached;

    if (!a)
        return NULL;
    a->stream = s;
    a->proc = p;
    a->lossy = flags & EXEC_FLAG_LOSSY;
    a->kill_on_reset = flags & EXEC_FLAG_KILL_ON_RESET;
    while (*at)
        at = &(*at)->next;
    *at = a;
    s->ctx = a;
    s->ops = &attach_ops;
    return a;
}

static void attach_data(struct stream *s, const uint8_t *bytes, uint32_t n)
{
    struct attach *a = s->ctx;

    if (a->proc->in.fd < 0) {
        stream_consumed(s, n);
        return;
    }
    if (a->in_len + n > a->in_cap) {
        size_t cap = (a->in_len + n + 4095) & ~(size_t)4095;
        uint8_t *in = realloc(a->in, cap);
        if (!in) {
            stream_consumed(s, n);
            return;
        }
        a->in = in;
        a->in_cap = cap;
    }
    memcpy(a->in + a->in_len, bytes, n);
    a->in_len += n;
    feed(a->proc);
}

static void attach_end(struct stream *s)
{
    struct attach *a = s->ctx;

    a->in_end = true;
    feed(a->proc);
}

static void attach_ctrl(struct stream *s, const struct fields *f)
{
    struct attach *a = s->ctx;
    struct proc *p = a->proc;
    int64_t rows = fields_int(f, TAG_ROWS, 24), cols = fields_int(f, TAG_COLS, 80);
    int64_t signum = fields_int(f, TAG_SIGNUM, 0);

    switch (f->num[TAG_KIND]) {
    case CTRL_RESIZE:
        if (p->pty && rows > 0 && rows < 65536 && cols > 0 && cols < 65536) {
            struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
            ioctl(p->ch[0].source.fd, TIOCSWINSZ, &size);
        }
        break;
    case CTRL_SIGNAL:
        if (signum >= 0 && signum <= 64)
            kill_tree(p, (int)signum, fields_int(f, TAG_FLAGS, 0) & SIGNAL_FLAG_MAIN_ONLY);
        break;
    case CTRL_DISCARD:
        a->discard = true;
        io_update(p);
        stream_ready(s);
        break;
    default:
        wire_abort(2, "protocol error: an unknown CTRL kind");
    }
}

static void attach_reset(struct stream *s)
{
    struct attach *a = s->ctx;

    if (!a->kill_on_reset) {
        stream_fail(s, ECANCELED, NULL, "detached: the process goes on");
        return;
    }
    a->discard = true; /* CLOSE comes when the process is dead */
    kill_begin(a->proc);
    stream_ready(s);
}

static void attach_release(struct stream *s)
{
    struct attach *a = s->ctx, **at = &a->proc->attached;
    struct proc *p = a->proc;

    while (*at != a)
        at = &(*at)->next;
    *at = a->next;
    free(a->in);
    free(a);
    io_update(p);
    proc_evict();
}

void exit_fields(struct fw *w, const struct proc *p, uint64_t out_total, uint64_t err_total)
{
    if (WIFEXITED(p->exit_status))
        fw_int(w, TAG_EXIT_CODE, WEXITSTATUS(p->exit_status));
    else
        fw_int(w, TAG_SIGNUM, WTERMSIG(p->exit_status));
    fw_int(w, TAG_TIMED_OUT, p->timed_out);
    if (p->oom)
        fw_int(w, TAG_OOM, 1);
    fw_int(w, TAG_OUT_TOTAL, (int64_t)out_total);
    fw_int(w, TAG_ERR_TOTAL, (int64_t)err_total);
    fw_int(w, TAG_CPU_US, p->cpu_us);
    fw_int(w, TAG_MAXRSS, p->maxrss);
    fw_int(w, TAG_WALL_US, p->wall_us);
}

static bool send_channel(struct attach *a, int i)
{
    struct channel *c = &a->proc->ch[i];
    uint64_t oldest = ring_oldest(&c->ring);
    size_t n, max;
    uint8_t *to;

    if (a->discard) {
        a->pos[i] = c->ring.total;
        return false;
    }
    if (a->pos[i] < oldest)
        a->pos[i] = oldest; /* lossy, or no memory: the gap shows in LOST */
    if (a->pos[i] >= c->ring.total || !a->replied)
        return false;
    to = stream_data_begin(a->stream, &max);
    if (!to)
        return a->stream->send_credit > 0;
    n = c->ring.total - a->pos[i] < max ? (size_t)(c->ring.total - a->pos[i]) : max;
    ring_copy(&c->ring, a->pos[i], to, n);
    stream_data_commit(a->stream, i == 0 ? CHANNEL_OUT : CHANNEL_ERR, n);
    a->pos[i] += n;
    a->sent[i] += n;
    return a->pos[i] < c->ring.total && a->stream->send_credit > 0;
}

static enum pump attach_pump(struct stream *s)
{
    struct attach *a = s->ctx;
    struct proc *p = a->proc;
    bool again = send_channel(a, 0);

    again = send_channel(a, 1) || again;
    io_update(p);
    if (p->state == PROC_EXITED && a->replied && p->ch[0].done && p->ch[1].done &&
        a->pos[0] >= p->ch[0].final && a->pos[1] >= p->ch[1].final) {
        uint8_t buf[256];
        struct fw w = {buf, 0, sizeof buf, false};

        exit_fields(&w, p, a->pos[0], a->pos[1]);
        fw_int(&w, TAG_OUT_LOST, (int64_t)(a->pos[0] - a->start[0] - a->sent[0]));
        fw_int(&w, TAG_ERR_LOST, (int64_t)(a->pos[1] - a->start[1] - a->sent[1]));
        stream_close(s, &w);
        return PUMP_GONE;
    }
    return again ? PUMP_AGAIN : PUMP_WAIT;
}

static const struct stream_ops attach_ops = {
    .data = attach_data,
    .end = attach_end,
    .ctrl = attach_ctrl,
    .reset = attach_reset,
    .pump = attach_pump,
    .release = attach_release,
};
