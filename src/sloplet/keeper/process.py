"""The keeper as a process of its own: signals, limits, its name, its settings and its bounded log."""

from __future__ import annotations

import os
import resource
import signal
import time
import traceback
from asyncio import AbstractEventLoop
from contextlib import suppress
from typing import Any

from ..errors import SpecError
from ..state.home import Home
from . import log_path
from .launch import rotate

DEFAULT_IDLE = 2.0


def settings() -> float:
    """SLOPLET_KEEPER_IDLE: seconds after which a keeper that holds nothing leaves."""
    text = os.environ.get("SLOPLET_KEEPER_IDLE", "")
    if not text:
        return DEFAULT_IDLE
    try:
        idle = float(text)
    except ValueError:
        idle = -1.0
    if not 0 <= idle <= 86400 * 365:
        raise SpecError(f"SLOPLET_KEEPER_IDLE={text[:80]!r} is not a number of seconds", hint="for example 2")
    return idle


def settle() -> None:
    """Whoever started us may have left us odd signals, a mask, a low limit of files: begin clean. And leave no core
    behind, should we crash: values of secrets would be in it. (Sandboxes have their own limits of that.)"""
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write("sloplet-keeper")


class Log:
    """Lines with a time on stderr, which is the log file of a detached keeper; that is rotated at 1 MiB."""

    def __init__(self, home: Home, *, own_file: bool) -> None:
        self._path = log_path(home)
        self._own_file = own_file

    def __call__(self, message: str) -> None:
        if self._own_file:
            with suppress(OSError):
                if rotate(self._path):
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                    fd = os.open(self._path, flags, 0o600)
                    os.dup2(fd, 1)
                    os.dup2(fd, 2)
                    os.close(fd)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
        with suppress(OSError):
            os.write(2, f"{stamp} [{os.getpid()}] {message[:8000]}\n".encode("utf-8", "replace"))

    def exception(self, loop: AbstractEventLoop, context: dict[str, Any]) -> None:
        """For the event loop: a task that failed must be seen, and must not fill the disk."""
        error = context.get("exception")
        told = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else ""
        self(f"{context.get('message')}\n{told}".rstrip())
