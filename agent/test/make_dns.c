/* Questions for the mutating driver (fuzz_main.c): mostly right ones. */
#include <string.h>

#include "fuzz_main.h"

size_t make_input(uint8_t *p)
{
    static const char letters[] = "aAbZ019-_.* \xc3";
    static const uint8_t opt[] = {0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0};
    size_t n = 12;

    memset(p, 0, 12);
    p[1] = (uint8_t)rnd(256);
    p[2] = (uint8_t)(rnd(8) ? 1 : rnd(256));
    p[5] = 1;
    for (uint32_t labels = rnd(6); labels > 0; labels--) {
        uint32_t length = rnd(8) ? 1 + rnd(12) : rnd(66);
        p[n++] = (uint8_t)length;
        for (uint32_t i = 0; i < length; i++)
            p[n++] = (uint8_t)letters[rnd(rnd(4) ? 9 : sizeof letters - 1)];
    }
    p[n++] = 0;
    memcpy(p + n, (uint8_t[]){0, (uint8_t)(rnd(2) ? 1 : rnd(256)), 0, 1}, 4);
    n += 4;
    for (uint32_t records = rnd(3) ? 0 : rnd(3); records > 0; records--, p[11]++) {
        memcpy(p + n, opt, sizeof opt);
        n += sizeof opt;
        p[n - 1] = (uint8_t)rnd(20);
        memset(p + n, 7, p[n - 1]);
        n += p[n - 1];
    }
    return n;
}
