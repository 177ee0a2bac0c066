/* The sandbox's way out: sockets to which all that leaves is redirected, in its own network namespace (or gVisor's
 * netstack). They are made before privileges are dropped; nothing is served here. docs/adr/0050-redirect.md says how. */
#ifndef SLOPLET_NET_H
#define SLOPLET_NET_H

/* The listening TCP socket that every redirected connection comes to, non-blocking; SO_ORIGINAL_DST of what is accepted says
 * where its program wanted to go. A program may connect to it directly, too: then there is no SO_ORIGINAL_DST (Linux) or it
 * is the listener's own address (gVisor), and the connection is to be reset. -1: this sandbox has no way out. */
extern int agent_egress_fd;

/* Port 53 on 127.0.0.1: UDP, and a listening TCP socket, both non-blocking. UDP to port 53 of any address comes to the first
 * (answers go out under the address that was asked). TCP to port 53 of another address than 127.0.0.1 comes to agent_egress_fd
 * like all TCP. -1: none. */
extern int agent_dns_fd, agent_dns_tcp_fd;

/* Makes the three in this network namespace. The egress port, or -1 and errno. */
int net_listen(void);

/* Redirects what leaves to net_listen()'s sockets and refuses all else: a local default route and an nft table, by netlink.
 * Needs CAP_NET_ADMIN over the network namespace, and `lo` up. 0, or -1 and errno; net_failed names what was refused. */
int net_redirect_linux(int port);

/* The same in gVisor: addresses on `lo`, and iptables' IPT_SO_SET_REPLACE. Needs CAP_NET_ADMIN and CAP_NET_RAW. */
int net_redirect_gvisor(int port);

/* Of the last failure: which part could not be made, for people. */
extern const char *net_failed;

#endif
