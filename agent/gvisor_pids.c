/* The process limit in gVisor: see gvisor_pids.h.
 *
 * It is RLIMIT_NPROC, which gVisor counts by the real user id of whoever forks, threads too, and holds everyone to who
 * has not CAP_SYS_ADMIN. Not its pids groups: they count right but refuse by chance. A task is in one group of each of
 * seven hierarchies, and chargeLocked() (pkg/sentry/kernel/task_cgroup.go) asks the first one that a Go map happens to
 * give it, so six forks of seven are not held to anything (seen with 20240729). */
#define _GNU_SOURCE
#include "gvisor_pids.h"

#include <errno.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gvisor_guest.h"
#include "linuxapi.h"

#define SYS_ADMIN (1u << 21)
#define FILTER 2 /* SECCOMP_MODE_FILTER */
#define LOAD 0x20u
#define JEQ 0x15u
#define JSET 0x45u
#define RETURN 0x06u
#define ALLOW 0x7FFF0000u
#define FAIL(number) (0x00050000u | (uint32_t)(number))
#define CALL 0u /* where struct seccomp_data has the number, and the low half of the first argument */
#define FIRST_ARGUMENT 16u

static rlim_t most_of_user, most_of_root;

/* Who makes a user namespace has CAP_SYS_ADMIN in it, and so no limit. There are none on the other rungs either. What
 * clone3 is asked for cannot be seen by a filter: programs fall back to clone. */
static int forbid_user_namespaces(void)
{
    static const struct {
        uint16_t code;
        uint8_t if_true, if_false;
        uint32_t k;
    } code[] = {
        {LOAD, 0, 0, CALL},
        {JEQ, 5, 0, NR_clone3},
        {JEQ, 1, 0, SYS_clone},
        {JEQ, 0, 2, SYS_unshare},
        {LOAD, 0, 0, FIRST_ARGUMENT},
        {JSET, 2, 0, CLONE_NEWUSER},
        {RETURN, 0, 0, ALLOW},
        {RETURN, 0, 0, FAIL(ENOSYS)},
        {RETURN, 0, 0, FAIL(EPERM)},
    };
    struct {
        uint16_t size;
        const void *code;
    } program = {sizeof code / sizeof *code, code};

    return prctl(PR_SET_SECCOMP, FILTER, &program);
}

int gvisor_limit_processes(unsigned long most, unsigned long own)
{
    most_of_user = most;
    most_of_root = most + own;
    return forbid_user_namespaces();
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
