/* Field decoding and encoding: see fields.h. */
#include "fields.h"

#include <errno.h>
#include <string.h>

#define INTEGERS                                                                                   \
    (TAG_BIT(TAG_OP) | TAG_BIT(TAG_KIND) | TAG_BIT(TAG_VERSION) | TAG_BIT(TAG_ERRNO) |             \
     TAG_BIT(TAG_FLAGS) | TAG_BIT(TAG_RING) | TAG_BIT(TAG_FEATURES) | TAG_BIT(TAG_ROWS) |          \
     TAG_BIT(TAG_COLS) | TAG_BIT(TAG_TIMEOUT_MS) | TAG_BIT(TAG_PID) | TAG_BIT(TAG_OSPID) |         \
     TAG_BIT(TAG_SIGNUM) | TAG_BIT(TAG_STATE) | TAG_BIT(TAG_STARTED_NS) | TAG_BIT(TAG_FROM_OUT) |  \
     TAG_BIT(TAG_FROM_ERR) | TAG_BIT(TAG_OFFSET_OUT) | TAG_BIT(TAG_OFFSET_ERR) |                   \
     TAG_BIT(TAG_COUNT) | TAG_BIT(TAG_EXIT_CODE) | TAG_BIT(TAG_TIMED_OUT) |                        \
     TAG_BIT(TAG_OUT_TOTAL) | TAG_BIT(TAG_ERR_TOTAL) | TAG_BIT(TAG_OUT_LOST) |                     \
     TAG_BIT(TAG_ERR_LOST) | TAG_BIT(TAG_CPU_US) | TAG_BIT(TAG_MAXRSS) | TAG_BIT(TAG_WALL_US) |    \
     TAG_BIT(TAG_OOM) | TAG_BIT(TAG_OFFSET) | TAG_BIT(TAG_LENGTH) | TAG_BIT(TAG_BYTES) |           \
     TAG_BIT(TAG_MODE) | TAG_BIT(TAG_DEPTH) | TAG_BIT(TAG_TYPE) | TAG_BIT(TAG_SIZE) |              \
     TAG_BIT(TAG_UID) | TAG_BIT(TAG_GID) | TAG_BIT(TAG_MTIME_NS) | TAG_BIT(TAG_MASK) |             \
     TAG_BIT(TAG_MEMORY) | TAG_BIT(TAG_PIDS) | TAG_BIT(TAG_DISK_USED) |                            \
     TAG_BIT(TAG_DISK_TOTAL) | TAG_BIT(TAG_UPTIME_MS) | TAG_BIT(TAG_PORT) |                         \
     TAG_BIT(TAG_TARGET_TYPE) | TAG_BIT(TAG_TARGET_SIZE) | TAG_BIT(TAG_TARGET_MODE))
#define REPEATABLE (TAG_BIT(TAG_ARGV) | TAG_BIT(TAG_ENV) | TAG_BIT(TAG_ENTRY) | TAG_BIT(TAG_ATTRIBUTE))
#define BINARY (TAG_BIT(TAG_ENTROPY) | TAG_BIT(TAG_BODY) | TAG_BIT(TAG_ATTRIBUTE))

#define FIELD_HEADER 6

static int64_t get64(const uint8_t *p)
{
    uint64_t v = 0;

    for (int i = 7; i >= 0; i--)
        v = v << 8 | p[i];
    return (int64_t)v;
}

static size_t field_at(const uint8_t *p, size_t n, unsigned *tag, uint32_t *len)
{
    if (n < FIELD_HEADER)
        return 0;
    *tag = (unsigned)p[0] | (unsigned)p[1] << 8;
    *len = (uint32_t)p[2] | (uint32_t)p[3] << 8 | (uint32_t)p[4] << 16 | (uint32_t)p[5] << 24;
    if (n - FIELD_HEADER < *len)
        return 0;
    return FIELD_HEADER + (size_t)*len;
}

int fields_parse(const uint8_t *p, size_t n, tag_set allowed, struct fields *out, const char **why)
{
    out->have = 0;
    out->raw = p;
    out->raw_len = n;
    while (n > 0) {
        unsigned tag;
        uint32_t len;
        size_t step = field_at(p, n, &tag, &len);
        const uint8_t *value = p + FIELD_HEADER;

        *why = "a field that is cut short";
        if (!step)
            return EPROTO;
        *why = "a field this operation does not know";
        if (tag >= TAG_LIMIT || !(allowed & TAG_BIT(tag)))
            return EPROTO;
        *why = "a field that is there twice";
        if (fields_have(out, (int)tag) && !(REPEATABLE & TAG_BIT(tag)))
            return EPROTO;
        if (INTEGERS & TAG_BIT(tag)) {
            *why = "an integer that is not 8 bytes long";
            if (len != 8)
                return EPROTO;
            out->num[tag] = get64(value);
        } else {
            *why = "a NUL byte in a text";
            if (!(BINARY & TAG_BIT(tag)) && len && memchr(value, 0, len))
                return EINVAL;
            out->num[tag] = fields_have(out, (int)tag) ? out->num[tag] + 1 : 1;
            out->text[tag].p = value;
            out->text[tag].len = len;
        }
        out->have |= TAG_BIT(tag);
        p += step;
        n -= step;
    }
    return 0;
}

int64_t fields_int(const struct fields *f, int tag, int64_t otherwise)
{
    return fields_have(f, tag) ? f->num[tag] : otherwise;
}

bool fields_next(const struct fields *f, int tag, size_t *pos, const uint8_t **p, uint32_t *len)
{
    while (*pos < f->raw_len) {
        unsigned found;
        size_t step = field_at(f->raw + *pos, f->raw_len - *pos, &found, len);

        if (!step)
            return false;
        *p = f->raw + *pos + FIELD_HEADER;
        *pos += step;
        if (found == (unsigned)tag)
            return true;
    }
    return false;
}

void fw_bytes(struct fw *w, int tag, const void *p, size_t n)
{
    uint8_t *at = w->p + w->len;

    if (w->overflow || w->cap - w->len < FIELD_HEADER || w->cap - w->len - FIELD_HEADER < n) {
        w->overflow = true;
        return;
    }
    at[0] = (uint8_t)tag;
    at[1] = (uint8_t)(tag >> 8);
    for (int i = 0; i < 4; i++)
        at[2 + i] = (uint8_t)(n >> (8 * i));
    if (n)
        memcpy(at + FIELD_HEADER, p, n);
    w->len += FIELD_HEADER + n;
}

void fw_int(struct fw *w, int tag, int64_t v)
{
    uint8_t bytes[8];

    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)((uint64_t)v >> (8 * i));
    fw_bytes(w, tag, bytes, sizeof bytes);
}

void fw_text(struct fw *w, int tag, const char *s)
{
    fw_bytes(w, tag, s, strlen(s));
}
