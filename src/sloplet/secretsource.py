"""Where the value of a secret is read from: what a command prints, or a file.

No error made here holds a part of a value, not even as its context: what is caught is left before anything is raised.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from .errors import SecretUnavailable

_LINE_ENDS = 16  # bytes after a value that are no part of it
_TICK = 0.1  # how soon a command is ended that nobody waits for any more
_REAP_SECONDS = 1.0  # one that may not be killed (a setuid program) is left alone


def printed(argv: Sequence[str], most: int, seconds: float, stop: threading.Event | None = None) -> str:
    """What a command prints, without the line break at its end. SecretUnavailable: it cannot be run, fails, prints more
    than ``most`` bytes, or takes longer than ``seconds``; then nothing of it goes on to run. ``stop``: end it now."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except (OSError, ValueError):
        process = None
    if process is None:
        raise SecretUnavailable(f"the secret's command ({argv[0]}) could not be started")
    assert process.stdout is not None
    over = False
    try:
        until = time.monotonic() + seconds
        raw = _read(process.stdout.fileno(), most + _LINE_ENDS, until, stop)
        over = raw is not None and len(raw) <= most + _LINE_ENDS and _ended(process, until, stop)
    finally:
        process.stdout.close()
        if not over:
            _end(process)
    if raw is not None and len(raw) > most + _LINE_ENDS:
        raise SecretUnavailable(f"the secret's command ({argv[0]}) prints more than {most} bytes")
    if raw is None or not over:
        raise SecretUnavailable(f"the secret's command ({argv[0]}) took too long")
    if process.returncode != 0:
        raise SecretUnavailable(
            f"the secret's command ({argv[0]}) ended with {process.returncode}", hint="run it by hand to see why"
        )
    return _text(raw)


def read_file(path: str, most: int) -> str:
    """What is in a file, or comes from stdin (``-``), without the line break at its end. SecretUnavailable."""
    raw, why = b"", ""
    try:
        if path == "-":
            raw = sys.stdin.buffer.read(most + _LINE_ENDS + 1)
        else:
            with open(path, "rb") as file:
                raw = file.read(most + _LINE_ENDS + 1)
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    if len(raw) > most + _LINE_ENDS:
        why = f"is longer than {most} bytes"
    text = _text(raw)
    if not why and not is_text(text):
        why = "is not UTF-8 text"
    if why:
        raise SecretUnavailable(f"the secret's file {path[:200]!r} {why}")
    return text


def is_text(value: str) -> bool:
    """Whether no byte of it was none when it was read (``_text``)."""
    return not any(0xD800 <= ord(char) <= 0xDFFF for char in value)


def _text(raw: bytes) -> str:
    """Bytes that are no text become what no value may hold."""
    return raw.decode("utf-8", "surrogateescape").rstrip("\r\n")


def _read(pipe: int, most: int, until: float, stop: threading.Event | None) -> bytes | None:
    """All that comes, or a little more than ``most`` bytes of it; None: not in time."""
    found = b""
    ready = select.poll()
    ready.register(pipe, select.POLLIN)
    while len(found) <= most:
        if not _time_left(until, stop):
            return None
        if ready.poll(_TICK * 1000):
            piece = os.read(pipe, 65536)
            if not piece:
                break
            found += piece
    return found


def _ended(process: subprocess.Popen[bytes], until: float, stop: threading.Event | None) -> bool:
    while _time_left(until, stop):
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TICK)
            return True
    return False


def _time_left(until: float, stop: threading.Event | None) -> bool:
    return time.monotonic() < until and not (stop is not None and stop.is_set())


def _end(process: subprocess.Popen[bytes]) -> None:
    """It, and what it has started. It is not reaped yet, so its number is nobody else's."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_SECONDS)
