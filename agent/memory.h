/* The memory watchdog: the substitute where no cgroup holds the sandbox as a whole. */
#ifndef SLOPLET_MEMORY_H
#define SLOPLET_MEMORY_H

#include <stdint.h>

/* The limit in bytes, 0 for none. Called by HELLO, before any command of that connection. */
void memory_limit(int64_t bytes);
/* Looks if it is time to; when it wants to be called next. NEVER while no command runs. */
int64_t memory_timer(int64_t now);
/* Processes killed so far, or -1 where there is no limit to watch. */
int64_t memory_kills(void);

#endif
