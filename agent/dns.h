/* The sandbox's name server: it knows nothing itself, asks the host whether a name may be used, and answers with the name's
 * synthetic address (names.h). */
#ifndef SLOPLET_DNS_H
#define SLOPLET_DNS_H

#include <stdint.h>

/* Serves agent_dns_fd and agent_dns_tcp_fd (net.h) from now on; on every HELLO with EGRESS. What was good before has to be asked
 * for again, and lookups that wait are asked of the new host. -1: there are no such sockets. */
int dns_begin(void);
/* Serves a program's TCP connection to port 53 of whatever address. Takes over fd. */
void dns_serve_tcp(int fd);
/* Gives up what has waited too long; when to call next. */
int64_t dns_timers(int64_t now);

#endif
