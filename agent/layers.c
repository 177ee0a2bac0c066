/* Layers and their baseline: see layers.h. */
#define _GNU_SOURCE
#include "layers.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent.h"
#include "path.h"
#include "tree.h"

#define BASELINE_MAX 20000

struct known {
    char *path;
    int layer;
    ino_t ino;
    mode_t mode;
    uid_t uid;
    gid_t gid;
    struct timespec changed;
};

static struct known *known;
static size_t known_count, known_cap;
static bool due, taken;

bool layers_known(void)
{
    return agent_layers >= 0;
}

/* A root that is no overlay is a layer too: a folder of the scratch filesystem. */
static bool root_is_overlay(void)
{
    for (int i = 0; i < agent_layers; i++)
        if (!agent_layer[i].path[0])
            return true;
    return false;
}

bool layer_open(int number, struct layer *out)
{
    char name[16];

    errno = 0;
    if (!root_is_overlay() && number-- == 0) {
        *out = (struct layer){path_open(AT_FDCWD, "/", O_RDONLY | O_DIRECTORY, 0), "", false};
        return out->fd >= 0;
    }
    if (number >= agent_layers)
        return false;
    snprintf(name, sizeof name, "%d", agent_layer[number].number);
    out->fd = openat(agent_upper_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    out->at = agent_layer[number].path;
    out->overlay = true;
    return out->fd >= 0;
}

bool in_volume(const char *path)
{
    for (int i = 0; i < agent_volumes; i++) {
        size_t n = strlen(agent_volume[i]);
        if (!strncmp(path, agent_volume[i], n) && (path[n] == 0 || path[n] == '/'))
            return true;
    }
    return false;
}

bool is_whiteout(const struct stat *st)
{
    return S_ISCHR(st->st_mode) && st->st_rdev == 0;
}

static int by_path(const void *a, const void *b)
{
    return strcmp(((const struct known *)a)->path, ((const struct known *)b)->path);
}

static const struct known *find(const char *path)
{
    struct known key = {.path = (char *)(uintptr_t)path};

    return known_count ? bsearch(&key, known, known_count, sizeof *known, by_path) : NULL;
}

/* Of a file, the inode's own time of change: nobody can set it, so whatever was done shows. A folder's changes too often, as overlays
 * note things on it; what is in it is looked at anyway. */
static struct timespec last_change(const struct stat *st)
{
    return S_ISDIR(st->st_mode) ? st->st_mtim : st->st_ctim;
}

static void remember(const struct layer *l, int number, const char *above, size_t above_len, const char *name, const struct stat *st)
{
    struct known *k;
    int len;

    if (known_count == known_cap) {
        size_t cap = known_cap ? known_cap * 2 : 128;
        struct known *more = cap <= BASELINE_MAX * 2 ? realloc(known, cap * sizeof *known) : NULL;
        if (!more)
            return; /* it will be told as a change: too much rather than too little */
        known = more;
        known_cap = cap;
    }
    k = &known[known_count];
    len = asprintf(&k->path, "%s%s%.*s%s%s", l->at, *l->at && (above_len || *name) ? "/" : "", (int)above_len, above ? above : "",
                   above_len && *name ? "/" : "", name);
    if (len < 0)
        return;
    k->layer = number;
    k->ino = st->st_ino;
    k->mode = st->st_mode;
    k->uid = st->st_uid;
    k->gid = st->st_gid;
    k->changed = last_change(st);
    known_count++;
}

static void remember_layer(const struct layer *l, int number)
{
    struct walk walk;
    struct stat st, root;
    enum walk_event event;
    const char *name, *above;
    uint8_t type;
    size_t n;
    int dir;

    if (fstat(l->fd, &root) == 0)
        remember(l, number, "", 0, "", &root);
    if (!walk_open(&walk, l->fd, false))
        return;
    while ((event = walk_next(&walk, &dir, &name, &type)) != WALK_END && known_count < BASELINE_MAX) {
        if (event != WALK_ENTRY || fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0 || st.st_dev != root.st_dev)
            continue;
        above = walk_prefix(&walk, &n);
        remember(l, number, above, n, name, &st);
        if (S_ISDIR(st.st_mode))
            walk_enter(&walk);
    }
    walk_close(&walk);
}

void baseline_due(void)
{
    due = layers_known();
}

void baseline_take(void)
{
    struct layer l;

    if (taken || !due)
        return;
    taken = true;
    for (int i = 0; layer_open(i, &l); i++)
        remember_layer(&l, i);
    qsort(known, known_count, sizeof *known, by_path);
}

bool baseline_same(const char *path, const struct stat *st)
{
    const struct known *k = find(path);
    struct timespec now = last_change(st);

    return k && k->ino == st->st_ino && k->mode == st->st_mode && k->uid == st->st_uid && k->gid == st->st_gid &&
           k->changed.tv_sec == now.tv_sec && k->changed.tv_nsec == now.tv_nsec;
}

const char *baseline_gone(size_t *next)
{
    while (*next < known_count) {
        const struct known *k = &known[(*next)++];
        struct layer l;
        struct stat st;
        const char *below;
        bool there;

        if (!layer_open(k->layer, &l))
            continue;
        below = k->path + strlen(l.at) + (*l.at != 0);
        there = !k->path[strlen(l.at)] || fstatat(l.fd, below, &st, AT_SYMLINK_NOFOLLOW) == 0 ||
                (errno != ENOENT && errno != ENOTDIR);
        close(l.fd);
        if (!there)
            return k->path;
    }
    return NULL;
}
