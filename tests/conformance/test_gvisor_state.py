"""Saving and restoring at the level of the engine: memory, files, sockets, two copies of one state, and what fails."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from gvisor_kit import Held, engine, made, started

from sloplet.engines import cgroups, registry
from sloplet.engines.machine import machine
from sloplet.errors import SaveFailed, StartFailed
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home
from sloplet.sync import Sandbox
from sloplet.testing.leaks import Snapshot, adopted_orphans, settled, snapshot
from sloplet.wire.schema import Op

#: Counts in its memory, and says so to whoever connects.
COUNTER = """
import socket
server = socket.create_server(("127.0.0.1", 8080))
count = 0
while True:
    client = server.accept()[0]
    count += 1
    client.sendall(str(count).encode())
    client.close()
"""
ASK = """
import socket
print(socket.create_connection(("127.0.0.1", 8080)).recv(100).decode())
"""
WAIT_FOR_IT = "until python3 /workspace/ask 2>/dev/null; do :; done"


@pytest.fixture(autouse=True)
def gvisor(runsc_is_here: None) -> None:
    probe = registry.load("gvisor").probe()
    if not probe.available:
        pytest.skip(f"capability: gvisor cannot run here: {probe.reason}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    path.mkdir(mode=0o700)
    return path


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        asyncio.run(test(folder))

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


async def said(box: Held, script: str, user: str = "") -> str:
    result = await box.run("sh", "-c", script, user=user)
    assert result.ok, result
    return str(result.stdout)


async def count(box: Held) -> int:
    return int(await said(box, "python3 /workspace/ask"))


async def prepare(box: Held) -> None:
    """A server that counts, a file, a removed one, and a file of another user's."""
    await said(box, f"cat > /workspace/server <<'END'\n{COUNTER}END\ncat > /workspace/ask <<'END'\n{ASK}END")
    await said(box, "python3 /workspace/server >/dev/null 2>&1 & " + WAIT_FOR_IT)
    await said(box, "echo kept > /workspace/file; mkdir /workspace/deep; echo 2 > /workspace/deep/2")
    await said(box, "echo roots > /root/own; chmod 600 /root/own; rm /etc/services", user="root")


@asynchronous
async def test_two_copies_of_one_state(folder: Path) -> None:
    """Memory, files and a listening socket go on, twice, and the copies and the original know nothing of each other."""
    async with started() as original:
        await prepare(original)
        assert await count(original) == 2  # the first was the wait's
        await original.save(folder)
        async with started(folder) as one, started(folder) as two:
            assert [await count(one), await count(one), await count(one)] == [3, 4, 5]
            assert await count(two) == 3
            assert await count(original) == 3
            for box in (one, two, original):
                assert (
                    await said(box, "cat /workspace/file /workspace/deep/2; cat /root/own", "root")
                    == "kept\n2\nroots\n"
                )
                assert not (await box.run("cat", "/root/own")).ok
                assert not (await box.run("test", "-e", "/etc/services")).ok
            await said(one, "echo changed > /workspace/file; rm -r /workspace/deep")
            assert await said(two, "cat /workspace/file /workspace/deep/2") == "kept\n2\n"
            names = {await said(box, "hostname") for box in (one, two, original)}
            assert len(names) == 3


@asynchronous
async def test_stop_ends_everything(folder: Path) -> None:
    async with started() as box:
        await said(box, "echo x > /workspace/file; sleep 1000 >/dev/null 2>&1 &")
        pids = box.instance.pids()
        assert len(pids) > 2
        await box.save(folder, stop=True)
        await asyncio.wait_for(box.instance.wait(), 5)
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}/ns")]
    async with started(folder) as again:
        assert await said(again, "cat /workspace/file; pgrep -c sleep") == "x\n1\n"
        assert oct(folder.stat().st_mode)[-3:] == "755"
        assert {path.stat().st_uid for path in folder.iterdir()} == {os.geteuid()}


@asynchronous
async def test_limits_hold_in_a_copy(folder: Path) -> None:
    """The process limit is gVisor's, the memory limit the agent's: neither is forgotten."""
    bomb = "i=0; while [ $i -lt 200 ]; do sleep 1000 & i=$((i+1)); done; echo all"
    spec = SandboxSpec.make(pids=30, memory="128m", allow_weaker=True)
    async with started(spec=spec) as box:
        await box.save(folder, stop=True)
    async with started(folder, spec) as copy:
        result = await copy.run("sh", "-c", bomb)
        assert "all" not in result.stdout
        assert "fork" in result.stderr.lower()
    async with started(folder, spec) as copy:
        result = await copy.run("sh", "-c", "head -c 400m /dev/zero | tail -c 399m > /dev/null")
        assert result.oom
        assert (await copy.run("true")).ok


@asynchronous
async def test_a_damaged_state(folder: Path) -> None:
    """It is refused with runsc's words, and nothing stays."""
    async with started() as box:
        await box.save(folder, stop=True)
    image = folder / "checkpoint.img"
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StartFailed, match="restore"):
        async with started(folder):
            pass
    image.unlink()
    with pytest.raises(StartFailed, match="restore"):
        async with started(folder):
            pass
    image.write_bytes(whole)
    async with started(folder) as box:
        assert (await box.run("true")).ok


def pids(seen: Snapshot) -> set[int]:
    return {int(line.split()[0]) for line in seen.processes}


@asynchronous
async def test_given_up_at_any_moment(folder: Path) -> None:
    """Who is cancelled while it starts or is restored leaves no process and no group."""
    async with started() as box:
        await box.save(folder, stop=True)

    async def give_up(after: float, source: Path | None) -> None:
        async def whole() -> None:
            async with started(source):
                pass

        task = asyncio.ensure_future(whole())
        await asyncio.wait([task], timeout=after)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    known = pids(snapshot())
    made.clear()
    for number in range(8):
        await give_up(number * 0.025, folder if number % 2 else None)
    after = snapshot()
    assert pids(after) <= known, after.processes  # what others left may end or wake meanwhile
    assert len(made) == 8
    assert [cgroups.find_leftovers(machine().cgroup, each) for each in made] == [()] * 8


@asynchronous
async def test_a_save_that_nobody_waits_for(folder: Path) -> None:
    """It goes to its end; the next one takes its turn."""
    async with started() as box:
        await said(box, "echo kept > /workspace/file")
        await box.op(Op.FREEZE)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        task = asyncio.ensure_future(box.instance.save(descriptor))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        os.close(descriptor)
        second = folder.parent / "second"
        second.mkdir()
        descriptor = os.open(second, os.O_RDONLY | os.O_DIRECTORY)
        await box.instance.save(descriptor)
        os.close(descriptor)
        await box.op(Op.THAW)
        assert await said(box, "cat /workspace/file") == "kept\n"
        for source in (folder, second):
            async with started(source) as copy:
                assert await said(copy, "cat /workspace/file") == "kept\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts file systems of a given size. Only root can."""
    mounted: list[Path] = []

    def make(size: str) -> Path:
        path = tmp_path / f"disk-{len(mounted)}"
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=700,size={size}", "none", path], check=True)
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", path], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk that is full so soon")
def test_a_full_disk(small_disk: Callable[[str], Path], folder: Path) -> None:
    """Whatever the moment at which it fills: the sandbox runs on, and can be saved elsewhere."""

    async def run() -> None:
        async with started() as box:
            await prepare(box)
            await said(box, "head -c 3m /dev/urandom > /workspace/large; sha256sum /workspace/large > /workspace/sum")
            for size in ("16k", "400k", "2m"):
                with pytest.raises(SaveFailed, match="the disk is full"):
                    await box.save(small_disk(size))
            before = await count(box)
            await box.save(folder)
            async with started(folder) as copy:
                assert await count(copy) == before + 1
                await said(copy, "sha256sum -c /workspace/sum")

    asyncio.run(run())


HOLDER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from gvisor_kit import started

async def main():
    folder = Path(sys.argv[2])
    async with started() as one:
        await one.run("sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo x > /workspace/file")
        await one.save(folder)
        async with started(folder):
            print("ready", flush=True)
            await asyncio.sleep(1000)

asyncio.run(main())
"""


ONCE = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from gvisor_kit import started

async def main():
    async with started():
        pass

asyncio.run(main())
"""


def test_a_killed_holder_leaves_nothing(folder: Path) -> None:
    home = Home().open()
    (home.sandboxes / "tests").mkdir(exist_ok=True)
    kit = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", ONCE, kit], check=True)  # what a home keeps for all its sandboxes is there
    command = [sys.executable, "-c", HOLDER, kit, str(folder)]
    with adopted_orphans():
        before = snapshot(home.path)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            assert snapshot(home.path).processes != before.processes  # the positive control: they are seen
            holder.kill()
        for place in (home.sandboxes / "tests").iterdir():
            engine().reap(place.name)
            place.rmdir()
        assert settled(before, home.path, bury=True) == []


def test_no_attribute_that_could_not_be_restored() -> None:
    """gVisor saves an attribute without a value, and then cannot read what it saved."""
    script = """
import errno, os
open("f", "w").close()
fd = os.open("f", os.O_RDWR)
for call in (lambda v: os.setxattr("f", "user.a", v), lambda v: os.setxattr("f", "user.a", v, follow_symlinks=False),
             lambda v: os.setxattr(fd, "user.a", v)):
    try:
        call(b"")
    except OSError as error:
        print(error.errno == errno.ENOTSUP, end=" ")
    call(b"1")
"""
    with Sandbox(engine="gvisor") as box:
        assert box.run(["python3", "-c", script], check=True).stdout == "True " * 3
        box.snapshot("saved")
        box.rollback("saved")
        assert box.files.attributes("f") == {"user.a": b"1"}
