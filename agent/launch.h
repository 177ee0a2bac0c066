/* The launcher: builds the jail a plan describes, then becomes the agent. docs/launch.md has the format.
 *
 * One process is spawned by the host's Python; it clones the sandbox's PID 1 and stays as its supervisor.
 * Nothing here allocates: a plan is mapped read-only and walked in place. */
#ifndef SLOPLET_LAUNCH_H
#define SLOPLET_LAUNCH_H

#include <stddef.h>
#include <stdint.h>

#define PLAN_MAGIC 0x31504C53u /* "SLP1" */
#define PLAN_MAX (8u << 20)
#define MAX_SLOTS 96
#define MAX_GIVEN 64
#define MAX_CGROUPS 12
#define MAX_OOM_FILES 2
#define MAX_RLIMITS 16

/* file descriptors the spawner sets up */
enum { FD_WIRE_IN = 0, FD_WIRE_OUT = 1, FD_STATUS = 2, FD_PLAN = 3, FD_CONTROL = 4, FD_FIRST_FREE = 5 };

/* what a minder hands to a runsc verb begins here; its files lie in the jail's own root */
enum { FD_VERB = 10 };
#define MINDER_LOG "/run/log"
#define MINDER_PID "/run/pid"
enum { MINDER_STARTS = 1, MINDER_SAVES = 2 /* to the first descriptor, a folder: what it writes is its owner's */ };

/* how the supervisor's exit code reads (docs/launch.md) */
enum { END_CLEAN = 0, END_START_FAILED = 1, END_AGENT_FAILED = 2, END_STOPPED = 3, END_SIGNAL = 32, END_OOM = 128 };

enum {
    PLAN_NAMESPACES = 1,    /* user, mount, pid, ipc, uts, net and cgroup namespaces; else the process rung */
    PLAN_HOST_MOUNTS = 2,   /* the caller is root: TREE and EXT4 steps run before the sandbox's own creds */
    PLAN_PROBE = 4,         /* build everything, then report success instead of serving */
    PLAN_DENY_SETGROUPS = 8, /* one uid only: the kernel wants setgroups off before the gid map */
    PLAN_NO_LEASES = 128,    /* nor take leases on files */
    PLAN_NO_SETID = 64,      /* commands cannot make setuid and setgid files (agent.h) */
    PLAN_POWERS = 32,        /* root inside has its powers (agent.h) */
    PLAN_MINDER = 16         /* gVisor: the first process is a minder with a control socket, not the agent */
};

enum {
    SET_FLAGS = 1,         /* u64 */
    SET_HOLDER = 2,        /* u64 pid whose death ends the sandbox */
    SET_UID_MAP = 3,       /* text of /proc/PID/uid_map */
    SET_GID_MAP = 4,       /* text */
    SET_MAP_HELPERS = 5,   /* text newuidmap, text newgidmap */
    SET_IDENTITY = 6,      /* u64 uid, u64 gid, inside */
    SET_HOSTNAME = 7,      /* text */
    SET_CGROUP_JOIN = 8,   /* text: a v1 tasks file */
    SET_CGROUP_INTO = 9,   /* text: a v2 cgroup folder */
    SET_CGROUP_REMOVE = 10, /* text: a folder to remove at the end */
    SET_OOM_FILE = 11,     /* text path, text key: where kernel oom kills are counted; at most two */
    SET_RLIMIT = 12,       /* u64 resource, u64 value */
    SET_CAPS = 13,         /* u64 mask of the capabilities the agent keeps */
    SET_SECCOMP = 14,      /* u64 SECCOMP_* bits */
    SET_LANDLOCK = 15,     /* u64 handled filesystem rights, u64 handled network rights, u64 scopes */
    SET_CPUS = 16,         /* u64 mask of the first 64 cpus */
    SET_DROP_TO = 17,      /* u64 uid, u64 gid: process rung as root: become this on the host */
    SET_CGROUP_WORK = 18,  /* text: the tasks (v2: cgroup.procs) file by which a command joins its group */
    SET_GIVEN = 19,        /* u64 how many descriptors from FD_FIRST_FREE on are kept until the sandbox has ended */

    STEP_TREE = 64,     /* u64 slot, u64 TREE_* bits, u64 attributes, text host path */
    STEP_TMPFS = 65,    /* u64 slot, u64 attributes, text options */
    STEP_EXT4 = 66,     /* u64 slot, u64 attributes, text template image, text folder for the copy */
    STEP_STAGE = 67,    /* u64 slot: the scratch filesystem, on which all else is built */
    STEP_ROOT = 68,     /* the sandbox's root is a folder of the scratch filesystem */
    STEP_OVERLAY = 69,  /* u64 OVERLAY_* bits, u64 attributes, text path in the root ("" is the root itself), u64 slot */
    STEP_MKDIR = 70,    /* u64 mode, text path; parents are made 0755; an existing folder is kept */
    STEP_SYMLINK = 71,  /* text target, text path */
    STEP_FILE = 72,     /* u64 mode (with FILE_IF_ALLOWED or not), text path, bytes */
    STEP_MOUNT = 73,    /* u64 slot, text path: attach it there; the mount point is made if missing */
    STEP_FS = 74,       /* u64 attributes, text type, text options, text path */
    STEP_MASK = 75,     /* text path: hide it behind an empty read-only file or folder, if it is there */
    STEP_READONLY = 76, /* text path: read-only from here on, if it is there */
    STEP_PIVOT = 77,    /* the root becomes /; nothing of the host stays mounted */
    STEP_LOOPBACK = 78, /* bring lo up */
    STEP_WRITE = 79,    /* text path, bytes: write to an existing file (a sysctl), best effort */
    STEP_ALLOW = 80,    /* u64 ALLOW_* bits, u64 rights, text host path: a Landlock rule, if it is there */
    STEP_CHDIR = 81,    /* text path */
    STEP_WRAP = 82,     /* u64 attributes, text path: the root so far goes there, within a new and empty one */
    STEP_EGRESS = 83,   /* what leaves is brought to the agent (net.h); after LOOPBACK */
    STEP_ADDRESSES = 84, /* every address is lo's, for gVisor to copy; after LOOPBACK */
    STEP_VOLUME = 85,    /* u64 slot, u64 VOLUME_* bits, u64 attributes, u64 number of a given descriptor, text for people, text uid map, text gid map */
    STEP_PLACE = 86,     /* u64 slot, text path: as MOUNT, of a volume, which is no part of the sandbox's own files */
    STEP_COVER = 87,     /* text path, text content: a read-only file with this content over it, if it is there */
};

/* a rootfs that belongs to somebody else may not let us write there */
#define FILE_IF_ALLOWED 0x80000000u

enum { TREE_RECURSIVE = 1, TREE_IDMAP = 2, TREE_OPTIONAL = 4 };

enum { VOLUME_WHOLE = 1 /* the descriptor is a mount that is nowhere yet, not a folder */ };

enum { ALLOW_AGENT_ONLY = 1 /* not for commands */ };

enum {
    OVERLAY_GUARDED = 1, /* what only root may read on the host stays unreadable, for root inside too */
    OVERLAY_SHOWN = 2    /* nothing is written on top of it: the slot alone, guarded or not */
};

enum {
    SECCOMP_ON = 1,
    SECCOMP_BARE = 2,        /* process rung: no sockets, no tracing, no IPC, and of processes only one's own self */
    SECCOMP_NO_METADATA = 4, /* process rung under the caller's uid: Landlock does not guard modes, owners, times */
    SECCOMP_NO_AFFINITY = 8, /* cpus= is enforced by affinity: it must not be widened again */
    SECCOMP_FENCED = 16      /* and commands may not change them of open files either: some they can read are the caller's */
};

struct reader {
    const uint8_t *at, *end;
};

struct text {
    const char *bytes; /* always NUL-terminated at bytes[size] */
    size_t size;
};

struct plan {
    uint64_t flags, holder, caps, seccomp, cpus, given;
    uint64_t landlock_fs, landlock_net, landlock_scope;
    int has_landlock, has_drop;
    uint32_t uid, gid, drop_uid, drop_gid;
    const char *uid_map, *gid_map, *newuidmap, *newgidmap, *hostname;
    const char *join[MAX_CGROUPS], *into, *work[MAX_CGROUPS], *remove[MAX_CGROUPS];
    const char *oom_file[MAX_OOM_FILES], *oom_key[MAX_OOM_FILES];
    int joins, works, removes, oom_files, rlimits;
    struct { uint64_t resource, value; } rlimit[MAX_RLIMITS];
    const uint8_t *steps, *end, *base;
    size_t size;
};

struct step {
    unsigned kind;
    struct reader args;
};

/* What a running launch holds. slot: detached mounts by number, -1 where there is none. */
struct launch {
    struct plan plan;
    int slot[MAX_SLOTS];
    int sync;        /* this side's end of the parent-child socket */
    int userns;      /* the sandbox's user namespace, for idmapped mounts; -1 if not needed */
    int scratch;     /* root of the scratch filesystem, in the child */
    int root;        /* the sandbox's root, in the child */
    int ruleset;     /* Landlock, in the child */
    int fence;       /* Landlock, for commands beyond that: the process rung */
    int shutdown;    /* in the supervisor: a folder on the ext4 scratch, or -1 */
    int pidfd;       /* of the child, in the supervisor */
    int overlays;    /* made so far */
};

int launch_main(int argc, char **argv);

/* plan.c */
void plan_load(struct plan *plan, int fd);
int plan_next(const struct plan *plan, const uint8_t **cursor, struct step *step);
uint64_t arg_u64(struct reader *args);
struct text arg_text(struct reader *args);
void arg_end(struct reader *args);
void plan_forget(struct plan *plan);

/* fail.c: one line "step: what: strerror: hint", then the end of this process */
extern int fail_fd;
void fail(const char *step, const char *what, int error, const char *hint) __attribute__((noreturn));

/* userns.c */
void write_id_maps(const struct plan *plan, int pid);
void become_inside(const struct plan *plan);
int userns_with(const char *uid_map, const char *gid_map); /* a user namespace with nobody in it */

/* trees.c: detached mounts. All return an fd or fail(). */
int tree_clone(const char *path, uint64_t bits, uint64_t attributes, int userns);
int filesystem_new(const char *type, const char *options, uint64_t attributes);
void host_mounts(struct launch *launch);

/* volumes.c */
void volume_as_root(struct launch *launch, struct reader *args);
void callers_trees(struct launch *launch); /* TREE and VOLUME steps where the caller is not root */
void place_volume(struct launch *launch, int *slot, const char *path);

/* steps.c */
void run_steps(struct launch *launch);

/* mounts.c: placing mounts and files below the new root, by descriptor only */
int open_below(int root, const char *path, int flags);
int make_folder(int root, const char *path, unsigned mode);
void place_mount(int mount, int root, const char *path, const char *step);
void make_overlay(struct launch *launch, struct reader args);
void mask_path(struct launch *launch, const char *path);
/* A read-only file with this content over what is there, if something is. */
void cover_path(struct launch *launch, const char *path, struct text content);
void readonly_path(struct launch *launch, const char *path);
void wrap_root(struct launch *launch, uint64_t attributes, const char *path);
void pivot(struct launch *launch);
void write_file(int root, const char *path, struct text content, unsigned mode);

/* gvisor.c */
int minder_main(int control);

/* restrict.c: what is given up last */
void set_limits(const struct plan *plan);
void drop_privileges(const struct plan *plan);

/* landlock.c */
int landlock_begin(const struct plan *plan);
int landlock_fence(const struct plan *plan);
void landlock_allow(int ruleset, uint64_t rights, const char *path);
void landlock_enforce(int ruleset);

/* seccomp.c */
void seccomp_install(uint64_t bits);
int seccomp_no_metadata(void);
void seccomp_no_membarrier(void);
int seccomp_gvisor(void);
int seccomp_no_ping(void);
int seccomp_no_setid(void);
int seccomp_no_leases(void);

/* supervise.c */
void hold_signals(void);
int supervise(struct launch *launch, int holder);
void remove_cgroups(const struct plan *plan);

#endif
