"""Saved states on disk: whole or not there, checked before use, in use until let go."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from snapshot_helpers import FILES, FORMAT, World
from state_helpers import finish, in_child, on_small_disk, start

from sloplet import errors
from sloplet.controller import Snapshot
from sloplet.engines.base import StateFormat
from sloplet.state import digests, snapshots
from sloplet.state.snapshots import SnapshotStore

pytestmark = pytest.mark.anyone


def test_a_life(world: World) -> None:
    box = world.sandbox("dev", memory="64m")
    made = world.save(box, "first", parent=None, note="x", extra={"workdir": "/w", "facts": [1, 2]})
    assert made == world.store.snapshot(made.id) == world.store.find_snapshot("FIRST", box.id)
    assert (made.name, made.role, made.kind, made.sandbox, made.sandbox_name) == (
        "first", "snapshot", "live", box.id, "dev",
    )  # fmt: skip
    assert made.bytes == sum(len(data) for data in FILES.values())
    assert made.spec == box.spec
    assert Snapshot.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    with world.snapshots.open(made.id, FORMAT) as opened:
        assert opened.snapshot == made
        assert opened.format == FORMAT
        assert opened.extra == {"workdir": "/w", "facts": [1, 2]}
        assert opened.image == {"kind": "host"}
        assert {name: (opened.path / name).read_bytes() for name in FILES} == FILES
        listed = os.listdir(opened.fd)
        assert set(listed) == {*FILES, "manifest.json"}
    for name, entry in opened.manifest["files"].items():
        assert entry == {"bytes": len(FILES[name]), "sha256": hashlib.sha256(FILES[name]).hexdigest()}
    world.check_whole()
    world.snapshots.delete(made.id)
    assert world.store.list_snapshots() == []
    with pytest.raises(errors.SnapshotNotFound, match=made.id):
        world.snapshots.open(made.id, FORMAT)
    with pytest.raises(errors.SnapshotNotFound):
        world.snapshots.delete(made.id)
    world.check_whole()


def test_a_home_of_an_older_version_gets_the_folder(world: World) -> None:
    world.home.open()
    world.home.snapshots.rmdir()
    again = World(world.home.path)
    again.save(again.sandbox())
    again.close()


def symlink(draft: Path) -> None:
    (draft / "link").symlink_to("/etc/passwd")


def folder(draft: Path) -> None:
    (draft / "folder").mkdir()


def fifo(draft: Path) -> None:
    os.mkfifo(draft / "fifo")


def odd_name(draft: Path) -> None:
    (draft / "a b").touch()


def own_manifest(draft: Path) -> None:
    (draft / "manifest.json").write_text("{}")


@pytest.mark.parametrize("spoil", [symlink, folder, fifo, odd_name, own_manifest])
def test_only_plain_files_are_published(world: World, spoil: Callable[[Path], None]) -> None:
    box = world.sandbox()
    draft = world.snapshots.begin()
    (draft.path / "pages.img").write_bytes(b"x")
    spoil(draft.path)
    with pytest.raises(errors.SaveFailed):
        world.snapshots.publish(draft, box, role="snapshot", kind="live", format=FORMAT, image={})
    assert world.store.list_snapshots() == []
    world.check_whole()
    with pytest.raises(errors.SaveFailed, match="already"):
        world.snapshots.publish(draft, box, role="snapshot", kind="live", format=FORMAT, image={})


def test_a_draft_that_is_left_goes(world: World) -> None:
    with world.snapshots.begin() as draft:
        (draft.path / "pages.img").write_bytes(b"x")
        assert world.reap().snapshots == [], "its writer lives"
        assert draft.path.exists()
    assert draft.fd == -1
    world.snapshots.abandon(draft)
    world.check_whole()


def test_a_forked_child_does_not_touch_its_parents_draft(world: World) -> None:
    with world.snapshots.begin() as draft:
        in_child(draft.abandon)
        assert draft.path.exists()


def test_giving_up_waits_for_publish(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that is cancelled abandons a draft that a thread still publishes: it is published, and whole."""
    box = world.sandbox()
    draft = world.snapshots.begin()
    (draft.path / "pages.img").write_bytes(b"x")
    inside, gate, real = threading.Event(), threading.Event(), digests._read

    def slow(fd: int) -> str:
        inside.set()
        gate.wait(10)
        return real(fd)

    monkeypatch.setattr(digests, "_read", slow)
    with ThreadPoolExecutor(2) as pool:
        made = pool.submit(world.snapshots.publish, draft, box, role="snapshot", kind="live", format=FORMAT, image={})
        inside.wait(10)
        given_up = pool.submit(draft.abandon)
        gate.set()
        assert made.result(10).id == draft.id
        given_up.result(10)
    world.check_whole()
    assert len(world.store.list_snapshots()) == 1


# -- damage ---------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_unseen(path: Path) -> None:
    """With the size and the modification time as they were."""
    times = path.stat()
    flip(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def remove(path: Path) -> None:
    path.unlink()


def replace_by_link(path: Path) -> None:
    other = path.parent.parent / "elsewhere"
    path.rename(other)
    path.symlink_to(other)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [truncate, grow, flip, flip_unseen, remove, replace_by_link, replace_by_fifo, replace_by_folder]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["checkpoint.img", "pages.img", "manifest.json"])
def test_damage_is_found(world: World, name: str, damage: Callable[[Path], None]) -> None:
    made = world.save(world.sandbox("dev"), "first")
    with world.snapshots.open(made.id, FORMAT):
        pass  # it was good, and this process has seen it so
    damage(world.folder(made) / name)
    with pytest.raises(errors.SnapshotDamaged, match=f"snapshot first is damaged: .*{name}") as caught:
        world.snapshots.open(made.id, FORMAT)
    assert caught.value.hint
    world.snapshots.delete(made.id)
    assert set(os.listdir(world.home.snapshots)) <= {"elsewhere"}


def extra_file(world: World, made: Snapshot) -> None:
    (world.folder(made) / "more.img").touch()


def hidden_file(world: World, made: Snapshot) -> None:
    (world.folder(made) / ".hidden").touch()


def whole_folder(world: World, made: Snapshot) -> None:
    shutil.rmtree(world.folder(made))


def folder_is_a_link(world: World, made: Snapshot) -> None:
    world.folder(made).rename(world.home.path / "elsewhere")
    world.folder(made).symlink_to(world.home.path / "elsewhere")


def row_digest(world: World, made: Snapshot) -> None:
    with world.store._write() as db:
        db.execute("UPDATE snapshots SET digest = ?", ("0" * 64,))


def row_spec(world: World, made: Snapshot) -> None:
    """A record must not give the saved processes another posture than they had."""
    spec = replace(made.spec, user="root", env=(("A", "B"),)).to_dict()
    with world.store._write() as db:
        db.execute("UPDATE snapshots SET spec = ?", (json.dumps(spec),))


def row_spec_unreadable(world: World, made: Snapshot) -> None:
    with world.store._write() as db:
        db.execute("UPDATE snapshots SET spec = '{'")


def another_ones_folder(world: World, made: Snapshot) -> None:
    other = world.save(world.store.find("dev"), "other", files={"pages.img": b"other"})
    world.folder(made).rename(world.home.path / "elsewhere")
    shutil.copytree(world.folder(other), world.folder(made))


@pytest.mark.parametrize(
    "damage",
    [
        extra_file, hidden_file, whole_folder, folder_is_a_link, row_digest, row_spec, row_spec_unreadable,
        another_ones_folder,
    ],
)  # fmt: skip
def test_more_damage(world: World, damage: Callable[[World, Snapshot], None]) -> None:
    made = world.save(world.sandbox("dev"), "first")
    damage(world, made)
    assert made.id in [snapshot.id for snapshot in world.store.list_snapshots()]
    with pytest.raises(errors.SnapshotDamaged, match="first is damaged"):
        world.snapshots.open(made.id, FORMAT)


@pytest.mark.parametrize(
    ("here", "why"),
    [
        (replace(FORMAT, engine="process"), "another engine: gvisor, here is process"),
        (replace(FORMAT, version="runsc release-2"), "another version"),
        (replace(FORMAT, platform="ptrace"), "another platform"),
        (replace(FORMAT, arch="aarch64"), "another arch"),
        (replace(FORMAT, cpu=("sse2",)), "lacks avx2"),
    ],
)
def test_what_another_made_is_refused(world: World, here: StateFormat, why: str) -> None:
    made = world.save(world.sandbox(), "first")
    with pytest.raises(errors.SnapshotIncompatible, match=why) as caught:
        world.snapshots.open(made.id, here)
    assert "runsc release-1" in str(caught.value.hint)
    richer = replace(FORMAT, cpu=(*FORMAT.cpu, "avx512f"))
    for fine in (FORMAT, richer, None):
        world.snapshots.open(made.id, fine).close()


def test_a_layout_of_a_newer_version_is_refused(world: World) -> None:
    made = world.save(world.sandbox(), "first")
    path = world.folder(made) / "manifest.json"
    data = json.dumps({**json.loads(path.read_text()), "version": 2}).encode()
    path.write_bytes(data)
    with world.store._write() as db:
        db.execute("UPDATE snapshots SET digest = ?", (hashlib.sha256(data).hexdigest(),))
    with pytest.raises(errors.SnapshotIncompatible, match="layout 2"):
        world.snapshots.open(made.id, FORMAT)


def test_verify_apart(world: World) -> None:
    made = world.save(world.sandbox())
    flip(world.folder(made) / "pages.img")
    with world.snapshots.open(made.id, FORMAT, verify=False) as opened, pytest.raises(errors.SnapshotDamaged):
        opened.verify()


def test_many_verify_and_one_reads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world.save(world.sandbox())
    digests._forget()
    for name in FILES:  # as if written a while ago
        os.utime(world.folder(made) / name, (1, 1))
    read, real = [], digests._read
    gate = threading.Event()

    def slow(fd: int) -> str:
        read.append(fd)
        gate.wait(10)
        return real(fd)

    monkeypatch.setattr(digests, "_read", slow)
    monkeypatch.setattr(digests, "_FRESH_NS", -1)
    opened = [world.snapshots.open(made.id, FORMAT, verify=False) for _ in range(10)]
    threads = [threading.Thread(target=each.verify) for each in opened]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    for each in opened:
        each.verify()
        each.close()
    assert len(read) == len(FILES), "ten forks of one state read it once"


# -- in use -----------------------------------------------------------------------------


def test_what_is_open_is_not_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "DELETE_PATIENCE", 0.05)
    made = world.save(world.sandbox())
    opened = world.snapshots.open(made.id, FORMAT)
    other = SnapshotStore(world.home, world.store)
    other.delete(made.id)
    assert world.store.list_snapshots() == []
    assert (opened.path / "pages.img").exists(), "a restore may still open it by name"
    world.reap()
    assert (opened.path / "pages.img").exists()
    with pytest.raises(errors.SnapshotNotFound):
        world.snapshots.open(made.id, FORMAT)
    opened.close()
    opened.close()
    assert world.reap().snapshots == [made.id]
    world.check_whole()


def test_delete_waits_for_who_has_it_open(world: World) -> None:
    made = world.save(world.sandbox())
    opened = world.snapshots.open(made.id, FORMAT)
    thread = threading.Thread(target=world.snapshots.delete, args=(made.id,))
    thread.start()
    while world.store.list_snapshots():
        pass  # the row goes first
    assert (opened.path / "pages.img").exists()
    opened.close()
    thread.join(10)
    world.check_whole()


def test_a_descriptor_that_another_program_has_does_not_hold_it(world: World) -> None:
    """The folder's descriptor goes to engines, which may keep it for the life of a sandbox."""
    made = world.save(world.sandbox())
    opened = world.snapshots.open(made.id, FORMAT)
    kept = os.dup(opened.fd)
    opened.close()
    world.snapshots.delete(made.id)
    assert os.listdir(kept) == []
    os.close(kept)
    world.check_whole()


def test_a_forked_child_does_not_hold_it(world: World) -> None:
    made = world.save(world.sandbox())
    opened = world.snapshots.open(made.id, FORMAT)
    read, write = os.pipe()
    child = start(lambda: os.read(read, 1))
    os.close(read)
    opened.close()
    world.snapshots.delete(made.id)
    world.check_whole()
    os.write(write, b"x")
    os.close(write)
    finish(*child)


def test_fork_states_live_as_long_as_their_maker(world: World) -> None:
    box = world.sandbox()
    made = world.save(box, role="fork")
    for _ in range(2):
        assert not in_child(lambda: World(world.home.path).reap().snapshots), "another process reaps"
    world.snapshots.open(made.id, FORMAT).close()
    world.snapshots.delete(made.id)
    world.check_whole()

    def dies() -> None:
        World(world.home.path).save(box, role="export")
        os.kill(os.getpid(), signal.SIGKILL)

    pid, pipe = start(dies)
    os.waitpid(pid, 0)
    os.close(pipe)
    assert len(world.store.list_snapshots(role="export")) == 1
    assert len(world.reap().snapshots) == 1
    assert world.store.find(box.id).state == "running"
    world.check_whole()


# -- disk -------------------------------------------------------------------------------


def test_shared_objects(world: World) -> None:
    data = os.urandom(100_000)
    name = "o-" + hashlib.sha256(data).hexdigest()
    box = world.sandbox()
    parent = world.save(box, "a", kind="disk", files={name: data, "tree": b"1"})
    with world.snapshots.begin() as draft:
        assert not world.snapshots.share(draft, "o-" + "0" * 64, parent.id)
        assert not world.snapshots.share(draft, name, parent.id, size=len(data) - 1)
        assert not world.snapshots.share(draft, name, "nosuchparent")
        assert world.snapshots.share(draft, name, parent.id, size=len(data))
        assert not world.snapshots.share(draft, name, parent.id), "it is there"
        with pytest.raises(ValueError, match="content"):
            world.snapshots.share(draft, "tree", parent.id)
        child = world.snapshots.publish(
            draft, box, role="snapshot", kind="disk", format=FORMAT, image={}, name="b", parent=parent.id
        )
    assert (world.folder(child) / name).read_bytes() == data
    world.check_whole()
    world.snapshots.delete(parent.id, force=True)
    world.check_whole()
    assert world.store.snapshot(child.id).parent is None


def test_an_object_that_is_not_what_its_name_says_is_found(world: World) -> None:
    made = world.save(world.sandbox(), kind="disk", files={"o-" + "0" * 64: b"x"})
    with pytest.raises(errors.SnapshotDamaged):
        world.snapshots.open(made.id, FORMAT)


def test_a_full_disk(tmp_path: Path) -> None:
    """The manifest or the row finds no room: a typed error, nothing half there, and it works again later."""

    def run() -> list[str]:
        world = World(tmp_path / "disk" / "home")
        box = world.sandbox("dev")
        kept = world.save(box, "kept")
        said = []
        for spare in range(0, 80_000, 4096):
            filler = tmp_path / "disk" / "filler"
            draft = world.snapshots.begin()
            (draft.path / "pages.img").write_bytes(b"x" * 5000)
            with filler.open("wb", buffering=0) as file:
                file.write(b"x" * spare)
                with suppress(OSError):
                    while True:
                        file.write(b"x" * 4096)
                file.truncate(max(0, file.tell() - spare))
            try:
                world.snapshots.publish(draft, box, role="pause", kind="live", format=FORMAT, image={})
                said.append("ok")
            except errors.SaveFailed as error:
                said.append(str(error))
            filler.unlink()
            assert len(world.store.list_snapshots()) == 1 + said.count("ok")
            world.check_whole()
            if said[-1] == "ok":
                break
        world.snapshots.open(kept.id, FORMAT).close()
        return said

    (tmp_path / "disk").mkdir()
    said = on_small_disk(tmp_path / "disk", "1m", run)
    assert said[-1] == "ok"
    assert len(said) > 1, "it did run out of room"
    assert all("full" in each and "free some space" in each for each in said[:-1])


def test_a_file_size_limit(world: World) -> None:
    """As a quota would: any user can have it."""
    box = world.sandbox("dev")

    def run() -> str:
        mine = World(world.home.path)
        draft = mine.snapshots.begin()
        (draft.path / "pages.img").write_bytes(b"x")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with pytest.raises(errors.SaveFailed) as caught:
            mine.snapshots.publish(draft, box, role="snapshot", kind="live", format=FORMAT, image={})
        return str(caught.value)

    assert "ulimit" in in_child(run)
    assert world.store.list_snapshots() == []
    world.check_whole()


def test_interrupted_in_the_middle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    box = world.sandbox()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(world.store, "add_snapshot", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.save(box)
    world.check_whole()
