#include "watch.h"
#include "loop.h"
#include "ops.h"
#include <errno.h>
int64_t watch_timers(int64_t now) { (void)now; return NEVER; }
void op_watch(struct stream *s, const struct fields *f) { (void)f; stream_fail(s, ENOSYS, 0, "todo"); }
