/* What the sandbox gives up for good, last: limits, capabilities, the right to gain any. */
#define _GNU_SOURCE
#include "launch.h"

#include <errno.h>
#include <grp.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CAP_VERSION_3 0x20080522u
#define BIT_NOROOT_LOCKED (1 << 0 | 1 << 1)
#define BIT_KEEP_CAPS_LOCKED (1 << 5)
#define BIT_NO_AMBIENT_LOCKED (1 << 6 | 1 << 7)

struct cap_header {
    uint32_t version;
    int32_t pid;
};

struct cap_data {
    uint32_t effective, permitted, inheritable;
};

void set_limits(const struct plan *plan) {
    for (int i = 0; i < plan->rlimits; i++) {
        struct rlimit now, want = {plan->rlimit[i].value, plan->rlimit[i].value};
        int resource = (int)plan->rlimit[i].resource;
        if (getrlimit(resource, &now) < 0) continue;
        if (now.rlim_max != RLIM_INFINITY && want.rlim_max > now.rlim_max) want.rlim_cur = want.rlim_max = now.rlim_max;
        if (setrlimit(resource, &want) < 0) fail("limits", "setrlimit", errno, "");
    }
    if (plan->cpus) {
        uint64_t mask = plan->cpus;
        if (syscall(SYS_sched_setaffinity, 0, sizeof mask, &mask) < 0) fail("limits", "sched_setaffinity", errno, "");
    }
}

static void drop_bounding_set(uint64_t keep) {
    for (int cap = 0; cap < 64; cap++) {
        if (keep >> cap & 1) continue;
        if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0) {
            if (errno == EINVAL) break; /* past the last capability this kernel has */
            fail("capabilities", "bounding set", errno, "");
        }
    }
}

static void drop_capabilities(uint64_t keep, int for_programs) {
    drop_bounding_set(keep);
    /* for_programs: what it starts as root is to have these, and no others */
    if (!for_programs && prctl(PR_SET_SECUREBITS, BIT_NOROOT_LOCKED | BIT_KEEP_CAPS_LOCKED | BIT_NO_AMBIENT_LOCKED, 0, 0, 0) < 0)
        fail("capabilities", "securebits", errno, "");
    struct cap_header header = {CAP_VERSION_3, 0};
    struct cap_data data[2];
    memset(data, 0, sizeof data);
    data[0].effective = data[0].permitted = (uint32_t)keep;
    data[1].effective = data[1].permitted = (uint32_t)(keep >> 32);
    if (syscall(SYS_capset, &header, data) < 0) fail("capabilities", "capset", errno, "");
}

void drop_privileges(const struct plan *plan) {
    if (plan->has_drop) {
        drop_bounding_set(0);
        if (setgroups(0, NULL) < 0) fail("identity", "setgroups", errno, "");
        if (setresgid(plan->drop_gid, plan->drop_gid, plan->drop_gid) < 0) fail("identity", "setresgid", errno, "");
        if (setresuid(plan->drop_uid, plan->drop_uid, plan->drop_uid) < 0) fail("identity", "setresuid", errno, "");
    }
    if (plan->flags & PLAN_NAMESPACES) drop_capabilities(plan->caps, (plan->flags & (PLAN_MINDER | PLAN_POWERS)) != 0);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0) fail("privileges", "no_new_privs", errno, "");
    /* Nobody inside may look into the agent or its shims: /proc/1/exe is the host's file. */
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0) fail("privileges", "dumpable", errno, "");
}
