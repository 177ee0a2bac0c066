/* The redirect on Linux: see net.h, and docs/adr/0050-redirect.md for why each part is as it is.
 *
 * A local default route makes every address the namespace's own, so that what is sent to any comes back in by `lo`; 127.0.0.1
 * is where it comes from. An nft table of family ip then
 *   in:  hook prerouting   tcp to other than 127.0.0.0/8: tproxy to the egress socket
 *   out: hook output       to 127.0.0.0/8, tcp, udp to and from port 53, which is ours: accept; all else is dropped, which its
 *                          sender sees as EPERM
 * Nothing is rewritten, and no connection tracked. */
#define _GNU_SOURCE
#include "net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "netlink.h"

#define TABLE "sloplet"

/* rtnetlink */
#define NEW_ROUTE 24
struct route {
    uint8_t family, dst_len, src_len, tos, table, protocol, scope, type;
    uint32_t flags;
};
enum { TABLE_LOCAL = 255, PROTO_STATIC = 4, SCOPE_HOST = 254, TYPE_LOCAL = 2, ROUTE_OIF = 4, ROUTE_PREFSRC = 7, LO = 1 };

/* nfnetlink */
enum { BATCH_BEGIN = 16, BATCH_END = 17, SUBSYS_NFT = 10 };
#define NFT(message) (SUBSYS_NFT << 8 | (message))
struct nfgen {
    uint8_t family, version;
    uint16_t resource; /* big-endian */
};
enum { NEW_TABLE = 0, NEW_CHAIN = 3, NEW_RULE = 6 };
enum { CHAIN_TABLE = 1, CHAIN_NAME = 3, CHAIN_HOOK = 4, CHAIN_POLICY = 5, CHAIN_TYPE = 7, HOOK_NUMBER = 1, HOOK_PRIORITY = 2 };
enum { RULE_TABLE = 1, RULE_CHAIN = 2, RULE_EXPRESSIONS = 4, LIST_ELEMENT = 1, EXPR_NAME = 1, EXPR_DATA = 2, DATA_VALUE = 1, DATA_VERDICT = 2 };
enum { HOOK_PREROUTING = 0, HOOK_OUTPUT = 3, PRIORITY_MANGLE = -150, PRIORITY_FILTER = 0 };
enum { DROP = 0, ACCEPT = 1 };
enum { EQUAL = 0, NOT_EQUAL = 1 };
enum { NETWORK_HEADER = 1, TRANSPORT_HEADER = 2, IP_DESTINATION = 16, PORT_SOURCE = 0, PORT_DESTINATION = 2 };
enum { META_L4PROTO = 16 };
enum { REG_VERDICT = 0, REG_A = 8, REG_B = 9 }; /* NFT_REG32_00 and after */

static int add_route(void)
{
    struct nl n = {.size = 0};
    struct route all = {AF_INET, 0, 0, 0, TABLE_LOCAL, PROTO_STATIC, SCOPE_HOST, TYPE_LOCAL, 0};
    uint32_t lo = LO, source = htonl(INADDR_LOOPBACK);

    nl_begin(&n, "the route", NEW_ROUTE, NL_ACK | NL_CREATE | NL_EXCL, &all, sizeof all);
    nl_put(&n, ROUTE_OIF, &lo, sizeof lo);
    nl_put(&n, ROUTE_PREFSRC, &source, sizeof source);
    nl_end(&n);
    return nl_send(&n, NL_ROUTE, &net_failed);
}

static void begin(struct nl *n, const char *what, unsigned message, unsigned flags)
{
    static const struct nfgen header = {.family = AF_INET};

    nl_begin(n, what, NFT(message), NL_ACK | NL_CREATE | flags, &header, sizeof header);
}

static void batch(struct nl *n, unsigned message)
{
    struct nfgen header = {.resource = htons(SUBSYS_NFT)};

    nl_begin(n, "nf_tables", message, 0, &header, sizeof header);
    nl_end(n);
}

static void table(struct nl *n)
{
    begin(n, "an nft table", NEW_TABLE, 0);
    nl_text(n, 1, TABLE);
    nl_end(n);
}

static void chain(struct nl *n, const char *name, unsigned hook, int priority, unsigned policy)
{
    size_t nest;

    begin(n, "an nft chain", NEW_CHAIN, 0);
    nl_text(n, CHAIN_TABLE, TABLE);
    nl_text(n, CHAIN_NAME, name);
    nest = nl_open(n, CHAIN_HOOK);
    nl_be32(n, HOOK_NUMBER, hook);
    nl_be32(n, HOOK_PRIORITY, (uint32_t)priority);
    nl_close(n, nest);
    nl_be32(n, CHAIN_POLICY, policy);
    nl_text(n, CHAIN_TYPE, "filter");
    nl_end(n);
}

struct expression {
    size_t element, data;
};

static struct expression open_expression(struct nl *n, const char *name)
{
    struct expression e;

    e.element = nl_open(n, LIST_ELEMENT);
    nl_text(n, EXPR_NAME, name);
    e.data = nl_open(n, EXPR_DATA);
    return e;
}

static void close_expression(struct nl *n, struct expression e)
{
    nl_close(n, e.data);
    nl_close(n, e.element);
}

static size_t open_rule(struct nl *n, const char *what, const char *name)
{
    begin(n, what, NEW_RULE, NL_APPEND);
    nl_text(n, RULE_TABLE, TABLE);
    nl_text(n, RULE_CHAIN, name);
    return nl_open(n, RULE_EXPRESSIONS);
}

static void close_rule(struct nl *n, size_t list)
{
    nl_close(n, list);
    nl_end(n);
}

static void value(struct nl *n, unsigned type, const void *data, size_t size)
{
    size_t nest = nl_open(n, type);

    nl_put(n, DATA_VALUE, data, size);
    nl_close(n, nest);
}

static void compare(struct nl *n, unsigned how, const void *data, size_t size)
{
    struct expression e = open_expression(n, "cmp");

    nl_be32(n, 1, REG_A);
    nl_be32(n, 2, how);
    value(n, 3, data, size);
    close_expression(n, e);
}

static void load(struct nl *n, unsigned header, unsigned offset, unsigned size)
{
    struct expression e = open_expression(n, "payload");

    nl_be32(n, 1, REG_A);
    nl_be32(n, 2, header);
    nl_be32(n, 3, offset);
    nl_be32(n, 4, size);
    close_expression(n, e);
}

static void to_loopback(struct nl *n, unsigned how)
{
    static const uint8_t first = IN_LOOPBACKNET;

    load(n, NETWORK_HEADER, IP_DESTINATION, sizeof first);
    compare(n, how, &first, sizeof first);
}

static void protocol(struct nl *n, uint8_t number)
{
    struct expression e = open_expression(n, "meta");

    nl_be32(n, 1, REG_A);
    nl_be32(n, 2, META_L4PROTO);
    close_expression(n, e);
    compare(n, EQUAL, &number, sizeof number);
}

static void set(struct nl *n, unsigned reg, const void *data, size_t size)
{
    struct expression e = open_expression(n, "immediate");

    nl_be32(n, 1, reg);
    value(n, 2, data, size);
    close_expression(n, e);
}

static void verdict(struct nl *n, unsigned code)
{
    struct expression e = open_expression(n, "immediate");
    size_t data, inner;

    nl_be32(n, 1, REG_VERDICT);
    data = nl_open(n, 2);
    inner = nl_open(n, DATA_VERDICT);
    nl_be32(n, 1, code);
    nl_close(n, inner);
    nl_close(n, data);
    close_expression(n, e);
}

static void tproxy(struct nl *n, int port)
{
    uint16_t big = htons((uint16_t)port);
    struct expression e;

    set(n, REG_A, &(struct in_addr){htonl(INADDR_LOOPBACK)}, sizeof(struct in_addr));
    set(n, REG_B, &big, sizeof big);
    e = open_expression(n, "tproxy");
    nl_be32(n, 1, AF_INET);
    nl_be32(n, 2, REG_A);
    nl_be32(n, 3, REG_B);
    close_expression(n, e);
    verdict(n, ACCEPT);
}

static void let_names_pass(struct nl *n, unsigned port)
{
    uint16_t names = htons(53);
    size_t rule = open_rule(n, "an nft rule", "out");

    protocol(n, IPPROTO_UDP);
    load(n, TRANSPORT_HEADER, port, sizeof names);
    compare(n, EQUAL, &names, sizeof names);
    verdict(n, ACCEPT);
    close_rule(n, rule);
}

static int add_rules(int port)
{
    struct nl n = {.size = 0};
    size_t rule;

    batch(&n, BATCH_BEGIN);
    table(&n);
    chain(&n, "in", HOOK_PREROUTING, PRIORITY_MANGLE, ACCEPT);
    chain(&n, "out", HOOK_OUTPUT, PRIORITY_FILTER, DROP);
    rule = open_rule(&n, "nft's tproxy", "in");
    to_loopback(&n, NOT_EQUAL);
    protocol(&n, IPPROTO_TCP);
    tproxy(&n, port);
    close_rule(&n, rule);
    rule = open_rule(&n, "an nft rule", "out");
    to_loopback(&n, EQUAL);
    verdict(&n, ACCEPT);
    close_rule(&n, rule);
    rule = open_rule(&n, "an nft rule", "out");
    protocol(&n, IPPROTO_TCP);
    verdict(&n, ACCEPT);
    close_rule(&n, rule);
    let_names_pass(&n, PORT_DESTINATION);
    let_names_pass(&n, PORT_SOURCE); /* answers to whoever asked from another address than 127.0.0.1 */
    batch(&n, BATCH_END);
    return nl_send(&n, NL_NETFILTER, &net_failed);
}

int net_redirect_linux(int port)
{
    /* the rules first: there is no moment in which something could be sent to where nobody is */
    return add_rules(port) < 0 || add_route() < 0 ? -1 : 0;
}
