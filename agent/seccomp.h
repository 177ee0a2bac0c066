/* What each system call number means to the filter: shared by its table and its compiler. */
#ifndef SLOPLET_SECCOMP_H
#define SLOPLET_SECCOMP_H

#include <stdint.h>

#define SYSCALL_COUNT 512

/* VERDICT_UNKNOWN is 0: a number nobody named fails with ENOSYS, so that programs fall back. From
 * VERDICT_SOCKET on, the arguments decide. */
enum verdict {
    VERDICT_UNKNOWN,
    VERDICT_ALLOW,
    VERDICT_REFUSE, /* EPERM */
    VERDICT_SOCKET,
    VERDICT_SOCKETPAIR,
    VERDICT_CLONE,
    VERDICT_UNSHARE,
    VERDICT_IOCTL,
    VERDICT_PERSONALITY,
    VERDICT_PRCTL,
    VERDICT_MKNOD,
    VERDICT_MKNODAT,
    VERDICT_NO_SOCKET, /* EACCES */
    VERDICT_ONLY_SELF, /* the first argument is a pid: 0 only */
    VERDICT_PRIORITY,  /* setpriority: PRIO_PROCESS, 0 */
    VERDICT_IOPRIO,    /* ioprio_set: IOPRIO_WHO_PROCESS, 0 */
    VERDICT_UTIMENSAT, /* of an open file only */
    VERDICT_IOCTL_NO_METADATA, /* as VERDICT_IOCTL, and no flags of files */
    VERDICT_FCNTL_NO_METADATA, /* no leases, notifications or hints on files */
    VERDICT_COUNT,
};

void seccomp_verdicts(uint8_t table[SYSCALL_COUNT], uint64_t bits);

#endif
