/* Opens sockets of many families by every system call ABI of x86-64. Lines "ABI:NAME ERRNO", 0 for an open one. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

struct wish {
    const char *name;
    int family, type, protocol;
};

static const struct wish wishes[] = {
    {"unix", 1, 1, 0}, {"tcp", 2, 1, 0}, {"udp", 2, 2, 0}, {"tcp6", 10, 1, 0}, {"route", 16, 3, 0},
    {"raw", 2, 3, 255}, {"raw-icmp", 2, 3, 1}, {"raw6", 10, 3, 58}, {"sctp", 2, 1, 132}, {"sctp-seq", 2, 5, 132},
    {"dccp", 2, 6, 33}, {"udplite", 2, 2, 136}, {"l2tp", 2, 2, 115}, {"smc-inet", 2, 1, 256},
    {"alg", 38, 5, 0}, {"rxrpc", 33, 2, 2}, {"vsock", 40, 1, 0}, {"vsock-dgram", 40, 2, 0}, {"packet", 17, 3, 0x300},
    {"packet-dgram", 17, 2, 0x300}, {"key", 15, 3, 2}, {"tipc", 30, 5, 0}, {"xdp", 44, 3, 0}, {"can", 29, 3, 1},
    {"qipcrtr", 42, 2, 0}, {"kcm", 41, 5, 0}, {"smc", 43, 1, 0}, {"pppox", 24, 1, 0}, {"nfc", 39, 5, 1},
    {"bluetooth", 31, 3, 1}, {"rds", 21, 5, 0}, {"phonet", 35, 2, 0}, {"caif", 37, 5, 0}, {"ib", 27, 3, 0},
    {"mctp", 45, 2, 0}, {"ax25", 3, 2, 0}, {"llc", 26, 2, 0}, {"ieee802154", 36, 2, 0}, {"appletalk", 5, 2, 0},
    {"x25", 9, 5, 0}, {"netlink-usersock", 16, 3, 2}, {"netlink-diag", 16, 3, 4}, {"netlink-xfrm", 16, 3, 6},
    {"netlink-audit", 16, 3, 9}, {"netlink-netfilter", 16, 3, 12}, {"netlink-uevent", 16, 3, 15},
    {"netlink-generic", 16, 3, 16}, {"netlink-crypto", 16, 3, 21}, {"netlink-selinux", 16, 3, 7},
};

#ifdef __x86_64__
static long by_i386(long number, long a, long b, long c) {
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c) : "memory", "r8", "r9", "r10", "r11");
    return result;
}

static long by_x32(long number, long a, long b, long c) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number | 0x40000000), "D"(a), "S"(b), "d"(c) : "memory", "rcx", "r11");
    return result;
}
#endif

static void say(const char *abi, const char *name, long result) {
    printf("%s:%s %ld\n", abi, name, result < 0 ? -result : 0);
    if (result >= 0) close((int)result);
}

int main(void) {
    for (size_t i = 0; i < sizeof wishes / sizeof *wishes; i++) {
        const struct wish *w = &wishes[i];
        long fd = syscall(SYS_socket, w->family, w->type, w->protocol);
        say("native", w->name, fd < 0 ? -errno : fd);
        int pair[2];
        if (syscall(SYS_socketpair, w->family, w->type, w->protocol, pair) == 0) {
            close(pair[0]);
            say("pair", w->name, pair[1]);
        } else {
            say("pair", w->name, -errno);
        }
#ifdef __x86_64__
        say("i386", w->name, by_i386(359, w->family, w->type, w->protocol));
        say("x32", w->name, by_x32(41, w->family, w->type, w->protocol));
#endif
    }
#ifdef __x86_64__
    printf("i386:getpid %ld\n", by_i386(20, 0, 0, 0) < 0 ? 1L : 0L);
    printf("x32:getpid %ld\n", by_x32(39, 0, 0, 0) < 0 ? 1L : 0L);
#endif
    return 0;
}
