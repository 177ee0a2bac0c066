/* The supervisor: what stays of the launcher beside the sandbox. It ends the sandbox when its holder dies, lets go
 * of it or asks for it, waits until every process is gone, and clears away what the sandbox left. */
#define _GNU_SOURCE
#include "launch.h"
#include "linuxapi.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

/* The wire's end tells the agent to end; one that has not by then is killed. */
#define GRACE_MS 2000
/* A killed one that is not gone by then is held up by others. */
#define STUCK_MS 50
#define REMOVE_TRIES 400
#define MUCH (32u << 20)

static void pause_ms(int ms) { poll(NULL, 0, ms); }

static void kill_child(const struct launch *launch) { syscall(NR_pidfd_send_signal, launch->pidfd, SIGKILL, NULL, 0); }

/* How deep a tree is walked at once. What lies deeper comes up when those above it are dead: callers go on until
 * nothing is left. */
#define DEEPEST 24

static int signal_below(int pid, int number, int depth);

/* The children that one thread has made: "pid pid ...". */
static int signal_children(int pid, const char *thread, int number, int depth) {
    char path[64], text[512];
    int count = 0, child = 0;
    snprintf(path, sizeof path, "/proc/%d/task/%.16s/children", pid, thread);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    for (ssize_t size; (size = read(fd, text, sizeof text)) > 0;) {
        for (ssize_t at = 0; at < size; at++) {
            if (text[at] >= '0' && text[at] <= '9') {
                child = child * 10 + (text[at] - '0');
            } else if (child) {
                count += signal_below(child, number, depth + 1);
                count += kill(child, number) == 0;
                child = 0;
            }
        }
    }
    close(fd);
    return count;
}

/* All that descends from pid, without looking at any other process: hundreds of sandboxes may end at once. */
static int signal_below(int pid, int number, int depth) {
    char path[32], buffer[512] __attribute__((aligned(8)));
    int count = 0;
    if (depth > DEEPEST) return 0;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    int tasks = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (tasks < 0) return 0;
    for (long size; (size = syscall(SYS_getdents64, tasks, buffer, sizeof buffer)) > 0;) {
        for (long at = 0; at < size;) {
            struct dirent64_ *entry = (struct dirent64_ *)(void *)(buffer + at);
            at += entry->reclen;
            if (entry->name[0] != '.') count += signal_children(pid, entry->name, number, depth);
        }
    }
    close(tasks);
    return count;
}

static int signal_descendants(int number) { return signal_below(getpid(), number, 0); }

/* Wait for the child; 1 if we ended it, 0 if it ended by itself. */
static int watch(struct launch *launch, int holder, int signals) {
    int timeout = -1, stopped = 0;
    struct pollfd fds[] = {
        {launch->pidfd, POLLIN, 0},
        {holder, POLLIN, 0},
        {signals, POLLIN, 0},
        {FD_WIRE_IN, 0, 0}, /* POLLHUP only: the holder closed its end */
    };
    for (;;) {
        int ready = poll(fds, 4, timeout);
        if (ready < 0 && errno == EINTR) continue;
        if (fds[0].revents) return stopped;
        if (stopped) {
            /* Its first process cannot end: it closes a pipe that another one keeps locked (sendfile from a terminal
             * does), and the kernel ends the others only after it. So each by itself. (Or the host is busy: ever less often.) */
            signal_descendants(SIGKILL);
            timeout = timeout < GRACE_MS ? timeout * 2 : timeout;
        } else if (ready == 0 || fds[1].revents || fds[2].revents) {
            kill_child(launch);
            stopped = 1;
            timeout = STUCK_MS;
            fds[1].fd = fds[2].fd = fds[3].fd = -1;
        } else if (fds[3].revents) {
            fds[3].fd = -1;
            timeout = GRACE_MS;
        }
    }
}

/* Without a pid namespace the sandbox's processes outlive its first one. Orphans come to us (subreaper). */
static void end_orphans(const struct plan *plan) {
    if (plan->has_drop) { /* the sandbox has a uid of its own: the kernel ends all of that uid at one stroke */
        int killer = fork();
        if (killer == 0) {
            if (setgroups(0, NULL) == 0 && setresgid(plan->drop_gid, plan->drop_gid, plan->drop_gid) == 0 &&
                setresuid(plan->drop_uid, plan->drop_uid, plan->drop_uid) == 0)
                kill(-1, SIGKILL);
            _exit(0);
        }
    } else {
        /* stop all first, so that a fork bomb cannot outrun the kill */
        for (int pass = 0; pass < 3; pass++) signal_descendants(SIGSTOP);
    }
    for (int pass = 0; pass < 1000; pass++) {
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
        if (waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD) return;
        signal_descendants(SIGKILL);
        pause_ms(1);
    }
}

static int counted(const char *file, const char *word) {
    char text[512];
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0) return 0;
    text[size] = 0;
    size_t key = strlen(word);
    for (char *line = text; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
        if (!strncmp(line, word, key) && line[key] == ' ') return atoi(line + key + 1);
    return 0;
}

static int oom_kills(const struct plan *plan) {
    int sum = 0;
    for (int i = 0; i < plan->oom_files; i++) sum += counted(plan->oom_file[i], plan->oom_key[i]);
    return sum;
}

void remove_cgroups(const struct plan *plan) {
    for (int i = 0; i < plan->removes; i++)
        for (int tries = 0; tries < REMOVE_TRIES && rmdir(plan->remove[i]) < 0 && errno == EBUSY; tries++) pause_ms(1);
}

/* What was written dies here. Much of it: spare the host the flush (the kernel logs a line for that, so not always). */
static void discard_scratch(int folder) {
    struct statvfs usage;
    uint32_t how = FS_SHUTDOWN_NOLOGFLUSH_;
    if (folder < 0) return;
    if (fstatvfs(folder, &usage) == 0 && (usage.f_blocks - usage.f_bfree) * usage.f_frsize > MUCH) ioctl(folder, FS_IOC_SHUTDOWN_, &how);
    close(folder);
}

static sigset_t requests(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    return set;
}

/* Keep requests to end until supervise() reads them. */
void hold_signals(void) {
    sigset_t set = requests();
    sigprocmask(SIG_BLOCK, &set, NULL);
}

int supervise(struct launch *launch, int holder) {
    const struct plan *plan = &launch->plan;
    sigset_t set = requests();
    int signals = signalfd(-1, &set, SFD_CLOEXEC);
    int stopped = watch(launch, holder, signals);
    siginfo_t info;
    memset(&info, 0, sizeof info);
    while (waitid(P_PIDFD_, (id_t)launch->pidfd, &info, WEXITED) < 0 && errno == EINTR) {}
    if (!(plan->flags & PLAN_NAMESPACES)) end_orphans(plan);
    discard_scratch(launch->shutdown);
    int oom = oom_kills(plan) > 0 ? END_OOM : 0;
    remove_cgroups(plan);
    if (stopped) return END_STOPPED | oom;
    if (info.si_code == CLD_EXITED && plan->flags & PLAN_MINDER && info.si_status > 128) /* how it tells of the sandbox's end */
        return (END_SIGNAL + (info.si_status & 63)) | oom;
    if (info.si_code == CLD_EXITED) return (info.si_status ? END_AGENT_FAILED : END_CLEAN) | oom;
    return (END_SIGNAL + (info.si_status & 63)) | oom;
}
