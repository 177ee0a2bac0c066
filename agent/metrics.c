/* METRICS: what the sandbox uses, as seen from inside. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "guest.h"
#include "gvisor_guest.h"
#include "loop.h"
#include "memory.h"
#include "ops.h"
#include "path.h"
#include "proctab.h"

/* A number out of a control file: the whole file, or what follows `key`. -1 if it is not there. */
static int64_t control(const char *path, const char *key)
{
    char text[1024], *at = text;
    int fd = path_open(AT_FDCWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    ssize_t n;

    if (fd < 0)
        return -1;
    n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return -1;
    text[n] = 0;
    if (key) {
        at = strstr(text, key);
        if (!at)
            return -1;
        at += strlen(key);
    }
    return strtoll(at, NULL, 10);
}

/* From /proc: living processes, and what those that were reaped have used. */
static void count_processes(int64_t *cpu, int64_t *memory, int64_t *pids)
{
    struct proctab t = {0};
    struct rusage ru;

    *cpu = *memory = *pids = 0;
    if (proctab_load(&t) == 0) {
        for (size_t i = 0; i < t.count; i++)
            t.all[i].in = t.all[i].pid == guest.self;
        proctab_spread(&t);
        for (size_t i = 0; i < t.count; i++)
            if (guest.pid1 || t.all[i].in) {
                *cpu += (int64_t)t.all[i].cpu_us;
                *memory += (int64_t)t.all[i].rss;
                ++*pids;
            }
    }
    proctab_free(&t);
    if (getrusage(RUSAGE_CHILDREN, &ru) == 0)
        *cpu += (int64_t)(ru.ru_utime.tv_sec + ru.ru_stime.tv_sec) * 1000000 + ru.ru_utime.tv_usec + ru.ru_stime.tv_usec;
}

/* A cgroup namespace shows the sandbox's own group as the root; without one the files there are the
 * machine's, and only a group with a limit on processes can be ours. */
static bool own_cgroup(void)
{
    return guest.pid1 && control("/sys/fs/cgroup/pids.current", NULL) > 0;
}

void op_metrics(struct stream *s, const struct fields *f)
{
    uint8_t buf[128];
    struct fw w = {buf, 0, sizeof buf, false};
    int64_t cpu, memory, pids, value;
    struct statvfs fs;

    (void)f;
    count_processes(&cpu, &memory, &pids);
    if (own_cgroup()) {
        if ((value = control("/sys/fs/cgroup/cpu.stat", "usage_usec ")) >= 0)
            cpu = value;
        if ((value = control("/sys/fs/cgroup/memory.current", NULL)) >= 0)
            memory = value;
        if ((value = control("/sys/fs/cgroup/pids.current", NULL)) >= 0)
            pids = value;
    }
    if (statvfs(guest.workdir, &fs) < 0 && statvfs("/", &fs) < 0)
        memset(&fs, 0, sizeof fs);
    fw_int(&w, TAG_CPU_US, cpu);
    fw_int(&w, TAG_MEMORY, memory);
    fw_int(&w, TAG_PIDS, pids);
    fw_int(&w, TAG_DISK_USED, (int64_t)((fs.f_blocks - fs.f_bfree) * fs.f_frsize));
    /* gVisor does not know how large the file is that it keeps the disk in */
    fw_int(&w, TAG_DISK_TOTAL, agent_own_kernel ? 0 : (int64_t)(fs.f_blocks * fs.f_frsize));
    fw_int(&w, TAG_UPTIME_MS, (now_ns() - guest.started) / MSEC);
    if (memory_kills() >= 0)
        fw_int(&w, TAG_COUNT, memory_kills());
    stream_close(s, &w);
}
