/* The agent itself: what it makes of the process it was given, and its loop. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "dns.h"
#include "egress.h"
#include "freeze.h"
#include "guest.h"
#include "layers.h"
#include "loop.h"
#include "memory.h"
#include "ops.h"
#include "proc.h"
#include "spare.h"
#include "watch.h"

int agent_proc_fd = -1;
int agent_fence_fd = -1;
int agent_work_fd, agent_work_fds;
int agent_upper_fd = -1, agent_layers = -1;
struct agent_layer agent_layer[AGENT_LAYERS];
int agent_volumes;
char agent_volume[AGENT_VOLUMES][512];
int (*agent_fence)(int fence_fd);
bool agent_scratch_in_memory, agent_own_ipc;
bool agent_powers, agent_no_setid, agent_no_leases;
struct guest guest = {.null_fd = -1};

#define IDLE_TRIM (300 * MSEC)
#define LAST_WAIT (3000 * MSEC)

static struct source child_source = {.fd = -1};
static bool reap_more;

/* SHUTDOWN in progress */
static struct stream *shutdown_stream;
static bool shutting_down;
static int64_t shutdown_kill = NEVER, shutdown_end = NEVER;

static void on_child(struct source *src, uint32_t events)
{
    struct signalfd_siginfo info;

    (void)events;
    while (read(src->fd, &info, sizeof info) > 0)
        ;
    reap_more = true;
}

/* All signals are blocked, for good: nobody in the sandbox can stop us by one, init or not, but for
 * SIGKILL and SIGSTOP of the same uid where we are not init. Dispositions go back to default so that
 * commands do not inherit an ignored SIGPIPE from whoever launched us. */
static int set_signals(void)
{
    sigset_t all, child;
    struct sigaction sa = {.sa_handler = SIG_DFL};
    int fd;

    for (int i = 1; i <= 64; i++)
        sigaction(i, &sa, NULL);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    fd = signalfd(-1, &child, SFD_NONBLOCK | SFD_CLOEXEC);
    if (fd < 0)
        return -1;
    return loop_add(&child_source, fd, EPOLLIN, on_child);
}

/* What no command may ever regain is given up here once, and inherited. */
static void drop_privilege_sources(void)
{
    struct {
        uint32_t version;
        int pid;
    } header = {0x20080522, 0};
    uint32_t sets[6] = {0}; /* effective, permitted, inheritable; low word, then high word */

    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    for (int cap = 0; cap < 64; cap++)
        if (!(agent_powers && cap < 32 && AGENT_POWERS >> cap & 1) && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0 && errno == EINVAL)
            break; /* past the last one this kernel knows */
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    if (syscall(SYS_capget, &header, sets) == 0) {
        sets[2] = sets[5] = 0;
        syscall(SYS_capset, &header, sets);
    }
}

/* Our own fds must stay clear of 0-2 in every shim, and many streams need many fds. */
static void set_fds(void)
{
    struct rlimit raised;
    struct stat st;
    int fd;

    while ((fd = open("/dev/null", O_RDWR)) >= 0 && fd < 3)
        ;
    if (fd >= 3)
        close(fd);
    fd = open("/dev/null", O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd >= 0 && !fstat(fd, &st) && S_ISCHR(st.st_mode) && st.st_rdev == makedev(1, 3)) {
        fcntl(fd, F_SETFL, 0); /* commands share this description */
        guest.null_fd = fd;
    } else if (fd >= 0) {
        close(fd);
    }
    if (agent_proc_fd < 0)
        agent_proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    else
        fcntl(agent_proc_fd, F_SETFD, FD_CLOEXEC);
    getrlimit(RLIMIT_NOFILE, &guest.nofile);
    raised = guest.nofile;
    raised.rlim_cur = raised.rlim_max < 65536 ? raised.rlim_max : 65536;
    if (raised.rlim_cur > guest.nofile.rlim_cur)
        setrlimit(RLIMIT_NOFILE, &raised);
}

static void shutdown_release(struct stream *s)
{
    (void)s;
    shutdown_stream = NULL;
}

void op_shutdown(struct stream *s, const struct fields *f)
{
    static const struct stream_ops ops = {.release = shutdown_release};
    int64_t grace = fields_int(f, TAG_TIMEOUT_MS, 0);

    if (shutting_down || grace < 0) {
        stream_fail(s, shutting_down ? EALREADY : EINVAL, NULL, "cannot shut down like this");
        return;
    }
    if (grace > 3600000)
        grace = 3600000;
    shutting_down = true;
    shutdown_stream = s;
    s->ops = &ops;
    shutdown_kill = now_ns() + grace * MSEC;
    if (grace) {
        kill_everyone(SIGTERM);
        kill_everyone(SIGCONT); /* a stopped process cannot take its leave */
    }
}

bool shutdown_begun(void)
{
    return shutting_down;
}

static int64_t shutdown_timer(int64_t now)
{
    if (!shutting_down)
        return NEVER;
    if (now >= shutdown_kill) {
        kill_everyone(SIGKILL);
        if (shutdown_end == NEVER)
            shutdown_end = now + LAST_WAIT;
        shutdown_kill = now + 5 * MSEC;
    }
    if (proc_nobody_left() || now >= shutdown_end) {
        if (shutdown_stream)
            stream_done(shutdown_stream);
        wire_finish(0);
        return NEVER;
    }
    return earlier(shutdown_kill, now + 5 * MSEC);
}

/* Where we are init the kernel kills everyone with us. Elsewhere nobody else would. */
static void kill_rest(void)
{
    int64_t until = now_ns() + LAST_WAIT;
    struct timespec pause = {0, 1000000};

    kill_everyone(SIGKILL);
    while (!guest.pid1 && now_ns() < until) {
        while (proc_reap())
            ;
        if (proc_nobody_left())
            return;
        nanosleep(&pause, NULL);
        kill_everyone(SIGKILL);
    }
}

static void run(void)
{
    bool dirty = false; /* buffers may hold memory worth giving back */
    int64_t next = 0;

    for (;;) {
        int events = wire_held() ? wire_wait() : loop_wait(next);
        int64_t now = now_ns();
        bool busy;

        if (events < 0)
            wire_abort(1, "the event loop failed");
        if (wire_held()) { /* frozen: whatever else happens waits for the thaw */
            if (!wire_turn())
                return;
            dirty = true;
            continue;
        }
        if (reap_more)
            reap_more = proc_reap();
        next = earlier(watch_timers(now), shutdown_timer(now));
        next = earlier(next, earlier(egress_timers(now), dns_timers(now)));
        if (!freeze_serving())
            next = earlier(next, earlier(proc_timers(now), memory_timer(now)));
        next = earlier(next, spare_timer(now));
        busy = wire_busy();
        if (!wire_turn()) /* last: it flushes what all the others queued */
            return;
        baseline_take(); /* the host has its answer to HELLO, and takes a moment to ask for more */
        if (events > 0 || busy) {
            dirty = true;
        } else if (dirty) {
            wire_trim();
#ifdef __GLIBC__
            malloc_trim(0);
#endif
            dirty = false;
        }
        if (busy || wire_busy() || reap_more)
            next = 0;
        else if (next != NEVER)
            next -= now;
        else if (dirty)
            next = IDLE_TRIM;
    }
}

int agent_main(int in_fd, int out_fd)
{
    guest.self = getpid();
    guest.pid1 = guest.self == 1;
    guest.uid = geteuid();
    guest.gid = getegid();
    guest.started = now_ns();
    guest.ring = RING_DEFAULT;
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_NAME, "sloplet-agent");
    umask(0); /* every mode below is said in full; commands get 022 */
    set_fds();
    drop_privilege_sources();
    if (chdir("/") < 0 || loop_init() < 0 || set_signals() < 0 || wire_init(in_fd, out_fd) < 0) {
        dprintf(2, "sloplet-agent: cannot start: errno %d\n", errno);
        return 1;
    }
    run();
    kill_rest();
    wire_forget();
    return wire_exit_code();
}
