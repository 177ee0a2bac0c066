/* The name server: what is answered to which question, and UDP. See dns.h and docs/adr/0051-dns.md. */
#define _GNU_SOURCE
#include "dns.h"

#include <sys/epoll.h>

#include "dns_server.h"
#include "names.h"

#define PER_TURN 64 /* datagrams: the rest waits in the kernel, or is dropped by it */

static struct source udp_source = {.fd = -1};

static void send_answer(const struct dns_client *client, const struct dns_query *q, enum dns_code code,
                        const struct dns_data *data)
{
    uint8_t out[DNS_ANSWER_MAX];
    size_t n = dns_build(q, code, data, out);

    if (client->conn)
        conns_answer(client->conn, out, n);
    else /* who does not read his answers loses them */
        (void)net_dns_answer(out, n, &client->asker);
}

void dns_finish(const struct dns_client *client, const struct dns_query *q, enum dns_code code, uint32_t address)
{
    struct dns_data data = {0};

    if (code == DNS_NOERROR && q->type == DNS_A)
        dns_address(&data, address);
    send_answer(client, q, code, &data);
}

static bool asks_for_host(const struct dns_query *q)
{
    return q->type == DNS_A || q->type == DNS_AAAA || q->type == DNS_SVCB || q->type == DNS_HTTPS;
}

static enum dns_code answer_local(const struct dns_query *q, struct dns_data *data)
{
    if (q->type == DNS_A)
        dns_address(data, INADDR_LOOPBACK);
    if (q->type == DNS_AAAA)
        *data = (struct dns_data){.length = 16, .bytes = {[15] = 1}};
    return DNS_NOERROR;
}

static enum dns_code answer_reverse(const struct dns_query *q, struct dns_data *data)
{
    uint32_t address;
    const char *name = dns_reverse(q->name, &address) ? names_find(address) : NULL;

    if (!name)
        return DNS_NXDOMAIN;
    dns_pointer(data, name);
    return DNS_NOERROR;
}

/* What can be said without the host. False: it must be asked. */
static bool answer_now(const struct dns_query *q, enum dns_code *code, struct dns_data *data)
{
    uint32_t address;

    *code = DNS_NOERROR;
    if (q->strange || dns_is_number(q->name)) {
        *code = DNS_NXDOMAIN;
    } else if (q->type == DNS_PTR) {
        *code = answer_reverse(q, data);
    } else if (dns_is_local(q->name)) {
        *code = answer_local(q, data);
    } else if (asks_for_host(q) && q->name_length) { /* of all other types nothing exists, and nobody is asked: no tunnel */
        address = names_known(q->name, q->name_length, (uint32_t)(now_ns() / (1000 * MSEC)));
        if (!address && !asks_none(q))
            return false;
        if (!address)
            *code = DNS_NXDOMAIN;
        else if (q->type == DNS_A)
            dns_address(data, address);
    }
    return true;
}

enum dns_fate dns_take(const struct dns_client *client, const uint8_t *p, size_t n)
{
    static struct dns_query q;
    struct dns_data data = {0};
    enum dns_code code = dns_parse(p, n, &q);

    if (code == DNS_DROP)
        return DNS_IGNORED;
    if (code == DNS_NOERROR && !answer_now(&q, &code, &data)) {
        if (asks_wait(client, &q))
            return DNS_WAITS;
        code = DNS_SERVFAIL;
    }
    send_answer(client, &q, code, &data);
    return DNS_ANSWERED;
}

static void on_datagrams(struct source *src, uint32_t events)
{
    static uint8_t in[DNS_QUERY_MAX + 1]; /* one more, to know what is too long */

    (void)src;
    (void)events;
    for (int i = 0; i < PER_TURN; i++) {
        struct dns_client client = {0};
        ssize_t n = net_dns_receive(in, sizeof in, &client.asker);

        if (n < 0)
            return;
        dns_take(&client, in, (size_t)n);
    }
}

int dns_begin(void)
{
    names_stale(); /* the host may be another one than before */
    if (agent_dns_fd < 0 || agent_dns_tcp_fd < 0)
        return -1;
    if (udp_source.fd < 0 && loop_add(&udp_source, agent_dns_fd, EPOLLIN, on_datagrams) < 0)
        return -1;
    return conns_begin(agent_dns_tcp_fd);
}

void dns_serve_tcp(int fd)
{
    conns_serve(fd);
}

int64_t dns_timers(int64_t now)
{
    return earlier(asks_timers(now), conns_timers(now));
}
