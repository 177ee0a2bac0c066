/* The process limit in gVisor: see gvisor_pids.h.
 *
 * It is RLIMIT_NPROC, which gVisor counts by the real user id of whoever forks, threads too, and holds everyone to who
 * has not CAP_SYS_ADMIN. Not its pids groups: they count right but refuse by chance. A task is in one group of each of
 * seven hierarchies, and chargeLocked() (pkg/sentry/kernel/task_cgroup.go) asks the first one that a Go map happens to
 * give it, so six forks of seven are not held to anything (seen with 20240729). */
#define _GNU_SOURCE
#include "gvisor_pids.h"

#include <errno.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gvisor_guest.h"
#include "launch.h"

#define SYS_ADMIN (1u << 21)

static rlim_t most_of_user, most_of_root;

int gvisor_limit_processes(unsigned long most, unsigned long own)
{
    most_of_user = most;
    most_of_root = most + own;
    return seccomp_gvisor(); /* no user namespaces: who makes one has CAP_SYS_ADMIN in it, and so no limit */
}

int gvisor_be_counted(void)
{
    struct {
        uint32_t version;
        int pid;
    } header = {0x20080522, 0};
    struct {
        uint32_t effective, permitted, inheritable;
    } sets[2];

    if (!agent_own_kernel)
        return 0;
    if (syscall(SYS_capget, &header, sets) < 0)
        return errno;
    sets[0].effective &= ~SYS_ADMIN;
    sets[0].permitted &= ~SYS_ADMIN;
    return syscall(SYS_capset, &header, sets) < 0 ? errno : 0;
}

void gvisor_count_as(const struct user *user)
{
    struct rlimit limit;

    if (!agent_own_kernel || getrlimit(RLIMIT_NPROC, &limit) < 0)
        return;
    limit.rlim_cur = user->uid ? most_of_user : most_of_root;
    setrlimit(RLIMIT_NPROC, &limit);
    syscall(SYS_setresuid, user->uid, -1, -1);
}

void gvisor_count_as_agent(void)
{
    if (agent_own_kernel)
        syscall(SYS_setresuid, 0, -1, -1);
}

void gvisor_fix_limit(void)
{
    struct rlimit limit;

    if (!agent_own_kernel || getrlimit(RLIMIT_NPROC, &limit) < 0)
        return;
    limit.rlim_max = limit.rlim_cur;
    setrlimit(RLIMIT_NPROC, &limit);
}
