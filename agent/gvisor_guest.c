/* What the agent does first where gVisor's kernel is its own: it takes away what runsc mounts unasked, makes the limit that
 * holds commands to their number, and the way out if there is to be one. Everything here is within the sandbox. */
#define _GNU_SOURCE
#include "agent.h"
#include "gvisor_guest.h"
#include "gvisor_pids.h"
#include "launch.h"
#include "net.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>

bool agent_own_kernel;

#define PLACE "/.sloplet"

static int drop_raw_sockets(void)
{
    struct {
        uint32_t version;
        int pid;
    } header = {0x20080522, 0};
    struct {
        uint32_t effective, permitted, inheritable;
    } sets[2];
    uint32_t rest = ~(1u << 13); /* CAP_NET_RAW */

    if (syscall(SYS_capget, &header, sets) < 0)
        return -1;
    sets[0].effective &= rest;
    sets[0].permitted &= rest;
    return (int)syscall(SYS_capset, &header, sets);
}

static int make_egress(void)
{
    int port = net_listen();

    if (port < 0 || net_redirect_gvisor(port) < 0)
        return -1;
    net_failed = "giving up raw sockets";
    return drop_raw_sockets() < 0 || seccomp_no_ping() < 0 ? -1 : 0;
}

static bool asked(int argc, char **argv, const char *word)
{
    for (int i = 3; i < argc; i++)
        if (!strcmp(argv[i], word))
            return true;
    return false;
}

int gvisor_guest_main(int argc, char **argv)
{
    /* runsc hides an empty /tmp behind a filesystem in memory that no disk limit holds for, and shows /sys */
    if (!asked(argc, argv, "tmp"))
        umount2("/tmp", MNT_DETACH);
    if (umount2("/sys", MNT_DETACH) == 0)
        rmdir("/sys");
    agent_own_kernel = true;
    /* gVisor remembers a thousand files of /proc, those of processes long gone too, and saves them with the rest: 100 KiB
     * for each process that was ever looked at. Here are sixteen. If this is refused, saving is slower. */
    mount("none", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "dentry_cache_limit=16");
    if (argc > 2 && gvisor_limit_processes(strtoul(argv[1], NULL, 10), strtoul(argv[2], NULL, 10)) < 0) {
        dprintf(2, "sloplet-agent: no process limit: errno %d\n", errno);
        return 1;
    }
    for (int i = 3; i < argc; i++) {
        if (!strcmp(argv[i], "powers"))
            agent_powers = true;
        if (!strcmp(argv[i], "nosetid"))
            agent_no_setid = true;
        if (!strcmp(argv[i], "egress") && make_egress() < 0) {
            dprintf(2, "sloplet-agent: no way out: %s: errno %d\n", net_failed, errno);
            return 1;
        }
    }
    /* nobody is to write what the agent runs on, root inside neither: gVisor lets a running program be written */
    if (mount("none", PLACE, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755") < 0) {
        dprintf(2, "sloplet-agent: cannot cover itself: errno %d\n", errno);
        return 1;
    }
    return agent_main(0, 1);
}
