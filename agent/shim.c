/* The shim: one small process per command, the subreaper of all that descends from it, so that a
 * double-forked daemon still belongs to its command. It reports how the main process ended at
 * once, then reaps until nothing is left, and its own end tells the agent that the tree is gone
 * (where shims are dear it says so instead, and takes the next command: spare.c).
 *
 * The command is started by clone(CLONE_VM | CLONE_VFORK): no page table is copied, and a failure
 * before exec comes back through shared memory. It is safe here because the shim has one thread,
 * is suspended meanwhile, blocks all signals, and the child runs on a stack of its own. */
#define _GNU_SOURCE
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"
#include "guest.h"
#include "gvisor_guest.h"
#include "gvisor_pids.h"
#include "launch.h"
#include "path.h"
#include "spare.h"

#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#define STATUS_FD 3
#define PROC_FD 4
#define FENCE_FD 5
#define JOBS_FD 6
#define NULL_FD 7
#define STACK_SIZE (64 * 1024)

/* A sanitizer keeps a shadow of the stack it knows: the child's is not that one. */
#if defined(__SANITIZE_ADDRESS__)
#define NO_SANITIZER __attribute__((no_sanitize_address))
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define NO_SANITIZER __attribute__((no_sanitize("address")))
#endif
#endif
#ifndef NO_SANITIZER
#define NO_SANITIZER
#endif

static void close_from(unsigned first)
{
    /* not ~0u: gVisor refuses a last one that is no descriptor */
    if (syscall(SYS_close_range, first, INT_MAX, 0) == 0)
        return;
    for (int fd = (int)first; fd < 4096; fd++)
        close(fd);
}

/* Commands are the first to go when memory runs out, never the agent. Raising needs no privilege. */
static void offer_to_oom_killer(void)
{
    int fd;

    /* gVisor has no such killer, and remembers what was opened of /proc for long after the process is gone */
    if (agent_proc_fd < 0 || agent_own_kernel)
        return;
    fd = openat(agent_proc_fd, "self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    if (write(fd, "500", 3) < 0) {
        /* an older, higher score stays: just as good */
    }
    close(fd);
}

/* None, or those of root where it has powers. */
static int set_capabilities(uint32_t keep)
{
    struct {
        uint32_t version;
        int pid;
    } header = {0x20080522, 0};
    uint32_t sets[6] = {keep, keep, 0}; /* effective, permitted, inheritable; then their high words */

    return (int)syscall(SYS_capset, &header, sets);
}

/* The kernel compares before it counts the newcomer, so to RLIMIT_NPROC one more than allowed is not too many: for that
 * moment the limit is one lower. If it was reached exec asks again, by the true one, and fails with EAGAIN. */
static int set_uid(uid_t uid)
{
    struct rlimit limit, lower;
    int result;

    if (agent_own_kernel || getrlimit(RLIMIT_NPROC, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY || !limit.rlim_cur)
        return (int)syscall(SYS_setresuid, uid, uid, uid);
    lower = limit;
    lower.rlim_cur--;
    setrlimit(RLIMIT_NPROC, &lower);
    result = (int)syscall(SYS_setresuid, uid, uid, uid);
    setrlimit(RLIMIT_NPROC, &limit);
    return result;
}

/* For good: real, effective and saved ids. The bounding set and no_new_privs were set agent-wide. */
static int become(const struct user *u)
{
    if (user_differs(u)) {
        /* so that /dev/stdout can be opened again by the command's user */
        for (int fd = 0; fd < 3; fd++) {
            struct stat st;
            if (!fstat(fd, &st) && (S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode)))
                if (fchown(fd, u->uid, u->gid) < 0)
                    continue;
        }
        if (syscall(SYS_setgroups, u->ngroups, u->groups) < 0 ||
            syscall(SYS_setresgid, u->gid, u->gid, u->gid) < 0 || set_uid(u->uid) < 0)
            return -1;
    } else if (!guest.no_users && guest.uid == 0) {
        syscall(SYS_setgroups, u->ngroups, u->groups); /* refused in some namespaces: no harm */
    }
    if (set_capabilities(agent_powers && u->uid == 0 && !guest.no_users ? AGENT_POWERS : 0) < 0)
        return -1;
    return prctl(PR_SET_DUMPABLE, 0);
}

static int enter_cwd(const struct spawn *s)
{
    int base = AT_FDCWD, fd, result;

    if (s->cwd[0] != '/') {
        base = path_open(AT_FDCWD, s->workdir, O_PATH | O_DIRECTORY, 0);
        if (base < 0)
            return -1;
    }
    fd = path_open(base, s->cwd, O_PATH | O_DIRECTORY, 0);
    if (fd < 0)
        return -1;
    result = fchdir(fd);
    close(fd);
    if (base >= 0)
        close(base);
    return result;
}

/* execvp by rules of our own: a file without a known format is an error, not a script for sh. */
static void exec_command(const struct spawn *s)
{
    const char *name = s->argv[0], *dir = s->path;
    size_t name_len = strlen(name);
    char full[8192];
    bool denied = false;

    if (strchr(name, '/')) {
        execve(name, s->argv, s->env);
        return;
    }
    errno = ENOENT;
    while (name_len) {
        size_t len = strcspn(dir, ":");
        if (len + name_len + 2 <= sizeof full) {
            memcpy(full, dir, len);
            if (len)
                full[len++] = '/';
            memcpy(full + len, name, name_len + 1);
            execve(full, s->argv, s->env);
            if (errno == EACCES)
                denied = true;
            else if (errno != ENOENT && errno != ENOTDIR && errno != ELOOP && errno != ENAMETOOLONG)
                return;
        }
        dir += strcspn(dir, ":");
        if (!*dir)
            break;
        dir++;
    }
    errno = denied ? EACCES : ENOENT;
}

NO_SANITIZER static int command_main(void *arg)
{
    struct spawn *s = arg;
    sigset_t none;

    s->error_part = PART_TTY;
    setsid();
    if (s->pty && ioctl(0, TIOCSCTTY, 0) < 0)
        goto failed;
    offer_to_oom_killer();
    umask(022);
    setrlimit(RLIMIT_NOFILE, &guest.nofile);
    gvisor_fix_limit();
    s->error_part = PART_USER;
    if (become(s->user) < 0)
        goto failed;
    s->error_part = PART_CWD;
    if (enter_cwd(s) < 0)
        goto failed;
    s->error_part = PART_COMMAND;
    if ((agent_fence && agent_fence(FENCE_FD) < 0) || (agent_no_setid && seccomp_no_setid() < 0) ||
        (agent_no_leases && seccomp_no_leases() < 0))
        goto failed;
    close_from(3);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    exec_command(s);
failed:
    s->error = errno;
    _exit(127);
}

static void report(const struct shim_report *r)
{
    while (write(STATUS_FD, r, sizeof *r) < 0 && errno == EINTR)
        ;
}

static volatile sig_atomic_t sweep_asked;

static void on_sweep(int signum)
{
    (void)signum;
    sweep_asked = 1;
}

static pid_t main_pid;

enum collected { NOBODY_LEFT, NONE_DEAD, ONE };

/* Takes one dead child. */
static enum collected collect(int flags)
{
    struct shim_report r = {.kind = SHIM_EXITED};
    struct rusage ru;
    pid_t pid = wait4(-1, &r.status, flags, &ru);

    if (pid < 0 && errno == ECHILD)
        return NOBODY_LEFT;
    if (pid > 0 && pid == main_pid) {
        r.pid = pid;
        r.cpu_us = (int64_t)(ru.ru_utime.tv_sec + ru.ru_stime.tv_sec) * 1000000 +
                   ru.ru_utime.tv_usec + ru.ru_stime.tv_usec;
        r.maxrss = (int64_t)ru.ru_maxrss * 1024;
        report(&r);
        main_pid = -1;
    }
    return pid > 0 ? ONE : NONE_DEAD;
}

/* Without /proc a process cannot list its children, but waitid says of any pid whether it is one.
 * All descendants end up as children of the subreaper once those between are dead, so killing
 * children in passes ends everything; the agent asks again until the shim is gone. Pids are given
 * out upwards, so the search begins at the command's own. */
static void sweep(pid_t from)
{
    static const pid_t highest = 4194304; /* PID_MAX_LIMIT of 64-bit Linux */
    enum collected left;
    siginfo_t info;

    sweep_asked = 0;
    for (pid_t i = 0; i < highest; i++) {
        pid_t pid = 2 + (from - 2 + i) % (highest - 2);

        if (waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) < 0)
            continue;
        kill(pid, SIGKILL);
        collect(0); /* its children are ours only when it is dead: begin again then */
        do
            left = collect(WNOHANG);
        while (left == ONE);
        if (left == NOBODY_LEFT)
            return;
        i = -1;
    }
}

/* Until nobody is left. */
static void reap(pid_t pid)
{
    main_pid = pid;
    do
        if (sweep_asked)
            sweep(pid);
    while (collect(0) != NOBODY_LEFT);
}

static void arrange_fds(const struct spawn *s)
{
    /* Sources are above 2, and the status fd is moved only when 3 and 4 are not needed any more;
     * it may be 4 itself, and the proc fd 3, so all go out of the way first. */
    int status = fcntl(s->status, F_DUPFD_CLOEXEC, 16);
    int proc = agent_proc_fd < 0 ? -1 : fcntl(agent_proc_fd, F_DUPFD_CLOEXEC, 16);
    int fence = agent_fence_fd < 0 ? -1 : fcntl(agent_fence_fd, F_DUPFD_CLOEXEC, 16);

    dup2(s->in, 0);
    dup2(s->out, 1);
    dup2(s->err, 2);
    dup3(status, STATUS_FD, O_CLOEXEC);
    if (proc >= 0)
        dup3(proc, PROC_FD, O_CLOEXEC);
    else
        close(PROC_FD);
    agent_proc_fd = proc < 0 ? -1 : PROC_FD;
    if (fence >= 0)
        dup3(fence, FENCE_FD, O_CLOEXEC);
    else
        close(FENCE_FD);
    close_from(s->jobs < 0 ? JOBS_FD : NULL_FD + 1);
}

/* Out of the agent's cgroups into those of commands: what they use up is theirs. */
static int join_work(void)
{
    for (int i = 0; i < agent_work_fds; i++)
        if (write(agent_work_fd + i, "0", 1) != 1)
            return errno;
    return 0;
}

void shim_enter(struct spawn *s, pid_t agent)
{
    struct sigaction sa = {.sa_handler = on_sweep};

    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_NAME, "sloplet-shim");
    /* Should the agent be killed where it is not init, no tree outlives it. */
    prctl(PR_SET_PDEATHSIG, SHIM_SWEEP);
    if (getppid() != agent)
        _exit(1);
    sigaction(SHIM_SWEEP, &sa, NULL);
    s->error_part = PART_FORK;
    s->error = join_work();
    if (!s->error)
        s->error = gvisor_be_counted();
}

/* The command's ends of its pipes are the command's alone; who takes another keeps the numbers below 3 taken. */
static void leave_stdio(const struct spawn *s)
{
    for (int fd = 0; fd < 3; fd++)
        if (s->jobs < 0)
            close(fd);
        else
            dup2(NULL_FD, fd);
}

void shim_settle(struct spawn *s, int null_fd)
{
    int proc = agent_proc_fd < 0 ? -1 : fcntl(agent_proc_fd, F_DUPFD_CLOEXEC, 16);
    int jobs = fcntl(s->jobs, F_DUPFD_CLOEXEC, 16), null = fcntl(null_fd, F_DUPFD_CLOEXEC, 16);

    if (jobs < 0 || null < 0)
        _exit(0);
    agent_proc_fd = proc < 0 ? -1 : dup3(proc, PROC_FD, O_CLOEXEC);
    s->jobs = dup3(jobs, JOBS_FD, O_CLOEXEC);
    dup3(null, NULL_FD, O_CLOEXEC);
    close(STATUS_FD);
    close(FENCE_FD);
    if (proc < 0)
        close(PROC_FD);
    close_from(NULL_FD + 1);
    leave_stdio(s);
}

int shim_keep_only(int fd)
{
    int kept = fcntl(fd, F_DUPFD_CLOEXEC, 16), proc = agent_proc_fd < 0 ? -1 : fcntl(agent_proc_fd, F_DUPFD_CLOEXEC, 16);

    for (int i = 0; i < 3; i++)
        if (guest.null_fd < 0 || dup2(guest.null_fd, i) < 0)
            close(i);
    if (kept < 0 || dup3(kept, STATUS_FD, O_CLOEXEC) < 0)
        _exit(1);
    agent_proc_fd = proc < 0 ? -1 : dup3(proc, PROC_FD, O_CLOEXEC);
    close_from(proc < 0 ? PROC_FD : PROC_FD + 1);
    return STATUS_FD;
}

void shim_run(struct spawn *s)
{
    static _Alignas(16) char stack[STACK_SIZE];
    struct shim_report r = {.kind = SHIM_STARTED};
    sigset_t unblocked;

    arrange_fds(s);
    if (!s->error) {
        gvisor_count_as(s->user);
        r.pid = clone(command_main, stack + sizeof stack,
                      CLONE_VM | CLONE_VFORK | CLONE_PARENT_SETTID | SIGCHLD, s, s->pid_slot);
        if (r.pid < 0)
            s->error = errno;
        gvisor_count_as_agent();
    }
    if (s->error) {
        r.kind = SHIM_FAILED;
        r.part = s->error_part;
        r.error = s->error;
        r.pid = -1;
    }
    leave_stdio(s);
    report(&r);
    sweep_asked = 0; /* what a tree before this one was sent */
    sigemptyset(&unblocked);
    sigaddset(&unblocked, SHIM_SWEEP);
    sigprocmask(SIG_UNBLOCK, &unblocked, NULL);
    reap(r.pid);
    if (s->jobs < 0)
        _exit(0);
    r = (struct shim_report){.kind = SHIM_EMPTY};
    report(&r);
    close(STATUS_FD);
}

pid_t shim_start(struct spawn *s)
{
    pid_t agent = getpid(), pid;

    s->error = 0;
    s->error_part = PART_NONE;
    s->jobs = -1;
    pid = spare_take(s);
    if (pid > 0)
        return pid;
    pid = fork();
    if (pid == 0) {
        shim_enter(s, agent);
        shim_run(s);
        _exit(0);
    }
    return pid;
}
