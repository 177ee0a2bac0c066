"""The child of ``userns``: does one job in a user namespace of its own, and says on stdout what came of it.

Run by path, as a program. Order: leave the user namespace, wait to be mapped (a line on stdin that is the job), become
root there with no more than what files need, do it. JSON lines: ``unshared``, ``done`` (bytes so far), ``result`` or
``error``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys
from typing import Any

_NEWUSER = 0x10000000
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38
_CAPABILITIES = 1 << 0 | 1 << 1 | 1 << 3  # CHOWN, DAC_OVERRIDE, FOWNER


def _say(what: dict[str, Any]) -> None:
    data = memoryview(json.dumps(what).encode("ascii") + b"\n")
    while data:
        data = data[os.write(1, data) :]


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        _checked(libc.unshare(_NEWUSER), "a user namespace cannot be made")
        _say({"unshared": os.getpid()})
        line = sys.stdin.buffer.readline()
        if not line:
            return 1
        order = json.loads(line)
        _become_root(libc, order["parent"])
        _say({"result": _do(order)})
        return 0
    except BaseException as error:
        _say({"error": _told(error)})
        return 1


def _become_root(libc: ctypes.CDLL, parent: int) -> None:
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    _checked(libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    header = struct.pack("=II", 0x20080522, 0)
    _checked(libc.capset(header, struct.pack("=IIIIII", _CAPABILITIES, _CAPABILITIES, 0, 0, 0, 0)), "capabilities")
    _checked(libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "the parent's death")
    if os.getppid() != parent:
        raise SystemExit(1)


def _do(order: dict[str, Any]) -> dict[str, Any]:
    # run by path: the package must be importable, without shadowing anything
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from sloplet.images.jobs import JOBS

    os.umask(0)
    return JOBS[order["job"]](order["arguments"], order["fds"], lambda done: _say({"done": done}))


def _told(error: BaseException) -> dict[str, Any]:
    from sloplet.errors import SlopletError

    if isinstance(error, SlopletError):
        return error.to_dict()
    if isinstance(error, OSError) and error.errno:
        return {"error": "OSError", "errno": error.errno, "message": str(error.strerror)}
    return {"error": "EngineError", "message": f"unpacking failed: {type(error).__name__}: {error}", "hint": None}


if __name__ == "__main__":
    raise SystemExit(main())
