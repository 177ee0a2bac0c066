/* The agent in a gVisor sandbox. */
#ifndef SLOPLET_GVISOR_GUEST_H
#define SLOPLET_GVISOR_GUEST_H

#include <stdbool.h>

/* The kernel is the sandbox's alone: what /proc/meminfo says is the sandbox's, whole and exact. */
extern bool agent_own_kernel;

/* argv: "guest", how many processes each user may have, how many more root for the agent's own, and "egress" where what leaves
 * is to be brought to the agent (net.h; takes CAP_NET_RAW, which is given up then). Serves the wire on 0 and
 * 1, as agent_main does. */
int gvisor_guest_main(int argc, char **argv);

#endif
