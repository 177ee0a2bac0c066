/* Unit tests of the name server: what it answers, by UDP, and what it asks the host. Run by `make test`. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "dns.h"
#include "dns_kit.h"
#include "names.h"

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

    ahead += 50 * SECOND;
    CHECK(at_once("two.example", DNS_A, &address) == DNS_NOERROR && address == 0xc6120002);
    ahead += 11 * SECOND;
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

/* The second half of a lookup may come a moment after the first is answered. */
static void test_that_there_is_none_is_shared_too(void)
{
    uint32_t address;

    CHECK(told("half.example", DNS_A, ENOENT, &address) == DNS_NXDOMAIN);
    ahead -= SECOND / 5;
    CHECK(at_once("half.example", DNS_AAAA, &address) == DNS_NXDOMAIN && at_once("half.example", DNS_A, &address) == DNS_NXDOMAIN);
    no_streams = true;
    for (int i = 0; i < 2; i++) /* what could not be asked is nothing known */
        CHECK(at_once("other.example", DNS_A, &address) == DNS_SERVFAIL);
    no_streams = false;
    ahead += SECOND / 5;
    CHECK(told("half.example", DNS_A, 0, &address) == DNS_NOERROR && address);
    CHECK(told("busy.example", DNS_A, EAGAIN, &address) == DNS_SERVFAIL);
    ahead -= SECOND / 5;
    CHECK(told("busy.example", DNS_A, 0, &address) == DNS_NOERROR); /* who tries again means it */
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

static void test_full_table(void)
{
    char name[40];
    uint32_t address;

    for (int i = 0; i < NAMES_MAX; i++)
        names_give(name, (size_t)snprintf(name, sizeof name, "fill%d", i));
    CHECK(told("too.many.example", DNS_A, 0, &address) == DNS_SERVFAIL);
    CHECK(asked[asked_count - 1].flags == RESOLVE_FLAG_FULL); /* the host knows why */
    CHECK(told("fill3", DNS_A, 0, &address) == DNS_NOERROR && !strcmp(names_find(address), "fill3"));
    CHECK(!asked[asked_count - 1].flags);
}

int main(void)
{
    dns_kit_begin();
    test_what_is_answered();
    test_names_are_asked_for_again();
    test_who_waits_for_the_same_shares();
    test_that_there_is_none_is_shared_too();
    test_bounds();
    test_restored();
    test_too_long();
    test_full_table();
    return checked("the name server");
}
