/* The launcher's course: read the plan, clone the sandbox's first process, give it what only the host side can
 * give (id maps, cgroups, mounts that need root), let it build its jail and become the agent, and supervise it. */
#define _GNU_SOURCE
#include "launch.h"
#include "agent.h"
#include "linuxapi.h"
#include "net.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef CLONE_NEWCGROUP
#define CLONE_NEWCGROUP 0x02000000
#endif

#define TMPFS_ 0x01021994

static struct launch launch;
static int join_fd[MAX_CGROUPS], work_fd[MAX_CGROUPS];

static void reset_signals(void) {
    struct sigaction normal = {.sa_handler = SIG_DFL};
    sigset_t none;
    sigemptyset(&none);
    for (int number = 1; number < 65; number++) sigaction(number, &normal, NULL);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* Slots travel as one message: a byte per descriptor naming its slot. */
static void send_slots(void) {
    uint8_t names[MAX_SLOTS + 1];
    int fds[MAX_SLOTS], count = 0;
    char control[CMSG_SPACE(sizeof fds)];
    memset(control, 0, sizeof control);
    for (int i = 0; i < MAX_SLOTS; i++) {
        if (launch.slot[i] < 0) continue;
        names[count] = (uint8_t)i;
        fds[count++] = launch.slot[i];
    }
    names[count] = 255; /* so that a message without slots is not empty */
    struct iovec data = {names, (size_t)count + 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    if (count) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * (size_t)count);
    }
    if (sendmsg(launch.sync, &message, MSG_NOSIGNAL) < 0) return; /* the child is gone; the reader sees why */
    for (int i = 0; i < MAX_SLOTS; i++) {
        if (launch.slot[i] >= 0) close(launch.slot[i]);
        launch.slot[i] = -1;
    }
}

static void receive_slots(void) {
    uint8_t names[MAX_SLOTS + 1];
    int fds[MAX_SLOTS];
    char control[CMSG_SPACE(sizeof fds)];
    struct iovec data = {names, sizeof names};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(launch.sync, &message, MSG_CMSG_CLOEXEC);
    if (size <= 0) _exit(END_START_FAILED); /* the supervisor died */
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!header) return;
    size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    memcpy(fds, CMSG_DATA(header), count * sizeof(int));
    for (size_t i = 0; i < count && i < (size_t)size; i++) launch.slot[names[i] % MAX_SLOTS] = fds[i];
}

static void wait_for_maps(void) {
    char byte;
    if (recv(launch.sync, &byte, 1, 0) != 1) _exit(END_START_FAILED);
}

static void die_with_supervisor(void) {
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0) fail("start", "pdeathsig", errno, "");
}

static void join_cgroups(void) {
    for (int i = 0; i < launch.plan.joins; i++) {
        if (write(join_fd[i], "0", 1) != 1) fail("cgroup", launch.plan.join[i], errno, "");
        close(join_fd[i]);
    }
}

static void enter_namespaces(void) {
    if (unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWCGROUP) < 0)
        fail("namespaces", "unshare", errno, "a security module or a limit in /proc/sys/user forbids it");
    if (launch.plan.hostname && sethostname(launch.plan.hostname, strlen(launch.plan.hostname)) < 0) fail("namespaces", "sethostname", errno, "");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) fail("namespaces", "private mounts", errno, "");
}

static void report_ready(void) {
    if (send(launch.sync, "", 1, MSG_NOSIGNAL) != 1) _exit(END_START_FAILED); /* also when the supervisor died unseen */
    close(launch.sync);
}

/* In a command's own process, before exec. */
static int fence_command(int ruleset) {
    if (launch.plan.seccomp & SECCOMP_FENCED && seccomp_no_metadata() < 0) return -1;
    return agent_fence_fd < 0 ? 0 : (int)syscall(NR_landlock_restrict_self, ruleset, 0);
}

/* Of all descriptors beyond the wire the agent gets these, from FD_PLAN on: commands' cgroups, then their fence, where overlays
 * are written, and what leaves comes to. */
static int keep_for_agent(void) {
    int *kept[MAX_CGROUPS + 5], count = 0;
    agent_fence_fd = launch.fence;
    agent_upper_fd = agent_layers > 0 ? openat(launch.scratch, "up", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    int *others[] = {&agent_fence_fd, &agent_upper_fd, &agent_egress_fd, &agent_dns_fd, &agent_dns_tcp_fd};
    for (int i = 0; i < launch.plan.works; i++) kept[count++] = &work_fd[i];
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (*others[i] >= 0) kept[count++] = others[i];
    for (int i = 0; i < count; i++) /* sources may lie where others go: first all of them out of the way */
        if ((*kept[i] = fcntl(*kept[i], F_DUPFD_CLOEXEC, FD_PLAN + MAX_CGROUPS + 5)) < 0) return -1;
    for (int i = 0; i < count; i++)
        if ((*kept[i] = dup3(*kept[i], FD_PLAN + i, O_CLOEXEC)) < 0) return -1;
    agent_work_fd = FD_PLAN;
    agent_work_fds = launch.plan.works;
    return (int)syscall(NR_close_range, FD_PLAN + count, ~0u, 0);
}

/* Of all descriptors beyond the wire a minder keeps its control socket. */
static int mind(void) {
    if (dup3(FD_CONTROL, FD_PLAN, O_CLOEXEC) < 0) return END_AGENT_FAILED;
    if (syscall(NR_close_range, FD_PLAN + 1, ~0u, 0) < 0) return END_AGENT_FAILED;
    return minder_main(FD_PLAN);
}

static int sandbox(void) {
    struct plan *plan = &launch.plan;
    fail_fd = launch.sync;
    close(launch.pidfd);
    die_with_supervisor();
    join_cgroups();
    if (plan->flags & PLAN_NAMESPACES) {
        enter_namespaces();
        wait_for_maps();
        if (!(plan->flags & PLAN_HOST_MOUNTS)) callers_trees(&launch); /* with his own rights */
        become_inside(plan);
        die_with_supervisor(); /* a change of uid clears it */
    }
    receive_slots();
    launch.ruleset = landlock_begin(plan);
    if (!(plan->flags & PLAN_NAMESPACES)) launch.fence = landlock_fence(plan);
    run_steps(&launch);
    struct statfs scratch;
    agent_scratch_in_memory = launch.scratch >= 0 && fstatfs(launch.scratch, &scratch) == 0 && scratch.f_type == TMPFS_;
    if (launch.scratch >= 0 && agent_layers < 0) agent_layers = 0; /* all of its root is its own, and no overlay */
    agent_own_ipc = (plan->flags & PLAN_NAMESPACES) != 0;
    set_limits(plan);
    drop_privileges(plan);
    die_with_supervisor();
    int nowhere = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (nowhere < 0 || dup2(nowhere, FD_STATUS) < 0) fail("start", "/dev/null", errno, "");
    landlock_enforce(launch.ruleset);
    seccomp_install(plan->seccomp);
    if (plan->flags & PLAN_PROBE) {
        report_ready();
        return 0;
    }
    report_ready();
    munmap((void *)(uintptr_t)plan->base, plan->size);
    if (plan->flags & PLAN_MINDER) return mind();
    if (!(plan->flags & PLAN_NAMESPACES)) agent_fence = fence_command;
    agent_powers = plan->flags & PLAN_POWERS;
    agent_no_setid = plan->flags & PLAN_NO_SETID;
    agent_no_leases = plan->flags & PLAN_NO_LEASES;
    if (keep_for_agent() < 0) return END_AGENT_FAILED;
    return agent_main(FD_WIRE_IN, FD_WIRE_OUT);
}

static int clone_child(void) {
    struct clone_args_ args = {.flags = CLONE_PIDFD_, .pidfd = (uint64_t)(uintptr_t)&launch.pidfd, .exit_signal = SIGCHLD};
    if (launch.plan.flags & PLAN_NAMESPACES) args.flags |= CLONE_NEWUSER | CLONE_NEWPID;
    if (launch.plan.into) {
        int into = open(launch.plan.into, O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (into < 0) fail("cgroup", launch.plan.into, errno, "");
        args.flags |= CLONE_INTO_CGROUP_;
        args.cgroup = (uint64_t)into;
    }
    long pid = syscall(NR_clone3, &args, sizeof args);
    if (pid < 0)
        fail("namespaces", launch.plan.into ? "clone into the cgroup" : "clone", errno,
             "user namespaces are off for this user, or used up (sysctl user.max_user_namespaces)");
    return (int)pid;
}

/* The first process of the sandbox says one byte, or why it could not start. Returns whether it did. */
static int await_ready(int child) {
    char line[1024];
    ssize_t size;
    while ((size = recv(launch.sync, line, sizeof line, 0)) < 0 && errno == EINTR) {}
    if (size == 1) return 1;
    int status = 0;
    waitpid(child, &status, 0);
    if (size <= 0) size = snprintf(line, sizeof line, "start: the sandbox's first process died: status %d\n", status);
    if (write(FD_STATUS, line, (size_t)size) < 0) { /* nobody listens */ }
    return 0;
}

static void open_groups(const char *const *paths, int count, int *fds) {
    for (int i = 0; i < count; i++) {
        fds[i] = open(paths[i], O_WRONLY | O_CLOEXEC);
        if (fds[i] < 0) fail("cgroup", paths[i], errno, "");
    }
}

static int open_holder(const struct plan *plan) {
    int holder = (int)syscall(NR_pidfd_open, (int)plan->holder, 0);
    if (holder < 0 || getppid() != (int)plan->holder) fail("start", "the holder is gone", ESRCH, "");
    return holder;
}

static int open_userns(int child) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/user", child);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("userns", path, errno, "");
    return fd;
}

/* What the library cannot ask the kernel itself. */
static int facts(void) {
    long abi = syscall(NR_landlock_create_ruleset, NULL, 0, 1u /* LANDLOCK_CREATE_RULESET_VERSION */);
    dprintf(STDOUT_FILENO, "landlock %ld\n", abi > 0 ? abi : 0);
    return 0;
}

int launch_main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "facts")) return facts();
    struct plan *plan = &launch.plan;
    int pair[2];
    reset_signals();
    setsid(); /* fails where the spawner has done it */
    prctl(PR_SET_NAME, "sloplet-super", 0, 0, 0); /* run from a descriptor, our name would be its number */
    umask(022);
    plan_load(plan, FD_PLAN);
    close(FD_PLAN);
    if (!(plan->flags & PLAN_MINDER)) close(FD_CONTROL);
    syscall(NR_close_range, FD_FIRST_FREE + (unsigned)plan->given, ~0u, 0);
    for (unsigned i = 0; i < plan->given; i++) fcntl(FD_FIRST_FREE + (int)i, F_SETFD, FD_CLOEXEC);
    for (int i = 0; i < MAX_SLOTS; i++) launch.slot[i] = -1;
    launch.userns = launch.scratch = launch.root = launch.ruleset = launch.fence = launch.shutdown = launch.pidfd = -1;
    int holder = open_holder(plan);
    if (!(plan->flags & PLAN_NAMESPACES)) prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    open_groups(plan->join, plan->joins, join_fd);
    open_groups(plan->work, plan->works, work_fd);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) fail("start", "socketpair", errno, "");
    int child = clone_child();
    if (child == 0) {
        close(pair[0]);
        close(holder);
        launch.sync = pair[1];
        return sandbox();
    }
    close(pair[1]);
    if (plan->flags & PLAN_MINDER) close(FD_CONTROL);
    launch.sync = pair[0];
    for (int i = 0; i < plan->joins; i++) close(join_fd[i]);
    for (int i = 0; i < plan->works; i++) close(work_fd[i]);
    if (plan->flags & PLAN_NAMESPACES) {
        write_id_maps(plan, child);
        send(launch.sync, "", 1, MSG_NOSIGNAL);
        if (plan->flags & PLAN_HOST_MOUNTS) {
            launch.userns = open_userns(child);
            host_mounts(&launch);
            close(launch.userns);
        }
    }
    send_slots();
    if (!await_ready(child)) {
        remove_cgroups(plan);
        return END_START_FAILED;
    }
    hold_signals(); /* before "ok": from then on the holder may ask for the end, and that must not kill us unreaped */
    close(launch.sync);
    char line[32];
    int size = snprintf(line, sizeof line, "ok %d\n", child);
    int started = write(FD_STATUS, line, (size_t)size) == size;
    close(FD_STATUS);
    close(FD_WIRE_OUT);
    (void)started; /* a holder that no longer listens closes the wire too */
    plan_forget(plan);
    return supervise(&launch, holder);
}
