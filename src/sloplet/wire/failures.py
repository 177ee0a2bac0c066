"""From an agent's errno to an error of our tree. Pure."""

from __future__ import annotations

import errno
import os

from ..errors import (
    CommandError,
    CommandNotExecutable,
    CommandNotFound,
    ProcessLimit,
    ProcessNotFound,
    SandboxError,
    SlopletError,
    UserNotFound,
    WorkdirInvalid,
    file_error,
)
from .fields import Fields
from .schema import Op, Tag

_PROCESS_OPS = {Op.EXEC, Op.ATTACH, Op.SIGNAL, Op.PS, Op.FORGET}
_FILE_OPS = {op for op in Op if Op.READ <= op <= Op.SETXATTRS}


def close_error(request: Fields, close: Fields) -> SlopletError:
    """The error that a CLOSE with ERRNO stands for. The message is the sandbox's: shown, never trusted."""
    number = close.integer(Tag.ERRNO)
    what = close.text(Tag.WHAT, "")
    message = _printable(close.text(Tag.MESSAGE, "")) or _strerror(number)
    op = request.integer(Tag.OP, 0)
    if what == "user":
        return UserNotFound(message, hint="use a name from the sandbox's /etc/passwd, or numbers as uid[:gid]")
    if what == "cwd":
        return WorkdirInvalid(message, hint="cwd must be an existing directory inside the sandbox")
    if what == "command":
        if number in (errno.EACCES, errno.ENOEXEC, errno.EPERM, errno.EISDIR):
            return CommandNotExecutable(message, hint="is it executable, and for this architecture?")
        return CommandNotFound(message, hint="is it installed in the image? A string is run by /bin/sh")
    if op in _PROCESS_OPS:
        if number == errno.ESRCH:
            return ProcessNotFound(message, hint="see box.processes()")
        if number == errno.EAGAIN:
            return ProcessLimit(message, hint="end some processes, or give the sandbox a larger pids=")
        if number == errno.E2BIG:
            return CommandError(message, hint="write long input to a file or to stdin instead of the command line")
        return CommandError(message)
    if what == "port":
        refused = number == errno.ECONNREFUSED
        return SandboxError(message, hint="does something listen on it inside, on 127.0.0.1?" if refused else None)
    if op in _FILE_OPS:
        return file_error(number, message)
    return SandboxError(message)


def _strerror(number: int) -> str:
    return os.strerror(number) if 0 < number < 4096 else f"error {number}"


def _printable(text: str, most: int = 500) -> str:
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= most else clean[: most - 3] + "..."
