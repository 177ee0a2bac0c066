/* The redirect in gVisor's netstack: see net.h, and docs/adr/0050-redirect.md.
 *
 * Two addresses on `lo`, 1.0.0.1/1 and 129.0.0.1/1, make every address one that comes back in by it. They are those of `lo` in
 * the network namespace outside, which runsc copies when it starts and when it restores. The chain OUTPUT of iptables' table nat
 * then sends
 *   udp to port 53 of any address               to port 53 of 127.0.0.1
 *   udp to other than 127.0.0.0/8               to a port of 127.0.0.1 where nobody is: who is connected gets ECONNREFUSED
 *   tcp to other than 127.0.0.0/8               to the egress socket, whose SO_ORIGINAL_DST says where it went
 * All of it by IPT_SO_SET_REPLACE, the one way that gVisor has. Rules, and what they did to open connections, are not saved. */
#define _GNU_SOURCE
#include "net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gvisor_guest.h"
#include "netlink.h"

/* rtnetlink */
#define NEW_ADDRESS 20
enum { ADDRESS = 1, LOCAL = 2, LO = 1 };
struct address {
    uint8_t family, prefix, flags, scope;
    uint32_t index;
};

/* iptables' binary table. Numbers are in host order but for addresses and a target's ports. */
#define SET_REPLACE 64 /* IPT_SO_SET_REPLACE */
enum { HOOKS = 5, PREROUTING = 0, INPUT = 1, OUTPUT = 3, POSTROUTING = 4 };
#define NAT_HOOKS (1u << PREROUTING | 1u << INPUT | 1u << OUTPUT | 1u << POSTROUTING)
#define NOT_DESTINATION 0x10
#define ACCEPT (-2)         /* -NF_ACCEPT - 1 */
#define RANGE_HAS_ADDRESSES 1
#define RANGE_HAS_PORTS 2

struct replace {
    char name[32];
    uint32_t valid, count, size, entry[HOOKS], underflow[HOOKS], counters;
    uint64_t counters_at;
};

struct entry {
    uint32_t source, destination, source_mask, destination_mask;
    char interfaces[4][16];
    uint16_t protocol;
    uint8_t flags, inverse;
    uint32_t cache;
    uint16_t target_offset, next_offset;
    uint32_t from;
    uint64_t packets, bytes;
};

struct extension { /* a match or a target */
    uint16_t size;
    char name[29];
    uint8_t revision;
};

struct verdict {
    struct extension head;
    int32_t code;
    uint32_t pad;
};

struct last {
    struct extension head;
    char name[30], pad[2];
};

struct translation { /* REDIRECT and SNAT */
    struct extension head;
    uint32_t ranges, flags, from, to;
    uint16_t first, last;
    uint32_t pad;
};

struct ports { /* of udp, and of tcp without its flags */
    struct extension head;
    uint16_t source[2], destination[2];
    uint8_t none[8];
};

/* gVisor takes 8 KiB at most of any option. */
struct table {
    struct replace head;
    uint8_t entries[8192 - sizeof(struct replace)] __attribute__((aligned(8)));
};

#define STALE_AT_ONCE 24 /* rules that fit, with what else is in a table */

/* Where each accepted connection went, by its descriptor. */
#define MOST_FDS 4096
static struct {
    uint32_t address;
    uint16_t port;
} went[MOST_FDS];
static int egress_port;

static void *more(struct table *t, size_t size)
{
    void *at = t->entries + t->head.size;

    if (size > sizeof t->entries - t->head.size)
        __builtin_trap(); /* the rules below are all there are */
    t->head.size += (uint32_t)size;
    return at;
}

static struct extension *extend(struct table *t, const char *name, size_t size)
{
    struct extension *e = more(t, size);

    e->size = (uint16_t)size;
    strcpy(e->name, name);
    return e;
}

static struct entry *open_entry(struct table *t, unsigned protocol, size_t matches, size_t target)
{
    struct entry *e = more(t, sizeof *e);

    e->protocol = (uint16_t)protocol;
    e->target_offset = (uint16_t)(sizeof *e + matches);
    e->next_offset = (uint16_t)(sizeof *e + matches + target);
    t->head.count++;
    return e;
}

static void not_loopback(struct entry *e)
{
    e->destination = htonl((uint32_t)IN_LOOPBACKNET << 24);
    e->destination_mask = htonl(0xFF000000u);
    e->inverse = NOT_DESTINATION;
}

static void send_to(struct table *t, int port)
{
    struct translation *r = (struct translation *)extend(t, "REDIRECT", sizeof *r);

    r->ranges = 1;
    r->flags = RANGE_HAS_PORTS;
    r->first = r->last = htons((uint16_t)port);
}

static void redirect_names(struct table *t)
{
    struct ports *p;

    open_entry(t, IPPROTO_UDP, sizeof *p, sizeof(struct translation));
    p = (struct ports *)extend(t, "udp", sizeof *p);
    p->source[1] = 0xFFFF;
    p->destination[0] = p->destination[1] = 53;
    send_to(t, 53);
}

static void redirect_all(struct table *t, unsigned protocol, int port)
{
    not_loopback(open_entry(t, protocol, 0, sizeof(struct translation)));
    send_to(t, port);
}

/* What a chain ends with. */
static void accept_rest(struct table *t, int hook)
{
    t->head.underflow[hook] = t->head.size;
    open_entry(t, 0, 0, sizeof(struct verdict));
    ((struct verdict *)extend(t, "", sizeof(struct verdict)))->code = ACCEPT;
}

static void accept_all(struct table *t, int hook)
{
    t->head.entry[hook] = t->head.size;
    accept_rest(t, hook);
}

static void begin_table(struct table *t)
{
    memset(t, 0, sizeof *t);
    strcpy(t->head.name, "nat");
    t->head.valid = NAT_HOOKS;
    accept_all(t, PREROUTING);
    accept_all(t, INPUT);
    t->head.entry[OUTPUT] = t->head.size;
}

/* gVisor asks for a right when this socket is made, and never again: it is kept, the right is not. */
static int raw_fd = -1;

static int install(struct table *t)
{
    open_entry(t, 0, 0, sizeof(struct last));
    strcpy(((struct last *)extend(t, "ERROR", sizeof(struct last)))->name, "ERROR");
    if (raw_fd < 0 && (raw_fd = socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC, IPPROTO_RAW)) < 0)
        return -1;
    return setsockopt(raw_fd, IPPROTO_IP, SET_REPLACE, t, (socklen_t)(sizeof t->head + t->head.size));
}

/* What a connection holds unread is saved with the sandbox, and gVisor takes some twenty times as much memory to write it down:
 * its own sizes, 1 MiB and up to 4 in each direction, are far too large. Bytes: least, at first, most. */
#define BUFFERS "4096 131072 131072"

static int setting(const char *path, const char *value)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC | O_NOCTTY);
    ssize_t n = fd < 0 ? -1 : write(fd, value, strlen(value));

    if (fd >= 0)
        close(fd);
    return n < 0 ? -1 : 0;
}

/* Root inside can change it again. If it is refused, saving takes more memory. */
static void limit_buffers(void)
{
    if (setting("/proc/sys/net/ipv4/tcp_rmem", BUFFERS) < 0 || setting("/proc/sys/net/ipv4/tcp_wmem", BUFFERS) < 0)
        dprintf(2, "sloplet-agent: buffers keep their size: errno %d\n", errno);
}

int net_redirect_gvisor(int port)
{
    static struct table t;

    egress_port = port;
    limit_buffers();
    net_failed = "iptables";
    begin_table(&t);
    redirect_names(&t);
    redirect_all(&t, IPPROTO_UDP, port); /* there is no UDP socket on it */
    redirect_all(&t, IPPROTO_TCP, port);
    accept_rest(&t, OUTPUT);
    accept_all(&t, POSTROUTING);
    return install(&t);
}

void net_gvisor_went(int fd, uint32_t address, uint16_t port)
{
    if (fd < 0 || fd >= MOST_FDS)
        return;
    went[fd].address = address;
    went[fd].port = port;
}

/* Of an accepted connection: who made it. */
static bool is_stale(int fd, struct sockaddr_in *peer)
{
    struct sockaddr_in own;
    socklen_t size = sizeof own, peer_size = sizeof *peer;

    return went[fd].port && getsockname(fd, (struct sockaddr *)&own, &size) == 0 && size == sizeof own &&
           own.sin_family == AF_INET && own.sin_port == htons((uint16_t)egress_port) &&
           getpeername(fd, (struct sockaddr *)peer, &peer_size) == 0 && peer_size == sizeof *peer;
}

/* What the agent sends to peer seems to come from where its program had connected to. */
static void seem_to_come(struct table *t, int fd, const struct sockaddr_in *peer)
{
    struct entry *e = open_entry(t, IPPROTO_TCP, sizeof(struct ports), sizeof(struct translation));
    struct translation *snat;
    struct ports *p;

    e->destination = peer->sin_addr.s_addr;
    e->destination_mask = 0xFFFFFFFFu;
    p = (struct ports *)extend(t, "tcp", sizeof *p);
    p->source[0] = p->source[1] = (uint16_t)egress_port;
    p->destination[0] = p->destination[1] = ntohs(peer->sin_port);
    snat = (struct translation *)extend(t, "SNAT", sizeof *snat);
    snat->ranges = 1;
    snat->flags = RANGE_HAS_ADDRESSES | RANGE_HAS_PORTS;
    snat->from = snat->to = htonl(went[fd].address);
    snat->first = snat->last = htons(went[fd].port);
}

/* Resets some of the connections from before; how many. Whoever owns a descriptor finds /dev/null in its place. */
static int reset_some(int nowhere)
{
    static struct table t;
    struct linger at_once = {.l_onoff = 1, .l_linger = 0};
    int stale[STALE_AT_ONCE], count = 0;

    begin_table(&t);
    accept_rest(&t, OUTPUT);
    t.head.entry[POSTROUTING] = t.head.size;
    for (int fd = 3; fd < MOST_FDS && count < STALE_AT_ONCE; fd++) {
        struct sockaddr_in peer;
        if (!is_stale(fd, &peer))
            continue;
        seem_to_come(&t, fd, &peer);
        stale[count++] = fd;
    }
    accept_rest(&t, POSTROUTING);
    if (!count || install(&t) < 0)
        return 0;
    for (int i = 0; i < count; i++) {
        went[stale[i]].port = 0;
        setsockopt(stale[i], SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        dup3(nowhere, stale[i], O_CLOEXEC);
    }
    return count;
}

void net_restored(void)
{
    int nowhere;

    if (!agent_own_kernel || agent_egress_fd < 0)
        return;
    nowhere = open("/dev/null", O_RDWR | O_CLOEXEC | O_NOCTTY);
    while (nowhere >= 0 && reset_some(nowhere) == STALE_AT_ONCE)
        ;
    if (nowhere >= 0)
        close(nowhere);
    if (net_redirect_gvisor(egress_port) < 0)
        agent_egress_fd = -1; /* and the host is told that nothing is served */
}

int net_addresses(void)
{
    static const uint32_t addresses[] = {0x01000001, 0x81000001};
    struct address half = {AF_INET, 1, 0, 0, LO};

    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++) {
        struct nl n = {.size = 0};
        uint32_t big = htonl(addresses[i]);

        nl_begin(&n, "an address", NEW_ADDRESS, NL_ACK | NL_CREATE | NL_EXCL, &half, sizeof half);
        nl_put(&n, LOCAL, &big, sizeof big);
        nl_put(&n, ADDRESS, &big, sizeof big);
        nl_end(&n);
        if (nl_send(&n, NL_ROUTE, &net_failed) < 0)
            return -1;
    }
    return 0;
}
