"""Conformance: a sandbox through time. Snapshots everywhere, processes that go on where the engine can save them."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from ...engines.base import Capabilities
from ...errors import (
    FileError,
    InvalidLimit,
    SandboxPaused,
    SnapshotExists,
    SnapshotInUse,
    SnapshotNotFound,
    UnsupportedOperation,
)
from ...sync import Process, Sandbox
from .support import MakeBox, needs, read_until

_COUNTER = 'n=0; while :; do n=$((n+1)); echo "$n"; echo "$n" > count; sleep 0.05; done'


def _needs_snapshots(capabilities: Capabilities) -> None:
    needs(capabilities.live_snapshots or capabilities.disk_snapshots, "this engine cannot save anything")


def _count(box: Sandbox) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        text = box.run("cat count").stdout.strip()
        if text:
            return int(text)
    raise AssertionError("the counter does not count")


def _counts_past(box: Sandbox, number: int) -> int:
    deadline = time.monotonic() + 20
    while (now := _count(box)) <= number:
        assert time.monotonic() < deadline, f"the counter stands at {now}"
    return now


class TestSnapshots:
    def test_extended_attributes_come_back(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        _needs_snapshots(capabilities)
        box = make_box()
        box.files.write("d/f", "x" * 100)
        box.files.write("d/empty", "")
        given = {"user.app.a": b"1\0\xff", "user.b": b"2"}
        try:
            for path in ("d", "d/f", "d/empty"):
                box.files.set_attributes(path, {**given, "user.gone": "soon"})
                box.files.set_attributes(path, {"user.gone": None})
        except FileError as error:
            needs(error.errno != errno.ENOTSUP, "this disk has no extended attributes")
            raise
        box.snapshot("start")
        box.files.remove("d", recursive=True)
        box.files.write("d/f", "another")
        box.rollback("start")
        assert [box.files.attributes(path) for path in ("d", "d/f", "d/empty")] == [given] * 3
        assert box.files.read("d/f") == b"x" * 100

    def test_rollback_brings_files_back(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        _needs_snapshots(capabilities)
        box = make_box()
        box.files.write("kept", "first\n")
        box.files.write("gone", "soon\n")
        box.run("mkdir -p folder/deep && echo x > folder/deep/file && ln -s kept link", check=True)
        box.run("chmod 750 folder")  # not everywhere allowed
        mode = box.files.stat("folder").mode
        snapshot = box.snapshot("start")
        assert snapshot.kind == ("live" if capabilities.live_snapshots else "disk")
        before = box.id
        box.run("echo second > kept; rm -r gone folder; echo new > new", check=True)
        info = box.rollback("start")
        assert (info.id, box.id, info.head) == (before, before, snapshot.id)
        assert box.files.read_text("kept") == "first\n"
        assert box.files.read_text("gone") == "soon\n"
        assert box.files.read_text("folder/deep/file") == "x\n"
        assert box.files.stat("folder").mode == mode
        assert box.run("readlink link").stdout == "kept\n"
        assert not box.files.exists("new")

    def test_a_tree_of_snapshots(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        _needs_snapshots(capabilities)
        box, other = make_box(), make_box()
        one, two = box.snapshot("one"), box.snapshot("two")
        box.rollback(one)
        three = box.snapshot()
        assert [(item.name, item.parent) for item in box.snapshots()] == [
            ("one", None), ("two", one.id), (None, one.id),
        ]  # fmt: skip
        with pytest.raises(SnapshotExists):
            box.snapshot("ONE")
        with pytest.raises(SnapshotInUse):
            box.delete_snapshot("one")
        with pytest.raises(SnapshotNotFound):
            other.rollback(one)
        with pytest.raises(SnapshotNotFound):
            box.rollback("no-such")
        box.delete_snapshot(two)
        box.delete_snapshot("one", force=True)
        assert [(item.id, item.parent) for item in box.snapshots()] == [(three.id, None)]
        assert box.run("echo still here").stdout == "still here\n"

    def test_a_template_starts_others(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        _needs_snapshots(capabilities)
        box = make_box()
        name = f"t-{box.id}"
        box.files.write("made", "before\n")
        template = box.template(name)
        box.kill()
        child = make_box(template=name, env={"MORE": "1"})
        try:
            assert child.files.read_text("made") == "before\n"
            assert child.run("echo $MORE").stdout == "1\n"
            assert child.id != template.sandbox
            with pytest.raises(SnapshotExists):
                child.template(name)
        finally:
            child.delete_snapshot(template, force=True)

    def test_undo(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        _needs_snapshots(capabilities)
        box = make_box(undo=2)
        for number in range(4):
            box.run(f"echo {number} > last; echo {number} >> all", check=True)
        undone = box.undo()
        assert "echo 3" in undone.note
        assert box.files.read_text("last") == "2\n"
        box.undo()
        assert box.files.read_text("all") == "0\n1\n"
        with pytest.raises(SnapshotNotFound):
            box.undo()

    def test_diff_and_apply(self, make_box: MakeBox, capabilities: Capabilities, tmp_path: Path) -> None:
        _needs_snapshots(capabilities)
        box = make_box()
        box.files.write("old", "one\ntwo\n")
        box.files.write("gone", "x\n")
        snapshot = box.snapshot()
        box.run("echo three >> old; rm gone; mkdir new; echo hi > new/file", check=True)
        diff = box.diff(snapshot)
        found = {change.path.removeprefix(box.workdir + "/"): change for change in diff.changes}
        assert {name: change.kind for name, change in found.items()} == {
            "old": "changed", "gone": "removed", "new": "added", "new/file": "added",
        }  # fmt: skip
        assert "+three" in (found["old"].text or "")
        since_image = {change.path: change.kind for change in box.diff(text=False).changes}
        assert since_image[f"{box.workdir}/old"] == "added"
        assert f"{box.workdir}/gone" not in since_image
        (tmp_path / "gone").write_text("x\n")
        done = box.apply(box.workdir, to=tmp_path, against=snapshot, delete=True)
        assert (tmp_path / "old").read_text() == "one\ntwo\nthree\n"
        assert (tmp_path / "new/file").read_text() == "hi\n"
        assert not (tmp_path / "gone").exists()
        assert not done.skipped

    def test_what_cannot_be_saved_says_so(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        needs(not capabilities.live_snapshots, "this engine saves processes")
        box = make_box()
        for call in (box.pause, lambda: box.fork(2)):
            with pytest.raises(UnsupportedOperation, match=r"cannot (save|copy) running processes"):
                call()
        assert box.run("echo goes on").stdout == "goes on\n"
        with pytest.raises(UnsupportedOperation):
            make_box(idle="5m")


class TestLiveState:
    def test_what_was_forgotten_between_two_sleeps_does_no_harm(
        self, make_box: MakeBox, capabilities: Capabilities
    ) -> None:
        """A restored kernel tells of descriptors that were closed before it was saved."""
        needs(capabilities.live_snapshots, "this engine cannot save running processes")
        box = make_box()
        process: Process | None = box.spawn("cat", stdin=True, detached=True)
        for _ in range(2):
            box.pause()
            assert box.run("echo awake").stdout == "awake\n"
            if process is not None:
                box.signal(process.pid, "KILL")
                for _ in range(70):  # more than are remembered of those that ended
                    box.run(["true"])
                process = None
        box.pause()
        assert box.run("echo awake").stdout == "awake\n"

    def test_pause_and_wake(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        needs(capabilities.live_snapshots, "this engine cannot save processes")
        box = make_box()
        process = box.spawn(_COUNTER, detached=True)
        seen = _counts_past(box, 2)
        assert box.pause().state == "paused"
        assert box.pause().state == "paused"
        with pytest.raises(SandboxPaused):
            process.wait()
        assert box.resume().state == "running"
        assert _counts_past(box, seen) > seen
        box.pause()
        assert _count(box) >= seen  # being used wakes it
        lines: list[str] = []
        for _, data in box.attach(process.pid):
            lines += str(data).split()
            if len(lines) > seen + 3:
                break
        assert lines == [str(number) for number in range(1, len(lines) + 1)]  # nothing lost, nothing twice

    def test_processes_keep_their_numbers_and_files_their_attributes(
        self, make_box: MakeBox, capabilities: Capabilities
    ) -> None:
        needs(capabilities.live_snapshots, "this engine cannot save processes")
        box = make_box()
        box.files.write("f", "x")
        box.files.set_attributes("f", {"user.a": "1"})
        process = box.spawn("echo $$; while read x; do echo $$; done", stdin=True, detached=True)
        assert int(read_until(process, "\n")) == process.os_pid
        box.pause()
        assert box.files.attributes("f") == {"user.a": b"1"}
        follower = box.attach(process.os_pid, by_os_pid=True, replay=False)
        assert (follower.pid, follower.os_pid) == (process.pid, process.os_pid)
        follower.send("\n")
        assert int(read_until(follower, "\n")) == process.os_pid
        box.signal(process.os_pid, "KILL", by_os_pid=True)
        assert follower.wait().exit_code == 137

    def test_rollback_brings_processes_back(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        needs(capabilities.live_snapshots, "this engine cannot save processes")
        box = make_box()
        process = box.spawn(_COUNTER, detached=True)
        _counts_past(box, 2)
        snapshot = box.snapshot()
        later = _counts_past(box, 20)
        box.signal(process.pid, "KILL")
        box.rollback(snapshot)
        assert _count(box) < later
        assert [item.running for item in box.processes() if item.pid == process.pid] == [True]
        assert _counts_past(box, later) > later

    def test_forks_are_themselves(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        needs(capabilities.live_snapshots, "this engine cannot save processes")
        box = make_box()
        box.spawn(_COUNTER, detached=True)
        seen = _counts_past(box, 2)
        children = box.fork(3)
        try:
            everyone = [box, *children]
            assert len({each.id for each in everyone}) == 4
            assert len({each.run("hostname").stdout for each in everyone}) == 4
            assert len({each.run("cat /run/sloplet/generation").stdout for each in everyone}) == 4
            draw = "od -An -N16 -tx1 /dev/urandom"
            assert len({each.run(draw).stdout for each in everyone}) == 4
            for number, child in enumerate(children):
                assert _counts_past(child, seen) > seen
                child.files.write("mine", str(number))
            assert [child.files.read_text("mine") for child in children] == ["0", "1", "2"]
            assert not box.files.exists("mine")
        finally:
            for child in children:
                child.kill()
        for count in (0, -1, 100000, True):
            with pytest.raises(InvalidLimit):
                box.fork(count)

    def test_sleeps_when_idle(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        needs(capabilities.live_snapshots, "this engine cannot save processes")
        box = make_box(idle="300ms")
        box.files.write("here", "still")
        deadline = time.monotonic() + 30
        while box.info().state != "paused":
            assert time.monotonic() < deadline, "it does not go to sleep"
            time.sleep(0.05)
        assert box.files.read_text("here") == "still"
        assert box.info().state == "running"
