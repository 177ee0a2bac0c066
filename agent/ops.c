/* From an OPEN frame to an operation: which fields each may carry, and the checks they share. */
#include "ops.h"

#include <errno.h>
#include <string.h>

#include "freeze.h"
#include "guest.h"
#include "layers.h"
#include "proc.h"

#define B(tag) TAG_BIT(TAG_##tag)

static const struct op {
    int number;
    tag_set allowed, needed;
    void (*run)(struct stream *s, const struct fields *f);
} table[] = {
    {OP_EXEC, B(ARGV) | B(ENV) | B(CWD) | B(USER) | B(FLAGS) | B(ROWS) | B(COLS) | B(TIMEOUT_MS) | B(RING) | B(TAG), 0, op_exec},
    {OP_ATTACH, B(PID) | B(OSPID) | B(FLAGS) | B(FROM_OUT) | B(FROM_ERR), 0, op_attach},
    {OP_SIGNAL, B(PID) | B(OSPID) | B(SIGNUM) | B(FLAGS), B(SIGNUM), op_signal},
    {OP_PS, 0, 0, op_ps},
    {OP_FORGET, B(PID), B(PID), op_forget},
    {OP_READ, B(PATH) | B(OFFSET) | B(LENGTH) | B(USER), B(PATH), op_read},
    {OP_WRITE, B(PATH) | B(MODE) | B(FLAGS) | B(USER) | B(OWNER), B(PATH), op_write},
    {OP_LIST, B(PATH) | B(FLAGS) | B(DEPTH) | B(PREFIX) | B(USER), B(PATH), op_list},
    {OP_STAT, B(PATH) | B(FLAGS) | B(PREFIX) | B(USER), B(PATH), op_stat},
    {OP_MKDIR, B(PATH) | B(MODE) | B(FLAGS) | B(USER) | B(OWNER), B(PATH), op_mkdir},
    {OP_REMOVE, B(PATH) | B(FLAGS) | B(USER), B(PATH), op_remove},
    {OP_MOVE, B(PATH) | B(PATH2) | B(FLAGS) | B(USER), B(PATH) | B(PATH2), op_move},
    {OP_CHMOD, B(PATH) | B(MODE) | B(USER), B(PATH) | B(MODE), op_chmod},
    {OP_CHOWN, B(PATH) | B(OWNER) | B(USER), B(PATH) | B(OWNER), op_chown},
    {OP_SYMLINK, B(PATH) | B(PATH2) | B(USER), B(PATH) | B(PATH2), op_symlink},
    {OP_WATCH, B(PATH) | B(FLAGS) | B(USER), B(PATH), op_watch},
    {OP_GETXATTRS, B(PATH) | B(PREFIX) | B(USER), B(PATH), op_getxattrs},
    {OP_SETXATTRS, B(PATH) | B(FLAGS) | B(PREFIX) | B(ATTRIBUTE) | B(USER), B(PATH), op_setxattrs},
    {OP_METRICS, 0, 0, op_metrics},
    {OP_SHUTDOWN, B(TIMEOUT_MS), 0, op_shutdown},
    {OP_FREEZE, B(TIMEOUT_MS) | B(FLAGS), 0, op_freeze},
    {OP_THAW, 0, 0, op_thaw},
    {OP_CHANGES, B(PATH) | B(FLAGS), 0, op_changes},
    {OP_UNPACK, B(PATH), 0, op_unpack},
    {OP_DIAL, B(PORT) | B(ADDRESS), B(PORT), op_dial},
};

void op_dispatch(struct stream *s, const uint8_t *payload, uint32_t n)
{
    struct fields f;
    const char *why = "no OP field";
    const struct op *op = NULL;
    int error;

    baseline_take();
    /* OP comes first, so that the fields behind it can be judged by it. */
    if (n < 14 || payload[0] != TAG_OP || fields_parse(payload, 14, B(OP), &f, &why)) {
        stream_fail(s, EPROTO, NULL, "bad request: %s", why);
        return;
    }
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].number == f.num[TAG_OP])
            op = &table[i];
    if (!op) {
        stream_fail(s, EOPNOTSUPP, NULL, "this agent does not know operation %lld", (long long)f.num[TAG_OP]);
        return;
    }
    error = fields_parse(payload + 14, n - 14, op->allowed, &f, &why);
    if (error)
        stream_fail(s, error, NULL, "bad request: %s", why);
    else if ((f.have & op->needed) != op->needed)
        stream_fail(s, EINVAL, NULL, "bad request: a needed field is missing");
    else if (op->number == OP_EXEC && freeze_serving())
        stream_fail(s, EBUSY, NULL, "the sandbox is frozen");
    else
        op->run(s, &f);
}

bool want_user(struct stream *s, const struct fields *f, struct user *u)
{
    const char *name = guest.default_user;
    size_t n = strlen(name);
    int error;

    if (fields_have(f, TAG_USER)) {
        name = (const char *)f->text[TAG_USER].p;
        n = f->text[TAG_USER].len;
    }
    error = n ? user_resolve(name, n, u) : ESRCH;
    if (error)
        stream_fail(s, error, "user", "no such user in this sandbox: %.*s", (int)(n < 64 ? n : 64), name);
    return !error;
}

bool want_path(struct stream *s, const struct fields *f, int tag, char *out)
{
    size_t n = f->text[tag].len, base = 0;

    if (n == 0 || n >= PATH_LIMIT) {
        stream_fail(s, n ? ENAMETOOLONG : EINVAL, "path", n ? "the path is too long" : "the path is empty");
        return false;
    }
    if (f->text[tag].p[0] != '/') {
        base = strlen(guest.workdir);
        memcpy(out, guest.workdir, base);
        out[base++] = '/';
    }
    memcpy(out + base, f->text[tag].p, n);
    out[base + n] = 0;
    if (base + n >= PATH_LIMIT) {
        stream_fail(s, ENAMETOOLONG, "path", "the path is too long");
        return false;
    }
    return true;
}

bool want_flags(struct stream *s, const struct fields *f, int64_t known, int64_t *flags)
{
    *flags = fields_int(f, TAG_FLAGS, 0);
    if (*flags & ~known) {
        stream_fail(s, EINVAL, NULL, "a flag this operation does not know");
        return false;
    }
    return true;
}
