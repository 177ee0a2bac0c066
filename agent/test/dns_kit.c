/* See dns_kit.h. The build wraps now_ns. */
#define _GNU_SOURCE
#include "dns_kit.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "dns.h"
#include "net.h"

int agent_dns_fd = -1, agent_dns_tcp_fd = -1;
int64_t __real_now_ns(void);
int64_t __wrap_now_ns(void);
int64_t ahead;

int64_t __wrap_now_ns(void)
{
    return __real_now_ns() + ahead;
}

/* -- the host: streams that were opened to it */

struct asked asked[ASKED_MAX];
unsigned asked_count, abandoned;
bool no_streams;

struct stream *stream_open(const struct fw *w, const struct stream_ops *ops, void *ctx)
{
    struct asked *a = &asked[asked_count];
    struct fields f;
    const char *why;

    if (no_streams)
        return NULL;
    CHECK(!w->overflow && fields_parse(w->p, w->len, TAG_BIT(TAG_OP) | TAG_BIT(TAG_NAME) | TAG_BIT(TAG_FLAGS), &f, &why) == 0);
    CHECK(fields_int(&f, TAG_OP, 0) == OP_RESOLVE && asked_count < ASKED_MAX);
    snprintf(a->name, sizeof a->name, "%.*s", (int)f.text[TAG_NAME].len, (const char *)f.text[TAG_NAME].p);
    a->stream = (struct stream){.id = 2 + 2 * asked_count, .ops = ops, .ctx = ctx};
    a->flags = fields_int(&f, TAG_FLAGS, 0);
    a->open = true;
    asked_count++;
    return &a->stream;
}

void stream_gone(struct asked *a)
{
    a->open = false;
    a->stream.ops->release(&a->stream);
    memset(&a->stream, 0xee, sizeof a->stream);
}

void stream_abandon(struct stream *s)
{
    abandoned++;
    stream_gone(OWNER(s, struct asked, stream));
}

void host_says(const char *name, int error)
{
    uint8_t buf[32];
    struct fw w = {buf, 0, sizeof buf, false};
    struct fields f;
    const char *why;
    unsigned found = 0;

    if (error)
        fw_int(&w, TAG_ERRNO, error);
    CHECK(fields_parse(buf, w.len, TAG_BIT(TAG_ERRNO), &f, &why) == 0);
    for (unsigned i = 0; i < asked_count; i++)
        if (asked[i].open && !strcmp(asked[i].name, name)) {
            asked[i].stream.ops->closed(&asked[i].stream, &f);
            stream_gone(&asked[i]);
            found++;
        }
    if (found != 1)
        fprintf(stderr, "%s: %u\n", name, found);
    CHECK(found == 1);
}

/* -- the network: no address is rewritten here */

ssize_t net_dns_receive(void *question, size_t size, struct net_asker *asker)
{
    socklen_t length = sizeof asker->from;

    asker->asked.s_addr = 0;
    return recvfrom(agent_dns_fd, question, size, MSG_DONTWAIT, (struct sockaddr *)&asker->from, &length);
}

ssize_t net_dns_answer(const void *answer, size_t size, const struct net_asker *asker)
{
    return sendto(agent_dns_fd, answer, size, MSG_DONTWAIT, (const struct sockaddr *)&asker->from, sizeof asker->from);
}

/* -- programs */

void turn(void)
{
    loop_wait(0);
    dns_timers(now_ns());
}

void turns(void)
{
    for (int i = 0; i < 20; i++)
        turn();
}

int client(int type)
{
    struct sockaddr_in to;
    socklen_t n = sizeof to;
    int fd = socket(AF_INET, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), size = 4096;

    if (type == SOCK_STREAM) /* so that it is soon full */
        CHECK(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size) == 0 &&
              setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size) == 0);
    getsockname(type == SOCK_STREAM ? agent_dns_tcp_fd : agent_dns_fd, (struct sockaddr *)&to, &n);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) < 0)
        CHECK(errno == EINPROGRESS);
    return fd;
}

size_t question(uint8_t *p, uint16_t id, const char *name, uint16_t type)
{
    struct dns_data labels;

    dns_pointer(&labels, name);
    memcpy(p, "\0\0\1\0\0\1\0\0\0\0\0\0", 12);
    p[0] = (uint8_t)(id >> 8);
    p[1] = (uint8_t)id;
    memcpy(p + 12, labels.bytes, labels.length);
    memcpy(p + 12 + labels.length, (uint8_t[]){(uint8_t)(type >> 8), (uint8_t)type, 0, 1}, 4);
    return 12u + labels.length + 4;
}

void ask(int fd, uint16_t id, const char *name, uint16_t type)
{
    uint8_t p[512];
    size_t n = question(p, id, name, type);

    CHECK(send(fd, p, n, 0) == (ssize_t)n);
}

int answer(int fd, uint16_t *id, uint32_t *address)
{
    uint8_t p[1024];
    ssize_t n = recv(fd, p, sizeof p, MSG_DONTWAIT);

    *address = 0;
    if (n < 12)
        return -1;
    CHECK(n <= 512 && p[2] & 0x80 && !(p[2] & 2));
    *id = (uint16_t)(p[0] << 8 | p[1]);
    if (p[7]) /* in this test the last 4 bytes are enough */
        *address = (uint32_t)p[n - 4] << 24 | (uint32_t)p[n - 3] << 16 | (uint32_t)p[n - 2] << 8 | p[n - 1];
    return p[3] & 15;
}

int at_once(const char *name, uint16_t type, uint32_t *address)
{
    int fd = client(SOCK_DGRAM), code;
    unsigned before = asked_count;
    uint16_t id = 0;

    ask(fd, 77, name, type);
    turns();
    code = answer(fd, &id, address);
    CHECK(asked_count == before && (code < 0 || id == 77));
    close(fd);
    return code;
}

int told(const char *name, uint16_t type, int error, uint32_t *address)
{
    int fd = client(SOCK_DGRAM), code;
    uint16_t id = 0;

    ask(fd, 78, name, type);
    turns();
    CHECK(answer(fd, &id, address) == -1);
    host_says(name, error);
    turns();
    code = answer(fd, &id, address);
    CHECK(code < 0 || id == 78);
    close(fd);
    ahead += SECOND / 5; /* nothing of it is remembered but an address */
    return code;
}

void dns_kit_begin(void)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};

    CHECK(loop_init() == 0 && dns_begin() == -1);
    agent_dns_fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    agent_dns_tcp_fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    CHECK(bind(agent_dns_fd, (struct sockaddr *)&any, sizeof any) == 0);
    CHECK(bind(agent_dns_tcp_fd, (struct sockaddr *)&any, sizeof any) == 0 && listen(agent_dns_tcp_fd, 64) == 0);
    CHECK(dns_begin() == 0);
}
