/* Queries and answers: see dns_message.h, RFC 1035 section 4 and RFC 6891. */
#include "dns_message.h"

#include <string.h>

#define HEADER 12
#define TYPE_OPT 41
#define CLASS_IN 1
#define EXTRA_RECORDS 4 /* an OPT, perhaps a signature */
#define WIRE_NAME_MAX 255

#define FLAG_RESPONSE 0x8000
#define FLAG_OPCODE 0x7800
#define FLAG_RECURSION_WANTED 0x0100
#define FLAG_RECURSION 0x0080
#define FLAG_CHECKING_DISABLED 0x0010

static uint16_t get16(const uint8_t *p)
{
    return (uint16_t)(p[0] << 8 | p[1]);
}

static uint8_t *put16(uint8_t *p, unsigned v)
{
    p[0] = (uint8_t)(v >> 8);
    p[1] = (uint8_t)v;
    return p + 2;
}

static char fold(uint8_t c)
{
    return (char)(c >= 'A' && c <= 'Z' ? c + 32 : c);
}

static bool plain(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

/* The question's name, at *at, which is moved behind it. A pointer cannot point at anything before the first name, so there is
 * no honest one. */
static bool parse_name(const uint8_t *p, size_t n, size_t *at, struct dns_query *q)
{
    size_t begin = *at, text = 0;

    for (;;) {
        size_t label;

        if (*at >= n)
            return false;
        label = p[(*at)++];
        if (!label)
            break;
        if (label > 63 || label > n - *at || *at + label + 1 - begin > WIRE_NAME_MAX)
            return false;
        if (text)
            q->name[text++] = '.';
        for (size_t i = 0; i < label; i++) {
            char c = fold(p[*at + i]);
            q->strange |= !plain(c);
            q->name[text++] = c;
        }
        *at += label;
    }
    q->name[text] = 0;
    q->name_length = (uint8_t)text;
    return true;
}

/* The name of a record that is of no interest. Here a pointer may be, and ends it. */
static bool skip_name(const uint8_t *p, size_t n, size_t *at)
{
    while (*at < n) {
        size_t label = p[(*at)++];
        if (!label)
            return true;
        if (label >= 0xc0)
            return (*at)++ < n;
        if (label > 63 || label > n - *at)
            return false;
        *at += label;
    }
    return false;
}

static enum dns_code parse_extra(const uint8_t *p, size_t n, size_t at, unsigned records, struct dns_query *q)
{
    bool unknown_version = false;

    if (records > EXTRA_RECORDS)
        return DNS_FORMERR;
    while (records--) {
        size_t begin = at, length;

        if (!skip_name(p, n, &at) || n - at < 10)
            return DNS_FORMERR;
        length = get16(p + at + 8);
        if (length > n - at - 10)
            return DNS_FORMERR;
        if (get16(p + at) == TYPE_OPT) {
            if (q->edns || p[begin])
                return DNS_FORMERR;
            q->edns = true;
            q->dnssec_ok = p[at + 6] & 0x80;
            unknown_version = p[at + 5] != 0;
        }
        at += 10 + length;
    }
    if (at != n)
        return DNS_FORMERR;
    return unknown_version ? DNS_BADVERS : DNS_NOERROR;
}

enum dns_code dns_parse(const uint8_t *p, size_t n, struct dns_query *q)
{
    enum dns_code code;
    size_t at = HEADER;

    memset(q, 0, sizeof *q);
    if (n < HEADER || n > DNS_QUERY_MAX || get16(p + 2) & FLAG_RESPONSE)
        return DNS_DROP;
    q->id = get16(p);
    q->flags = get16(p + 2);
    if (q->flags & FLAG_OPCODE)
        return DNS_NOTIMP;
    if (get16(p + 4) != 1 || get16(p + 6) || get16(p + 8) || !parse_name(p, n, &at, q) || n - at < 4)
        return DNS_FORMERR;
    q->type = get16(p + at);
    at += 4;
    code = parse_extra(p, n, at, get16(p + 10), q);
    if (code == DNS_FORMERR)
        return code;
    q->question_length = (uint8_t)(at - HEADER - 4); /* the name's: at most 255 */
    memcpy(q->question, p + HEADER, at - HEADER);
    if (code == DNS_NOERROR && get16(p + at - 2) != CLASS_IN)
        return DNS_REFUSED;
    return code;
}

static uint8_t *put_opt(uint8_t *p, const struct dns_query *q, enum dns_code code)
{
    *p++ = 0; /* the root */
    p = put16(p, TYPE_OPT);
    p = put16(p, DNS_QUERY_MAX);
    *p++ = (uint8_t)(code >> 4);
    *p++ = 0; /* version */
    p = put16(p, q->dnssec_ok ? 0x8000 : 0);
    return put16(p, 0);
}

size_t dns_build(const struct dns_query *q, enum dns_code code, const struct dns_data *data, uint8_t out[DNS_ANSWER_MAX])
{
    unsigned kept = FLAG_OPCODE | FLAG_RECURSION_WANTED | FLAG_CHECKING_DISABLED;
    size_t room = DNS_ANSWER_MAX - HEADER - 4 - 12 - 11; /* less the question's fixed part, the record's and the OPT */
    bool answers = code == DNS_NOERROR && data && data->length && q->question_length + data->length <= room;
    uint8_t *p = out;

    p = put16(p, q->id);
    p = put16(p, FLAG_RESPONSE | FLAG_RECURSION | (q->flags & kept) | ((unsigned)code & 15));
    p = put16(p, q->question_length ? 1 : 0);
    p = put16(p, answers);
    p = put16(p, 0);
    p = put16(p, q->edns);
    if (q->question_length) {
        memcpy(p, q->question, q->question_length + 4u);
        p += q->question_length + 4;
    }
    if (answers) {
        p = put16(p, 0xc000 | HEADER); /* the question's name */
        p = put16(p, q->type);
        p = put16(p, CLASS_IN);
        p = put16(p, 0);
        p = put16(p, DNS_TTL);
        p = put16(p, data->length);
        memcpy(p, data->bytes, data->length);
        p += data->length;
    }
    if (q->edns)
        p = put_opt(p, q, code);
    return (size_t)(p - out);
}

void dns_address(struct dns_data *data, uint32_t address)
{
    data->length = 4;
    put16(put16(data->bytes, address >> 16), address & 0xffff);
}

void dns_pointer(struct dns_data *data, const char *name)
{
    size_t n = 0;

    while (*name) {
        size_t label = strcspn(name, ".");
        data->bytes[n++] = (uint8_t)label;
        memcpy(data->bytes + n, name, label);
        n += label;
        name += label + (name[label] == '.');
    }
    data->bytes[n++] = 0;
    data->length = (uint8_t)n;
}

bool dns_reverse(const char *name, uint32_t *address)
{
    *address = 0;
    for (int i = 0; i < 4; i++) {
        unsigned part = 0, digits = 0;

        for (; *name >= '0' && *name <= '9' && digits < 3; digits++)
            part = part * 10 + (unsigned)(*name++ - '0');
        if (!digits || part > 255 || *name++ != '.')
            return false;
        *address |= part << (8 * i);
    }
    return !strcmp(name, "in-addr.arpa");
}

bool dns_is_local(const char *name)
{
    static const char local[] = "localhost";
    size_t n = strlen(name), own = sizeof local - 1;

    return n >= own && !strcmp(name + n - own, local) && (n == own || name[n - own - 1] == '.');
}

bool dns_is_number(const char *name)
{
    const char *dot = strrchr(name, '.'), *last = dot ? dot + 1 : name;

    if (!strncmp(last, "0x", 2))
        return strspn(last + 2, "0123456789abcdef") == strlen(last + 2);
    return *last && strspn(last, "0123456789") == strlen(last);
}
