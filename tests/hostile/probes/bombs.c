/* Uses up what there is of something. bombs KIND [FOLDER]. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sendfile.h>
#include <unistd.h>

static void *idle(void *unused) {
    (void)unused;
    for (;;) pause();
    return NULL;
}

static void memory(void) {
    for (;;) {
        char *more = mmap(NULL, 16 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (more == MAP_FAILED) {
            puts("refused");
            exit(3);
        }
        memset(more, 1, 16 << 20);
    }
}

static void shared(int fd) {
    static char block[1 << 20];
    memset(block, 1, sizeof block);
    long total = 0;
    while (total < 8192) {
        ssize_t done = write(fd, block, sizeof block);
        if (done < 0) break;
        total += done >> 20;
    }
    printf("stopped %d after %ld\n", errno, total);
    exit(3);
}

static void inodes(const char *folder) {
    char path[4200];
    long count = 0;
    for (; count < 3000000; count++) {
        snprintf(path, sizeof path, "%s/f%ld", folder, count);
        int fd = open(path, O_CREAT | O_WRONLY, 0600);
        if (fd < 0) break;
        close(fd);
    }
    printf("stopped %d after %ld\n", errno, count);
}

static void deep(const char *folder) {
    long depth = 0;
    if (chdir(folder) < 0) exit(2);
    while (depth < 5000 && mkdir("deeper-than-anybody-would-go", 0700) == 0 && chdir("deeper-than-anybody-would-go") == 0) depth++;
    printf("stopped %d after %ld\n", errno, depth);
}

int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "", *folder = argc > 2 ? argv[2] : ".";
    char path[4200];
#define KIND(name) if (!strcmp(kind, name))
    KIND("fork") for (;;) fork();
    KIND("vfork") for (;;) if (fork() == 0) setsid();
    KIND("threads") {
        pthread_attr_t small;
        pthread_t thread;
        long count = 0;
        pthread_attr_init(&small);
        pthread_attr_setstacksize(&small, 32768);
        while (count < 200000 && pthread_create(&thread, &small, idle, NULL) == 0) count++;
        printf("stopped after %ld\n", count);
        fflush(stdout);
        idle(NULL);
    }
    KIND("zombies") {
        long count = 0;
        for (pid_t pid; count < 100000 && (pid = fork()) >= 0; count++) if (pid == 0) _exit(0);
        printf("stopped after %ld\n", count);
        fflush(stdout);
        idle(NULL);
    }
    KIND("stopped") {
        for (int i = 0; i < 20; i++) if (fork() == 0) raise(SIGSTOP);
        raise(SIGSTOP);
    }
    KIND("daemons") {
        for (int i = 0; i < 20; i++)
            if (fork() == 0) {
                setsid();
                if (fork() == 0) {
                    setsid();
                    prctl(PR_SET_NAME, "hostile-daemon");
                    idle(NULL);
                }
                _exit(0);
            }
        puts("started");
        fflush(stdout);
        idle(NULL);
    }
    KIND("deaf") {
        for (int number = 1; number < 65; number++) signal(number, SIG_IGN);
        for (int i = 0; i < 8; i++) fork();
        idle(NULL);
    }
    KIND("respawn") for (;;) { /* the parent is gone before anybody has seen the child */
        if (fork() > 0) _exit(0);
        setsid();
    }
    KIND("wedge") { /* a locked pipe: the kernel keeps the reader of our output waiting, also when it is killed */
        int terminal = open("/dev/ptmx", O_RDWR | O_NOCTTY);
        if (terminal < 0) terminal = posix_openpt(O_RDWR | O_NOCTTY);
        for (;;) {
            if (write(1, "x", 1) < 0) return 1;
            sendfile(1, terminal, NULL, 100);
        }
    }
    KIND("memory") memory();
    KIND("memory-children") for (;;) if (fork() == 0) memory();
    KIND("memfd") shared(memfd_create("bomb", 0));
    KIND("file") {
        snprintf(path, sizeof path, "%s/bomb", folder);
        shared(open(path, O_CREAT | O_WRONLY, 0600));
    }
    KIND("files") for (int i = 0; i < 1000; i++) {
        snprintf(path, sizeof path, "%s/bomb%d", folder, i);
        int fd = open(path, O_CREAT | O_WRONLY, 0600);
        static char block[8 << 20];
        memset(block, 1, sizeof block);
        ssize_t done = 1;
        for (size_t at = 0; fd >= 0 && done > 0 && at < sizeof block; at += (size_t)done) done = write(fd, block + at, sizeof block - at);
        if (fd < 0 || done < 0) {
            printf("stopped %d after %d\n", errno, i * 8);
            return 3;
        }
        close(fd);
    }
    KIND("sparse") {
        snprintf(path, sizeof path, "%s/sparse", folder);
        int fd = open(path, O_CREAT | O_WRONLY, 0600);
        printf("truncate %d\n", ftruncate(fd, 1L << 50) < 0 ? errno : 0);
        printf("fallocate %d\n", fallocate(fd, 0, 0, 1L << 45) < 0 ? errno : 0);
        printf("write %d\n", pwrite(fd, "x", 1, 1L << 44) < 0 ? errno : 0);
    }
    KIND("inodes") inodes(folder);
    KIND("deep") deep(folder);
    KIND("spin") {
        setpriority(PRIO_PROCESS, 0, -20);
        for (int i = 0; i < 3; i++) fork();
        for (;;) {}
    }
    KIND("realtime") {
        struct sched_param highest = {.sched_priority = 99};
        printf("fifo %d\n", sched_setscheduler(0, SCHED_FIFO, &highest) < 0 ? errno : 0);
        printf("rr %d\n", sched_setscheduler(0, SCHED_RR, &highest) < 0 ? errno : 0);
        printf("nice %d\n", setpriority(PRIO_PROCESS, 0, -20) < 0 ? errno : 0);
    }
    return 0;
}
