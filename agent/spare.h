/* A shim that was forked ahead of its command, where forking is dear (gVisor). */
#ifndef SLOPLET_SPARE_H
#define SLOPLET_SPARE_H

#include "spawn.h"

/* Hands a command to the spare shim: its pid, or -1 where there is none that can take it. Another is made soon. */
pid_t spare_take(const struct spawn *s);
/* Makes the next one when it is due; when to come again. */
int64_t spare_timer(int64_t now);
/* There may soon be a command. */
void spare_soon(void);

/* shim.c: what a shim is, in its parts. enter: right after the fork. keep_only: of all descriptors above 2 only /proc
 * and *fd, which may move. run: the command; s->error from enter is reported. */
void shim_enter(struct spawn *s, pid_t agent);
void shim_keep_only(int *fd);
void shim_run(struct spawn *s) __attribute__((noreturn));

#endif
