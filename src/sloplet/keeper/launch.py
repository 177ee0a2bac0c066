"""Starting the keeper: detached, with next to nothing inherited, once however many ask at the same time.

The one who starts it holds ``run/keeper.start`` and waits on a pipe for the keeper's word that it listens (or why it
does not). The others wait for that lock and then find the keeper there. Blocking: call it in a thread.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import KeeperError, from_dict
from ..state.home import Home, unwritable
from ..state.locks import FileLock
from . import log_path, start_lock, unreachable

START_TIMEOUT = 30.0
MAX_LOG = 1 << 20
_KEPT = {
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH",
}  # fmt: skip
_KEPT_PREFIXES = ("SLOPLET_", "XDG_", "LC_")
_LEFT = {"SLOPLET_URL", "SLOPLET_KEY", "SLOPLET_CA"}  # of a server elsewhere: not this home's business


def start(home: Home) -> None:
    """Return once a keeper listens. KeeperError with what it said, or the tail of its log, if none comes up."""
    home.open()
    deadline = time.monotonic() + START_TIMEOUT
    path = home.socket_path()
    lock = FileLock.take(start_lock(home), wait=True)
    try:
        while not listens(path):
            if time.monotonic() > deadline:
                raise _failed(home, f"no keeper came up within {START_TIMEOUT:g} s")
            if "ready" in _spawn(home, deadline):
                return
    finally:
        if lock is not None:
            lock.release()


def listens(path: Path) -> bool:
    """Whether somebody listens on the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError as error:
            raise unreachable(path, error) from error
    return True


def environment(source: Mapping[str, str], home: Home) -> dict[str, str]:
    """What the keeper inherits: nothing of the caller's secrets, and nothing that changes from caller to caller; of
    where packages come from the hosts (for ``@package-indexes``)."""
    from ..network.configured import variables

    kept = variables(source)
    kept |= {key: value for key, value in source.items() if key in _KEPT or key.startswith(_KEPT_PREFIXES)}
    kept = {key: value for key, value in kept.items() if key not in _LEFT}
    kept["SLOPLET_HOME"] = os.fspath(home.path)
    return kept


def _spawn(home: Home, deadline: float) -> dict[str, Any]:
    """Start one and wait for its word: ready, or busy if another has the home (it may be leaving)."""
    if not sys.executable:
        raise KeeperError(
            "the keeper cannot be started: this program does not know its Python interpreter",
            hint="start it yourself: python -m sloplet.keeper",
        )
    program = Path(__file__).with_name("__main__.py")
    log = _open_log(home)
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            # The program forks at once and its parent half exits: no zombie, and nothing of ours to wait for.
            first = subprocess.Popen(
                [sys.executable, "-P", os.fspath(program), "--detach", str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment(os.environ, home),
                close_fds=True,
                pass_fds=(write_end,),
                start_new_session=True,
            )
        except OSError as error:
            raise KeeperError(f"the keeper cannot be started: {error}") from error
        os.close(write_end)
        write_end = -1
        first.wait()
        said = _read(read_end, deadline)
    finally:
        os.close(log)
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)
    if "error" in said:
        raise from_dict(said["error"])
    if not said:
        raise _failed(home, "the keeper did not start")
    return said


def _read(fd: int, deadline: float) -> dict[str, Any]:
    """The keeper's one line: {"ready": pid}, {"busy": true} if there is one, {"error": ...}; {} if nothing came."""
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(fd, 65536) if ready else b""
        if not piece:
            return {}
        data += piece
    said = json.loads(data)
    return said if isinstance(said, dict) else {}


def _open_log(home: Home) -> int:
    path = log_path(home)
    try:
        rotate(path)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unwritable(path, error) from error


def rotate(path: Path) -> bool:
    """Move a log that has grown too long aside; the one before it goes."""
    with suppress(FileNotFoundError):
        if os.stat(path).st_size > MAX_LOG:
            os.replace(path, path.with_suffix(".log.1"))
            return True
    return False


def _failed(home: Home, what: str) -> KeeperError:
    tail = ""
    with suppress(OSError), open(log_path(home), "rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - 2000))
        tail = log.read().decode("utf-8", "replace").strip()
    last = "\n".join(tail.splitlines()[-12:])
    return KeeperError(what + (f"; the end of its log:\n{last}" if last else ""), hint=f"see {log_path(home)}")
