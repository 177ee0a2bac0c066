/* How many processes commands may be where gVisor's kernel is their own. Elsewhere all of this does nothing. */
#ifndef SLOPLET_GVISOR_PIDS_H
#define SLOPLET_GVISOR_PIDS_H

#include "users.h"

/* Once, by the agent: `most` processes and threads for each user inside, and for root, as whom the agent and its shims
 * run, `own` more. -1 with errno. */
int gvisor_limit_processes(unsigned long most, unsigned long own);

/* By a shim, first: what it forks is counted, and refused when it is one too many. 0 or an errno. */
int gvisor_be_counted(void);

/* By a shim: what it forks until gvisor_count_as_agent is the user's. Meanwhile the user may signal it. */
void gvisor_count_as(const struct user *user);
void gvisor_count_as_agent(void);

/* By what it forked, before exec: the limit is not to be raised any more. */
void gvisor_fix_limit(void);

#endif
