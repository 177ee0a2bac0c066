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

const char *links_meet(struct links *l, const struct stat *st, const char *path)
{
    struct link_seen **at = &l->bucket[(st->st_ino ^ st->st_ino >> 9) % LINK_BUCKETS], *e;
    size_t size = sizeof *e + strlen(path) + 1;

    for (e = *at; e; e = e->next)
        if (e->ino == st->st_ino && e->dev == st->st_dev)
            return e->path;
    e = l->bytes + size <= BYTES_MAX ? malloc(size) : NULL;
    if (!e)
        return NULL;
    *e = (struct link_seen){.next = *at, .dev = st->st_dev, .ino = st->st_ino};
    strcpy(e->path, path);
    *at = e;
    l->bytes += size;
    return NULL;
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
