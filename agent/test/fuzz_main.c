/* A mutating driver for compilers without libFuzzer: replays files, or mutates seeds for some seconds.
 * It knows the shapes of the wire, so that most inputs get past the first check. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fields.h"
#include "frames.h"
#include "proto.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static uint64_t state = 88172645463325252u;

static uint32_t rnd(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? (uint32_t)(state >> 11) % below : 0;
}

static size_t make_fields(uint8_t *p, size_t cap)
{
    struct fw w = {p, 0, cap, false};
    char text[40];

    for (uint32_t i = rnd(6); i > 0; i--) {
        memset(text, 'a', sizeof text);
        if (rnd(2))
            fw_int(&w, (int)rnd(70), (int64_t)state);
        else
            fw_bytes(&w, (int)rnd(70), text, rnd(sizeof text));
    }
    return w.len;
}

/* As CHANGES tells them, with names of few letters, so that most are nearly right. */
static size_t make_records(uint8_t *p)
{
    static const char letters[] = "..//ab";
    char name[12];
    size_t n = 0;

    for (uint32_t i = 1 + rnd(4); i > 0; i--) {
        struct fw w = {p + n + 4, 0, 300, false};
        uint32_t len = rnd(sizeof name);
        for (uint32_t j = 0; j < len; j++)
            name[j] = letters[rnd(sizeof letters - 1)];
        if (rnd(4))
            fw_bytes(&w, TAG_NAME, name, len);
        w.len += make_fields(w.p + w.len, 100);
        put32(p + n, (uint32_t)w.len);
        n += 4 + w.len;
    }
    return n;
}

static size_t make_input(uint8_t *p)
{
    static const char users[] = "root:x:0:0::/root:/bin/sh\nweb:x:33:33:,:/var/www:/bin/false\nweb:x:33:web,b,web\n";
    size_t n = 1;

    p[0] = (uint8_t)rnd(4);
    if (p[0] == 3) {
        memcpy(p + 1, users, sizeof users - 1);
        return sizeof users;
    }
    if (p[0] == 1)
        return 1 + make_fields(p + 1, 400);
    if (p[0] == 2)
        return 1 + make_records(p + 1);
    for (uint32_t i = 1 + rnd(5); i > 0; i--) {
        size_t len = make_fields(p + n + WIRE_HEADER_SIZE, 300);
        frame_header(p + n, (uint8_t)(1 + rnd(11)), 0, rnd(4) ? 1 + 2 * rnd(9) : 0, (uint32_t)len);
        n += WIRE_HEADER_SIZE + len;
    }
    return n;
}

static size_t mutate(uint8_t *p, size_t n)
{
    for (uint32_t i = rnd(4); i > 0 && n; i--)
        switch (rnd(4)) {
        case 0:
            p[rnd((uint32_t)n)] ^= (uint8_t)(1 << rnd(8));
            break;
        case 1:
            p[rnd((uint32_t)n)] = (uint8_t)rnd(256);
            break;
        case 2:
            n = rnd((uint32_t)n + 1);
            break;
        default: {
            uint32_t at = rnd((uint32_t)n), len = rnd((uint32_t)n - at + 1);
            memmove(p + rnd((uint32_t)n - len + 1), p + at, len);
        }
        }
    return n;
}

/* On the heap and exactly as long as the input, so that a read past its end is seen. */
static void run(const uint8_t *p, size_t n)
{
    uint8_t *copy = malloc(n ? n : 1);

    memcpy(copy, p, n);
    LLVMFuzzerTestOneInput(copy, n);
    free(copy);
}

int main(int argc, char **argv)
{
    static uint8_t buf[1 << 16];
    long seconds = argc > 1 ? atol(argv[1]) : 10;
    time_t end = time(NULL) + seconds;
    unsigned long runs = 0;

    if (argc > 1 && !seconds) {
        for (int i = 1; i < argc; i++) {
            FILE *f = fopen(argv[i], "rb");
            if (f) {
                run(buf, fread(buf, 1, sizeof buf, f));
                fclose(f);
            }
        }
        return 0;
    }
    state ^= (uint64_t)time(NULL) * 0x9e3779b97f4a7c15u;
    printf("seed %llu\n", (unsigned long long)state);
    do {
        for (int i = 0; i < 10000; i++, runs++)
            run(buf, mutate(buf, make_input(buf)));
    } while (time(NULL) < end);
    printf("%lu inputs, nothing found\n", runs);
    return 0;
}
