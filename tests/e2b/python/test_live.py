"""Asleep and awake, copies, snapshots."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2b.exceptions import NotFoundException, SandboxException

from conftest import LIVE, needs_live, until
from e2b import Sandbox, SandboxQuery, SandboxState

BOOT = "/proc/sys/kernel/random/boot_id"


@needs_live
def test_memory_sleeps_and_wakes(box: Sandbox) -> None:
    handle = box.commands.run("sleep 1000", background=True)
    boot = box.files.read(BOOT)
    assert box.pause() is True
    assert box.pause() is False
    assert not box.is_running()
    assert box.get_info().state == SandboxState.PAUSED
    found = Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED])).next_items()
    assert box.sandbox_id in [item.sandbox_id for item in found]
    again = Sandbox.connect(box.sandbox_id)
    assert again.is_running()
    assert box.is_running()
    assert handle.pid in [each.pid for each in box.commands.list()]
    assert box.files.read(BOOT) == boot


def test_files_alone_sleep_and_wake(box: Sandbox) -> None:
    box.files.write("kept", "yes")
    handle = box.commands.run("sleep 1000", background=True)
    boot = box.files.read(BOOT)
    assert box.pause(keep_memory=False) is True
    assert not box.is_running()
    box.connect()
    assert box.is_running()
    assert box.files.read("kept") == "yes"
    assert handle.pid not in [each.pid for each in box.commands.list()]
    assert box.files.read(BOOT) != boot


def test_one_that_sleeps_can_be_killed(box: Sandbox) -> None:
    box.pause(keep_memory=False)
    assert box.kill() is True
    with pytest.raises(NotFoundException):
        Sandbox.connect(box.sandbox_id)


@needs_live
def test_it_sleeps_when_its_time_is_over(make: Callable[..., Sandbox]) -> None:
    box = make(timeout=2, lifecycle={"on_timeout": "pause", "auto_resume": False})
    box.files.write("kept", "yes")
    until(lambda: box.get_info().state == SandboxState.PAUSED)
    assert not box.is_running()
    assert box.get_info().state == SandboxState.PAUSED  # nobody woke it by asking
    box.connect()
    assert box.files.read("kept") == "yes"


@needs_live
def test_it_wakes_for_who_comes(make: Callable[..., Sandbox]) -> None:
    box = make(timeout=2, lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.files.write("kept", "yes")
    until(lambda: box.get_info().state == SandboxState.PAUSED)
    assert box.files.read("kept") == "yes"
    assert box.get_info().state == SandboxState.RUNNING


@needs_live
def test_copies(box: Sandbox) -> None:
    box.files.write("mine", "before")
    handle = box.commands.run("sleep 1000", background=True)
    copies = box.fork(count=2)
    try:
        assert len({box.sandbox_id, *(each.sandbox_id for each in copies)}) == 3
        for number, each in enumerate(copies):
            assert each.files.read("mine") == "before"
            assert handle.pid in [process.pid for process in each.commands.list()]
            each.files.write("mine", str(number))
        assert [each.files.read("mine") for each in (box, *copies)] == ["before", "0", "1"]
    finally:
        for each in copies:
            each.kill()


@pytest.mark.skipif(LIVE, reason="where memory can be saved this works")
def test_what_the_engine_cannot_do_is_said(box: Sandbox, make: Callable[..., Sandbox]) -> None:
    with pytest.raises(SandboxException, match=r"400.*cannot save running processes"):
        box.pause()
    with pytest.raises(SandboxException, match=r"400.*cannot copy running processes"):
        box.fork()
    with pytest.raises(SandboxException, match=r"400.*pause"):
        make(lifecycle={"on_timeout": "pause"})
    assert box.is_running()
