/* What the host sends: see intake.h. */
#define _GNU_SOURCE
#include "intake.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "freeze.h"
#include "wire.h"

#define IN_CAP (WIRE_HEADER_SIZE + WIRE_MAX_OPEN + WIRE_MAX_PAYLOAD)
#define HELD_CAP (32u * 1024 * 1024) /* what may come while held */
#define READ_CHUNK (256u * 1024)

struct source intake_source = {.fd = -1};
static uint8_t *in_buf;
static size_t in_cap = IN_CAP, in_len, in_pos, in_touched, in_seen; /* in_seen: while held, behind the last frame looked at */
static bool stalled;

static void parse_frames(void)
{
    stalled = false;
    while (!wire_stopped() && !wire_held()) {
        struct frame f;
        size_t used;
        const char *why;

        if (wire_full()) {
            stalled = true; /* the host must read our answers before it may ask for more */
            break;
        }
        int state = frame_parse(in_buf + in_pos, in_len - in_pos, &f, &used, &why);

        if (state == FRAME_MORE)
            break;
        if (state == FRAME_READY)
            why = wire_take(&f);
        if (why) {
            char text[160];
            snprintf(text, sizeof text, "protocol error: %s", why);
            wire_abort(2, text);
            return;
        }
        in_pos += used;
    }
    if (in_pos == in_len)
        in_pos = in_len = 0;
}

static bool is_thaw(const struct frame *f)
{
    struct fields fields;
    const char *why;

    return f->type == FRAME_OPEN && f->length >= 14 && fields_parse(f->payload, 14, TAG_BIT(TAG_OP), &fields, &why) == 0 &&
           fields.num[TAG_OP] == OP_THAW;
}

/* Looks for the frame that ends the hold. A HELLO makes all before it void; a THAW is served in its turn. */
static void look_for_thaw(void)
{
    struct frame f;
    size_t used;
    const char *why;
    int state;

    while ((state = frame_parse(in_buf + in_seen, in_len - in_seen, &f, &used, &why)) == FRAME_READY) {
        if (f.type == FRAME_HELLO) {
            in_pos = in_seen + used;
            why = wire_take(&f);
            if (why)
                wire_abort(2, "protocol error: a HELLO that cannot be understood");
            return;
        }
        if (is_thaw(&f)) {
            freeze_end(true);
            return;
        }
        in_seen += used;
    }
    if (state == FRAME_BAD || in_len == HELD_CAP) /* full, and the end of the last frame is not there */
        wire_abort(2, "protocol error: frames that cannot be kept until the thaw");
}

void intake_go_on(void)
{
    do {
        parse_frames();
        if (!wire_held())
            return;
        in_seen = in_pos;
        look_for_thaw();
    } while (!wire_held() && !wire_stopped());
}

/* What is kept until the thaw may be more than ever waits otherwise. */
static void grow_input(void)
{
    void *more = mremap(in_buf, IN_CAP, HELD_CAP, MREMAP_MAYMOVE);

    if (more == MAP_FAILED) {
        wire_abort(1, "there is no memory for what must wait for the thaw");
        return;
    }
    in_buf = more;
    in_cap = HELD_CAP;
}

static void on_readable(struct source *src, uint32_t events)
{
    ssize_t n;

    (void)events;
    if (in_pos) {
        memmove(in_buf, in_buf + in_pos, in_len - in_pos);
        in_len -= in_pos;
        in_seen -= in_seen < in_pos ? in_seen : in_pos;
        in_pos = 0;
    }
    if (wire_held() && in_len == IN_CAP && in_cap == IN_CAP)
        grow_input();
    n = in_cap - in_len < READ_CHUNK ? (ssize_t)(in_cap - in_len) : (ssize_t)READ_CHUNK;
    if (n == 0) {
        loop_want(src, 0); /* full of frames that wait for the host to read: wire_turn goes on */
        return;
    }
    n = read(src->fd, in_buf + in_len, (size_t)n);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (n <= 0) {
        wire_abort(0, NULL); /* the holder is gone */
        return;
    }
    in_len += (size_t)n;
    if (in_len > in_touched)
        in_touched = in_len;
    if (wire_held())
        look_for_thaw();
    if (!wire_held())
        intake_go_on();
}

int intake_init(int fd)
{
    in_buf = mmap(NULL, IN_CAP, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (in_buf == MAP_FAILED)
        return -1;
    madvise(in_buf, IN_CAP, MADV_DONTFORK);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    return loop_add(&intake_source, fd, EPOLLIN, on_readable);
}

bool intake_stalled(void)
{
    return stalled;
}

void intake_trim(void)
{
    if (in_len == 0 && in_touched > 8192) {
        madvise(in_buf, in_touched, MADV_DONTNEED);
        in_touched = 0;
    }
}
