/* Making detached mounts: clones of host folders, new filesystems, and the ext4 scratch on a loop device. */
#define _GNU_SOURCE
#include "launch.h"
#include "linuxapi.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOOP_TRIES 256
#define FICLONE_ 0x40049409

int tree_clone(const char *path, uint64_t bits, uint64_t attributes, int userns) {
    unsigned recursive = bits & TREE_RECURSIVE ? AT_RECURSIVE_ : 0;
    int fd = (int)syscall(NR_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE_ | OPEN_TREE_CLOEXEC_ | recursive);
    if (fd < 0) {
        if (bits & TREE_OPTIONAL) return -1;
        fail("tree", path, errno, errno == EINVAL ? "another filesystem is mounted below it" : "");
    }
    struct mount_attr_ attr = {.attr_set = attributes, .propagation = MS_PRIVATE};
    if (bits & TREE_IDMAP && userns >= 0) {
        attr.attr_set |= MOUNT_ATTR_IDMAP_;
        attr.userns_fd = (uint64_t)userns;
        if (syscall(NR_mount_setattr, fd, "", AT_EMPTY_PATH_ | recursive, &attr, sizeof attr) == 0) return fd;
        if (errno != EINVAL) fail("tree", path, errno, "");
        attr.attr_set = attributes; /* a filesystem without idmapped mounts: its files belong to nobody inside */
        attr.userns_fd = 0;
    }
    if (syscall(NR_mount_setattr, fd, "", AT_EMPTY_PATH_ | recursive, &attr, sizeof attr) < 0) fail("tree", path, errno, "");
    return fd;
}

/* options: "key=value,flag,..." */
static void configure(int fs, const char *type, const char *options) {
    char copy[512];
    if (strlen(options) >= sizeof copy) fail("filesystem", type, E2BIG, "");
    strcpy(copy, options);
    for (char *rest = copy, *key; (key = strsep(&rest, ",")) != NULL;) {
        if (!*key) continue;
        char *value = strchr(key, '=');
        if (value) *value++ = 0;
        long done = value ? syscall(NR_fsconfig, fs, FSCONFIG_SET_STRING_, key, value, 0)
                          : syscall(NR_fsconfig, fs, FSCONFIG_SET_FLAG_, key, NULL, 0);
        if (done < 0) fail("filesystem", key, errno, type);
    }
}

int filesystem_new(const char *type, const char *options, uint64_t attributes) {
    int fs = (int)syscall(NR_fsopen, type, FSOPEN_CLOEXEC_);
    if (fs < 0) fail("filesystem", type, errno, "this kernel does not have it");
    configure(fs, type, options);
    if (syscall(NR_fsconfig, fs, FSCONFIG_CMD_CREATE_, NULL, NULL, 0) < 0) {
        int error = errno;
        fail("filesystem", type, error,
             !strcmp(type, "proc") ? "parts of /proc are hidden here, as in a Docker container: a user namespace may not mount its own" : "");
    }
    int mount = (int)syscall(NR_fsmount, fs, FSMOUNT_CLOEXEC_, attributes);
    if (mount < 0) fail("filesystem", type, errno, "");
    close(fs);
    return mount;
}

static void copy_sparse(int from, int to, off_t size, const char *name) {
    if (ioctl(to, FICLONE_, from) == 0) return;
    if (ftruncate(to, size) < 0) fail("scratch", name, errno, "");
    off_t data = 0;
    while ((data = lseek(from, data, SEEK_DATA)) >= 0) {
        off_t hole = lseek(from, data, SEEK_HOLE);
        while (data < hole) {
            char block[16384];
            size_t want = hole - data < (off_t)sizeof block ? (size_t)(hole - data) : sizeof block;
            ssize_t got = pread(from, block, want, data);
            if (got <= 0 || pwrite(to, block, (size_t)got, data) != got) fail("scratch", name, got ? errno : EIO, "is the disk full?");
            data += got;
        }
    }
}

/* A file without a name: it is gone when the loop device lets go of it, whatever happens to us. */
static int nameless_copy(const char *template, const char *folder) {
    int from = open(template, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (from < 0 || fstat(from, &info) < 0) fail("scratch", template, errno, "");
    int to = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (to < 0) {
        char name[4096];
        snprintf(name, sizeof name, "%s/scratch.img", folder);
        to = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (to < 0) fail("scratch", name, errno, "");
        unlink(name);
    }
    copy_sparse(from, to, info.st_size, folder);
    close(from);
    return to;
}

static int attach_loop(int file, char device[32]) {
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    if (control < 0) fail("scratch", "/dev/loop-control", errno, "loop devices are needed for disk limits");
    for (int tries = 0; tries < LOOP_TRIES; tries++) {
        int number = ioctl(control, LOOP_CTL_GET_FREE_);
        if (number < 0) fail("scratch", "no free loop device", errno, "");
        snprintf(device, 32, "/dev/loop%d", number);
        int loop = open(device, O_RDWR | O_CLOEXEC);
        if (loop < 0) {
            if (errno == EBUSY || errno == ENXIO) continue;
            fail("scratch", device, errno, "loop devices are needed for disk limits");
        }
        /* Not direct: the kernel would first write the fresh copy out to the disk. */
        struct loop_config_ config = {.fd = (uint32_t)file, .info = {.lo_flags = LO_FLAGS_AUTOCLEAR_}};
        if (ioctl(loop, LOOP_CONFIGURE_, &config) == 0) {
            close(control);
            return loop;
        }
        int error = errno;
        close(loop);
        if (error != EBUSY) fail("scratch", device, error, ""); /* EBUSY: another launch took it between the two calls */
    }
    fail("scratch", "every loop device is taken at once", EBUSY, "");
}

static int ext4_copy(const char *template, const char *folder, uint64_t attributes, int userns, int *shutdown) {
    char device[32], options[128];
    int file = nameless_copy(template, folder);
    int loop = attach_loop(file, device);
    close(file);
    /* The data dies with the sandbox: no barriers; noinit_itable, or a kernel thread would zero the whole inode table. */
    snprintf(options, sizeof options, "source=%s,errors=continue,nobarrier,noinit_itable", device);
    int mount = filesystem_new("ext4", options, attributes);
    close(loop); /* autoclear: the filesystem is its last user now */
    if (userns >= 0) {
        struct mount_attr_ attr = {.attr_set = MOUNT_ATTR_IDMAP_, .userns_fd = (uint64_t)userns};
        if (syscall(NR_mount_setattr, mount, "", AT_EMPTY_PATH_, &attr, sizeof attr) < 0) fail("scratch", "idmap", errno, "");
    }
    *shutdown = openat(mount, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return mount;
}

/* As root: what the sandbox's own user namespace may not do, done for it beforehand. */
void host_mounts(struct launch *launch) {
    const uint8_t *cursor = launch->plan.steps;
    struct step step;
    while (plan_next(&launch->plan, &cursor, &step)) {
        if (step.kind == STEP_VOLUME) volume_as_root(launch, &step.args);
        if (step.kind != STEP_TREE && step.kind != STEP_EXT4) continue;
        uint64_t slot = arg_u64(&step.args);
        if (slot >= MAX_SLOTS) fail("plan", "no such slot", 0, "");
        if (step.kind == STEP_TREE) {
            uint64_t bits = arg_u64(&step.args), attributes = arg_u64(&step.args);
            launch->slot[slot] = tree_clone(arg_text(&step.args).bytes, bits, attributes, launch->userns);
        } else {
            uint64_t attributes = arg_u64(&step.args);
            const char *template = arg_text(&step.args).bytes;
            launch->slot[slot] = ext4_copy(template, arg_text(&step.args).bytes, attributes, launch->userns, &launch->shutdown);
        }
        arg_end(&step.args);
    }
}
