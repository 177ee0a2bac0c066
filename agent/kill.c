/* Signalling trees. Killing stops all members first, so that a fork bomb cannot outrun the walk over
 * /proc, and goes on from the loop's timer until nothing is left. It never forks: the process limit
 * may be reached. */
#define _GNU_SOURCE
#include "proc.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"
#include "proctab.h"
#include "sudo.h"

#define STOP_PASSES 8
#define MANY 32                    /* living members that make a tree a bomb: it competes for every slice we get */
#define STARVED (200 * MSEC)        /* so late do we come only if others take the processor from us */
#define STEP_BUDGET (20 * MSEC)    /* how long one step may hold up the loop */
#define SHIM_GRACE (1000 * MSEC)   /* a shim without a living child should be gone by then */
#define SWEEP_AGAIN (500 * MSEC)

/* True if someone killed the shim, whether or not it has been reaped yet. */
static bool lost_shim(const struct proc *p)
{
    siginfo_t info = {0};

    if (p->shim_gone)
        return p->orphaned;
    return waitid(P_PID, (id_t)p->shim, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == p->shim &&
           info.si_code != CLD_EXITED;
}

/* Marks the tree: the shim as its root, which is not itself a member, and all below; with_sudo: what it started by that, too.
 * What a killed shim leaves are children of the agent; whose they were cannot be told apart any more. */
static void mark(struct proctab *t, const struct proc *p, bool with_sudo)
{
    bool lost = lost_shim(p) || p->strays;

    for (size_t i = 0; i < t->count; i++) {
        struct procent *e = &t->all[i];
        if (!p->shim_gone && e->pid == p->shim)
            e->in = true;
        if (lost && e->parent == guest.self && !proc_is_shim(e->pid) && !sudo_minds(e->pid))
            e->in = true;
    }
    do
        proctab_spread(t);
    while (with_sudo && sudo_mark(t));
}

static bool alive(const struct procent *e, const struct proc *p)
{
    return e->in && e->state != 'Z' && e->state != 'X' && (p->shim_gone || e->pid != p->shim);
}

static int signal_marked(struct proctab *t, const struct proc *p, int signum)
{
    int count = 0;

    for (size_t i = 0; i < t->count; i++)
        if (alive(&t->all[i], p))
            count += kill(t->all[i].pid, signum) == 0;
    return count;
}

/* Without /proc: the command's own process group, and the shim's sweep for SIGKILL. */
static int blind_signal(struct proc *p, int signum)
{
    int count = 0;

    if (p->state == PROC_RUNNING && p->ospid > 1)
        count = kill(-p->ospid, signum) == 0 || kill(p->ospid, signum) == 0;
    if (signum == SIGKILL && !p->shim_gone) {
        kill(p->shim, SIGCONT);
        kill(p->shim, SHIM_SWEEP);
    }
    return count;
}

int kill_tree(struct proc *p, int signum, bool main_only)
{
    struct proctab t = {0};
    int count = 0;

    if (main_only) {
        if (p->state != PROC_RUNNING)
            return 0;
        return kill(p->ospid, signum) == 0;
    }
    if (p->shim_gone && !p->orphaned)
        return 0;
    if (proctab_load(&t)) {
        count = blind_signal(p, signum);
    } else {
        /* sudo passes the others on by itself */
        mark(&t, p, signum == SIGKILL || signum == SIGSTOP || signum == SIGCONT);
        count = signal_marked(&t, p, signum == SIGKILL ? 0 : signum);
    }
    proctab_free(&t);
    if (signum == SIGKILL)
        kill_begin(p);
    return count;
}

void kill_begin(struct proc *p)
{
    if (p->killing || (p->shim_gone && !p->orphaned))
        return;
    p->killing = true;
    p->kill_since = now_ns();
    p->kill_next = earlier(p->deadline, p->kill_since);
    p->kill_next = kill_step(p, p->kill_since);
}

/* Lets those go on that were stopped with the bomb and are not to die: the shims too. `before`: who was stopped anyway. */
static void thaw_others(struct proctab *t, struct proctab *before, const struct proc *p)
{
    for (size_t i = 0; i < t->count; i++) {
        struct procent *e = &t->all[i], *then = proctab_find(before, e->pid);
        if (e->pid != guest.self && !alive(e, p) && !(then && then->state == 'T'))
            kill(e->pid, SIGCONT);
    }
}

/* Stops the members that run. Hundreds of them get hundreds of times our share of the processor: then one call stops the
 * whole namespace, forks under way included, and the walk that follows is ours alone. */
static enum { NONE_RAN, SOME_RAN, ALL_STOPPED } stop(struct proctab *t, const struct proc *p, int living)
{
    int ran = 0;

    if (guest.pid1 && living > MANY && kill(-1, SIGSTOP) == 0)
        return ALL_STOPPED;
    for (size_t i = 0; i < t->count; i++) {
        struct procent *e = &t->all[i];
        if (alive(e, p) && e->state != 'T' && e->state != 't') {
            kill(e->pid, SIGSTOP);
            ran = 1;
        }
    }
    return ran ? SOME_RAN : NONE_RAN;
}

static int count_alive(struct proctab *t, struct proc *p)
{
    int living = 0;

    if (proctab_load(t))
        return -1;
    mark(t, p, true);
    for (size_t i = 0; i < t->count; i++)
        living += alive(&t->all[i], p);
    return living;
}

/* Stops all, kills all. Number that were alive at the last look. */
static int stop_and_kill(struct proctab *t, struct proc *p, int64_t until, bool starved)
{
    struct proctab before = {0};
    int living, stopped = SOME_RAN;

    /* Even the first walk would take seconds; that some who were stopped before go on afterwards is the lesser evil. */
    if (starved && guest.pid1 && kill(-1, SIGSTOP) == 0)
        stopped = ALL_STOPPED;
    living = count_alive(t, p);
    for (int pass = 0; living > 0 && pass < STOP_PASSES && stopped == SOME_RAN; pass++) {
        stopped = stop(t, p, living);
        if (stopped == NONE_RAN || (stopped == SOME_RAN && now_ns() > until))
            break;
        if (stopped == ALL_STOPPED) {
            before = *t;
            *t = (struct proctab){0};
        }
        living = count_alive(t, p);
    }
    if (living > 0)
        signal_marked(t, p, SIGKILL);
    if (stopped == ALL_STOPPED && living >= 0)
        thaw_others(t, &before, p);
    else if (stopped == ALL_STOPPED)
        kill(-1, SIGCONT);
    proctab_free(&before);
    return living;
}

int64_t kill_step(struct proc *p, int64_t now)
{
    struct proctab t = {0};
    int64_t until = now_ns() + STEP_BUDGET, pause;
    bool starved;
    int living;

    if (p->shim_gone && !p->orphaned) {
        p->killing = false;
        return NEVER;
    }
    if (now < p->kill_next && p->kill_next != NEVER)
        return p->kill_next;
    starved = now - p->kill_next > STARVED;
    do
        living = stop_and_kill(&t, p, until, starved);
    while (living > 0 && now_ns() < until);
    proctab_free(&t);
    if (living < 0) {
        blind_signal(p, SIGKILL);
        return now + SWEEP_AGAIN;
    }
    if (living == 0 && p->orphaned) {
        p->killing = false; /* the last ones are zombies: SIGCHLD brings them */
        return NEVER;
    }
    if (living == 0) {
        /* Only the shim is left. Someone of the same uid may have stopped it: it must not matter. */
        kill(p->shim, now - p->kill_since > SHIM_GRACE ? SIGKILL : SIGCONT);
    }
    pause = (now - p->kill_since) / 4;
    if (pause < 2 * MSEC)
        pause = 2 * MSEC;
    return now + (pause > 200 * MSEC ? 200 * MSEC : pause);
}

int kill_everyone(int signum)
{
    struct proctab t = {0};
    int count = 0;

    if (guest.pid1)
        return kill(-1, signum) == 0 ? 1 : 0;
    if (proctab_load(&t)) {
        for (struct proc *p = proc_list; p; p = p->next)
            count += blind_signal(p, signum);
        return count;
    }
    for (size_t i = 0; i < t.count; i++)
        if (t.all[i].pid == guest.self)
            t.all[i].in = true;
    proctab_spread(&t);
    for (size_t i = 0; i < t.count; i++) {
        struct procent *e = &t.all[i];
        if (e->in && e->state != 'Z' && e->pid != guest.self && !proc_is_shim(e->pid))
            count += kill(e->pid, signum) == 0;
    }
    proctab_free(&t);
    return count;
}
