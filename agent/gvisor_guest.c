/* What the agent does first where gVisor's kernel is its own: it takes away what runsc mounts unasked, and makes the
 * group that holds commands to their number. Everything here is within the sandbox. */
#define _GNU_SOURCE
#include "agent.h"
#include "gvisor_guest.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

bool agent_own_kernel;

#define PLACE "/.sloplet"
#define GROUPS PLACE "/groups"

static int write_text(int folder, const char *name, const char *text)
{
    int fd = openat(folder, name, O_WRONLY | O_CLOEXEC);
    ssize_t size = (ssize_t)strlen(text), done;

    if (fd < 0)
        return -1;
    done = write(fd, text, (size_t)size);
    close(fd);
    return done == size ? 0 : -1;
}

/* A pids group of gVisor's own that commands join; the agent and its shims, until they join, are not in it. The mount
 * is let go of at once: who has no descriptor of it finds no group. */
static int limit_processes(const char *most)
{
    int top, work = -1, join = -1;

    if (mount("none", GROUPS, "cgroup", MS_NOSUID | MS_NODEV | MS_NOEXEC, "pids") < 0)
        return -1;
    top = open(GROUPS, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (top >= 0 && (mkdirat(top, "work", 0700) == 0 || errno == EEXIST))
        work = openat(top, "work", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (work >= 0 && write_text(work, "pids.max", most) == 0)
        join = openat(work, "cgroup.procs", O_WRONLY | O_CLOEXEC);
    if (work >= 0)
        close(work);
    if (top >= 0)
        close(top);
    umount2(GROUPS, MNT_DETACH);
    if (join < 0)
        return -1;
    agent_work_fd = join;
    agent_work_fds = 1;
    return 0;
}

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
    if (argc > 1 && limit_processes(argv[1]) < 0) {
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
