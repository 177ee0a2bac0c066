/* Kernel interfaces newer than the libc headers we build against (musl-gcc has no <linux/...> at all).
 * Numbers are the kernel's ABI; every number from 424 on is the same on all architectures. */
#ifndef SLOPLET_LINUXAPI_H
#define SLOPLET_LINUXAPI_H

#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NR_pidfd_send_signal 424
#define NR_open_tree 428
#define NR_move_mount 429
#define NR_fsopen 430
#define NR_fsconfig 431
#define NR_fsmount 432
#define NR_pidfd_open 434
#define NR_clone3 435
#define NR_close_range 436
#define NR_openat2 437
#define NR_mount_setattr 442
#define NR_fchmodat2 452
#define NR_landlock_create_ruleset 444
#define NR_landlock_add_rule 445
#define NR_landlock_restrict_self 446

/* getdents64 */
struct dirent64_ {
    uint64_t ino;
    int64_t off;
    uint16_t reclen;
    uint8_t type;
    char name[];
};

/* open_tree, move_mount, fsopen, fsconfig, fsmount, mount_setattr */
#define OPEN_TREE_CLONE_ 1u
#define OPEN_TREE_CLOEXEC_ 02000000u
#define AT_RECURSIVE_ 0x8000u
#define AT_EMPTY_PATH_ 0x1000u
#define MOVE_MOUNT_F_EMPTY_PATH_ 0x04u
#define MOVE_MOUNT_T_EMPTY_PATH_ 0x40u
#define FSOPEN_CLOEXEC_ 1u
#define FSMOUNT_CLOEXEC_ 1u
#define FSCONFIG_SET_FLAG_ 0u
#define FSCONFIG_SET_STRING_ 1u
#define FSCONFIG_CMD_CREATE_ 6u
#define MOUNT_ATTR_RDONLY_ 0x1ull
#define MOUNT_ATTR_NOSUID_ 0x2ull
#define MOUNT_ATTR_NODEV_ 0x4ull
#define MOUNT_ATTR_NOEXEC_ 0x8ull
#define MOUNT_ATTR_IDMAP_ 0x100000ull

struct mount_attr_ {
    uint64_t attr_set;
    uint64_t attr_clr;
    uint64_t propagation;
    uint64_t userns_fd;
};

/* openat2 */
#define RESOLVE_NO_MAGICLINKS_ 0x02ull
#define RESOLVE_NO_SYMLINKS_ 0x04ull
#define RESOLVE_IN_ROOT_ 0x10ull

struct open_how_ {
    uint64_t flags;
    uint64_t mode;
    uint64_t resolve;
};

/* clone3 */
#define CLONE_PIDFD_ 0x1000ull
#define CLONE_INTO_CGROUP_ 0x200000000ull

struct clone_args_ {
    uint64_t flags;
    uint64_t pidfd;
    uint64_t child_tid;
    uint64_t parent_tid;
    uint64_t exit_signal;
    uint64_t stack;
    uint64_t stack_size;
    uint64_t tls;
    uint64_t set_tid;
    uint64_t set_tid_size;
    uint64_t cgroup;
};

#define P_PIDFD_ 3

/* loop devices */
#define LOOP_CTL_GET_FREE_ 0x4C82
#define LOOP_CONFIGURE_ 0x4C0A
#define LO_FLAGS_AUTOCLEAR_ 4u

struct loop_info64_ {
    uint64_t lo_device;
    uint64_t lo_inode;
    uint64_t lo_rdevice;
    uint64_t lo_offset;
    uint64_t lo_sizelimit;
    uint32_t lo_number;
    uint32_t lo_encrypt_type;
    uint32_t lo_encrypt_key_size;
    uint32_t lo_flags;
    uint8_t lo_file_name[64];
    uint8_t lo_crypt_name[64];
    uint8_t lo_encrypt_key[32];
    uint64_t lo_init[2];
};

struct loop_config_ {
    uint32_t fd;
    uint32_t block_size;
    struct loop_info64_ info;
    uint64_t reserved[8];
};

/* _IOR('X', 125, __u32): ext4 and others stop at once; 2 is "do not flush the log first" */
#define FS_IOC_SHUTDOWN_ 0x8004587Du
#define FS_SHUTDOWN_NOLOGFLUSH_ 2u

#endif
