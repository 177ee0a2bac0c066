"""The keeper in a crowd: everybody at once, coming while it leaves, dying at the wrong moment, other versions."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest
from keeper_helpers import end, keeping, wait_for

from sloplet.errors import KeeperError
from sloplet.keeper.client import KeeperClient, keeper_controller
from sloplet.keeper.launch import MAX_LOG, rotate
from sloplet.sandbox import AsyncSandbox

pytestmark = pytest.mark.anyone

RACE = """
import asyncio, sys
from sloplet.keeper.client import KeeperClient
from sloplet.sandbox import AsyncSandbox
from sloplet.state.home import Home
async def one(name):
    client = KeeperClient(Home())
    shared = AsyncSandbox("shared", engine="fake", controller=client)
    own = AsyncSandbox("own-" + name, engine="fake", controller=client)
    await asyncio.gather(shared.start(), own.start())
    status = await client.status()
    print(shared.id, status["pid"], (await own.run("echo " + name)).stdout.strip())
async def main():
    sys.stdout.write("ready\\n"); sys.stdout.flush()
    sys.stdin.readline()
    await asyncio.gather(*(one(name) for name in sys.argv[1:]))
asyncio.run(main())
"""


def test_fifty_clients_at_once_start_one_keeper() -> None:
    with keeping(idle=5) as world:
        programs = [world.begin(RACE, str(i), str(i + 25)) for i in range(25)]
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
        for program in programs:
            assert program.stdin is not None
            program.stdin.write("go\n")
            program.stdin.flush()
        answers = []
        for program in programs:
            out, err = program.communicate(timeout=60)
            assert program.returncode == 0, err
            answers += [line.split() for line in out.splitlines()]
        assert {own for _, _, own in answers} == {str(i) for i in range(50)}
        assert len({(shared, pid) for shared, pid, _ in answers}) == 1
        assert world.log().count("keeper of") == 1


COME_AND_GO = """
import asyncio, random, sys
from sloplet.keeper.client import KeeperClient
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home
async def main():
    for i in range(int(sys.argv[2])):
        client = KeeperClient(Home())
        info = await client.create(SandboxSpec.make(f"n-{sys.argv[1]}-{i}", engine="fake"))
        await client.kill(info.id)
        await client.aclose()
        await asyncio.sleep(random.random() / 10)  # or they never all stay away
asyncio.run(main())
"""


def test_no_create_is_lost_while_keepers_come_and_go() -> None:
    """A keeper that leaves at once: nearly every create meets one that is leaving, or none."""
    with keeping(idle=0) as world:
        programs = [world.begin(COME_AND_GO, str(i), "15") for i in range(3)]
        for program in programs:
            _, err = program.communicate(timeout=60)
            assert program.returncode == 0, err
        wait_for(lambda: world.log().rstrip().endswith("gone"))
        assert world.log().count("keeper of") == world.log().count("gone") > 3
        assert os.listdir(world.home / "sandboxes") == []
        assert os.listdir(world.home / "run" / "owners") == []


def test_a_starter_that_is_killed_does_not_stop_the_others() -> None:
    with keeping(idle=5) as world:
        for delay in (0.0, 0.05, 0.12, 0.25):
            first = world.begin(RACE, "x")
            assert first.stdout is not None
            assert first.stdin is not None
            first.stdout.readline()
            first.stdin.write("go\n")
            first.stdin.flush()
            time.sleep(delay)  # where it dies is the point, not a wait
            first.kill()
            second = world.begin(RACE, "y")
            out, err = second.communicate("go\n", timeout=40)
            assert second.returncode == 0, err
            pid = int(out.split()[-2])
            world.here(_kill_everything)
            end(pid, signal.SIGKILL)


async def _kill_everything() -> None:
    client = await keeper_controller()
    await asyncio.gather(*(client.kill(info.id) for info in await client.list()))


HAMMER = """
import asyncio, random, sys
from sloplet.errors import KeeperError, SandboxDead, SandboxError, SandboxNotFound
from sloplet.keeper.client import keeper_controller
from sloplet.sandbox import AsyncSandbox
dice = random.Random(int(sys.argv[1]))
async def main():
    while True:
        box = AsyncSandbox(f"n{dice.randrange(4)}", engine="fake")
        try:
            await box.start()
            result = await box.run("echo hi")
            assert result.stdout == "hi\\n", result
            if dice.random() < 0.3:
                await box.kill()
        except SandboxDead:
            await box.kill()
        except (SandboxError, KeeperError) as error:
            pass
asyncio.run(main())
"""


def test_keepers_killed_under_load_leave_nothing_that_is_not_cleaned_up() -> None:
    dice = random.Random(7)
    with keeping(idle=1) as world:
        programs = [world.begin(HAMMER, str(i)) for i in range(3)]
        for _ in range(8):
            pid = wait_for(world.keeper, 30)
            time.sleep(dice.random() / 10)
            end(pid, signal.SIGKILL)
        for program in programs:
            assert program.poll() is None, program.communicate()[1]
            program.kill()
            program.wait()
        world.here(_kill_everything)
        wait_for(lambda: world.keeper() is None or end(world.keeper() or 0) or True)

        async def nothing() -> None:
            assert await AsyncSandbox.list() == []

        world.here(nothing)
        assert os.listdir(world.home / "sandboxes") == []
        assert os.listdir(world.home / "run" / "owners") == []


# -- versions ---------------------------------------------------------------------------

OLD = """
import sys, sloplet
sloplet.__version__ = "0.0.9"
from sloplet.keeper.__main__ import main
sys.exit(main([]))
"""
OLD_CREATE = "import sloplet; sloplet.__version__ = '0.0.9'; " + (
    "from sloplet import Sandbox; b = Sandbox('old', engine='fake'); b.start(); print(b.id)"
)


def test_a_keeper_of_another_version_is_replaced_when_it_holds_nothing() -> None:
    with keeping(idle=30) as world:
        old = world.begin(OLD)
        wait_for(world.keeper)
        world.run(OLD_CREATE)

        async def new() -> None:
            client = await keeper_controller()
            with pytest.raises(KeeperError, match=r"0\.0\.9 and holds 1 sandbox; this is"):
                await AsyncSandbox("new", engine="fake").start()
            box = await AsyncSandbox.connect("old")  # it can be seen and ended, not used
            with pytest.raises(KeeperError, match=r"0\.0\.9"):
                await box.run("true")
            with pytest.raises(KeeperError, match=r"0\.0\.9"):
                await box.guarantees()
            assert [info.name for info in await client.list()] == ["old"]
            await box.kill()
            async with AsyncSandbox("new", engine="fake") as fresh:
                assert (await fresh.run("echo hi")).ok
            status = await client.status()
            assert status is not None
            assert status["pid"] != old.pid

        world.here(new)
        assert old.wait(10) == 0
        assert world.keeper() is not None


def test_a_keeper_that_speaks_another_wire_is_told() -> None:
    with keeping() as world:
        code = "from sloplet.wire import mux; mux.VERSION = 2; from sloplet.keeper.__main__ import main; main([])"
        other = world.begin(code)
        wait_for(world.keeper)

        async def use() -> None:
            with pytest.raises(KeeperError, match=rf"keeper \(pid {other.pid}\) cannot be understood"):
                await AsyncSandbox("new", engine="fake").start()

        world.here(use)


# -- small things ------------------------------------------------------------------------


def test_the_log_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "keeper.log"
    log.write_bytes(b"x" * (MAX_LOG + 1))
    assert rotate(log)
    assert [path.name for path in tmp_path.iterdir()] == ["keeper.log.1"]
    assert not rotate(log)


def test_a_loop_that_was_closed_and_a_fork_leave_no_connection() -> None:
    code = """
import asyncio, os, signal, time
from sloplet.keeper.client import keeper_controller
from sloplet.sandbox import AsyncSandbox
async def make():
    await AsyncSandbox("dev", engine="fake").start()
async def end():
    client = await keeper_controller()
    await client.find("dev")
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    status = await client.status()
    assert status["clients"] == 1, status  # not those of the closed loops
    await client.kill((await client.find("dev")).id)
    await client.aclose()
    return child, status["pid"]
for _ in range(3):
    asyncio.run(make())
child, keeper = asyncio.run(end())
deadline = time.monotonic() + 10
while os.path.exists(f"/proc/{keeper}") and time.monotonic() < deadline:
    time.sleep(0.01)
print(os.path.exists(f"/proc/{keeper}"))
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""
    with keeping(idle=0.2) as world:
        assert world.run(code) == "False"  # the child lives, and its copy of the connection does not keep the keeper


def test_two_hundred_clients_at_once() -> None:
    with keeping(idle=5) as world:

        async def crowd() -> None:
            async with AsyncSandbox("dev", engine="fake") as box:
                home = (await keeper_controller()).home
                clients = [KeeperClient(home) for _ in range(200)]
                results = await asyncio.gather(
                    *(AsyncSandbox("dev", engine="fake", controller=c).run(f"echo {i}") for i, c in enumerate(clients))
                )
                assert [int(result.stdout) for result in results] == list(range(200))
                status = await (await keeper_controller()).status()
                assert status is not None
                assert status["clients"] == 201
                for client in clients:
                    await client.aclose()
                await box.kill()

        world.here(crowd)


def test_the_synchronous_api_from_many_threads() -> None:
    code = """
import threading
from sloplet import Sandbox
def use(i, out):
    box = Sandbox("dev", engine="fake")
    out[i] = box.run(f"echo {i}").stdout.strip()
out = {}
threads = [threading.Thread(target=use, args=(i, out)) for i in range(16)]
[t.start() for t in threads]; [t.join() for t in threads]
assert out == {i: str(i) for i in range(16)}, out
Sandbox("dev", engine="fake").kill()
print("ok")
"""
    with keeping() as world:
        assert world.run(code) == "ok"
