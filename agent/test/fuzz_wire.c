/* Fuzz target of everything that parses bytes: frames and fields as wire.c reads them, in pieces, and
 * the sandbox's passwd and group files. The first byte chooses. */
#include <stdlib.h>
#include <string.h>

#include "fields.h"
#include "frames.h"
#include "guest.h"
#include "path.h"
#include "proto.h"
#include "users.h"

struct guest guest;
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(int condition)
{
    if (!condition)
        abort();
}

static void fuzz_fields(const uint8_t *p, size_t n)
{
    struct fields f;
    const char *why = NULL;
    const uint8_t *value;
    uint32_t len;
    volatile uint8_t sink = 0;

    if (fields_parse(p, n, ~(tag_set)0, &f, &why)) {
        must(why != NULL);
        return;
    }
    for (int tag = 0; tag < TAG_LIMIT; tag++)
        if (fields_have(&f, tag) && tag != TAG_ARGV && tag != TAG_ENV)
            (void)fields_int(&f, tag, 0);
    for (size_t pos = 0; fields_next(&f, TAG_ARGV, &pos, &value, &len);)
        for (uint32_t i = 0; i < len; i++)
            sink ^= value[i];
    (void)sink;
}

/* Whatever the pieces, the frames that come out must be the same. */
static void fuzz_frames(const uint8_t *p, size_t n)
{
    size_t at = 0, used = 0;
    struct frame f;
    const char *why;

    for (;;) {
        int whole = frame_parse(p + at, n - at, &f, &used, &why);
        if (whole == FRAME_READY) {
            struct frame g;
            size_t again = 0;
            must(used <= n - at && used == WIRE_HEADER_SIZE + (size_t)f.length);
            must(frame_parse(p + at, used, &g, &again, &why) == FRAME_READY && again == used);
            if (f.length)
                must(frame_parse(p + at, used - 1, &g, &again, &why) == FRAME_MORE);
            must(!!f.stream == (f.type != FRAME_HELLO && f.type != FRAME_PING && f.type != FRAME_PONG));
            if (f.type == FRAME_REPLY || f.type == FRAME_CLOSE)
                must(f.stream % 2 == 0);
            if (f.type == FRAME_OPEN || f.type == FRAME_RESET || f.type == FRAME_CTRL)
                must(f.stream % 2 == 1);
            if (f.type == FRAME_DATA)
                must(f.channel == (f.stream % 2 ? CHANNEL_IN : CHANNEL_OUT));
            if (f.type == FRAME_OPEN || f.type == FRAME_HELLO || f.type == FRAME_CTRL || f.type == FRAME_REPLY || f.type == FRAME_CLOSE)
                fuzz_fields(f.payload, f.length);
            at += used;
            continue;
        }
        if (whole == FRAME_MORE)
            must(n - at < WIRE_HEADER_SIZE + (size_t)WIRE_MAX_OPEN);
        return;
    }
}

static void fuzz_users(const uint8_t *p, size_t n)
{
    char *text = malloc(n ? n : 1); /* exactly n: the sanitizer sees any byte too far */
    struct user u = {0};
    gid_t gid;

    memcpy(text, p, n);
    if (passwd_find(text, n, "web", 0, &u) || passwd_find(text, n, NULL, 33, &u))
        must(strlen(u.name) < sizeof u.name && strlen(u.home) < sizeof u.home);
    group_members(text, n, &u);
    must(u.ngroups >= 1 && u.ngroups <= USER_GROUPS);
    (void)group_find(text, n, "web", &gid);
    free(text);
}

/* Records as UNPACK takes them: whole fields, and names that stay inside. */
static void fuzz_records(const uint8_t *p, size_t n)
{
    while (n >= 4) {
        size_t len = get32(p);
        struct fields f;
        const char *why = NULL;

        if (len > n - 4)
            return;
        if (fields_parse(p + 4, len, ~(tag_set)0, &f, &why) == 0 && fields_have(&f, TAG_NAME)) {
            const char *name = (const char *)f.text[TAG_NAME].p;
            size_t size = f.text[TAG_NAME].len;
            if (path_inside(name, size)) {
                must(size > 0 && name[0] != '/' && name[size - 1] != '/');
                for (size_t i = 0; i + 1 < size; i++)
                    must(name[i] != '.' || name[i + 1] != '.' || (i && name[i - 1] != '/') ||
                         (i + 2 < size && name[i + 2] != '/'));
            }
        }
        p += 4 + len;
        n -= 4 + len;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (!n)
        return 0;
    if (data[0] % 4 == 0)
        fuzz_frames(data + 1, n - 1);
    else if (data[0] % 4 == 1)
        fuzz_fields(data + 1, n - 1);
    else if (data[0] % 4 == 2)
        fuzz_records(data + 1, n - 1);
    else
        fuzz_users(data + 1, n - 1);
    return 0;
}
