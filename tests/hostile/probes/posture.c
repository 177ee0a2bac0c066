/* Says what a process inside sees of its own posture, as itself, in four threads, after a fork and after an exec.
 * "posture self": lines KEY VALUE. "posture hold": four threads and a forked and exec-ed child, then waits for ever. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static void self(void) {
    uint32_t header[2] = {0x20080522, 0}, data[6] = {0};
    uid_t r, e, s;
    syscall(SYS_capget, header, data);
    printf("cap_effective %08x%08x\n", data[3], data[0]);
    printf("cap_permitted %08x%08x\n", data[4], data[1]);
    printf("cap_inheritable %08x%08x\n", data[5], data[2]);
    int bounding = 0, ambient = 0;
    for (int cap = 0; cap < 64; cap++) {
        bounding += prctl(PR_CAPBSET_READ, cap, 0, 0, 0) == 1;
        ambient += prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, cap, 0, 0) == 1;
    }
    getresuid(&r, &e, &s);
    printf("bounding %d\nambient %d\n", bounding, ambient);
    printf("no_new_privs %d\n", prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
    printf("seccomp %d\n", prctl(PR_GET_SECCOMP, 0, 0, 0, 0));
    printf("securebits %d\n", prctl(PR_GET_SECUREBITS, 0, 0, 0, 0));
    printf("uid %u\neuid %u\nsuid %u\n", r, e, s);
    struct rlimit core;
    getrlimit(RLIMIT_CORE, &core);
    printf("core %lu\n", (unsigned long)core.rlim_max);
    printf("pid %d\n", getpid());
    int fds = 0;
    for (int fd = 0; fd < 4096; fd++) fds += dup2(fd, fd) == fd;
    printf("fds %d\n", fds);
}

static void *wait_for_ever(void *unused) {
    (void)unused;
    for (;;) pause();
    return NULL;
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "self")) {
        self();
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "hold")) {
        pthread_t thread[4];
        for (int i = 0; i < 4; i++) pthread_create(&thread[i], NULL, wait_for_ever, NULL);
        if (fork() == 0) execl(argv[0], argv[0], "wait", (char *)NULL);
        if (fork() == 0) wait_for_ever(NULL);
        puts("holding");
        fflush(stdout);
    }
    wait_for_ever(NULL);
    return 0;
}
