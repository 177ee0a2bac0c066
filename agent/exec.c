/* EXEC: from the request's fields to a running shim. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"
#include "ops.h"
#include "proc.h"
#include "pty.h"

#define ENV_MAX 4096
#define ARGV_MAX 65536
#define KNOWN_FLAGS                                                                                \
    (EXEC_FLAG_PTY | EXEC_FLAG_STDIN | EXEC_FLAG_KILL_ON_RESET | EXEC_FLAG_MERGE | EXEC_FLAG_LOSSY)

/* Strings and the vectors that point at them, until the shim has them: in a place that is used again and again, where
 * they are not too many. */
struct block {
    char **argv, **env;
    int argc, envc;
    char *text;
    size_t used;
};

static char *put(struct block *b, const void *p, size_t n)
{
    char *at = b->text + b->used;

    memcpy(at, p, n);
    at[n] = 0;
    b->used += n + 1;
    return at;
}

/* Length of K in "K=V", or of all of it. */
static size_t key_len(const char *entry)
{
    return strcspn(entry, "=");
}

/* Sets "K=V", or unsets "K". */
static void env_apply(struct block *b, char *entry)
{
    size_t n = key_len(entry);

    for (int i = 0; i < b->envc; i++)
        if (key_len(b->env[i]) == n && !memcmp(b->env[i], entry, n)) {
            if (entry[n])
                b->env[i] = entry;
            else
                b->env[i] = b->env[--b->envc];
            return;
        }
    if (entry[n])
        b->env[b->envc++] = entry;
}

static void env_set(struct block *b, const char *key, const char *value)
{
    char *at = b->text + b->used;

    b->used += (size_t)sprintf(at, "%s=%s", key, value) + 1;
    env_apply(b, at);
}

static const char *env_get(const struct block *b, const char *key)
{
    size_t n = strlen(key);

    for (int i = 0; i < b->envc; i++)
        if (key_len(b->env[i]) == n && !memcmp(b->env[i], key, n))
            return b->env[i] + n + 1;
    return NULL;
}

static char *few_slots[512], little_text[16 * 1024];

static void block_free(struct block *b)
{
    if (b->argv != few_slots)
        free(b->argv);
    if (b->text != little_text)
        free(b->text);
}

static int block_build(struct block *b, const struct fields *f, const struct user *u, bool pty)
{
    size_t text = f->raw_len + 2048, slots, pos;
    int64_t argc = fields_int(f, TAG_ARGV, 0), envc = fields_int(f, TAG_ENV, 0), defaults = 0;
    const uint8_t *p;
    uint32_t n;

    while (guest.env && guest.env[defaults])
        defaults++;
    if (argc > ARGV_MAX || envc + defaults > ENV_MAX)
        return E2BIG;
    slots = (size_t)(argc + 1 + envc + defaults + 8);
    b->argv = slots <= sizeof few_slots / sizeof *few_slots ? few_slots : malloc(slots * sizeof *b->argv);
    b->text = text <= sizeof little_text ? little_text : malloc(text);
    if (!b->argv || !b->text)
        return ENOMEM;
    memset(b->argv, 0, slots * sizeof *b->argv);
    for (pos = 0; fields_next(f, TAG_ARGV, &pos, &p, &n);)
        b->argv[b->argc++] = put(b, p, n);
    b->env = b->argv + b->argc + 1;
    for (int i = 0; i < defaults; i++)
        env_apply(b, guest.env[i]);
    if (!env_get(b, "PATH"))
        env_set(b, "PATH", DEFAULT_PATH);
    env_set(b, "HOME", u->home);
    env_set(b, "USER", u->name);
    env_set(b, "LOGNAME", u->name);
    env_set(b, "SHELL", u->shell);
    if (pty)
        env_set(b, "TERM", "xterm-256color");
    for (pos = 0; fields_next(f, TAG_ENV, &pos, &p, &n);) {
        char *entry = put(b, p, n);
        if (!key_len(entry))
            return EINVAL;
        env_apply(b, entry);
    }
    b->env[b->envc] = NULL;
    return 0;
}

/* The ends the agent keeps and the ends the command gets. */
struct stdio {
    int keep_in, keep_out, keep_err;
    int in, out, err;
};

static int make_pipe(int *read_end, int *write_end)
{
    int fds[2];

    if (pipe2(fds, O_CLOEXEC) < 0)
        return errno;
    *read_end = fds[0];
    *write_end = fds[1];
    return 0;
}

static void nonblock(int fd)
{
    if (fd >= 0)
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static int make_stdin(struct stdio *io, bool piped)
{
    int error, writer = -1;

    if (piped)
        return make_pipe(&io->in, &io->keep_in);
    if (guest.null_fd >= 0) {
        io->in = fcntl(guest.null_fd, F_DUPFD_CLOEXEC, 3);
        return io->in < 0 ? errno : 0;
    }
    error = make_pipe(&io->in, &writer); /* no /dev/null here: an empty pipe reads the same */
    if (!error)
        close(writer);
    return error;
}

static int make_stdio(struct stdio *io, int64_t flags, const struct fields *f, const struct user *u)
{
    int64_t rows = fields_int(f, TAG_ROWS, 24), cols = fields_int(f, TAG_COLS, 80);
    int error;

    *io = (struct stdio){-1, -1, -1, -1, -1, -1};
    if (flags & EXEC_FLAG_PTY) {
        if (rows < 1 || rows > 65535 || cols < 1 || cols > 65535)
            return EINVAL;
        error = pty_open((int)rows, (int)cols, u, &io->keep_out, &io->in);
        if (error)
            return error;
        io->keep_in = fcntl(io->keep_out, F_DUPFD_CLOEXEC, 3);
        io->out = fcntl(io->in, F_DUPFD_CLOEXEC, 3);
        io->err = fcntl(io->in, F_DUPFD_CLOEXEC, 3);
        return io->keep_in < 0 || io->out < 0 || io->err < 0 ? EMFILE : 0;
    }
    error = make_stdin(io, flags & EXEC_FLAG_STDIN);
    if (!error)
        error = make_pipe(&io->keep_out, &io->out);
    if (!error && !(flags & EXEC_FLAG_MERGE))
        error = make_pipe(&io->keep_err, &io->err);
    if (!error && (flags & EXEC_FLAG_MERGE)) {
        io->err = fcntl(io->out, F_DUPFD_CLOEXEC, 3);
        error = io->err < 0 ? errno : 0;
    }
    nonblock(io->keep_in);
    nonblock(io->keep_out);
    nonblock(io->keep_err);
    return error;
}

static void close_theirs(struct stdio *io)
{
    close_fd(&io->in);
    close_fd(&io->out);
    close_fd(&io->err);
}

static void close_ours(struct stdio *io)
{
    close_fd(&io->keep_in);
    close_fd(&io->keep_out);
    close_fd(&io->keep_err);
}

static int64_t wall_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_REALTIME, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

/* What PS will tell, bounded. False without memory. */
static bool remember(struct proc *p, const struct block *b, const struct fields *f)
{
    size_t n = 0;

    for (int i = 0; i < b->argc && n < PROC_ARGV_KEPT; i++)
        n += strlen(b->argv[i]) + 1;
    p->argv_len = n < PROC_ARGV_KEPT ? n : PROC_ARGV_KEPT;
    p->argv = malloc(p->argv_len + 1);
    if (!p->argv)
        return false;
    memcpy(p->argv, b->argv[0], p->argv_len); /* the arguments lie one behind the other */
    p->argv[p->argv_len] = 0;
    if (fields_have(f, TAG_TAG)) {
        p->tag = strndup((const char *)f->text[TAG_TAG].p, f->text[TAG_TAG].len);
        if (!p->tag)
            return false;
    }
    return true;
}

/* Forks. On success the process owns `ours` ends of io. 0 or an errno. */
static int launch(struct proc *p, struct spawn *sp, struct stdio *io)
{
    int status_read = -1, error = make_pipe(&status_read, &sp->status);

    if (error)
        return error;
    nonblock(status_read);
    sp->in = io->in;
    sp->out = io->out;
    sp->err = io->err;
    sp->pid_slot = p->slot;
    p->started_wall = wall_ns();
    p->started = now_ns();
    p->shim = shim_start(sp);
    p->jobs = sp->jobs;
    error = p->shim < 0 ? errno : 0;
    close(sp->status);
    if (error) {
        close(status_read);
        return error;
    }
    if (proc_watch_status(p, status_read) < 0) {
        close(status_read);
        kill_begin(p); /* unheard it must not run */
        return EMFILE;
    }
    return 0;
}

static void start(struct stream *s, const struct fields *f, struct block *b, const struct user *u,
                  const char *cwd)
{
    int64_t flags = fields_int(f, TAG_FLAGS, 0), timeout = fields_int(f, TAG_TIMEOUT_MS, 0);
    struct spawn sp = {.argv = b->argv, .env = b->env, .cwd = cwd, .workdir = guest.workdir,
                       .user = u, .pty = flags & EXEC_FLAG_PTY};
    struct stdio io;
    struct proc *p = NULL;
    int error = make_stdio(&io, flags, f, u);

    if (error) {
        stream_fail(s, error, NULL, sp.pty ? "cannot make a terminal" : "cannot make pipes");
        goto out;
    }
    sp.path = env_get(b, "PATH");
    if (!sp.path)
        sp.path = DEFAULT_PATH;
    p = proc_new();
    if (!p || !remember(p, b, f) || !io_attach(p, s, flags)) {
        stream_fail(s, ENOMEM, NULL, "the agent has no memory");
        goto out;
    }
    p->flags = flags;
    p->pty = sp.pty;
    p->ch[0].ring.size = p->ch[1].ring.size = ring_round((uint64_t)fields_int(f, TAG_RING, (int64_t)guest.ring));
    error = launch(p, &sp, &io);
    if (error) {
        bool forked = p->shim > 0;
        p->hidden = true;
        p->state = PROC_EXITED;
        p->shim_gone = !forked;
        stream_fail(s, error, NULL,
                    error == EAGAIN ? "the sandbox's process limit is reached" : "cannot fork");
        /* that let go of the process: without a shim it was freed, else the reaper will */
        p = NULL;
        goto out;
    }
    if (timeout > 0)
        p->deadline = p->started + timeout * MSEC;
    io_start(p, io.keep_out, io.keep_err, io.keep_in);
    io = (struct stdio){-1, -1, -1, io.in, io.out, io.err};
    p = NULL;
out:
    close_theirs(&io);
    close_ours(&io);
    if (p)
        proc_free(p);
}

void op_exec(struct stream *s, const struct fields *f)
{
    int64_t flags = fields_int(f, TAG_FLAGS, 0), timeout = fields_int(f, TAG_TIMEOUT_MS, 0);
    int64_t ring = fields_int(f, TAG_RING, (int64_t)guest.ring);
    struct block b = {0};
    struct user u;
    char cwd[4096];
    int error;

    if (!fields_have(f, TAG_ARGV)) {
        stream_fail(s, EINVAL, "command", "no command was given");
        return;
    }
    if (flags & ~(int64_t)KNOWN_FLAGS || timeout < 0 || timeout > INT64_MAX / MSEC / 2 || ring < 0 ||
        ring > RING_MAX) {
        stream_fail(s, EINVAL, NULL, "flags, timeout or ring size out of range");
        return;
    }
    strcpy(cwd, guest.workdir);
    if (fields_have(f, TAG_CWD)) {
        uint32_t n = f->text[TAG_CWD].len;
        if (n == 0 || n >= sizeof cwd) {
            stream_fail(s, n ? ENAMETOOLONG : EINVAL, "cwd", "the working directory's path is %s",
                        n ? "too long" : "empty");
            return;
        }
        memcpy(cwd, f->text[TAG_CWD].p, n);
        cwd[n] = 0;
    }
    if (!want_user(s, f, &u))
        return;
    error = block_build(&b, f, &u, flags & EXEC_FLAG_PTY);
    if (error)
        stream_fail(s, error, NULL,
                    error == EINVAL   ? "an ENV entry without a name"
                    : error == ENOMEM ? "the agent has no memory"
                                      : "the arguments or variables are too many");
    else
        start(s, f, &b, &u, cwd);
    block_free(&b);
}
