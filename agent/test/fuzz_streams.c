/* Fuzz target of the streams' lives: frames of a host that may lie, both sides' streams, and operations that close, abandon or
 * send at any moment. The table must fit what was opened, and every context be released once. */
#include "../streams.c"
#include "../wire.c" /* for their state */

#define CONTEXTS 4096

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

struct source intake_source = {.fd = -1};
static const uint8_t *input;
static size_t left;
static struct stream *live[CONTEXTS]; /* those that have a context */
static size_t lives;
static unsigned room_told;

static void must(int condition)
{
    if (!condition)
        abort();
}

static uint8_t next_byte(void)
{
    return left ? left--, *input++ : 0;
}

/* -- what wire.c needs of the others */

int loop_add(struct source *s, int fd, uint32_t events, source_fn *fn) { (void)s, (void)fd, (void)events, (void)fn; return 0; }
void loop_want(struct source *s, uint32_t events) { (void)s, (void)events; }
int loop_wait_pair(struct source *a, struct source *b) { (void)a, (void)b; return 0; }
void loop_cut(void) {}
int intake_init(int fd) { (void)fd; return 0; }
bool intake_stalled(void) { return false; }
void intake_go_on(void) {}
void intake_trim(void) {}
void net_restored(void) {}

int hello_handle(const uint8_t *payload, uint32_t n, const char **why)
{
    (void)payload;
    *why = "a HELLO that is not taken";
    return n % 7 == 6 ? -1 : 0;
}

/* -- operations */

static bool whim(struct stream *s)
{
    switch (next_byte() % 8) {
    case 0:
        if (stream_is_own(s->id))
            stream_abandon(s);
        else
            stream_done(s);
        return true;
    case 1:
        stream_ready(s);
        return false;
    case 2:
        if (!stream_is_own(s->id))
            stream_fail(s, EIO, "path", "a whim of %d", 1);
        else
            stream_abandon(s);
        return true;
    default:
        return false;
    }
}

static void on_whim_data(struct stream *s, const uint8_t *p, uint32_t n)
{
    volatile uint8_t sink = p[0] ^ p[n - 1];

    (void)sink;
    stream_consumed(s, n);
    whim(s);
}

static void on_whim(struct stream *s)
{
    whim(s);
}

static void on_whim_ctrl(struct stream *s, const struct fields *f)
{
    (void)f;
    whim(s);
}

static void on_told(struct stream *s, const struct fields *f)
{
    must(stream_is_own(s->id));
    (void)fields_int(f, TAG_ERRNO, 0);
}

static enum pump on_pump(struct stream *s)
{
    size_t max;
    uint8_t *to = stream_data_begin(s, &max);

    if (to && max) {
        size_t n = 1 + next_byte() * 257u % max;
        memset(to, 1, n);
        stream_data_commit(s, stream_is_own(s->id) ? CHANNEL_IN : CHANNEL_OUT, n);
    }
    return whim(s) ? PUMP_GONE : next_byte() % 2 ? PUMP_AGAIN : PUMP_WAIT;
}

static void on_release(struct stream *s)
{
    size_t i = 0;

    must(s->ctx != NULL);
    while (i < lives && live[i] != s)
        i++;
    must(i < lives);
    live[i] = live[--lives];
    free(s->ctx);
    s->ctx = NULL;
}

static const struct stream_ops whims = {
    .data = on_whim_data,
    .end = on_whim,
    .ctrl = on_whim_ctrl,
    .pump = on_pump,
    .reply = on_told,
    .closed = on_told,
    .release = on_release,
};

static void keep(struct stream *s)
{
    must(lives < CONTEXTS);
    live[lives++] = s;
}

void op_dispatch(struct stream *s, const uint8_t *payload, uint32_t n)
{
    (void)payload;
    if (n % 5 == 4) {
        stream_fail(s, EPROTO, NULL, "not now");
        return;
    }
    s->ctx = malloc(1);
    s->ops = &whims;
    keep(s);
}

static void open_one(void)
{
    uint8_t buf[64];
    struct fw w = {buf, 0, sizeof buf, false};
    void *ctx = malloc(1);
    struct stream *s;

    fw_int(&w, TAG_OP, OP_CONNECT);
    s = stream_open(&w, &whims, ctx);
    if (s)
        keep(s);
    else
        free(ctx);
}

static void on_room(void)
{
    must(stream_possible());
    room_told++;
}

/* -- the table fits */

static void check(void)
{
    unsigned own = 0, theirs = 0, alive = 0;

    for (int i = 0; i < BUCKETS; i++)
        for (struct stream *s = table[i]; s; s = s->next) {
            ++*(stream_is_own(s->id) ? &own : &theirs);
            alive += s->ctx != NULL;
            must(!s->abandoned || (!s->ctx && !s->ops && !s->queued));
            must(s->send_credit <= WIRE_MAX_CREDIT && s->recv_window <= WIRE_INITIAL_CREDIT);
            must(!stream_is_own(s->id) || stream_was_own(s->id));
        }
    must(own == own_count && theirs == their_count && own <= OWN_MAX && theirs <= WIRE_MAX_STREAMS && alive == lives);
    for (struct stream *s = ready_head; s; s = s->next_ready)
        must(s->queued && s->ops);
}

static void begin(void)
{
    streams_forget();
    must(!lives && !own_count && !their_count && !ready_head);
    wire_forget();
    wire_out.head = wire_out.tail = 0;
    greeted = finishing = over = held = false;
    when_possible = NULL;
}

static bool one_frame(void)
{
    struct frame f;
    size_t used;
    const char *why;

    if (frame_parse(input, left, &f, &used, &why) != FRAME_READY)
        return false;
    input += used;
    left -= used;
    return wire_take(&f) == NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    input = data;
    left = n;
    begin();
    while (left) {
        switch (next_byte() % 8) {
        case 0:
            for (int many = next_byte() % 64 == 63 ? 1100 : 1; many > 0; many--)
                open_one();
            break;
        case 1:
            if (lives)
                whim(live[next_byte() % lives]);
            break;
        case 2:
            streams_turn();
            wire_out.head = wire_out.tail = 0;
            streams_tell();
            break;
        case 3:
            stream_when_possible(on_room);
            break;
        default:
            if (!one_frame()) {
                begin();
                return 0;
            }
        }
        check();
        if (outq_len(&wire_out) > OUT_STOP)
            wire_out.head = wire_out.tail = 0;
    }
    begin();
    return 0;
}
