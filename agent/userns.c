/* Who the sandbox's users are outside: the id maps of its user namespace. */
#define _GNU_SOURCE
#include "launch.h"
#include "linuxapi.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static void put(int pid, const char *file, const char *text) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        fail("userns", path, errno, "this user may not map these ids; is another security module in the way?");
    close(fd);
}

/* newuidmap PID inside outside count ...: the setuid helper that knows /etc/subuid. */
static int spawn_helper(const char *program, int pid, const char *map) {
    static char words[512];
    char number[16];
    char *argv[64];
    int argc = 0;
    snprintf(number, sizeof number, "%d", pid);
    if (strlen(map) >= sizeof words) fail("userns", program, E2BIG, "");
    strcpy(words, map);
    argv[argc++] = (char *)(uintptr_t)program;
    argv[argc++] = number;
    for (char *word = strtok(words, " \n"); word && argc < 62; word = strtok(NULL, " \n")) argv[argc++] = word;
    argv[argc] = NULL;
    int child = fork();
    if (child < 0) fail("userns", "fork", errno, "");
    if (child == 0) {
        char *none[] = {NULL};
        execve(program, argv, none);
        _exit(127);
    }
    return child;
}

static void wait_helper(int child, const char *program) {
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (status != 0) fail("userns", program, EPERM, "the ranges in /etc/subuid and /etc/subgid do not allow it");
}

void write_id_maps(const struct plan *plan, int pid) {
    if (plan->newuidmap) {
        int users = spawn_helper(plan->newuidmap, pid, plan->uid_map);
        int groups = spawn_helper(plan->newgidmap, pid, plan->gid_map);
        wait_helper(users, plan->newuidmap);
        wait_helper(groups, plan->newgidmap);
        return;
    }
    if (plan->flags & PLAN_DENY_SETGROUPS) put(pid, "setgroups", "deny");
    put(pid, "uid_map", plan->uid_map);
    put(pid, "gid_map", plan->gid_map);
}

void become_inside(const struct plan *plan) {
    if (!(plan->flags & PLAN_DENY_SETGROUPS) && setgroups(0, NULL) < 0) fail("userns", "setgroups", errno, "");
    if (setresgid(plan->gid, plan->gid, plan->gid) < 0) fail("userns", "setresgid", errno, "");
    if (setresuid(plan->uid, plan->uid, plan->uid) < 0) fail("userns", "setresuid", errno, "");
}

int userns_with(const char *uid_map, const char *gid_map) {
    struct clone_args_ args = {.flags = CLONE_NEWUSER, .exit_signal = SIGCHLD};
    int parent = getpid(), pid = (int)syscall(NR_clone3, &args, sizeof args);
    if (pid < 0) fail("userns", "clone", errno, "");
    if (pid == 0) { /* it is there for its namespace alone */
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        while (getppid() == parent) pause();
        _exit(0);
    }
    char path[64];
    put(pid, "uid_map", uid_map);
    put(pid, "gid_map", gid_map);
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("userns", path, errno, "");
    kill(pid, SIGKILL);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
    return fd;
}
