/* Names the host is asked about, once each however many wait for the answer. Bounded, and nothing is allocated. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "dns_server.h"
#include "names.h"
#include "wire.h"

#define ASKS 256
#define WAITING 256
#define NONE_SHARED (100 * MSEC) /* AAAA may come when A of the same lookup is answered already */

struct ask {
    bool used;
    int64_t none_until; /* when not used: until then it is known that there is no such name */
    uint8_t length;
    char name[DNS_NAME_MAX + 1];
    struct stream *stream; /* NULL: it went with the connection to the host, and has to be opened again */
    int64_t until;
};

struct waiting {
    struct ask *ask; /* NULL: free */
    struct dns_client client;
    struct dns_query query;
};

static struct ask asks[ASKS];
static struct waiting waiting[WAITING];
static unsigned waiting_count;
static int64_t next_due = NEVER;

static void done(struct waiting *w)
{
    w->ask = NULL;
    waiting_count--;
}

/* Answers all who wait for it. */
static void ask_finish(struct ask *a, enum dns_code code)
{
    uint32_t address = 0;

    if (code == DNS_NOERROR) {
        address = names_give(a->name, a->length);
        if (address)
            names_good(address, (uint32_t)(now_ns() / (1000 * MSEC)) + DNS_TTL);
        else
            code = DNS_SERVFAIL;
    }
    for (struct waiting *w = waiting; w < waiting + WAITING; w++)
        if (w->ask == a) {
            done(w);
            dns_finish(&w->client, &w->query, code, address);
        }
    a->used = false;
    a->none_until = code == DNS_NXDOMAIN ? now_ns() + NONE_SHARED : 0;
}

static void ask_closed(struct stream *s, const struct fields *f)
{
    struct ask *a = s->ctx;

    if (!a)
        return;
    s->ctx = NULL;
    switch (fields_int(f, TAG_ERRNO, 0)) {
    case 0:
        ask_finish(a, DNS_NOERROR);
        return;
    case ENOENT:
        ask_finish(a, DNS_NXDOMAIN);
        return;
    case EACCES:
        ask_finish(a, DNS_REFUSED);
        return;
    default:
        ask_finish(a, DNS_SERVFAIL);
    }
}

static void ask_released(struct stream *s)
{
    struct ask *a = s->ctx;

    if (!a)
        return;
    a->stream = NULL;
    next_due = 0;
}

static bool ask_open(struct ask *a)
{
    static const struct stream_ops ops = {.closed = ask_closed, .release = ask_released};
    uint8_t buf[DNS_NAME_MAX + 48];
    struct fw w = {buf, 0, sizeof buf, false};

    fw_int(&w, TAG_OP, OP_RESOLVE);
    fw_bytes(&w, TAG_NAME, a->name, a->length);
    if (!names_room(a->name, a->length)) /* the host is told, so that it can tell people */
        fw_int(&w, TAG_FLAGS, RESOLVE_FLAG_FULL);
    a->stream = stream_open(&w, &ops, a);
    a->until = now_ns() + DNS_PATIENCE;
    next_due = earlier(next_due, a->until);
    return a->stream != NULL;
}

static bool is_for(const struct ask *a, const struct dns_query *q)
{
    return a->length == q->name_length && !memcmp(a->name, q->name, q->name_length);
}

bool asks_none(const struct dns_query *q)
{
    int64_t now = now_ns();

    for (const struct ask *a = asks; a < asks + ASKS; a++)
        if (!a->used && a->none_until > now && is_for(a, q))
            return true;
    return false;
}

static struct ask *ask_for(const struct dns_query *q)
{
    struct ask *empty = NULL;

    for (struct ask *a = asks; a < asks + ASKS; a++) {
        if (a->used && is_for(a, q))
            return a;
        if (!a->used && !empty)
            empty = a;
    }
    if (!empty)
        return NULL;
    empty->none_until = 0;
    empty->length = q->name_length;
    memcpy(empty->name, q->name, q->name_length);
    empty->used = ask_open(empty);
    return empty->used ? empty : NULL;
}

static bool same_asker(const struct net_asker *a, const struct net_asker *b)
{
    return a->from.sin_port == b->from.sin_port && a->from.sin_addr.s_addr == b->from.sin_addr.s_addr &&
           a->asked.s_addr == b->asked.s_addr;
}

/* Who has had no answer for some seconds sends the same once more. */
static bool waits_already(const struct dns_client *client, const struct dns_query *q)
{
    for (const struct waiting *w = waiting; w < waiting + WAITING && !client->conn; w++)
        if (w->ask && !w->client.conn && same_asker(&w->client.asker, &client->asker) && w->query.id == q->id &&
            w->query.question_length == q->question_length && !memcmp(w->query.question, q->question, q->question_length + 4u))
            return true;
    return false;
}

bool asks_wait(const struct dns_client *client, const struct dns_query *q)
{
    struct waiting *w = waiting;
    struct ask *a;

    if (waits_already(client, q))
        return true;
    if (waiting_count == WAITING || !(a = ask_for(q)))
        return false;
    while (w->ask)
        w++;
    *w = (struct waiting){a, *client, *q};
    waiting_count++;
    return true;
}

void asks_forget(const struct dns_conn *conn)
{
    for (struct waiting *w = waiting; w < waiting + WAITING; w++)
        if (w->ask && w->client.conn == conn)
            done(w);
}

static void ask_give_up(struct ask *a)
{
    if (a->stream) {
        a->stream->ctx = NULL;
        stream_abandon(a->stream);
    }
    ask_finish(a, DNS_SERVFAIL);
}

int64_t asks_timers(int64_t now)
{
    if (now < next_due)
        return next_due;
    next_due = NEVER;
    for (struct ask *a = asks; a < asks + ASKS; a++) {
        if (!a->used)
            continue;
        if (a->stream ? a->until <= now : !ask_open(a))
            ask_give_up(a);
        else
            next_due = earlier(next_due, a->until);
    }
    return next_due;
}
