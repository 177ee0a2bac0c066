/* Hard links: see links.h. */
#include "links.h"

#include <stdlib.h>
#include <string.h>

#define BYTES_MAX (4u * 1024 * 1024)

struct link_seen {
    struct link_seen *next;
    dev_t dev;
    ino_t ino;
    char path[];
};

static size_t slot(const struct stat *st)
{
    return (size_t)(st->st_ino ^ st->st_ino >> 9) % LINK_BUCKETS;
}

const char *links_find(const struct links *l, const struct stat *st)
{
    for (const struct link_seen *e = l->bucket[slot(st)]; e; e = e->next)
        if (e->ino == st->st_ino && e->dev == st->st_dev)
            return e->path;
    return NULL;
}

void links_remember(struct links *l, const struct stat *st, const char *path)
{
    size_t size = sizeof(struct link_seen) + strlen(path) + 1;
    struct link_seen *e = l->bytes + size <= BYTES_MAX ? malloc(size) : NULL;

    if (!e)
        return;
    *e = (struct link_seen){.next = l->bucket[slot(st)], .dev = st->st_dev, .ino = st->st_ino};
    strcpy(e->path, path);
    l->bucket[slot(st)] = e;
    l->bytes += size;
}

void links_free(struct links *l)
{
    for (int i = 0; i < LINK_BUCKETS; i++)
        while (l->bucket[i]) {
            struct link_seen *e = l->bucket[i];
            l->bucket[i] = e->next;
            free(e);
        }
    l->bytes = 0;
}
