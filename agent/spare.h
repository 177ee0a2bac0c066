/* A shim that waits for its command, where forking is dear (gVisor). */
#ifndef SLOPLET_SPARE_H
#define SLOPLET_SPARE_H

#include "spawn.h"

/* Hands a command to the shim that waits, or to a new one: its pid, and s->jobs; or -1 where none can take it. */
pid_t spare_take(struct spawn *s);
/* The pid of the shim that waits, or 0. */
pid_t spare_waiting(void);
/* The shim waits again; `jobs` is its socket, the agent's end. */
void spare_back(pid_t pid, int jobs);
/* Makes the next one when it is due; when to come again. */
int64_t spare_timer(int64_t now);
/* There will soon be a command: the next spare_timer sees to it. */
void spare_soon(void);

/* shim.c: what a shim is, in its parts. enter: right after the fork. settle: for one that takes several commands, of all
 * descriptors only /proc, /dev/null and s->jobs, which moves. run: one command until its tree is gone; s->error from
 * enter is reported. */
void shim_enter(struct spawn *s, pid_t agent);
void shim_settle(struct spawn *s, int null_fd);
void shim_run(struct spawn *s);
/* Of all descriptors only `fd`, which becomes 3, and /proc; 0 to 2 are /dev/null. Returns the new number. */
int shim_keep_only(int fd);

#endif
