"""The numbers of the wire, one to one with ``agent/proto.h`` (a test compares them).

See docs/wire.md for what they mean. This module imports nothing of ours.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

VERSION = 1
HEADER_SIZE = 12
MAX_PAYLOAD = 65536
MAX_OPEN = 1048576
MAX_STREAMS = 1024
INITIAL_CREDIT = 262144
MAX_CREDIT = 16777216
MAX_PING = 64


class FrameType(IntEnum):
    HELLO = 1
    OPEN = 2
    DATA = 3
    END = 4
    CREDIT = 5
    CTRL = 6
    REPLY = 7
    CLOSE = 8
    RESET = 9
    PING = 10
    PONG = 11


class Channel(IntEnum):
    IN = 0
    OUT = 1
    ERR = 2


class Op(IntEnum):
    EXEC = 1
    ATTACH = 2
    SIGNAL = 3
    PS = 4
    FORGET = 5
    READ = 10
    WRITE = 11
    LIST = 12
    STAT = 13
    MKDIR = 14
    REMOVE = 15
    MOVE = 16
    CHMOD = 17
    CHOWN = 18
    SYMLINK = 19
    WATCH = 20
    GETXATTRS = 21
    SETXATTRS = 22
    METRICS = 30
    SHUTDOWN = 31
    FREEZE = 32
    THAW = 33
    CHANGES = 34
    UNPACK = 35
    DIAL = 36
    CONNECT = 50
    RESOLVE = 51
    CONTROL = 100


class Tag(IntEnum):
    OP = 1
    KIND = 2
    VERSION = 3
    ERRNO = 4
    MESSAGE = 5
    WHAT = 6
    FLAGS = 7
    USER = 8
    WORKDIR = 9
    HOME = 10
    HOSTNAME = 11
    RING = 12
    ENTROPY = 13
    FEATURES = 14
    ARGV = 15
    ENV = 16
    CWD = 17
    ROWS = 18
    COLS = 19
    TIMEOUT_MS = 20
    TAG = 21
    PID = 22
    OSPID = 23
    SIGNUM = 24
    STATE = 25
    STARTED_NS = 26
    FROM_OUT = 27
    FROM_ERR = 28
    OFFSET_OUT = 29
    OFFSET_ERR = 30
    COUNT = 31
    EXIT_CODE = 32
    TIMED_OUT = 33
    OUT_TOTAL = 34
    ERR_TOTAL = 35
    OUT_LOST = 36
    ERR_LOST = 37
    CPU_US = 38
    MAXRSS = 39
    WALL_US = 40
    OOM = 41
    PATH = 42
    PATH2 = 43
    OFFSET = 44
    LENGTH = 45
    BYTES = 46
    MODE = 47
    DEPTH = 48
    NAME = 49
    NAME2 = 50
    TYPE = 51
    SIZE = 52
    UID = 53
    GID = 54
    MTIME_NS = 55
    LINK = 56
    OWNER = 57
    MASK = 58
    MEMORY = 59
    PIDS = 60
    DISK_USED = 61
    DISK_TOTAL = 62
    UPTIME_MS = 63
    SANDBOX = 64
    BODY = 65
    GENERATION = 66
    ENTRY = 67
    PORT = 68
    ADDRESS = 69
    DENIED = 70
    ATTRIBUTE = 71
    PREFIX = 72
    GROUP = 73
    TARGET = 74
    TARGET_TYPE = 75
    TARGET_SIZE = 76
    TARGET_MODE = 77


#: Tags whose value is an 8-byte signed integer; all others hold bytes.
INTEGER_TAGS = frozenset(
    {
        Tag.OP, Tag.KIND, Tag.VERSION, Tag.ERRNO, Tag.FLAGS, Tag.RING, Tag.FEATURES,
        Tag.ROWS, Tag.COLS, Tag.TIMEOUT_MS, Tag.PID, Tag.OSPID, Tag.SIGNUM, Tag.STATE,
        Tag.STARTED_NS, Tag.FROM_OUT, Tag.FROM_ERR, Tag.OFFSET_OUT, Tag.OFFSET_ERR, Tag.COUNT,
        Tag.EXIT_CODE, Tag.TIMED_OUT, Tag.OUT_TOTAL, Tag.ERR_TOTAL, Tag.OUT_LOST, Tag.ERR_LOST,
        Tag.CPU_US, Tag.MAXRSS, Tag.WALL_US, Tag.OOM, Tag.OFFSET, Tag.LENGTH, Tag.BYTES, Tag.MODE,
        Tag.DEPTH, Tag.TYPE, Tag.SIZE, Tag.UID, Tag.GID, Tag.MTIME_NS, Tag.MASK, Tag.MEMORY, Tag.PIDS,
        Tag.DISK_USED, Tag.DISK_TOTAL, Tag.UPTIME_MS, Tag.PORT, Tag.TARGET_TYPE, Tag.TARGET_SIZE, Tag.TARGET_MODE,
    }
)  # fmt: skip


class HelloFlag(IntFlag):
    NO_USERS = 1
    EGRESS = 2
    STILL = 4


class Feature(IntFlag):
    EGRESS = 1


class ExecFlag(IntFlag):
    PTY = 1
    STDIN = 2
    KILL_ON_RESET = 4
    MERGE = 8
    LOSSY = 16


class SignalFlag(IntFlag):
    MAIN_ONLY = 1


class WriteFlag(IntFlag):
    APPEND = 1
    EXCLUSIVE = 2
    PARENTS = 4
    IN_PLACE = 8


class ListFlag(IntFlag):
    RECURSIVE = 1
    NAMES = 2
    TARGET = 4


class StatFlag(IntFlag):
    NOFOLLOW = 1
    NAMES = 2
    TARGET = 4


class MkdirFlag(IntFlag):
    PARENTS = 1


class RemoveFlag(IntFlag):
    RECURSIVE = 1
    MISSING_OK = 2


class MoveFlag(IntFlag):
    REPLACE = 1


class WatchFlag(IntFlag):
    RECURSIVE = 1
    FOLDER = 2


class SetxattrsFlag(IntFlag):
    REPLACE = 1


class CtrlKind(IntEnum):
    RESIZE = 1
    SIGNAL = 2
    DISCARD = 3


class FileType(IntEnum):
    FILE = 0
    DIR = 1
    SYMLINK = 2
    OTHER = 3
    REMOVED = 4


class FreezeFlag(IntFlag):
    SERVE = 1


class ResolveFlag(IntFlag):
    FULL = 1


class ChangesFlag(IntFlag):
    CONTENTS = 1
    ATTRIBUTES = 2


class ListingFlag(IntFlag):
    COMPLETE = 1


class ChangeFlag(IntFlag):
    OPAQUE = 1
    HARD_LINK = 2


class WatchMask(IntFlag):
    CREATED = 1
    MODIFIED = 2
    REMOVED = 4
    RENAMED = 8
    ATTRIBUTES = 16
    OVERFLOW = 32
