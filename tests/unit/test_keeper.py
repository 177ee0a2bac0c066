"""The keeper as users meet it: real keepers and real programs, over the fake engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_helpers import CREATE, Keeping, alive, end, keeping, wait_for

from sloplet.errors import (
    KeeperError,
    SandboxDead,
    SandboxExists,
    SandboxMismatch,
    SandboxNotFound,
    StateUnwritable,
    UnknownEngine,
)
from sloplet.keeper.client import keeper_controller
from sloplet.keeper.launch import environment
from sloplet.sandbox import AsyncSandbox
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone


@pytest.fixture
def world() -> Iterator[Keeping]:
    with keeping() as world:
        yield world


def test_a_sandbox_outlives_the_program_that_made_it(world: Keeping) -> None:
    made = world.run(
        CREATE + "; p = b.spawn('echo one; sleep 0.2; echo two; sleep 600', detached=True, tag='job'); print(p.pid)"
    )
    sandbox_id, pid = made.split()
    read = """
from sloplet import Sandbox
import sys
b = Sandbox.connect('DEV')
(info,) = b.processes()
p = b.attach(info.pid)
text = ''
for channel, piece in p:
    text += piece
    if 'two' in text: break
print(b.id, info.pid, info.tag, info.running, text.split())
"""
    assert world.run(read) == f"{sandbox_id} {pid} job True ['one', 'two']"
    keeper = world.keeper()
    assert keeper is not None
    assert Path(f"/proc/{keeper}/comm").read_text() == "sloplet-keeper\n"
    world.run("from sloplet import Sandbox; Sandbox('dev', engine='fake').kill()")
    wait_for(lambda: not alive(keeper))
    assert sorted(os.listdir(world.home / "run")) == ["keeper.log", "owners"]
    assert os.listdir(world.home / "run" / "owners") == []
    assert os.listdir(world.home / "sandboxes") == []


def test_everything_a_sandbox_can_do_works_through_the_keeper(world: Keeping) -> None:
    async def use() -> None:
        async with AsyncSandbox("dev", engine="fake", memory="64m", ttl=600) as box:
            bomb = await box.run("yes | head -c 90000000 | sort", timeout=20)
            assert bomb.oom  # the runtime's own word on a CLOSE comes through
            result = await box.run("cat; echo oops >&2; exit 7", input="hello")
            assert (result.stdout, result.stderr, result.exit_code) == ("hello", "oops\n", 7)
            await box.files.write("/workspace/a.txt", b"x" * 3_000_000)
            assert await box.files.read("/workspace/a.txt") == b"x" * 3_000_000
            with pytest.raises(FileNotFoundError):
                await box.files.read("/workspace/none")
            assert {item.control for item in await box.guarantees()} >= {"memory", "ttl"}
            assert (await box.metrics()).memory_limit == 64 << 20
            assert (await box.info()).state == "running"
            with pytest.raises(SandboxMismatch):
                await AsyncSandbox("dev", engine="fake", memory="65m").start()
            keeper = await keeper_controller()
            with pytest.raises(SandboxExists):
                await keeper.create(SandboxSpec.make("DEV", engine="fake"))
            status = await keeper.status()
            assert status is not None
            assert (status["sandboxes"], status["clients"]) == (1, 1)

    world.here(use)


def test_events_arrive_and_end_with_the_sandbox(world: Keeping) -> None:
    async def use() -> None:
        async with AsyncSandbox("dev", engine="fake") as box:
            keeper = await keeper_controller()
            heard: list[str] = []
            source = keeper.events(box.id)

            async def listen() -> None:
                async for event in source:
                    heard.append(event.type)

            listening = asyncio.ensure_future(listen())
            await box.run("true")
            await box.run(["echo", "y" * 200_000])  # the event would not fit into a record
            await box.kill()
            await listening
            assert heard == ["command.started", "command.exited"] * 2 + ["killed"]
            with pytest.raises(SandboxNotFound):
                await anext(keeper.events(box.id))

    world.here(use)


def test_many_records_come_as_one_list(world: Keeping) -> None:
    async def use() -> None:
        keeper = await keeper_controller()
        specs = [SandboxSpec.make(f"n{i}", engine="fake", env={"A": "x" * 5000}) for i in range(40)]
        await asyncio.gather(*(keeper.create(spec) for spec in specs))
        found = await keeper.list()
        assert {info.name for info in found} == {spec.name for spec in specs}
        assert {info.state for info in found} == {"running"}
        await asyncio.gather(*(keeper.kill(info.id) for info in found))
        assert await keeper.list() == []

    world.here(use)


def test_nothing_is_started_to_look_around(world: Keeping) -> None:
    async def look() -> None:
        assert await AsyncSandbox.list() == []
        with pytest.raises(SandboxNotFound):
            await AsyncSandbox.connect("dev")
        await AsyncSandbox("dev", engine="fake").kill()
        await (await keeper_controller()).kill("abcdefghijkm")
        with pytest.raises(KeeperError, match="no keeper runs"):
            await anext((await keeper_controller()).events())
        with pytest.raises(KeeperError, match="no keeper runs"):
            await (await keeper_controller(start=False)).create(SandboxSpec.make("dev", engine="fake"))

    world.here(look)
    assert not world.home.exists()


def test_a_create_that_fails_leaves_nothing(world: Keeping) -> None:
    async def fail() -> None:
        with pytest.raises(UnknownEngine):
            await AsyncSandbox("dev", engine="nonsense").start()
        with pytest.raises(SandboxNotFound):
            await AsyncSandbox.connect("dev")

    world.here(fail)
    wait_for(lambda: "gone" in world.log())  # and the keeper, which holds nothing, goes too


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_sandboxes_of_a_keeper_that_ended_report_dead(world: Keeping, number: signal.Signals) -> None:
    """C-08: never a fresh one under the old name, and a clear error for who was at it."""
    world.run(CREATE)
    busy = world.begin(
        "from sloplet import Sandbox, errors\n"
        "b = Sandbox.connect('dev')\n"
        "p = b.spawn('echo up; sleep 600')\n"
        "print(next(iter(p))[1].strip(), flush=True)\n"
        "try: p.wait()\n"
        "except errors.SandboxDead as error: print('dead:', error)\n"
    )
    assert busy.stdout is not None
    assert busy.stdout.readline() == "up\n"
    keeper = world.keeper()
    assert keeper is not None
    end(keeper, number)
    assert busy.communicate(timeout=20)[0].startswith("dead: ")

    async def after() -> None:
        (info,) = await AsyncSandbox.list()
        assert info.state == "dead"
        assert "keeper ended unexpectedly" in info.reason if number == signal.SIGKILL else "SIGTERM" in info.reason
        box = AsyncSandbox("dev", engine="fake")
        with pytest.raises(SandboxDead, match="keeper"):
            await box.run("true")
        with pytest.raises(SandboxDead):
            await box.guarantees()
        with pytest.raises(SandboxExists):
            await (await keeper_controller()).create(SandboxSpec.make("dev", engine="fake"))
        with pytest.raises(SandboxDead, match="keeper"):  # now a new keeper answers
            await box.run("true")
        await box.kill()
        assert await AsyncSandbox.list() == []
        async with AsyncSandbox("dev", engine="fake") as fresh:
            assert (await fresh.run("echo new")).stdout == "new\n"

    world.here(after)


def test_a_dead_sandbox_is_removed_without_a_keeper(world: Keeping) -> None:
    sandbox_id = world.run(CREATE)
    keeper = world.keeper()
    assert keeper is not None
    end(keeper, signal.SIGKILL)

    async def remove() -> None:
        await (await keeper_controller()).kill(sandbox_id)
        assert await AsyncSandbox.list() == []

    world.here(remove)
    assert world.keeper() is None
    assert os.listdir(world.home / "sandboxes") == []


def test_a_client_comes_back_after_the_keeper_was_replaced(world: Keeping) -> None:
    async def use() -> None:
        async with AsyncSandbox("one", engine="fake") as one:
            assert (await one.run("echo 1")).ok
            keeper = world.keeper()
            assert keeper is not None
            end(keeper, signal.SIGKILL)  # blocks the loop: it has not seen the end when it asks next
            assert (await AsyncSandbox("two", engine="fake").run("echo 2")).stdout == "2\n"
            assert {info.name: info.state for info in await AsyncSandbox.list()} == {"one": "dead", "two": "running"}

    world.here(use)


def test_a_killed_client_ends_its_commands_but_not_the_detached(world: Keeping) -> None:
    client = world.begin(
        CREATE + "; b.spawn('sleep 601'); b.spawn('sleep 602', detached=True); print('up', flush=True); input()"
    )
    assert client.stdout is not None
    client.stdout.readline()
    assert client.stdout.readline() == "up\n"
    os.kill(client.pid, signal.SIGKILL)

    async def look() -> None:
        box = await AsyncSandbox.connect("dev")
        while True:
            running = [info.command[-1] for info in await box.processes() if info.running]
            if running == ["sleep 602"]:
                return
            await asyncio.sleep(0.01)

    world.here(look)


def test_the_time_to_live_ends_it_and_then_the_keeper(world: Keeping) -> None:
    world.run("from sloplet import Sandbox; Sandbox('dev', engine='fake', ttl=0.5).start()")
    keeper = world.keeper()
    assert keeper is not None
    wait_for(lambda: not alive(keeper))

    async def look() -> None:
        assert await AsyncSandbox.list() == []

    world.here(look)


def test_a_sandbox_of_a_running_program_is_not_the_keepers_to_end(world: Keeping) -> None:
    holder = world.begin(
        "from sloplet import Sandbox; b = Sandbox(engine='fake'); b.start(); print(b.id, flush=True); input()"
    )
    assert holder.stdout is not None
    sandbox_id = holder.stdout.readline().strip()

    async def look() -> None:
        from sloplet.errors import SandboxError

        (info,) = await AsyncSandbox.list()
        assert (info.holder, info.state) == ("embedded", "running")
        box = await AsyncSandbox.connect(sandbox_id)
        for attempt in range(2):
            with pytest.raises(SandboxError, match="held by a running program"):
                await box.run("true")
            with pytest.raises(SandboxError, match="held by a running program"):
                await (await keeper_controller()).kill(sandbox_id)
            if not attempt:
                await AsyncSandbox("dev", engine="fake").start()

    world.here(look)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()

    async def after() -> None:
        assert [info.name for info in await AsyncSandbox.list()] == ["dev"]  # the keeper reaps too

    world.here(after)


def test_the_environment_is_chosen() -> None:
    source = {"PATH": "/bin", "SLOPLET_HOME": "x", "SLOPLET_A": "1", "XDG_B": "2", "TOKEN": "secret", "LC_ALL": "C"}
    kept = environment(source, Home("/tmp/none"))
    assert kept == {"PATH": "/bin", "SLOPLET_HOME": "/tmp/none", "SLOPLET_A": "1", "XDG_B": "2", "LC_ALL": "C"}


def test_a_home_with_a_long_path(world: Keeping) -> None:
    world.home = world.home / ("d" * 60) / ("e" * 60)
    world.home.parent.mkdir(parents=True)
    world.env["SLOPLET_HOME"] = str(world.home)
    world.run(CREATE + "; b.kill()")
    assert not (world.home / "run" / "keeper.sock").exists()
    wait_for(lambda: "gone" in world.log())
    shutil.rmtree(Home(world.home).socket_path().parent)


def test_a_home_that_cannot_be_used_is_a_typed_error(world: Keeping) -> None:
    world.home.write_text("a file")

    async def use() -> None:
        with pytest.raises(StateUnwritable):
            await AsyncSandbox("dev", engine="fake").start()
        with pytest.raises(StateUnwritable):
            await AsyncSandbox.list()

    world.here(use)
    world.home.unlink()


def test_a_keeper_that_cannot_start_says_why(world: Keeping) -> None:
    async def use() -> None:
        with pytest.raises(KeeperError, match="in the way"):
            await AsyncSandbox("dev", engine="fake").start()

    (world.home / "run" / "keeper.sock").mkdir(parents=True)
    os.chmod(world.home, 0o700)
    world.here(use)
    wait_for(lambda: "in the way" in world.log())


def test_a_bad_setting_is_told(world: Keeping) -> None:
    world.env["SLOPLET_KEEPER_IDLE"] = "soon"

    async def use() -> None:
        with pytest.raises(ValueError, match="SLOPLET_KEEPER_IDLE='soon'"):
            await AsyncSandbox("dev", engine="fake").start()

    world.here(use)


def test_a_keeper_that_hangs_is_told(world: Keeping, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run(CREATE)
    keeper = world.keeper()
    assert keeper is not None
    monkeypatch.setattr("sloplet.keeper.connection.HELLO_TIMEOUT", 0.3)
    os.kill(keeper, signal.SIGSTOP)

    async def use() -> None:
        with pytest.raises(KeeperError, match=f"pid {keeper}.*does not answer"):
            await AsyncSandbox.list()

    try:
        world.here(use)
    finally:
        os.kill(keeper, signal.SIGCONT)
