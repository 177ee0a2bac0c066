/* READ: a file's bytes over a stream, a piece at a time. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "path.h"

struct reading {
    int fd;
    int64_t offset, left, bytes;
};

static enum pump read_pump(struct stream *s)
{
    struct reading *r = s->ctx;
    uint8_t buf[16];
    struct fw w = {buf, 0, sizeof buf, false};

    for (int frames = 0; frames < 4 && r->left > 0; frames++) {
        size_t max;
        uint8_t *to = stream_data_begin(s, &max);
        ssize_t n;

        if (!to)
            return s->send_credit ? PUMP_AGAIN : PUMP_WAIT;
        if ((int64_t)max > r->left)
            max = (size_t)r->left;
        do
            n = pread(r->fd, to, max, r->offset);
        while (n < 0 && errno == EINTR);
        if (n < 0) {
            stream_fail(s, errno, "path", "reading failed: %s", strerror(errno));
            return PUMP_GONE;
        }
        if (n == 0)
            r->left = 0;
        else
            stream_data_commit(s, CHANNEL_OUT, (size_t)n);
        r->offset += n;
        r->bytes += n;
        r->left -= n < r->left ? n : r->left;
    }
    if (r->left > 0)
        return PUMP_AGAIN;
    fw_int(&w, TAG_BYTES, r->bytes);
    stream_close(s, &w);
    return PUMP_GONE;
}

static void read_release(struct stream *s)
{
    struct reading *r = s->ctx;

    close(r->fd);
    free(r);
}

void op_read(struct stream *s, const struct fields *f)
{
    static const struct stream_ops ops = {.pump = read_pump, .release = read_release};
    struct call c;
    struct reading *r;
    struct stat st;
    uint8_t buf[128];
    struct fw w = {buf, 0, sizeof buf, false};
    int fd, error = 0;

    if (fields_int(f, TAG_OFFSET, 0) < 0 || fields_int(f, TAG_LENGTH, 0) < 0) {
        stream_fail(s, EINVAL, NULL, "an offset or length below zero");
        return;
    }
    if (!call_begin(s, f, 0, &c))
        return;
    fd = path_open(AT_FDCWD, c.path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0 || fstat(fd, &st) < 0)
        error = errno;
    else if (S_ISDIR(st.st_mode))
        error = EISDIR;
    else if (!S_ISREG(st.st_mode))
        error = EINVAL; /* a fifo or a device may never end, or never begin */
    r = error ? NULL : calloc(1, sizeof *r);
    if (!r) {
        if (fd >= 0)
            close(fd);
        call_fail(s, error ? error : ENOMEM, "read", c.path);
        return;
    }
    user_leave();
    r->fd = fd;
    r->offset = fields_int(f, TAG_OFFSET, 0);
    r->left = fields_int(f, TAG_LENGTH, INT64_MAX);
    s->ctx = r;
    s->ops = &ops;
    stat_fields(&w, &st, NULL);
    stream_reply(s, &w);
    stream_ready(s);
}
