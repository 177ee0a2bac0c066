#include "ops.h"
#include <errno.h>
void op_list(struct stream *s, const struct fields *f) { (void)f; stream_fail(s, ENOSYS, 0, "todo"); }
void op_remove(struct stream *s, const struct fields *f) { (void)f; stream_fail(s, ENOSYS, 0, "todo"); }
