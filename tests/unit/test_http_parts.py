"""The parts of the HTTP data plane by themselves: ranges, names, tars in drops, WebSockets that are held up."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.datastructures import Headers
from uvicorn import Config
from uvicorn.server import ServerState

from layer_kit import folder, member, symlink, tar
from sloplet.errors import ProtocolError, RequestInvalid, SpecError
from sloplet.server.rawnames import RawPath, named, path_of
from sloplet.server.reading import Facts, Part, unchanged, wanted
from sloplet.server.sockets import PatientWebSockets
from sloplet.server.sse import event
from sloplet.server.streams import ClientGone, while_connected
from sloplet.server.tarin import ArrivingTar, name_of
from sloplet.server.tarout import Ancestors

pytestmark = pytest.mark.anyone

FACTS = Facts(1000, 1_700_000_000_123_456_789, 0)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("", Part(0, 1000, True)), ("bytes=0-9", Part(0, 10, False)), ("bytes=990-5000", Part(990, 1000, False)),
        ("bytes=-10", Part(990, 1000, False)), ("bytes=-5000", Part(0, 1000, False)), ("bytes=-0", None),
        ("bytes=1000-", None), ("bytes=999-", Part(999, 1000, False)), ("bytes=9-3", Part(0, 1000, True)),
        ("bytes=-", Part(0, 1000, True)), ("bytes=1-2,4-5", Part(0, 1000, True)), ("Bytes=0-1", Part(0, 1000, True)),
        ("bytes=" + "9" * 18 + "-", None), ("bytes=" + "9" * 19 + "-", Part(0, 1000, True)),
    ],
)  # fmt: skip
def test_ranges(given: str, part: Part | None) -> None:
    assert wanted(Headers({"range": given}), FACTS) == part


def test_a_range_of_nothing() -> None:
    nothing = Facts(0, 0, 0)
    assert wanted(Headers({"range": "bytes=0-"}), nothing) is None
    assert wanted(Headers({"range": "bytes=-5"}), nothing) is None
    assert wanted(Headers({}), nothing) == Part(0, 0, True)


def test_validators_of_a_lying_sandbox() -> None:
    """Times of files are the sandbox's word: none of them may break the answer."""
    for moment in (0, -1, -(2**63), 2**63 - 1, 253_402_300_800 * 10**9):
        facts = Facts(5, moment, 0)
        assert facts.headers()["etag"].startswith('"')
        assert unchanged(Headers({"if-modified-since": facts.modified}), facts) in (True, False)
        assert unchanged(Headers({"if-none-match": facts.etag}), facts)


@pytest.mark.parametrize("given", ["soon", "", "Thu, 99 Jan 1970 00:00:00 GMT", "Thu, 01 Jan 99999 00:00:00 GMT"])
def test_dates_that_are_none(given: str) -> None:
    assert not unchanged(Headers({"if-modified-since": given}), FACTS)


def test_names() -> None:
    assert named("name", "plain ä") == {"name": "plain ä"}
    assert named("name", None) == {"name": None}
    assert named("name", os.fsdecode(b"x\xff")) == {"name": "x\ufffd", "name_base64": "eP8="}
    assert path_of(RawPath(base64="eP8=")) == os.fsdecode(b"x\xff")
    with pytest.raises(SpecError):
        path_of(RawPath(base64="e"))
    assert event("a", {"x": "ä\udcff\n"}) == b'event: a\ndata: {"x":"\xc3\xa4\\udcff\\n"}\n\n'


@pytest.mark.parametrize(
    "told",
    [
        [(b"a/b", False)], [(b"l", False), (b"l/x", False)], [(b"a", True), (b"b/c", False)], [(b"..", True)],
        [(b"a", True), (b"a/../b", False)], [(b"/etc", False)], [(b"a//b", False)], [(b"", True)],
        [(b"x" * 256, False)],
        [(b"a", True), (b"a/b", False), (b"a", False), (b"a/c", False)], [(b"a\0b", False)],
    ],
)  # fmt: skip
def test_a_walk_that_lies(told: list[tuple[bytes, bool]]) -> None:
    def walk() -> None:
        ancestors = Ancestors()
        for name, is_folder in told:
            ancestors.check(name, is_folder)

    with pytest.raises(ProtocolError):
        walk()


def test_a_walk() -> None:
    ancestors = Ancestors()
    for name, is_folder in [
        (b"a", True), (b"a/b", True), (b"a/b/c", False), (b"a/d", False), (b"e", False), (b"f", True), (b"f/a", False),
    ]:  # fmt: skip
        ancestors.check(name, is_folder)


@pytest.mark.parametrize(
    ("raw", "name"), [(b"./a//b/", "a/b"), (b".", ""), (b"./", ""), (b"a/./b", "a/b"), (b"\xff", "\udcff")]
)
def test_names_in_tars(raw: bytes, name: str) -> None:
    assert name_of(raw) == name


@pytest.mark.parametrize("raw", [b"/a", b"..", b"a/..", b"a/../b", b"../a", b"x" * 5000])
def test_names_that_lead_out(raw: bytes) -> None:
    with pytest.raises(RequestInvalid):
        name_of(raw)


async def drops(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def members(data: bytes, size: int) -> list[tuple[bytes, str, bytes]]:
    found = []
    arriving = ArrivingTar(drops(data, size))
    while (entry := await arriving.next()) is not None:
        found.append((entry.name, entry.kind, b"".join([piece async for piece in arriving.content()])))
    return found


@pytest.mark.parametrize("size", [1, 7, 511, 512, 513, 4096, 1 << 20])
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_tar_in_drops(size: int, form: int) -> None:
    long = "long/" * 60 + "name"
    data = tar(folder("d"), member("d/a", b"x" * 1000), member(long, b"y" * 513), symlink("l", "t" * 200), form=form)
    found = asyncio.run(members(data, size))
    assert found == [
        (b"d/", "folder", b""), (b"d/a", "file", b"x" * 1000), (long.encode(), "file", b"y" * 513),
        (b"l", "symlink", b""),
    ]  # fmt: skip


def test_content_that_nobody_reads_is_passed_over() -> None:
    async def names() -> list[bytes]:
        arriving, found = ArrivingTar(drops(tar(member("a", b"x" * 3000), member("b", b"")), 100)), []
        while (entry := await arriving.next()) is not None:
            found.append(entry.name)
        return found

    assert asyncio.run(names()) == [b"a", b"b"]


@pytest.mark.parametrize("cut", [1, 511, 600, 1024, 1500, 3000])
def test_a_tar_that_is_cut(cut: int) -> None:
    with pytest.raises(RequestInvalid):
        asyncio.run(members(tar(member("a", b"x" * 2000), member("b", b"y" * 2000))[:cut], 100))


def test_headers_without_end() -> None:
    """Extension headers that go on and on, byte by byte, cost neither memory nor time."""
    record = b"".join(b"12 a%06d=\n" % number for number in range(15_000))
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    head = info.tobuf(tarfile.USTAR_FORMAT)
    one = head + record + bytes(-len(record) % 512)
    before = time.process_time()
    with pytest.raises(RequestInvalid, match="too long"):
        asyncio.run(members(one * 3, 64))
    assert asyncio.run(members(one + tar(member("a", b"x")), 64)) == [(b"a", "file", b"x")]
    assert time.process_time() - before < 3  # read again for each drop, it would be minutes


def test_work_ends_with_its_client() -> None:
    ended: list[str] = []

    async def work() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")
        return ""

    async def gone() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def quick() -> int:
        return 5

    async def main() -> None:
        with pytest.raises(ClientGone):
            await while_connected(gone, work())
        assert ended == ["ended"]
        assert await while_connected(never, quick()) == 5
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await while_connected(never, work())
        assert ended == ["ended", "ended"]

    asyncio.run(main())


class _Transport(asyncio.Transport):
    """What a WebSocket writes to, and how much of it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self.written = io.BytesIO()
        self.closed = ""

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def write(self, data: Any) -> None:
        self.written.write(data)

    def is_closing(self) -> bool:
        return bool(self.closed)

    def close(self) -> None:
        self.closed = "close"

    def abort(self) -> None:
        self.closed = "abort"

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@pytest.mark.parametrize(
    ("read_paused", "writable", "closed"), [(False, True, "close"), (True, True, ""), (False, False, "")]
)
def test_one_that_is_held_up_is_not_dead(read_paused: bool, writable: bool, closed: str) -> None:
    async def main() -> None:
        config = Config(lambda: None, ws_ping_interval=1000.0, ws_ping_timeout=1000.0, log_config=None)
        protocol, transport = PatientWebSockets(config, ServerState(), {}), _Transport()
        protocol.connection_made(transport)
        protocol.read_paused = read_paused
        if not writable:
            protocol.pause_writing()
        protocol.keepalive_timeout()
        assert transport.closed == closed
        assert (protocol.ping_timer is not None) == (not closed)  # it is asked again
        protocol.stop_keepalive()

    asyncio.run(main())


@pytest.mark.parametrize(("waiting", "closed"), [(0, ""), (2 << 20, "abort")])
def test_pings_whose_answers_nobody_reads(waiting: int, closed: str) -> None:
    async def main() -> None:
        protocol, transport = PatientWebSockets(Config(lambda: None, log_config=None), ServerState(), {}), _Transport()
        protocol.connection_made(transport)
        transport.waiting = waiting
        protocol.handle_ping()
        assert transport.closed == closed

    asyncio.run(main())
