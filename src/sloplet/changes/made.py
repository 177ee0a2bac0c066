"""What the runtime itself writes into every sandbox: nobody's change.

Mounts and /run/sloplet are never compared. Folders that the agent makes (the working directory, a home) are not told,
only what is in them. The few files of /etc that it writes are compared with what it would have written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..images import host

_NEVER = ("/proc", "/sys", "/dev", "/run/sloplet", "/.sloplet", "/tmp/.sloplet-code")
_FOLDERS = ("/etc", "/run", "/tmp", "/home", "/home/agent", "/root", "/workspace")
_NAME = rb"[A-Za-z0-9._-]{1,64}"
_NAMING = {
    file.path: re.compile(re.escape(file.content).replace(b"HOSTNAME", _NAME)) for file in host.naming_files("HOSTNAME")
}
_USER = {
    "/etc/passwd": re.compile(rb"\n?agent:x:\d+:\d+::[^:\n]*:[^:\n]*\n"),
    "/etc/group": re.compile(rb"\n?agent:x:\d+:\n"),
}

#: Files of which ``settled`` may know better than the image what they were.
SPECIAL = frozenset(_NAMING) | frozenset(_USER)


def never(path: str) -> bool:
    """Whether a path is no file of the sandbox's: a mount, or the runtime's own."""
    return path.startswith(_NEVER) and any(host.below(path, folder) for folder in _NEVER)


def folders(paths: Iterable[str] = ()) -> frozenset[str]:
    """Folders whose making is the runtime's: the usual ones, and ``paths`` (the working directory) with all above."""
    found = set(_FOLDERS)
    for path in paths:
        while path.strip("/"):
            found.add(path.rstrip("/"))
            path = path.rstrip("/").rpartition("/")[0]
    return frozenset(found)


def settled(path: str, old: bytes | None, new: bytes) -> bytes | None:
    """The content that a SPECIAL file had when the runtime was done with it; None: there was no such file."""
    pattern = _NAMING.get(path)
    if pattern is not None:
        return new if pattern.fullmatch(new) else old
    before = old or b""
    if not new.startswith(before):
        return old
    line = _USER[path].match(new, len(before))
    if line is None or (line[0].startswith(b"\n") != bool(before and not before.endswith(b"\n"))):
        return old
    return new[: line.end()]


def names_it(path: str) -> bool:
    """Whether that file is the runtime's as a whole: its mode and owner are, too."""
    return path in _NAMING
