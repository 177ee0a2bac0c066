"""R-07 and R-08: the share of the processor, and limits that make no sense."""

from __future__ import annotations

import time

import pytest
from hostile_kit import Target, install, parse

from sloplet import Sandbox
from sloplet.errors import ControlUnavailable, InvalidLimit, SlopletError

WINDOW = 3.0


def _cpu_seconds(box: Sandbox) -> float:
    return box.metrics().cpu_seconds


@pytest.mark.timeout(60)
def test_r07_quota(target: Target) -> None:
    """Eight spinning processes with half a processor: half a processor."""
    target.need_controls("cpus")
    with target.box(cpus=0.5) as box:
        if box.metrics().source["cpu_seconds"] != "cgroup":
            pytest.skip("no counter on the host's side")
        hog = box.spawn([install(box, "bombs"), "spin"])
        start, before = time.monotonic(), _cpu_seconds(box)
        while time.monotonic() - start < WINDOW:
            time.sleep(0.05)
        used = (_cpu_seconds(box) - before) / (time.monotonic() - start)
        hog.kill()
        assert used < 0.5 * 1.15, f"{used:.2f} processors used"


def test_r07_positive_control(target: Target) -> None:
    """With a whole one it uses more than that: the hog really is one."""
    target.need_controls("cpus")
    with target.box(cpus=1) as box:
        result = box.run([install(box, "bombs"), "spin"], timeout=1)
        assert result.timed_out
        assert _cpu_seconds(box) > 0.5


def test_r07_no_real_time(target: Target, box: Sandbox) -> None:
    users = ("agent", "root") if target.can.users else ("agent",)
    for user in users:
        said = parse(box.run([install(box, "bombs"), "realtime"], user=user).stdout)
        assert all(code != "0" for code in said.lines.values()), said.lines


BAD = {
    "cpus": [0, -1, float("nan"), float("inf"), "1e999", True, "many", 10**9, [], b"1"],
    "memory": [0, -1, 1, "1", "1k", "-5m", "nan", "1e999", 10**18 * 1000, "1000000000g", True, [], 3.7e300, "٣m"],
    "disk": [0, -1, 1, "1", "x", True, "1e999", {}, float("nan")],
    "pids": [0, -1, 1, 3.5, "many", True, 10**12, None.__class__],
    "open_files": [0, -1, 1, 2.5, True, "lots", 10**12],
    "ttl": [0, -1, float("nan"), "soon", True, "1e999", 10**30],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_r08_senseless_limits(name: str, value: object) -> None:
    with pytest.raises(InvalidLimit) as caught:
        Sandbox(**{name: value})  # type: ignore[arg-type]
    assert name in str(caught.value)


def test_r08_more_than_the_host_has(target: Target) -> None:
    """More than there is would be no limit: it is refused before anything is made."""
    for limits in ({"memory": "500000g"}, {"cpus": 4000}):
        with target.in_use(), pytest.raises((InvalidLimit, ControlUnavailable)):
            Sandbox(engine=target.name, **limits).start()  # type: ignore[arg-type]
    with target.in_use(), pytest.raises(SlopletError):
        Sandbox(engine=target.name, open_files=4_000_000).start()


def test_r08_positive_control(target: Target) -> None:
    limits = target.some(memory="64m", disk="16m", pids=32, open_files=64)
    with target.box(**limits) as box:
        assert box.run("true").ok
        told = {item.control: item for item in box.guarantees()}
        assert all(told[name].enforced for name in limits)
