/* The table of synthetic addresses: see names.h. It is part of every snapshot of a sandbox's memory, so it is small: entries in
 * one array that grows, the texts behind one another in blocks that never move. */
#define _GNU_SOURCE
#include "names.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define BUCKETS 4096
#define BLOCK 4096

struct entry {
    const char *text;
    uint32_t until;
    uint16_t next; /* in its bucket, plus 1 */
    uint8_t length;
};

static struct entry *entries;
static size_t count, room;
static uint16_t bucket[BUCKETS]; /* the latest entry, plus 1 */
static char *block;
static size_t block_left;
static uint32_t seed;

/* Seeded, so that nobody inside can choose names that share a bucket. The upper bits depend on every byte. */
static size_t slot(const char *name, size_t n)
{
    uint32_t hash = seed;

    for (size_t i = 0; i < n; i++)
        hash = (hash ^ (uint8_t)name[i]) * 16777619u;
    return (hash ^ hash << 7) >> 20;
}

static struct entry *find(const char *name, size_t n)
{
    for (uint16_t i = count ? bucket[slot(name, n)] : 0; i; i = entries[i - 1].next)
        if (entries[i - 1].length == n && !memcmp(entries[i - 1].text, name, n))
            return &entries[i - 1];
    return NULL;
}

static uint32_t address_of(const struct entry *e)
{
    return NAMES_FIRST + (uint32_t)(e - entries);
}

static const char *keep(const char *name, size_t n)
{
    char *text;

    if (n + 1 > block_left) {
        char *more = malloc(BLOCK);
        if (!more)
            return NULL;
        block = more;
        block_left = BLOCK;
    }
    text = block + BLOCK - block_left;
    memcpy(text, name, n);
    text[n] = 0;
    block_left -= n + 1;
    return text;
}

static bool grow(void)
{
    size_t more = room ? 2 * room : 64;
    struct entry *larger = realloc(entries, more * sizeof *larger);

    if (!larger)
        return false;
    entries = larger;
    room = more;
    return true;
}

uint32_t names_give(const char *name, size_t n)
{
    struct entry *e;
    size_t at;
    const char *text;

    if (!n || n > NAME_LENGTH_MAX)
        return 0;
    if (!seed) {
        if (getrandom(&seed, sizeof seed, GRND_NONBLOCK) != sizeof seed)
            seed = (uint32_t)(uintptr_t)&n;
        seed |= 1;
    }
    e = find(name, n);
    if (e)
        return address_of(e);
    if (count == NAMES_MAX || (count == room && !grow()) || !(text = keep(name, n)))
        return 0;
    at = slot(name, n);
    e = &entries[count++];
    *e = (struct entry){.text = text, .length = (uint8_t)n, .next = bucket[at]};
    bucket[at] = (uint16_t)count;
    return address_of(e);
}

bool names_room(const char *name, size_t n)
{
    return count < NAMES_MAX || find(name, n);
}

const char *names_find(uint32_t address)
{
    return address - NAMES_FIRST < count ? entries[address - NAMES_FIRST].text : NULL;
}

void names_good(uint32_t address, uint32_t until)
{
    if (address - NAMES_FIRST < count)
        entries[address - NAMES_FIRST].until = until;
}

uint32_t names_known(const char *name, size_t n, uint32_t now)
{
    const struct entry *e = find(name, n);

    return e && e->until > now ? address_of(e) : 0;
}

void names_stale(void)
{
    for (size_t i = 0; i < count; i++)
        entries[i].until = 0;
}
