/* Unit tests of DNS messages and of the table of names. Run by `make test`. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "dns_message.h"
#include "names.h"

#define BYTES(text) text, sizeof text - 1
#define HEAD "\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00"
#define HEAD_EXTRA(n) "\x12\x34\x01\x20\x00\x01\x00\x00\x00\x00\x00" n
#define NAME "\x03WwW\x07" "Example\x03" "org\x00"
#define OPT "\x00\x00\x29\x10\x00\x00\x00\x00\x00\x00\x00"
#define OPT_DO "\x00\x00\x29\x10\x00\x00\x00\x80\x00\x00\x00"
#define OPT_COOKIE "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x0c\x00\x0a\x00\x08" "12345678"
#define X16 "xxxxxxxxxxxxxxxx"
#define A_IN "\x00\x01\x00\x01"

/* On the heap and exactly as long, so that the sanitizer sees any byte too far. */
static enum dns_code parse(const char *p, size_t n, struct dns_query *q)
{
    uint8_t *copy = malloc(n ? n : 1);
    enum dns_code code;

    memcpy(copy, p, n);
    code = dns_parse(copy, n, q);
    free(copy);
    return code;
}

static void test_queries(void)
{
    static const struct {
        const char *p;
        size_t n;
        enum dns_code code;
        bool edns;
    } rows[] = {
        {BYTES(HEAD NAME A_IN), DNS_NOERROR, false},
        {BYTES(HEAD "\x00" A_IN), DNS_NOERROR, false},
        {BYTES(HEAD_EXTRA("\x01") NAME A_IN OPT), DNS_NOERROR, true},
        {BYTES(HEAD_EXTRA("\x01") NAME A_IN OPT_COOKIE), DNS_NOERROR, true},
        {BYTES(HEAD_EXTRA("\x02") NAME A_IN "\xc0\x0c\x00\xfa\x00\xff\x00\x00\x00\x00\x00\x01x" OPT), DNS_NOERROR, true},
        {BYTES(HEAD_EXTRA("\x01") NAME A_IN "\x00\x00\x29\x10\x00\x00\x01\x00\x00\x00\x00"), DNS_BADVERS, true},
        /* nothing to be answered */
        {BYTES(""), DNS_DROP, false},
        {BYTES("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00"), DNS_DROP, false},
        {BYTES("\x12\x34\x81\x80\x00\x01\x00\x00\x00\x00\x00\x00" NAME A_IN), DNS_DROP, false},
        /* not one question of class IN */
        {BYTES("\x12\x34\x28\x00\x00\x01\x00\x00\x00\x00\x00\x00" NAME A_IN), DNS_NOTIMP, false},
        {BYTES("\x12\x34\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00"), DNS_NOTIMP, false},
        {BYTES("\x12\x34\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00"), DNS_FORMERR, false},
        {BYTES("\x12\x34\x01\x00\x00\x02\x00\x00\x00\x00\x00\x00" NAME A_IN NAME A_IN), DNS_FORMERR, false},
        {BYTES("\x12\x34\x01\x00\x00\x01\x00\x01\x00\x00\x00\x00" NAME A_IN), DNS_FORMERR, false},
        {BYTES("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x01\x00\x00" NAME A_IN), DNS_FORMERR, false},
        {BYTES(HEAD NAME "\x00\x10\x00\x03"), DNS_REFUSED, false},
        {BYTES(HEAD NAME "\x00\x01\x00\xff"), DNS_REFUSED, false},
        /* names */
        {BYTES(HEAD "\xc0\x0c" A_IN), DNS_FORMERR, false},
        {BYTES(HEAD "\x01" "a\xc0\x0c" A_IN), DNS_FORMERR, false},
        {BYTES(HEAD "\x41" "a" A_IN), DNS_FORMERR, false},
        {BYTES(HEAD "\x3f" "a\x00" A_IN), DNS_FORMERR, false},
        {BYTES(HEAD "\x40" X16 X16 X16 X16 "\x00" A_IN), DNS_FORMERR, false},
        {BYTES(HEAD "\x03" "abc" A_IN), DNS_FORMERR, false},
        /* what follows */
        {BYTES(HEAD NAME A_IN "x"), DNS_FORMERR, false},
        {BYTES(HEAD NAME A_IN OPT), DNS_FORMERR, false},
        {BYTES(HEAD_EXTRA("\x01") NAME A_IN), DNS_FORMERR, false},
        {BYTES(HEAD_EXTRA("\x01") NAME A_IN "\xc0"), DNS_FORMERR, false},
        {BYTES(HEAD_EXTRA("\x02") NAME A_IN OPT OPT), DNS_FORMERR, true},
        {BYTES(HEAD_EXTRA("\x01") NAME A_IN "\x01" "a" OPT), DNS_FORMERR, false},
        {BYTES(HEAD_EXTRA("\x01") NAME A_IN "\x00\x00\x29\x10\x00\x00\x00\x00\x00\x00\x01"), DNS_FORMERR, false},
        {BYTES(HEAD_EXTRA("\x05") NAME A_IN OPT OPT OPT OPT OPT), DNS_FORMERR, false},
    };
    struct dns_query q;
    uint8_t out[DNS_ANSWER_MAX];

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        enum dns_code code = parse(rows[i].p, rows[i].n, &q);
        if (code != rows[i].code || q.edns != rows[i].edns)
            fprintf(stderr, "row %zu: %d\n", i, code);
        CHECK(code == rows[i].code && q.edns == rows[i].edns);
        if (code != DNS_DROP) {
            size_t n = dns_build(&q, code, NULL, out);
            CHECK(n >= 12 && out[0] == 0x12 && out[1] == 0x34 && out[2] & 0x80 && (out[3] & 15) == (code & 15));
            CHECK((out[2] & 0x78) == (rows[i].p[2] & 0x78) && out[7] == 0);
        }
    }
    for (size_t n = 0; n + 1 < sizeof(HEAD NAME A_IN); n++) /* cut anywhere, it is no question */
        CHECK(parse(HEAD NAME A_IN, n, &q) == (n < 12 ? DNS_DROP : DNS_FORMERR));
    for (size_t n = sizeof(HEAD NAME A_IN) - 1; n + 1 < sizeof(HEAD NAME A_IN OPT_COOKIE); n++)
        CHECK(parse(HEAD_EXTRA("\x01") NAME A_IN OPT_COOKIE, n, &q) == DNS_FORMERR);
}

/* A name of labels of 63 letters and a last one that makes it `total` bytes long in a message. */
static size_t long_name(char *p, size_t total)
{
    size_t n = 0;

    while (n + 1 < total) {
        size_t label = total - n - 2 < 63 ? total - n - 2 : 63;
        p[n] = (char)label;
        memset(p + n + 1, 'x', label);
        n += 1 + label;
    }
    p[n] = 0;
    return n + 1;
}

static void test_names_in_queries(void)
{
    static const struct {
        const char *wire;
        size_t n;
        const char *name;
        bool strange;
    } rows[] = {
        {BYTES(NAME), "www.example.org", false},
        {BYTES("\x00"), "", false},
        {BYTES("\x02" "db\x00"), "db", false},
        {BYTES("\x06" "_x-Y_9\x01" "A\x00"), "_x-y_9.a", false},
        {BYTES("\x03" "a.b\x03" "com\x00"), NULL, true}, /* a dot within a label is no border of labels */
        {BYTES("\x03" "a\0b\x03" "com\x00"), NULL, true},
        {BYTES("\x03" "a b\x00"), NULL, true},
        {BYTES("\x01" "*\x03" "com\x00"), NULL, true},
        {BYTES("\x02\xc3\xa4\x00"), NULL, true},
        {BYTES("\x03" "a\\b\x00"), NULL, true},
        {BYTES("\x03" "a/b\x00"), NULL, true},
    };
    char message[12 + 300] = HEAD;
    struct dns_query q;
    uint8_t out[DNS_ANSWER_MAX];
    struct dns_data data;

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        memcpy(message + 12, rows[i].wire, rows[i].n);
        memcpy(message + 12 + rows[i].n, A_IN, 4);
        CHECK(parse(message, 12 + rows[i].n + 4, &q) == DNS_NOERROR && q.strange == rows[i].strange && q.type == DNS_A);
        CHECK(rows[i].strange || (!strcmp(q.name, rows[i].name) && q.name_length == strlen(rows[i].name)));
        CHECK(dns_build(&q, DNS_NXDOMAIN, NULL, out) == 12 + rows[i].n + 4);
        CHECK(!memcmp(out + 12, message + 12, rows[i].n + 4)); /* echoed as it was asked */
    }
    for (size_t total = 250; total < 260; total++) {
        size_t n = long_name(message + 12, total);
        memcpy(message + 12 + n, A_IN, 4);
        CHECK(n == total && parse(message, 12 + n + 4, &q) == (total <= 255 ? DNS_NOERROR : DNS_FORMERR));
        if (total <= 255) {
            CHECK(q.name_length == total - 2 && strlen(q.name) == total - 2);
            dns_address(&data, 0xc6120001);
            CHECK(dns_build(&q, DNS_NOERROR, &data, out) == 12 + total + 4 + 16);
            dns_pointer(&data, q.name);
            CHECK(data.length == total && !memcmp(data.bytes, message + 12, total));
        }
    }
}

static void test_answers(void)
{
    static const char a[] = "\x12\x34\x81\x80\x00\x01\x00\x01\x00\x00\x00\x00" NAME A_IN
                            "\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\xc6\x12\x00\x07";
    static const char none[] = "\x12\x34\x81\x90\x00\x01\x00\x00\x00\x00\x00\x01" NAME "\x00\x1c\x00\x01"
                               "\x00\x00\x29\x04\xd0\x00\x00\x80\x00\x00\x00";
    static const char version[] = "\x12\x34\x81\x80\x00\x01\x00\x00\x00\x00\x00\x01" NAME A_IN
                                  "\x00\x00\x29\x04\xd0\x01\x00\x00\x00\x00\x00";
    static const char ptr[] = "\x12\x34\x81\x80\x00\x01\x00\x01\x00\x00\x00\x00"
                              "\x01" "7\x01" "0\x02" "18\x03" "198\x07in-addr\x04" "arpa\x00\x00\x0c\x00\x01"
                              "\xc0\x0c\x00\x0c\x00\x01\x00\x00\x00\x3c\x00\x05\x01" "a\x01" "b\x00";
    struct dns_query q;
    struct dns_data data;
    uint8_t out[DNS_ANSWER_MAX];

    parse(BYTES(HEAD NAME A_IN), &q);
    dns_address(&data, 0xc6120007);
    CHECK(dns_build(&q, DNS_NOERROR, &data, out) == sizeof a - 1 && !memcmp(out, a, sizeof a - 1));
    CHECK(dns_build(&q, DNS_NXDOMAIN, &data, out) == sizeof a - 1 - 16 && out[3] == 0x83); /* an error carries no data */
    CHECK(parse(BYTES("\x12\x34\x01\x30\x00\x01\x00\x00\x00\x00\x00\x01" NAME "\x00\x1c\x00\x01" OPT_DO), &q) == DNS_NOERROR);
    CHECK(dns_build(&q, DNS_NOERROR, NULL, out) == sizeof none - 1 && !memcmp(out, none, sizeof none - 1));
    parse(BYTES(HEAD_EXTRA("\x01") NAME A_IN "\x00\x00\x29\x10\x00\x00\x07\x00\x00\x00\x00"), &q);
    CHECK(dns_build(&q, DNS_BADVERS, NULL, out) == sizeof version - 1 && !memcmp(out, version, sizeof version - 1));
    parse(BYTES(HEAD "\x01" "7\x01" "0\x02" "18\x03" "198\x07in-addr\x04" "arpa\x00\x00\x0c\x00\x01"), &q);
    dns_pointer(&data, "a.b");
    CHECK(dns_build(&q, DNS_NOERROR, &data, out) == sizeof ptr - 1 && !memcmp(out, ptr, sizeof ptr - 1));
}

static void test_kinds_of_names(void)
{
    static const char *const numbers[] = {"1.2.3.4", "10", "0x7f000001", "0x", "a.1", "127.1", "1.0xff", "0"};
    static const char *const words[] = {"", "a", "1.2.3.4.com", "1a", "0xg", "a.1b", "x0", "10-0"};
    static const char *const local[] = {"localhost", "a.localhost", "a.b.localhost"};
    static const char *const remote[] = {"", "localhos", "alocalhost", "localhost.a", "ocalhost"};
    static const char *const no_reverse[] = {"4.3.2.in-addr.arpa",      "4.3.2.1.in-addr.arp", "4.3.2.1.in-addr.arpa.x",
                                             "256.3.2.1.in-addr.arpa",  "0004.3.2.1.in-addr.arpa", "4.3.2.1.ip6.arpa",
                                             "-4.3.2.1.in-addr.arpa",   ".3.2.1.in-addr.arpa", "in-addr.arpa",
                                             "5.4.3.2.1.in-addr.arpa",  "", "4.3.2.1"};
    uint32_t address;

    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        CHECK(dns_is_number(numbers[i]));
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        CHECK(!dns_is_number(words[i]));
    for (size_t i = 0; i < sizeof local / sizeof *local; i++)
        CHECK(dns_is_local(local[i]));
    for (size_t i = 0; i < sizeof remote / sizeof *remote; i++)
        CHECK(!dns_is_local(remote[i]));
    for (size_t i = 0; i < sizeof no_reverse / sizeof *no_reverse; i++)
        CHECK(!dns_reverse(no_reverse[i], &address));
    CHECK(dns_reverse("4.3.2.1.in-addr.arpa", &address) && address == 0x01020304);
    CHECK(dns_reverse("255.0.19.198.in-addr.arpa", &address) && address == 0xc61300ff);
}

static void test_table(void)
{
    char name[300], again[300];
    uint32_t first = names_give("a.example", 9);

    CHECK(first == 0xc6120001 && names_give("a.example", 9) == first && names_give("b.example", 9) == first + 1);
    CHECK(!strcmp(names_find(first), "a.example") && !strcmp(names_find(first + 1), "b.example"));
    CHECK(!names_find(first - 1) && !names_find(first + 2) && !names_find(0) && !names_find(UINT32_MAX));
    CHECK(names_known("a.example", 9, 0) == 0);
    names_good(first, 100);
    CHECK(names_known("a.example", 9, 99) == first && !names_known("a.example", 9, 100) && !names_known("b.example", 9, 0));
    names_good(first + 5, 100); /* nobody's */
    names_stale();
    CHECK(!names_known("a.example", 9, 0) && names_give("a.example", 9) == first);
    memset(name, 'x', sizeof name);
    CHECK(!names_give(name, 0) && !names_give(name, 254) && names_give(name, 253) == first + 2);
    CHECK(strlen(names_find(first + 2)) == 253);
    CHECK(names_give("a.exampl", 8) == first + 3); /* another name, not the beginning of one */
    for (uint32_t i = 4; i < NAMES_MAX; i++) {
        int n = snprintf(name, sizeof name, "n%u.example", i);
        CHECK(names_give(name, (size_t)n) == first + i);
    }
    CHECK(!names_give("one.more", 8) && names_give("a.example", 9) == first && first + NAMES_MAX - 1 < 0xc613ffff);
    for (uint32_t i = 4; i < NAMES_MAX; i++) { /* nothing has moved */
        int n = snprintf(again, sizeof again, "n%u.example", i);
        CHECK(names_give(again, (size_t)n) == first + i && !strcmp(names_find(first + i), again));
    }
}

int main(void)
{
    test_queries();
    test_names_in_queries();
    test_answers();
    test_kinds_of_names();
    test_table();
    return checked("DNS messages and names");
}
