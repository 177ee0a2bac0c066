/* ATTACH, SIGNAL, PS and FORGET. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ops.h"
#include "proc.h"
#include "records.h"

static struct proc *want_proc(struct stream *s, const struct fields *f)
{
    bool by_os = fields_have(f, TAG_OSPID);
    struct proc *p;

    if (by_os == fields_have(f, TAG_PID)) {
        stream_fail(s, EINVAL, NULL, "bad request: one of PID and OSPID is needed");
        return NULL;
    }
    p = by_os ? proc_find_os(f->num[TAG_OSPID]) : proc_find(f->num[TAG_PID]);
    if (p && p->state != PROC_STARTING)
        return p;
    stream_fail(s, ESRCH, NULL, "no process with this number");
    return NULL;
}

static uint64_t replay_from(const struct ring *r, const struct fields *f, int tag)
{
    int64_t from = fields_int(f, tag, 0);
    uint64_t oldest = ring_oldest(r);

    if (from == -1 || (from > 0 && (uint64_t)from > r->total))
        return r->total;
    return from < 0 || (uint64_t)from < oldest ? oldest : (uint64_t)from;
}

void op_attach(struct stream *s, const struct fields *f)
{
    struct proc *p = want_proc(s, f);
    uint8_t buf[64];
    struct fw w = {buf, 0, sizeof buf, false};
    struct attach *a;
    int64_t flags;

    if (!p || !want_flags(s, f, EXEC_FLAG_KILL_ON_RESET | EXEC_FLAG_LOSSY, &flags))
        return;
    a = io_attach(p, s, flags);
    if (!a) {
        stream_fail(s, ENOMEM, NULL, "the agent has no memory");
        return;
    }
    a->start[0] = a->pos[0] = replay_from(&p->ch[0].ring, f, TAG_FROM_OUT);
    a->start[1] = a->pos[1] = replay_from(&p->ch[1].ring, f, TAG_FROM_ERR);
    fw_int(&w, TAG_PID, p->id);
    fw_int(&w, TAG_OSPID, p->ospid);
    fw_int(&w, TAG_OFFSET_OUT, (int64_t)a->start[0]);
    fw_int(&w, TAG_OFFSET_ERR, (int64_t)a->start[1]);
    stream_reply(s, &w);
    a->replied = true;
    io_update(p);
    stream_ready(s);
}

void op_signal(struct stream *s, const struct fields *f)
{
    struct proc *p = want_proc(s, f);
    int64_t signum = f->num[TAG_SIGNUM], flags;
    uint8_t buf[16];
    struct fw w = {buf, 0, sizeof buf, false};

    if (!p || !want_flags(s, f, SIGNAL_FLAG_MAIN_ONLY, &flags))
        return;
    if (signum < 0 || signum > 64) {
        stream_fail(s, EINVAL, NULL, "no such signal");
        return;
    }
    fw_int(&w, TAG_COUNT, kill_tree(p, (int)signum, flags & SIGNAL_FLAG_MAIN_ONLY));
    stream_close(s, &w);
}

void op_forget(struct stream *s, const struct fields *f)
{
    struct proc *p = want_proc(s, f);

    if (!p)
        return;
    if (p->state != PROC_EXITED) {
        stream_fail(s, EBUSY, NULL, "the process has not ended");
        return;
    }
    p->hidden = true; /* goes for good when its last background child and stream have gone */
    stream_done(s);
    proc_evict();
}

struct ps {
    int64_t cursor;
    struct records records;
};

static void ps_record(struct records *r, const struct proc *p)
{
    struct fw w = record_begin();

    fw_int(&w, TAG_PID, p->id);
    fw_int(&w, TAG_OSPID, p->ospid);
    fw_int(&w, TAG_STATE, p->state == PROC_EXITED);
    fw_int(&w, TAG_FLAGS, p->flags);
    fw_int(&w, TAG_STARTED_NS, p->started_wall);
    if (p->tag)
        fw_text(&w, TAG_TAG, p->tag);
    for (size_t at = 0; at < p->argv_len; at += strlen(p->argv + at) + 1)
        fw_text(&w, TAG_ARGV, p->argv + at);
    if (p->state == PROC_EXITED)
        exit_fields(&w, p, p->ch[0].ring.total, p->ch[1].ring.total);
    record_add(r, &w);
}

static enum pump ps_pump(struct stream *s)
{
    struct ps *ps = s->ctx;
    struct proc *p;

    /* By number, not by pointer: the table may change between turns. */
    for (p = proc_list; p && records_pending(&ps->records) < RECORDS_ENOUGH; p = p->next)
        if (p->id > ps->cursor && !p->hidden && p->state != PROC_STARTING) {
            ps_record(&ps->records, p);
            ps->cursor = p->id;
        }
    records_flush(&ps->records, s);
    if (records_pending(&ps->records))
        return records_wait(s);
    if (p)
        return PUMP_AGAIN;
    stream_done(s);
    return PUMP_GONE;
}

static void ps_release(struct stream *s)
{
    struct ps *ps = s->ctx;

    records_free(&ps->records);
    free(ps);
}

void op_ps(struct stream *s, const struct fields *f)
{
    static const struct stream_ops ops = {.pump = ps_pump, .release = ps_release};

    (void)f;
    s->ctx = calloc(1, sizeof(struct ps));
    if (!s->ctx) {
        stream_fail(s, ENOMEM, NULL, "the agent has no memory");
        return;
    }
    s->ops = &ops;
    stream_ready(s);
}
