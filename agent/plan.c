/* Reading a plan: settings first, then steps. Ours wrote it, yet every length is checked. */
#include "launch.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define RECORD_HEADER 8u

static uint64_t little(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--) value = value << 8 | at[i];
    return value;
}

static void malformed(const char *what) { fail("plan", what, 0, "the launcher and the library do not match; reinstall sloplet"); }

uint64_t arg_u64(struct reader *args) {
    if (args->end - args->at < 8) malformed("a number is cut off");
    uint64_t value = little(args->at, 8);
    args->at += 8;
    return value;
}

struct text arg_text(struct reader *args) {
    if (args->end - args->at < 4) malformed("a text is cut off");
    size_t size = little(args->at, 4);
    args->at += 4;
    if ((size_t)(args->end - args->at) < size + 1 || args->at[size] != 0) malformed("a text is cut off");
    struct text text = {(const char *)args->at, size};
    args->at += size + 1;
    return text;
}

/* For names and paths: a NUL in the middle would be read as its end. */
static const char *arg_name(struct reader *args) {
    struct text text = arg_text(args);
    if (strlen(text.bytes) != text.size) malformed("a name holds NUL");
    return text.bytes;
}

void arg_end(struct reader *args) {
    if (args->at != args->end) malformed("a record is too long");
}

int plan_next(const struct plan *plan, const uint8_t **cursor, struct step *step) {
    if (*cursor == plan->end) return 0;
    if ((size_t)(plan->end - *cursor) < RECORD_HEADER) malformed("a record is cut off");
    size_t size = little(*cursor + 4, 4);
    step->kind = little(*cursor, 4);
    if ((size_t)(plan->end - *cursor) - RECORD_HEADER < size) malformed("a record is cut off");
    step->args.at = *cursor + RECORD_HEADER;
    step->args.end = step->args.at + size;
    *cursor = step->args.end;
    return 1;
}

static void add(const char **list, int *count, const char *value) {
    if (*count == MAX_CGROUPS) malformed("too many cgroups");
    list[(*count)++] = value;
}

static void setting(struct plan *plan, struct step *step) {
    struct reader *args = &step->args;
    switch (step->kind) {
    case SET_FLAGS: plan->flags = arg_u64(args); break;
    case SET_HOLDER: plan->holder = arg_u64(args); break;
    case SET_UID_MAP: plan->uid_map = arg_name(args); break;
    case SET_GID_MAP: plan->gid_map = arg_name(args); break;
    case SET_MAP_HELPERS:
        plan->newuidmap = arg_name(args);
        plan->newgidmap = arg_name(args);
        break;
    case SET_IDENTITY:
        plan->uid = (uint32_t)arg_u64(args);
        plan->gid = (uint32_t)arg_u64(args);
        break;
    case SET_HOSTNAME: plan->hostname = arg_name(args); break;
    case SET_CGROUP_JOIN: add(plan->join, &plan->joins, arg_name(args)); break;
    case SET_CGROUP_INTO: plan->into = arg_name(args); break;
    case SET_CGROUP_REMOVE: add(plan->remove, &plan->removes, arg_name(args)); break;
    case SET_CGROUP_WORK: add(plan->work, &plan->works, arg_name(args)); break;
    case SET_OOM_FILE:
        if (plan->oom_files == MAX_OOM_FILES) malformed("too many oom files");
        plan->oom_file[plan->oom_files] = arg_name(args);
        plan->oom_key[plan->oom_files++] = arg_name(args);
        break;
    case SET_RLIMIT:
        if (plan->rlimits == MAX_RLIMITS) malformed("too many rlimits");
        plan->rlimit[plan->rlimits].resource = arg_u64(args);
        plan->rlimit[plan->rlimits++].value = arg_u64(args);
        break;
    case SET_CAPS: plan->caps = arg_u64(args); break;
    case SET_SECCOMP: plan->seccomp = arg_u64(args); break;
    case SET_LANDLOCK:
        plan->has_landlock = 1;
        plan->landlock_fs = arg_u64(args);
        plan->landlock_net = arg_u64(args);
        plan->landlock_scope = arg_u64(args);
        break;
    case SET_CPUS: plan->cpus = arg_u64(args); break;
    case SET_GIVEN:
        plan->given = arg_u64(args);
        if (plan->given > MAX_GIVEN) malformed("too many descriptors");
        break;
    case SET_DROP_TO:
        plan->has_drop = 1;
        plan->drop_uid = (uint32_t)arg_u64(args);
        plan->drop_gid = (uint32_t)arg_u64(args);
        break;
    default: malformed("an unknown setting");
    }
    arg_end(args);
}

void plan_load(struct plan *plan, int fd) {
    struct stat info;
    if (fstat(fd, &info) < 0) fail("plan", "no plan on descriptor 3", errno, "this program is started by sloplet, not by hand");
    if (info.st_size < 8 || (uint64_t)info.st_size > PLAN_MAX) malformed("its size is wrong");
    size_t size = (size_t)info.st_size;
    void *base = mmap(NULL, size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
    if (base == MAP_FAILED) fail("plan", "mmap", errno, "");
    plan->base = base;
    plan->size = size;
    plan->end = plan->base + size;
    if (little(plan->base, 4) != PLAN_MAGIC || little(plan->base + 4, 4) != size) malformed("another version wrote it");
    const uint8_t *cursor = plan->base + 8;
    for (;;) {
        const uint8_t *before = cursor;
        struct step step;
        plan->steps = before;
        if (!plan_next(plan, &cursor, &step) || step.kind >= STEP_TREE) break;
        setting(plan, &step);
    }
}

/* The supervisor keeps what it needs at the end and lets the plan's memory go. */
void plan_forget(struct plan *plan) {
    static char kept[4096];
    size_t used = 0;
    const char **wanted[MAX_CGROUPS + 2 * MAX_OOM_FILES];
    int count = 0;
    for (int i = 0; i < plan->removes; i++) wanted[count++] = &plan->remove[i];
    for (int i = 0; i < plan->oom_files; i++) {
        wanted[count++] = &plan->oom_file[i];
        wanted[count++] = &plan->oom_key[i];
    }
    for (int i = 0; i < count; i++) {
        size_t size = strlen(*wanted[i]) + 1;
        if (used + size > sizeof kept) return; /* absurdly long names: keep the plan mapped instead */
        used += size;
    }
    used = 0;
    for (int i = 0; i < count; i++) {
        size_t size = strlen(*wanted[i]) + 1;
        memcpy(kept + used, *wanted[i], size);
        *wanted[i] = kept + used;
        used += size;
    }
    munmap((void *)(uintptr_t)plan->base, plan->size);
}
