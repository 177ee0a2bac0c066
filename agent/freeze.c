/* FREEZE and THAW: see freeze.h and docs/wire.md.
 *
 * A shell must not see that its child was stopped: a job that is waited for would be shown as stopped, and its
 * terminal taken away. So parents stop before their children, and children go on before their parents. */
#define _GNU_SOURCE
#include "freeze.h"

#include <errno.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"
#include "ops.h"
#include "proc.h"
#include "proctab.h"

#define DEFAULT_LIMIT (2000 * MSEC)
#define LONGEST_LIMIT (60000 * MSEC)
#define PARENT_LIMIT (5 * MSEC) /* so long does one parent hold up the freeze */
#define PAUSE_MAX (5 * MSEC)

static struct proctab asleep; /* who was stopped before we came: entries with `in` */
static int64_t since;
static bool thawing; /* since the THAW was seen, until it is answered in its turn */
static int woken;

static bool stopped(char state)
{
    return state == 'T' || state == 't';
}

/* A main thread may end before its process does. */
static bool dead(const struct procent *e)
{
    return (e->state == 'Z' || e->state == 'X') && e->threads <= 1;
}

/* Marks with `in` who is to be stopped. */
static void mark_members(struct proctab *t)
{
    for (size_t i = 0; i < t->count; i++)
        t->all[i].in = guest.pid1 || t->all[i].pid == guest.self;
    if (!guest.pid1)
        proctab_spread(t);
    for (size_t i = 0; i < t->count; i++)
        if (t->all[i].pid == guest.self || proc_is_shim(t->all[i].pid))
            t->all[i].in = false;
}

static void nap(int64_t *pause)
{
    struct timespec ts = {0, (long)*pause};

    nanosleep(&ts, NULL);
    if (*pause < PAUSE_MAX)
        *pause *= 2;
}

/* Every process that has a child is stopped by itself, and seen stopped, before the children are touched: those above
 * first, as pids rise from parent to child. Only for a while: a bomb has no end. */
static void stop_parents(struct proctab *t, int64_t until)
{
    for (size_t i = 0; i < t->count; i++) {
        struct procent *parent = proctab_find(t, t->all[i].parent);
        if (parent && t->all[i].in && !dead(&t->all[i]))
            parent->forked = true;
    }
    for (size_t i = 0; i < t->count && now_ns() < until; i++) {
        struct procent *e = &t->all[i], now = *e;
        int64_t limit = now_ns() + PARENT_LIMIT, pause = MSEC / 20;

        if (!e->in || !e->forked || stopped(e->state) || dead(e) || kill(e->pid, SIGSTOP) < 0)
            continue;
        while (proctab_read(e->pid, &now) && !stopped(now.state) && !dead(&now) && now_ns() < limit)
            nap(&pause);
    }
}

/* True if no thread of the process runs. */
static bool stands_still(const struct procent *e)
{
    return e->threads > 1 ? proctab_threads_stopped(e->pid) : stopped(e->state);
}

static void stop_all(struct proctab *t)
{
    if (guest.pid1) {
        kill(-1, SIGSTOP); /* forks under way included */
        for (struct proc *p = proc_list; p; p = p->next)
            if (!p->shim_gone)
                kill(p->shim, SIGCONT);
        return;
    }
    for (size_t i = 0; i < t->count; i++)
        if (t->all[i].in && !stopped(t->all[i].state) && !dead(&t->all[i]))
            kill(t->all[i].pid, SIGSTOP);
}

static bool slept(pid_t pid)
{
    const struct procent *e = proctab_find(&asleep, pid);

    return e && e->in;
}

/* One look at everyone. Number of those that still run, or -1. */
static int count_running(struct proctab *t, int *still)
{
    int running = 0;

    *still = 0;
    if (proctab_load(t))
        return -1;
    mark_members(t);
    for (size_t i = 0; i < t->count; i++) {
        struct procent *e = &t->all[i];
        if (!e->in || dead(e))
            continue;
        if (!stands_still(e))
            running++;
        else
            *still += !slept(e->pid);
    }
    return running;
}

static void remember_sleepers(void)
{
    for (size_t i = 0; i < asleep.count; i++)
        asleep.all[i].in = asleep.all[i].in && asleep.all[i].state == 'T';
}

/* Stops everyone. Who could not be stopped in time, or -1 where nobody can be seen. */
static int stop_everyone(int64_t limit, int *still)
{
    int64_t begun = now_ns(), pause = MSEC / 10;
    struct proctab t = {0};
    int running;

    if (proctab_load(&asleep))
        return -1;
    mark_members(&asleep);
    stop_parents(&asleep, begun + limit / 2);
    remember_sleepers();
    running = count_running(&t, still);
    if (running >= 0)
        stop_all(&t);
    while (running > 0) {
        running = count_running(&t, still);
        if (running <= 0 || now_ns() - begun > limit)
            break;
        if (!guest.pid1)
            stop_all(&t);
        nap(&pause);
    }
    proctab_free(&t);
    return running;
}

/* Number of processes that go on. Highest pids first: children before parents. */
static int wake_everyone(void)
{
    struct proctab t = {0};
    int count = 0;

    if (proctab_load(&t)) {
        count = kill_everyone(SIGCONT);
    } else {
        mark_members(&t);
        for (size_t i = t.count; i-- > 0;) {
            struct procent *e = &t.all[i];
            if (e->in && !dead(e) && !slept(e->pid))
                count += kill(e->pid, SIGCONT) == 0;
        }
    }
    proctab_free(&t);
    proctab_free(&asleep);
    return count;
}

void freeze_end(bool thaw_follows)
{
    woken = wake_everyone();
    proc_postpone(now_ns() - since);
    thawing = thaw_follows;
    wire_hold(false);
}

void op_freeze(struct stream *s, const struct fields *f)
{
    int64_t limit = fields_int(f, TAG_TIMEOUT_MS, DEFAULT_LIMIT / MSEC);
    uint8_t buf[32];
    struct fw w = {buf, 0, sizeof buf, false};
    int running, still = 0;

    if (limit < 0 || limit > LONGEST_LIMIT / MSEC) {
        stream_fail(s, EINVAL, NULL, "a time limit out of range");
        return;
    }
    if (thawing || shutdown_begun()) {
        stream_fail(s, EBUSY, NULL, thawing ? "the sandbox was frozen already" : "the sandbox is shutting down");
        return;
    }
    running = stop_everyone(limit * MSEC, &still);
    if (running < 0) {
        wake_everyone();
        stream_fail(s, EIO, NULL, "the process table cannot be read");
        return;
    }
    fw_int(&w, TAG_COUNT, still);
    fw_int(&w, TAG_PIDS, running);
    stream_close(s, &w);
    since = now_ns();
    wire_hold(true);
}

/* The processes go on as soon as THAW is seen (wire.c); here it has its turn among what was asked before it. */
void op_thaw(struct stream *s, const struct fields *f)
{
    uint8_t buf[16];
    struct fw w = {buf, 0, sizeof buf, false};

    (void)f;
    if (!thawing) {
        stream_fail(s, EINVAL, NULL, "the sandbox is not frozen");
        return;
    }
    thawing = false;
    fw_int(&w, TAG_COUNT, woken);
    stream_close(s, &w);
}
