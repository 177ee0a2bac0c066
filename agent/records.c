/* Record buffers: see records.h. */
#include "records.h"

#include <stdlib.h>
#include <string.h>

struct fw record_begin(void)
{
    static uint8_t scratch[RECORD_MAX];

    return (struct fw){scratch, 0, sizeof scratch, false};
}

bool record_add(struct records *r, const struct fw *w)
{
    size_t need = r->len + 4 + w->len;

    if (w->overflow)
        return false;
    if (r->head && r->head + need > r->cap) {
        memmove(r->buf, r->buf + r->head, r->len);
        r->head = 0;
    }
    if (r->head + need > r->cap) {
        size_t cap = r->cap ? r->cap : 4096;
        uint8_t *buf;
        while (cap < need)
            cap *= 2;
        buf = realloc(r->buf, cap);
        if (!buf)
            return false;
        r->buf = buf;
        r->cap = cap;
    }
    put32(r->buf + r->head + r->len, (uint32_t)w->len);
    memcpy(r->buf + r->head + r->len + 4, w->p, w->len);
    r->len = need;
    return true;
}

size_t records_pending(const struct records *r)
{
    return r->len;
}

void records_flush(struct records *r, struct stream *s)
{
    while (r->len) {
        size_t max;
        uint8_t *p = stream_data_begin(s, &max);
        if (!p)
            return;
        if (max > r->len)
            max = r->len;
        memcpy(p, r->buf + r->head, max);
        stream_data_commit(s, CHANNEL_OUT, max);
        r->head += max;
        r->len -= max;
    }
    r->head = 0;
}

enum pump records_wait(const struct stream *s)
{
    return s->send_credit ? PUMP_AGAIN : PUMP_WAIT;
}

void records_free(struct records *r)
{
    free(r->buf);
    memset(r, 0, sizeof *r);
}
