/* What the parts of the name server share: dns.c (what is answered), dns_asks.c (what the host is asked), dns_tcp.c. */
#ifndef SLOPLET_DNS_SERVER_H
#define SLOPLET_DNS_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dns_message.h"
#include "loop.h"
#include "net.h"

#define DNS_PATIENCE (10000 * MSEC)

struct dns_conn;

/* Where an answer goes. */
struct dns_client {
    struct dns_conn *conn; /* NULL: UDP */
    struct net_asker asker;
};

enum dns_fate { DNS_ANSWERED, DNS_WAITS, DNS_IGNORED };

/* Answers a message, or keeps what is to be answered later. */
enum dns_fate dns_take(const struct dns_client *client, const uint8_t *p, size_t n);
/* Answers a query about a name that the host was asked for: with its address if it may be used and that is the question. */
void dns_finish(const struct dns_client *client, const struct dns_query *q, enum dns_code code, uint32_t address);

/* The host has just said that there is no such name. */
bool asks_none(const struct dns_query *q);
/* The host is asked whether the query's name may be used; dns_finish follows. False: too many wait already. */
bool asks_wait(const struct dns_client *client, const struct dns_query *q);
/* This connection's queries need no answer any more. */
void asks_forget(const struct dns_conn *conn);
int64_t asks_timers(int64_t now);

int conns_begin(int listener);
void conns_serve(int fd);
/* Takes the answer to one of the connection's messages; there is room for each. */
void conns_answer(struct dns_conn *c, const uint8_t *p, size_t n);
int64_t conns_timers(int64_t now);

#endif
