/* Reading /proc: see proctab.h. Relative to agent_proc_fd throughout, so that nothing that the
 * sandbox mounts or renames can put another folder in its place. */
#define _GNU_SOURCE
#include "proctab.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agent.h"
#include "linuxapi.h"

static bool read_stat(const char *path, struct procent *out)
{
    static long tick, page;
    char name[64], text[512], *p;
    unsigned long utime = 0, stime = 0, faults = 0;
    long parent = 0, rss = 0, threads = 1;
    ssize_t n;
    int fd;

    if (!tick) {
        tick = sysconf(_SC_CLK_TCK);
        page = sysconf(_SC_PAGESIZE);
    }
    snprintf(name, sizeof name, "%s/stat", path);
    fd = openat(agent_proc_fd, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return false;
    text[n] = 0;
    /* The name in brackets may hold anything, brackets and newlines too: the last one counts. */
    p = strrchr(text, ')');
    if (!p || p[1] != ' ')
        return false;
    out->state = p[2];
    p += 3;
    /* p is behind field 3; field 4 is the parent, 10 the faults, 14 and 15 the times, 20 the threads, 24 the resident pages */
    for (int field = 4; field <= 24 && p; field++) {
        char *end;
        unsigned long v = strtoul(p, &end, 10);
        if (end == p)
            break;
        if (field == 4)
            parent = (long)v;
        else if (field == 10)
            faults = v;
        else if (field == 14)
            utime = v;
        else if (field == 15)
            stime = v;
        else if (field == 20)
            threads = (long)v;
        else if (field == 24)
            rss = (long)v;
        p = end;
    }
    out->pid = (pid_t)atol(text);
    if (out->pid <= 0)
        return false; /* gVisor's word for one that was reaped just now; it would pass for init's parent, which is 0 too */
    out->parent = (pid_t)parent;
    out->cpu_us = (uint64_t)(utime + stime) * 1000000 / (uint64_t)tick;
    out->rss = (uint64_t)rss * (uint64_t)page;
    out->faults = faults;
    out->threads = (unsigned)threads;
    out->in = out->forked = false;
    out->level = 0;
    return true;
}

static bool add(struct proctab *t, const struct procent *e)
{
    if (t->count == t->cap) {
        size_t cap = t->cap ? t->cap * 2 : 64;
        struct procent *all = realloc(t->all, cap * sizeof *all);
        if (!all)
            return false;
        t->all = all;
        t->cap = cap;
    }
    t->all[t->count++] = *e;
    return true;
}

static int by_pid(const void *a, const void *b)
{
    return ((const struct procent *)a)->pid - ((const struct procent *)b)->pid;
}

/* All entries of a folder of procfs that are numbers. 0 or an errno. */
static int load(struct proctab *t, const char *folder)
{
    _Alignas(8) char buf[4096];
    char name[64];
    int dir;

    t->count = 0;
    if (agent_proc_fd < 0)
        return ENOENT;
    dir = openat(agent_proc_fd, folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0)
        return errno;
    for (;;) {
        long n = syscall(SYS_getdents64, dir, buf, sizeof buf);
        if (n <= 0)
            break;
        for (long at = 0; at < n;) {
            struct dirent64_ *d = (struct dirent64_ *)(buf + at);
            struct procent e;
            at += d->reclen;
            if (d->name[0] < '1' || d->name[0] > '9' || strlen(d->name) >= 12)
                continue;
            snprintf(name, sizeof name, "%s/%s", folder, d->name);
            if (read_stat(name, &e) && !add(t, &e))
                break;
        }
    }
    close(dir);
    return 0;
}

int proctab_load(struct proctab *t)
{
    int error = load(t, ".");

    if (error)
        return error;
    if (!t->count)
        return ENOENT; /* not even ourselves: hidden, or not a procfs */
    proctab_sort(t);
    return 0;
}

void proctab_sort(struct proctab *t)
{
    qsort(t->all, t->count, sizeof *t->all, by_pid);
}

struct procent *proctab_find(struct proctab *t, pid_t pid)
{
    struct procent key = {.pid = pid};

    if (!t->count)
        return NULL;
    return bsearch(&key, t->all, t->count, sizeof *t->all, by_pid);
}

void proctab_spread(struct proctab *t)
{
    bool more = true;

    /* Children mostly have larger pids than their parents, so this is one pass and a check. */
    while (more) {
        more = false;
        for (size_t i = 0; i < t->count; i++) {
            struct procent *e = &t->all[i], *parent;
            if (e->in)
                continue;
            parent = proctab_find(t, e->parent);
            if (parent && parent->in)
                e->in = more = true;
        }
    }
}

bool proctab_read(pid_t pid, struct procent *out)
{
    char name[16];

    snprintf(name, sizeof name, "%d", (int)pid);
    return agent_proc_fd >= 0 && read_stat(name, out);
}

bool proctab_threads_all(pid_t pid, const char *states)
{
    struct proctab t = {0};
    char name[32];
    bool still;

    snprintf(name, sizeof name, "%d/task", (int)pid);
    still = load(&t, name) == 0;
    for (size_t i = 0; i < t.count; i++)
        still = still && strchr(states, t.all[i].state);
    proctab_free(&t);
    return still;
}

void proctab_free(struct proctab *t)
{
    free(t->all);
    t->all = NULL;
    t->count = t->cap = 0;
}
