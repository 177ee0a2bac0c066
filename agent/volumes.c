/* Volumes: folders, and filesystems that are mounted nowhere yet, which the holder has opened and hands over as
 * descriptors. What is mounted is what was opened, whatever its name means by now. */
#define _GNU_SOURCE
#include "launch.h"
#include "agent.h"
#include "linuxapi.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define NO_OWNERS "its filesystem cannot map owners: ext4, xfs, btrfs and tmpfs can"

struct volume {
    uint64_t slot, bits, attributes, fd;
    const char *name, *uid_map, *gid_map;
};

static struct volume volume_of(const struct launch *launch, struct reader *args) {
    struct volume volume = {.slot = arg_u64(args), .bits = arg_u64(args), .attributes = arg_u64(args), .fd = arg_u64(args)};
    volume.name = arg_text(args).bytes;
    volume.uid_map = arg_text(args).bytes;
    volume.gid_map = arg_text(args).bytes;
    arg_end(args);
    if (volume.slot >= MAX_SLOTS || volume.fd >= launch->plan.given) fail("plan", "no such slot, or no such descriptor", 0, "");
    volume.fd += FD_FIRST_FREE;
    return volume;
}

static int clone_of(int folder, const char *name) {
    int fd = (int)syscall(NR_open_tree, folder, "", OPEN_TREE_CLONE_ | OPEN_TREE_CLOEXEC_ | AT_EMPTY_PATH_);
    if (fd < 0) fail("volume", name, errno, errno == EINVAL ? "another filesystem is mounted below it" : "");
    return fd;
}

static void set_attributes(int mount, const struct volume *volume, int userns) {
    struct mount_attr_ attr = {.attr_set = volume->attributes, .propagation = MS_PRIVATE};
    if (userns >= 0) {
        attr.attr_set |= MOUNT_ATTR_IDMAP_;
        attr.userns_fd = (uint64_t)userns;
    }
    if (syscall(NR_mount_setattr, mount, "", AT_EMPTY_PATH_, &attr, sizeof attr) < 0)
        fail("volume", volume->name, errno, userns >= 0 && errno == EINVAL ? NO_OWNERS : "");
}

/* As root: owners are mapped by the mount. */
void volume_as_root(struct launch *launch, struct reader *args) {
    struct volume volume = volume_of(launch, args);
    int given = (int)volume.fd;
    int mount = volume.bits & VOLUME_WHOLE ? fcntl(given, F_DUPFD_CLOEXEC, 0) : clone_of(given, volume.name);
    int userns = *volume.uid_map ? userns_with(volume.uid_map, volume.gid_map) : -1;
    if (mount < 0) fail("volume", volume.name, errno, "");
    set_attributes(mount, &volume, userns);
    if (userns >= 0) close(userns);
    launch->slot[volume.slot] = mount;
}

/* A descriptor belongs to the mount namespace that it was opened in, and only what is in one's own can be cloned. So the
 * folder is looked up here by the name that the kernel gives it, and must be the very same. */
static int again(int given, const char *name) {
    char link[40], path[4096];
    struct stat before, now;
    snprintf(link, sizeof link, "/proc/self/fd/%d", given);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0 || fstat(given, &before) < 0) fail("volume", name, errno, "");
    path[size] = 0;
    struct open_how_ how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_SYMLINKS_ | RESOLVE_NO_MAGICLINKS_};
    int fd = (int)syscall(NR_openat2, AT_FDCWD, path, &how, sizeof how);
    if (fd < 0) fail("volume", name, errno, "it was moved or removed meanwhile");
    if (fstat(fd, &now) < 0 || now.st_dev != before.st_dev || now.st_ino != before.st_ino)
        fail("volume", name, 0, "it was moved or removed meanwhile");
    return fd;
}

/* In the sandbox's namespaces, as the calling user still: his groups may be what lets him there. */
static void volume_as_caller(struct launch *launch, struct reader *args) {
    struct volume volume = volume_of(launch, args);
    if (volume.bits & VOLUME_WHOLE || *volume.uid_map) fail("plan", "such a volume needs root", 0, "");
    int folder = again((int)volume.fd, volume.name);
    int mount = clone_of(folder, volume.name);
    close(folder);
    set_attributes(mount, &volume, -1);
    launch->slot[volume.slot] = mount;
}

void callers_trees(struct launch *launch) {
    const uint8_t *cursor = launch->plan.steps;
    struct step step;
    while (plan_next(&launch->plan, &cursor, &step)) {
        if (step.kind == STEP_VOLUME) {
            volume_as_caller(launch, &step.args);
        } else if (step.kind == STEP_TREE) {
            uint64_t slot = arg_u64(&step.args);
            if (slot >= MAX_SLOTS) fail("plan", "no such slot", 0, "");
            uint64_t bits = arg_u64(&step.args), attributes = arg_u64(&step.args);
            launch->slot[slot] = tree_clone(arg_text(&step.args).bytes, bits, attributes, -1);
            arg_end(&step.args);
        }
    }
}

/* The agent leaves out what is there when it tells of changes, and when it unpacks them. */
static void note_volume(const char *path) {
    if (agent_volumes == AGENT_VOLUMES || strlen(path) >= sizeof agent_volume[0]) fail("volume", path, E2BIG, "");
    strcpy(agent_volume[agent_volumes++], path);
}

void place_volume(struct launch *launch, int *slot, const char *path) {
    if (*slot < 0) fail("volume", path, ENOENT, "");
    place_mount(*slot, launch->root, path, "volume");
    close(*slot);
    *slot = -1;
    note_volume(path);
}
