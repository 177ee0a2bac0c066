/* The redirect in gVisor's netstack: see net.h, and docs/adr/0050-redirect.md.
 *
 * Two addresses on `lo`, 1.0.0.1/1 and 129.0.0.1/1, make every address one that comes back in by it. The chain OUTPUT of
 * iptables' table nat then sends
 *   udp to port 53 of any address               to port 53 of 127.0.0.1
 *   udp to other than 127.0.0.0/8               to a port of 127.0.0.1 where nobody is: who is connected gets ECONNREFUSED
 *   tcp to other than 127.0.0.0/8               to the egress socket, whose SO_ORIGINAL_DST says where it went
 * All of it by IPT_SO_SET_REPLACE, the one way that gVisor has. */
#define _GNU_SOURCE
#include "net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

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

struct redirect {
    struct extension head;
    uint32_t ranges, flags, from, to;
    uint16_t first, last;
    uint32_t pad;
};

struct ports {
    struct extension head;
    uint16_t source[2], destination[2];
    uint8_t inverse, pad[7];
};

struct table {
    struct replace head;
    uint8_t entries[1536] __attribute__((aligned(8)));
};

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
    struct redirect *r = (struct redirect *)extend(t, "REDIRECT", sizeof *r);

    r->ranges = 1;
    r->flags = RANGE_HAS_PORTS;
    r->first = r->last = htons((uint16_t)port);
}

static void redirect_names(struct table *t)
{
    struct ports *p;

    open_entry(t, IPPROTO_UDP, sizeof *p, sizeof(struct redirect));
    p = (struct ports *)extend(t, "udp", sizeof *p);
    p->source[1] = 0xFFFF;
    p->destination[0] = p->destination[1] = 53;
    send_to(t, 53);
}

static void redirect_all(struct table *t, unsigned protocol, int port)
{
    not_loopback(open_entry(t, protocol, 0, sizeof(struct redirect)));
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

static void end_table(struct table *t)
{
    open_entry(t, 0, 0, sizeof(struct last));
    strcpy(((struct last *)extend(t, "ERROR", sizeof(struct last)))->name, "ERROR");
}

static int add_rules(int port)
{
    static struct table t = {.head = {.name = "nat", .valid = NAT_HOOKS}};
    int fd, result, error;

    accept_all(&t, PREROUTING);
    accept_all(&t, INPUT);
    t.head.entry[OUTPUT] = t.head.size;
    redirect_names(&t);
    redirect_all(&t, IPPROTO_UDP, port); /* there is no UDP socket on it */
    redirect_all(&t, IPPROTO_TCP, port);
    accept_rest(&t, OUTPUT);
    accept_all(&t, POSTROUTING);
    end_table(&t);
    net_failed = "iptables";
    fd = socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC, IPPROTO_RAW);
    if (fd < 0)
        return -1;
    result = setsockopt(fd, IPPROTO_IP, SET_REPLACE, &t, (socklen_t)(sizeof t.head + t.head.size));
    error = errno;
    close(fd);
    errno = error;
    return result;
}

static int add_addresses(void)
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

int net_redirect_gvisor(int port)
{
    /* the rules first: there is no moment in which something could be sent to where nobody is */
    return add_rules(port) < 0 || add_addresses() < 0 ? -1 : 0;
}
