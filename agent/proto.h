/* The numbers of the wire, one to one with src/sloplet/wire/schema.py (a test compares them).
 * docs/wire.md says what they mean. */
#ifndef SLOPLET_PROTO_H
#define SLOPLET_PROTO_H

#define WIRE_VERSION 1
#define WIRE_HEADER_SIZE 12
#define WIRE_MAX_PAYLOAD 65536
#define WIRE_MAX_OPEN 1048576
#define WIRE_MAX_STREAMS 1024
#define WIRE_INITIAL_CREDIT 262144
#define WIRE_MAX_CREDIT 16777216
#define WIRE_MAX_PING 64

enum {
    FRAME_HELLO = 1,
    FRAME_OPEN = 2,
    FRAME_DATA = 3,
    FRAME_END = 4,
    FRAME_CREDIT = 5,
    FRAME_CTRL = 6,
    FRAME_REPLY = 7,
    FRAME_CLOSE = 8,
    FRAME_RESET = 9,
    FRAME_PING = 10,
    FRAME_PONG = 11,
};

enum {
    CHANNEL_IN = 0,
    CHANNEL_OUT = 1,
    CHANNEL_ERR = 2,
};

enum {
    OP_EXEC = 1,
    OP_ATTACH = 2,
    OP_SIGNAL = 3,
    OP_PS = 4,
    OP_FORGET = 5,
    OP_READ = 10,
    OP_WRITE = 11,
    OP_LIST = 12,
    OP_STAT = 13,
    OP_MKDIR = 14,
    OP_REMOVE = 15,
    OP_MOVE = 16,
    OP_CHMOD = 17,
    OP_CHOWN = 18,
    OP_SYMLINK = 19,
    OP_WATCH = 20,
    OP_GETXATTRS = 21,
    OP_SETXATTRS = 22,
    OP_METRICS = 30,
    OP_SHUTDOWN = 31,
    OP_FREEZE = 32,
    OP_THAW = 33,
    OP_CHANGES = 34,
    OP_UNPACK = 35,
    OP_DIAL = 36,
    OP_CONNECT = 50,
    OP_RESOLVE = 51,
    OP_CONTROL = 100,
};

enum {
    TAG_OP = 1,
    TAG_KIND = 2,
    TAG_VERSION = 3,
    TAG_ERRNO = 4,
    TAG_MESSAGE = 5,
    TAG_WHAT = 6,
    TAG_FLAGS = 7,
    TAG_USER = 8,
    TAG_WORKDIR = 9,
    TAG_HOME = 10,
    TAG_HOSTNAME = 11,
    TAG_RING = 12,
    TAG_ENTROPY = 13,
    TAG_FEATURES = 14,
    TAG_ARGV = 15,
    TAG_ENV = 16,
    TAG_CWD = 17,
    TAG_ROWS = 18,
    TAG_COLS = 19,
    TAG_TIMEOUT_MS = 20,
    TAG_TAG = 21,
    TAG_PID = 22,
    TAG_OSPID = 23,
    TAG_SIGNUM = 24,
    TAG_STATE = 25,
    TAG_STARTED_NS = 26,
    TAG_FROM_OUT = 27,
    TAG_FROM_ERR = 28,
    TAG_OFFSET_OUT = 29,
    TAG_OFFSET_ERR = 30,
    TAG_COUNT = 31,
    TAG_EXIT_CODE = 32,
    TAG_TIMED_OUT = 33,
    TAG_OUT_TOTAL = 34,
    TAG_ERR_TOTAL = 35,
    TAG_OUT_LOST = 36,
    TAG_ERR_LOST = 37,
    TAG_CPU_US = 38,
    TAG_MAXRSS = 39,
    TAG_WALL_US = 40,
    TAG_OOM = 41,
    TAG_PATH = 42,
    TAG_PATH2 = 43,
    TAG_OFFSET = 44,
    TAG_LENGTH = 45,
    TAG_BYTES = 46,
    TAG_MODE = 47,
    TAG_DEPTH = 48,
    TAG_NAME = 49,
    TAG_NAME2 = 50,
    TAG_TYPE = 51,
    TAG_SIZE = 52,
    TAG_UID = 53,
    TAG_GID = 54,
    TAG_MTIME_NS = 55,
    TAG_LINK = 56,
    TAG_OWNER = 57,
    TAG_MASK = 58,
    TAG_MEMORY = 59,
    TAG_PIDS = 60,
    TAG_DISK_USED = 61,
    TAG_DISK_TOTAL = 62,
    TAG_UPTIME_MS = 63,
    TAG_SANDBOX = 64,
    TAG_BODY = 65,
    TAG_GENERATION = 66,
    TAG_ENTRY = 67,
    TAG_PORT = 68,
    TAG_ADDRESS = 69,
    TAG_DENIED = 70,
    TAG_ATTRIBUTE = 71,
    TAG_PREFIX = 72,
    TAG_GROUP = 73,
    TAG_TARGET = 74,
    TAG_TARGET_TYPE = 75,
    TAG_TARGET_SIZE = 76,
    TAG_TARGET_MODE = 77,
};

enum {
    HELLO_FLAG_NO_USERS = 1,
    HELLO_FLAG_EGRESS = 2,
    HELLO_FLAG_STILL = 4, /* a restored copy is only looked at: nobody in it goes on */
};

enum {
    FEATURE_EGRESS = 1,
};

enum {
    EXEC_FLAG_PTY = 1,
    EXEC_FLAG_STDIN = 2,
    EXEC_FLAG_KILL_ON_RESET = 4,
    EXEC_FLAG_MERGE = 8,
    EXEC_FLAG_LOSSY = 16,
};

enum {
    SIGNAL_FLAG_MAIN_ONLY = 1,
};

enum {
    WRITE_FLAG_APPEND = 1,
    WRITE_FLAG_EXCLUSIVE = 2,
    WRITE_FLAG_PARENTS = 4,
    WRITE_FLAG_IN_PLACE = 8,
};

enum {
    LIST_FLAG_RECURSIVE = 1,
    LIST_FLAG_NAMES = 2,
    LIST_FLAG_TARGET = 4,
};

enum {
    STAT_FLAG_NOFOLLOW = 1,
    STAT_FLAG_NAMES = 2,
    STAT_FLAG_TARGET = 4,
};

enum {
    MKDIR_FLAG_PARENTS = 1,
};

enum {
    REMOVE_FLAG_RECURSIVE = 1,
    REMOVE_FLAG_MISSING_OK = 2,
};

enum {
    MOVE_FLAG_REPLACE = 1,
};

enum {
    WATCH_FLAG_RECURSIVE = 1,
    WATCH_FLAG_FOLDER = 2,
};

enum {
    SETXATTRS_FLAG_REPLACE = 1,
};

enum {
    CTRL_RESIZE = 1,
    CTRL_SIGNAL = 2,
    CTRL_DISCARD = 3,
};

enum {
    FILE_TYPE_FILE = 0,
    FILE_TYPE_DIR = 1,
    FILE_TYPE_SYMLINK = 2,
    FILE_TYPE_OTHER = 3,
    FILE_TYPE_REMOVED = 4,
};

enum {
    FREEZE_FLAG_SERVE = 1,
};

enum {
    RESOLVE_FLAG_FULL = 1,
};

enum {
    CHANGES_FLAG_CONTENTS = 1,
    CHANGES_FLAG_ATTRIBUTES = 2,
};

enum {
    LISTING_FLAG_COMPLETE = 1,
};

enum {
    CHANGE_FLAG_OPAQUE = 1,
    CHANGE_FLAG_HARD_LINK = 2,
};

enum {
    WATCH_MASK_CREATED = 1,
    WATCH_MASK_MODIFIED = 2,
    WATCH_MASK_REMOVED = 4,
    WATCH_MASK_RENAMED = 8,
    WATCH_MASK_ATTRIBUTES = 16,
    WATCH_MASK_OVERFLOW = 32,
};

#endif
