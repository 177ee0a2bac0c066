"""Conformance: a sandbox's life, its names, its death."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from ...controller import Controller
from ...errors import (
    SandboxClosed,
    SandboxDead,
    SandboxError,
    SandboxExists,
    SandboxMismatch,
    SandboxNotFound,
    UnknownEngine,
)
from ...runtime import embedded_runtime
from ...spec import SandboxSpec
from ...sync import Sandbox
from .support import MakeBox, inner, read_until, run_async


def _holder(controller: Controller | None) -> Controller:
    return controller if controller is not None else run_async(embedded_runtime())


class TestLifeCycle:
    def test_block(self, engine: str, controller: Controller | None) -> None:
        with Sandbox(engine=engine, controller=controller) as box:
            assert box.run("echo hello").stdout == "hello\n"
            assert box.engine == engine
            assert box.workdir.startswith("/")
            assert box.info().state == "running"
            sandbox_id = box.id
        with pytest.raises(SandboxNotFound):
            run_async(_holder(controller).find(sandbox_id))

    def test_starts_when_first_used(self, engine: str, controller: Controller | None) -> None:
        box = Sandbox(engine=engine, controller=controller)
        with pytest.raises(SandboxClosed):
            _ = box.id
        try:
            assert box.run("echo lazily").stdout == "lazily\n"
            assert box.id
        finally:
            box.close()

    def test_close_and_kill_are_idempotent(self, make_box: MakeBox) -> None:
        box = make_box()
        box.close()
        box.close()
        box.kill()
        box.kill()

    def test_closed_objects_say_so(self, make_box: MakeBox) -> None:
        box = make_box()
        box.close()
        for call in (
            lambda: box.run("true"),
            lambda: box.spawn("true"),
            lambda: box.files.read("x"),
            lambda: box.processes(),
            lambda: box.metrics(),
            lambda: box.start(),
        ):
            with pytest.raises(SandboxError):
                call()

    def test_never_started_can_be_closed(self, engine: str, controller: Controller | None) -> None:
        Sandbox(engine=engine, controller=controller).close()

    def test_every_sandbox_has_its_own_id(self, make_box: MakeBox) -> None:
        ids = {make_box().id for _ in range(3)}
        assert len(ids) == 3

    def test_unknown_engine(self, controller: Controller | None) -> None:
        with pytest.raises(UnknownEngine, match="no-such"):
            Sandbox(engine="no-such", controller=controller).start()

    def test_an_error_in_the_block_still_ends_it(self, engine: str, controller: Controller | None) -> None:
        box = Sandbox(engine=engine, controller=controller)
        with contextlib.suppress(ZeroDivisionError), box:
            sandbox_id = box.id
            _ = 1 / 0
        with pytest.raises(SandboxNotFound):
            run_async(_holder(controller).find(sandbox_id))

    def test_a_cancelled_start_leaves_nothing(self, engine: str, controller: Controller | None) -> None:
        holder = _holder(controller)

        async def scenario() -> None:
            before = {info.id for info in await holder.list()}
            for steps in range(12):  # cancel it at many different moments
                task = asyncio.ensure_future(holder.create(SandboxSpec.make(engine=engine)))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                outcome = (await asyncio.gather(task, return_exceptions=True))[0]
                if not isinstance(outcome, BaseException):
                    await holder.kill(outcome.id)
            while {info.id for info in await holder.list()} - before:
                pass  # a holder elsewhere may need a moment to undo it

        run_async(scenario())

    def test_default_environment(self, make_box: MakeBox) -> None:
        box = make_box(env={"COLOUR": "green", "EMPTY": ""})
        assert box.run('echo "$COLOUR/$EMPTY/${HOME:+home}/${PATH:+path}"').stdout == "green//home/path\n"

    def test_shared_by_threads(self, box: Sandbox) -> None:
        results: dict[int, str] = {}

        def work(number: int) -> None:
            results[number] = box.run(["echo", str(number)]).stdout

        threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {number: f"{number}\n" for number in range(10)}


class TestNames:
    def test_the_same_name_is_the_same_sandbox(
        self, make_box: MakeBox, engine: str, controller: Controller | None
    ) -> None:
        holder = _holder(controller)
        box = make_box("Same", controller=holder)
        box.files.write("note", "kept")
        again = Sandbox("Same", engine=engine, controller=holder)
        assert again.files.read_text("note") == "kept"
        assert again.id == box.id
        again.close()
        assert box.run("cat note").stdout == "kept", "close() of a named sandbox leaves it running"
        connected = Sandbox.connect("Same", controller=holder)
        assert connected.id == box.id
        assert Sandbox.connect(box.id, controller=holder).id == box.id
        assert box.id in {info.id for info in Sandbox.list(controller=holder)}

    def test_other_settings_are_refused(self, make_box: MakeBox, engine: str, controller: Controller | None) -> None:
        holder = _holder(controller)
        make_box("strict", controller=holder)
        with pytest.raises(SandboxMismatch, match="env"):
            Sandbox("strict", engine=engine, env={"A": "1"}, controller=holder).start()

    def test_taken_and_missing(self, make_box: MakeBox, controller: Controller | None) -> None:
        holder = _holder(controller)
        box = make_box("taken", controller=holder)
        with pytest.raises(SandboxExists):
            run_async(holder.create(box.spec))
        with pytest.raises(SandboxNotFound):
            Sandbox.connect("nobody", controller=holder)
        box.kill()
        with pytest.raises(SandboxNotFound):
            Sandbox.connect("taken", controller=holder)
        make_box("taken", controller=holder)

    def test_killing_a_name_nobody_has(self, engine: str, controller: Controller | None) -> None:
        Sandbox("never-made", engine=engine, controller=_holder(controller)).kill()


class TestDeath:
    def test_whoever_waits_is_told(self, box: Sandbox, controller: Controller | None) -> None:
        holder = _holder(controller)

        async def scenario() -> None:
            mine = inner(box)
            process = await mine.spawn("echo up; sleep 1000")
            running = asyncio.ensure_future(mine.run("sleep 1000"))
            async for piece in process:
                assert piece == (1, "up\n")
                break
            waiting = asyncio.ensure_future(process.wait())
            await asyncio.sleep(0)
            await holder.kill(mine.id)
            for task in (running, waiting):
                with pytest.raises(SandboxDead):
                    await task
            for late in (mine.run("true"), mine.files.read("x"), mine.processes()):
                with pytest.raises(SandboxError):
                    await late

        run_async(scenario())

    def test_time_to_live(self, make_box: MakeBox) -> None:
        box = make_box(ttl=0.5)
        process = box.spawn("sleep 1000")
        with pytest.raises(SandboxError):
            process.wait()
        with pytest.raises(SandboxError):
            box.run("true")

    def test_files_do_not_outlive_it(self, make_box: MakeBox) -> None:
        first = make_box()
        first.files.write("left-over", "x")
        first.close()
        assert not make_box().files.exists("left-over")

    def test_a_running_command_does_not_stop_close(self, make_box: MakeBox) -> None:
        box = make_box()
        process = box.spawn("trap '' TERM HUP INT; echo stubborn; while :; do sleep 1; done")
        read_until(process, "stubborn")
        box.close()
