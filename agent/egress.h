/* What programs of the sandbox connect to: each connection that was brought to agent_egress_fd (net.h) becomes a CONNECT stream
 * to the host. */
#ifndef SLOPLET_EGRESS_H
#define SLOPLET_EGRESS_H

#include <stdint.h>

/* Serves agent_egress_fd from now on; on every HELLO with EGRESS. -1: there is no such socket. */
int egress_begin(void);
/* Serves it no longer; whoever connects waits. On every HELLO without. */
void egress_end(void);
/* When to call next. */
int64_t egress_timers(int64_t now);

#endif
