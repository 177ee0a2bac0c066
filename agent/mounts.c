/* Placing mounts and files below the sandbox's new root. A rootfs may be hostile: every path is resolved by
 * openat2 inside that root, and mounts are placed on descriptors, never on names. */
#define _GNU_SOURCE
#include "launch.h"
#include "agent.h"
#include "linuxapi.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NOBODY 65534
#define SYMLINK_HINT "the image has a symlink where the sandbox needs a folder of its own"

static int resolve(int root, const char *path, int flags, unsigned mode, uint64_t how) {
    struct open_how_ open_how = {
        .flags = (uint64_t)(flags | O_CLOEXEC),
        .mode = flags & O_CREAT ? mode : 0,
        .resolve = RESOLVE_IN_ROOT_ | RESOLVE_NO_MAGICLINKS_ | how,
    };
    return (int)syscall(NR_openat2, root, path, &open_how, sizeof open_how);
}

int open_below(int root, const char *path, int flags) { return resolve(root, path, flags, 0, 0); }

/* mkdir -p. Missing parents are bare 0755 folders. Returns an O_PATH descriptor of the folder. */
int make_folder(int root, const char *path, unsigned mode) {
    char part[4096];
    size_t size = strlen(path);
    if (size == 0) return resolve(root, ".", O_PATH | O_DIRECTORY, 0, 0);
    if (size >= sizeof part) fail("mkdir", path, ENAMETOOLONG, "");
    int above = resolve(root, ".", O_PATH | O_DIRECTORY, 0, 0);
    for (size_t at = 0; at <= size; at++) {
        if (path[at] != '/' && path[at] != 0) {
            part[at] = path[at];
            continue;
        }
        part[at] = 0;
        const char *name = strrchr(part, '/') ? strrchr(part, '/') + 1 : part;
        int last = path[at] == 0;
        if (*name) {
            int here = resolve(root, part, O_PATH | O_DIRECTORY, 0, 0);
            if (here < 0 && errno == ENOENT) {
                if (mkdirat(above, name, last ? mode & 07777 : 0755) < 0) fail("mkdir", path, errno, "");
                if (last && mode & 07000 && fchmodat(above, name, mode & 07777, 0) < 0) fail("mkdir", path, errno, "");
                here = resolve(root, part, O_PATH | O_DIRECTORY, 0, 0);
            }
            if (here < 0) fail("mkdir", path, errno, "");
            close(above);
            above = here;
        }
        part[at] = '/';
    }
    return above;
}

static int is_folder(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 && S_ISDIR(info.st_mode);
}

void place_mount(int mount, int root, const char *path, const char *step) {
    int target = resolve(root, path, O_PATH, 0, RESOLVE_NO_SYMLINKS_);
    if (target < 0 && errno == ENOENT) {
        if (is_folder(mount)) {
            close(make_folder(root, path, 0755));
        } else {
            char folder[4096];
            const char *slash = strrchr(path, '/');
            size_t size = slash ? (size_t)(slash - path) : 0;
            if (size >= sizeof folder) fail(step, path, ENAMETOOLONG, "");
            memcpy(folder, path, size);
            folder[size] = 0;
            close(make_folder(root, folder, 0755));
            close(resolve(root, path, O_WRONLY | O_CREAT, 0644, RESOLVE_NO_SYMLINKS_));
        }
        target = resolve(root, path, O_PATH, 0, RESOLVE_NO_SYMLINKS_);
    }
    if (target < 0) fail(step, path, errno, errno == ELOOP ? SYMLINK_HINT : "");
    if (syscall(NR_move_mount, mount, "", target, "", MOVE_MOUNT_F_EMPTY_PATH_ | MOVE_MOUNT_T_EMPTY_PATH_) < 0)
        fail(step, path, errno, "");
    close(target);
}

static void scratch_folder(int scratch, const char *name, unsigned mode) {
    if (mkdirat(scratch, name, mode) < 0 && errno != EEXIST) fail("scratch", name, errno, "");
}

static int overlay_open(const char *lower, const char *path) {
    int fs = (int)syscall(NR_fsopen, "overlay", FSOPEN_CLOEXEC_);
    if (fs < 0) fail("overlay", path, errno, "this kernel has no overlay filesystem");
    if (syscall(NR_fsconfig, fs, FSCONFIG_SET_STRING_, "source", "sloplet", 0) < 0 ||
        syscall(NR_fsconfig, fs, FSCONFIG_SET_STRING_, "lowerdir", lower, 0) < 0)
        fail("overlay", path, errno, lower);
    /* userxattr: the only kind a user namespace may use */
    if (syscall(NR_fsconfig, fs, FSCONFIG_SET_FLAG_, "userxattr", NULL, 0) < 0) fail("overlay", "userxattr", errno, "Linux 5.11 or newer is needed");
    return fs;
}

static int overlay_mount(int fs, const char *path, uint64_t attributes) {
    int mount = (int)syscall(NR_fsmount, fs, FSMOUNT_CLOEXEC_, attributes);
    if (mount < 0) fail("overlay", path, errno, "");
    close(fs);
    return mount;
}

/* A layer of the host's whose owners show as they are would open to root inside what only root may read. An overlay
 * reads its layers with the rights of whoever mounted it: nobody mounts this one. */
static int guard(struct launch *launch, const char *layer, int number, const char *path) {
    char empty[32], lower[80];
    snprintf(empty, sizeof empty, "low/%d.empty", number);
    snprintf(lower, sizeof lower, "%s:%s", layer, empty);
    scratch_folder(launch->scratch, empty, 0755);
    int fs = overlay_open(lower, path);
    setfsgid(NOBODY);
    setfsuid(NOBODY);
    long made = syscall(NR_fsconfig, fs, FSCONFIG_CMD_CREATE_, NULL, NULL, 0);
    int error = errno;
    setfsuid(launch->plan.uid);
    setfsgid(launch->plan.gid);
    if (made < 0) fail("overlay", path, error, "as a guarded layer");
    return overlay_mount(fs, path, MOUNT_ATTR_RDONLY_ | MOUNT_ATTR_NOSUID_ | MOUNT_ATTR_NODEV_);
}

/* A layer that nothing is written upon: itself, or behind its guard. */
static void show_layer(struct launch *launch, uint64_t bits, const char *path, int *slot) {
    char lower[32];
    int number = launch->overlays++, mount = *slot;
    if (mount < 0) fail("overlay", path, ENOENT, "its layer is missing");
    if (bits & OVERLAY_GUARDED) {
        snprintf(lower, sizeof lower, "low/%d", number);
        scratch_folder(launch->scratch, "low", 0755);
        scratch_folder(launch->scratch, lower, 0755);
        place_mount(mount, launch->scratch, lower, "overlay");
        close(mount);
        mount = guard(launch, lower, number, path);
    }
    place_mount(mount, launch->root, path, "overlay");
    close(mount);
    *slot = -1;
}

/* The agent looks there for what has changed. */
static void note_layer(int number, const char *path) {
    if (agent_layers < 0) agent_layers = 0;
    if (agent_layers == AGENT_LAYERS || strlen(path) >= sizeof agent_layer[0].path) fail("overlay", path, E2BIG, "");
    agent_layer[agent_layers].number = number;
    strcpy(agent_layer[agent_layers++].path, path);
}

/* The working directory is the scratch filesystem, where the layers lie: low/N, up/N and work/N. */
void make_overlay(struct launch *launch, struct reader args) {
    uint64_t bits = arg_u64(&args), attributes = arg_u64(&args);
    const char *path = arg_text(&args).bytes;
    int *slot = &launch->slot[arg_u64(&args) % MAX_SLOTS];
    arg_end(&args);
    if (bits & OVERLAY_SHOWN) {
        show_layer(launch, bits, path, slot);
        return;
    }
    int number = launch->overlays++, guarded = -1;
    char lower[32], upper[32], work[32];
    snprintf(lower, sizeof lower, "low/%d", number);
    snprintf(upper, sizeof upper, "up/%d", number);
    snprintf(work, sizeof work, "work/%d", number);
    scratch_folder(launch->scratch, "low", 0755);
    scratch_folder(launch->scratch, "up", 0700);
    scratch_folder(launch->scratch, "work", 0700);
    scratch_folder(launch->scratch, lower, 0755);
    scratch_folder(launch->scratch, upper, 0755);
    scratch_folder(launch->scratch, work, 0700);
    if (*slot < 0) fail("overlay", path, ENOENT, "its layer is missing");
    place_mount(*slot, launch->scratch, lower, "overlay");
    close(*slot);
    *slot = -1;
    if (bits & OVERLAY_GUARDED) {
        guarded = guard(launch, lower, number, path);
        snprintf(lower, sizeof lower, "low/%d.guard", number);
        scratch_folder(launch->scratch, lower, 0755);
        place_mount(guarded, launch->scratch, lower, "overlay");
    }
    int fs = overlay_open(lower, path);
    if (syscall(NR_fsconfig, fs, FSCONFIG_SET_STRING_, "upperdir", upper, 0) < 0 ||
        syscall(NR_fsconfig, fs, FSCONFIG_SET_STRING_, "workdir", work, 0) < 0)
        fail("overlay", path, errno, upper);
    syscall(NR_fsconfig, fs, FSCONFIG_SET_FLAG_, "volatile", NULL, 0); /* what syncs here dies with the sandbox anyway */
    int mount;
    if (syscall(NR_fsconfig, fs, FSCONFIG_CMD_CREATE_, NULL, NULL, 0) == 0) {
        mount = overlay_mount(fs, path, attributes);
        note_layer(number, path);
    } else if (errno == EINVAL && guarded >= 0) {
        /* The host's own root is an overlay, and three of them do not stack: read-only, then. */
        mount = (int)syscall(NR_open_tree, guarded, "", OPEN_TREE_CLONE_ | OPEN_TREE_CLOEXEC_ | AT_EMPTY_PATH_);
        close(fs);
        if (mount < 0) fail("overlay", path, errno, "");
    } else {
        fail("overlay", path, errno, "");
    }
    if (guarded >= 0) close(guarded);
    if (*path) {
        place_mount(mount, launch->root, path, "overlay");
        close(mount);
    } else {
        place_mount(mount, launch->scratch, "root", "overlay");
        launch->root = mount;
    }
}

static int bare_clone(int at, const char *name, uint64_t attributes) {
    int fd = (int)syscall(NR_open_tree, at, name, OPEN_TREE_CLONE_ | OPEN_TREE_CLOEXEC_ | AT_EMPTY_PATH_);
    if (fd < 0) return -1;
    struct mount_attr_ attr = {.attr_set = attributes};
    if (attributes && syscall(NR_mount_setattr, fd, "", AT_EMPTY_PATH_, &attr, sizeof attr) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

void mask_path(struct launch *launch, const char *path) {
    int target = resolve(launch->root, path, O_PATH, 0, RESOLVE_NO_SYMLINKS_);
    if (target < 0 && errno == ENOENT) return;
    if (target < 0) fail("mask", path, errno, "");
    const char *with = "void.file";
    if (is_folder(target)) {
        with = "void.folder";
        scratch_folder(launch->scratch, with, 0555);
    } else {
        close(openat(launch->scratch, with, O_WRONLY | O_CREAT | O_CLOEXEC, 0444));
    }
    int mount = bare_clone(launch->scratch, with, MOUNT_ATTR_RDONLY_ | MOUNT_ATTR_NOSUID_ | MOUNT_ATTR_NODEV_ | MOUNT_ATTR_NOEXEC_);
    if (mount < 0 || syscall(NR_move_mount, mount, "", target, "", MOVE_MOUNT_F_EMPTY_PATH_ | MOVE_MOUNT_T_EMPTY_PATH_) < 0)
        fail("mask", path, errno, "");
    close(mount);
    close(target);
}

void cover_path(struct launch *launch, const char *path, struct text content) {
    static int count;
    char name[32];
    int target = resolve(launch->root, path, O_PATH, 0, RESOLVE_NO_SYMLINKS_);
    if (target < 0 && errno == ENOENT) return;
    if (target < 0) fail("cover", path, errno, "");
    snprintf(name, sizeof name, "cover.%d", count++);
    int file = openat(launch->scratch, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0444);
    if (file < 0 || write(file, content.bytes, content.size) != (ssize_t)content.size) fail("cover", path, errno, "");
    close(file);
    int mount = bare_clone(launch->scratch, name, MOUNT_ATTR_RDONLY_ | MOUNT_ATTR_NOSUID_ | MOUNT_ATTR_NODEV_ | MOUNT_ATTR_NOEXEC_);
    if (mount < 0 || syscall(NR_move_mount, mount, "", target, "", MOVE_MOUNT_F_EMPTY_PATH_ | MOVE_MOUNT_T_EMPTY_PATH_) < 0)
        fail("cover", path, errno, "");
    close(mount);
    close(target);
}

void readonly_path(struct launch *launch, const char *path) {
    int target = resolve(launch->root, path, O_PATH, 0, RESOLVE_NO_SYMLINKS_);
    if (target < 0 && errno == ENOENT) return;
    if (target < 0) fail("readonly", path, errno, "");
    int mount = bare_clone(target, "", MOUNT_ATTR_RDONLY_ | MOUNT_ATTR_NOSUID_ | MOUNT_ATTR_NODEV_ | MOUNT_ATTR_NOEXEC_);
    if (mount < 0 || syscall(NR_move_mount, mount, "", target, "", MOVE_MOUNT_F_EMPTY_PATH_ | MOVE_MOUNT_T_EMPTY_PATH_) < 0)
        fail("readonly", path, errno, "");
    close(mount);
    close(target);
}

void write_file(int root, const char *path, struct text content, unsigned mode) {
    char folder[4096];
    const char *slash = strrchr(path, '/');
    size_t size = slash ? (size_t)(slash - path) : 0;
    if (size >= sizeof folder) fail("file", path, ENAMETOOLONG, "");
    memcpy(folder, path, size);
    folder[size] = 0;
    int above = resolve(root, size ? folder : ".", O_PATH | O_DIRECTORY, 0, 0);
    if (above < 0) fail("file", path, errno, "");
    const char *name = slash ? slash + 1 : path;
    int flags = O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    int fd = openat(above, name, flags, mode & 07777);
    if (fd < 0 && errno == ELOOP && unlinkat(above, name, 0) == 0) fd = openat(above, name, flags, mode & 07777);
    if (fd < 0 && !(mode & FILE_IF_ALLOWED)) fail("file", path, errno, "");
    close(above);
    if (fd < 0) return;
    if (write(fd, content.bytes, content.size) != (ssize_t)content.size) fail("file", path, errno, "");
    close(fd);
}

/* Whether the folder above the root is the root itself, as it must be when nothing is stacked upon it. */
static int alone(int root) {
    struct stat here, above;
    return fstat(root, &here) == 0 && stat("/..", &above) == 0 && here.st_dev == above.st_dev && here.st_ino == above.st_ino;
}

void wrap_root(struct launch *launch, uint64_t attributes, const char *path) {
    struct mount_attr_ attr = {.attr_set = attributes};
    if (syscall(NR_mount_setattr, launch->root, "", AT_EMPTY_PATH_ | AT_RECURSIVE_, &attr, sizeof attr) < 0) fail("wrap", path, errno, "");
    scratch_folder(launch->scratch, "shell", 0755);
    int shell = bare_clone(launch->scratch, "shell", 0);
    if (shell < 0) fail("wrap", path, errno, "");
    place_mount(shell, launch->scratch, "shell", "wrap");
    place_mount(launch->root, shell, path, "wrap");
    close(launch->root);
    launch->root = shell;
}

void pivot(struct launch *launch) {
    if (fchdir(launch->root) < 0) fail("pivot", "fchdir", errno, "");
    if (syscall(SYS_pivot_root, ".", ".") < 0) fail("pivot", "pivot_root", errno, "is this process in a chroot or an initramfs?");
    /* Upon the new root lies the old one, and upon that the scratch filesystem, which was staged on "/": each call
     * takes the topmost away, with all that is mounted in it. */
    if (umount2(".", MNT_DETACH) < 0 || umount2(".", MNT_DETACH) < 0) fail("pivot", "umount", errno, "");
    if (chdir("/") < 0) fail("pivot", "chdir", errno, "");
    if (!alone(launch->root)) fail("pivot", "something of the host is still mounted", 0, "please report this");
}
