/* One pass over /proc: who is whose child. */
#ifndef SLOPLET_PROCTAB_H
#define SLOPLET_PROCTAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct procent {
    pid_t pid, parent;
    char state; /* as in /proc/PID/stat: Z is a zombie */
    bool in;    /* a member of the tree that was marked */
    bool forked; /* it has a living child; and how far down it is (freeze.c) */
    unsigned level, threads;
    uint64_t cpu_us, rss, faults;
    uint64_t anon, shmem; /* the watchdog's (memory.c), bytes */
};

struct proctab {
    struct procent *all; /* sorted by pid */
    size_t count, cap;
};

/* Reads the table anew. 0, or an errno when /proc cannot be read at all. */
int proctab_load(struct proctab *t);
/* Puts it back in order of pids, which proctab_find needs. */
void proctab_sort(struct proctab *t);
struct procent *proctab_find(struct proctab *t, pid_t pid);
/* Marks everything that descends from entries already marked. The marked roots stay marked. */
void proctab_spread(struct proctab *t);
/* One process alone; false if it is not there. */
bool proctab_read(pid_t pid, struct procent *out);
/* Whether each of its threads is in one of these states. */
bool proctab_threads_all(pid_t pid, const char *states);
void proctab_free(struct proctab *t);

#endif
