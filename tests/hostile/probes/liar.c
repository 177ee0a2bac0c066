/* An agent that lies. liar MODE HELLO-IN-HEX: answers the host's HELLO with those bytes, then, at the first OPEN, does
 * as MODE says. Modes that begin with "hello-" lie at once. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HELLO = 1, OPEN, DATA, END, CREDIT, CTRL, REPLY, CLOSE, RESET, PING, PONG };

static void put(const void *bytes, size_t size) {
    const char *at = bytes;
    while (size) {
        ssize_t done = write(1, at, size);
        if (done <= 0) _exit(0); /* the host has hung up */
        at += done;
        size -= (size_t)done;
    }
}

static size_t header(uint8_t *to, uint32_t length, int type, int channel, uint32_t stream) {
    memcpy(to, &length, 4);
    to[4] = (uint8_t)type;
    to[5] = (uint8_t)channel;
    to[6] = to[7] = 0;
    memcpy(to + 8, &stream, 4);
    return 12;
}

static void frame(int type, int channel, uint32_t stream, const void *payload, uint32_t length) {
    static uint8_t buffer[1 << 20];
    size_t at = header(buffer, length, type, channel, stream);
    if (length) memcpy(buffer + at, payload, length);
    put(buffer, at + length);
}

static void get(void *to, size_t size) {
    char *at = to;
    while (size) {
        ssize_t got = read(0, at, size);
        if (got <= 0) _exit(0);
        at += got;
        size -= (size_t)got;
    }
}

/* The id of the first stream that the host opens. */
static uint32_t first_open(void) {
    static uint8_t rest[1 << 20];
    for (;;) {
        uint8_t head[12];
        uint32_t length, stream;
        get(head, sizeof head);
        memcpy(&length, head, 4);
        memcpy(&stream, head + 8, 4);
        get(rest, length);
        if (head[4] == OPEN) return stream;
    }
}

static void flood(int type, uint32_t stream, const void *payload, uint32_t length, int channel) {
    static uint8_t many[65536];
    size_t used = 0;
    while (used + 12 + length < sizeof many) {
        used += header(many + used, length, type, channel, stream);
        if (length) memcpy(many + used, payload, length);
        used += length;
    }
    for (;;) put(many, used);
}

static void silence(void) {
    char byte;
    while (read(0, &byte, 1) > 0) {}
    _exit(0);
}

int main(int argc, char **argv) {
    static uint8_t big[65536], hello[4096];
    const char *mode = argv[1];
    size_t size = 0;
    if (argc < 3) return 2;
    for (const char *at = argv[2]; at[0] && at[1] && size < sizeof hello; at += 2) sscanf(at, "%2hhx", &hello[size++]);
#define MODE(name) (!strcmp(mode, name))
    if (MODE("hello-silence")) silence();
    if (MODE("hello-end")) return 0;
    if (MODE("hello-garbage")) flood(0xEE, 0xEEEEEEEE, big, 100, 9);
    if (MODE("hello-data-first")) frame(DATA, 1, 1, big, 10);
    if (MODE("hello-huge")) put("\xff\xff\xff\x7f\x01\0\0\0\0\0\0\0", 12);
    if (MODE("hello-endless")) {
        uint8_t head[12];
        header(head, 65536, HELLO, 0, 0);
        put(head, 12);
        silence();
    }
    put(hello, size);
    if (MODE("hello-twice")) put(hello, size);
    uint32_t stream = first_open();
    uint8_t head[12];
    uint32_t much = 0xFFFFFFFF, one = 1;
    if (MODE("huge-length")) put("\xff\xff\xff\xff\x03\x01\0\0\x01\0\0\0", 12);
    if (MODE("over-limit")) {
        header(head, 65537, DATA, 1, stream);
        put(head, 12);
        flood(DATA, stream, big, 1000, 1);
    }
    if (MODE("unknown-type")) frame(99, 0, stream, big, 1);
    if (MODE("hosts-type")) frame(OPEN, 0, stream, big, 1);
    if (MODE("reserved")) put("\x01\0\0\0\x03\x01\x01\0\x01\0\0\0x", 13);
    if (MODE("bad-channel")) frame(DATA, 7, stream, big, 1);
    if (MODE("request-channel")) frame(DATA, 0, stream, big, 1);
    if (MODE("empty-data")) frame(DATA, 1, stream, big, 0);
    if (MODE("foreign-stream")) frame(REPLY, 0, 4711, NULL, 0);
    if (MODE("even-stream")) frame(CLOSE, 0, 2, NULL, 0);
    if (MODE("stream-zero")) frame(DATA, 1, 0, big, 1);
    if (MODE("cut-fields")) frame(CLOSE, 0, stream, "\x01\0\xff\xff\xff\xffxx", 8);
    if (MODE("unknown-tag")) frame(CLOSE, 0, stream, "\xee\xee\x01\0\0\0x", 7);
    if (MODE("random-fields")) {
        for (size_t i = 0; i < sizeof big; i++) big[i] = (uint8_t)(i * 2654435761u >> 13);
        frame(CLOSE, 0, stream, big, sizeof big);
    }
    if (MODE("empty-close")) frame(CLOSE, 0, stream, NULL, 0);
    if (MODE("two-replies")) {
        frame(REPLY, 0, stream, NULL, 0);
        frame(REPLY, 0, stream, NULL, 0);
    }
    if (MODE("close-twice")) {
        frame(CLOSE, 0, stream, NULL, 0);
        frame(CLOSE, 0, stream, NULL, 0);
    }
    if (MODE("data-after-end")) {
        frame(END, 1, stream, NULL, 0);
        frame(DATA, 1, stream, big, 1);
    }
    if (MODE("much-credit")) frame(CREDIT, 0, stream, &much, 4);
    if (MODE("credit-flood")) flood(CREDIT, stream, &one, 4, 0);
    if (MODE("data-flood")) flood(DATA, stream, big, 4000, 1);
    if (MODE("tiny-flood")) flood(DATA, stream, big, 1, 1);
    if (MODE("ping-flood")) flood(PING, 0, big, 64, 0);
    if (MODE("pong-flood")) flood(PONG, 0, big, 64, 0);
    if (MODE("end-flood")) flood(END, stream, NULL, 0, 1);
    static const char connect[] = "\x01\0\x08\0\0\0\x32\0\0\0\0\0\0\0"; /* OP 50 */
    if (MODE("open-again")) {
        frame(OPEN, 0, 4, connect, 14);
        frame(OPEN, 0, 2, connect, 14);
    }
    if (MODE("open-flood")) /* and the answers are not read */
        for (uint32_t own = 2;; own += 2) frame(OPEN, 0, own, connect, 14);
    if (MODE("reset-unopened")) frame(RESET, 0, 2, NULL, 0);
    if (MODE("reply-own")) {
        frame(OPEN, 0, 2, connect, 14);
        frame(REPLY, 0, 2, NULL, 0);
    }
    if (MODE("data-unopened")) {
        frame(OPEN, 0, 2, connect, 14);
        frame(DATA, 0, 4, big, 1);
    }
    if (MODE("endless-frame")) {
        header(head, 65536, DATA, 1, stream);
        put(head, 12);
    }
    if (MODE("hang-up")) return 0;
    silence();
    return 0;
}
