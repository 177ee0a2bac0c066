"""I-01..: archives against a whole runtime. `kill -9` in the middle of an export or an import, damaged archives, a full
disk: typed errors, the source runs on, and nothing is left in either SLOPLET_HOME.

What an archive may hold, byte by byte, is in tests/unit/test_archive_damage.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from sloplet import errors
from sloplet.engines import registry
from sloplet.runtime import Runtime
from sloplet.sandbox import AsyncSandbox
from sloplet.state.home import Home
from sloplet.state.store import Store
from sloplet.testing.leaks import adopted_orphans, bury_orphans

#: Exports or loads, and stands still at a chosen moment, for good.
PROGRAM = """
import asyncio, sys, threading
from sloplet.archive import moving, read, write
from sloplet.archive.work import Work
from sloplet.runtime import Runtime
from sloplet.sandbox import AsyncSandbox
from sloplet.state.draft import Draft
from sloplet.state.snapshots import SnapshotStore

verb, engine, path, moment = sys.argv[1:]

def stop_at(owner, name, after=False):
    real = getattr(owner, name)
    def stopped(*words, **more):
        done = real(*words, **more) if after else None
        print("here", flush=True)
        threading.Event().wait()
        return done
    setattr(owner, name, stopped)

{
    "target": lambda: stop_at(write.Target, "__init__", after=True),
    "saved": lambda: stop_at(SnapshotStore, "publish", after=True),
    "piece": lambda: stop_at(Work, "step"),
    "named": lambda: stop_at(write.Target, "publish", after=True),
    "draft": lambda: stop_at(Draft, "__init__", after=True),
    "received": lambda: stop_at(read.Archive, "_end"),
    "adopted": lambda: stop_at(moving, "adopt", after=True),
    "started": lambda: stop_at(Draft, "abandon"),
}[moment]()

async def main():
    if verb == "load":
        await AsyncSandbox.load(path, controller=Runtime())
    else:
        box = AsyncSandbox(engine=engine, controller=Runtime())
        await box.run("echo kept > file")
        await box.export(path)

asyncio.run(main())
"""
EXPORT = ("target", "saved", "piece", "named")
LOAD = ("draft", "piece", "received", "adopted", "started")


@pytest.fixture(params=["gvisor", "container"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One that saves what runs, and one that saves files. CI names its runsc in SLOPLET_TEST_RUNSC."""
    if "SLOPLET_TEST_RUNSC" in os.environ:
        monkeypatch.setenv("SLOPLET_RUNSC", os.environ["SLOPLET_TEST_RUNSC"])
    probe = registry.load(request.param).probe()
    if not probe.available:
        pytest.skip(f"{request.param} cannot run here: {probe.reason}")
    return str(request.param)


@asynccontextmanager
async def machine(home: Path) -> AsyncIterator[Runtime]:
    runtime = Runtime(Home(home))
    try:
        yield runtime
    finally:
        await runtime.aclose()


def nothing_left(path: Path) -> None:
    home = Home(path).open()
    runtime = Runtime(home)
    runtime.reap()
    asyncio.run(runtime.aclose())
    with closing(Store(home)) as store:
        assert store.list() == []
        assert store.list_snapshots() == []
    for folder in (home.snapshots, home.sandboxes, home.owners):
        assert os.listdir(folder) == [], folder
    assert os.listdir(home.run) == ["owners"]


def killed(home: Path, verb: str, engine: str, path: Path, moment: str) -> None:
    environment = {**os.environ, "SLOPLET_HOME": str(home)}
    words = [sys.executable, "-c", PROGRAM, verb, engine, str(path), moment]
    with adopted_orphans():
        with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            process.send_signal(signal.SIGKILL)
        bury_orphans()


@pytest.mark.anyone
def test_i01_killed_in_the_middle(engine: str, tmp_path: Path) -> None:
    for moment in EXPORT:
        path = tmp_path / f"{moment}.sloplet"
        killed(tmp_path / "home", "export", engine, path, moment)
        left = sorted(entry for entry in os.listdir(tmp_path) if entry != "home")
        if moment == "named":
            assert path.name in left, "it was whole"
            left.remove(path.name)
        assert all(name.startswith(f".{path.name}.") and name.endswith(".partial") for name in left), left
        for name in left:
            os.unlink(tmp_path / name)
        path.unlink(missing_ok=True)
        nothing_left(tmp_path / "home")

    async def export() -> None:
        async with machine(tmp_path / "home") as runtime:
            box = AsyncSandbox(engine=engine, controller=runtime)
            await box.run("echo kept > file")
            await box.export(tmp_path / "whole")

    asyncio.run(export())
    for moment in LOAD:
        killed(tmp_path / "other", "load", engine, tmp_path / "whole", moment)
        nothing_left(tmp_path / "other")

    async def load() -> None:
        async with machine(tmp_path / "other") as runtime:
            copy = await AsyncSandbox.load(tmp_path / "whole", controller=runtime)
            assert (await copy.run("cat file")).stdout == "kept\n"

    asyncio.run(load())
    nothing_left(tmp_path / "other")


@pytest.mark.anyone
def test_i02_refused_and_running_on(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage is found before anything starts; a disk that is full in the middle leaves the source as it was."""

    async def main() -> None:
        async with machine(tmp_path / "home") as here, machine(tmp_path / "other") as there:
            box = AsyncSandbox(engine=engine, controller=here)
            await box.run("echo kept > file")
            await box.export(tmp_path / "whole")
            data = (tmp_path / "whole").read_bytes()
            for number, damaged in enumerate(
                (data[:-1], data[: len(data) // 2], data + b"x", data[:300] + bytes([data[300] ^ 1]) + data[301:])
            ):
                (tmp_path / str(number)).write_bytes(damaged)
                with pytest.raises(errors.SnapshotDamaged):
                    await there.load(str(tmp_path / str(number)))
            starts: list[object] = []
            monkeypatch.setattr(type(here), "make", lambda *words: starts.append(words))
            with pytest.raises(errors.SnapshotDamaged):
                await there.load(str(tmp_path / "0"))
            assert starts == []
            monkeypatch.undo()
            assert await there.list() == []
            for path, error in (
                (tmp_path / "whole", errors.FileExists), (tmp_path / "none" / "a", errors.SaveFailed),
                (here.home.snapshots / "a", errors.SpecError), (Path("/dev/full"), errors.FileExists),
            ):  # fmt: skip
                with pytest.raises(error):
                    await box.export(path)
            assert (await box.run("cat file")).stdout == "kept\n"

    asyncio.run(main())
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]
    for home in ("home", "other"):
        nothing_left(tmp_path / home)


def test_i03_a_full_disk(engine: str, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the error comes in the middle of the writing."""
    program = """
import asyncio, resource, signal, sys
from sloplet import errors
from sloplet.runtime import Runtime
from sloplet.sandbox import AsyncSandbox

async def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    runtime = Runtime()
    box = AsyncSandbox(engine=sys.argv[1], controller=runtime)
    await box.run("head -c 3000000 /dev/urandom > big")
    save = runtime.timeline._save
    async def saved(*words, **more):
        made = await save(*words, **more)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
        return made
    runtime.timeline._save = saved
    try:
        await box.export(sys.argv[2])
    except errors.SaveFailed as error:
        print("refused", error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print((await box.run("wc -c < big")).stdout.strip())
    await runtime.aclose()

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, engine, str(tmp_path / "a")],
        env={**os.environ, "SLOPLET_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused the archive"), done.stdout
    assert done.stdout.endswith("\n3000000\n")
    assert os.listdir(tmp_path) == ["home"]
    nothing_left(tmp_path / "home")
