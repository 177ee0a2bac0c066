"""Files as E2B's ``EntryInfo`` has them. Pure."""

from __future__ import annotations

import posixpath
import stat
from typing import Any

from ...results import FileInfo
from .documents import time_of

PREFIX = "user.e2b."  #: of extended attributes that are E2B's metadata
_TYPES = {"file": "FILE_TYPE_FILE", "dir": "FILE_TYPE_DIRECTORY"}
_MOST_METADATA = 4096


def entry(info: FileInfo, path: str) -> dict[str, Any]:
    """What is at ``path``. A link is told as what it leads to."""
    target = info.leads_to
    kind = target.type if target is not None else info.type
    found: dict[str, Any] = {
        "name": posixpath.basename(path.rstrip("/")) or "/",
        "path": path,
        "size": str(info.size or (4096 if info.type == "dir" else 0)),
        "mode": (target.mode if target is not None else info.mode) & 0o7777,
        "permissions": permissions(info.type, info.mode),
        "owner": info.owner if info.owner is not None else str(info.uid),
        "group": info.group if info.group is not None else str(info.gid),
        "modifiedTime": time_of(info.modified),
    }
    if kind in _TYPES:
        found["type"] = _TYPES[kind]
    if info.type == "symlink" and target is not None and target.path is not None:
        found["symlinkTarget"] = target.path
    if metadata := metadata_of(info):
        found["metadata"] = metadata
    return found


def metadata_of(info: FileInfo) -> dict[str, str]:
    found = {}
    for name, value in info.attributes.items():
        try:
            found[name.removeprefix(PREFIX)] = value.decode("utf-8")
        except UnicodeDecodeError:
            continue
    return found


def permissions(kind: str, mode: int) -> str:
    """In Go's words: ``drwxr-xr-x``, ``Lrwxrwxrwx``, ``urwxr-xr-x``."""
    first = {"dir": "d", "symlink": "L"}.get(kind, "")
    special = [(stat.S_ISUID, "u"), (stat.S_ISGID, "g"), (stat.S_ISVTX, "t")]
    first += "".join(letter for bit, letter in special if mode & bit)
    bits = "".join(letter if mode & (1 << (8 - at)) else "-" for at, letter in enumerate("rwxrwxrwx"))
    return (first or "-") + bits


def metadata_asked(headers: list[tuple[bytes, bytes]]) -> dict[str, str] | str:
    """What ``X-Metadata-*`` headers say; or what is wrong with it."""
    found: dict[str, str] = {}
    for raw, value in headers:
        name = raw.decode("latin-1").lower()
        if not name.startswith("x-metadata-") or not (key := name.removeprefix("x-metadata-")):
            continue
        if not all(32 <= each < 127 for each in value) or not all(" " <= each <= "~" for each in key):
            return f"metadata {key[:80]!r} must be printable ASCII"
        if len(PREFIX) + len(key) > 255:
            return f"the metadata key {key[:40]!r}... is too long"
        found.setdefault(key, value.decode("ascii"))
    if sum(len(PREFIX) + len(key) + len(value) for key, value in found.items()) > _MOST_METADATA:
        return f"metadata is longer than {_MOST_METADATA} bytes"
    return found
