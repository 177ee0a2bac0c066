/* The minder: first process of a gVisor sandbox's jail. It runs runsc's verbs there on the holder's command (start,
 * restore, checkpoint), reaps, and ends when the sandbox's own process does. docs/launch.md has its messages.
 *
 * The holder is trusted, runsc's words are text for people, nothing more. */
#define _GNU_SOURCE
#include "launch.h"
#include "linuxapi.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_WORDS 64
#define MOST_FDS 4
#define WORDS 3072
/* how long a verb may outlive the sandbox that it ended, to say what became of it */
#define LAST_WORD_MS 30000

static struct {
    int control;
    pid_t sandbox, verb;
    int verb_starts; /* the verb that runs is to bring the sandbox up */
    int saved_to;    /* the folder that it writes to, or -1 */
    int ended, status; /* the sandbox's process, once it is gone */
} minder;

/* The beginning of what runsc wrote: stacks come last. Its file is emptied: what comes next is about the next verb. */
static size_t take_words(char *text, size_t most)
{
    int fd = open(MINDER_LOG, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return 0;
    ssize_t got = pread(fd, text, most, 0);
    if (ftruncate(fd, 0) < 0) { /* then the next answer repeats it */ }
    close(fd);
    return got > 0 ? (size_t)got : 0;
}

static void answer(int status)
{
    char packet[sizeof(int32_t) + WORDS];
    int32_t code = status;
    memcpy(packet, &code, sizeof code);
    size_t words = take_words(packet + sizeof code, WORDS);
    if (send(minder.control, packet, sizeof code + words, MSG_NOSIGNAL) < 0) { /* nobody asks any more */ }
}

static pid_t read_pid(void)
{
    char text[32];
    int fd = open(MINDER_PID, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (size <= 0) return 0;
    text[size] = 0;
    long pid = strtol(text, NULL, 10);
    return pid > 1 ? (pid_t)pid : 0;
}

/* In the verb's own process. Words: K=V for its environment, then the command. fds: what came with the message, at
 * FD_VERB and up. The wire is the sandbox's alone. */
__attribute__((noreturn)) static void become_verb(char **words, const int *fds, int count, int starts)
{
    char *environment[MOST_WORDS] = {NULL};
    sigset_t none;
    int moved[MOST_FDS];
    for (int i = 0; *words && strchr(*words, '='); words++) environment[i++] = *words;
    if (!*words) _exit(127);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int i = 0; i < count; i++)
        if ((moved[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, FD_VERB + MOST_FDS)) < 0) _exit(126);
    for (int i = 0; i < count; i++)
        if (dup2(moved[i], FD_VERB + i) < 0) _exit(126);
    if (!starts && (dup2(FD_STATUS, FD_WIRE_IN) < 0 || dup2(FD_STATUS, FD_WIRE_OUT) < 0)) _exit(126);
    execve(words[0], words, environment);
    _exit(127);
}

/* u32 starts, then words that end with a NUL each. Returns how many words, 0 for a message that is none. */
static int split_words(char *text, size_t size, char **words)
{
    int count = 0;
    if (size == 0 || text[size - 1]) return 0;
    for (size_t at = 0; at < size; at += strlen(text + at) + 1) {
        if (count == MOST_WORDS - 1) return 0;
        words[count++] = text + at;
    }
    words[count] = NULL;
    return count;
}

static int received_fds(struct msghdr *message, int *fds)
{
    struct cmsghdr *header = CMSG_FIRSTHDR(message);
    if (!header || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) return 0;
    size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    memcpy(fds, CMSG_DATA(header), count * sizeof(int));
    return (int)count;
}

/* One message of the holder's. Returns 0 when the holder has let go. */
static int obey(void)
{
    static char packet[16384];
    char *words[MOST_WORDS], control[CMSG_SPACE(sizeof(int) * MOST_FDS)];
    int fds[MOST_FDS], count;
    struct iovec data = {packet, sizeof packet};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(minder.control, &message, MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == EINTR) return 1;
    if (size <= 0) return 0;
    count = received_fds(&message, fds);
    uint32_t starts = 0;
    int good = size > (ssize_t)sizeof starts && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) && !minder.verb;
    if (good) memcpy(&starts, packet, sizeof starts);
    if (!good || !split_words(packet + sizeof starts, (size_t)size - sizeof starts, words)) {
        answer(-EINVAL);
    } else {
        minder.verb_starts = (starts & MINDER_STARTS) != 0;
        minder.verb = fork();
        if (minder.verb == 0) become_verb(words, fds, count, minder.verb_starts);
        if (minder.verb < 0) {
            minder.verb = 0;
            answer(-EAGAIN);
        }
    }
    if (minder.verb && good && starts & MINDER_SAVES && count) {
        minder.saved_to = fds[0];
        fds[0] = -1;
    }
    for (int i = 0; i < count; i++)
        if (fds[i] >= 0) close(fds[i]);
    return 1;
}

/* Root inside need not be who the folder belongs to: what was written there goes to that one. */
static void give_away(int folder)
{
    char buffer[2048] __attribute__((aligned(8)));
    struct stat owner;
    if (fstat(folder, &owner) < 0 || owner.st_uid == geteuid()) return;
    for (long size; (size = syscall(SYS_getdents64, folder, buffer, sizeof buffer)) > 0;) {
        for (long at = 0; at < size;) {
            struct dirent64_ *entry = (struct dirent64_ *)(void *)(buffer + at);
            at += entry->reclen;
            if (!strcmp(entry->name, ".") || !strcmp(entry->name, "..")) continue;
            if (fchownat(folder, entry->name, owner.st_uid, owner.st_gid, AT_SYMLINK_NOFOLLOW) < 0) { /* the holder sees that */ }
        }
    }
}

static void verb_ended(int status)
{
    minder.verb = 0;
    if (minder.saved_to >= 0) {
        give_away(minder.saved_to);
        close(minder.saved_to);
        minder.saved_to = -1;
    }
    if (minder.verb_starts && status == 0) {
        minder.sandbox = read_pid();
        /* From here on the wire is held by the sandbox alone: its end is the wire's. */
        if (dup2(FD_STATUS, FD_WIRE_IN) < 0 || dup2(FD_STATUS, FD_WIRE_OUT) < 0) _exit(END_AGENT_FAILED);
    }
    minder.verb_starts = 0;
    answer(status);
}

static void reap(void)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == minder.verb) {
            verb_ended(status);
        } else if (pid == minder.sandbox) {
            minder.ended = 1;
            minder.status = status;
        }
    }
    /* It may have ended before the verb that started it had. */
    if (minder.sandbox && !minder.ended && kill(minder.sandbox, 0) < 0) minder.ended = 1;
}

static int exit_code(void)
{
    if (WIFSIGNALED(minder.status)) return 128 + WTERMSIG(minder.status);
    return WEXITSTATUS(minder.status);
}

int minder_main(int control)
{
    sigset_t child;
    char ignored[sizeof(struct signalfd_siginfo)];
    prctl(PR_SET_NAME, "sloplet-minder", 0, 0, 0);
    seccomp_no_membarrier();
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    int signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals < 0) return END_AGENT_FAILED;
    minder.control = control;
    minder.saved_to = -1;
    struct pollfd fds[] = {{control, POLLIN, 0}, {signals, POLLIN, 0}};
    for (;;) {
        int timeout = minder.ended ? LAST_WORD_MS : -1;
        int ready = poll(fds, 2, timeout);
        if (ready < 0 && errno != EINTR) return END_AGENT_FAILED;
        while (read(signals, ignored, sizeof ignored) > 0) {}
        reap();
        if (minder.ended && (!minder.verb || ready == 0)) return exit_code();
        if (fds[0].revents && !obey()) fds[0].fd = -1;
    }
}
