/* GETXATTRS and SETXATTRS: see attributes.h. Names and values are the sandbox's, and may change while they are read. */
#define _GNU_SOURCE
#include "attributes.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "files.h"
#include "guest.h"
#include "path.h"
#include "records.h"

#define LIST_MAX 65536 /* XATTR_LIST_MAX */

static const char ours[] = "user.", overlays[] = "user.overlay.";

static char names[LIST_MAX + 1];
/* A field's value: the name, a NUL, and what the attribute holds. */
static char field[ATTRIBUTE_NAME_MAX + 1 + ATTRIBUTE_VALUE_MAX];

static bool begins(const char *name, const char *prefix)
{
    return !strncmp(name, ours, sizeof ours - 1) && strncmp(name, overlays, sizeof overlays - 1) &&
           !strncmp(name, prefix, strlen(prefix)) && strlen(name) <= ATTRIBUTE_NAME_MAX;
}

bool want_prefix(struct stream *s, const struct fields *f, char *out)
{
    size_t n = fields_have(f, TAG_PREFIX) ? f->text[TAG_PREFIX].len : 0;

    strcpy(out, ours);
    if (!fields_have(f, TAG_PREFIX))
        return true;
    if (n < sizeof ours - 1 || n > ATTRIBUTE_NAME_MAX || memcmp(f->text[TAG_PREFIX].p, ours, sizeof ours - 1)) {
        stream_fail(s, EINVAL, NULL, "a PREFIX must begin with \"user.\" and have at most 255 bytes");
        return false;
    }
    memcpy(out, f->text[TAG_PREFIX].p, n);
    out[n] = 0;
    return true;
}

/* Fills `names`. Bytes, or -1 with errno. */
static ssize_t list_names(struct attributes_of of)
{
    ssize_t n = of.name ? llistxattr(of.name, names, LIST_MAX) : flistxattr(of.fd, names, LIST_MAX);

    names[n > 0 ? n : 0] = 0;
    return n;
}

/* Fills `field`. Its bytes, or -1 with errno. */
static ssize_t read_one(struct attributes_of of, const char *name)
{
    size_t at = strlen(name) + 1;
    ssize_t n;

    memcpy(field, name, at);
    n = of.name ? lgetxattr(of.name, name, field + at, ATTRIBUTE_VALUE_MAX) : fgetxattr(of.fd, name, field + at, ATTRIBUTE_VALUE_MAX);
    return n < 0 ? -1 : n + (ssize_t)at;
}

#define FIELD_HEAD 6   /* tag and length */
#define COUNT_FIELD 14 /* what is left out */

void attributes_fields(struct fw *w, struct attributes_of of, const char *prefix, size_t most, size_t reserve)
{
    ssize_t all = list_names(of);
    size_t used = 0;
    int64_t left_out = 0;

    for (const char *name = names; name < names + all; name += strlen(name) + 1) {
        ssize_t n = begins(name, prefix) ? read_one(of, name) : 0;
        size_t whole = n > 0 ? (size_t)n + FIELD_HEAD : 0;
        if (n > 0 && used + whole <= most && w->len + whole + reserve + COUNT_FIELD <= w->cap) {
            fw_bytes(w, TAG_ATTRIBUTE, field, (size_t)n);
            used += whole;
        } else if (n > 0 || (n < 0 && errno == ERANGE)) {
            left_out++;
        }
    }
    if (left_out)
        fw_int(w, TAG_COUNT, left_out);
}

static enum pump get_pump(struct stream *s)
{
    struct records *r = s->ctx;

    records_flush(r, s);
    if (records_pending(r))
        return records_wait(s);
    stream_done(s);
    return PUMP_GONE;
}

static void get_release(struct stream *s)
{
    records_free(s->ctx);
    free(s->ctx);
}

/* 0 or an errno. */
static int collect(struct records *r, int fd, const char *prefix)
{
    struct attributes_of of = {fd, NULL};
    ssize_t all = list_names(of);

    if (all < 0)
        return errno;
    for (const char *name = names; name < names + all; name += strlen(name) + 1) {
        struct fw w = record_begin();
        ssize_t n = begins(name, prefix) ? read_one(of, name) : 0;

        if (!n || (n < 0 && errno == ENODATA))
            continue; /* not asked for, or gone since */
        if (n < 0)
            return errno == ERANGE ? E2BIG : errno;
        fw_bytes(&w, TAG_ATTRIBUTE, field, (size_t)n);
        if (records_pending(r) + (size_t)n > ATTRIBUTES_MAX)
            return E2BIG;
        if (!record_add(r, &w))
            return ENOMEM;
    }
    return 0;
}

void op_getxattrs(struct stream *s, const struct fields *f)
{
    static const struct stream_ops ops = {.pump = get_pump, .release = get_release};
    char prefix[ATTRIBUTE_NAME_MAX + 1];
    struct call c;
    struct records *r;
    int fd, error;

    if (!want_prefix(s, f, prefix) || !call_begin(s, f, 0, &c))
        return;
    r = calloc(1, sizeof *r);
    fd = path_open(AT_FDCWD, c.path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    error = !r ? ENOMEM : fd < 0 ? errno : collect(r, fd, prefix);
    if (fd >= 0)
        close(fd);
    if (error) {
        if (r)
            records_free(r);
        free(r);
        call_fail(s, error, "read the attributes of", c.path);
        return;
    }
    user_leave();
    s->ctx = r;
    s->ops = &ops;
    stream_ready(s);
}

/* The name of an ATTRIBUTE field; its value is behind it, if it has one. False if it is none that may be set. */
static bool name_of(const uint8_t *p, uint32_t n, const char *prefix, char *name)
{
    const uint8_t *nul = memchr(p, 0, n);
    size_t len = nul ? (size_t)(nul - p) : n;

    if (len > ATTRIBUTE_NAME_MAX || n - len > ATTRIBUTE_VALUE_MAX + 1)
        return false;
    memcpy(name, p, len);
    name[len] = 0;
    return len > sizeof ours - 1 && begins(name, prefix);
}

static bool names_are_good(const struct fields *f, const char *prefix)
{
    char name[ATTRIBUTE_NAME_MAX + 1];
    const uint8_t *p;
    uint32_t n;

    for (size_t pos = 0; fields_next(f, TAG_ATTRIBUTE, &pos, &p, &n);)
        if (!name_of(p, n, prefix, name))
            return false;
    return true;
}

static bool is_given(const struct fields *f, const char *prefix, const char *wanted)
{
    char name[ATTRIBUTE_NAME_MAX + 1];
    const uint8_t *p;
    uint32_t n;

    for (size_t pos = 0; fields_next(f, TAG_ATTRIBUTE, &pos, &p, &n);)
        if (name_of(p, n, prefix, name) && !strcmp(name, wanted))
            return true;
    return false;
}

static int drop(int fd, const char *name, int64_t *count)
{
    if (fremovexattr(fd, name) == 0) {
        ++*count;
        return 0;
    }
    return errno == ENODATA ? 0 : errno;
}

/* As an ATTRIBUTE field of n bytes says, whose name it is. 0 or an errno. */
static int set_one(int fd, const char *name, const uint8_t *p, uint32_t n, int64_t *count)
{
    size_t len = strlen(name);

    if (len == n)
        return drop(fd, name, count);
    if (fsetxattr(fd, name, p + len + 1, n - len - 1, 0) < 0)
        return errno;
    ++*count;
    return 0;
}

/* What goes makes room for what comes. 0 or an errno. */
static int apply(int fd, const struct fields *f, const char *prefix, bool replace, int64_t *count)
{
    char name[ATTRIBUTE_NAME_MAX + 1];
    const uint8_t *p;
    uint32_t n;
    int error = 0;
    ssize_t all = replace ? list_names((struct attributes_of){fd, NULL}) : 0;

    if (all < 0)
        return errno;
    for (const char *old = names; !error && old < names + all; old += strlen(old) + 1)
        if (begins(old, prefix) && !is_given(f, prefix, old))
            error = drop(fd, old, count);
    for (size_t pos = 0; !error && fields_next(f, TAG_ATTRIBUTE, &pos, &p, &n);) {
        name_of(p, n, prefix, name);
        error = set_one(fd, name, p, n, count);
    }
    return error;
}

bool attributes_good(const struct fields *f)
{
    return names_are_good(f, ours);
}

int attributes_set(int fd, const struct fields *f)
{
    char name[ATTRIBUTE_NAME_MAX + 1];
    const uint8_t *p;
    uint32_t n;
    int error = 0;

    for (size_t pos = 0; fields_next(f, TAG_ATTRIBUTE, &pos, &p, &n);) {
        int64_t count = 0;
        int failed;

        name_of(p, n, ours, name);
        failed = set_one(fd, name, p, n, &count);
        if (failed && failed != ENOTSUP && failed != ENOSPC && failed != E2BIG && failed != EDQUOT && !error)
            error = failed;
    }
    return error;
}

/* Where the files are the host's too, only those may be changed that may be written: attributes need no such right of a fence
 * (Landlock). Of a folder, the right is that to have a file in it. The fd, or -1 with errno. */
static int open_to_set(const char *path)
{
    const int flags = O_NONBLOCK | O_NOCTTY;
    int fd = guest.pid1 ? path_open(AT_FDCWD, path, O_RDONLY | flags, 0) : -1, probe, error;

    if (fd >= 0 || (guest.pid1 && errno != EACCES))
        return fd;
    fd = path_open(AT_FDCWD, path, O_WRONLY | flags, 0);
    if (fd >= 0 || guest.pid1 || errno != EISDIR)
        return fd;
    fd = path_open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | flags, 0);
    if (fd < 0)
        return -1;
    probe = openat(fd, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    error = errno;
    close(probe >= 0 ? probe : fd);
    errno = error;
    return probe >= 0 ? fd : -1;
}

void op_setxattrs(struct stream *s, const struct fields *f)
{
    char prefix[ATTRIBUTE_NAME_MAX + 1];
    struct call c;
    uint8_t buf[16];
    struct fw w = {buf, 0, sizeof buf, false};
    int64_t count = 0;
    int fd, error;

    if (!want_prefix(s, f, prefix))
        return;
    if (!names_are_good(f, prefix)) {
        stream_fail(s, EINVAL, NULL, "an ATTRIBUTE that does not begin with PREFIX, may not be set, or is too long");
        return;
    }
    if (!call_begin(s, f, SETXATTRS_FLAG_REPLACE, &c))
        return;
    fd = open_to_set(c.path);
    error = fd < 0 ? errno : apply(fd, f, prefix, c.flags & SETXATTRS_FLAG_REPLACE, &count);
    if (fd >= 0)
        close(fd);
    if (error) {
        call_fail(s, error, "set the attributes of", c.path);
        return;
    }
    user_leave();
    fw_int(&w, TAG_COUNT, count);
    stream_close(s, &w);
}
