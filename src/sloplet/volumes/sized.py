"""Volumes of a limited size: an ext4 filesystem in a file, on a loop device. Needs root, as mounting does.

There is one loop device for a volume however many sandboxes have it: two would each cache, and overwrite what the
other has written. Whoever comes second finds the device by the file behind it and mounts that again, which is the same
filesystem to the kernel. The device goes when its last mount does, whatever happens to us.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import time
from contextlib import suppress

from ..engines.machine import machine
from ..errors import ControlUnavailable, InvalidLimit, VolumeError
from ..state.home import Home
from .records import IMAGE, open_in_volume

LEAST = 2**20
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE, _LOOP_GET_STATUS = 0x4C82, 0x4C0A, 0x4C05
_AUTOCLEAR = 4
_INFO = struct.Struct("=QQQQQIIII64s64s32s2Q")  # struct loop_info64
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # the same numbers on every architecture
_CLOEXEC, _SET_FLAG, _SET_STRING, _CREATE = 1, 0, 1, 6
_TRIES = 64


def check_possible(size: int) -> str:
    """The program that formats one. ControlUnavailable says what is missing."""
    if size < LEAST:
        raise InvalidLimit(f"size={size} is too small for a volume", hint="the least is 1m")
    facts = machine()
    if not facts.root:
        raise ControlUnavailable(
            "a volume's size can be limited by root only: it takes a filesystem of its own",
            hint="leave --size out, or run as root",
        )
    if not facts.loop:
        raise ControlUnavailable(
            "a volume's size cannot be limited here: there are no loop devices", hint="is /dev/loop-control there?"
        )
    if facts.mkfs is None:
        raise ControlUnavailable(
            "a volume's size cannot be limited here: mkfs.ext4 is missing", hint="`apt-get install e2fsprogs`"
        )
    return facts.mkfs


def format_image(folder: int, size: int) -> None:
    """``disk.img`` in a folder that is being made. Raises OSError, ControlUnavailable."""
    mkfs = check_possible(size)
    fd = os.open(IMAGE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        os.ftruncate(fd, size)
        # -m 0: all of it is for the sandbox. With a journal, unlike scratch: this is data to keep.
        argv = [mkfs, "-q", "-F", "-t", "ext4", "-m", "0", "-E", "nodiscard,root_owner=0:0", f"/proc/self/fd/{fd}"]
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            actions: list[tuple[int, int, int]] = [(os.POSIX_SPAWN_DUP2, nothing, each) for each in (0, 1, 2)]
            actions.append((os.POSIX_SPAWN_DUP2, fd, fd))
            pid = os.posix_spawn(mkfs, argv, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, file_actions=actions)
        finally:
            os.close(nothing)
        _, status = os.waitpid(pid, 0)
        if status:
            raise OSError(errno.EIO, f"{mkfs} failed ({os.waitstatus_to_exitcode(status)})")
        _make_bare(fd)
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_bare(image: int) -> None:
    """Without lost+found: a new volume is empty."""
    device, loop = _attach(image)
    try:
        root = _mounted(device)
        try:
            os.rmdir("lost+found", dir_fd=root)
        finally:
            os.close(root)
    finally:
        os.close(loop)
    wait_until_unmounted(image)


def mount(home: Home, name: str) -> int:
    """The volume's filesystem, as a descriptor of a mount that is nowhere. The caller holds the volume's lock
    (``leases.locked``). Blocking. VolumeError, ControlUnavailable."""
    check_possible(LEAST)
    try:
        image = open_in_volume(home, name, IMAGE, os.O_RDWR)
        try:
            device, loop = _device_of(image) or _attach(image)
        finally:
            os.close(image)
        try:
            return _mounted(device)
        finally:
            os.close(loop)  # the filesystem holds it now
    except OSError as error:
        raise VolumeError(f"the volume {name!r} cannot be mounted: {error.strerror or error}") from error


def wait_until_unmounted(image: int, seconds: float = 10.0) -> None:
    """Nobody has it any more, but the kernel may still be writing it back. VolumeError."""
    until = time.monotonic() + seconds
    while (found := _device_of(image)) is not None:
        os.close(found[1])
        if time.monotonic() > until:
            raise VolumeError(f"something else has the volume's filesystem mounted: {found[0]}")
        time.sleep(0.01)


def _device_of(image: int) -> tuple[str, int] | None:
    """The loop device that has this file, opened."""
    wanted = os.fstat(image)
    for name in os.listdir("/sys/block"):
        if not name.startswith("loop") or not os.path.exists(f"/sys/block/{name}/loop/backing_file"):
            continue
        with suppress(OSError):  # it went meanwhile
            fd = os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC)
            try:
                answer = bytearray(_INFO.size)
                fcntl.ioctl(fd, _LOOP_GET_STATUS, answer)
                device, inode = _INFO.unpack(answer)[:2]
                if inode == wanted.st_ino and _device(device) == wanted.st_dev:
                    return f"/dev/{name}", os.dup(fd)
            finally:
                os.close(fd)
    return None


def _device(encoded: int) -> int:
    """The kernel's encoding of a device number in loop_info64, as stat has it."""
    major = (encoded & 0xFFF00) >> 8
    minor = (encoded & 0xFF) | ((encoded >> 12) & 0xFFF00)
    return os.makedev(major, minor)


def _attach(image: int) -> tuple[str, int]:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            name = f"/dev/loop{number}"
            try:
                loop = os.open(name, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                if error.errno in (errno.EBUSY, errno.ENXIO):
                    continue
                raise
            info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR, b"", b"", b"", 0, 0)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, struct.pack("=II", image, 0) + info + bytes(64))
                return name, loop
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # another has taken it between the two calls
                    raise
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "every loop device is taken at once")


def _mounted(device: str) -> int:
    fs = _call(_FSOPEN, b"ext4", _CLOEXEC)
    try:
        _call(_FSCONFIG, fs, _SET_STRING, b"source", device.encode(), 0)
        _call(_FSCONFIG, fs, _SET_STRING, b"errors", b"remount-ro", 0)
        _call(_FSCONFIG, fs, _CREATE, None, None, 0)
        return _call(_FSMOUNT, fs, _CLOEXEC, 0)
    finally:
        os.close(fs)


def _call(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    plain = [ctypes.c_long(each) if isinstance(each, int) else ctypes.c_char_p(each) for each in arguments]
    done = libc.syscall(ctypes.c_long(number), *plain)
    if done < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(done)
