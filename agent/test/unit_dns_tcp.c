/* Unit tests of the name server's TCP connections. Run by `make test`. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "dns.h"
#include "dns_kit.h"
#include "names.h"

#define X50 "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"

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

static int open_fds(void)
{
    int count = 0;

    for (int fd = 0; fd < 1000; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

/* Who asks and never reads stops itself only. */
static void test_tcp_that_does_not_read(void)
{
    uint8_t p[600];
    size_t n = message(p, 1, "localhost", DNS_A), sent = 0;
    int fd = client(SOCK_STREAM), before = open_fds(), idle = 0;
    uint32_t address;

    turns();
    CHECK(open_fds() == before + 1);
    while (idle < 1000) {
        ssize_t m = send(fd, p + sent % n, n - sent % n, MSG_DONTWAIT);
        sent += m > 0 ? (size_t)m : 0;
        idle = m > 0 ? 0 : idle + 1;
        turn();
    }
    CHECK(sent > 10000 && at_once("localhost", DNS_A, &address) == DNS_NOERROR);
    for (int i = 0; i < 1000 && open_fds() > before; i++) { /* as long as the kernel still moves some bytes, it goes on */
        ahead += 11 * SECOND;
        turns();
    }
    CHECK(open_fds() == before);
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

int main(void)
{
    dns_kit_begin();
    test_tcp();
    test_tcp_many_at_once();
    test_tcp_that_is_none();
    test_tcp_that_does_not_read();
    test_tcp_bounds();
    return checked("the name server's connections");
}
