/* Unit tests of the name server over real sockets of this machine's loopback, with a host that the tests play and a clock that
 * they turn. Run by `make test`. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "dns.h"
#include "dns_message.h"
#include "loop.h"
#include "names.h"
#include "net.h"
#include "wire.h"

#define X50 "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
#define SECOND (1000 * MSEC)

int agent_dns_fd = -1, agent_dns_tcp_fd = -1;
int64_t __real_now_ns(void);
int64_t __wrap_now_ns(void);
static int64_t ahead; /* of the real clock */

int64_t __wrap_now_ns(void)
{
    return __real_now_ns() + ahead;
}

/* -- the host: streams that were opened to it */

static struct asked {
    struct stream stream;
    bool open;
    char name[DNS_NAME_MAX + 1];
} asked[1024];
static unsigned asked_count, abandoned;
static bool no_streams;

struct stream *stream_open(const struct fw *w, const struct stream_ops *ops, void *ctx)
{
    struct asked *a = &asked[asked_count];
    struct fields f;
    const char *why;

    if (no_streams)
        return NULL;
    CHECK(!w->overflow && fields_parse(w->p, w->len, TAG_BIT(TAG_OP) | TAG_BIT(TAG_NAME), &f, &why) == 0);
    CHECK(fields_int(&f, TAG_OP, 0) == OP_RESOLVE && asked_count < sizeof asked / sizeof *asked);
    snprintf(a->name, sizeof a->name, "%.*s", (int)f.text[TAG_NAME].len, (const char *)f.text[TAG_NAME].p);
    a->stream = (struct stream){.id = 2 + 2 * asked_count, .ops = ops, .ctx = ctx};
    a->open = true;
    asked_count++;
    return &a->stream;
}

static void stream_gone(struct asked *a)
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

/* The host answers what was asked for this name. */
static void host_says(const char *name, int error)
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

static void turn(void)
{
    loop_wait(0);
    dns_timers(now_ns());
}

static void turns(void)
{
    for (int i = 0; i < 20; i++)
        turn();
}

static int client(int type)
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

static size_t question(uint8_t *p, uint16_t id, const char *name, uint16_t type)
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

static void ask(int fd, uint16_t id, const char *name, uint16_t type)
{
    uint8_t p[512];
    size_t n = question(p, id, name, type);

    CHECK(send(fd, p, n, 0) == (ssize_t)n);
}

/* The next answer: its code, and with an address or a name in it that. -1: there is none. */
static int answer(int fd, uint16_t *id, uint32_t *address)
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

/* One question whose answer needs no host. */
static int at_once(const char *name, uint16_t type, uint32_t *address)
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

/* One question, and what the host says to it. */
static int told(const char *name, uint16_t type, int error, uint32_t *address)
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
    return code;
}

static void test_what_is_answered(void)
{
    uint32_t address;

    CHECK(told("one.example", DNS_A, 0, &address) == DNS_NOERROR && address == 0xc6120001);
    CHECK(at_once("one.example", DNS_A, &address) == DNS_NOERROR && address == 0xc6120001);
    CHECK(at_once("one.example", DNS_AAAA, &address) == DNS_NOERROR && !address);
    CHECK(at_once("one.example", DNS_HTTPS, &address) == DNS_NOERROR && !address);
    CHECK(told("two.example", DNS_AAAA, 0, &address) == DNS_NOERROR && !address);
    CHECK(at_once("two.example", DNS_A, &address) == DNS_NOERROR && address == 0xc6120002);
    CHECK(told("none.example", DNS_A, ENOENT, &address) == DNS_NXDOMAIN && !address);
    CHECK(told("none.example", DNS_AAAA, ENOENT, &address) == DNS_NXDOMAIN);
    CHECK(told("none.example", DNS_SVCB, EAGAIN, &address) == DNS_SERVFAIL);
    CHECK(told("none.example", DNS_HTTPS, EACCES, &address) == DNS_REFUSED);
    CHECK(told("none.example", DNS_A, EMFILE, &address) == DNS_SERVFAIL);
    CHECK(at_once("localhost", DNS_A, &address) == DNS_NOERROR && address == 0x7f000001);
    CHECK(at_once("x.localhost", DNS_AAAA, &address) == DNS_NOERROR && address == 1);
    CHECK(at_once("localhost", 15, &address) == DNS_NOERROR && !address);
    CHECK(at_once("1.2.3.4", DNS_A, &address) == DNS_NXDOMAIN);
    CHECK(at_once("", DNS_A, &address) == DNS_NOERROR && !address);
    CHECK(at_once("sp ace.example", DNS_A, &address) == DNS_NXDOMAIN);
    CHECK(at_once("2.0.18.198.in-addr.arpa", DNS_PTR, &address) == DNS_NOERROR && address == 0x706c6500); /* "ple" */
    CHECK(at_once("3.0.18.198.in-addr.arpa", DNS_PTR, &address) == DNS_NXDOMAIN);
    CHECK(at_once("8.8.8.8.in-addr.arpa", DNS_PTR, &address) == DNS_NXDOMAIN);
    for (uint16_t type = 0; type < 300; type++) /* nothing about these ever leaves the sandbox */
        if (type != DNS_A && type != DNS_AAAA && type != DNS_PTR && type != DNS_SVCB && type != DNS_HTTPS)
            CHECK(at_once("secret.evil.example", type, &address) == DNS_NOERROR && !address);
}

static void test_names_are_asked_for_again(void)
{
    uint32_t address;

    ahead += 59 * SECOND;
    CHECK(at_once("two.example", DNS_A, &address) == DNS_NOERROR && address == 0xc6120002);
    ahead += 2 * SECOND;
    CHECK(told("two.example", DNS_A, ENOENT, &address) == DNS_NXDOMAIN && !address);
    CHECK(!strcmp(names_find(0xc6120002), "two.example"));
    CHECK(told("three.example", DNS_A, 0, &address) == DNS_NOERROR && address == 0xc6120003);
    CHECK(told("two.example", DNS_A, 0, &address) == DNS_NOERROR && address == 0xc6120002);
}

static void test_who_waits_for_the_same_shares(void)
{
    int one = client(SOCK_DGRAM), two = client(SOCK_DGRAM);
    unsigned before = asked_count;
    uint16_t id;
    uint32_t address, seen = 0;

    for (int i = 0; i < 3; i++) { /* the second and third time are the same programs' patience */
        ask(one, 1, "shared.example", DNS_A);
        ask(one, 2, "ShaRed.Example", DNS_AAAA);
        ask(two, 1, "shared.example", DNS_A);
        turns();
    }
    CHECK(asked_count == before + 1);
    host_says("shared.example", 0);
    turns();
    for (int i = 0; i < 2; i++) {
        CHECK(answer(one, &id, &address) == DNS_NOERROR && (id == 1) == (address != 0));
        seen |= 1u << id;
    }
    CHECK(seen == 6 && answer(one, &id, &address) == -1);
    CHECK(answer(two, &id, &address) == DNS_NOERROR && address && answer(two, &id, &address) == -1);
    close(one);
    close(two);
}

static void test_bounds(void)
{
    int fd = client(SOCK_DGRAM), size = 1 << 20;
    char name[40];
    uint16_t id;
    uint32_t address;
    unsigned before = asked_count, answers = 0;

    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
    for (uint16_t i = 0; i < 256; i++) {
        snprintf(name, sizeof name, "n%u.example", i);
        ask(fd, i, name, DNS_A);
        turn();
    }
    turns();
    CHECK(asked_count == before + 256 && answer(fd, &id, &address) == -1);
    CHECK(at_once("one.more.example", DNS_A, &address) == DNS_SERVFAIL);
    CHECK(at_once("n1.example", DNS_A, &address) == DNS_SERVFAIL);
    CHECK(at_once("localhost", DNS_A, &address) == DNS_NOERROR); /* what needs nobody is answered */
    host_says("n7.example", ENOENT);
    CHECK(answer(fd, &id, &address) == DNS_NXDOMAIN && id == 7);
    CHECK(told("one.more.example", DNS_A, ENOENT, &address) == DNS_NXDOMAIN);
    ahead += 9 * SECOND;
    turns();
    CHECK(answer(fd, &id, &address) == -1 && !abandoned);
    ahead += 2 * SECOND;
    turns();
    for (; answer(fd, &id, &address) == DNS_SERVFAIL; answers++)
        ;
    CHECK(answers == 255 && abandoned == 255);
    no_streams = true;
    CHECK(at_once("one.more.example", DNS_A, &address) == DNS_SERVFAIL);
    no_streams = false;
    CHECK(told("one.more.example", DNS_A, ENOENT, &address) == DNS_NXDOMAIN);
    for (int i = 0; i < 150; i++)
        ask(fd, 9, "localhost", DNS_A);
    for (int part = 0; part < 3; part++) { /* whoever floods us has not all of our time */
        turn();
        for (answers = 0; answer(fd, &id, &address) == DNS_NOERROR; answers++)
            ;
        CHECK(answers == (part < 2 ? 64 : 22));
    }
    close(fd);
}

static void test_restored(void)
{
    int fd = client(SOCK_DGRAM);
    uint16_t id;
    uint32_t address;
    unsigned before;

    CHECK(told("one.example", DNS_A, 0, &address) == DNS_NOERROR && at_once("one.example", DNS_A, &address) == DNS_NOERROR);
    ask(fd, 5, "restored.example", DNS_A);
    turns();
    stream_gone(&asked[asked_count - 1]); /* as wire_forget does */
    before = asked_count;
    CHECK(dns_begin() == 0 && asked_count == before); /* not before HELLO is answered */
    turns();
    CHECK(asked_count == before + 1 && answer(fd, &id, &address) == -1);
    CHECK(told("one.example", DNS_A, 0, &address) == DNS_NOERROR && address == 0xc6120001); /* kept, but asked for */
    host_says("restored.example", 0);
    CHECK(answer(fd, &id, &address) == DNS_NOERROR && id == 5 && !strcmp(names_find(address), "restored.example"));
    close(fd);
}

/* Cut to what we take, this would be a question. */
static void test_too_long(void)
{
    int fd = client(SOCK_DGRAM);
    uint8_t p[DNS_QUERY_MAX + 1] = {0};
    size_t n = question(p, 6, "localhost", DNS_A), rest = DNS_QUERY_MAX - n - 11;
    uint16_t id;
    uint32_t address;

    p[11] = 1;
    p[n + 2] = 99; /* a record of some type */
    p[n + 9] = (uint8_t)(rest >> 8);
    p[n + 10] = (uint8_t)rest;
    CHECK(send(fd, p, sizeof p, 0) == sizeof p);
    turns();
    CHECK(answer(fd, &id, &address) == -1);
    CHECK(send(fd, p, sizeof p - 1, 0) == sizeof p - 1);
    turns();
    CHECK(answer(fd, &id, &address) == DNS_NOERROR && id == 6);
    close(fd);
}

/* -- TCP */

static size_t message(uint8_t *p, uint16_t id, const char *name, uint16_t type)
{
    size_t n = question(p + 2, id, name, type);

    p[0] = (uint8_t)(n >> 8);
    p[1] = (uint8_t)n;
    return n + 2;
}

/* The next answer's id; 0: none yet; -1: closed. */
static int tcp_answer(int fd)
{
    uint8_t p[2 + 512];
    ssize_t n = recv(fd, p, 2, MSG_DONTWAIT);

    if (n < 0)
        return errno == EAGAIN ? 0 : -1;
    if (n == 0)
        return -1;
    n = p[0] << 8 | p[1];
    CHECK(n >= 12 && n <= 512 && recv(fd, p + 2, (size_t)n, MSG_DONTWAIT) == n);
    return p[2] << 8 | p[3];
}

static void test_tcp(void)
{
    uint8_t p[4096];
    size_t n = 0;
    int fd = client(SOCK_STREAM), pair[2];

    turns();
    for (uint16_t i = 1; i <= 30; i++)
        n += message(p + n, i, "localhost", DNS_A);
    CHECK(send(fd, p, n, 0) == (ssize_t)n);
    turns();
    for (int i = 1; i <= 30; i++)
        CHECK(tcp_answer(fd) == i);
    n = message(p, 31, "tcp.example", DNS_A);
    for (size_t i = 0; i < n; i++) { /* in the smallest pieces */
        CHECK(send(fd, p + i, 1, 0) == 1 && tcp_answer(fd) == 0);
        turn();
    }
    n = message(p, 32, "localhost", DNS_A);
    n += message(p + n, 33, "tcp.example", DNS_AAAA);
    CHECK(send(fd, p, n, 0) == (ssize_t)n && shutdown(fd, SHUT_WR) == 0);
    turns();
    CHECK(tcp_answer(fd) == 32 && tcp_answer(fd) == 0); /* no later one waits for an earlier */
    host_says("tcp.example", 0);
    turns();
    CHECK(tcp_answer(fd) == 31 && tcp_answer(fd) == 33 && tcp_answer(fd) == -1);
    close(fd);

    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    dns_serve_tcp(pair[1]);
    CHECK(send(pair[0], p, n, 0) == (ssize_t)n);
    turns();
    CHECK(tcp_answer(pair[0]) == 32 && tcp_answer(pair[0]) == 33);
    close(pair[0]);
    turns();
}

/* Eight answers at most are owed at once: the other questions wait unread, and get theirs. */
static void test_tcp_many_at_once(void)
{
    uint8_t p[2048];
    char name[40];
    size_t n = 0;
    unsigned before = asked_count, answered = 0;
    int fd = client(SOCK_STREAM), id;
    uint32_t address;
    static const char longest[] = X50 "." X50 "." X50 "." X50 ".example";

    turns();
    for (uint16_t i = 0; i < 20; i++) {
        snprintf(name, sizeof name, "many%u.example", i);
        n += message(p + n, (uint16_t)(100 + i), name, DNS_A);
    }
    CHECK(send(fd, p, n, 0) == (ssize_t)n);
    turns();
    CHECK(asked_count == before + 8);
    for (int i = 0; i < 20; i++) {
        snprintf(name, sizeof name, "many%d.example", i);
        host_says(name, ENOENT);
        turns();
        CHECK(asked_count <= before + 9 + (unsigned)i);
    }
    while ((id = tcp_answer(fd)) > 0)
        CHECK(id == (int)(100 + answered++));
    CHECK(answered == 20 && asked_count == before + 20);
    address = names_give(longest, sizeof longest - 1);
    snprintf(name, sizeof name, "%u.%u.18.198.in-addr.arpa", address & 255, address >> 8 & 255);
    for (n = 0, answered = 0; answered < 20; answered++)
        n += message(p + n, (uint16_t)(200 + answered), name, DNS_PTR);
    CHECK(send(fd, p, n, 0) == (ssize_t)n); /* much longer answers than questions */
    turns();
    for (int i = 0; i < 20; i++)
        CHECK(tcp_answer(fd) == 200 + i);
    close(fd);
    turns();
}

static void test_tcp_that_is_none(void)
{
    static const struct {
        const char *p;
        size_t n;
    } rows[] = {{"\xff\xff", 2}, {"\x04\xd1", 2}, {"\x00\x00", 2}, {"\x00\x0b 2345678901", 13}, {"GET / HTTP/1.1\r\n\r\n", 18}};
    uint8_t p[600];
    size_t n;
    int fd;

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        fd = client(SOCK_STREAM);
        CHECK(send(fd, rows[i].p, rows[i].n, 0) == (ssize_t)rows[i].n);
        turns();
        CHECK(tcp_answer(fd) == -1);
        close(fd);
    }
    fd = client(SOCK_STREAM);
    n = message(p, 1, "gone.example", DNS_A);
    CHECK(send(fd, p, n, 0) == (ssize_t)n);
    turns();
    p[4] |= 0x80; /* no question */
    CHECK(send(fd, p, n, 0) == (ssize_t)n);
    turns();
    CHECK(tcp_answer(fd) == -1);
    close(fd);
    host_says("gone.example", 0); /* for nobody */
    turns();
}

/* Who asks and never reads stops itself only. */
static void test_tcp_that_does_not_read(void)
{
    uint8_t p[600];
    size_t n = message(p, 1, "localhost", DNS_A), sent = 0;
    int fd = client(SOCK_STREAM), idle = 0;
    uint32_t address;

    turns();
    while (idle < 1000) {
        ssize_t m = send(fd, p + sent % n, n - sent % n, MSG_DONTWAIT);
        sent += m > 0 ? (size_t)m : 0;
        idle = m > 0 ? 0 : idle + 1;
        turn();
    }
    CHECK(sent > 10000 && at_once("localhost", DNS_A, &address) == DNS_NOERROR);
    ahead += 11 * SECOND;
    turns();
    CHECK(send(fd, p, n, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN);
    close(fd);
}

static void test_tcp_bounds(void)
{
    int fds[40];
    uint8_t p[600];
    size_t n = message(p, 9, "localhost", DNS_A);

    for (int i = 0; i < 40; i++) {
        fds[i] = client(SOCK_STREAM);
        turn();
    }
    for (int i = 0; i < 40; i++)
        CHECK(send(fds[i], p, n, 0) == (ssize_t)n);
    turns();
    for (int i = 0; i < 40; i++)
        CHECK(tcp_answer(fds[i]) == (i < 32 ? 9 : 0));
    for (int i = 0; i < 8; i++)
        close(fds[i]);
    turns();
    for (int i = 32; i < 40; i++)
        CHECK(tcp_answer(fds[i]) == 9);
    ahead += 9 * SECOND;
    CHECK(send(fds[8], p, n, 0) == (ssize_t)n && send(fds[9], p, n - 1, 0) == (ssize_t)n - 1); /* half a question is none */
    turns();
    ahead += 2 * SECOND;
    turns();
    for (int i = 9; i < 40; i++)
        CHECK(tcp_answer(fds[i]) == -1);
    CHECK(tcp_answer(fds[8]) == 9 && tcp_answer(fds[8]) == 0);
    for (int i = 8; i < 40; i++)
        close(fds[i]);
    turns();
}

static void test_full_table(void)
{
    char name[40];
    uint32_t address;

    for (int i = 0; i < NAMES_MAX; i++)
        names_give(name, (size_t)snprintf(name, sizeof name, "fill%d", i));
    CHECK(told("too.many.example", DNS_A, 0, &address) == DNS_SERVFAIL);
    CHECK(told("fill3", DNS_A, 0, &address) == DNS_NOERROR && !strcmp(names_find(address), "fill3"));
}

int main(void)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};

    CHECK(loop_init() == 0 && dns_begin() == -1);
    agent_dns_fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    agent_dns_tcp_fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    CHECK(bind(agent_dns_fd, (struct sockaddr *)&any, sizeof any) == 0);
    CHECK(bind(agent_dns_tcp_fd, (struct sockaddr *)&any, sizeof any) == 0 && listen(agent_dns_tcp_fd, 64) == 0);
    CHECK(dns_begin() == 0);
    test_what_is_answered();
    test_names_are_asked_for_again();
    test_who_waits_for_the_same_shares();
    test_bounds();
    test_restored();
    test_too_long();
    test_tcp();
    test_tcp_many_at_once();
    test_tcp_that_is_none();
    test_tcp_that_does_not_read();
    test_tcp_bounds();
    test_full_table();
    return checked("the name server");
}
