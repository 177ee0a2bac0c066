"""What a hostile agent can make ``files`` hold: bounded, whatever it tells."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sloplet.controller import Data
from sloplet.errors import FileError
from sloplet.files import AsyncFiles
from sloplet.wire.fields import Fields, encode_record
from sloplet.wire.schema import FileType, Tag

pytestmark = pytest.mark.anyone


class Endless:
    """A stream that tells the same again and again, up to a number of times that no honest agent comes near."""

    def __init__(self, data: bytes, most: int) -> None:
        self.data, self.left = data, most

    async def recv(self) -> Data | None:
        self.left -= 1
        return Data(0, self.data) if self.left >= 0 else None

    async def result(self) -> Fields:
        return Fields()

    def reset(self) -> None:
        pass


def _files(data: bytes, most: int) -> tuple[AsyncFiles, Endless]:
    stream = Endless(data, most)

    async def opened(fields: Fields) -> Any:
        return stream

    return AsyncFiles(opened), stream


@pytest.mark.parametrize(
    ("record", "most"),
    [
        (Fields((Tag.ATTRIBUTE, b"user.same\0" + b"x" * 60000)), 1000),
        (Fields((Tag.ATTRIBUTE, b"")), 3_000_000),
        (Fields(), 3_000_000),
    ],
    ids=["large", "empty", "nothing"],
)
def test_attributes_without_end(record: Fields, most: int) -> None:
    files, stream = _files(encode_record(record) * (most // 1000), 1000)
    with pytest.raises(FileError, match="more attributes"):
        asyncio.run(files.attributes("f"))
    assert stream.left > 0


def test_all_that_an_agent_may_tell_is_taken() -> None:
    told = [b"user.%03d\0" % n + b"x" * 5000 for n in range(200)]
    files, _ = _files(b"".join(encode_record(Fields((Tag.ATTRIBUTE, each))) for each in told), 1)
    assert len(asyncio.run(files.attributes("f"))) == 200


@pytest.mark.parametrize("tag", [Tag.OWNER, Tag.GROUP])
def test_names_of_owners_count(tag: Tag) -> None:
    entry = Fields((Tag.NAME, "f"), (Tag.TYPE, int(FileType.FILE)), (Tag.SIZE, 0), (Tag.MODE, 0), (Tag.UID, 0))
    entry.add(Tag.GID, 0).add(Tag.MTIME_NS, 0).add(tag, "x" * 60000)
    files, stream = _files(encode_record(entry), 3000)
    with pytest.raises(FileError, match="listed at once"):
        asyncio.run(files.list("/", owners=True))
    assert stream.left > 0
