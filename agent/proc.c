/* The process table: birth, reports from shims, reaping, timeouts, and how long the dead are kept. */
#define _GNU_SOURCE
#include "proc.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "spare.h"
#include "sudo.h"

struct proc *proc_list;
bool proc_strayed;
static struct proc **list_end = &proc_list;
static int64_t last_id;

#define REAP_PER_TURN 512
#define SLOTS 1024
#define SLOT_FREE 0
#define SLOT_UNBORN (-1)

/* One shared page for all commands that are starting: a command with the agent's uid can kill its
 * shim before that has said a word, and must not be lost for it. */
static pid_t *slots;

static pid_t *slot_take(void)
{
    if (!slots) {
        void *page = mmap(NULL, SLOTS * sizeof *slots, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED)
            return NULL;
        slots = page;
    }
    for (int i = 0; i < SLOTS; i++)
        if (slots[i] == SLOT_FREE) {
            slots[i] = SLOT_UNBORN;
            return &slots[i];
        }
    return NULL;
}

static void slot_give(struct proc *p)
{
    if (p->slot)
        *p->slot = SLOT_FREE;
    p->slot = NULL;
}

struct proc *proc_new(void)
{
    struct proc *p = calloc(1, sizeof *p);

    if (!p)
        return NULL;
    p->slot = slot_take();
    if (!p->slot) {
        free(p);
        return NULL;
    }
    p->id = ++last_id;
    p->in.fd = p->status.fd = p->jobs = -1;
    p->deadline = p->kill_next = p->settle = NEVER;
    for (int c = 0; c < 2; c++) {
        p->ch[c].source.fd = -1;
        p->ch[c].proc = p;
    }
    *list_end = p;
    list_end = &p->next;
    return p;
}

struct proc *proc_find(int64_t id)
{
    for (struct proc *p = proc_list; p; p = p->next)
        if (p->id == id && !p->hidden)
            return p;
    return NULL;
}

struct proc *proc_find_os(int64_t ospid)
{
    struct proc *found = NULL;

    for (struct proc *p = proc_list; p; p = p->next)
        if (p->ospid == ospid && !p->hidden && p->state != PROC_STARTING && (!found || found->state == PROC_EXITED))
            found = p;
    return found;
}

void proc_free(struct proc *p)
{
    struct proc **at = &proc_list;

    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    if (list_end == &p->next)
        list_end = at;
    io_close_all(p);
    slot_give(p);
    loop_close(&p->status);
    ring_free(&p->ch[0].ring);
    ring_free(&p->ch[1].ring);
    free(p->tag);
    free(p->argv);
    free(p);
}

static bool evictable(const struct proc *p)
{
    return p->state == PROC_EXITED && p->shim_gone && !p->attached && !p->killing;
}

static size_t kept(const struct proc *p)
{
    return ring_kept(&p->ch[0].ring) + ring_kept(&p->ch[1].ring);
}

void proc_evict(void)
{
    size_t bytes = 0;
    int count = 0;
    struct proc *p, *next;

    for (p = proc_list; p; p = p->next)
        if (evictable(p)) {
            count++;
            bytes += kept(p);
        }
    for (p = proc_list; p; p = next) {
        next = p->next;
        if (!evictable(p))
            continue;
        if (!p->hidden && count <= PROC_EXITED_MAX && bytes <= PROC_EXITED_BYTES)
            continue;
        count--;
        bytes -= kept(p);
        proc_free(p);
    }
}

static void proc_exited(struct proc *p, int status, int64_t cpu_us, int64_t maxrss)
{
    if (p->state == PROC_EXITED)
        return;
    p->state = PROC_EXITED;
    p->exit_status = status;
    p->cpu_us = cpu_us;
    p->maxrss = maxrss;
    p->wall_us = (now_ns() - p->started) / 1000;
    p->deadline = NEVER;
    io_main_ended(p);
}

static void start_failed(struct proc *p, const struct shim_report *r)
{
    static const char *const parts[] = {[PART_USER] = "user", [PART_CWD] = "cwd", [PART_COMMAND] = "command"};
    struct stream *s = p->attached ? p->attached->stream : NULL;
    const char *what = r->part <= PART_COMMAND ? parts[r->part] : NULL;

    if (s && (r->part == PART_FORK || r->part == PART_COMMAND) && r->error == EAGAIN) /* from exec it means the same */
        stream_fail(s, EAGAIN, NULL, "the sandbox's process limit is reached");
    else if (s && r->part == PART_CWD)
        stream_fail(s, r->error, what, "cannot enter the working directory");
    else if (s && r->part == PART_USER)
        stream_fail(s, r->error, what, "cannot become the user");
    else if (s)
        stream_fail(s, r->error, what, "cannot run %.200s", p->argv);
    p->hidden = true; /* freed when the shim has been reaped */
    p->state = PROC_EXITED;
    p->deadline = NEVER;
}

static void started(struct proc *p, pid_t ospid)
{
    uint8_t buf[32];
    struct fw w = {buf, 0, sizeof buf, false};

    p->state = PROC_RUNNING;
    p->ospid = ospid;
    slot_give(p);
    fw_int(&w, TAG_PID, p->id);
    fw_int(&w, TAG_OSPID, p->ospid);
    for (struct attach *a = p->attached; a; a = a->next)
        if (!a->replied) {
            a->replied = true;
            stream_reply(a->stream, &w);
            stream_ready(a->stream);
        }
}

/* Reads up to EMPTY at most: what remains, the pipe's end, then calls on_status again. */
static void read_status(struct proc *p)
{
    struct shim_report r;

    while (p->status.fd >= 0 && !p->empty) {
        ssize_t n = read(p->status.fd, &r, sizeof r);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n != sizeof r)
            loop_close(&p->status);
        else if (r.kind == SHIM_STARTED)
            started(p, r.pid);
        else if (r.kind == SHIM_EXITED)
            proc_exited(p, r.status, r.cpu_us, r.maxrss);
        else if (r.kind == SHIM_EMPTY)
            p->empty = true;
        else
            start_failed(p, &r);
    }
}

/* Nothing of the tree is left, or nobody who minds it. */
static void tree_ended(struct proc *p)
{
    loop_close(&p->status);
    if (p->jobs >= 0)
        close(p->jobs);
    p->jobs = -1;
    p->shim_gone = true;
    sudo_forget(p->shim, p->orphaned);
    if (!p->orphaned) {
        p->killing = false;
        p->kill_next = NEVER;
    }
}

static void let_go(struct proc *p)
{
    if (p->hidden && !p->attached && !p->killing)
        proc_free(p);
    else
        proc_evict();
}

static void on_status(struct source *src, uint32_t events)
{
    struct proc *p = OWNER(src, struct proc, status);

    (void)events;
    read_status(p);
    if (!p->empty)
        return;
    spare_back(p->shim, p->jobs);
    p->jobs = -1;
    tree_ended(p);
    let_go(p);
}

int proc_watch_status(struct proc *p, int fd)
{
    return loop_add(&p->status, fd, EPOLLIN, on_status);
}

/* A shim that ended by itself has no descendants. One that was killed leaves them to us. */
static void shim_ended(struct proc *p, int status)
{
    read_status(p); /* its last words may still be in the pipe */
    p->orphaned = WIFSIGNALED(status) && !p->empty;
    proc_strayed |= p->orphaned;
    tree_ended(p);
    if (p->state == PROC_STARTING && *p->slot > 0)
        started(p, *p->slot); /* the shim was killed before it could say so */
    if (p->state == PROC_STARTING) {
        struct shim_report r = {.kind = SHIM_FAILED, .part = PART_NONE, .error = ECHILD};
        start_failed(p, &r);
    } else if (p->state == PROC_RUNNING) {
        siginfo_t info;
        /* Killed between reaping the main process and telling us: nobody knows its status. */
        if (waitid(P_PID, (id_t)p->ospid, &info, WEXITED | WNOHANG | WNOWAIT) < 0)
            proc_exited(p, status, 0, 0);
    }
    let_go(p);
}

static int64_t cpu_of(const struct rusage *ru)
{
    return (int64_t)(ru->ru_utime.tv_sec + ru->ru_stime.tv_sec) * 1000000 + ru->ru_utime.tv_usec +
           ru->ru_stime.tv_usec;
}

/* An adopted child: only interesting if it is the main process of a command whose shim was killed.
 * It may come before the shim's own end, and before we read that the command has started. */
static void orphan_ended(pid_t pid, int status, const struct rusage *ru)
{
    for (struct proc *p = proc_list; p; p = p->next) {
        if (p->state == PROC_STARTING)
            read_status(p);
        if (p->state == PROC_STARTING && *p->slot == pid)
            started(p, pid);
        if (p->ospid == pid && p->state == PROC_RUNNING) {
            proc_exited(p, status, cpu_of(ru), (int64_t)ru->ru_maxrss * 1024);
            return;
        }
    }
}

bool proc_reap(void)
{
    for (int i = 0; i < REAP_PER_TURN; i++) {
        struct rusage ru;
        int status;
        pid_t pid = wait4(-1, &status, WNOHANG, &ru);
        struct proc *p;

        if (pid < 0 && errno == EINTR)
            continue;
        if (pid <= 0)
            return false;
        for (p = proc_list; p; p = p->next)
            if (p->shim == pid && !p->shim_gone) {
                shim_ended(p, status);
                break;
            }
        if (p)
            continue;
        sudo_ended(pid, status);
        orphan_ended(pid, status, &ru);
    }
    return true;
}

int64_t proc_timers(int64_t now)
{
    int64_t next = NEVER;
    struct proc *p, *after;

    for (p = proc_list; p; p = after) {
        after = p->next;
        if (p->deadline <= now) {
            p->timed_out = true;
            kill_begin(p); /* which looks how late it is */
            p->deadline = NEVER;
        }
        if (p->killing)
            p->kill_next = kill_step(p, now);
        if (p->settle != NEVER)
            p->settle = io_settle(p, now);
        next = earlier(next, earlier(p->deadline, earlier(p->kill_next, p->settle)));
        if (p->hidden && evictable(p))
            proc_free(p);
    }
    return next;
}

static void postpone(int64_t *when, int64_t ns)
{
    if (*when != NEVER)
        *when += ns;
}

void proc_postpone(int64_t ns)
{
    for (struct proc *p = proc_list; p; p = p->next) {
        p->started += ns; /* WALL_US and TIMEOUT_MS are of the time it could run */
        p->kill_since += ns;
        postpone(&p->deadline, ns);
        postpone(&p->kill_next, ns);
        postpone(&p->settle, ns);
    }
}

bool proc_nobody_left(void)
{
    siginfo_t info;

    return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) < 0 && errno == ECHILD;
}

bool proc_is_shim(pid_t pid)
{
    for (struct proc *p = proc_list; p; p = p->next)
        if (p->shim == pid && !p->shim_gone)
            return true;
    return pid == spare_waiting();
}
