"""Conformance: spawn() - streams, stdin, signals, waiting, cancelling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from ...errors import CommandFailed
from ...sync import Sandbox
from .support import gone, inner, read_until, run_async


class TestSpawn:
    def test_conversation(self, box: Sandbox) -> None:
        process = box.spawn('echo one; read x; echo "two $x"; read y; echo "three $y" >&2; exit 4', stdin=True)
        assert process.pid > 0
        assert read_until(process, "one\n") == "one\n"
        process.send("A\n")
        assert read_until(process, "\n") == "two A\n"
        process.send(b"B\n")
        assert list(process) == [(2, "three B\n")]
        result = process.wait()
        assert (result.exit_code, result.stdout, result.stderr) == (4, "one\ntwo A\n", "three B\n")

    def test_end_of_input(self, box: Sandbox) -> None:
        process = box.spawn(["cat"], stdin=True)
        process.send("line\n")
        process.close_stdin()
        process.close_stdin()
        assert process.wait().stdout == "line\n"
        process.send("too late")
        process.close_stdin()

    def test_without_stdin_it_is_empty(self, box: Sandbox) -> None:
        assert box.spawn("cat; echo end").wait().stdout == "end\n"

    def test_bytes(self, box: Sandbox) -> None:
        data = bytes(range(256)) * 1000
        process = box.spawn(["cat"], stdin=True, text=False)

        async def feed() -> bytes:
            mine = process._inner
            sending = asyncio.ensure_future(mine.send(data))
            sending.add_done_callback(lambda _: asyncio.ensure_future(mine.close_stdin()))
            return b"".join([piece async for _, piece in mine])

        assert run_async(feed()) == data

    def test_order_within_a_channel(self, box: Sandbox) -> None:
        process = box.spawn("seq 1 50000")
        assert "".join(piece for _, piece in process).split() == [str(n) for n in range(1, 50001)]

    def test_wait_is_repeatable(self, box: Sandbox) -> None:
        process = box.spawn("echo x; exit 3")
        first = process.wait()
        assert process.wait() == first
        assert (first.exit_code, first.stdout) == (3, "x\n")
        with pytest.raises(CommandFailed):
            process.wait(check=True)

    def test_several_wait_at_once(self, box: Sandbox) -> None:
        async def scenario() -> None:
            process = await inner(box).spawn("read x; exit 9", stdin=True)
            waits = [asyncio.ensure_future(process.wait()) for _ in range(5)]
            await asyncio.sleep(0)
            waits[0].cancel()
            await process.send("go\n")
            assert {(await wait).exit_code for wait in waits[1:]} == {9}

        run_async(scenario())

    def test_signal_one_process(self, box: Sandbox) -> None:
        process = box.spawn("trap 'echo caught; exit 7' TERM; echo ready; while :; do sleep 0.05; done")
        read_until(process, "ready")
        process.signal("TERM", tree=False)
        result = process.wait()
        assert result.exit_code == 7
        assert "caught" in result.stdout

    def test_signal_the_tree(self, box: Sandbox) -> None:
        process = box.spawn("sleep 1000 & echo $!; wait")
        child = read_until(process, "\n")
        process.signal("TERM")
        assert process.wait().exit_code == 143
        assert gone(box, child)

    def test_kill_the_tree(self, box: Sandbox) -> None:
        process = box.spawn("trap '' TERM INT HUP; (sleep 1000 & echo $!); echo $$; while :; do sleep 1; done")
        seen = read_until(process, "\n")
        while seen.count("\n") < 2:
            seen += read_until(process, "\n")
        process.kill()
        result = process.wait()
        assert (result.exit_code, result.signal) == (137, 9)
        for pid in seen.split():
            assert gone(box, pid)
        process.kill()

    def test_timeout(self, box: Sandbox) -> None:
        assert box.spawn("sleep 1000", timeout=0.2).wait().timed_out

    def test_detach_ends_it(self, box: Sandbox) -> None:
        process = box.spawn("echo $$; sleep 1000")
        os_pid = read_until(process, "\n")
        process.detach()
        assert gone(box, os_pid)

    def test_detached_goes_on(self, box: Sandbox) -> None:
        process = box.spawn("echo up; while [ ! -e stop ]; do sleep 0.01; done; echo stopped", detached=True)
        read_until(process, "up")
        process.detach()
        assert box.run("echo other").ok
        assert next(info for info in box.processes() if info.pid == process.pid).running
        box.files.write("stop", "")
        assert box.attach(process.pid).wait().stdout == "up\nstopped\n"

    def test_cut_output(self, box: Sandbox) -> None:
        result = box.spawn("head -c 3000000 /dev/zero", max_output=100).wait()
        assert (len(result.stdout_raw), result.stdout_size, result.truncated) == (100, 3_000_000, True)


class TestCancel:
    def test_run(self, box: Sandbox) -> None:
        async def scenario() -> str:
            seen: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            task = asyncio.ensure_future(
                inner(box).run("sleep 1000 & echo $!; wait", on_stdout=lambda piece: seen.set_result(piece))
            )
            os_pid = await seen
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return os_pid

        assert gone(box, run_async(scenario()))
        assert box.run("echo fine").stdout == "fine\n"

    def test_at_any_moment(self, box: Sandbox) -> None:
        async def scenario() -> None:
            for steps in range(20):
                task = asyncio.ensure_future(inner(box).run("echo a; sleep 1000"))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert (await inner(box).run("echo fine")).stdout == "fine\n"
            while any(info.running for info in await inner(box).processes()):
                pass

        run_async(scenario())

    def test_files(self, box: Sandbox) -> None:
        async def scenario() -> None:
            files = inner(box).files
            await files.write("whole", "old")

            async def slow() -> AsyncIterator[bytes]:
                yield b"new" * 1000
                await asyncio.Event().wait()

            task = asyncio.ensure_future(files.write("whole", slow()))
            for _ in range(50):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await files.read("whole") == b"old"
            assert [info.name for info in await files.list()] == ["whole"], "no half file is left"

        run_async(scenario())
