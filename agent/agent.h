/* The guest agent's public face: what the launcher calls. */
#ifndef SLOPLET_AGENT_H
#define SLOPLET_AGENT_H

#include <stdbool.h>

#define SLOPLET_AGENT_VERSION "0.1.0"

/* A directory fd of the procfs to use, or -1 to open /proc. A launcher that hides /proc from the
 * sandbox may set it before agent_main; it is marked close-on-exec and never reaches a command. */
extern int agent_proc_fd;

/* Where commands must be fenced in more narrowly than the agent: called in a command's own process, last before
 * exec, with fence_fd (kept open until then). A failure is a failure to start. NULL: nothing more to do. */
extern int agent_fence_fd;
extern int (*agent_fence)(int fence_fd);

/* Files of the cgroups that commands belong in, opened by whoever may: agent_work_fds of them from agent_work_fd on.
 * Writing "0" moves the writer. Marked close-on-exec; they never reach a command. */
extern int agent_work_fd, agent_work_fds;

/* Where the overlays of the sandbox's root keep what is written: folders named by number in agent_upper_fd, each mounted at a
 * path (without a leading slash; "" is the root). What is not in one of them lies on the root's own filesystem. agent_layers -1:
 * nobody told. The descriptor is close-on-exec and never reaches a command. */
#define AGENT_LAYERS 64
struct agent_layer {
    int number;
    char path[252];
};
extern int agent_upper_fd, agent_layers;
extern struct agent_layer agent_layer[AGENT_LAYERS];

/* Where volumes are mounted (without a leading slash): what is there is no part of the sandbox's own files. */
#define AGENT_VOLUMES 16
extern int agent_volumes;
extern char agent_volume[AGENT_VOLUMES][512];

/* Root's commands have these, over what is the sandbox's own: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID,
 * NET_BIND_SERVICE, SYS_CHROOT. Set by whoever starts the agent, with no NOROOT among the securebits; else none. */
#define AGENT_POWERS (1u << 0 | 1u << 1 | 1u << 3 | 1u << 4 | 1u << 5 | 1u << 6 | 1u << 7 | 1u << 10 | 1u << 18)
extern bool agent_powers;

/* Commands cannot give files setuid and setgid bits: they can write where other users of the host get. Nor take leases: they can
 * open what others there open. */
extern bool agent_no_setid, agent_no_leases;

/* For the memory watchdog: the root lies on a tmpfs, whatever an overlay says of its own type; the ipc namespace is the
 * sandbox's alone. */
extern bool agent_scratch_in_memory, agent_own_ipc;

/* Serves the wire on two fds until the host hangs up, asks for shutdown or breaks the protocol.
 * Returns an exit code: 0 for an orderly end, 2 for a protocol error, 1 when the agent itself
 * cannot go on. All processes of the sandbox are dead, or die with the pid namespace, by then.
 *
 * Preconditions: one thread; the jail is complete; the current root and mounts are final. The
 * capabilities the agent may use are those still permitted: SETUID, SETGID and CHOWN to run
 * commands as users, KILL to signal them, DAC_OVERRIDE and FOWNER for file calls as root, SETPCAP
 * to empty the bounding set. It needs none of them where HELLO says NO_USERS.
 *
 * The agent changes its effective uid for file calls, and the kernel clears the parent-death signal
 * whenever that happens: do not rely on PR_SET_PDEATHSIG for it, but on the end of in_fd. */
int agent_main(int in_fd, int out_fd);

#endif
