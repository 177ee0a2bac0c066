/* The agent's side of sudo: see sudo.h. Each request is served by a fork of the agent that blocks as it likes: it takes the
 * request, starts a shim as for any command, passes signals on, and tells how it ended. Should its client go away meanwhile,
 * what runs goes too. What the command leaves in the background stays, as it would without sudo, and so does who serves it. */
#define _GNU_SOURCE
#include "sudo.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"
#include "guest.h"
#include "loop.h"
#include "proctab.h"
#include "spare.h"
#include "spawn.h"

#define BACKLOG 64
#define PATIENCE 10 /* seconds for a client to say what it wants */
#define FULL "cannot fork: the sandbox's process limit is reached"

static struct source listener = {.fd = -1};

struct request {
    uid_t asks;
    pid_t pid;
    char **argv, **env;
    const char *user, *cwd, *path;
    int fd[3];
};

static void answer(int conn, int status, const char *text)
{
    struct sudo_answer a = {status, (uint32_t)strlen(text)};

    if (send(conn, &a, sizeof a, MSG_NOSIGNAL) == sizeof a && a.text_len)
        send(conn, text, a.text_len, MSG_NOSIGNAL);
}

static bool read_all(int conn, char *at, size_t n)
{
    while (n) {
        ssize_t got = recv(conn, at, n, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        at += got;
        n -= (size_t)got;
    }
    return true;
}

/* The head, with exactly three descriptors, and who sent it: said with the message, since gVisor tells of no peer whose it is.
 * The kernel lets nobody say another's. */
static bool take_head(int conn, struct sudo_request *head, struct request *r)
{
    union {
        char space[CMSG_SPACE(3 * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
        struct cmsghdr align;
    } control;
    struct iovec part = {head, sizeof *head};
    struct msghdr msg = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    bool fds = false, sender = false;
    struct ucred who;
    int yes = 1;

    if (setsockopt(conn, SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes) < 0)
        return false;
    if (recvmsg(conn, &msg, MSG_CMSG_CLOEXEC) != sizeof *head || msg.msg_flags & MSG_CTRUNC)
        return false;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(3 * sizeof(int))) {
            memcpy(r->fd, CMSG_DATA(c), 3 * sizeof(int));
            fds = true;
        } else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_CREDENTIALS && c->cmsg_len == CMSG_LEN(sizeof who)) {
            memcpy(&who, CMSG_DATA(c), sizeof who);
            r->asks = who.uid;
            r->pid = who.pid;
            sender = true;
        }
    }
    return fds && sender && head->magic == SUDO_MAGIC && head->argc >= 1 && head->argc <= SUDO_COUNT && head->envc <= SUDO_COUNT &&
           head->bytes >= 2 && head->bytes <= SUDO_WORDS;
}

static char *next_word(char **at, char *end)
{
    char *word = *at, *nul = word < end ? memchr(word, 0, (size_t)(end - word)) : NULL;

    if (!nul)
        return NULL;
    *at = nul + 1;
    return word;
}

static bool take(int conn, struct request *r)
{
    struct sudo_request head;
    char *text, *at, *end;

    if (!take_head(conn, &head, r) || !(text = malloc(head.bytes)) || !read_all(conn, text, head.bytes))
        return false;
    r->argv = calloc((size_t)head.argc + head.envc + 2, sizeof *r->argv);
    if (!r->argv)
        return false;
    r->env = r->argv + head.argc + 1;
    at = text;
    end = text + head.bytes;
    if (!(r->user = next_word(&at, end)) || !(r->cwd = next_word(&at, end)))
        return false;
    for (uint32_t i = 0; i < head.argc; i++)
        if (!(r->argv[i] = next_word(&at, end)))
            return false;
    r->path = DEFAULT_PATH;
    for (uint32_t i = 0; i < head.envc; i++) {
        if (!(r->env[i] = next_word(&at, end)) || !strchr(r->env[i], '='))
            return false;
        if (!strncmp(r->env[i], "PATH=", 5))
            r->path = r->env[i] + 5;
    }
    return at == end && r->argv[0][0];
}

static bool in_group(const struct user *u, const char *groups, size_t n, const char *name)
{
    gid_t gid;

    if (!group_find(groups, n, name, &gid))
        return false;
    for (int i = 0; i < u->ngroups; i++)
        if (u->groups[i] == gid)
            return true;
    return false;
}

/* Root, the sandbox's own user, and whom the image lists among those who may. */
static bool may_ask(uid_t uid)
{
    struct user u, own;
    char number[16];
    size_t n = 0;
    char *groups;
    bool may;

    if (uid == 0 || (!user_resolve("", 0, &own) && own.uid == uid))
        return true;
    snprintf(number, sizeof number, "%u", (unsigned)uid);
    if (user_resolve(number, strlen(number), &u))
        return false;
    groups = read_small("/etc/group", &n);
    may = groups && (in_group(&u, groups, n, "sudo") || in_group(&u, groups, n, "wheel"));
    free(groups);
    return may;
}

/* What the client sends are signals; its end is the command's. False once it is gone. */
static bool pass_signals(int conn, pid_t shim, pid_t command)
{
    unsigned char signals[64];
    ssize_t got = recv(conn, signals, sizeof signals, MSG_DONTWAIT);

    if (got < 0)
        return errno == EAGAIN || errno == EINTR;
    if (got == 0) {
        kill(shim, SHIM_SWEEP);
        return false;
    }
    for (ssize_t i = 0; i < got; i++)
        if (signals[i] && signals[i] < 64)
            kill(-command, signals[i]);
    return true;
}

static void tell(int conn, const struct shim_report *r, const char *name)
{
    char text[512];
    const char *why = r->part == PART_COMMAND && r->error == ENOENT ? "command not found" : strerror(r->error);

    if (r->kind == SHIM_EXITED) {
        answer(conn, r->status, "");
        return;
    }
    snprintf(text, sizeof text, "%.300s: %s", r->part == PART_CWD ? "the working directory" : name, why);
    answer(conn, 0, text);
}

/* Waits until nothing is left of what the shim minds: it would kill that if we went. */
static void outstay(pid_t shim)
{
    int status;

    while (waitpid(shim, &status, 0) < 0)
        if (errno != EINTR)
            return;
    if (WIFSIGNALED(status))
        _exit(WARD_LOST);
}

static void follow(int conn, int status, pid_t shim, const char *name)
{
    struct pollfd wait[2] = {{-1, POLLIN, 0}, {status, POLLIN, 0}}; /* signals wait until there is a command for them */
    struct shim_report r;
    pid_t command = 0;

    for (;;) {
        if (poll(wait, 2, -1) < 0 && errno != EINTR)
            return;
        if (wait[1].revents) {
            if (read(status, &r, sizeof r) != sizeof r)
                return; /* the shim was killed: its client sees the end of the connection */
            if (r.kind != SHIM_STARTED) {
                tell(conn, &r, name);
                return;
            }
            command = r.pid;
            wait[0] = (struct pollfd){conn, POLLIN, 0};
        }
        if (wait[0].fd >= 0 && wait[0].revents && !pass_signals(conn, shim, command))
            wait[0].fd = -1;
    }
}

static void run(int conn, struct request *r, const struct user *u)
{
    static pid_t pid_slot;
    struct spawn sp = {.argv = r->argv, .env = r->env, .cwd = r->cwd, .workdir = "/", .path = r->path, .user = u,
                       .in = r->fd[0], .out = r->fd[1], .err = r->fd[2], .jobs = -1, .pid_slot = &pid_slot};
    pid_t self = getpid(), shim;
    int status[2];

    if (pipe2(status, O_CLOEXEC) < 0) {
        answer(conn, 0, "cannot make a pipe");
        return;
    }
    sp.status = status[1];
    shim = fork();
    if (shim == 0) {
        close(conn);
        shim_enter(&sp, self);
        shim_run(&sp);
        _exit(0);
    }
    close(status[1]);
    for (int i = 0; i < 3; i++)
        close(r->fd[i]);
    if (shim < 0) {
        answer(conn, 0, FULL);
        return;
    }
    follow(conn, status[0], shim, r->argv[0]);
    close(conn);
    outstay(shim);
}

/* The agent's child that a process descends from, or 0. */
static pid_t top_of(pid_t pid)
{
    struct procent e;

    while (pid > 1 && proctab_read(pid, &e)) {
        if (e.parent == guest.self)
            return pid;
        pid = e.parent;
    }
    return 0;
}

static void serve(int conn, pid_t agent, struct ward *ward)
{
    struct timeval patience = {PATIENCE, 0};
    struct spawn self = {.jobs = -1};
    struct request r = {0};
    sigset_t end;
    struct user u;

    shim_enter(&self, agent);
    agent_work_fds = 0; /* joined: what is started here is born there */
    conn = shim_keep_only(conn);
    setsockopt(conn, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    sigemptyset(&end);
    sigaddset(&end, SIGALRM);
    sigprocmask(SIG_UNBLOCK, &end, NULL);
    alarm(2 * PATIENCE); /* for who says a byte at a time */
    prctl(PR_SET_NAME, "sloplet-sudo");
    if (self.error)
        answer(conn, 0, strerror(self.error));
    else if (!take(conn, &r))
        answer(conn, 0, "the request makes no sense");
    else if (!may_ask(r.asks))
        answer(conn, 0, "this user may not use sudo: it is for the sandbox's user, and for members of the group sudo or wheel");
    else if (user_resolve(r.user, strlen(r.user), &u))
        answer(conn, 0, "there is no such user");
    else {
        alarm(0);
        ward->whose = top_of(r.pid);
        run(conn, &r, &u);
    }
}

static void on_request(struct source *s, uint32_t events)
{
    int conn = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC);
    pid_t agent = getpid(), pid;
    struct ward *ward;

    (void)events;
    if (conn < 0)
        return;
    ward = ward_free();
    pid = ward ? fork() : -1;
    if (pid == 0) {
        serve(conn, agent, ward);
        _exit(0);
    }
    if (pid > 0)
        ward->server = pid;
    else
        answer(conn, 0, ward ? FULL : "too many ask at once: try again when some have ended");
    close(conn);
}

void sudo_begin(void)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX, .sun_path = SUDO_SOCKET};
    int fd;

    if (!agent_powers || guest.no_users || !guest.pid1 || listener.fd >= 0 || ward_begin() < 0)
        return;
    mkdir("/run", 0755);
    mkdir("/run/sloplet", 0755);
    unlink(SUDO_SOCKET);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && chmod(SUDO_SOCKET, 0666) == 0 && listen(fd, BACKLOG) == 0 &&
        loop_add(&listener, fd, EPOLLIN, on_request) == 0)
        return;
    dprintf(2, "sloplet-agent: sudo is not served: errno %d\n", errno);
    if (fd >= 0)
        close(fd);
}
