/* The memory watchdog: see memory.h, and docs/adr/0006 for what it can and cannot do.
 *
 * A look has three depths, each dearer and nearer to the truth than the one before, and goes only as deep as it must:
 *   1. /proc/PID/stat: the resident sizes added up. Shared pages count for each sharer, so it is never too little.
 *   2. /proc/PID/status: without the pages of files, which are the host's and can be dropped.
 *   3. /proc/PID/smaps_rollup: a page that n processes share counts 1/n for each. Nobody dies but by this measure:
 *      forked workers that share their memory are not a bomb.
 * What lies in file systems that are memory (the scratch, /dev/shm) and in System V segments counts at every depth.
 *
 * It never forks, and holds one table that is made beforehand and only grows. */
#define _GNU_SOURCE
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"
#include "guest.h"
#include "gvisor_guest.h"
#include "path.h"
#include "proc.h"
#include "proctab.h"
#include "sudo.h"

#define EVERY (50 * MSEC)
#define EVERY_NEAR (20 * MSEC) /* above half of the limit */
#define EVERY_OWN (10 * MSEC)  /* the same where a look costs a third of a millisecond */
#define EVERY_KILL (5 * MSEC)  /* is it enough? */
#define EVERY_BLIND (1000 * MSEC)
#define PART_OF_CPU 8 /* looking takes at most one part in this many of a processor */
#define LITTLE 16 /* processes that hold less than one part in this many of the limit are not to blame */
#define DYING (5000 * MSEC)
#define VICTIMS 256
#define TABLE_FIRST 1024
#define TMPFS 0x01021994

static int64_t limit, kills, next_look = NEVER;
static int64_t allowed; /* what the living may have at this look: the limit, or less */
static struct proctab table;
static int file_fds[2] = {-1, -1}; /* file systems that are memory: the scratch and /dev/shm */
static int64_t last_files;
static int growing; /* looks in a row at which the files were nearly all there may be, and grew */

/* Killed, and their memory on its way back: that takes long where many want the processor, and /proc does not tell it any
 * more. It is not counted at once, or their neighbours would die for it, but together with the living there is a second
 * limit, half as large again; a quarter is left to them in any case. */
static struct {
    pid_t pid;
    int64_t weight, until;
} victims[VICTIMS];
static unsigned next_victim;
static int64_t dying; /* bytes */

/* The last look that went to the third depth. `cost` is of this one: it has a due time of its own. */
static struct {
    int64_t due, cost;
    uint64_t anon, shmem, faults;
} deep;

/* What a look costs is processor time: on a busy machine it takes long and costs no more, and then is no time to look
 * less often. */
static int64_t spent_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (int64_t)ts.tv_sec * 1000 * MSEC + ts.tv_nsec;
}

static void watch_files(void)
{
    static const char *const places[] = {"/", "/dev/shm"};
    struct stat seen = {0}, st;
    struct statfs fs;

    for (int i = 0; i < 2; i++) {
        int fd = path_open(AT_FDCWD, places[i], O_PATH | O_DIRECTORY, 0);

        if (fd < 0)
            continue;
        if (fstatfs(fd, &fs) || fstat(fd, &st) || (i == 1 && st.st_dev == seen.st_dev) ||
            (fs.f_type != TMPFS && !(i == 0 && agent_scratch_in_memory))) { /* an overlay has a type of its own */
            close(fd);
            continue;
        }
        seen = st;
        file_fds[i] = fd;
    }
}

void memory_limit(int64_t bytes)
{
    limit = bytes;
    if (!limit || table.cap)
        return;
    table.all = malloc(TABLE_FIRST * sizeof *table.all);
    table.cap = table.all ? TABLE_FIRST : 0;
    if (guest.pid1 && !agent_own_kernel) /* elsewhere they are the machine's */
        watch_files();
}

int64_t memory_kills(void)
{
    return limit ? kills : -1;
}

static int64_t files_used(void)
{
    static long page;
    int64_t used = 0;
    struct statfs fs;
    struct shm_info shm;

    if (!page)
        page = sysconf(_SC_PAGESIZE);
    for (int i = 0; i < 2; i++)
        if (file_fds[i] >= 0 && fstatfs(file_fds[i], &fs) == 0)
            used += (int64_t)(fs.f_blocks - fs.f_bfree) * (int64_t)fs.f_bsize;
    if (agent_own_ipc && shmctl(0, SHM_INFO, (struct shmid_ds *)(void *)&shm) >= 0)
        used += (int64_t)shm.shm_rss * page;
    return used;
}

/* Takes the victims out of the table, and forgets those that have gone. */
static void set_victims_apart(int64_t now)
{
    dying = 0;
    for (int i = 0; i < VICTIMS; i++) {
        struct procent *e = victims[i].pid ? proctab_find(&table, victims[i].pid) : NULL;

        if (!e || !e->in || victims[i].until < now) {
            victims[i].pid = 0;
            continue;
        }
        e->in = false;
        dying += victims[i].weight;
    }
}

/* Reads /proc/PID/NAME; the text's length, 0 if it may not be read or is gone. */
static size_t read_proc(pid_t pid, const char *name, char *text, size_t cap)
{
    char path[48];
    ssize_t n;
    int fd;

    snprintf(path, sizeof path, "%d/%s", (int)pid, name);
    fd = openat(agent_proc_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    n = read(fd, text, cap - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    return n > 0 ? (size_t)n : 0;
}

/* The kilobytes behind a word at the beginning of a line, as bytes. */
static uint64_t kib_of(const char *text, const char *word)
{
    const char *at = strstr(text, word);

    return at ? strtoull(at + strlen(word), NULL, 10) * 1024 : 0;
}

/* One that is gone, or a zombie, is a member no more. */
static void read_sizes(struct procent *e)
{
    char text[2048];

    e->anon = e->shmem = 0;
    e->in = read_proc(e->pid, "status", text, sizeof text) && strstr(text, "\nRssAnon:");
    if (!e->in)
        return;
    e->anon = kib_of(text, "\nRssAnon:");
    e->shmem = kib_of(text, "\nRssShmem:");
}

/* The kernel shows it to the same user only, so we become that one to read it. Of a process that hides (not dumpable)
 * the sizes stay as they are: whoever hides counts in full. */
static void read_shares(struct procent *e)
{
    struct user as = {0};
    struct stat st;
    char text[2048], name[16];

    snprintf(name, sizeof name, "%d", (int)e->pid);
    if (fstatat(agent_proc_fd, name, &st, 0))
        return;
    as.uid = st.st_uid;
    as.gid = st.st_gid;
    if (user_enter(&as))
        return;
    if (read_proc(e->pid, "smaps_rollup", text, sizeof text) && strstr(text, "\nPss_Anon:")) {
        e->anon = kib_of(text, "\nPss_Anon:");
        e->shmem = kib_of(text, "\nPss_Shmem:");
    }
    user_leave();
}

static uint64_t weight(const struct procent *e)
{
    return e->in ? e->anon + e->shmem : 0;
}

static int heaviest_first(const void *a, const void *b)
{
    uint64_t x = weight(a), y = weight(b);

    return x < y ? 1 : x > y ? -1 : 0;
}

/* Mapped pages of tmpfs files and System V segments are in both numbers: the larger one holds. */
static int64_t sum(uint64_t anon, uint64_t shmem, int64_t files)
{
    int64_t shared = (int64_t)shmem > files ? (int64_t)shmem : files;

    return (int64_t)anon + shared;
}

/* The commands that lose a process say so. What a killed shim left cannot be told apart any more. */
static void blame(const struct procent *victim)
{
    const struct procent *e = victim;

    for (size_t depth = 0; e && depth < table.count; depth++) {
        for (struct proc *p = proc_list; p; p = p->next)
            if (!p->shim_gone && p->shim == e->pid) {
                p->oom = true;
                return;
            }
        e = proctab_find(&table, e->parent == guest.self ? sudo_whose(e->pid) : e->parent);
    }
    for (struct proc *p = proc_list; p; p = p->next)
        if (p->orphaned || p->strays)
            p->oom = true;
}

static void kill_one(struct procent *victim)
{
    blame(victim);
    if (kill(victim->pid, SIGKILL) == 0)
        kills++;
    victims[next_victim].pid = victim->pid;
    victims[next_victim].weight = (int64_t)weight(victim);
    dying += (int64_t)weight(victim);
    victims[next_victim].until = now_ns() + DYING;
    next_victim = (next_victim + 1) % VICTIMS;
    victim->in = false;
}

static struct procent *heaviest(void)
{
    struct procent *found = NULL;

    for (size_t i = 0; i < table.count; i++) {
        struct procent *e = &table.all[i];
        if (e->in && e->pid != guest.self && !proc_is_shim(e->pid) && (!found || weight(e) > weight(found)))
            found = e;
    }
    return found;
}

/* Shares are read one process after another: of one that has ended since, or called exec, the pages counted for it and
 * again for those who shared them. So nobody counts for more than he still has. */
static void confirm(uint64_t *anon, uint64_t *shmem)
{
    *anon = *shmem = 0;
    for (size_t i = 0; i < table.count; i++) {
        struct procent *e = &table.all[i];
        uint64_t a = e->anon, s = e->shmem;

        if (!e->in)
            continue;
        read_sizes(e);
        *anon += e->anon = a < e->anon ? a : e->anon;
        *shmem += e->shmem = s < e->shmem ? s : e->shmem;
    }
}

/* Over the limit, it seems. Where it is the files, and the processes hold next to nothing, killing frees nothing: then one
 * goes at a time, and only while the files keep growing, so that whoever cleans up lives. */
static void kill_until_below(int64_t files)
{
    uint64_t anon, shmem;
    struct procent *victim;
    int64_t used;

    confirm(&anon, &shmem);
    proctab_sort(&table);
    while ((used = sum(anon, shmem, files)) > allowed && (victim = heaviest())) {
        bool little = used - files <= limit / LITTLE;

        if (little && growing < 2)
            break;
        anon -= victim->anon;
        shmem -= victim->shmem;
        kill_one(victim);
        deep.due = 0;
        if (little)
            growing = 0;
    }
}

/* Depths two and three. What is used, as far as it had to be found out. */
static int64_t weigh(int64_t files, uint64_t faults, int64_t now)
{
    uint64_t anon = 0, shmem = 0;
    uint64_t fresh = faults > deep.faults ? (faults - deep.faults) * 4096 : 0;
    int64_t begun;

    for (size_t i = 0; i < table.count; i++) {
        struct procent *e = &table.all[i];
        if (!e->in)
            continue;
        read_sizes(e);
        anon += e->anon;
        shmem += e->shmem;
    }
    if (sum(anon, shmem, files) <= allowed)
        return sum(anon, shmem, files);
    /* A deep look walks page tables, 5 ms for a gigabyte: it is put off while there cannot be much that is new. Every
     * page that stops being shared is a fault; a huge page is one fault too, and waits until it is due. */
    if (now < deep.due && sum(deep.anon + fresh, deep.shmem, files) <= allowed)
        return limit;
    begun = spent_ns();
    qsort(table.all, table.count, sizeof *table.all, heaviest_first);
    for (size_t i = 0; i < table.count && sum(anon, shmem, files) > allowed; i++) {
        struct procent *e = &table.all[i];
        if (!e->in)
            continue;
        anon -= e->anon;
        shmem -= e->shmem;
        read_shares(e);
        anon += e->anon;
        shmem += e->shmem;
    }
    deep.anon = anon;
    deep.shmem = shmem;
    deep.faults = faults;
    deep.cost = spent_ns() - begun;
    deep.due = now_ns() + deep.cost * PART_OF_CPU;
    if (sum(anon, shmem, files) > allowed)
        kill_until_below(files);
    return sum(anon, shmem, files);
}

static int64_t look(int64_t now)
{
    int64_t begun = spent_ns(), files, used, before = kills, pause, cost;
    uint64_t rss = 0, faults = 0;

    if (proctab_load(&table))
        return now + EVERY_BLIND;
    if (!guest.pid1) {
        for (size_t i = 0; i < table.count; i++)
            table.all[i].in = table.all[i].pid == guest.self;
        proctab_spread(&table);
    }
    for (size_t i = 0; i < table.count; i++) {
        struct procent *e = &table.all[i];
        e->in = (guest.pid1 || e->in) && e->state != 'Z' && e->state != 'X';
    }
    set_victims_apart(now);
    for (size_t i = 0; i < table.count; i++) {
        struct procent *e = &table.all[i];
        if (e->in) {
            rss += e->rss;
            faults += e->faults;
        }
    }
    files = files_used();
    deep.cost = 0;
    growing = files > limit - limit / LITTLE && files > last_files ? growing + 1 : 0;
    used = (int64_t)rss + files;
    allowed = earlier(limit, limit + limit / 2 - dying);
    if (allowed < limit / 4)
        allowed = limit / 4;
    if (used > allowed)
        used = weigh(files, faults, now);
    last_files = files;
    cost = spent_ns() - begun - deep.cost;
    pause = kills > before ? EVERY_KILL : used > limit / 2 ? EVERY_NEAR : EVERY;
    if (pause < cost * PART_OF_CPU && kills == before)
        pause = cost * PART_OF_CPU;
    return now_ns() + pause;
}

/* Where the kernel is the sandbox's own it knows the sum, and nothing hides from it: shared pages count once, and what
 * is in no process, too. Only whom to kill is left to find out: the one with the most pages, one at a time, and the
 * next when he is gone or was not enough. */
static int64_t look_at_kernel(int64_t now)
{
    char text[4096];
    int fd = openat(agent_proc_fd, "meminfo", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    struct procent *victim;
    int64_t used;

    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return now + EVERY_BLIND;
    text[n] = 0;
    used = (int64_t)kib_of(text, "\nAnonPages:");
    if (used <= limit)
        return now_ns() + (used > limit / 2 ? EVERY_OWN : EVERY);
    if (proctab_load(&table))
        return now + EVERY_BLIND;
    for (size_t i = 0; i < table.count; i++) {
        struct procent *e = &table.all[i];
        e->in = e->state != 'Z' && e->state != 'X';
        e->anon = e->rss;
        e->shmem = 0;
    }
    set_victims_apart(now);
    victim = used - dying > limit ? heaviest() : NULL;
    if (victim)
        kill_one(victim);
    return now_ns() + EVERY_KILL;
}

/* Whether there is anyone to look at. */
static bool anyone(void)
{
    for (struct proc *p = proc_list; p; p = p->next)
        if (!p->shim_gone)
            return true;
    proc_strayed = proc_strayed && !proc_nobody_left();
    return proc_strayed || sudo_busy();
}

int64_t memory_timer(int64_t now)
{
    if (!limit || !anyone())
        return next_look = NEVER;
    if (next_look == NEVER)
        next_look = now + EVERY_NEAR;
    if (now >= next_look)
        next_look = agent_own_kernel ? look_at_kernel(now) : look(now);
    return next_look;
}
