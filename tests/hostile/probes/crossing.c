/* Looks for ways out of a sandbox to other processes. crossing VERB ARGUMENTS: lines "WAY ERRNO", 0: it worked. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <pty.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static void say(const char *way, long result) { printf("%s %d\n", way, result < 0 ? errno : 0); }

static void abstract(const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    strncpy(address.sun_path + 1, name, sizeof address.sun_path - 2);
    say("abstract", fd < 0 ? -1 : connect(fd, (void *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name))));
    fd = socket(AF_UNIX, SOCK_DGRAM, 0);
    say("abstract-dgram", fd < 0 ? -1 : sendto(fd, "x", 1, 0, (void *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name))));
}

static void path_socket(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    say("path", fd < 0 ? -1 : connect(fd, (void *)&address, sizeof address));
}

static void process(int pid) {
    char word[8] = {0}, path[64];
    struct iovec mine = {word, 1}, theirs = {(void *)0x400000, 1};
    struct rlimit limit;
    say("signal-0", kill(pid, 0));
    say("signal-cont", kill(pid, SIGCONT));
    say("sigqueue", sigqueue(pid, SIGCONT, (union sigval){.sival_int = 1}));
    say("tgkill", syscall(SYS_tgkill, pid, pid, SIGCONT));
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    say("pidfd-signal", pidfd < 0 ? -1 : syscall(SYS_pidfd_send_signal, pidfd, SIGCONT, NULL, 0));
    say("pidfd-getfd", pidfd < 0 ? -1 : syscall(SYS_pidfd_getfd, pidfd, 0, 0));
    say("ptrace-attach", ptrace(PTRACE_SEIZE, pid, 0, 0));
    say("vm-read", process_vm_readv(pid, &mine, 1, &theirs, 1, 0));
    say("prlimit", syscall(SYS_prlimit64, pid, RLIMIT_NOFILE, NULL, &limit));
    say("setpriority", setpriority(PRIO_PROCESS, (id_t)pid, 19));
    say("setpriority-user", setpriority(PRIO_USER, geteuid() == 1000 ? 0 : geteuid(), 19) == 0 && getpriority(PRIO_PROCESS, (id_t)pid) == 19 ? 0 : (errno = EPERM, -1));
    say("ioprio", syscall(SYS_ioprio_set, 1, pid, 3 << 13));
    long cpus = 1;
    say("affinity", syscall(SYS_sched_setaffinity, pid, sizeof cpus, &cpus));
    say("kcmp", syscall(SYS_kcmp, getpid(), pid, 0, 0, 0));
    static const char *files[] = {"mem", "environ", "maps", "cmdline", "root", "cwd", "fd", "exe", "ns/mnt", "status", "stat", "auxv", "stack", "syscall", "oom_score_adj"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", pid, files[i]);
        char way[64];
        snprintf(way, sizeof way, "proc-%s", files[i]);
        say(way, open(path, O_RDONLY | O_NONBLOCK));
    }
    snprintf(path, sizeof path, "/proc/%d/oom_score_adj", pid);
    say("proc-write-oom", open(path, O_WRONLY));
    snprintf(path, sizeof path, "/proc/%d/mem", pid);
    say("proc-write-mem", open(path, O_RDWR));
}

static void ipc(const char *verb, int key) {
    int make = !strcmp(verb, "make") ? IPC_CREAT | 0666 : 0;
    int shm = shmget(key, 4096, make), sem = semget(key, 1, make), queue = msgget(key, make);
    say("shm", shm);
    say("sem", sem);
    say("msg", queue);
    char name[64];
    snprintf(name, sizeof name, "/sloplet-%d", key);
    say("mq", mq_open(name, O_RDWR | (make ? O_CREAT : 0), 0666, NULL));
    int fd = shm_open(name, O_RDWR | (make ? O_CREAT : 0), 0666);
    say("posix-shm", fd);
    if (!strcmp(verb, "remove")) {
        shmctl(shm, IPC_RMID, NULL);
        semctl(sem, 0, IPC_RMID);
        msgctl(queue, IPC_RMID, NULL);
        mq_unlink(name);
        shm_unlink(name);
    }
}

static void keyring(const char *verb) {
    if (!strcmp(verb, "make")) say("add", syscall(SYS_add_key, "user", "sloplet-canary", "secret", 6, -4 /* user keyring */));
    else if (!strcmp(verb, "remove")) say("unlink", syscall(SYS_keyctl, 9, syscall(SYS_keyctl, 10, -4, "user", "sloplet-canary", 0), -4));
    else say("search", syscall(SYS_keyctl, 10, -4, "user", "sloplet-canary", 0));
}

static void terminal(void) {
    char letter = 'x', paste[8] = {2};
    for (int fd = 0; fd < 3; fd++) {
        char way[32];
        snprintf(way, sizeof way, "sti-%d", fd);
        say(way, ioctl(fd, TIOCSTI, &letter));
        snprintf(way, sizeof way, "linux-%d", fd);
        say(way, ioctl(fd, TIOCLINUX, paste));
        snprintf(way, sizeof way, "sti-high-%d", fd);
        say(way, syscall(SYS_ioctl, fd, TIOCSTI | (1L << 32), &letter));
    }
    int tty = open("/dev/tty", O_RDWR | O_NOCTTY);
    say("tty-open", tty);
    say("tty-sti", ioctl(tty, TIOCSTI, &letter));
    setsid();
    for (int i = 0; i < 64; i++) {
        char path[32];
        snprintf(path, sizeof path, "/dev/pts/%d", i);
        int fd = open(path, O_RDWR | O_NOCTTY);
        if (fd < 0) continue;
        printf("pts-%d %d\n", i, ioctl(fd, TIOCSTI, &letter) < 0 ? errno : 0);
        ioctl(fd, TIOCSCTTY, 1);
        close(fd);
    }
    for (int i = 0; i < 8; i++) {
        char path[32];
        snprintf(path, sizeof path, "/dev/tty%d", i);
        int fd = open(path, O_RDWR | O_NOCTTY);
        if (fd >= 0) printf("console-%d 0\n", i);
    }
}

/* A terminal of one's own: shows that the kernel would let TIOCSTI through. */
static void own_terminal(void) {
    int status;
    pid_t child = forkpty(&status, NULL, NULL, NULL);
    char letter = 'x';
    if (child == 0) _exit(ioctl(0, TIOCSTI, &letter) < 0 ? errno : 0);
    waitpid(child, &status, 0);
    printf("own-sti %d\n", WEXITSTATUS(status));
}

int main(int argc, char **argv) {
    const char *verb = argc > 1 ? argv[1] : "", *what = argc > 2 ? argv[2] : "";
    if (!strcmp(verb, "abstract")) abstract(what);
    else if (!strcmp(verb, "path")) path_socket(what);
    else if (!strcmp(verb, "process")) process(atoi(what));
    else if (!strcmp(verb, "ipc")) ipc(what, atoi(argv[3]));
    else if (!strcmp(verb, "keyring")) keyring(what);
    else if (!strcmp(verb, "terminal")) terminal();
    else if (!strcmp(verb, "own-terminal")) own_terminal();
    else return 2;
    return 0;
}
