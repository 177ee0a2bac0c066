"""A fingerprint of this machine's own programs, for sandboxes with ``image="host"``: cheap, and equal on machines that
have the same packages. What it misses (a program of one's own in /usr/local), the engine finds when it restores."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator

_FILES = ("/etc/os-release", "/var/lib/dpkg/status", "/lib/apk/db/installed")
#: Large databases: their size and time tell enough.
_FACTS = ("/var/lib/rpm/rpmdb.sqlite", "/usr/lib/sysimage/rpm/rpmdb.sqlite", "/var/lib/pacman/local")


def fingerprint() -> str:
    """sha256, in hex."""
    hashed = hashlib.sha256()
    for part in _parts():
        hashed.update(b"%d " % len(part) + part)
    return hashed.hexdigest()


def _parts() -> Iterator[bytes]:
    yield os.uname().machine.encode()
    for path in _FILES:
        try:
            with open(path, "rb") as file:
                yield hashlib.sha256(file.read()).digest()
        except OSError:
            yield b""
    for path in _FACTS:
        try:
            info = os.stat(path)
            yield b"%d %d" % (info.st_size, info.st_mtime_ns)
        except OSError:
            yield b""
    for text in (sys.version, *(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix))):
        yield os.fsencode(text)  # its folders are in view of the sandbox, under these names
