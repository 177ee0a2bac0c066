"""Conformance: limits are enforced or refused, guarantees tell the truth, metrics grow, events come."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from ...controller import Event
from ...engines.base import Capabilities
from ...errors import ControlUnavailable, DiskFull, ProcessLimit
from ...sync import Sandbox
from .support import MakeBox, inner, needs_control, run_async

#: Processes that an engine may allow beyond the limit, for its agent's own.
FOR_THE_AGENT = 16
LIMITS = {"cpus": 1, "memory": "128m", "disk": "64m", "pids": 64, "open_files": 256}


class TestGuarantees:
    @pytest.mark.parametrize("control", list(LIMITS))
    def test_explicit_is_enforced_or_refused(self, make_box: MakeBox, capabilities: Capabilities, control: str) -> None:
        asked = {control: LIMITS[control]}
        try:
            promised = {item.control: item for item in make_box(**asked).guarantees()}
        except ControlUnavailable as refused:
            refusal = str(refused)
        else:  # also where ``controls`` lacks it: some values may be possible where not all are
            assert promised[control].enforced
            assert promised[control].how
            assert promised[control].value
            return
        assert control in refusal
        assert control not in capabilities.controls
        weaker = {item.control: item for item in make_box(**asked, allow_weaker=True).guarantees()}
        assert not weaker[control].enforced
        assert weaker[control].how

    def test_everything_is_reported(self, box: Sandbox) -> None:
        reported = [item.control for item in box.guarantees()]
        assert len(reported) == len(set(reported))
        expected = {"filesystem", "processes", "network", "syscalls", "privileges", "cpus", "memory", "disk", "pids"}
        assert expected <= set(reported)
        assert all(item.how for item in box.guarantees())

    def test_time_to_live_is_reported(self, make_box: MakeBox) -> None:
        promised = {item.control: item for item in make_box(ttl="1h").guarantees()}
        assert promised["ttl"].enforced


class TestLimits:
    def test_disk(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        needs_control(capabilities, "disk")
        box = make_box(disk="8m")
        box.files.write("small", bytes(1_000_000))
        with pytest.raises(DiskFull) as caught:
            box.files.write("big", bytes(20_000_000))
        assert isinstance(caught.value, OSError)
        assert not box.files.exists("big")
        result = box.run("head -c 20m /dev/zero > big")
        assert not result.ok
        assert "No space left" in result.stderr
        assert box.files.stat("big").size <= 8 * 2**20
        assert box.run("echo alive").stdout == "alive\n"
        box.files.remove("big")
        box.files.write("again", bytes(1_000_000))
        assert box.files.read("small") == bytes(1_000_000)

    def test_pids(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        needs_control(capabilities, "pids")
        box = make_box(pids=40)
        result = box.run("i=0; while [ $i -lt 100 ]; do sleep 1000 & i=$((i+1)); done; echo all")
        assert "all" not in result.stdout
        assert box.metrics().pids <= 40 + FOR_THE_AGENT
        with contextlib.suppress(ProcessLimit):  # another error would be wrong; that it still fits is fine
            box.run("true")
        for info in box.processes():
            box.signal(info.pid, "KILL")
        for _ in range(1000):
            try:
                assert box.run("echo alive").stdout == "alive\n"
                break
            except ProcessLimit:
                continue

    def test_memory(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        needs_control(capabilities, "memory")
        box = make_box(memory="64m")
        result = box.run("head -c 400m /dev/zero | tail -c 399m > /dev/null")
        assert not result.ok
        if box.metrics().oom_kills is not None:
            assert result.oom
            assert "memory" in result.describe()
        after = box.run("echo alive")
        assert (after.stdout, after.oom) == ("alive\n", False)

    def test_open_files(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        needs_control(capabilities, "open_files")
        box = make_box(open_files=64)
        assert box.run("ulimit -n").stdout == "64\n"
        assert box.run("ulimit -n 65").exit_code != 0
        assert box.run("ulimit -n 32").exit_code == 0


class TestMetricsAndEvents:
    def test_grow_with_use(self, box: Sandbox, capabilities: Capabilities) -> None:
        before = box.metrics()
        assert before.memory_limit == box.spec.limits.memory
        assert before.pids >= 1
        assert before.memory > 0
        box.run("i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done; seq 1 300000 | sort > /dev/null")
        box.files.write("data", bytes(3_000_000))
        process = box.spawn("echo up; sleep 1000 & sleep 1000")
        for _ in process:
            break
        after = box.metrics()
        assert after.cpu_seconds > before.cpu_seconds
        if "disk" in capabilities.controls:  # elsewhere others write to the same disk
            assert after.disk_used >= before.disk_used + 2_900_000
        assert after.pids > before.pids
        assert after.uptime > before.uptime
        assert set(after.to_dict()) >= {"cpu_seconds", "memory", "pids", "disk_used"}
        process.kill()

    def test_events_of_commands(self, box: Sandbox) -> None:
        async def scenario() -> list[Event]:
            mine = inner(box)
            seen: list[Event] = []

            async def listen() -> None:
                async for event in mine.events():
                    seen.append(event)

            task = asyncio.ensure_future(listen())
            while {event.type for event in seen} < {"command.started", "command.exited"}:
                await mine.run(["sh", "-c", "exit 3"])
            await mine.close()
            await task
            return seen

        seen = run_async(scenario())
        assert all(event.sandbox == box.id for event in seen)
        started = next(event for event in seen if event.type == "command.started")
        assert started.data["command"] == ["sh", "-c", "exit 3"]
        assert next(event for event in seen if event.type == "command.exited").data["exit_code"] == 3
        assert seen[-1].type == "killed"
