"""Conformance: sandboxes that sleep with their files only, and what happens when their time is over."""

from __future__ import annotations

import errno
import time

import pytest

from ...engines.base import Capabilities
from ...errors import (
    FileError,
    InvalidLimit,
    SandboxNotFound,
    SandboxPaused,
    SlopletError,
    SpecError,
    UnsupportedOperation,
)
from ...sync import Sandbox
from .support import MakeBox, needs

_PATIENCE = 30.0


def _needs_files(capabilities: Capabilities) -> None:
    needs(capabilities.disk_snapshots, "this engine cannot save files")


def _wait(box: Sandbox, state: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while (found := box.info().state) != state:
        assert time.monotonic() < deadline, f"it is {found}, not {state}"
        time.sleep(0.02)


def _is_there(box: Sandbox) -> bool:
    try:
        box.info()
    except SandboxNotFound:
        return False
    return True


def _wait_gone(box: Sandbox) -> None:
    deadline = time.monotonic() + _PATIENCE
    while _is_there(box):
        assert time.monotonic() < deadline, "it does not end"
        time.sleep(0.02)


class TestFilesOnly:
    def test_pause_without_memory(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        _needs_files(capabilities)
        box = make_box(env={"KEPT": "yes"}, labels={"of": "mine"})
        box.files.write("kept", "first\n")
        box.run("mkdir -p folder/deep && echo x > folder/deep/file && ln -s kept link; echo y > gone", check=True)
        before, hostname = box.id, box.run("hostname").stdout
        running = box.spawn("sleep 600", detached=True)
        paused = box.pause(memory=False)
        assert (paused.state, paused.id, paused.spec.labels) == ("paused", before, (("of", "mine"),))
        assert paused.saved is not None
        assert box.pause(memory=False).saved == paused.saved  # idempotent
        with pytest.raises(SandboxPaused):
            running.wait()
        info = box.resume()
        assert (info.state, info.id, info.saved) == ("running", before, None)
        assert box.processes() == []
        assert box.files.read_text("kept") == "first\n"
        assert box.run("readlink link; cat folder/deep/file; echo $KEPT").stdout == "kept\nx\nyes\n"
        assert box.run("hostname").stdout == hostname
        box.run("rm gone; echo second > kept", check=True)
        box.pause(memory=False)
        assert box.files.read_text("kept") == "second\n"  # being used wakes it
        assert not box.files.exists("gone")
        assert box.info().state == "running"

    def test_all_of_its_own_filesystem(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        """What was written, changed and removed anywhere, with owners, modes and links; not what is no file of it."""
        _needs_files(capabilities)
        needs(capabilities.private_filesystem and capabilities.users, "no filesystem of its own")
        box = make_box()
        if not box.run("test -d /usr/share/doc && test -d /dev/shm && command -v stat truncate", user="root").ok:
            pytest.skip("capability: the image lacks what is looked at")
        box.run(
            "echo t > /tmp/t; mkdir -m 700 /tmp/own; echo o > /tmp/own/o; echo h > ~/h; ln /tmp/t /tmp/same", check=True
        )
        box.run("truncate -s 50M /tmp/sparse; echo s > /dev/shm/s; chmod 640 ~/h", check=True)
        removed = ""
        if box.run("test -w /usr/share", user="root").ok:  # the image is not somebody's whom root has no power over
            removed = "rm -r /usr/share/doc; mkdir /usr/share/doc; echo d > /usr/share/doc/d; rm /usr/bin/env"
            box.run(removed, user="root", check=True)
        look = (
            "cd /; stat -c '%n %a %u:%g %s %h %F' /tmp /tmp/t /tmp/same /tmp/own /tmp/own/o /tmp/sparse ~/h "
            "/usr/share/doc /usr/share/doc/* | sed 's/ [0-9]* [0-9]* directory$/ directory/'; "
            "cat /tmp/t /tmp/own/o ~/h; test -e /usr/bin/env || echo gone; cat /etc/hostname /etc/hosts"
        )
        before = box.run(look, check=True).stdout
        assert ("gone\n" in before) == bool(removed)
        box.pause(memory=False)
        box.resume()
        assert box.run(look, check=True).stdout == before
        assert box.run("ls /dev/shm").stdout == ""
        assert box.run("test /tmp/t -ef /tmp/same && echo one").stdout == "one\n"

    def test_large_attributes_and_what_a_pipe_replaced(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        _needs_files(capabilities)
        needs(capabilities.private_filesystem, "no filesystem of its own")
        box = make_box()
        box.files.write("f", "x")
        replaced = box.run("rm /etc/shells && mkfifo /etc/shells", user="root").ok
        given = {"user.small": b"s"}
        try:
            box.files.set_attributes("f", given)
            box.files.set_attributes("f", {"user.large": b"x" * 38000})
            given["user.large"] = b"x" * 38000
        except FileError as error:  # not every disk has such, nor room for more than some KiB
            if error.errno not in (errno.ENOTSUP, errno.ENOSPC, errno.E2BIG):
                raise
            given = box.files.attributes("f") if error.errno != errno.ENOTSUP else {}
        box.pause(memory=False)
        box.resume()
        assert (box.files.attributes("f") if given else {}) == given
        assert not (replaced and box.files.exists("/etc/shells"))

    def test_snapshot_without_memory(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        _needs_files(capabilities)
        box = make_box()
        box.files.write("made", "before\n")
        box.spawn("sleep 600", detached=True)
        snapshot = box.snapshot("files", memory=False)
        assert (snapshot.kind, snapshot.role) == ("disk", "snapshot")
        assert len([each for each in box.processes() if each.running]) == 1  # it runs on
        name = f"f-{box.id}"
        template = box.template(name, memory=False)
        try:
            assert template.kind == "disk"
            box.run("rm made; echo new > new", check=True)
            child = make_box(template=name)
            assert child.files.read_text("made") == "before\n"
            assert child.processes() == []
            if box.run("hostname").ok and capabilities.private_filesystem:
                assert child.run("cat /etc/hostname").stdout == child.run("hostname").stdout
                assert child.run("hostname").stdout != box.run("hostname").stdout
            found = {change.path.rpartition("/")[2]: change.kind for change in box.diff(snapshot, text=False).changes}
            assert found == {"made": "removed", "new": "added"}
            box.rollback(snapshot)
            assert box.files.read_text("made") == "before\n"
            assert not box.files.exists("new")
            assert box.processes() == []
        finally:
            box.delete_snapshot(template, force=True)

    def test_what_sleeps_can_be_looked_at_and_copied(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        _needs_files(capabilities)
        box = make_box()
        box.files.write("made", "before\n")
        box.pause(memory=False)
        assert any(change.path.endswith("/made") for change in box.diff(text=False).changes)
        assert box.info().state == "paused"
        copy = box.snapshot("asleep")
        assert copy.kind == "disk"
        (child,) = box.fork(1)
        try:
            assert child.files.read_text("made") == "before\n"
        finally:
            child.kill()
        assert box.info().state == "paused"


class TestTimeToLive:
    def test_set_anew(self, make_box: MakeBox) -> None:
        box = make_box(ttl="1h")
        first = box.info().expires_at
        assert first is not None
        longer = box.set_ttl("2h").expires_at
        assert longer is not None
        assert 7190 < longer - time.time() < 7210
        assert box.info().expires_at == longer
        assert box.set_ttl(None).expires_at is None
        assert box.info().expires_at is None
        assert not any(item.control == "ttl" for item in box.guarantees())
        for wrong in (-1, "soon", True):
            with pytest.raises(InvalidLimit):
                box.set_ttl(wrong)
        box.set_ttl("300ms")
        _wait_gone(box)

    def test_over_now(self, make_box: MakeBox) -> None:
        box = make_box()
        assert box.set_ttl(0).state == "ended"
        with pytest.raises(SandboxNotFound):
            box.info()
        with pytest.raises(SlopletError):
            box.set_ttl(60)

    def test_it_sleeps_then(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        _needs_files(capabilities)
        for how in ("pause", "pause-disk") if capabilities.live_snapshots else ("pause-disk",):
            box = make_box(ttl="1h", on_ttl=how)
            box.files.write("kept", "here\n")
            box.spawn("sleep 600", detached=True)
            box.set_ttl("200ms")
            _wait(box, "paused")
            assert box.info().expires_at is None
            assert box.files.read_text("kept") == "here\n"
            info = box.info()
            assert (info.state, info.expires_at) == ("running", None)
            assert len([each for each in box.processes() if each.running]) == (1 if how == "pause" else 0)
            assert box.set_ttl(0).state == "paused"
            assert box.set_ttl(0).state == "paused"  # it sleeps on
            assert box.resume().expires_at is None

    def test_of_one_that_sleeps(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        _needs_files(capabilities)
        box = make_box(ttl="1h")
        box.pause(memory=False)
        assert box.info().expires_at is not None
        assert box.set_ttl(None).state == "paused"
        assert box.info().expires_at is None
        assert box.resume().expires_at is None
        box.pause(memory=False)
        later = box.set_ttl("1h").expires_at
        assert later is not None
        assert abs((box.resume().expires_at or 0) - later) < 1
        box.pause(memory=False)
        assert box.set_ttl(0).state == "ended"
        with pytest.raises(SandboxNotFound):
            box.info()

    def test_copies_have_one_of_their_own(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        _needs_files(capabilities)
        box = make_box()
        snapshot = box.snapshot(memory=False)
        (child,) = box.fork(1, snapshot=snapshot, ttl="1h")
        try:
            info = child.info()
            assert info.expires_at is not None
            assert 3500 < info.expires_at - time.time() < 3610
            assert box.info().expires_at is None
        finally:
            child.kill()

    def test_refused_before_anything_starts(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        with pytest.raises(SpecError):
            make_box(on_ttl="vanish")
        needs(not capabilities.live_snapshots, "this engine saves processes")
        with pytest.raises(UnsupportedOperation, match="on_ttl='pause'"):
            make_box(on_ttl="pause")
