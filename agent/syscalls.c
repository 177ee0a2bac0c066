/* The list of system calls a sandbox may make. Everything a Linux program of today needs is named here; what is not
 * named does not exist for it. REFUSED names what does exist but must not work: it fails with EPERM rather than
 * ENOSYS, as it would for a program without privileges. */
#define _GNU_SOURCE
#include "launch.h"
#include "seccomp.h"

#include <stddef.h>
#include <sys/syscall.h>

#define N(name) SYS_##name

/* numbers from 424 on are the same on every architecture, and some libcs do not name them yet */
static const uint16_t allowed[] = {
    N(accept), N(accept4), N(bind), N(brk), N(capget), N(capset), N(chdir), N(chroot), N(clock_getres),
    N(clock_gettime), N(clock_nanosleep), N(close), N(connect), N(copy_file_range), N(dup), N(dup3), N(epoll_create1),
    N(epoll_ctl), N(epoll_pwait), N(eventfd2), N(execve), N(execveat), N(exit), N(exit_group), N(faccessat),
    N(fadvise64), N(fallocate), N(fchdir), N(fchmod), N(fchmodat), N(fchown), N(fchownat), N(fcntl), N(fdatasync),
    N(fgetxattr), N(flistxattr), N(flock), N(fremovexattr), N(fsetxattr), N(fstat), N(fstatfs), N(fsync), N(ftruncate),
    N(futex), N(getcpu), N(getcwd), N(getdents64), N(getegid), N(geteuid), N(getgid), N(getgroups), N(getitimer),
    N(getpeername), N(getpgid), N(getpid), N(getppid), N(getpriority), N(getrandom), N(getresgid), N(getresuid),
    N(getrlimit), N(get_robust_list), N(getrusage), N(getsid), N(getsockname), N(getsockopt), N(gettid),
    N(gettimeofday), N(getuid), N(getxattr), N(get_mempolicy), N(inotify_add_watch), N(inotify_init1),
    N(inotify_rm_watch), N(io_cancel), N(io_destroy), N(io_getevents), N(io_setup), N(io_submit), N(ioprio_get),
    N(ioprio_set), N(kill), N(lgetxattr), N(linkat), N(listen), N(listxattr), N(llistxattr), N(lremovexattr),
    N(lseek), N(lsetxattr), N(madvise), N(mbind), N(membarrier), N(memfd_create), N(mincore), N(mkdirat), N(mlock),
    N(mlock2), N(mlockall), N(mmap), N(mprotect), N(mremap), N(msync), N(munlock), N(munlockall), N(munmap),
    N(nanosleep), N(openat), N(pipe2), N(pkey_alloc), N(pkey_free), N(pkey_mprotect), N(ppoll), N(pread64), N(preadv),
    N(preadv2), N(pselect6), N(pwrite64), N(pwritev), N(pwritev2), N(read), N(readahead), N(readlinkat),
    N(readv), N(recvfrom), N(recvmmsg), N(recvmsg), N(removexattr), N(renameat), N(renameat2), N(restart_syscall),
    N(rt_sigaction), N(rt_sigpending), N(rt_sigprocmask), N(rt_sigqueueinfo), N(rt_sigreturn), N(rt_sigsuspend),
    N(rt_sigtimedwait), N(rt_tgsigqueueinfo), N(sched_get_priority_max), N(sched_get_priority_min),
    N(sched_getaffinity), N(sched_getattr), N(sched_getparam), N(sched_getscheduler), N(sched_rr_get_interval),
    N(sched_yield), N(seccomp), N(sendfile), N(sendmmsg),
    N(sendmsg), N(sendto), N(setfsgid), N(setfsuid), N(setgid), N(setgroups), N(setitimer), N(setpgid), N(setpriority),
    N(setregid), N(setresgid), N(setresuid), N(setreuid), N(setrlimit), N(set_mempolicy), N(set_robust_list),
    N(setsid), N(setsockopt), N(set_tid_address), N(setuid), N(setxattr), N(shutdown), N(sigaltstack), N(signalfd4),
    N(splice), N(statfs), N(statx), N(symlinkat), N(sync), N(sync_file_range), N(syncfs), N(sysinfo), N(tee),
    N(tgkill), N(timer_create), N(timer_delete), N(timer_getoverrun), N(timer_gettime), N(timer_settime),
    N(timerfd_create), N(timerfd_gettime), N(timerfd_settime), N(times), N(tkill), N(truncate), N(umask), N(uname),
    N(unlinkat), N(utimensat), N(wait4), N(waitid), N(write), N(writev),
#ifdef SYS_newfstatat
    N(newfstatat),
#endif
#ifdef SYS_rseq
    N(rseq),
#endif
#ifdef __x86_64__
    N(access), N(alarm), N(arch_prctl), N(chmod), N(chown), N(creat), N(dup2), N(epoll_create), N(epoll_wait),
    N(eventfd), N(fork), N(futimesat), N(getdents), N(getpgrp), N(inotify_init), N(lchown), N(link), N(lstat),
    N(mkdir), N(open), N(pause), N(pipe), N(poll), N(readlink), N(rename), N(rmdir), N(select), N(signalfd), N(stat),
    N(symlink), N(time), N(unlink), N(utime), N(utimes), N(vfork),
    334, 335, 336, /* rseq, uretprobe, uprobe: the last two are the kernel's own trampolines */
#endif
    424 /* pidfd_send_signal */, 434 /* pidfd_open */, 436 /* close_range */, 437 /* openat2 */, 439 /* faccessat2 */,
    441 /* epoll_pwait2 */, 444, 445, 446 /* landlock_* */, 449 /* futex_waitv */, 450 /* set_mempolicy_home_node */,
    451 /* cachestat */, 452 /* fchmodat2 */, 453 /* map_shadow_stack */, 454, 455, 456 /* futex_* */, 462 /* mseal */,
};

/* Across namespaces harmless; on the process rung they would reach the host's objects. */
static const uint16_t ipc[] = {
    N(msgctl), N(msgget), N(msgrcv), N(msgsnd), N(semctl), N(semget), N(semop), N(semtimedop), N(shmat), N(shmctl),
    N(shmdt), N(shmget), N(mq_getsetattr), N(mq_notify), N(mq_open), N(mq_timedreceive), N(mq_timedsend), N(mq_unlink),
};

/* They name another process; on the process rung the caller's own others are within reach. */
static const uint16_t of_pid[] = {
    N(prlimit64), N(sched_setattr), N(sched_setparam), N(sched_setscheduler), N(sched_setaffinity),
};

/* Landlock lets these through on any path. (Of an open file the agent may, for its file calls; commands may not.) */
static const uint16_t metadata[] = {
    N(fchmodat), N(fchownat), N(lremovexattr), N(lsetxattr), N(removexattr), N(setxattr), N(truncate), 452 /* fchmodat2 */,
#ifdef __x86_64__
    N(chmod), N(chown), N(futimesat), N(lchown), N(utime), N(utimes),
#endif
};

static const uint16_t tracing[] = {N(ptrace), N(process_vm_readv), N(process_vm_writev)};

static const uint16_t refused[] = {
    N(acct), N(add_key), N(adjtimex), N(bpf), N(clock_adjtime), N(clock_settime), N(delete_module), N(fanotify_init),
    N(fanotify_mark), N(finit_module), N(init_module), N(kcmp), N(kexec_file_load), N(kexec_load), N(keyctl),
    N(lookup_dcookie), N(migrate_pages), N(mount), N(move_pages), N(name_to_handle_at), N(nfsservctl),
    N(open_by_handle_at), N(perf_event_open), N(pivot_root), N(quotactl), N(reboot), N(remap_file_pages),
    N(request_key), N(setdomainname), N(sethostname), N(setns), N(settimeofday), N(swapoff), N(swapon), N(syslog),
    N(umount2), N(userfaultfd), N(vhangup), N(vmsplice),
#ifdef __x86_64__
    N(_sysctl), N(create_module), N(get_kernel_syms), N(ioperm), N(iopl), N(modify_ldt), N(query_module), N(sysfs),
    N(uselib), N(ustat),
#endif
    425, 426, 427 /* io_uring_* */, 428 /* open_tree */, 429 /* move_mount */, 430, 431, 432, 433 /* fsopen .. fspick */,
    438 /* pidfd_getfd */, 440 /* process_madvise */, 442 /* mount_setattr */, 443 /* quotactl_fd */,
    447 /* memfd_secret */, 448 /* process_mrelease */, 467 /* open_tree_attr */,
};

static void mark(uint8_t *table, const uint16_t *numbers, size_t count, enum verdict verdict) {
    for (size_t i = 0; i < count; i++) table[numbers[i]] = (uint8_t)verdict;
}

#define MARK(table, list, verdict) mark(table, list, sizeof list / sizeof *list, verdict)

void seccomp_verdicts(uint8_t table[SYSCALL_COUNT], uint64_t bits) {
    MARK(table, allowed, VERDICT_ALLOW);
    MARK(table, refused, VERDICT_REFUSE);
    int bare = (bits & SECCOMP_BARE) != 0;
    MARK(table, tracing, bare ? VERDICT_REFUSE : VERDICT_ALLOW);
    MARK(table, ipc, bare ? VERDICT_REFUSE : VERDICT_ALLOW);
    MARK(table, of_pid, bare ? VERDICT_ONLY_SELF : VERDICT_ALLOW);
    if (bits & SECCOMP_NO_AFFINITY) table[SYS_sched_setaffinity] = VERDICT_REFUSE;
    if (bits & SECCOMP_NO_METADATA) {
        MARK(table, metadata, VERDICT_REFUSE);
        table[SYS_utimensat] = VERDICT_UTIMENSAT;
    }
    if (bare) {
        table[SYS_setpriority] = VERDICT_PRIORITY;
        table[SYS_ioprio_set] = VERDICT_IOPRIO;
    }
    table[SYS_socket] = bare ? VERDICT_NO_SOCKET : VERDICT_SOCKET;
    table[SYS_socketpair] = VERDICT_SOCKETPAIR;
    table[SYS_clone] = VERDICT_CLONE;
    table[SYS_unshare] = VERDICT_UNSHARE;
    table[SYS_ioctl] = bits & SECCOMP_NO_METADATA ? VERDICT_IOCTL_NO_METADATA : VERDICT_IOCTL;
    if (bits & SECCOMP_NO_METADATA) table[SYS_fcntl] = VERDICT_FCNTL_NO_METADATA;
    table[SYS_personality] = VERDICT_PERSONALITY;
    table[SYS_prctl] = VERDICT_PRCTL;
    table[SYS_mknodat] = VERDICT_MKNODAT;
#ifdef SYS_mknod
    table[SYS_mknod] = VERDICT_MKNOD;
#endif
}
