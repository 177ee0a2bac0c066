/* Unit tests of the pure parts: frames, fields, rings, passwd. Run by `make test`. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fields.h"
#include "frames.h"
#include "guest.h"
#include "path.h"
#include "proto.h"
#include "ring.h"
#include "users.h"

struct guest guest;
static int failures;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            failures++;                                                                            \
        }                                                                                          \
    } while (0)

static int parse(uint8_t type, uint8_t channel, uint32_t stream, uint32_t length, size_t have)
{
    static uint8_t buf[WIRE_HEADER_SIZE + WIRE_MAX_OPEN];
    struct frame f;
    const char *why;
    size_t used = 0;
    int state;

    frame_header(buf, type, channel, stream, length);
    state = frame_parse(buf, have, &f, &used, &why);
    if (state == FRAME_READY)
        CHECK(used == WIRE_HEADER_SIZE + length && f.length == length && f.payload == buf + WIRE_HEADER_SIZE);
    if (state == FRAME_BAD)
        CHECK(why != NULL);
    return state;
}

static void test_frames(void)
{
    static const struct {
        uint8_t type, channel;
        uint32_t stream, length;
        int expected;
    } rows[] = {
        {FRAME_HELLO, 0, 0, 0, FRAME_READY},
        {FRAME_HELLO, 0, 0, WIRE_MAX_OPEN, FRAME_READY},
        {FRAME_HELLO, 0, 0, WIRE_MAX_OPEN + 1, FRAME_BAD},
        {FRAME_HELLO, 0, 1, 0, FRAME_BAD},
        {FRAME_OPEN, 0, 1, WIRE_MAX_OPEN, FRAME_READY},
        {FRAME_OPEN, 0, 2, 1, FRAME_BAD},
        {FRAME_OPEN, 0, 0, 1, FRAME_BAD},
        {FRAME_DATA, 0, 1, 1, FRAME_READY},
        {FRAME_DATA, 0, 1, 0, FRAME_BAD},
        {FRAME_DATA, 1, 1, 1, FRAME_BAD},
        {FRAME_DATA, 0, 1, WIRE_MAX_PAYLOAD + 1, FRAME_BAD},
        {FRAME_END, 0, 1, 0, FRAME_READY},
        {FRAME_END, 0, 1, 1, FRAME_BAD},
        {FRAME_CREDIT, 0, 1, 4, FRAME_READY},
        {FRAME_CREDIT, 0, 1, 3, FRAME_BAD},
        {FRAME_CTRL, 0, 0xffffffff, 10, FRAME_READY},
        {FRAME_REPLY, 0, 1, 0, FRAME_BAD},
        {FRAME_CLOSE, 0, 1, 0, FRAME_BAD},
        {FRAME_RESET, 0, 1, 0, FRAME_READY},
        {FRAME_PING, 0, 0, 64, FRAME_READY},
        {FRAME_PING, 0, 0, 65, FRAME_BAD},
        {FRAME_PONG, 0, 0, 0, FRAME_READY},
        {0, 0, 0, 0, FRAME_BAD},
        {12, 0, 1, 0, FRAME_BAD},
        {255, 0, 1, 0, FRAME_BAD},
    };

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        size_t whole = WIRE_HEADER_SIZE + (size_t)rows[i].length;
        int state = parse(rows[i].type, rows[i].channel, rows[i].stream, rows[i].length,
                          whole < WIRE_HEADER_SIZE + WIRE_MAX_OPEN ? whole : WIRE_HEADER_SIZE + WIRE_MAX_OPEN);
        if (state != rows[i].expected)
            fprintf(stderr, "row %zu\n", i);
        CHECK(state == rows[i].expected);
    }
    for (size_t have = 0; have < WIRE_HEADER_SIZE + 20; have++)
        CHECK(parse(FRAME_DATA, 0, 1, 20, have) == FRAME_MORE);
    CHECK(parse(FRAME_DATA, 0, 1, 20, WIRE_HEADER_SIZE + 30) == FRAME_READY);
    /* a lie about the length is caught with the header alone */
    CHECK(parse(FRAME_DATA, 0, 1, 0xffffffff, WIRE_HEADER_SIZE) == FRAME_BAD);
}

static void test_outq(void)
{
    struct outq q = {0};
    int fds[2];
    size_t put = 0, got = 0;
    uint8_t buf[4096], next = 0, expected = 0;

    CHECK(pipe2(fds, O_NONBLOCK) == 0);
    for (int round = 0; round < 3000; round++) {
        uint8_t *p = outq_reserve(&q, 1000);
        ssize_t n;
        if (p) {
            for (int i = 0; i < 1000; i++)
                p[i] = next++;
            outq_commit(&q, 1000);
            put += 1000;
        }
        CHECK(outq_flush(&q, fds[1]) == 0);
        n = read(fds[0], buf, round % 3 ? sizeof buf : 100);
        for (ssize_t i = 0; i < n; i++)
            CHECK(buf[i] == expected++);
        got += n > 0 ? (size_t)n : 0;
    }
    CHECK(outq_reserve(&q, OUT_CAP + 1) == NULL);
    while (outq_len(&q)) {
        ssize_t n = read(fds[0], buf, sizeof buf);
        got += n > 0 ? (size_t)n : 0;
        CHECK(outq_flush(&q, fds[1]) == 0);
    }
    for (ssize_t n; (n = read(fds[0], buf, sizeof buf)) > 0;)
        got += (size_t)n;
    CHECK(put == got);
    outq_trim(&q);
    CHECK(outq_reserve(&q, OUT_CAP) != NULL);
    close(fds[0]);
    outq_commit(&q, 1);
    signal(SIGPIPE, SIG_IGN);
    CHECK(outq_flush(&q, fds[1]) == -1);
    close(fds[1]);
}

static void test_fields(void)
{
    uint8_t buf[256];
    struct fw w = {buf, 0, sizeof buf, false};
    struct fields f;
    const char *why;
    const tag_set all = ~(tag_set)0;
    const uint8_t *p;
    uint32_t n;
    size_t pos = 0;

    fw_int(&w, TAG_OP, OP_EXEC);
    fw_text(&w, TAG_ARGV, "ls");
    fw_int(&w, TAG_FLAGS, -5);
    fw_text(&w, TAG_ARGV, "");
    fw_bytes(&w, TAG_ENTROPY, "\0\1", 2);
    CHECK(!w.overflow && fields_parse(buf, w.len, all, &f, &why) == 0);
    CHECK(fields_int(&f, TAG_OP, 0) == OP_EXEC && fields_int(&f, TAG_FLAGS, 0) == -5);
    CHECK(fields_int(&f, TAG_PID, 42) == 42 && !fields_have(&f, TAG_PID));
    CHECK(fields_int(&f, TAG_ARGV, 0) == 2 && f.text[TAG_ENTROPY].len == 2);
    CHECK(fields_next(&f, TAG_ARGV, &pos, &p, &n) && n == 2 && !memcmp(p, "ls", 2));
    CHECK(fields_next(&f, TAG_ARGV, &pos, &p, &n) && n == 0);
    CHECK(!fields_next(&f, TAG_ARGV, &pos, &p, &n));
    CHECK(fields_parse(buf, w.len, all & ~TAG_BIT(TAG_FLAGS), &f, &why) == EPROTO);
    for (size_t cut = 1; cut < w.len; cut++)
        if (cut != 14 && cut != 22 && cut != 36 && cut != 42)
            CHECK(fields_parse(buf, cut, all, &f, &why) == EPROTO);
    w.len = 0;
    fw_int(&w, TAG_FLAGS, 1);
    fw_int(&w, TAG_FLAGS, 1);
    CHECK(fields_parse(buf, w.len, all, &f, &why) == EPROTO);
    w.len = 0;
    fw_bytes(&w, TAG_PATH, "a\0b", 3);
    CHECK(fields_parse(buf, w.len, all, &f, &why) == EINVAL);
    w.len = 0;
    fw_bytes(&w, TAG_FLAGS, "1234567", 7);
    CHECK(fields_parse(buf, w.len, all, &f, &why) == EPROTO);
    w.len = 0;
    fw_bytes(&w, TAG_LIMIT, "", 0);
    CHECK(fields_parse(buf, w.len, all, &f, &why) == EPROTO);
    w = (struct fw){buf, 0, 20, false};
    fw_int(&w, TAG_FLAGS, 1);
    CHECK(!w.overflow);
    fw_text(&w, TAG_PATH, "x");
    CHECK(w.overflow && w.len == 14);
}

static void test_ring(void)
{
    struct ring r = {.size = ring_round(5000)};
    uint8_t next = 0, out[8192];
    struct iovec iov[2];

    CHECK(ring_round(0) == 4096 && r.size == 8192 && ring_kept(&r) == 0 && ring_oldest(&r) == 0);
    for (int round = 0; round < 100; round++) {
        size_t want = round < 5 ? 300 : 1 + (size_t)(round * 997) % 9000, put = 0;
        int pieces = ring_space(&r, want, iov);
        for (int i = 0; i < pieces; i++)
            for (size_t j = 0; j < iov[i].iov_len; j++, put++)
                ((uint8_t *)iov[i].iov_base)[j] = next++;
        if (pieces) {
            CHECK(r.cap == r.size && put == (want < r.size ? want : r.size));
            ring_advance(&r, put);
        } else {
            CHECK(r.total + want <= 2048 || r.cap < r.size); /* then it is of full size */
            for (; put < want; put++)
                out[put] = next++;
            ring_append(&r, out, put);
        }
        CHECK(ring_kept(&r) == (r.total < r.size ? r.total : r.size));
        ring_copy(&r, ring_oldest(&r), out, ring_kept(&r));
        for (size_t j = 0; j < ring_kept(&r); j++)
            CHECK(out[j] == (uint8_t)(ring_oldest(&r) + j));
    }
    ring_free(&r);
    CHECK(ring_oldest(&r) == r.total);
}

static void test_users(void)
{
    static const char passwd[] = "junk\n::::::\nbad:x:nine:1::/:/bin/sh\nbig:x:4294967295:0::/:/\n"
                                 "web:x:33:34:Web,,,:/var/www:/bin/false\nweb2:x:33:1::/:/a\nlast:x:7:8::/l:";
    static const char group[] = "root:x:0:\nusers:x:100:web,other\nadm:x:4:other,web\nnot:x:5:webby\nshort:x\nweb:x:34:web";
    struct user u = {0};
    gid_t gid;
    char name[64];

    CHECK(passwd_find(passwd, sizeof passwd - 1, "web", 0, &u) && u.uid == 33 && u.gid == 34 && !strcmp(u.home, "/var/www"));
    group_members(group, sizeof group - 1, &u);
    CHECK(u.ngroups == 3 && u.groups[0] == 34 && u.groups[1] == 100 && u.groups[2] == 4);
    CHECK(passwd_find(passwd, sizeof passwd - 1, NULL, 33, &u) && !strcmp(u.name, "web"));
    CHECK(passwd_find(passwd, sizeof passwd - 1, "last", 0, &u) && !u.shell[0]);
    CHECK(!passwd_find(passwd, sizeof passwd - 1, "bad", 0, &u) && !passwd_find(passwd, sizeof passwd - 1, "big", 0, &u));
    CHECK(!passwd_find(NULL, 0, "web", 0, &u) && !passwd_find(passwd, 0, "web", 0, &u));
    CHECK(group_find_id(group, sizeof group - 1, 4, name, sizeof name) && !strcmp(name, "adm"));
    CHECK(!group_find_id(group, sizeof group - 1, 4711, name, sizeof name) && !group_find_id(group, sizeof group - 1, 4, name, 3));
    CHECK(!group_find_id(NULL, 0, 0, name, sizeof name));
    CHECK(group_find(group, sizeof group - 1, "adm", &gid) && gid == 4 && !group_find(group, sizeof group - 1, "short", &gid));
}

static void test_paths(void)
{
    char name[256], long_part[400], dir[] = "/tmp/sloplet-unit-XXXXXX";
    bool slash;
    int fd;

    CHECK(mkdtemp(dir) != NULL);
    fd = path_parent(AT_FDCWD, "/proc/self/root/x", name, &slash);
    CHECK(fd < 0 && errno == ELOOP);
    fd = path_parent(AT_FDCWD, "/tmp/a//", name, &slash);
    CHECK(fd >= 0 && slash && !strcmp(name, "a"));
    close(fd);
    fd = path_parent(AT_FDCWD, "//", name, &slash);
    CHECK(fd >= 0 && !strcmp(name, "."));
    close(fd);
    CHECK(path_parent(AT_FDCWD, "/tmp/..", name, &slash) < 0 && errno == EINVAL);
    CHECK(path_parent(AT_FDCWD, "", name, &slash) < 0 && errno == EINVAL);
    memset(long_part, 'x', sizeof long_part - 1);
    long_part[sizeof long_part - 1] = 0;
    CHECK(path_parent(AT_FDCWD, long_part, name, &slash) < 0 && errno == ENAMETOOLONG);
    rmdir(dir);
}

/* Whether the way through a link, as the last part of a folder or in its middle, is taken. */
static bool leads(int dir, const char *path, bool wary)
{
    char name[256];
    bool slash;
    int fd = (wary ? path_parent_wary : path_parent)(dir, path, name, &slash);

    if (fd < 0)
        CHECK(errno == ELOOP);
    else
        close(fd);
    return fd >= 0;
}

static void test_wary(void)
{
    char dir[] = "/tmp/sloplet-unit-XXXXXX";
    int at;

    CHECK(mkdtemp(dir) != NULL);
    at = open(dir, O_RDONLY | O_DIRECTORY);
    CHECK(at >= 0 && mkdirat(at, "d", 0700) == 0 && mkdirat(at, "d/e", 0700) == 0 && symlinkat("d", at, "l") == 0);
    CHECK(leads(at, "d/e/x", true) && leads(at, "l/x", false) && leads(at, "l/e/x", false));
    CHECK(leads(at, "l/x", true) == (geteuid() == 0) && leads(at, "l/e/x", true) == (geteuid() == 0));
    if (geteuid() == 0) {
        CHECK(fchownat(at, "l", 1000, 1000, AT_SYMLINK_NOFOLLOW) == 0);
        CHECK(leads(at, "l/x", false) && !leads(at, "l/x", true) && !leads(at, "l/e/x", true) && !leads(at, "./d/../l/e/x", true));
    }
    CHECK(!leads(at, "/proc/self/root/x", true));
    unlinkat(at, "l", 0);
    unlinkat(at, "d/e", AT_REMOVEDIR);
    unlinkat(at, "d", AT_REMOVEDIR);
    close(at);
    rmdir(dir);
}

static void test_names(void)
{
    static const char *const good[] = {".", "a", "a/b", "...", "a/..b", ".a/b.", "-"};
    static const char *const bad[] = {"", "/", "/a", "a/", "a//b", "..", "a/..", "../a", "a/./b", "./a", "a/."};
    char part[257];

    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        CHECK(path_inside(good[i], strlen(good[i])));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(!path_inside(bad[i], strlen(bad[i])));
    memset(part, 'x', sizeof part);
    CHECK(path_inside(part, 255) && !path_inside(part, 256));
}

int main(void)
{
    test_frames();
    test_outq();
    test_fields();
    test_ring();
    test_users();
    test_paths();
    test_wary();
    test_names();
    printf(failures ? "%d checks failed\n" : "all unit tests passed\n", failures);
    return failures != 0;
}
