"""The records of CHANGES as entries. Whatever the sandbox says is checked here, once."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from ..controller import Stream
from ..errors import FileError, ProtocolError
from ..wire.fields import Fields
from ..wire.schema import ChangeFlag, FileType, ListingFlag, Tag

MAX_ENTRIES = 1_000_000
MAX_TEXT = 128 * 2**20  # of names and link texts, all together
_MAX_SIZE = 2**62
_TYPES: dict[int, str] = {
    FileType.FILE: "file",
    FileType.DIR: "dir",
    FileType.SYMLINK: "symlink",
    FileType.OTHER: "other",
}
REMOVED = "removed"
_PART = rb"(?!\.\.?(?:/|\Z))[^/\0]{1,255}"
_PATH = re.compile(_PART + rb"(?:/" + _PART + rb")*")


class Entry(NamedTuple):
    """What the sandbox says of one path."""

    type: str  #: file, dir, symlink, other, removed
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    target: str = ""  #: of a symlink
    opaque: bool = False  #: a folder that hides the image's of that name
    link: str | None = None  #: the path of another entry that is the same file (a hard link)


@dataclass
class Listing:
    """All that one CHANGES told. Paths are absolute; names are text with surrogates for bytes that are not UTF-8."""

    complete: bool  #: only changes are listed, removed ones too; otherwise folders are listed, with ``names``
    entries: dict[str, Entry] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)  #: of each folder, where not complete


class Collector:
    """Takes records one by one; FileError when there are more than can be compared. ``prefix``: the folder that names
    are relative to."""

    def __init__(self, complete: bool, prefix: str = "/") -> None:
        self.listing = Listing(complete)
        self._prefix = prefix.rstrip("/")
        self._count = self._text = 0

    def add(self, record: Fields) -> str:
        """Note a record, return its path. Of two for one path the last counts: a folder that is written to while it
        is read may tell a name twice."""
        path = self._prefix + entry_path(record.raw(Tag.NAME))
        if path != "/":
            path = path.rstrip("/")
        if Tag.TYPE in record or path not in self.listing.names:
            self._note(path, _entry(record, self._prefix))
        for raw in record.all(Tag.ENTRY):
            if path not in self.listing.names:
                raise ProtocolError("the sandbox lists what is in no folder")
            name = entry_name(raw)
            self._count_one(len(name))
            self.listing.names[path].add(name)
        return path

    def _note(self, path: str, entry: Entry) -> None:
        if path == (self._prefix or "/") and entry.type != "dir":
            raise ProtocolError("the sandbox says that its root is no folder")
        self._count_one(len(path) + len(entry.target))
        self.listing.entries[path] = entry
        self.listing.names.pop(path, None)
        if not self.listing.complete and entry.type == "dir":
            self.listing.names[path] = set()

    def _count_one(self, text: int) -> None:
        self._count += 1
        self._text += text
        if self._count > MAX_ENTRIES or self._text > MAX_TEXT:
            raise FileError(
                "the sandbox has changed more files than can be compared", errno=errno.E2BIG,
                hint=f"{MAX_ENTRIES:,} at most: remove what is not needed inside, or download() what is",
            )  # fmt: skip


async def read_listing(stream: Stream, prefix: str = "/") -> Listing:
    """Everything that a CHANGES stream tells. Raises the operation's own error, ProtocolError, FileError."""
    from ..files import records

    try:
        flags = (await stream.started()).integer(Tag.FLAGS, 0)
        collector = Collector(bool(flags & ListingFlag.COMPLETE), prefix)
        async for record in records(stream):
            collector.add(record)
        return collector.listing
    finally:
        stream.reset()


def entry_path(raw: bytes) -> str:
    """An absolute path out of a NAME: relative to the root, without ``.``, ``..`` and empty parts."""
    if raw == b".":
        return "/"
    if not _PATH.fullmatch(raw):
        raise ProtocolError(f"the sandbox names a file {raw[:200]!r}, which is not a name")
    return "/" + raw.decode("utf-8", "surrogateescape")


def entry_name(raw: bytes) -> str:
    if b"/" in raw:
        raise ProtocolError(f"the sandbox names a file {raw[:200]!r}, which is not a name")
    return entry_path(raw)[1:]


def _entry(record: Fields, prefix: str) -> Entry:
    number = record.integer(Tag.TYPE)
    if number == FileType.REMOVED:
        return Entry(REMOVED)
    kind = _TYPES.get(number)
    if kind is None:
        raise ProtocolError(f"the sandbox tells of a file of the unknown type {number}")
    size = record.integer(Tag.SIZE, 0)
    if not 0 <= size <= _MAX_SIZE:
        raise ProtocolError(f"the sandbox tells of a file of {size} bytes")
    flags = record.integer(Tag.FLAGS, 0)
    target = record.raw(Tag.LINK, b"")
    link = None
    if flags & ChangeFlag.HARD_LINK and kind == "file":
        link = prefix + entry_path(record.raw(Tag.PATH2))
    return Entry(
        type=kind,
        mode=record.integer(Tag.MODE, 0) & 0o7777,
        uid=record.integer(Tag.UID, 0),
        gid=record.integer(Tag.GID, 0),
        size=size if kind == "file" else 0,
        target=target.decode("utf-8", "surrogateescape") if kind == "symlink" else "",
        opaque=bool(flags & ChangeFlag.OPAQUE),
        link=link,
    )
