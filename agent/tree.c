/* The tree walk: see tree.h.
 *
 * Each level keeps its place as a directory cookie. Only the deepest OPEN_LEVELS keep their fd: one
 * that was closed is opened again through ".." of its child, and must be the same inode. */
#define _GNU_SOURCE
#include "tree.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "linuxapi.h"

#define OPEN_LEVELS 64
#define NAMES_MAX (4u * 1024 * 1024)
#define BUF_SIZE 8192

struct walk_level {
    int fd;
    dev_t dev;
    ino_t ino;
    int64_t cookie; /* where to go on reading */
    size_t names_len;
    bool kept; /* something in here stays: reading again from the start would meet it again */
    bool seen; /* this pass has met entries */
    bool back; /* we came back from a child: find the place again before reading on */
};

static struct walk_level *top(struct walk *w)
{
    return &w->levels[w->depth - 1];
}

static struct dirent64_ *current(struct walk *w)
{
    return (struct dirent64_ *)(w->buf + w->buf_at);
}

static void note(struct walk *w, int error)
{
    if (!w->first_error)
        w->first_error = error;
}

static bool push(struct walk *w, int fd)
{
    struct stat st;

    if (w->depth == w->cap) {
        size_t cap = w->cap ? w->cap * 2 : 16;
        struct walk_level *levels = realloc(w->levels, cap * sizeof *levels);
        if (!levels)
            return false;
        w->levels = levels;
        w->cap = cap;
    }
    if (fstat(fd, &st) < 0)
        return false;
    w->levels[w->depth++] = (struct walk_level){.fd = fd, .dev = st.st_dev, .ino = st.st_ino, .names_len = w->names_len};
    if (w->depth > OPEN_LEVELS) {
        struct walk_level *far = &w->levels[w->depth - 1 - OPEN_LEVELS];
        if (far != w->levels) { /* the root has no ".." that we may use */
            close(far->fd);
            far->fd = -1;
        }
    }
    w->buf_at = w->buf_len = 0;
    return true;
}

bool walk_open(struct walk *w, int fd, bool removing)
{
    memset(w, 0, sizeof *w);
    w->removing = removing;
    w->buf = malloc(BUF_SIZE);
    if (w->buf && push(w, fd))
        return true;
    close(fd);
    walk_close(w);
    return false;
}

void walk_close(struct walk *w)
{
    while (w->depth) {
        if (top(w)->fd >= 0)
            close(top(w)->fd);
        w->depth--;
    }
    free(w->levels);
    free(w->names);
    free(w->buf);
    memset(w, 0, sizeof *w);
}

static bool append_name(struct walk *w, const char *name)
{
    size_t n = strlen(name), need = w->names_len + n + 2;

    if (need > NAMES_MAX) {
        errno = ENAMETOOLONG;
        return false;
    }
    if (need > w->names_cap) {
        size_t cap = w->names_cap ? w->names_cap * 2 : 256;
        char *names;
        while (cap < need)
            cap *= 2;
        names = realloc(w->names, cap);
        if (!names)
            return false;
        w->names = names;
        w->names_cap = cap;
    }
    if (w->names_len)
        w->names[w->names_len++] = '/';
    memcpy(w->names + w->names_len, name, n + 1);
    w->names_len += n;
    return true;
}

bool walk_enter(struct walk *w)
{
    struct walk_level *level = top(w);
    size_t names_len = w->names_len;
    int fd = openat(level->fd, current(w)->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0)
        return false;
    level->cookie = current(w)->off;
    if (append_name(w, current(w)->name) && push(w, fd))
        return true;
    w->names_len = names_len;
    close(fd);
    return false;
}

void walk_kept(struct walk *w, int error)
{
    note(w, error);
    if (w->depth)
        top(w)->kept = true;
}

/* Reads on in the top folder. 1: an entry is current; 0: the end; -1: it cannot be read. */
static int read_on(struct walk *w)
{
    for (;;) {
        if (w->buf_at < w->buf_len)
            w->buf_at += current(w)->reclen;
        while (w->buf_at < w->buf_len && (!strcmp(current(w)->name, ".") || !strcmp(current(w)->name, "..")))
            w->buf_at += current(w)->reclen;
        if (w->buf_at < w->buf_len)
            return 1;
        long n = syscall(SYS_getdents64, top(w)->fd, w->buf, BUF_SIZE);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 && errno != ENOENT ? -1 : 0; /* ENOENT: it was removed under us */
        w->buf_len = (size_t)n;
        w->buf_at = 0;
        if (strcmp(current(w)->name, ".") && strcmp(current(w)->name, ".."))
            return 1;
    }
}

/* Steps out of the top folder: its parent's fd must be at hand, and at the place it was left. */
static bool pop(struct walk *w)
{
    struct walk_level *child = top(w), *parent;
    struct stat st;
    int error = 0;

    w->depth--;
    if (!w->depth) {
        close(child->fd);
        return true;
    }
    parent = top(w);
    if (parent->fd < 0) {
        parent->fd = openat(child->fd, "..", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
        if (parent->fd < 0 || fstat(parent->fd, &st) < 0)
            error = errno;
        else if (st.st_dev != parent->dev || st.st_ino != parent->ino)
            error = ESTALE; /* someone moved the child: going on would be going astray */
    }
    close(child->fd);
    w->names[w->names_len] = 0; /* ends the child's name, which WALK_LEFT hands out */
    w->names_len = parent->names_len;
    w->buf_at = w->buf_len = 0;
    parent->back = true;
    if (error) {
        note(w, error);
        return false;
    }
    return true;
}

/* Where to read on after a descent. While everything met so far has been removed, the start is best:
 * cookies of some filesystems (tmpfs before 6.6) shift when entries go. */
static void find_place(struct walk *w, struct walk_level *level)
{
    int64_t place = w->removing && !level->kept ? 0 : level->cookie;

    level->back = false;
    if (lseek(level->fd, place, SEEK_SET) < 0)
        note(w, errno);
}

enum walk_event walk_next(struct walk *w, int *dir, const char **name, uint8_t *type)
{
    while (w->depth) {
        struct walk_level *level = top(w);
        int state;

        if (level->back)
            find_place(w, level);
        state = read_on(w);
        if (state > 0) {
            level->seen = true;
            *dir = level->fd;
            *name = current(w)->name;
            *type = current(w)->type;
            return WALK_ENTRY;
        }
        if (state == 0 && w->removing && level->seen && !level->kept) {
            /* Some filesystems skip entries while others are removed: only a pass that meets
             * nothing proves that the folder is empty. */
            level->seen = false;
            level->back = true;
            continue;
        }
        if (state < 0)
            note(w, errno);
        if (!pop(w) || !w->depth)
            break;
        *dir = top(w)->fd;
        *name = w->names + (w->names_len ? w->names_len + 1 : 0);
        *type = 0;
        return WALK_LEFT;
    }
    return WALK_END;
}

const char *walk_prefix(const struct walk *w, size_t *n)
{
    *n = w->names_len;
    return w->names;
}

int walk_fd(const struct walk *w)
{
    return w->levels[w->depth - 1].fd;
}

size_t walk_depth(const struct walk *w)
{
    return w->depth;
}
