/* The program `sudo` of a sandbox: asks the agent (sudo.h). It takes the options that people and scripts use, and refuses the
 * others; there are no passwords. */
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
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"
#include "users.h"

extern char **environ;

struct options {
    const char *user;
    bool login, shell, keep_env, check;
    const char *keep; /* names of variables, with commas between them */
    char **set; /* NAME=VALUE before the command */
    int sets;
    char **command;
    int words;
};

/* What goes along without -E: what a terminal, a locale or a certificate store is told by, and where the indexes are. */
static const char *const kept[] = {
    "TERM", "COLORTERM", "LANG", "LANGUAGE", "LC_", "TZ", "PATH", "DISPLAY", "DEBIAN_FRONTEND", "SOURCE_DATE_EPOCH", "SLOPLET_",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "PIP_",
    "NPM_CONFIG_", "npm_config_", NULL,
};

static char *words;
static size_t used, room;
static uint32_t count;

static void complain(const char *what, const char *why)
{
    fprintf(stderr, "sudo: %s%s%s\n", what, *why ? ": " : "", why);
}

static bool put(const char *a, const char *b)
{
    size_t n = strlen(a) + strlen(b) + 1;

    if (used + n > room) {
        size_t more = (used + n) * 2;
        char *grown = more <= SUDO_WORDS * 2 ? realloc(words, more) : NULL;
        if (!grown)
            return false;
        words = grown;
        room = more;
    }
    memcpy(words + used, a, strlen(a));
    strcpy(words + used + strlen(a), b);
    used += n;
    count++;
    return used <= SUDO_WORDS && count <= SUDO_COUNT;
}

static bool is_assignment(const char *word)
{
    size_t n = strspn(word, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789");

    return n && word[n] == '=';
}

/* The argument of an option: the rest of its word, or the next one. */
static const char *argument(char **argv, int *at, const char *rest)
{
    if (*rest)
        return rest;
    return argv[*at + 1] ? argv[++*at] : NULL;
}

static int long_option(const char *word, struct options *o)
{
    if (!strncmp(word, "--user=", 7))
        o->user = word + 7;
    else if (!strcmp(word, "--login"))
        o->login = true;
    else if (!strcmp(word, "--shell"))
        o->shell = true;
    else if (!strcmp(word, "--preserve-env"))
        o->keep_env = true;
    else if (!strncmp(word, "--preserve-env=", 15))
        o->keep = word + 15;
    else if (!strcmp(word, "--validate") || !strcmp(word, "--list"))
        o->check = true;
    else if (strcmp(word, "--non-interactive") && strcmp(word, "--set-home") && strcmp(word, "--stdin"))
        return -1;
    return 0;
}

static int short_options(char **argv, int *at, struct options *o)
{
    for (const char *c = argv[*at] + 1; *c; c++) {
        if (*c == 'u' || *c == 'p' || *c == 'C') {
            const char *value = argument(argv, at, c + 1);
            if (!value)
                return -1;
            if (*c == 'u')
                o->user = *value == '#' ? value + 1 : value;
            return 0;
        }
        if (*c == 'i')
            o->login = true;
        else if (*c == 's')
            o->shell = true;
        else if (*c == 'E')
            o->keep_env = true;
        else if (*c == 'v' || *c == 'l' || *c == 'k' || *c == 'K')
            o->check = true;
        else if (!strchr("nHSAPB", *c))
            return -1;
    }
    return 0;
}

static int parse(int argc, char **argv, struct options *o)
{
    int i = 1;

    for (; i < argc && argv[i][0] == '-' && argv[i][1]; i++) {
        if (!strcmp(argv[i], "--")) {
            i++;
            break;
        }
        if (!strcmp(argv[i], "-V") || !strcmp(argv[i], "--version") || !strcmp(argv[i], "-h") || !strcmp(argv[i], "--help")) {
            printf("sudo of a Sloplet sandbox\nusage: sudo [-EHinsS] [-u user] [VAR=value] [command [argument ...]]\n");
            return 0;
        }
        if ((argv[i][1] == '-' ? long_option(argv[i], o) : short_options(argv, &i, o)) < 0) {
            complain(argv[i < argc ? i : argc - 1], "this sudo does not know that option");
            return -1;
        }
    }
    o->set = argv + i;
    for (; i < argc && is_assignment(argv[i]); i++)
        o->sets++;
    o->command = argv + i;
    o->words = argc - i;
    if (o->words || o->login || o->shell || o->check)
        return 1;
    complain("no command", "usage: sudo [-EHinsS] [-u user] [VAR=value] [command [argument ...]]");
    return -1;
}

static void find_user(const char *name, struct user *out)
{
    size_t n = 0;
    char *passwd = read_small("/etc/passwd", &n), *end = NULL;
    unsigned long number = strtoul(name, &end, 10);

    memset(out, 0, sizeof *out);
    if (!passwd_find(passwd, n, name, 0, out) && !(*name && !*end && passwd_find(passwd, n, NULL, (uid_t)number, out)))
        snprintf(out->name, sizeof out->name, "%.60s", name);
    if (!out->home[0])
        strcpy(out->home, "/");
    if (!out->shell[0])
        strcpy(out->shell, "/bin/sh");
    free(passwd);
}

static bool is_listed(const char *name, size_t n, const char *list)
{
    for (; list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL)
        if (strcspn(list, ",") == n && !strncmp(list, name, n))
            return true;
    return false;
}

static bool goes_along(const char *entry, const struct options *o)
{
    size_t n = strcspn(entry, "=");

    for (int i = 0; i < o->sets; i++)
        if (!strncmp(o->set[i], entry, n + 1))
            return false; /* said anew below */
    for (const char *const *name = (const char *const[]){"HOME", "USER", "LOGNAME", "SHELL", "MAIL", NULL}; *name; name++)
        if (strlen(*name) == n && !strncmp(entry, *name, n))
            return false;
    if (o->keep_env || is_listed(entry, n, o->keep))
        return true;
    for (const char *const *name = kept; *name; name++) {
        size_t len = strlen(*name);
        bool family = (*name)[len - 1] == '_';
        if (family ? !strncmp(entry, *name, len) : n == len && !strncmp(entry, *name, len))
            return true;
    }
    return false;
}

static bool put_env(const struct options *o, const struct user *u)
{
    char text[32], own[16];
    struct user me;

    snprintf(own, sizeof own, "%u", (unsigned)getuid());
    find_user(own, &me);
    for (char **e = environ; *e; e++)
        if (goes_along(*e, o) && !put(*e, ""))
            return false;
    for (int i = 0; i < o->sets; i++)
        if (!put(o->set[i], ""))
            return false;
    snprintf(text, sizeof text, "SUDO_GID=%u", (unsigned)getgid());
    return put("HOME=", u->home) && put("USER=", u->name) && put("LOGNAME=", u->name) && put("SHELL=", u->shell) &&
           put("SUDO_USER=", me.name) && put("SUDO_UID=", own) && put(text, "") &&
           put("SUDO_COMMAND=", o->words ? o->command[0] : u->shell);
}

/* -i and -s: the words become one line for the shell, everything but plain characters escaped, as sudo does it. */
static char *shell_line(const struct options *o)
{
    size_t n = 1;
    char *line, *at;

    for (int i = 0; i < o->words; i++)
        n += strlen(o->command[i]) * 2 + 1;
    at = line = malloc(n);
    for (int i = 0; line && i < o->words; i++) {
        if (i)
            *at++ = ' ';
        for (const char *c = o->command[i]; *c; c++) {
            if (!strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-$", *c))
                *at++ = '\\';
            *at++ = *c;
        }
    }
    if (line)
        *at = 0;
    return line;
}

static bool put_command(const struct options *o, const struct user *u)
{
    if (!o->login && !o->shell) {
        for (int i = 0; i < o->words; i++)
            if (!put(o->command[i], ""))
                return false;
        return true;
    }
    if (!put(o->login ? u->shell : getenv("SHELL") && *getenv("SHELL") ? getenv("SHELL") : u->shell, "") || (o->login && !put("-l", "")))
        return false;
    if (!o->words)
        return true;
    char *line = shell_line(o);
    return line && put("-c", "") && put(line, "");
}

static int reach(void)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX, .sun_path = SUDO_SOCKET};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd >= 0 && connect(fd, (struct sockaddr *)&at, sizeof at) == 0)
        return fd;
    complain("root has no powers in this sandbox", "start it with sudo=True (--sudo)");
    return -1;
}

static bool send_all(int conn, const char *at, size_t n)
{
    while (n) {
        ssize_t sent = send(conn, at, n, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return false;
        at += sent;
        n -= (size_t)sent;
    }
    return true;
}

static bool send_request(int conn, struct sudo_request head)
{
    union {
        char space[CMSG_SPACE(3 * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
        struct cmsghdr align;
    } control = {.space = {0}};
    struct ucred who = {getpid(), getuid(), getgid()};
    struct iovec part = {&head, sizeof head};
    struct msghdr msg = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    int fds[3] = {0, 1, 2};

    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(c), fds, sizeof fds);
    c = CMSG_NXTHDR(&msg, c);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_CREDENTIALS;
    c->cmsg_len = CMSG_LEN(sizeof who);
    memcpy(CMSG_DATA(c), &who, sizeof who);
    return sendmsg(conn, &msg, MSG_NOSIGNAL) == sizeof head && send_all(conn, words, used);
}

static int finish(int conn)
{
    struct sudo_answer a;
    char text[1024];
    size_t n;

    if (recv(conn, &a, sizeof a, MSG_WAITALL) != sizeof a) {
        complain("the command was killed", "");
        return 137;
    }
    if (a.text_len) {
        n = a.text_len < sizeof text ? a.text_len : sizeof text - 1;
        text[recv(conn, text, n, MSG_WAITALL) == (ssize_t)n ? n : 0] = 0;
        complain(text, "");
        return 1;
    }
    return WIFSIGNALED(a.status) ? 128 + WTERMSIG(a.status) : WEXITSTATUS(a.status);
}

/* Signals for us are for the command. */
static int wait_for(int conn, int signals)
{
    struct pollfd wait[2] = {{conn, POLLIN, 0}, {signals, POLLIN, 0}};
    struct signalfd_siginfo info;

    for (;;) {
        if (poll(wait, 2, -1) < 0 && errno != EINTR)
            return 1;
        if (wait[1].revents & POLLIN && read(signals, &info, sizeof info) == sizeof info) {
            unsigned char number = (unsigned char)info.ssi_signo;
            send(conn, &number, 1, MSG_NOSIGNAL);
        }
        if (wait[0].revents)
            return finish(conn);
    }
}

static int hold_signals(void)
{
    static const int all[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGCONT, SIGWINCH};
    sigset_t set;

    sigemptyset(&set);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        sigaddset(&set, all[i]);
    sigprocmask(SIG_BLOCK, &set, NULL);
    return signalfd(-1, &set, SFD_CLOEXEC);
}

int sudo_client_main(int argc, char **argv)
{
    struct options o = {.user = "root"};
    struct sudo_request head = {.magic = SUDO_MAGIC};
    int parsed = parse(argc, argv, &o), conn, signals;
    char cwd[4096];
    struct user u;

    if (parsed <= 0)
        return parsed < 0;
    for (int fd; (fd = open("/dev/null", O_RDWR)) >= 0;)
        if (fd > 2) {
            close(fd);
            break;
        }
    conn = reach();
    if (conn < 0)
        return 1;
    if (o.check && !o.words)
        return 0;
    find_user(o.user, &u);
    if (!getcwd(cwd, sizeof cwd))
        strcpy(cwd, "/");
    if (!put(o.user, "") || !put(o.login ? u.home : cwd, "") || !put_command(&o, &u)) {
        complain("the command is too long", "");
        return 1;
    }
    head.argc = count - 2;
    if (!put_env(&o, &u)) {
        complain("the command is too long", "");
        return 1;
    }
    head.envc = count - 2 - head.argc;
    head.bytes = (uint32_t)used;
    signals = hold_signals();
    if (signals < 0 || (!send_request(conn, head) && errno != EPIPE)) {
        complain("the agent did not take the request", strerror(errno));
        return 1;
    }
    return wait_for(conn, signals); /* after EPIPE too: why is said there */
}
