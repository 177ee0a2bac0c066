/* Landlock: the only fence of files on the process rung, a second one on the container rung. */
#define _GNU_SOURCE
#include "launch.h"
#include "linuxapi.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

struct ruleset_attr {
    uint64_t handled_access_fs, handled_access_net, scoped;
};

struct path_rule {
    uint64_t allowed_access;
    int32_t parent_fd;
} __attribute__((packed));

#define RULE_PATH_BENEATH 1
/* rights that make sense on a file that is no folder: execute, write, read, truncate, ioctl */
#define FILE_RIGHTS (1u | 2u | 4u | 1u << 14 | 1u << 15)

int landlock_begin(const struct plan *plan) {
    if (!plan->has_landlock) return -1;
    struct ruleset_attr attr = {plan->landlock_fs, plan->landlock_net, plan->landlock_scope};
    /* older kernels refuse a longer struct unless its tail is zero, so they get the part they know */
    size_t size = attr.scoped ? sizeof attr : attr.handled_access_net ? 16 : 8;
    int fd = (int)syscall(NR_landlock_create_ruleset, &attr, size, 0);
    if (fd < 0) fail("landlock", "create_ruleset", errno, "this kernel lacks Landlock, or it is not in the lsm= list");
    return fd;
}

/* The narrower ruleset of commands: files only, since each command becomes a domain of its own, and signals among them
 * must stay possible. */
int landlock_fence(const struct plan *plan) {
    if (!plan->has_landlock || !plan->landlock_fs) return -1;
    struct ruleset_attr attr = {plan->landlock_fs, 0, 0};
    int fd = (int)syscall(NR_landlock_create_ruleset, &attr, 8, 0);
    if (fd < 0) fail("landlock", "create_ruleset", errno, "");
    return fd;
}

void landlock_allow(int ruleset, uint64_t rights, const char *path) {
    struct stat info;
    if (ruleset < 0) return;
    int fd = open(path, O_PATH | O_CLOEXEC);
    if (fd < 0) return; /* nothing to allow */
    if (fstat(fd, &info) < 0) fail("landlock", path, errno, "");
    struct path_rule rule = {S_ISDIR(info.st_mode) ? rights : rights & FILE_RIGHTS, fd};
    if (syscall(NR_landlock_add_rule, ruleset, RULE_PATH_BENEATH, &rule, 0) < 0) fail("landlock", path, errno, "");
    close(fd);
}

void landlock_enforce(int ruleset) {
    if (ruleset < 0) return;
    if (syscall(NR_landlock_restrict_self, ruleset, 0) < 0) fail("landlock", "restrict_self", errno, "");
    close(ruleset);
}
