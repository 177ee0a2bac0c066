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
#include "spare.h"

#define DEFAULT_LIMIT (2000 * MSEC)
#define LONGEST_LIMIT (60000 * MSEC)
#define LEVEL_LIMIT (20 * MSEC) /* so long do the parents of one level hold up the freeze */
#define LEVELS 32
#define PAUSE_MAX (5 * MSEC)
#define VFORK_LOOKS 4 /* a disk has answered by then, about 2 ms later */

static struct proctab asleep; /* who was stopped before we came: entries with `in` */
static int64_t since;
static bool serving; /* frozen, but the wire is not held */
static bool thawing; /* since the THAW was seen, until it is answered in its turn */
static int woken;
static bool nobody; /* there was none to stop, and no command that could make one */

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

/* How far each process is below the topmost that has to be stopped: only those that have a child matter. */
static void find_levels(struct proctab *t)
{
    for (size_t i = 0; i < t->count; i++) {
        struct procent *parent = proctab_find(t, t->all[i].parent);
        if (parent && t->all[i].in && !dead(&t->all[i]))
            parent->forked = true;
    }
    for (size_t i = 0; i < t->count; i++) { /* pids rise from parent to child, but for a few: those come too early at worst */
        struct procent *parent = proctab_find(t, t->all[i].parent);
        t->all[i].level = parent && parent->in ? parent->level + 1 : 0;
    }
}

/* Stops those of one level that have a child, and waits a little until they stand. False if there are none. */
static bool stop_level(struct proctab *t, unsigned level)
{
    int64_t limit = now_ns() + LEVEL_LIMIT, pause = MSEC / 20;
    bool any = false, running = true;

    for (size_t i = 0; i < t->count; i++) {
        struct procent *e = &t->all[i];
        if (!e->in || !e->forked || e->level != level || dead(e))
            continue;
        any = true;
        if (!stopped(e->state))
            kill(e->pid, SIGSTOP);
    }
    while (any && running && now_ns() < limit) {
        running = false;
        for (size_t i = 0; i < t->count && !running; i++) {
            struct procent *e = &t->all[i], now;
            if (e->in && e->forked && e->level == level && !dead(e) && proctab_read(e->pid, &now))
                running = !stopped(now.state) && !dead(&now);
        }
        if (running)
            nap(&pause);
    }
    return any;
}

/* True if no thread of the process runs. */
static bool stands_still(const struct procent *e)
{
    return e->threads > 1 ? proctab_threads_all(e->pid, "TtZX") : stopped(e->state);
}

/* A process that has called vfork cannot be stopped before its child goes on, and does nothing until then. Its state is that of one
 * that waits for a disk (Linux) or for anything (gVisor): only who stays like that can be told from it. */
static bool waits_for_child(struct proctab *t, const struct procent *e)
{
    if (e->threads > 1 ? !proctab_threads_all(e->pid, "TtZXDS") : e->state != 'D' && e->state != 'S')
        return false;
    for (size_t i = 0; i < t->count; i++)
        if (t->all[i].parent == e->pid && t->all[i].in && stopped(t->all[i].state))
            return true;
    return false;
}

static void stop_members(struct proctab *t)
{
    for (size_t i = 0; i < t->count; i++)
        if (t->all[i].in && !stopped(t->all[i].state) && !dead(&t->all[i]))
            kill(t->all[i].pid, SIGSTOP);
}

/* By one call where we can, so that nobody outruns it. */
static void stop_all(struct proctab *t)
{
    if (!guest.pid1) {
        stop_members(t);
        return;
    }
    kill(-1, SIGSTOP);
    for (struct proc *p = proc_list; p; p = p->next)
        if (!p->shim_gone)
            kill(p->shim, SIGCONT);
    if (spare_waiting())
        kill(spare_waiting(), SIGCONT);
}

static bool slept(pid_t pid)
{
    const struct procent *e = proctab_find(&asleep, pid);

    return e && e->in;
}

/* One look at everyone. Number of those that still run, or -1. */
static int count_running(struct proctab *t, int looks, int *still)
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
        if (!stands_still(e) && !(looks >= VFORK_LOOKS && waits_for_child(t, e)))
            running++;
        else
            *still += !slept(e->pid);
    }
    return running;
}

static bool none_to_stop(const struct proctab *t)
{
    for (const struct proc *p = proc_list; p; p = p->next)
        if (!p->shim_gone)
            return false;
    for (size_t i = 0; i < t->count; i++)
        if (t->all[i].in && !dead(&t->all[i]))
            return false;
    return true;
}

/* Stops everyone. Who could not be stopped in time, or -1 where nobody can be seen. */
static int stop_everyone(int64_t limit, int *still)
{
    int64_t until = now_ns() + limit, pause = MSEC / 10;
    struct proctab t = {0};
    int running, looks = 0;

    if (proctab_load(&asleep))
        return -1;
    mark_members(&asleep);
    *still = 0;
    nobody = none_to_stop(&asleep);
    if (nobody)
        return 0;
    find_levels(&asleep);
    for (unsigned level = 0; level < LEVELS && stop_level(&asleep, level); level++)
        ;
    stop_all(&asleep);
    for (size_t i = 0; i < asleep.count; i++)
        asleep.all[i].in = asleep.all[i].in && asleep.all[i].state == 'T';
    while ((running = count_running(&t, looks++, still)) > 0 && now_ns() < until) {
        stop_members(&t);
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
    woken = nobody ? 0 : wake_everyone();
    if (nobody)
        proctab_free(&asleep);
    proc_postpone(now_ns() - since);
    thawing = thaw_follows;
    serving = false;
    wire_hold(false);
}

void freeze_serve(void)
{
    serving = true;
    wire_hold(false);
}

bool freeze_serving(void)
{
    return serving;
}

void op_freeze(struct stream *s, const struct fields *f)
{
    int64_t limit = fields_int(f, TAG_TIMEOUT_MS, DEFAULT_LIMIT / MSEC), flags;
    uint8_t buf[32];
    struct fw w = {buf, 0, sizeof buf, false};
    int running, still = 0;

    if (!want_flags(s, f, FREEZE_FLAG_SERVE, &flags))
        return;
    if (limit < 0 || limit > LONGEST_LIMIT / MSEC) {
        stream_fail(s, EINVAL, NULL, "a time limit out of range");
        return;
    }
    if (thawing || serving || shutdown_begun()) {
        stream_fail(s, EBUSY, NULL, thawing || serving ? "the sandbox was frozen already" : "the sandbox is shutting down");
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
    serving = flags & FREEZE_FLAG_SERVE;
    if (!serving)
        wire_hold(true);
}

/* The processes go on as soon as THAW is seen (wire.c); here it has its turn among what was asked before it. */
void op_thaw(struct stream *s, const struct fields *f)
{
    uint8_t buf[16];
    struct fw w = {buf, 0, sizeof buf, false};

    (void)f;
    if (serving)
        freeze_end(true);
    if (!thawing) {
        stream_fail(s, EINVAL, NULL, "the sandbox is not frozen");
        return;
    }
    thawing = false;
    fw_int(&w, TAG_COUNT, woken);
    stream_close(s, &w);
}
