/* Starting one command: what the agent hands to the shim, and what the shim says back. */
#ifndef SLOPLET_SPAWN_H
#define SLOPLET_SPAWN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "users.h"

enum spawn_part { PART_NONE, PART_USER, PART_CWD, PART_COMMAND, PART_FORK, PART_TTY };

struct spawn {
    char **argv, **env;
    const char *cwd, *workdir, *path; /* path: PATH of env */
    const struct user *user;
    bool pty;
    int in, out, err, status; /* fds for the command's 0, 1, 2 and for the shim's reports */
    int jobs; /* of a shim that takes one command after another: the socket they come by, each side's own end; else -1 */
    volatile int error_part, error; /* written by the command before it becomes one */
    pid_t *pid_slot; /* shared with the agent: the kernel writes the command's pid here at its birth */
};

/* Fixed size and below PIPE_BUF: a pipe never splits it. EMPTY: the tree is gone and the shim waits for its next command;
 * one that takes a single command ends instead. */
struct shim_report {
    enum { SHIM_STARTED = 1, SHIM_FAILED, SHIM_EXITED, SHIM_EMPTY } kind;
    int pid, part, error, status;
    int64_t cpu_us, maxrss;
};

/* The signal by which the agent asks a shim to kill its tree where /proc cannot be read. */
#define SHIM_SWEEP (SIGRTMAX - 1)

/* Hands the command to a shim that waits, or forks one. Its pid, or -1 with errno. */
pid_t shim_start(struct spawn *s);

#endif
