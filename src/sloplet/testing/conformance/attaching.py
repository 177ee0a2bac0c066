"""Conformance: the process table, and following a process again."""

from __future__ import annotations

import asyncio

import pytest

from ...errors import ProcessNotFound
from ...sync import Sandbox
from .support import inner, read_until, run_async, wait_ended


class TestProcesses:
    def test_listed(self, box: Sandbox) -> None:
        process = box.spawn(["sleep", "1000"], tag="mine")
        info = next(item for item in box.processes() if item.pid == process.pid)
        assert (info.command, info.running, info.tag, info.exit_code) == (("sleep", "1000"), True, "mine", None)
        assert info.os_pid > 0
        assert info.started_at > 1_600_000_000
        process.kill()
        process.wait()
        ended = next(item for item in box.processes() if item.pid == process.pid)
        assert (ended.running, ended.exit_code) == (False, 137)

    def test_numbers_are_never_used_twice(self, box: Sandbox) -> None:
        pids = [box.spawn("true").pid for _ in range(5)]
        assert sorted(set(pids)) == pids

    def test_sizes(self, box: Sandbox) -> None:
        process = box.spawn("echo 12345; echo 1 >&2")
        process.wait()
        info = next(item for item in box.processes() if item.pid == process.pid)
        assert (info.stdout_size, info.stderr_size) == (6, 2)

    def test_signal_by_number(self, box: Sandbox) -> None:
        process = box.spawn("sleep 1000")
        box.signal(process.pid, "KILL")
        assert process.wait().exit_code == 137

    def test_the_kernels_number(self, box: Sandbox) -> None:
        process = box.spawn("echo $$; exec sleep 1000", detached=True)
        assert process.os_pid == int(read_until(process, "\n"))
        assert next(item for item in box.processes() if item.pid == process.pid).os_pid == process.os_pid
        follower = box.attach(process.os_pid, by_os_pid=True)
        assert (follower.pid, follower.os_pid) == (process.pid, process.os_pid)
        with pytest.raises(ProcessNotFound):
            box.attach(2**22 + 1, by_os_pid=True)
        with pytest.raises(ProcessNotFound):
            box.signal(2**22 + 1, by_os_pid=True)
        box.signal(process.os_pid, "KILL", by_os_pid=True)
        assert process.wait().exit_code == follower.wait().exit_code == 137
        assert box.attach(process.os_pid, by_os_pid=True).wait().exit_code == 137


class TestAttach:
    def test_after_the_end(self, box: Sandbox) -> None:
        process = box.spawn("echo out; echo err >&2; exit 6", detached=True)
        process.wait()
        for _ in range(2):
            result = box.attach(process.pid).wait()
            assert (result.exit_code, result.stdout, result.stderr) == (6, "out\n", "err\n")

    def test_while_it_runs(self, box: Sandbox) -> None:
        process = box.spawn("echo early; while [ ! -e go ]; do sleep 0.01; done; echo late", detached=True)
        read_until(process, "early")
        follower = box.attach(process.pid)
        assert follower.pid == process.pid
        read_until(follower, "early")
        box.files.write("go", "")
        assert follower.wait().stdout == "early\nlate\n"
        assert process.wait().stdout == "early\nlate\n"

    def test_without_replay(self, box: Sandbox) -> None:
        process = box.spawn("echo early; while [ ! -e go ]; do sleep 0.01; done; echo late", detached=True)
        read_until(process, "early")
        follower = box.attach(process.pid, replay=False)
        box.files.write("go", "")
        result = follower.wait()
        assert result.stdout == "late\n"
        assert result.stdout_size == len("early\nlate\n")

    def test_only_the_last_is_kept(self, box: Sandbox) -> None:
        expected = b"".join(b"%d\n" % number for number in range(1, 150001))
        process = box.spawn("seq 1 150000", detached=True)
        process.detach()
        info = wait_ended(box, process.pid)
        assert info.stdout_size == len(expected)
        result = box.attach(process.pid).wait()
        assert (result.exit_code, result.stdout_size, result.truncated) == (0, len(expected), True)
        assert 4096 <= len(result.stdout_raw) < len(expected)
        assert expected.endswith(result.stdout_raw), "what is kept is the end, exactly"

    def test_nobody_follows_nobody_waits(self, box: Sandbox) -> None:
        process = box.spawn("head -c 5000000 /dev/zero; echo done > done", detached=True)
        process.detach()
        assert wait_ended(box, process.pid).exit_code == 0
        assert box.files.exists("done")

    def test_lossy_never_holds_it_up(self, box: Sandbox) -> None:
        process = box.spawn("while [ ! -e go ]; do sleep 0.01; done; seq 1 300000; echo end", detached=True)
        process.detach()
        follower = box.attach(process.pid, lossy=True)
        box.files.write("go", "")
        wait_ended(box, process.pid)  # although the follower reads nothing
        result = follower.wait()
        assert result.exit_code == 0
        assert result.stdout.endswith("end\n")
        assert result.stdout_size == len("".join(f"{n}\n" for n in range(1, 300001))) + 4

    def test_a_follower_that_stops_does_not_harm(self, box: Sandbox) -> None:
        process = box.spawn("while [ ! -e go ]; do sleep 0.01; done; echo end", detached=True)
        follower = box.attach(process.pid)
        follower.detach()
        box.files.write("go", "")
        assert process.wait().stdout == "end\n"

    def test_several_at_once(self, box: Sandbox) -> None:
        async def scenario() -> None:
            mine = inner(box)
            process = await mine.spawn("while [ ! -e go ]; do sleep 0.01; done; seq 1 100000", detached=True)
            followers = [await mine.attach(process.pid) for _ in range(4)]
            await mine.files.write("go", "")
            results = await asyncio.gather(process.wait(), *(follower.wait() for follower in followers))
            assert len({result.stdout_raw for result in results}) == 1
            assert results[0].stdout.splitlines()[-1] == "100000"

        run_async(scenario())
