/* UNPACK: makes the files that records of CHANGES tell of; see docs/wire.md.
 *
 * Names are walked part by part from the root and never through a link. Records come depth first, so the folders above the
 * one at hand are a stack: each gets its mode and times when what is in it is done. Bytes wait in a buffer that the stream's
 * credit bounds, and are worked off in turns: a removal may be long. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "guest.h"
#include "path.h"
#include "records.h"
#include "tree.h"

#define B(tag) TAG_BIT(TAG_##tag)
#define RECORDS_PER_TURN 64
#define KEEP_FOLDERS 4096 /* deeper ones than this get no times */

/* What a record says of a file. */
struct facts {
    int64_t type, size, flags;
    mode_t mode;
    uid_t uid;
    gid_t gid;
    struct timespec mtime;
};

struct folder {
    size_t len; /* of its path in `at` */
    struct facts facts;
};

struct unpack {
    int root;
    uint8_t *in; /* bytes not worked off yet */
    size_t in_len, in_cap, in_pos;
    char *at; /* path of the innermost folder of the stack */
    size_t at_cap;
    struct folder *stack;
    size_t depth, cap;
    int dir; /* the folder of the last name, for the next one; its path is dir_path */
    char *dir_path;
    int file; /* being written as `temp` in file_dir, or -1 */
    int file_dir;
    char temp[24], name[256];
    struct facts facts;
    int64_t written; /* offset behind the last content */
    struct walk walk; /* what is in the way, while `removing` */
    bool removing;
    int64_t count, bytes;
    const char *why; /* of EPROTO */
};

static char wrong[256]; /* what the last error is about */

static int protocol(struct unpack *u, const char *why)
{
    u->why = why;
    return EPROTO;
}

/* "." or parts by single slashes, none of them "." or "..". */
static bool name_valid(const char *p, size_t n)
{
    if (n == 1 && p[0] == '.')
        return true;
    for (size_t at = 0; at <= n;) {
        size_t len = 0;
        while (at + len < n && p[at + len] != '/')
            len++;
        if (!len || len > 255 || (p[at] == '.' && (len == 1 || (len == 2 && p[at + 1] == '.'))))
            return false;
        at += len + 1;
    }
    return true;
}

/* One part down, made if missing. The fd, or -1. */
static int descend(int dir, const char *part)
{
    const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    int fd = openat(dir, part, flags);

    if (fd < 0 && errno == ENOENT && mkdirat(dir, part, 0755) == 0)
        fd = openat(dir, part, flags);
    if (fd < 0 && errno == EACCES)
        fd = openat(dir, part, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return fd;
}

/* The folder that holds the last part of a path, kept in u->dir, and that part. 0 or an errno. */
static int find_folder(struct unpack *u, const char *path, char *name)
{
    const char *slash = strrchr(path, '/');
    size_t above = slash ? (size_t)(slash - path) : 0;
    char *kept;
    int dir;

    strcpy(name, slash ? slash + 1 : path);
    if (u->dir >= 0 && strlen(u->dir_path) == above && !memcmp(u->dir_path, path, above))
        return 0;
    dir = fcntl(u->root, F_DUPFD_CLOEXEC, 3);
    for (size_t at = 0; at < above && dir >= 0;) {
        char part[256];
        size_t len = strcspn(path + at, "/");
        int next;

        memcpy(part, path + at, len);
        part[len] = 0;
        next = descend(dir, part);
        close(dir);
        dir = next;
        at += len + 1;
    }
    if (dir < 0)
        return errno == ENOTDIR || errno == ELOOP ? ELOOP : errno;
    kept = strndup(path, above);
    if (!kept) {
        close(dir);
        return ENOMEM;
    }
    if (u->dir >= 0)
        close(u->dir);
    free(u->dir_path);
    u->dir = dir;
    u->dir_path = kept;
    return 0;
}

static void forget_folder(struct unpack *u)
{
    if (u->dir >= 0)
        close(u->dir);
    free(u->dir_path);
    u->dir = -1;
    u->dir_path = NULL;
}

/* Where the agent is not the sandbox's init, changing modes, owners and times may be forbidden: then it is as it is. */
static int forgive(int result)
{
    return result == 0 || (!guest.pid1 && (errno == EPERM || errno == EACCES)) ? 0 : errno;
}

/* Owner first: that clears the bits of mode that matter. 0 or an errno. */
static int dress(int fd, const struct facts *f)
{
    struct timespec times[2] = {f->mtime, f->mtime};
    struct stat st;
    int error;

    if (fstat(fd, &st) < 0)
        return errno;
    if ((st.st_uid != f->uid || st.st_gid != f->gid) && (error = forgive(fchown(fd, f->uid, f->gid))))
        return error;
    if ((error = forgive(fchmod(fd, f->mode))))
        return error;
    return forgive(futimens(fd, times));
}

/* The innermost folder of the stack is done. 0 or an errno. */
static int leave_folder(struct unpack *u)
{
    struct folder *top = &u->stack[--u->depth];
    char name[256];
    int error, fd;

    u->at[top->len] = 0;
    strncpy(wrong, u->at, sizeof wrong - 1);
    if (!top->len) {
        fd = openat(u->root, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    } else {
        error = find_folder(u, u->at, name);
        if (error)
            return error;
        fd = openat(u->dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    }
    if (fd < 0)
        return errno;
    error = dress(fd, &top->facts);
    close(fd);
    if (u->depth)
        u->at[u->stack[u->depth - 1].len] = 0;
    return error;
}

/* Leaves the folders that this path is not in. 0 or an errno. */
static int leave_to(struct unpack *u, const char *path)
{
    while (u->depth) {
        size_t len = u->stack[u->depth - 1].len;
        int error;

        if (!len || (!strncmp(u->at, path, len) && path[len] == '/'))
            break;
        error = leave_folder(u);
        if (error)
            return error;
    }
    return 0;
}

static int push_folder(struct unpack *u, const char *path, const struct facts *f)
{
    size_t len = strlen(path);

    if (u->depth == KEEP_FOLDERS)
        return 0;
    if (u->depth == u->cap) {
        size_t cap = u->cap ? u->cap * 2 : 16;
        struct folder *stack = realloc(u->stack, cap * sizeof *stack);
        if (!stack)
            return ENOMEM;
        u->stack = stack;
        u->cap = cap;
    }
    if (len + 1 > u->at_cap) {
        char *at = realloc(u->at, len + 256);
        if (!at)
            return ENOMEM;
        u->at = at;
        u->at_cap = len + 256;
    }
    memcpy(u->at, path, len + 1);
    u->stack[u->depth++] = (struct folder){len, *f};
    return 0;
}

/* The file being written is complete. 0 or an errno. */
static int finish_file(struct unpack *u)
{
    int error;

    if (u->file < 0)
        return 0;
    strcpy(wrong, u->name);
    error = ftruncate(u->file, u->facts.size) < 0 ? errno : dress(u->file, &u->facts);
    if (!error && renameat(u->file_dir, u->temp, u->file_dir, u->name) < 0)
        error = errno;
    if (error)
        unlinkat(u->file_dir, u->temp, 0);
    close(u->file);
    close(u->file_dir);
    u->file = u->file_dir = -1;
    return error;
}

static int begin_file(struct unpack *u, const char *name, const struct facts *f)
{
    u->file_dir = fcntl(u->dir, F_DUPFD_CLOEXEC, 3);
    if (u->file_dir < 0)
        return errno;
    temp_name(u->temp);
    u->file = openat(u->file_dir, u->temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, guest.pid1 ? 0600 : f->mode);
    if (u->file < 0) {
        int error = errno;
        close(u->file_dir);
        u->file_dir = -1;
        return error;
    }
    strcpy(u->name, name);
    u->facts = *f;
    u->written = 0;
    return 0;
}

static int write_piece(struct unpack *u, const struct fields *f)
{
    int64_t offset = f->num[TAG_OFFSET];
    const uint8_t *p = f->text[TAG_BODY].p;
    size_t n = f->text[TAG_BODY].len;

    if (u->file < 0 || offset < u->written || offset > u->facts.size || (int64_t)n > u->facts.size - offset)
        return protocol(u, "content that belongs to no file, or lies outside it");
    u->written = offset + (int64_t)n;
    u->bytes += (int64_t)n;
    while (n) {
        ssize_t done = pwrite(u->file, p, n, offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return errno;
        p += done;
        offset += done;
        n -= (size_t)done;
    }
    return 0;
}

/* Begins to remove what is at a name. 0: it is gone (or `removing` says that it will be); or an errno. */
static int clear(struct unpack *u, const char *name)
{
    int fd;

    if (unlinkat(u->dir, name, 0) == 0 || errno == ENOENT)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return errno;
    if (unlinkat(u->dir, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
        return 0;
    if (errno != ENOTEMPTY && errno != EEXIST)
        return errno;
    fd = openat(u->dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return errno;
    if (!walk_open(&u->walk, fd, true))
        return ENOMEM;
    u->removing = true;
    return 0;
}

static bool facts_of(const struct fields *f, struct facts *out)
{
    int64_t mode = fields_int(f, TAG_MODE, 0), uid = fields_int(f, TAG_UID, 0), gid = fields_int(f, TAG_GID, 0);
    int64_t mtime = fields_int(f, TAG_MTIME_NS, 0), part = mtime % 1000000000;

    out->type = fields_int(f, TAG_TYPE, -1);
    out->size = fields_int(f, TAG_SIZE, 0);
    out->flags = fields_int(f, TAG_FLAGS, 0);
    out->mode = (mode_t)mode;
    out->uid = (uid_t)uid;
    out->gid = (gid_t)gid;
    out->mtime.tv_nsec = part < 0 ? part + 1000000000 : part;
    out->mtime.tv_sec = (mtime - out->mtime.tv_nsec) / 1000000000;
    return out->type >= FILE_TYPE_FILE && out->type <= FILE_TYPE_REMOVED && out->size >= 0 && mode >= 0 && mode <= 07777 &&
           uid >= 0 && uid < UINT32_MAX && gid >= 0 && gid < UINT32_MAX &&
           !(out->flags & ~(int64_t)(CHANGE_FLAG_OPAQUE | CHANGE_FLAG_HARD_LINK));
}

/* A folder is kept if it is there and may be: its entries are the image's. */
static int make_folder_here(struct unpack *u, const char *path, const char *name, const struct facts *f)
{
    if (mkdirat(u->dir, name, guest.pid1 ? 0700 : f->mode | 0700) < 0 && errno != EEXIST)
        return errno;
    return push_folder(u, path, f);
}

static int make_symlink(struct unpack *u, const struct fields *f, const char *name, const struct facts *facts)
{
    struct timespec times[2] = {facts->mtime, facts->mtime};
    char text[PATH_LIMIT];
    uint32_t n = fields_have(f, TAG_LINK) ? f->text[TAG_LINK].len : 0;
    struct stat st;
    int error = 0;

    if (!n || n >= sizeof text)
        return protocol(u, "a symlink without a text, or with one too long");
    memcpy(text, f->text[TAG_LINK].p, n);
    text[n] = 0;
    if (symlinkat(text, u->dir, name) < 0 || fstatat(u->dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno;
    if (st.st_uid != facts->uid || st.st_gid != facts->gid)
        error = forgive(fchownat(u->dir, name, facts->uid, facts->gid, AT_SYMLINK_NOFOLLOW));
    return error ? error : forgive(utimensat(u->dir, name, times, AT_SYMLINK_NOFOLLOW));
}

static int make_link(struct unpack *u, const struct fields *f, const char *name)
{
    char *other = fields_have(f, TAG_PATH2) ? strndup((const char *)f->text[TAG_PATH2].p, f->text[TAG_PATH2].len) : NULL;
    char target[256];
    int dir = fcntl(u->dir, F_DUPFD_CLOEXEC, 3), error;

    if (!other || !name_valid(other, strlen(other)) || !strcmp(other, "."))
        error = protocol(u, "a hard link to no name");
    else
        error = dir < 0 ? errno : find_folder(u, other, target);
    if (!error && linkat(u->dir, target, dir, name, 0) < 0)
        error = errno;
    if (dir >= 0)
        close(dir);
    free(other);
    return error;
}

/* Whether what is at the name must go before the record can be obeyed. */
static bool in_the_way(struct unpack *u, const char *name, const struct facts *f)
{
    struct stat st;

    if (fstatat(u->dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return false;
    if (f->type == FILE_TYPE_DIR)
        return !S_ISDIR(st.st_mode) || f->flags & CHANGE_FLAG_OPAQUE;
    return f->type != FILE_TYPE_FILE || f->flags & CHANGE_FLAG_HARD_LINK || S_ISDIR(st.st_mode);
}

static int make(struct unpack *u, const struct fields *f, const char *path, const char *name, const struct facts *facts)
{
    switch (facts->type) {
    case FILE_TYPE_DIR:
        return make_folder_here(u, path, name, facts);
    case FILE_TYPE_SYMLINK:
        return make_symlink(u, f, name, facts);
    case FILE_TYPE_FILE:
        return facts->flags & CHANGE_FLAG_HARD_LINK ? make_link(u, f, name) : begin_file(u, name, facts);
    default:
        return 0; /* removed */
    }
}

/* A record about a name. `cleared`: what was in its way is gone. 0 or an errno; with `removing` set it comes again. */
static int obey(struct unpack *u, const struct fields *f, const char *path, bool cleared)
{
    struct facts facts;
    char name[256];
    int error;

    if (!facts_of(f, &facts))
        return protocol(u, "a file that cannot be");
    if (facts.type == FILE_TYPE_OTHER)
        return 0; /* a socket or pipe is nothing without whoever served it */
    if (!strcmp(path, ".")) {
        if (facts.type != FILE_TYPE_DIR || u->depth)
            return protocol(u, "a root that is no folder, or comes late");
        u->count++;
        return push_folder(u, "", &facts);
    }
    error = leave_to(u, path);
    if (!error)
        error = find_folder(u, path, name);
    if (!error && !cleared && in_the_way(u, name, &facts)) {
        error = clear(u, name);
        if (error || u->removing)
            return error;
    }
    if (!error && cleared && unlinkat(u->dir, name, AT_REMOVEDIR) < 0 && errno != ENOENT && facts.type != FILE_TYPE_DIR)
        error = errno; /* a folder with a mount point in it cannot go */
    if (!error)
        error = make(u, f, path, name, &facts);
    u->count += !error;
    return error;
}

/* One record. 0 or an errno. */
static int record(struct unpack *u, const uint8_t *p, size_t n, bool cleared)
{
    static const tag_set known = B(NAME) | B(TYPE) | B(SIZE) | B(MODE) | B(UID) | B(GID) | B(MTIME_NS) | B(LINK) | B(FLAGS) |
                                 B(PATH2) | B(OFFSET) | B(BODY);
    static char path[RECORD_MAX + 1];
    struct fields f;
    const char *why;
    int error;

    if (fields_parse(p, n, known, &f, &why))
        return protocol(u, why);
    if (!fields_have(&f, TAG_NAME))
        return fields_have(&f, TAG_OFFSET) && fields_have(&f, TAG_BODY) ? write_piece(u, &f) : protocol(u, "a record of nothing");
    if (!name_valid((const char *)f.text[TAG_NAME].p, f.text[TAG_NAME].len))
        return protocol(u, "a NAME that is none");
    if (!cleared) {
        error = finish_file(u);
        if (error)
            return error;
    }
    memcpy(path, f.text[TAG_NAME].p, f.text[TAG_NAME].len);
    path[f.text[TAG_NAME].len] = 0;
    strncpy(wrong, path, sizeof wrong - 1);
    return obey(u, &f, path, cleared);
}

/* Goes on with a removal. 0 or an errno; `removing` is false when it is done. */
static int remove_on(struct unpack *u)
{
    int64_t count = 0;
    int error;

    if (tree_remove_some(&u->walk, &count))
        return 0;
    error = u->walk.first_error;
    walk_close(&u->walk);
    u->removing = false;
    forget_folder(u); /* it may have been in there */
    return error == EBUSY ? 0 : error; /* a mount point stays, and what is around it is kept */
}

/* Works off some of what has come. 0 or an errno. */
static int work(struct unpack *u, struct stream *s)
{
    bool cleared = false;
    size_t begun = u->in_pos;
    int error = 0;

    for (int i = 0; i < RECORDS_PER_TURN && !error; i++) {
        size_t left = u->in_len - u->in_pos, n = left < 4 ? 0 : get32(u->in + u->in_pos);

        if (u->removing) {
            error = remove_on(u);
            if (error || u->removing)
                break;
            cleared = true;
            continue;
        }
        if (n > RECORD_MAX)
            error = protocol(u, "a record that is too long");
        else if (left < 4 || left - 4 < n)
            break;
        else
            error = record(u, u->in + u->in_pos + 4, n, cleared);
        cleared = false;
        if (!error && !u->removing)
            u->in_pos += 4 + n;
    }
    if (u->in_pos > begun)
        stream_consumed(s, (uint32_t)(u->in_pos - begun));
    return error;
}

/* Everything has come and is done. 0 or an errno. */
static int finish(struct unpack *u)
{
    int error = finish_file(u);

    if (u->in_pos < u->in_len)
        return protocol(u, "a record that is cut short");
    while (!error && u->depth)
        error = leave_folder(u);
    return error;
}

static enum pump unpack_pump(struct stream *s)
{
    struct unpack *u = s->ctx;
    uint8_t buf[64];
    struct fw w = {buf, 0, sizeof buf, false};
    size_t before = u->in_pos;
    int error = work(u, s);

    if (!error && (u->removing || u->in_pos > before))
        return PUMP_AGAIN;
    if (!error && !s->host_ended)
        return PUMP_WAIT;
    if (!error)
        error = finish(u);
    if (error == EPROTO && u->why)
        stream_fail(s, EPROTO, NULL, "bad record: %s", u->why);
    else if (error)
        stream_fail(s, error, "path", "cannot unpack /%s: %s", wrong, strerror(error));
    else {
        fw_int(&w, TAG_COUNT, u->count);
        fw_int(&w, TAG_BYTES, u->bytes);
        stream_close(s, &w);
    }
    return PUMP_GONE;
}

static void unpack_data(struct stream *s, const uint8_t *p, uint32_t n)
{
    struct unpack *u = s->ctx;

    if (u->in_pos) {
        memmove(u->in, u->in + u->in_pos, u->in_len - u->in_pos);
        u->in_len -= u->in_pos;
        u->in_pos = 0;
    }
    if (u->in_len + n > u->in_cap) {
        size_t cap = (u->in_len + n + 65535) & ~(size_t)65535;
        uint8_t *in = realloc(u->in, cap);
        if (!in) {
            stream_fail(s, ENOMEM, NULL, "the agent has no memory");
            return;
        }
        u->in = in;
        u->in_cap = cap;
    }
    memcpy(u->in + u->in_len, p, n);
    u->in_len += n;
    stream_ready(s);
}

static void unpack_end(struct stream *s)
{
    stream_ready(s);
}

static void unpack_release(struct stream *s)
{
    struct unpack *u = s->ctx;

    if (u->file >= 0) {
        unlinkat(u->file_dir, u->temp, 0);
        close(u->file);
        close(u->file_dir);
    }
    if (u->removing)
        walk_close(&u->walk);
    forget_folder(u);
    close(u->root);
    free(u->stack);
    free(u->at);
    free(u->in);
    free(u);
}

void op_unpack(struct stream *s, const struct fields *f)
{
    static const struct stream_ops ops = {
        .data = unpack_data, .end = unpack_end, .pump = unpack_pump, .release = unpack_release};
    char folder[2 * PATH_LIMIT] = "/";
    struct unpack *u;
    int root;

    if (fields_have(f, TAG_PATH) && !want_path(s, f, TAG_PATH, folder))
        return;
    if (!fields_have(f, TAG_PATH) && !guest.pid1) {
        stream_fail(s, EOPNOTSUPP, NULL, "this sandbox has no root of its own: name a folder");
        return;
    }
    root = path_open(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY | O_NONBLOCK, 0);
    if (root < 0) {
        stream_fail(s, errno, "path", "cannot unpack to %.200s: %s", folder, strerror(errno));
        return;
    }
    u = calloc(1, sizeof *u);
    if (!u) {
        close(root);
        stream_fail(s, ENOMEM, NULL, "the agent has no memory");
        return;
    }
    u->root = root;
    u->dir = u->file = u->file_dir = -1;
    s->ctx = u;
    s->ops = &ops;
}
