"""Files into a sandbox as they are, with owners and modes: items as records for the agent (UNPACK, docs/wire.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..controller import Controller
from ..wire.fields import Fields, encode_record
from ..wire.mux import request
from ..wire.schema import ChangeFlag, FileType, Op, Tag
from .layertar import DEFAULT_EPOCH, Item, arranged
from .threads import in_thread

_BODY = 61440
_ENOUGH = 1 << 18


async def unpack_items(controller: Controller, sandbox_id: str, items: Iterable[Item]) -> None:
    """Make them below the sandbox's root. FileError; ``items`` are a tree (``arranged``)."""
    stream = await controller.open(sandbox_id, request(Op.UNPACK))
    source = _batches(_records(arranged(items)))
    try:
        while data := await in_thread(next, source, b""):
            await stream.send(data)
        await stream.send_end()
        await stream.result()
    except BaseException:
        stream.reset()
        raise


def _batches(records: Iterator[bytes]) -> Iterator[bytes]:
    batch = bytearray()
    for record in records:
        batch += record
        if len(batch) >= _ENOUGH:
            yield bytes(batch)
            batch.clear()
    if batch:
        yield bytes(batch)


def _records(items: list[Item]) -> Iterator[bytes]:
    for item in items:
        kind = {"folder": FileType.DIR, "symlink": FileType.SYMLINK}.get(item.kind, FileType.FILE)
        fields = Fields((Tag.NAME, _raw(item.path)), (Tag.TYPE, int(kind)), (Tag.SIZE, item.size))
        fields.add(Tag.MODE, item.mode & 0o7777).add(Tag.UID, item.uid).add(Tag.GID, item.gid).add(
            Tag.MTIME_NS, DEFAULT_EPOCH * 10**9
        )
        if item.kind == "symlink":
            fields.add(Tag.LINK, _raw(item.link))
        if item.kind == "hardlink":
            fields.add(Tag.FLAGS, int(ChangeFlag.HARD_LINK)).add(Tag.PATH2, _raw(item.link))
        yield encode_record(fields)
        if item.kind == "file" and item.data is not None:
            yield from _content(item.data())


def _content(pieces: Iterator[bytes]) -> Iterator[bytes]:
    offset = 0
    for piece in pieces:
        for at in range(0, len(piece), _BODY):
            body = piece[at : at + _BODY]
            yield encode_record(Fields((Tag.OFFSET, offset), (Tag.BODY, body)))
            offset += len(body)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
