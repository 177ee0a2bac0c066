/* The process table. A process belongs to the agent; streams only attach to it. */
#ifndef SLOPLET_PROC_H
#define SLOPLET_PROC_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "fields.h"
#include "loop.h"
#include "ring.h"
#include "spawn.h"
#include "wire.h"

#define PROC_EXITED_MAX 64                    /* ended processes remembered */
#define PROC_EXITED_BYTES (8u * 1024 * 1024)  /* of their output, in all */
#define PROC_ARGV_KEPT 4096                   /* bytes of argv that PS can tell */

enum proc_state { PROC_STARTING, PROC_RUNNING, PROC_EXITED };

struct proc;

/* One output channel: the read end of a pipe (or a terminal's master) and what came out of it. */
struct channel {
    struct source source;
    struct ring ring;
    struct proc *proc;
    uint64_t final; /* once the main process ended: where its own output ends */
    bool done;      /* everything up to `final` is in the ring */
};

/* A stream's view of a process. */
struct attach {
    struct stream *stream;
    struct proc *proc;
    struct attach *next;
    bool lossy, discard, kill_on_reset, replied;
    uint64_t start[2], pos[2], sent[2];
    uint8_t *in; /* stdin bytes that the pipe has not taken yet */
    size_t in_len, in_cap;
    bool in_end;
};

struct proc {
    int64_t id;
    enum proc_state state;
    pid_t shim, ospid;
    pid_t *slot; /* while starting: where the command's pid shows up even if the shim is killed */
    int jobs;         /* of its shim: see struct spawn */
    bool empty;       /* the shim said that the tree is gone */
    bool shim_gone;   /* reaped, or back among those that wait: the tree is empty, or orphaned if `orphaned` */
    bool orphaned;    /* someone killed the shim: what is left are children of the agent */
    bool strays;      /* the same happened to what it ran by sudo */
    bool pty, timed_out, killing, hidden;
    bool oom; /* the watchdog killed something of its tree */
    int64_t flags;
    struct channel ch[2];
    struct source in;     /* write end of stdin */
    struct source status; /* the shim's reports */
    struct attach *attached;
    int64_t started_wall, started, deadline;
    int64_t kill_since, kill_next, settle; /* settle: until when a terminal's tail is awaited */
    int exit_status;
    int64_t cpu_us, maxrss, wall_us;
    char *tag, *argv; /* argv: NUL-terminated strings, argv_len bytes */
    size_t argv_len;
    struct proc *next; /* by rising id */
};

extern struct proc *proc_list;

/* A shim was killed since there was last nobody: there may be processes that belong to no command. */
extern bool proc_strayed;

/* A new entry, starting. NULL without memory or when too many start at once. */
struct proc *proc_new(void);
struct proc *proc_find(int64_t id);
/* By the kernel's number: the one that runs, else the latest of those that are remembered. */
struct proc *proc_find_os(int64_t ospid);
void proc_free(struct proc *p);
/* Drops the oldest ended processes beyond the limits. */
void proc_evict(void);
int proc_watch_status(struct proc *p, int fd);
/* Reaps a bounded number of children; true if there may be more. */
bool proc_reap(void);
/* Runs what is due; when it wants to be called next. */
int64_t proc_timers(int64_t now);
/* Everything that is due later is due that much later still. */
void proc_postpone(int64_t ns);
/* True if no child, and so no process of the sandbox, is left. */
bool proc_nobody_left(void);
bool proc_is_shim(pid_t pid);

/* proc_io.c */
void io_start(struct proc *p, int out_fd, int err_fd, int in_fd);
struct attach *io_attach(struct proc *p, struct stream *s, int64_t flags);
void io_main_ended(struct proc *p);
/* Looks again at what may be read from the process and who may close. */
void io_update(struct proc *p);
int64_t io_settle(struct proc *p, int64_t now);
void io_close_all(struct proc *p);
void exit_fields(struct fw *w, const struct proc *p, uint64_t out_total, uint64_t err_total);

/* kill.c */
/* Signals the tree, or the main process only. Number of processes reached, or -errno. */
int kill_tree(struct proc *p, int signum, bool main_only);
/* Starts (or goes on with) killing until nothing is left. */
void kill_begin(struct proc *p);
int64_t kill_step(struct proc *p, int64_t now);
/* Every process of the sandbox but the agent. Number reached. */
int kill_everyone(int signum);

/* Operations */
void op_exec(struct stream *s, const struct fields *f);
void op_attach(struct stream *s, const struct fields *f);
void op_signal(struct stream *s, const struct fields *f);
void op_ps(struct stream *s, const struct fields *f);
void op_forget(struct stream *s, const struct fields *f);

#endif
