"""The same client without blocking; what it does by streams where the other asks again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from e2b.exceptions import NotFoundException

from e2b import AsyncSandbox, CommandExitException, FilesystemEventType, PtySize, TimeoutException

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def box() -> AsyncIterator[AsyncSandbox]:
    made = await AsyncSandbox.create(timeout=120)
    yield made
    await made.kill()


async def test_commands(box: AsyncSandbox) -> None:
    assert (await box.commands.run("echo hello")).stdout == "hello\n"
    with pytest.raises(CommandExitException):
        await box.commands.run("exit 1")
    with pytest.raises(TimeoutException):
        await box.commands.run("sleep 1000", timeout=1)
    handle = await box.commands.run("cat", background=True, stdin=True)
    await box.commands.send_stdin(handle.pid, "hi")
    await box.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == "hi"


async def test_many_at_a_time(box: AsyncSandbox) -> None:
    found = await asyncio.gather(*(box.commands.run(f"echo {n}; sleep 0.2") for n in range(20)))
    assert [each.stdout for each in found] == [f"{n}\n" for n in range(20)]


async def test_files(box: AsyncSandbox) -> None:
    await box.files.write("a/file", "text")
    assert await box.files.read("a/file") == "text"
    assert [entry.name for entry in await box.files.list("a")] == ["file"]
    assert (await box.files.get_info("a/file")).size == 4
    stream = await box.files.read("a/file", format="stream")
    assert b"".join([piece async for piece in stream]) == b"text"
    with pytest.raises(NotFoundException):
        await box.files.read("nothing")


async def test_watching_by_a_stream(box: AsyncSandbox) -> None:
    await box.files.make_dir("watched")
    events: asyncio.Queue[object] = asyncio.Queue()
    handle = await box.files.watch_dir("watched", on_event=events.put_nowait, recursive=True)
    await box.files.write("watched/new", "x")
    found = [await asyncio.wait_for(events.get(), 10) for _ in range(3)]
    assert [(event.name, event.type) for event in found] == [  # type: ignore[attr-defined]
        ("new", FilesystemEventType.CREATE), ("new", FilesystemEventType.CHMOD), ("new", FilesystemEventType.WRITE),
    ]  # fmt: skip
    await handle.stop()
    with pytest.raises(NotFoundException):
        await box.files.watch_dir("nothing", on_event=events.put_nowait)


async def test_a_terminal(box: AsyncSandbox) -> None:
    said: list[bytes] = []

    async def on_data(data: bytes) -> None:
        said.append(data)

    terminal = await box.pty.create(PtySize(rows=24, cols=80), on_data=on_data)
    await box.pty.send_stdin(terminal.pid, b"echo $((6*7)); exit\n")
    assert (await terminal.wait()).exit_code == 0
    assert b"42" in b"".join(said)


async def test_life(box: AsyncSandbox) -> None:
    assert await box.is_running()
    other = await AsyncSandbox.connect(box.sandbox_id)
    assert (await other.get_info()).sandbox_id == box.sandbox_id
    await box.set_timeout(50)
    assert await box.kill() is True
    assert await box.is_running() is False
