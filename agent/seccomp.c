/* The system call filter: a table of verdicts compiled to a BPF program. Ranges of numbers with one verdict are
 * found by binary search, so a call costs about eight comparisons (and none on kernels that cache plain verdicts).
 * Every other ABI the kernel offers (i386 by int 0x80, x32) fails with ENOSYS as a whole. */
#define _GNU_SOURCE
#include "launch.h"
#include "linuxapi.h"
#include "seccomp.h"

#include <errno.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
#define OUR_ARCH 0xC000003Eu
#elif defined(__aarch64__)
#define OUR_ARCH 0xC00000B7u
#else
#error "the seccomp filter knows x86_64 and aarch64"
#endif

struct instruction {
    uint16_t code;
    uint8_t if_true, if_false;
    uint32_t k;
};

struct program {
    uint16_t size;
    const struct instruction *code;
};

#define MAX_CODE 1024
#define LOAD 0x20u /* BPF_LD | BPF_W | BPF_ABS */
#define AND 0x54u  /* BPF_ALU | BPF_AND | BPF_K */
#define JUMP 0x05u
#define JEQ 0x15u
#define JGE 0x35u
#define JSET 0x45u
#define RETURN 0x06u

#define RET_ALLOW 0x7FFF0000u
#define RET_ERRNO(number) (0x00050000u | (uint32_t)(number))
#define OFFSET_NR 0u
#define OFFSET_ARCH 4u
#define ARG(i) (16u + 8u * (i)) /* the low half, which is all the kernel reads of these arguments; little-endian */

#define NEW_NAMESPACES 0x7E020000u
#define NEW_TIME 0x80u
#define TYPE_CHAR 0x2000u
#define TYPE_BLOCK 0x6000u
#define TYPE_MASK 0xF000u

static struct instruction code[MAX_CODE];
static unsigned size;
static uint16_t handler[VERDICT_COUNT]; /* where the code for a verdict begins */

static void emit(unsigned op, uint32_t k, unsigned if_true, unsigned if_false) {
    if (size == MAX_CODE) fail("seccomp", "the filter is too long", 0, "");
    code[size++] = (struct instruction){(uint16_t)op, (uint8_t)if_true, (uint8_t)if_false, k};
}

static void ret(uint32_t value) { emit(RETURN, value, 0, 0); }
static void load(uint32_t offset) { emit(LOAD, offset, 0, 0); }

/* if (A == k) return value */
static void ret_if(uint32_t k, uint32_t value) {
    emit(JEQ, k, 0, 1);
    ret(value);
}

static void inet_rules(void) {
    /* type without SOCK_NONBLOCK and SOCK_CLOEXEC, then the protocol */
    load(ARG(1));
    emit(AND, 0xF, 0, 0);
    emit(JEQ, 1, 0, 5); /* SOCK_STREAM */
    load(ARG(2));
    emit(JEQ, 0, 2, 0);
    emit(JEQ, 6, 1, 0);               /* TCP */
    emit(JEQ, 262, 0, 1);             /* MPTCP */
    ret(RET_ALLOW);
    emit(JEQ, 2, 0, 6); /* SOCK_DGRAM; after a STREAM of another protocol A is that protocol: none is 2 in use */
    load(ARG(2));
    emit(JEQ, 0, 3, 0);
    emit(JEQ, 17, 2, 0);              /* UDP */
    emit(JEQ, 1, 1, 0);               /* ICMP, for ping: the network namespace's ping_group_range decides */
    emit(JEQ, 58, 0, 1);              /* ICMPv6 */
    ret(RET_ALLOW);
    ret(RET_ERRNO(EPERM));
}

static void socket_rules(void) {
    load(ARG(0));
    ret_if(1, RET_ALLOW); /* AF_UNIX */
    emit(JEQ, 2, 5, 0);   /* AF_INET */
    emit(JEQ, 10, 4, 0);  /* AF_INET6 */
    emit(JEQ, 16, 1, 0);  /* AF_NETLINK */
    ret(RET_ERRNO(EAFNOSUPPORT));
    load(ARG(2));
    emit(JUMP, 1, 0, 0);
    emit(JUMP, 3, 0, 0); /* to inet_rules */
    ret_if(0, RET_ALLOW); /* NETLINK_ROUTE */
    ret(RET_ERRNO(EPROTONOSUPPORT)); /* as a kernel without it: groupadd gives up at any other error of the audit one */
}

static void build_handlers(void) {
    handler[VERDICT_UNKNOWN] = (uint16_t)size;
    ret(RET_ERRNO(ENOSYS));
    handler[VERDICT_ALLOW] = (uint16_t)size;
    ret(RET_ALLOW);
    handler[VERDICT_REFUSE] = (uint16_t)size;
    ret(RET_ERRNO(EPERM));
    handler[VERDICT_NO_SOCKET] = (uint16_t)size;
    ret(RET_ERRNO(EACCES));

    handler[VERDICT_SOCKET] = (uint16_t)size;
    socket_rules();
    inet_rules();

    handler[VERDICT_SOCKETPAIR] = (uint16_t)size;
    load(ARG(0));
    ret_if(1, RET_ALLOW);
    ret(RET_ERRNO(EAFNOSUPPORT));

    handler[VERDICT_CLONE] = (uint16_t)size;
    load(ARG(0));
    emit(JSET, NEW_NAMESPACES, 0, 1);
    ret(RET_ERRNO(EPERM));
    ret(RET_ALLOW);

    handler[VERDICT_UNSHARE] = (uint16_t)size;
    load(ARG(0));
    emit(JSET, NEW_NAMESPACES | NEW_TIME, 0, 1);
    ret(RET_ERRNO(EPERM));
    ret(RET_ALLOW);

    handler[VERDICT_FCNTL_NO_METADATA] = (uint16_t)size;
    load(ARG(1));
    ret_if(1024, RET_ERRNO(EPERM)); /* F_SETLEASE: holds up whoever opens the file */
    ret_if(1026, RET_ERRNO(EPERM)); /* F_NOTIFY */
    ret_if(1036, RET_ERRNO(EPERM)); /* F_SET_RW_HINT */
    ret_if(1038, RET_ERRNO(EPERM)); /* F_SET_FILE_RW_HINT */
    ret(RET_ALLOW);

    handler[VERDICT_IOCTL_NO_METADATA] = (uint16_t)size; /* a file's owner needs only read it to set its flags */
    load(ARG(1));
    emit(AND, 0xFF00, 0, 0);
    ret_if('f' << 8, RET_ERRNO(EPERM));  /* FS_IOC_SETFLAGS and its kin */
    ret_if('X' << 8, RET_ERRNO(EPERM));  /* FS_IOC_FSSETXATTR */
    ret_if('v' << 8, RET_ERRNO(EPERM));  /* FS_IOC_SETVERSION */
    ret_if(0x94 << 8, RET_ERRNO(EPERM)); /* btrfs */

    handler[VERDICT_IOCTL] = (uint16_t)size;
    load(ARG(1));
    ret_if(0x5412, RET_ERRNO(EPERM)); /* TIOCSTI: types into a terminal */
    ret_if(0x541C, RET_ERRNO(EPERM)); /* TIOCLINUX: pastes into a console */
    ret_if(0x5423, RET_ERRNO(EPERM)); /* TIOCSETD: loads line disciplines */
    ret(RET_ALLOW);

    handler[VERDICT_PERSONALITY] = (uint16_t)size;
    load(ARG(0));
    ret_if(0xFFFFFFFF, RET_ALLOW); /* a query */
    emit(AND, ~(0x8u | 0x20000u | 0x40000u), 0, 0); /* PER_LINUX32, UNAME26, ADDR_NO_RANDOMIZE (debuggers) */
    ret_if(0, RET_ALLOW);
    ret(RET_ERRNO(EPERM));

    handler[VERDICT_PRCTL] = (uint16_t)size;
    load(ARG(0));
    ret_if(31, RET_ERRNO(EPERM)); /* PR_TASK_PERF_EVENTS_DISABLE */
    ret_if(32, RET_ERRNO(EPERM)); /* PR_TASK_PERF_EVENTS_ENABLE */
    ret_if(35, RET_ERRNO(EPERM)); /* PR_SET_MM */
    ret_if(57, RET_ERRNO(EPERM)); /* PR_SET_IO_FLUSHER */
    ret_if(62, RET_ERRNO(EPERM)); /* PR_SCHED_CORE */
    ret_if(67, RET_ERRNO(EPERM)); /* PR_SET_MEMORY_MERGE: page merging tells neighbours apart */
    ret(RET_ALLOW);

    handler[VERDICT_ONLY_SELF] = (uint16_t)size;
    load(ARG(0));
    ret_if(0, RET_ALLOW);
    ret(RET_ERRNO(EPERM));

    for (unsigned which = 0; which < 2; which++) {
        handler[which ? VERDICT_IOPRIO : VERDICT_PRIORITY] = (uint16_t)size;
        load(ARG(0));
        emit(JEQ, which, 0, 3);
        load(ARG(1));
        ret_if(0, RET_ALLOW);
        ret(RET_ERRNO(EPERM));
    }

    handler[VERDICT_UTIMENSAT] = (uint16_t)size; /* a null path, both halves of the pointer */
    load(ARG(1));
    emit(JEQ, 0, 0, 3);
    load(ARG(1) + 4);
    ret_if(0, RET_ALLOW);
    ret(RET_ERRNO(EPERM));

    for (unsigned at = 0; at < 2; at++) {
        handler[at ? VERDICT_MKNODAT : VERDICT_MKNOD] = (uint16_t)size;
        load(ARG(1 + at));
        emit(AND, TYPE_MASK, 0, 0);
        ret_if(TYPE_CHAR, RET_ERRNO(EPERM));
        ret_if(TYPE_BLOCK, RET_ERRNO(EPERM));
        ret(RET_ALLOW);
    }
}

struct range {
    uint16_t from;
    uint8_t verdict;
};

static void leaf(uint8_t verdict) {
    if (verdict == VERDICT_UNKNOWN) ret(RET_ERRNO(ENOSYS));
    else if (verdict == VERDICT_ALLOW) ret(RET_ALLOW);
    else if (verdict == VERDICT_REFUSE) ret(RET_ERRNO(EPERM));
    else emit(JUMP, verdict, 0, 0); /* patched to the handler's place once that is known */
}

static void search(const struct range *ranges, unsigned count) {
    if (count == 1) {
        leaf(ranges->verdict);
        return;
    }
    unsigned half = count / 2;
    /* A conditional jump reaches 255 instructions, a plain one any distance. */
    emit(JGE, ranges[half].from, 0, 1);
    unsigned jump = size;
    emit(JUMP, 0, 0, 0);
    search(ranges, half);
    code[jump].k = size - jump - 1;
    code[jump].code |= 0x8000; /* its target is final: not a handler */
    search(ranges + half, count - half);
}

void seccomp_install(uint64_t bits) {
    static uint8_t table[SYSCALL_COUNT];
    static struct range ranges[SYSCALL_COUNT + 1];
    unsigned count = 0;
    if (!(bits & SECCOMP_ON)) return;
    seccomp_verdicts(table, bits);
    for (unsigned nr = 0; nr < SYSCALL_COUNT; nr++)
        if (nr == 0 || table[nr] != table[nr - 1]) ranges[count++] = (struct range){(uint16_t)nr, table[nr]};
    if (ranges[count - 1].verdict != VERDICT_UNKNOWN) ranges[count++] = (struct range){SYSCALL_COUNT, VERDICT_UNKNOWN};

    load(OFFSET_ARCH);
    emit(JEQ, OUR_ARCH, 1, 0);
    ret(RET_ERRNO(ENOSYS));
    load(OFFSET_NR);
    unsigned start = size;
    search(ranges, count);
    unsigned end = size;
    build_handlers();
    for (unsigned i = start; i < end; i++) {
        if (code[i].code == JUMP) code[i].k = handler[code[i].k] - i - 1;
        code[i].code &= 0x7FFF;
    }
    struct program program = {(uint16_t)size, code};
    if (prctl(PR_SET_SECCOMP, 2 /* SECCOMP_MODE_FILTER */, &program, 0, 0) < 0) fail("seccomp", "prctl", errno, "this kernel has no seccomp filters");
}

/* A second, small filter for commands that run under the caller's own uid: nothing about an open file can be changed but
 * its content. Whoever owns a file needs no right to write it for these. */
int seccomp_no_metadata(void) {
    static const uint32_t calls[] = {SYS_fchmod, SYS_fchown, SYS_fsetxattr, SYS_fremovexattr, SYS_utimensat};
    static const uint32_t ioctls[] = {
        0x40086602, 0x40046602, /* FS_IOC_SETFLAGS */
        0x401C5820,             /* FS_IOC_FSSETXATTR */
        0x40087602, 0x40047602, /* FS_IOC_SETVERSION */
        0x400C6613,             /* FS_IOC_SET_ENCRYPTION_POLICY */
        0x40806685,             /* FS_IOC_ENABLE_VERITY */
    };
    struct instruction small[32];
    unsigned at = 0;
    small[at++] = (struct instruction){LOAD, 0, 0, OFFSET_NR};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        small[at++] = (struct instruction){JEQ, 0, 1, calls[i]};
        small[at++] = (struct instruction){RETURN, 0, 0, RET_ERRNO(EPERM)};
    }
    small[at++] = (struct instruction){JEQ, 1, 0, SYS_ioctl};
    small[at++] = (struct instruction){RETURN, 0, 0, RET_ALLOW};
    small[at++] = (struct instruction){LOAD, 0, 0, ARG(1)};
    for (size_t i = 0; i < sizeof ioctls / sizeof *ioctls; i++) {
        small[at++] = (struct instruction){JEQ, 0, 1, ioctls[i]};
        small[at++] = (struct instruction){RETURN, 0, 0, RET_ERRNO(EPERM)};
    }
    small[at++] = (struct instruction){RETURN, 0, 0, RET_ALLOW};
    struct program program = {(uint16_t)at, small};
    return prctl(PR_SET_SECCOMP, 2 /* SECCOMP_MODE_FILTER */, &program, 0, 0);
}

/* For gVisor's programs. Each start of one registers for memory barriers, which waits for all processors: 1 to 30 ms, five
 * times until a sandbox runs. Where the call is not there they go without. If this fails they are slower. */
void seccomp_no_membarrier(void) {
    static const struct instruction small[] = {
        {LOAD, 0, 0, OFFSET_ARCH},
        {JEQ, 0, 3, OUR_ARCH},
        {LOAD, 0, 0, OFFSET_NR},
        {JEQ, 0, 1, SYS_membarrier},
        {RETURN, 0, 0, RET_ERRNO(ENOSYS)},
        {RETURN, 0, 0, RET_ALLOW},
    };
    struct program program = {sizeof small / sizeof *small, small};
    prctl(PR_SET_SECCOMP, 2 /* SECCOMP_MODE_FILTER */, &program, 0, 0);
}

/* For a gVisor sandbox, whose kernel would let commands. No user namespaces: there are none on the other rungs either. What
 * clone3 is asked for cannot be seen by a filter: programs fall back to clone. And no extended attributes without a value: a
 * state that has one can be saved, but never be restored (seen with 20240729). */
int seccomp_gvisor(void) {
    static const struct instruction small[] = {
        {LOAD, 0, 0, OFFSET_NR},
        {JEQ, 11, 0, NR_clone3},
        {JEQ, 7, 0, SYS_clone},
        {JEQ, 6, 0, SYS_unshare},
        {JEQ, 2, 0, SYS_setxattr},
        {JEQ, 1, 0, SYS_lsetxattr},
        {JEQ, 0, 5, SYS_fsetxattr},
        {LOAD, 0, 0, ARG(3)},
        {JEQ, 0, 3, 0},
        {RETURN, 0, 0, RET_ERRNO(EOPNOTSUPP)},
        {LOAD, 0, 0, ARG(0)},
        {JSET, 2, 0, CLONE_NEWUSER},
        {RETURN, 0, 0, RET_ALLOW},
        {RETURN, 0, 0, RET_ERRNO(ENOSYS)},
        {RETURN, 0, 0, RET_ERRNO(EPERM)},
    };
    struct program program = {sizeof small / sizeof *small, small};
    return prctl(PR_SET_SECCOMP, 2 /* SECCOMP_MODE_FILTER */, &program, 0, 0);
}

/* For a gVisor sandbox in which every address is its own: it would answer its own pings to any. EACCES is what Linux says to
 * groups that may not ping. */
int seccomp_no_ping(void) {
    static const struct instruction small[] = {
        {LOAD, 0, 0, OFFSET_NR},
        {JEQ, 0, 6, SYS_socket},
        {LOAD, 0, 0, ARG(0)},
        {JEQ, 1, 0, 2},  /* AF_INET */
        {JEQ, 0, 3, 10}, /* AF_INET6 */
        {LOAD, 0, 0, ARG(2)},
        {JEQ, 2, 0, 1},  /* ICMP */
        {JEQ, 1, 0, 58}, /* ICMPv6 */
        {RETURN, 0, 0, RET_ALLOW},
        {RETURN, 0, 0, RET_ERRNO(EACCES)},
    };
    struct program program = {sizeof small / sizeof *small, small};
    return prctl(PR_SET_SECCOMP, 2 /* SECCOMP_MODE_FILTER */, &program, 0, 0);
}

/* For commands of a sandbox that may write a folder of the host's: what they leave there belongs to somebody outside, whom
 * other users there must not become by running it. (nosuid is about the sandbox's own mount.) */
static unsigned no_setid_rule(struct instruction *at, uint32_t call, unsigned mode, int flags) {
    unsigned n = 1;
    if (flags >= 0) { /* without these the mode is not looked at, and may be anything */
        at[n++] = (struct instruction){LOAD, 0, 0, ARG((unsigned)flags)};
        at[n++] = (struct instruction){JSET, 1, 0, 0100 | 020000000 /* O_CREAT, O_TMPFILE */};
        at[n++] = (struct instruction){RETURN, 0, 0, RET_ALLOW};
    }
    at[n++] = (struct instruction){LOAD, 0, 0, ARG(mode)};
    at[n++] = (struct instruction){JSET, 0, 1, 06000};
    at[n++] = (struct instruction){RETURN, 0, 0, RET_ERRNO(EPERM)};
    at[n++] = (struct instruction){RETURN, 0, 0, RET_ALLOW};
    at[0] = (struct instruction){JEQ, 0, (uint8_t)(n - 1), call};
    return n;
}

int seccomp_no_setid(void) {
    struct instruction small[96];
    unsigned at = 0;
    small[at++] = (struct instruction){LOAD, 0, 0, OFFSET_NR};
    small[at++] = (struct instruction){JEQ, 0, 1, NR_openat2}; /* its mode lies in memory, where no filter sees it */
    small[at++] = (struct instruction){RETURN, 0, 0, RET_ERRNO(ENOSYS)};
#ifdef SYS_chmod
    at += no_setid_rule(small + at, SYS_chmod, 1, -1);
    at += no_setid_rule(small + at, SYS_open, 2, 1);
    at += no_setid_rule(small + at, SYS_creat, 1, -1);
    at += no_setid_rule(small + at, SYS_mknod, 1, -1);
#endif
    at += no_setid_rule(small + at, SYS_fchmod, 1, -1);
    at += no_setid_rule(small + at, SYS_fchmodat, 2, -1);
    at += no_setid_rule(small + at, NR_fchmodat2, 2, -1);
    at += no_setid_rule(small + at, SYS_openat, 3, 2);
    at += no_setid_rule(small + at, SYS_mknodat, 2, -1);
    small[at++] = (struct instruction){RETURN, 0, 0, RET_ALLOW};
    struct program program = {(uint16_t)at, small};
    return prctl(PR_SET_SECCOMP, 2 /* SECCOMP_MODE_FILTER */, &program, 0, 0);
}

/* For commands that see a folder of the host's: a lease on a file there would hold up whoever opens it outside. */
int seccomp_no_leases(void) {
    static const struct instruction small[] = {
        {LOAD, 0, 0, OFFSET_NR},
        {JEQ, 0, 3, SYS_fcntl},
        {LOAD, 0, 0, ARG(1)},
        {JEQ, 0, 1, 1024}, /* F_SETLEASE */
        {RETURN, 0, 0, RET_ERRNO(EPERM)},
        {RETURN, 0, 0, RET_ALLOW},
    };
    struct program program = {sizeof small / sizeof *small, small};
    return prctl(PR_SET_SECCOMP, 2 /* SECCOMP_MODE_FILTER */, &program, 0, 0);
}
