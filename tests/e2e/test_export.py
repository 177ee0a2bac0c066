"""Export and import of real sandboxes: what ran goes on elsewhere, where it was."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cli_helpers import gvisor_environment, sloplet

from sloplet import errors
from sloplet.archive.work import Work
from sloplet.engines import registry
from sloplet.runtime import Runtime
from sloplet.sandbox import AsyncSandbox
from sloplet.state.home import Home

#: Counts in memory only, and tells by a socket and by a file.
SERVER = """
import os, socket
listening = socket.create_server(("127.0.0.1", 7000))
count, secret = 0, os.urandom(16).hex()
open("/tmp/ready", "w").write(secret)
while True:
    peer, _ = listening.accept()
    count += 1
    peer.sendall(f"{count} {secret} {os.getpid()}".encode())
    peer.close()
"""
ASK = "python3 -c 'import socket; print(socket.create_connection((\"127.0.0.1\", 7000)).recv(100).decode())'"
COUNTER = "n=0; while :; do n=$((n+1)); echo $n > /tmp/new; mv /tmp/new /tmp/n; sleep 0.02; done"
PROGRAMS = ("sh", "cat", "mv", "sleep")


@pytest.fixture
def runsc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gvisor_environment().items():
        monkeypatch.setenv(name, value)
    probe = registry.load("gvisor").probe()
    if not probe.available:
        pytest.skip(f"gvisor cannot run here: {probe.reason}")


@asynccontextmanager
async def machines(tmp_path: Path, count: int = 2) -> AsyncIterator[list[Runtime]]:
    """Runtimes of homes of their own; nothing stays of their sandboxes."""
    made = [Runtime(Home(tmp_path / f"home{number}")) for number in range(count)]
    try:
        yield made
    finally:
        for runtime in made:
            await runtime.aclose()
    for home in (Home(runtime.home.path).open() for runtime in made):
        for folder in (home.snapshots, home.sandboxes, home.owners):
            assert os.listdir(folder) == [], folder
        assert not [name for name in os.listdir(home.images) if name.startswith(".")]


async def until(check: Callable[[], Awaitable[object]], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not await check():
            await asyncio.sleep(0.02)


async def counted(box: AsyncSandbox) -> int:
    return int((await box.run("cat /tmp/n 2>/dev/null || echo 0")).stdout or 0)


def files_of(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir() if entry.is_file()}


def test_what_runs_goes_on_elsewhere(runsc: None, tmp_path: Path) -> None:
    async def main() -> None:
        async with machines(tmp_path) as (here, there):
            box = AsyncSandbox(engine="gvisor", controller=here, env={"KEPT": "yes"})
            await box.spawn(["python3", "-c", SERVER])
            await until(lambda: box.files.exists("/tmp/ready"))
            await box.files.write("/workspace/file", b"\0\1" * 50_000)
            assert (await box.run(ASK)).stdout.split()[0] == "1"
            made = await box.export(tmp_path / "a")
            assert (made.kind, made.role) == ("live", "export")
            assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
            assert files_of(tmp_path) == {"a"}
            answers = [(await box.run(ASK)).stdout.split() for _ in range(3)]
            assert [answer[0] for answer in answers] == ["2", "3", "4"], "it ran on"

            copy = await AsyncSandbox.load(tmp_path / "a", controller=there)
            answer = (await copy.run(ASK)).stdout.split()
            assert answer == ["2", *answers[0][1:]], "the same process, where it was"
            assert await copy.files.read("/workspace/file") == b"\0\1" * 50_000
            assert (await copy.run("echo $KEPT")).stdout == "yes\n"
            info, other = await copy.info(), await box.info()
            assert info.id != other.id
            names = {(await each.run("hostname")).stdout for each in (box, copy)}
            assert len(names) == 2, "a host name of its own"
            randoms = {(await each.run("head -c 16 /dev/urandom | od -An -tx1")).stdout for each in (box, copy)}
            assert len(randoms) == 2
            assert await there.snapshots(role=None) == []

    asyncio.run(main())


@pytest.mark.anyone
def test_a_paused_one_sleeps_on(runsc: None, tmp_path: Path) -> None:
    async def main() -> None:
        async with machines(tmp_path) as (here, there):
            box = AsyncSandbox(engine="gvisor", controller=here, ttl=3600)
            await box.spawn(COUNTER)
            await until(lambda: counted(box))
            before = await box.pause()
            await box.export(tmp_path / "a", image=False)
            assert await here.find(before.id) == before
            with pytest.raises(errors.FileExists):
                await box.export(tmp_path / "a")
            copy = await AsyncSandbox.load(tmp_path / "a", controller=there, name="copy")
            first = await counted(copy)
            assert first > 0
            await until(lambda: _above(copy, first))
            info = await copy.info()
            assert info.name == "copy"
            assert info.expires_at is not None
            assert before.expires_at is not None
            assert info.expires_at > before.expires_at, "its time to live begins again"
            with pytest.raises(errors.SandboxExists):
                await there.load("/nowhere", name="COPY")
            with pytest.raises(errors.InvalidName):
                await there.load("/nowhere", name="../x")
            with pytest.raises(errors.FileMissing):
                await there.load("/nowhere")
            await box.kill()

    asyncio.run(main())


async def _above(box: AsyncSandbox, number: int) -> bool:
    return await counted(box) > number


def make_root(folder: Path) -> Path:
    """A few programs of this machine, with their libraries; times that are no whole seconds."""
    for name in ("bin", "etc", "tmp", "usr"):
        (folder / name).mkdir(parents=True)
    for program in PROGRAMS:
        path = os.path.realpath(shutil.which(program) or program)
        shutil.copy2(path, folder / "bin" / program)
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(/[^\s:]+\.so[^\s:]*)", listed):
            target = folder / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(os.path.realpath(library), target)
    (folder / "tmp").chmod(0o1777)
    for number, path in enumerate(sorted(folder.rglob("*"))):
        os.utime(path, ns=(0, 1_650_000_000_000_000_003 + number * 1_000_003))
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.geteuid() and str(path).startswith(str(folder.parent.parent)):
            path.chmod(0o755)
    return folder


@pytest.mark.parametrize("kind", ["tar", "folder"])
def test_with_and_without_its_image(runsc: None, tmp_path: Path, kind: str) -> None:
    root = make_root(tmp_path / "root")
    image = f"dir:{root}"
    if kind == "tar":
        image = str(tmp_path / "image.tar.gz")
        subprocess.run(["tar", "-C", root, "--format=pax", "-czf", image, "."], check=True)

    async def main() -> None:
        async with machines(tmp_path, 3) as (here, there, elsewhere):
            box = AsyncSandbox(engine="gvisor", controller=here, image=image)
            await box.spawn(COUNTER)
            await until(lambda: counted(box))
            await box.export(tmp_path / "with")
            await box.export(tmp_path / "without", image=False)
            assert (tmp_path / "without").stat().st_size < (tmp_path / "with").stat().st_size
            if kind == "folder":
                same = await AsyncSandbox.load(tmp_path / "without", controller=there)
                assert await counted(same), "the same words mean the same image here"
            os.rename(root, tmp_path / "gone")
            (tmp_path / "image.tar.gz").unlink(missing_ok=True)
            with pytest.raises(errors.ImageNotFound, match="image"):
                await elsewhere.load(str(tmp_path / "without"))
            for archive in ("with", "without"):
                copy = await AsyncSandbox.load(tmp_path / archive, controller=elsewhere)
                first = await counted(copy)
                assert first > 0
                await until(lambda copy=copy, first=first: _above(copy, first))
                assert len(os.listdir(elsewhere.home.images)) == 1
                if kind == "tar":
                    break  # what came along is known by its own content, not by that of a tar nobody has seen here

    asyncio.run(main())


def test_files_where_processes_cannot_be_saved(tmp_path: Path) -> None:
    probe = registry.load("container").probe()
    if not (probe.available and probe.capabilities.disk_snapshots):
        pytest.skip(f"container: {probe.reason or 'no disk snapshots'}")

    async def main() -> None:
        async with machines(tmp_path) as (here, there):
            box = AsyncSandbox(engine="container", controller=here)
            await box.run(
                "mkdir -p a/b && echo hello > a/b/c && ln -s c a/b/d && chmod 750 a && echo x > /tmp/elsewhere"
            )
            made = await box.export(tmp_path / "a")
            assert made.kind == "disk"
            copy = await AsyncSandbox.load(tmp_path / "a", controller=there)
            seen = await copy.run("cat a/b/d /tmp/elsewhere; stat -c %a a; id -un")
            assert seen.stdout == "hello\nx\n750\nagent\n"
            assert (await box.run("cat a/b/c")).stdout == "hello\n", "it ran on"

    asyncio.run(main())


def test_whoever_gives_up_leaves_nothing(runsc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the writing, and in the middle of the reading."""

    async def main() -> None:
        async with machines(tmp_path) as (here, there):
            box = AsyncSandbox(engine="gvisor", controller=here)
            await box.run("head -c 5000000 /dev/urandom > big")
            await box.export(tmp_path / "whole")
            for act in (lambda: box.export(tmp_path / "a"), lambda: there.load(str(tmp_path / "whole"))):
                reached = asyncio.Event()
                with monkeypatch.context() as patch:
                    patch.setattr(Work, "step", _held(reached))
                    task = asyncio.ensure_future(act())
                    await reached.wait()
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    await until(lambda: _still(here, there))
            assert files_of(tmp_path) == {"whole"}
            assert await there.list() == []
            assert (await box.run("echo on")).stdout == "on\n"

    asyncio.run(main())


def _held(reached: asyncio.Event) -> Callable[[Work, int], None]:
    """A step that is not done before somebody has given up."""
    loop, step = asyncio.get_running_loop(), Work.step

    def held(work: Work, count: int) -> None:
        loop.call_soon_threadsafe(reached.set)
        while not work.given_up:
            os.sched_yield()
        step(work, count)

    return held


async def _still(*runtimes: Runtime) -> bool:
    return not any(runtime.changing for runtime in runtimes)


@pytest.mark.anyone
def test_progress(runsc: None, tmp_path: Path) -> None:
    async def main() -> None:
        async with machines(tmp_path) as (here, there):
            box = AsyncSandbox(engine="gvisor", controller=here)
            await box.start()
            told = {"export": here.events(), "import": there.events()}
            await box.export(tmp_path / "a")
            await AsyncSandbox.load(tmp_path / "a", controller=there)
            for what, events in told.items():
                async for event in events:
                    if event.type == f"{what}.progress" and event.data["bytes"] == event.data["total"]:
                        break

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.anyone
def test_on_the_command_line(runsc: None, tmp_path: Path) -> None:
    """From one keeper to another, under the same name."""
    here, there = ({"SLOPLET_HOME": str(tmp_path / name)} for name in ("h1", "h2"))
    file = str(tmp_path / "dev.sloplet")
    try:
        assert sloplet("create", "dev", "--engine", "gvisor", env=here).returncode == 0
        assert sloplet("exec", "dev", "--", "sh", "-c", "echo kept > file", env=here).returncode == 0
        done = sloplet("export", "dev", file, env=here)
        assert done.returncode == 0, done.stderr
        again = sloplet("export", "dev", file, env=here)
        assert again.returncode != 0
        assert b"already is" in again.stderr
        done = sloplet("import", file, env=there)
        assert (done.returncode, done.stdout) == (0, b"dev\n"), done.stderr
        assert sloplet("exec", "dev", "--", "cat", "file", env=there).stdout == b"kept\n"
        taken = sloplet("import", file, env=there)
        assert taken.returncode != 0
        assert b"--name" in taken.stderr
    finally:
        for home in (here, there):
            sloplet("rm", "--all", "--force", env=home)
