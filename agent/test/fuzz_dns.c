/* Fuzz target of DNS messages: any bytes are a question to be answered, one to be refused, or nothing. */
#include <stdlib.h>
#include <string.h>

#include "dns_message.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(int condition)
{
    if (!condition)
        abort();
}

/* What is answered is well formed: the counts are true, and it ends where it should. */
static void check_answer(const uint8_t *p, size_t n, const struct dns_query *q, bool has_data)
{
    size_t at = 12;

    must(n >= 12 && n <= DNS_ANSWER_MAX && p[0] == q->id >> 8 && p[1] == (q->id & 255) && p[2] & 0x80 && !(p[2] & 2));
    must(!p[4] && !p[6] && !p[8] && !p[9] && !p[10]);
    must(p[5] == (q->question_length != 0) && p[7] == has_data && p[11] == q->edns);
    if (p[5])
        at += q->question_length + 4u;
    if (p[7])
        at += 12u + (size_t)(p[at + 10] << 8 | p[at + 11]);
    if (p[11])
        at += 11;
    must(at == n);
}

static void check_name(const struct dns_query *q)
{
    struct dns_data data;
    uint32_t address;
    bool letters = true;

    must(strlen(q->name) == q->name_length && q->name_length <= DNS_NAME_MAX);
    must(strspn(q->name, "abcdefghijklmnopqrstuvwxyz0123456789-_.") == q->name_length && !strstr(q->name, ".."));
    dns_pointer(&data, q->name);
    must(data.length == q->question_length);
    for (size_t i = 0; i < data.length; i++) /* the same name again, but for the case */
        letters &= data.bytes[i] == q->question[i] || (data.bytes[i] == (q->question[i] | 32) && data.bytes[i] >= 'a');
    must(letters);
    (void)dns_is_local(q->name);
    if (dns_reverse(q->name, &address))
        must(!dns_is_number(q->name));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct dns_query q;
    struct dns_data record = {.length = n ? data[n - 1] : 0};
    uint8_t out[DNS_ANSWER_MAX];
    enum dns_code code = dns_parse(data, n, &q);

    if (code == DNS_DROP)
        return 0;
    must(n >= 12 && n <= DNS_QUERY_MAX);
    check_answer(out, dns_build(&q, code, NULL, out), &q, false);
    if (code != DNS_NOERROR)
        return 0;
    must(q.question_length && !memcmp(q.question, data + 12, q.question_length + 4u));
    if (!q.strange)
        check_name(&q);
    check_answer(out, dns_build(&q, DNS_NOERROR, &record, out), &q,
                 record.length && 12 + q.question_length + 4 + 12 + record.length + 11 <= DNS_ANSWER_MAX);

    return 0;
}
