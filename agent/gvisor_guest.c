/* What the agent does first where gVisor's kernel is its own: it takes away what runsc mounts unasked, and makes the
 * limit that holds commands to their number. Everything here is within the sandbox. */
#define _GNU_SOURCE
#include "agent.h"
#include "gvisor_guest.h"
#include "gvisor_pids.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <unistd.h>

bool agent_own_kernel;

#define PLACE "/.sloplet"

int gvisor_guest_main(int argc, char **argv)
{
    /* runsc hides an empty /tmp behind a filesystem in memory that no disk limit holds for, and shows /sys */
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
    /* nobody is to write what the agent runs on, root inside neither: gVisor lets a running program be written */
    if (mount("none", PLACE, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755") < 0) {
        dprintf(2, "sloplet-agent: cannot cover itself: errno %d\n", errno);
        return 1;
    }
    return agent_main(0, 1);
}
