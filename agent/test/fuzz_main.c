/* A mutating driver for compilers without libFuzzer: replays files, or for some seconds mutates inputs that a maker
 * (make_*.c) has made, so that most get past the first check. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fuzz_main.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static uint64_t state = 88172645463325252u;

uint32_t rnd(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? (uint32_t)(state >> 11) % below : 0;
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
