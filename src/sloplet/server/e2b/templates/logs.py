"""The log of a build: entries that are only ever added, read by their number. In memory while it grows, then a file in
the tenant's ``cache/``."""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from ....fs import FILE, FOLDER, write_atomic
from ....state.home import Home
from ..documents import time_of

PAGE = 100
_MOST = 10_000  # entries
_MOST_LINE = 2048  # characters
_MOST_TEXT = 1 << 20  # characters of all
_MOST_FILE = 32 << 20
_REMEMBERED = 8
_LEVELS = {"debug": 0, "info": 1, "warn": 2, "error": 3}


class BuildLog:
    """Entries as clients read them."""

    def __init__(self, entries: list[dict[str, Any]] | None = None) -> None:
        self._entries = entries or []
        self._text = 0
        self._full = False

    def add(self, message: str, level: str = "info", step: str = "") -> None:
        """What comes when it is too long is left out, but for errors."""
        if self._full and level != "error":
            return
        message = message[:_MOST_LINE]
        self._text += len(message)
        if not self._full and (len(self._entries) >= _MOST or self._text > _MOST_TEXT):
            self._full = True
            message, level = "... the log is too long: the rest is left out ...", "warn"
        elif len(self._entries) > 2 * _MOST:
            return
        entry: dict[str, Any] = {"timestamp": time_of(time.time()), "message": message, "level": level}
        if step:
            entry["step"] = step
        self._entries.append(entry)

    def page(self, offset: int, limit: int = PAGE, level: str = "debug") -> list[dict[str, Any]]:
        """From the ``offset``-th on, of those of this level and above: the same ones whenever it is asked."""
        if _LEVELS.get(level, 0):
            wanted = [each for each in self._entries if _LEVELS[each["level"]] >= _LEVELS[level]]
        else:
            wanted = self._entries
        return wanted[offset : offset + min(limit, PAGE)]

    @property
    def entries(self) -> list[dict[str, Any]]:
        return self._entries


class BuildLogs:
    """Blocking."""

    def __init__(self) -> None:
        self._growing: dict[str, BuildLog] = {}
        self._read: OrderedDict[str, BuildLog] = OrderedDict()

    def begin(self, build: str) -> BuildLog:
        self._growing[build] = BuildLog()
        return self._growing[build]

    def finish(self, home: Home, build: str) -> None:
        log = self._growing.pop(build, None)
        if log is None:
            return
        self._remember(build, log)
        with suppress(OSError):  # a full disk takes the log, and not what was built
            folder = os.open(home.cache, FOLDER)
            try:
                write_atomic(folder, _name(build), json.dumps(log.entries).encode())
            finally:
                os.close(folder)

    def find(self, home: Home, build: str) -> BuildLog:
        """An empty one if there is none (any more)."""
        found = self._growing.get(build) or self._read.get(build)
        if found is None:
            found = BuildLog(_load(home.cache / _name(build)))
            self._remember(build, found)
        return found

    def forget(self, home: Home, build: str) -> None:
        self._read.pop(build, None)
        with suppress(OSError):
            os.unlink(home.cache / _name(build))

    def _remember(self, build: str, log: BuildLog) -> None:
        self._read[build] = log
        while len(self._read) > _REMEMBERED:
            self._read.popitem(last=False)


def _name(build: str) -> str:
    return f"e2b-log-{build}.json"


def _load(path: Path) -> list[dict[str, Any]]:
    try:
        fd = os.open(path, FILE)
        with os.fdopen(fd, "rb") as file:
            found = json.loads(file.read(_MOST_FILE))
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []
