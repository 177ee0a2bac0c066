"""kill -9 at any line of saving, pausing, going on and deleting; and many processes at it at once.

Afterwards, after one reap: every snapshot that is listed can be used, none is half there, nothing is left over.
"""

from __future__ import annotations

import concurrent.futures.thread
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from snapshot_helpers import FORMAT, World
from state_helpers import finish, killed_at_new_line, on_two_cores, start

from sloplet import errors
from sloplet.controller import SandboxInfo
from sloplet.state.home import new_id

pytestmark = pytest.mark.anyone
assert concurrent.futures.thread, hashlib  # imported here once, and not by every child


#: Where files and rows are put in order. What the store does in between is one transaction, or none of it.
STEPS = frozenset({"snapshots.py", "layout.py", "snapshot_helpers.py", "test_snapshots_crash.py"})
REAPERS = frozenset({"reaper.py", "sweep.py"})


class Holder:
    """A process with a sandbox that has a snapshot and a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.world = World(path)
        self.box: SandboxInfo

    def begin(self) -> None:
        self.box = self.world.sandbox("dev")
        self.first = self.world.save(self.box, "first")
        self.checkpoint = self.world.save(self.box, role="checkpoint")
        self.world.snapshots.replace_saved(self.box.id, self.checkpoint)

    def snapshot(self) -> None:
        made = self.world.save(self.box, "second", parent=self.first.id)
        self.world.store.set_head(self.box.id, made.id)

    def save_checkpoint(self) -> None:
        self.world.snapshots.replace_saved(self.box.id, self.world.save(self.box, role="checkpoint"))

    def fork(self) -> None:
        made = self.world.save(self.box, role="fork")
        with self.world.snapshots.open(made.id, FORMAT):
            pass
        self.world.snapshots.delete(made.id)

    def delete(self) -> None:
        self.world.snapshots.delete(self.first.id)

    def pause_and_resume(self) -> None:
        world = self.world
        saved = world.pause(self.box)
        world.snapshots.delete(self.checkpoint.id)
        info = world.store.claim(self.box.id, world.owner.token, "keeper")
        assert info.saved == saved.id
        with world.snapshots.open(saved.id, FORMAT):
            world.store.mark_resumed(self.box.id, keep_saved=False)
        world.snapshots.delete(saved.id)

    def end(self) -> None:
        self.world.snapshots.delete_of_sandbox(self.box.id)
        self.world.store.remove(self.box.id)


def check(world: World) -> list[SandboxInfo]:
    """The holder was killed. Returns what is on record of its sandbox."""
    report = world.reap()
    assert report.errors == []
    world.check_whole()
    assert not world.reap(), "once is enough"
    found = world.store.list()
    for info in found:
        assert info.state in ("paused", "dead")
        world.snapshots.delete_of_sandbox(info.id)
        world.store.remove(info.id)
    for template in world.store.list_snapshots():
        assert template.role == "template"
        world.snapshots.delete(template.id)
    assert os.listdir(world.home.snapshots) == []
    return found


@pytest.mark.parametrize(
    ("work", "files"),
    [
        (Holder.snapshot, frozenset({"snapshots.py"})),
        (Holder.save_checkpoint, STEPS | {"draft.py"}),
        (Holder.fork, frozenset({"snapshots.py", "test_snapshots_crash.py"})),
        (Holder.delete, STEPS),
        (Holder.pause_and_resume, frozenset({"snapshots.py", "test_snapshots_crash.py"})),
        (Holder.end, STEPS),
    ],
)
def test_killed_at_any_line(memory: Path, work: Callable[[Holder], None], files: frozenset[str]) -> None:
    def kill(name: str, lines: Iterator[int]) -> int:
        world = World(memory / name)
        for line in lines:
            holder = Holder(world.home.path)
            if not killed_at_new_line(line, partial(work, holder), prepare=holder.begin, files=files):
                return line
            found = check(world)
            if work is not Holder.end:
                assert [info.name for info in found] == ["dev"]
                lost = work is Holder.pause_and_resume and found[0].saved is None
                assert found[0].saved or lost, "what it could be recovered from is there all the time"
        raise AssertionError("there is no end of it")

    assert min(on_two_cores(lambda: count(1), kill)) > 15


def leave(path: Path) -> None:
    """All kinds of leftovers."""
    holder = Holder(path)
    holder.begin()
    mine = holder.world
    mine.save(holder.box, role="fork")
    mine.save(holder.box, role="checkpoint")
    gone = mine.sandbox(holder="embedded")
    mine.save(gone, "with-it")
    due = mine.sandbox(ttl=1)
    mine.pause(due)
    mine.store._read("UPDATE sandboxes SET expires_at = 1 WHERE id = ?", (due.id,))
    draft = mine.snapshots.begin()
    (draft.path / "pages.img").write_bytes(b"x")
    (mine.home.snapshots / new_id()).mkdir()  # renamed, and killed before the row
    os._exit(0)


def test_killed_at_any_line_of_a_reap(memory: Path) -> None:
    def kill(name: str, lines: Iterator[int]) -> int:
        world = World(memory / name)
        for line in lines:
            os.waitpid(start(partial(leave, world.home.path))[0], 0)
            assert len(os.listdir(world.home.snapshots)) >= 7
            if not killed_at_new_line(line, World(world.home.path).reap, prepare=tuple, files=REAPERS):
                return line
            assert [info.name for info in check(world)] == ["dev"]
        raise AssertionError("there is no end of it")

    assert min(on_two_cores(lambda: count(1), kill)) > 50


def test_eight_processes_at_once(memory: Path) -> None:
    """Saving, opening, deleting, pausing, reaping on one home: what one deletes another finds whole or not at all."""
    world = World(memory / "home")
    box = world.sandbox("shared")
    begin, go = os.pipe()

    def work(seed: int) -> dict[str, int]:
        os.close(go)
        rng = random.Random(seed)
        mine = World(world.home.path)
        own = mine.sandbox(f"own-{seed}")
        done = dict.fromkeys(("saved", "taken", "opened", "missing", "deleted", "paused"), 0)
        os.read(begin, 1)
        for number in range(40):
            action = rng.random()
            listed = mine.store.list_snapshots(box.id)
            if action < 0.35 or not listed:
                try:
                    mine.save(box, rng.choice([None, "a", "A", "b"]), files={"pages.img": bytes([seed]) * number})
                    done["saved"] += 1
                except errors.SnapshotExists:
                    done["taken"] += 1
            elif action < 0.6:
                try:
                    with mine.snapshots.open(rng.choice(listed).id, FORMAT) as opened:
                        assert "pages.img" in os.listdir(opened.fd)
                        opened.verify()
                    done["opened"] += 1
                except errors.SnapshotNotFound:
                    done["missing"] += 1
            elif action < 0.85:
                try:
                    mine.snapshots.delete(rng.choice(listed).id)
                    done["deleted"] += 1
                except errors.SnapshotNotFound:
                    done["missing"] += 1
            elif action < 0.95:
                saved = mine.pause(own)
                mine.store.claim(own.id, mine.owner.token, "keeper")
                mine.store.mark_resumed(own.id, keep_saved=False)
                mine.snapshots.delete(saved.id)
                done["paused"] += 1
            else:
                assert mine.reap().errors == []
        mine.snapshots.delete_of_sandbox(own.id)
        mine.store.remove(own.id)
        mine.close()
        return done

    children = [start(lambda seed=seed: work(seed)) for seed in range(8)]  # type: ignore[misc]
    os.close(begin)
    os.close(go)
    results = [finish(*child) for child in children]
    total = {name: sum(result[name] for result in results) for name in results[0]}
    assert all(total[name] for name in ("saved", "taken", "opened", "deleted", "paused")), total
    world.reap()
    world.check_whole()
    assert len(world.store.list_snapshots(box.id)) == total["saved"] - total["deleted"]
    assert [info.name for info in world.store.list()] == ["shared"]
    world.close()
