/* The shim that waits for a command on a socket. In gVisor a new address space costs some ten milliseconds, twice: for the
 * fork, and for every page that either side writes afterwards. So a shim is forked ahead, and takes the next command
 * when the tree of the last is gone.
 *
 * It holds nothing of the agent's but /proc, /dev/null and its socket, nothing of a command's, and has joined the
 * commands' group already. FREEZE leaves it alone, as it does every shim; it may die at any time, and then another is
 * forked. */
#define _GNU_SOURCE
#include "spare.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "guest.h"
#include "gvisor_guest.h"
#include "loop.h"

#define MOST (32 * 1024)
#define WORDS 1024
#define FDS 4
#define LATER (500 * MSEC) /* the one that was taken is back by then, or stays away for long */

/* What the shim needs to know; after it come cwd, workdir, path, the arguments and the variables, each with its NUL. */
struct job {
    struct user user;
    pid_t *pid_slot; /* shared memory, at the same place in every fork */
    int argc, envc;
    bool pty;
};

/* One at most: each more is a process that a restore has to bring up. */
static struct {
    pid_t pid;
    int fd;
} waiting = {0, -1};
static int64_t due = NEVER;

static bool put(char *text, size_t *used, const char *word)
{
    size_t n = strlen(word) + 1;

    if (*used + n > MOST)
        return false;
    memcpy(text + *used, word, n);
    *used += n;
    return true;
}

/* The job as one message; its size, 0 if it is too large for one. */
static size_t pack(const struct spawn *s, char *text)
{
    struct job job = {.user = *s->user, .pid_slot = s->pid_slot, .pty = s->pty};
    size_t used = sizeof job;

    if (!put(text, &used, s->cwd) || !put(text, &used, s->workdir) || !put(text, &used, s->path))
        return 0;
    for (; s->argv[job.argc]; job.argc++)
        if (!put(text, &used, s->argv[job.argc]))
            return 0;
    for (; s->env[job.envc]; job.envc++)
        if (!put(text, &used, s->env[job.envc]))
            return 0;
    if (job.argc + job.envc + 2 > WORDS)
        return 0;
    memcpy(text, &job, sizeof job);
    return used;
}

static const char *next_word(const char **at)
{
    const char *word = *at;

    *at += strlen(word) + 1;
    return word;
}

static void unpack(struct spawn *s, struct job *job, char *text)
{
    static char *words[WORDS];
    const char *at = text + sizeof *job;
    int i = 0;

    memcpy(job, text, sizeof *job);
    s->user = &job->user;
    s->pid_slot = job->pid_slot;
    s->pty = job->pty;
    s->cwd = next_word(&at);
    s->workdir = next_word(&at);
    s->path = next_word(&at);
    s->argv = words;
    while (i < job->argc)
        words[i++] = (char *)(uintptr_t)next_word(&at);
    words[i++] = NULL;
    s->env = words + i;
    for (int n = 0; n < job->envc; n++)
        words[i++] = (char *)(uintptr_t)next_word(&at);
    words[i] = NULL;
}

/* Waits for the next job. Nobody else has the other end: if it closes the agent is gone, or has enough of us. */
static void await_job(struct spawn *s, struct job *job)
{
    static char text[MOST];
    char control[CMSG_SPACE(sizeof(int) * FDS)];
    struct iovec data = {text, sizeof text};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header;
    int fds[FDS];
    ssize_t n;

    while ((n = recvmsg(s->jobs, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
        ; /* a restored one is woken so */
    header = n > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (!header || header->cmsg_len != CMSG_LEN(sizeof fds))
        _exit(0);
    memcpy(fds, CMSG_DATA(header), sizeof fds);
    s->in = fds[0];
    s->out = fds[1];
    s->err = fds[2];
    s->status = fds[3];
    unpack(s, job, text);
}

/* Who waits ends at SIGTERM, as whoever has nothing to lose, and forgets a sweep that came too late for its tree. With a
 * job all signals are blocked again, as for every shim that starts. */
static void block_signals(bool working)
{
    sigset_t set;

    sigfillset(&set);
    if (!working) {
        sigdelset(&set, SIGTERM);
        sigdelset(&set, SHIM_SWEEP);
    }
    sigprocmask(SIG_SETMASK, &set, NULL);
}

__attribute__((noreturn)) static void spare_main(int fd, pid_t agent)
{
    static struct job job;
    struct spawn s = {.jobs = fd};
    int failed;

    shim_enter(&s, agent);
    failed = s.error; /* then every command fails so */
    shim_settle(&s, guest.null_fd);
    for (;;) {
        block_signals(false);
        await_job(&s, &job);
        block_signals(true);
        s.error = failed;
        s.error_part = PART_FORK;
        shim_run(&s);
    }
}

static void spare_make(void)
{
    pid_t agent = getpid(), pid;
    int pair[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return;
    pid = fork();
    if (pid == 0)
        spare_main(pair[1], agent);
    close(pair[1]);
    if (pid < 0)
        close(pair[0]);
    else
        spare_back(pid, pair[0]);
}

void spare_back(pid_t pid, int fd)
{
    if (waiting.fd >= 0) {
        close(fd); /* then it ends */
        return;
    }
    waiting.pid = pid;
    waiting.fd = fd;
}

pid_t spare_waiting(void)
{
    return waiting.fd < 0 ? 0 : waiting.pid;
}

void spare_soon(void)
{
    if (agent_own_kernel && guest.null_fd >= 0)
        due = now_ns();
}

int64_t spare_timer(int64_t now)
{
    if (now < due)
        return due;
    due = NEVER;
    if (waiting.fd < 0)
        spare_make();
    return NEVER;
}

pid_t spare_take(struct spawn *s)
{
    static char text[MOST];
    int fds[FDS] = {s->in, s->out, s->err, s->status};
    char control[CMSG_SPACE(sizeof fds)];
    struct iovec data = {text, 0};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = (memset(control, 0, sizeof control), CMSG_FIRSTHDR(&message));

    if (!agent_own_kernel || guest.null_fd < 0)
        return -1;
    due = earlier(due, now_ns() + LATER);
    if (!(data.iov_len = pack(s, text)))
        return -1;
    if (waiting.fd < 0)
        spare_make();
    if (waiting.fd < 0)
        return -1;
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(header), fds, sizeof fds);
    kill(waiting.pid, SIGCONT); /* a command of the same user may have stopped it; a stranger by now is none the worse */
    if (sendmsg(waiting.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) > 0)
        s->jobs = waiting.fd;
    else
        close(waiting.fd); /* it is dead */
    waiting.fd = -1;
    return s->jobs < 0 ? -1 : waiting.pid;
}
