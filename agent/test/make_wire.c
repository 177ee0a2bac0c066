/* Inputs of fuzz_wire.c for the mutating driver (fuzz_main.c): frames, fields, records and users' files, mostly right ones. */
#include <string.h>

#include "fields.h"
#include "frames.h"
#include "fuzz_main.h"
#include "proto.h"

static size_t make_fields(uint8_t *p, size_t cap)
{
    struct fw w = {p, 0, cap, false};
    char text[40];

    for (uint32_t i = rnd(6); i > 0; i--) {
        memset(text, 'a', sizeof text);
        if (rnd(2))
            fw_int(&w, (int)rnd(74), (int64_t)rnd(UINT32_MAX) - (1 << 30));
        else
            fw_bytes(&w, (int)rnd(74), text, rnd(sizeof text));
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

size_t make_input(uint8_t *p)
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
        uint32_t stream = rnd(4) ? 1 + rnd(18) : 0;
        frame_header(p + n, (uint8_t)(1 + rnd(11)), rnd(2) ? 0 : stream % 2 == 0, stream, (uint32_t)len);
        n += WIRE_HEADER_SIZE + len;
    }
    return n;
}
