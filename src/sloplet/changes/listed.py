"""A listing made complete: from what an agent sees that sees no layers (gVisor's) to records that UNPACK takes.

A told folder has the names of all that is in it: what the image has there besides is gone. The runtime's own files
that name the sandbox are left out, unless somebody has changed them: another computer that starts with these files has
another name.
"""

from __future__ import annotations

import struct

from ..errors import ProtocolError
from ..wire.fields import MAX_RECORD, Fields, decode_fields, encode_record
from ..wire.schema import FileType, Tag
from . import made
from .base import Base
from .read import MAX_ENTRIES, MAX_TEXT, entry_name, entry_path
from .state import join

_LENGTH = struct.Struct("<I")
_TAG = struct.Struct("<H")
_SMALL = 65536  # bytes: no file of the runtime's is larger


class Completed:
    """Takes the stream of a listing with contents as it comes, and gives out complete records. Blocking, by what the
    base does. ProtocolError."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._rest = bytearray()  # less than a record
        self._folder: str | None = None  # the one whose names are being told
        self._names: set[str] = set()
        self._text = 0  # of these names
        self._body = 0  # bytes of the file that is held
        self._held: tuple[str, list[bytes]] | None = None  # a file that may be the runtime's, and its records
        self._skipping = False  # contents of what is left out

    def feed(self, data: bytes) -> bytes:
        self._rest += data
        out = bytearray()
        at = 0
        while len(self._rest) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest, at)
            if length > MAX_RECORD:
                raise ProtocolError(f"a record of {length} bytes is over the limit")
            end = at + _LENGTH.size + length
            if len(self._rest) < end:
                break
            self._take(bytes(self._rest[at:end]), out)
            at = end
        del self._rest[:at]
        return bytes(out)

    def finish(self) -> bytes:
        if self._rest:
            raise ProtocolError("a record is cut off")
        out = bytearray()
        self._leave_file(out)
        self._leave_folder(out)
        return bytes(out)

    def _take(self, record: bytes, out: bytearray) -> None:
        body = record[_LENGTH.size :]
        if len(body) >= _TAG.size and _TAG.unpack_from(body)[0] == Tag.OFFSET:
            if self._held is not None:
                self._body += len(record)
                if self._body > 2 * _SMALL + MAX_RECORD:
                    raise ProtocolError("the sandbox tells more of a file than it has")
                self._held[1].append(record)
            elif not self._skipping:
                out += record
            return
        self._leave_file(out)
        fields = decode_fields(body)
        path = entry_path(fields.raw(Tag.NAME))
        names = {entry_name(raw) for raw in fields.all(Tag.ENTRY)}
        if Tag.TYPE not in fields:
            if path != self._folder:
                raise ProtocolError("the sandbox lists what is in no folder")
            self._names |= names
            self._count(names)
            return
        self._leave_folder(out)
        self._skipping = made.never(path)
        kind = fields.integer(Tag.TYPE)
        if self._skipping:
            return
        if kind == FileType.DIR:
            self._folder, self._names, self._text = path, names, 0
            self._count(names)
            out += encode_record(Fields(*((tag, value) for tag, value in fields if tag is not Tag.ENTRY)))
        elif kind == FileType.FILE and made.names_it(path) and fields.integer(Tag.SIZE, 0) <= _SMALL:
            self._held, self._body = (path, [record]), 0
        else:
            out += record

    def _count(self, names: set[str]) -> None:
        self._text += sum(map(len, names))
        if len(self._names) > MAX_ENTRIES or self._text > MAX_TEXT:
            raise ProtocolError("the sandbox tells more names of a folder than can be held")

    def _leave_file(self, out: bytearray) -> None:
        """All of a file that may be the runtime's has come."""
        held, self._held = self._held, None
        if held is not None:
            path, records = held
            content = b"".join(decode_fields(record[_LENGTH.size :]).raw(Tag.BODY) for record in records[1:])
            if made.settled(path, None, content) != content:
                out += b"".join(records)

    def _leave_folder(self, out: bytearray) -> None:
        """All names of a folder have come: what is not among them was removed."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        for name in sorted(set(self._base.listdir(folder)) - self._names):
            path = join(folder, name)
            if not made.never(path):
                raw = path[1:].encode("utf-8", "surrogateescape")
                out += encode_record(Fields((Tag.NAME, raw), (Tag.TYPE, int(FileType.REMOVED))))
