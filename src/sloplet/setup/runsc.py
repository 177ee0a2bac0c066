"""gVisor's program: where it is and which release it is. Its answer is kept in SLOPLET_HOME/cache, by the file's own
time and size: to ask costs 20 ms."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..state.home import Home
from . import tools

VARIABLE = "SLOPLET_RUNSC"
_CACHE = "runsc.json"

_known: dict[str, str] = {}


@dataclass(frozen=True)
class Runsc:
    """A program that is here. ``date`` None: it does not run, or says no version."""

    path: Path
    version: str = ""
    date: int | None = None

    @property
    def good(self) -> bool:
        return self.date is not None and self.date >= tools.RUNSC_OLDEST


def parse_version(text: str) -> str:
    """ "release-20240729.0" out of what ``runsc --version`` says, however it was built."""
    match = re.search(r"(?<!\d)(20\d{6}(?:\.\d+)?)", text)
    return f"release-{match[1]}" if match else ""


def find(home: Home | None = None) -> Runsc | None:
    """The runsc to use: $SLOPLET_RUNSC, SLOPLET_HOME/bin, the PATH. None: there is none."""
    named = os.environ.get(VARIABLE)
    path = Path(named) if named else tools.find_tool("runsc", home)
    if path is None:
        return None
    try:
        path = path.resolve(strict=True)
        info = path.stat()
    except OSError:
        return Runsc(path)
    key = f"{path} {info.st_mtime_ns} {info.st_size}"
    version = _recall(key, home)
    if version is None:
        version = parse_version(tools.version_text(path))
        _remember(key, version, home)
    return Runsc(path, version, tools.runsc_date(version))


def _cache_file(home: Home | None) -> Path:
    return (home or Home()).cache / _CACHE


def _recall(key: str, home: Home | None) -> str | None:
    if key in _known:
        return _known[key]
    try:
        known = json.loads(_cache_file(home).read_text())
        return str(known[key]) or None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(key: str, version: str, home: Home | None) -> None:
    _known[key] = version
    path = _cache_file(home)
    if not version or not path.parent.is_dir():
        return
    fresh = path.with_name(f".{_CACHE}.{os.getpid()}")
    with contextlib.suppress(OSError):
        fresh.write_text(json.dumps({key: version}))
        os.replace(fresh, path)
