/* The one loop that executes a plan's steps, in the sandbox's own namespaces. */
#define _GNU_SOURCE
#include "launch.h"
#include "linuxapi.h"
#include "net.h"

#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static int *slot_of(struct launch *launch, struct reader *args) {
    uint64_t slot = arg_u64(args);
    if (slot >= MAX_SLOTS) fail("plan", "no such slot", 0, "");
    return &launch->slot[slot];
}

static void stage(struct launch *launch, int mount) {
    /* On "/": it is always there. Our own root stays the host's until the pivot. */
    if (syscall(NR_move_mount, mount, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH_) < 0) fail("stage", "scratch", errno, "");
    launch->scratch = mount;
    if (fchdir(mount) < 0) fail("stage", "fchdir", errno, "");
    if (mkdirat(mount, "root", 0755) < 0 && errno != EEXIST) fail("stage", "root", errno, "");
}

static void root_folder(struct launch *launch) {
    int mount = (int)syscall(NR_open_tree, launch->scratch, "root", OPEN_TREE_CLONE_ | OPEN_TREE_CLOEXEC_);
    if (mount < 0) fail("root", "open_tree", errno, "");
    place_mount(mount, launch->scratch, "root", "root");
    launch->root = mount;
}

static void loopback(void) {
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq request = {.ifr_name = "lo"};
    if (fd < 0) return; /* a kernel without IPv4 */
    request.ifr_flags = IFF_UP;
    if (ioctl(fd, SIOCSIFFLAGS, &request) < 0) fail("loopback", "lo", errno, "");
    close(fd);
}

static void egress(void) {
    int port = net_listen();
    if (port < 0 || net_redirect_linux(port) < 0)
        fail("egress", net_failed, errno, "nf_tables with nft_tproxy is needed (CONFIG_NF_TABLES, CONFIG_NF_TABLES_IPV4, CONFIG_NFT_TPROXY)");
}

static void write_existing(int root, const char *path, struct text content) {
    int fd = open_below(root, path, O_WRONLY);
    if (fd < 0) return;
    if (write(fd, content.bytes, content.size) < 0) { /* best effort: the value is a convenience */ }
    close(fd);
}

static void run(struct launch *launch, struct step *step) {
    struct reader *args = &step->args;
    int host_side = (launch->plan.flags & PLAN_HOST_MOUNTS) != 0;
    switch (step->kind) {
    case STEP_TREE:
    case STEP_VOLUME: return; /* made before: as root by the supervisor, else as the caller */
    case STEP_EXT4:
        if (!host_side) fail("plan", "ext4 needs root", 0, "");
        return;
    case STEP_TMPFS: {
        int *slot = slot_of(launch, args);
        uint64_t attributes = arg_u64(args);
        *slot = filesystem_new("tmpfs", arg_text(args).bytes, attributes);
        break;
    }
    case STEP_STAGE: stage(launch, *slot_of(launch, args)); break;
    case STEP_ROOT: root_folder(launch); break;
    case STEP_OVERLAY: make_overlay(launch, *args); return;
    case STEP_MKDIR: {
        uint64_t mode = arg_u64(args);
        close(make_folder(launch->root, arg_text(args).bytes, (unsigned)mode));
        break;
    }
    case STEP_SYMLINK: {
        const char *target = arg_text(args).bytes, *path = arg_text(args).bytes;
        if (symlinkat(target, launch->root, path) < 0 && errno != EEXIST) fail("symlink", path, errno, "");
        break;
    }
    case STEP_FILE: {
        uint64_t mode = arg_u64(args);
        const char *path = arg_text(args).bytes;
        write_file(launch->root, path, arg_text(args), (unsigned)mode);
        break;
    }
    case STEP_MOUNT: {
        int *slot = slot_of(launch, args);
        const char *path = arg_text(args).bytes;
        if (*slot >= 0) { /* -1: an optional tree that this host does not have */
            place_mount(*slot, launch->root, path, "mount");
            close(*slot);
            *slot = -1;
        }
        break;
    }
    case STEP_PLACE: {
        int *slot = slot_of(launch, args);
        place_volume(launch, slot, arg_text(args).bytes);
        break;
    }
    case STEP_FS: {
        uint64_t attributes = arg_u64(args);
        const char *type = arg_text(args).bytes, *options = arg_text(args).bytes;
        int mount = filesystem_new(type, options, attributes);
        place_mount(mount, launch->root, arg_text(args).bytes, type);
        close(mount);
        break;
    }
    case STEP_MASK: mask_path(launch, arg_text(args).bytes); break;
    case STEP_COVER: {
        const char *path = arg_text(args).bytes;
        cover_path(launch, path, arg_text(args));
        break;
    }
    case STEP_READONLY: readonly_path(launch, arg_text(args).bytes); break;
    case STEP_WRAP: {
        uint64_t attributes = arg_u64(args);
        wrap_root(launch, attributes, arg_text(args).bytes);
        break;
    }
    case STEP_PIVOT: pivot(launch); break;
    case STEP_LOOPBACK: loopback(); break;
    case STEP_EGRESS: egress(); break;
    case STEP_ADDRESSES:
        if (net_addresses() < 0) fail("egress", net_failed, errno, "");
        break;
    case STEP_WRITE: {
        const char *path = arg_text(args).bytes;
        write_existing(launch->root, path, arg_text(args));
        break;
    }
    case STEP_ALLOW: {
        uint64_t bits = arg_u64(args), rights = arg_u64(args);
        const char *path = arg_text(args).bytes;
        landlock_allow(launch->ruleset, rights, path);
        if (!(bits & ALLOW_AGENT_ONLY)) landlock_allow(launch->fence, rights, path);
        break;
    }
    case STEP_CHDIR: {
        const char *path = arg_text(args).bytes;
        if (chdir(path) < 0) fail("chdir", path, errno, "");
        break;
    }
    default: fail("plan", "an unknown step", 0, "the launcher and the library do not match; reinstall sloplet");
    }
    arg_end(args);
}

void run_steps(struct launch *launch) {
    const uint8_t *cursor = launch->plan.steps;
    struct step step;
    umask(0);
    while (plan_next(&launch->plan, &cursor, &step)) run(launch, &step);
    umask(022);
}
