/* Inputs of fuzz_streams.c for the mutating driver (fuzz_main.c): HELLO, then frames and acts of the agent's in any order. */
#include <string.h>

#include "fields.h"
#include "frames.h"
#include "fuzz_main.h"
#include "proto.h"

static size_t frame(uint8_t *p, uint8_t type, uint8_t channel, uint32_t stream, uint32_t length)
{
    frame_header(p, type, channel, stream, length);
    memset(p + WIRE_HEADER_SIZE, 0, length);
    return WIRE_HEADER_SIZE + length;
}

static size_t answer(uint8_t *p, uint8_t type, uint32_t stream)
{
    struct fw w = {p + WIRE_HEADER_SIZE, 0, 64, false};

    if (rnd(2))
        fw_int(&w, rnd(8) ? TAG_ERRNO : TAG_PID, 13);
    frame_header(p, type, 0, stream, (uint32_t)w.len);
    return WIRE_HEADER_SIZE + w.len;
}

size_t make_input(uint8_t *p)
{
    uint32_t opened = 1;
    size_t n = 0;

    p[n++] = 7;
    n += frame(p + n, FRAME_HELLO, 0, 0, rnd(6));
    for (uint32_t i = 1 + rnd(60); i > 0; i--) {
        uint32_t theirs = 1 + 2 * rnd(opened), own = 2 + 2 * rnd(8), any = rnd(2) ? theirs : own;

        p[n++] = (uint8_t)(rnd(3) ? 4 : rnd(4));
        if (p[n - 1] != 4) {
            p[n++] = (uint8_t)rnd(256);
            continue;
        }
        switch (rnd(9)) {
        case 0:
        case 1:
            n += frame(p + n, FRAME_OPEN, 0, 2 * opened++ - 1, rnd(20));
            break;
        case 2:
        case 3:
            n += frame(p + n, FRAME_DATA, any % 2 ? CHANNEL_IN : CHANNEL_OUT, any, 1 + rnd(50));
            break;
        case 4:
            n += frame(p + n, FRAME_END, 0, any, 0);
            break;
        case 5:
            n += frame(p + n, FRAME_CREDIT, 0, any, 4);
            p[n - 3] = (uint8_t)rnd(256);
            break;
        case 6:
            n += frame(p + n, FRAME_RESET, 0, theirs, 0);
            break;
        case 7:
            n += answer(p + n, rnd(3) ? FRAME_CLOSE : FRAME_REPLY, own);
            break;
        default:
            n += rnd(5) ? frame(p + n, FRAME_PING, 0, 0, rnd(9)) : frame(p + n, FRAME_HELLO, 0, 0, rnd(6));
        }
    }
    return n;
}
