"""The child of ``userns``: does jobs in a user namespace of its own, asked for over the socket that is its stdin.

Run by path, as a program. Order: make the user namespace, say so, wait for the first job (the map is there by then),
become root there with no more than what files need; do jobs until the other end closes. Messages are JSON behind their
length, descriptors come with the length: ``job`` and ``arguments``; back come ``unshared``, ``done`` (bytes so far),
``result`` or ``error``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

_NEWUSER = 0x10000000
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38
_CAPABILITIES = 1 << 0 | 1 << 1 | 1 << 3  # CHOWN, DAC_OVERRIDE, FOWNER
_MOST_FDS = 8
_MOST_SAID = 64 * 2**20


def send(to: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode("ascii")
    socket.send_fds(to, [struct.pack("=I", len(data))], fds)
    to.sendall(data)


def receive(source: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors; None at the end."""
    head, fds, _, _ = socket.recv_fds(source, 4, _MOST_FDS)
    head += _exactly(source, 4 - len(head)) if head else b""
    if len(head) < 4:
        return None
    (length,) = struct.unpack("=I", head)
    if length > _MOST_SAID:
        raise OSError("a message is too long")
    data = _exactly(source, length)
    if len(data) < length:
        return None
    message: dict[str, Any] = json.loads(data)
    return message, fds


def _exactly(source: socket.socket, count: int) -> bytes:
    parts = []
    while count and (piece := source.recv(min(count, 1 << 20))):
        parts.append(piece)
        count -= len(piece)
    return b"".join(parts)


def main() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    here = socket.socket(fileno=0)
    # run by path: the package must be importable, without shadowing anything
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    try:
        _checked(libc.unshare(_NEWUSER), "a user namespace cannot be made")
        send(here, {"unshared": os.getpid()})
        asked = receive(here)
        _become_root(libc, int(sys.argv[1]))
    except BaseException as error:
        send(here, {"error": _told(error)})
        return 1
    while asked is not None:
        message, fds = asked
        try:
            result = _do(here, message, fds)
        except BaseException as error:
            send(here, {"error": _told(error)})
        else:
            send(here, {"result": result})
        asked = receive(here)
    return 0


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _become_root(libc: ctypes.CDLL, parent: int) -> None:
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.umask(0)
    _checked(libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    header = struct.pack("=II", 0x20080522, 0)
    _checked(libc.capset(header, struct.pack("=IIIIII", _CAPABILITIES, _CAPABILITIES, 0, 0, 0, 0)), "capabilities")
    _checked(libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "the parent's death")
    if os.getppid() != parent:
        raise SystemExit(1)


def _do(here: socket.socket, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    from sloplet.images.jobs import JOBS

    try:
        return JOBS[message["job"]](message["arguments"], fds, lambda done: send(here, {"done": done}))
    finally:
        for fd in fds:
            try:
                os.close(fd)
            except OSError:
                pass  # a job may have closed it


def _told(error: BaseException) -> dict[str, Any]:
    from sloplet.errors import SlopletError

    if isinstance(error, SlopletError):
        return error.to_dict()
    if isinstance(error, OSError) and error.errno:
        return {"error": "OSError", "errno": error.errno, "message": str(error.strerror)}
    return {"error": "EngineError", "message": f"unpacking failed: {type(error).__name__}: {error}", "hint": None}


if __name__ == "__main__":
    raise SystemExit(main())
