/* DNS messages: reading queries and building answers. Pure. Every answer fits 512 bytes. */
#ifndef SLOPLET_DNS_MESSAGE_H
#define SLOPLET_DNS_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DNS_QUERY_MAX 1232 /* what we take, and say so to who asks by EDNS */
#define DNS_ANSWER_MAX 512
#define DNS_NAME_MAX 253 /* as text, without the last dot */
#define DNS_TTL 60

enum dns_type { DNS_A = 1, DNS_PTR = 12, DNS_AAAA = 28, DNS_SVCB = 64, DNS_HTTPS = 65 };
enum dns_code {
    DNS_DROP = -1, /* nothing that could be answered */
    DNS_NOERROR = 0,
    DNS_FORMERR = 1,
    DNS_SERVFAIL = 2,
    DNS_NXDOMAIN = 3,
    DNS_NOTIMP = 4,
    DNS_REFUSED = 5,
    DNS_BADVERS = 16,
};

struct dns_query {
    uint16_t id, flags, type;
    bool edns, dnssec_ok;
    bool strange; /* has bytes that no host name has: letters, digits, '-' and '_' make one */
    uint8_t name_length, question_length;
    char name[DNS_NAME_MAX + 1]; /* lower case, without the last dot; "" for the root. Meaningless if strange */
    uint8_t question[255 + 4];   /* as it was asked, to be echoed: whoever varies its case to be sure checks that */
};

/* NOERROR: q is a question to be answered. DROP: forget it. Else what to answer, by dns_build without data. */
enum dns_code dns_parse(const uint8_t *p, size_t n, struct dns_query *q);

/* What an answer says: nothing (0), or one record of the question's type and of these bytes. */
struct dns_data {
    uint8_t length;
    uint8_t bytes[255];
};

/* The answer's length. */
size_t dns_build(const struct dns_query *q, enum dns_code code, const struct dns_data *data, uint8_t out[DNS_ANSWER_MAX]);

void dns_address(struct dns_data *data, uint32_t address); /* host byte order */
/* A name that dns_parse gave, as data of a PTR. */
void dns_pointer(struct dns_data *data, const char *name);
/* The address of `4.3.2.1.in-addr.arpa`. False: it is no such name. */
bool dns_reverse(const char *name, uint32_t *address);
/* `localhost` and all below it. */
bool dns_is_local(const char *name);
/* The last part is a number, decimal or 0x..: inet_aton takes such names as addresses and no top domain is so called. */
bool dns_is_number(const char *name);

#endif
