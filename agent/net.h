/* The sandbox's way out: sockets to which all that leaves is brought, in its own network namespace (or gVisor's netstack).
 * They are made before privileges are dropped; nothing is served here. docs/adr/0050-redirect.md says how. */
#ifndef SLOPLET_NET_H
#define SLOPLET_NET_H

#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* The listening TCP socket that every connection comes to which leaves, non-blocking. -1: this sandbox has no way out. */
extern int agent_egress_fd;

/* Where the program that made an accepted connection wanted to go, in host byte order. -1: nowhere; it connected to the
 * listener itself, and is to be reset. (Not SO_ORIGINAL_DST alone: on Linux nothing is rewritten, and none is kept.) */
int net_destination(int fd, uint32_t *address, uint16_t *port);

/* Port 53: a UDP socket that every question comes to, whatever address it was sent to, and a listening TCP socket on
 * 127.0.0.0/8 (TCP to port 53 of other addresses comes to agent_egress_fd like all TCP). Non-blocking. -1: none. */
extern int agent_dns_fd, agent_dns_tcp_fd;

/* One question of agent_dns_fd, and its answer: resolvers want it from the address that they asked. As recvfrom and sendto;
 * the answer never blocks. */
struct net_asker {
    struct sockaddr_in from;
    struct in_addr asked;
};
ssize_t net_dns_receive(void *question, size_t size, struct net_asker *asker);
ssize_t net_dns_answer(const void *answer, size_t size, const struct net_asker *asker);

/* Makes the three sockets in this network namespace. The egress port, or -1 and errno. */
int net_listen(void);

/* Brings what leaves to net_listen()'s sockets and refuses all else: a local default route and an nft table, by netlink.
 * Needs CAP_NET_ADMIN over the network namespace, and `lo` up. 0, or -1 and errno; net_failed names what was refused. */
int net_redirect_linux(int port);

/* The same in gVisor, where `lo` has net_addresses(): iptables' IPT_SO_SET_REPLACE. The first time it needs CAP_NET_RAW. */
int net_redirect_gvisor(int port);

/* Every address as one of `lo`, for runsc to copy: in the network namespace that runsc is in. */
int net_addresses(void);

/* After a restore, before anything goes on: gVisor has forgotten its rules. They are put back, and connections from before are
 * reset, for the programs that made them too. What else is kept of those finds its descriptor to be /dev/null. Does nothing
 * elsewhere. If it fails agent_egress_fd is -1 from then on. */
void net_restored(void);
void net_gvisor_went(int fd, uint32_t address, uint16_t port); /* for that: net_destination tells it */

/* Of the last failure: which part could not be made, for people. */
extern const char *net_failed;

#endif
