"""Conformance: many things at once, and readers that do not read."""

from __future__ import annotations

import asyncio
import resource

from ...engines.base import Capabilities
from ...sync import Sandbox
from .support import MakeBox, inner, needs, run_async


class TestConcurrency:
    def test_fifty_commands(self, box: Sandbox) -> None:
        async def scenario() -> None:
            results = await asyncio.gather(*(inner(box).run(f"echo {n}; exit {n}") for n in range(50)))
            assert [(r.stdout, r.exit_code) for r in results] == [(f"{n}\n", n) for n in range(50)]

        run_async(scenario())

    def test_commands_and_files_mixed(self, box: Sandbox) -> None:
        async def one(number: int) -> None:
            mine = inner(box)
            data = bytes([number]) * 300_000
            await mine.files.write(f"f{number}", data)
            assert (await mine.run(["cat", f"f{number}"])).stdout_raw == data
            assert await mine.files.read(f"f{number}") == data
            await mine.files.remove(f"f{number}")

        async def scenario() -> None:
            await asyncio.gather(*(one(number) for number in range(20)))
            assert await inner(box).files.list() == []

        run_async(scenario())

    def test_two_sandboxes_are_apart(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        one, two = make_box(), make_box()
        one.files.write("secret", "of one")
        assert not two.run(["cat", f"{one.workdir}/secret"]).ok
        assert not two.files.exists("secret")
        needs(capabilities.private_processes, "sees the processes of others")
        os_pid = int(one.run("sleep 1000 & echo $!").stdout)
        two.run(f"kill -9 {os_pid}")
        assert one.run(f"kill -0 {os_pid}").ok, "a process of the other sandbox was reached"

    def test_many_sandboxes(self, make_box: MakeBox) -> None:
        boxes = [make_box() for _ in range(8)]

        async def scenario() -> None:
            results = await asyncio.gather(*(inner(b).run("echo $$ > pid; cat pid") for b in boxes))
            assert all(result.ok for result in results)

        run_async(scenario())


class TestFlowControl:
    def test_a_reader_that_does_not_read(self, box: Sandbox) -> None:
        size = 20_000_000
        process = box.spawn(f"head -c {size} /dev/zero; echo done > done", text=False)
        for number in range(30):  # other streams go on
            assert box.run(["echo", str(number)]).stdout == f"{number}\n"
            box.files.write("other", bytes(100_000))
        assert next(item for item in box.processes() if item.pid == process.pid).running
        assert not box.files.exists("done"), "the writer waits for its reader"
        assert sum(len(piece) for _, piece in process) == size, "nothing is lost meanwhile"
        assert process.wait().exit_code == 0
        assert box.files.exists("done")

    def test_a_process_that_does_not_read(self, box: Sandbox) -> None:
        async def scenario() -> None:
            process = await inner(box).spawn("sleep 1000", stdin=True)
            sending = asyncio.ensure_future(process.send(bytes(20_000_000)))
            for _ in range(10):
                assert (await inner(box).run("echo other")).ok
            assert not sending.done(), "the sender waits for the reader"
            await process.kill()
            assert (await process.wait()).signal == 9
            await sending

        run_async(scenario())

    def test_endless_output_costs_little(self, box: Sandbox) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = box.run("yes", timeout=1.0, max_output=100_000)
        assert result.timed_out
        assert len(result.stdout_raw) == 100_000
        assert result.stdout_size > 1_000_000
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert grown < 64 * 2**20

    def test_one_slow_stream_of_many(self, box: Sandbox) -> None:
        stuck = [box.spawn("yes") for _ in range(5)]
        assert box.run("seq 1 100000").stdout.endswith("100000\n")
        box.files.write("big", bytes(5_000_000))
        assert len(box.files.read("big")) == 5_000_000
        for process in stuck:
            process.kill()
        for process in stuck:
            assert process.wait().signal == 9
