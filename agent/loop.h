/* The event loop: fds to wait for, a deadline, and how long to wait. One thread, no globals leak. */
#ifndef SLOPLET_LOOP_H
#define SLOPLET_LOOP_H

#include <stdbool.h>
#include <stdint.h>

struct source;
typedef void source_fn(struct source *s, uint32_t events);

/* Embedded in whatever owns the fd; the callback finds its owner by offset (OWNER). */
struct source {
    int fd; /* -1: not in use */
    uint32_t want;
    source_fn *fn;
};

#define OWNER(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))
#define NEVER INT64_MAX
#define MSEC INT64_C(1000000)

int loop_init(void);
/* Takes an fd under watch. events 0 means: known, but nothing is waited for now. */
int loop_add(struct source *s, int fd, uint32_t events, source_fn *fn);
/* Changes what is waited for. 0 really stops: a hung-up pipe would otherwise spin. */
void loop_want(struct source *s, uint32_t events);
/* Forgets the source and closes its fd. Safe from any callback, and twice. */
void loop_close(struct source *s);
/* Waits up to timeout_ns (NEVER: forever) and runs callbacks. Number of events, 0 on timeout. */
int loop_wait(int64_t timeout_ns);

/* Waits for these two and nothing else, as long as it takes; all other sources keep what they have to tell. As loop_wait. */
int loop_wait_pair(struct source *a, struct source *b);
/* From a callback: what else this wait has found is found again by a later one. */
void loop_cut(void);

int64_t now_ns(void); /* monotonic: no clock step moves a timeout */

static inline int64_t earlier(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

#endif
