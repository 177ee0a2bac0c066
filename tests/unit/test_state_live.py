"""The store's part of live state: sleeping and going on, who wins, and the tree of snapshots."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from snapshot_helpers import FORMAT, World
from state_helpers import finish, in_child, killed_at_line, memory_folder, start

from sloplet import errors
from sloplet.spec import SandboxSpec
from sloplet.state import database
from sloplet.state.home import Home, new_id
from sloplet.state.reaper import KEEPER_DIED, PROGRAM_DIED
from sloplet.state.snapshot_rows import STATE_GONE
from sloplet.state.store import Store

pytestmark = pytest.mark.anyone


# -- the schema ------------------------------------------------------------------------


def old_home(path: Path) -> Home:
    """As schema 1 left it, with a record of each state; specs as they were before live state and networks."""
    home = Home(path)
    home.open()
    home.snapshots.rmdir()
    home.network.rmdir()
    spec = SandboxSpec.make("x", ttl=60).to_dict()
    for field in ("template", "idle", "undo", "checkpoint_every", "pool", "secrets", "ports", "links", "authority"):
        del spec[field]
    spec["network"] = "none"
    db = sqlite3.connect(home.database)
    for statement in database.MIGRATIONS[0]:
        db.execute(statement)
    for number, state in enumerate(("starting", "running", "dead")):
        row = (f"abc{number}", f"Box-{number}", state, "fake", "process", "keeper", "token", json.dumps(spec))
        db.execute("INSERT INTO sandboxes VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", (*row, number, number + 60.0, "/w", state))
    db.execute("INSERT INTO sandboxes SELECT 'last', NULL, state, engine, rung, 'embedded', '', spec, created_at, "
               "NULL, CAST(x'2fff' AS TEXT), '' FROM sandboxes WHERE id = 'abc1'")  # fmt: skip
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(f"PRAGMA application_id={database.APPLICATION_ID}")
    db.execute("PRAGMA user_version=1")
    db.commit()
    db.close()
    return home


def check_migrated(store: Store) -> None:
    assert store.check() == []
    for number, state in enumerate(("starting", "running", "dead")):
        record = store.record(f"BOX-{number}")
        info = record.info
        assert (info.id, info.state, info.reason, record.owner) == (f"abc{number}", state, state, "token")
        assert (info.created_at, info.expires_at, info.workdir) == (number, number + 60.0, "/w")
        assert (info.spec.ttl, info.spec.undo, info.spec.template) == (60.0, 0, None)
        assert (info.saved, info.saved_at, info.head, info.recovered_from) == (None, None, None, None)
        assert (info.spec.network.mode, info.spec.authority, store.network(info.id)) == ("none", "", None)
    assert store.find("last").workdir == os.fsdecode(b"/\xff")
    assert len(store.list()) == 4
    assert store.list_snapshots() == []
    with pytest.raises(errors.SandboxExists):
        store.reserve(new_id(), SandboxSpec.make("box-0"), engine="f", rung="f", holder="keeper", owner="token")


def test_migration(tmp_path: Path) -> None:
    home = old_home(tmp_path / "home")
    store = Store(home)
    check_migrated(store)
    store.mark_paused("abc1", "saved", 1.0)
    assert store.find("abc1").state == "paused"
    assert store.set_network("abc1", "{}")
    assert store.network("abc1") == "{}"
    assert not store.set_network("nobody", "{}")
    assert store.network("nobody") is None
    store.close()
    fresh = Store(Home(tmp_path / "fresh"))
    schemas = [sorted(each._read("SELECT name, sql FROM sqlite_master", ())) for each in (Store(home), fresh)]
    assert schemas[0] == schemas[1], "a migrated database is like a new one"
    fresh.close()


def test_many_migrate_at_once(tmp_path: Path) -> None:
    home = old_home(tmp_path / "home")
    begin, go = os.pipe()

    def work() -> int:
        os.close(go)
        os.read(begin, 1)
        return len(Store(Home(home.path)).list())

    children = [start(work) for _ in range(6)]
    os.close(begin)
    os.close(go)
    assert [finish(*child) for child in children] == [4] * 6
    check_migrated(Store(home))


def test_killed_in_the_middle_of_a_migration() -> None:
    with memory_folder() as folder:
        old = old_home(folder / "old")
        line, step = 1, 1
        while True:
            home = Home(shutil.copytree(old.path, folder / f"home-{line}"))
            if not killed_at_line(line, lambda home=home: Store(home).list()):  # type: ignore[misc]
                break
            store = Store(home)
            check_migrated(store)
            store.close()
            line += step
            step = 1 + line // 20
        assert line > 80


# -- sleeping and going on --------------------------------------------------------------


def test_a_life_with_sleep(world: World) -> None:
    store = world.store
    box = world.sandbox("dev", holder="embedded")
    saved = world.pause(box)
    info = store.find("dev")
    assert (info.state, info.saved, info.saved_at) == ("paused", saved.id, saved.created_at)
    assert store.record("dev").owner == ""
    assert not world.reap(), "nobody holds it, and it stays"
    with pytest.raises(errors.SandboxExists, match="paused"):
        world.sandbox("Dev")
    claimed = store.claim(box.id, "next-owner", "keeper")
    assert (claimed.state, claimed.holder, claimed.saved) == ("starting", "keeper", saved.id)
    assert claimed == store.find("dev")
    assert store.record("dev").owner == "next-owner"
    store.mark_resumed(box.id, keep_saved=False, workdir="/there")
    info = store.find("dev")
    assert (info.state, info.saved, info.saved_at, info.workdir) == ("running", None, None, "/there")
    assert info.recovered_from is None
    world.snapshots.delete(saved.id)


def test_recovery(world: World) -> None:
    store = world.store
    box = world.sandbox("dev")
    first = world.save(box, role="checkpoint")
    store.replace_saved(box.id, first.id, first.created_at)
    second = world.save(box, role="checkpoint")
    world.snapshots.replace_saved(box.id, second)
    assert [snapshot.id for snapshot in store.list_snapshots(box.id)] == [second.id]
    assert store.mark_dead(box.id, "it broke", disown=True)
    assert (store.find("dev").state, store.find("dev").saved) == ("dead", second.id)
    assert store.claim(box.id, world.owner.token, "keeper").reason == ""
    assert store.unclaim(box.id, "dead", "it broke again")
    assert not store.unclaim(box.id, "dead", "no")
    assert (store.find("dev").state, store.find("dev").reason) == ("dead", "it broke again")
    store.claim(box.id, world.owner.token, "keeper")
    store.mark_resumed(box.id, keep_saved=True, recovered_from=second.created_at)
    info = store.find("dev")
    assert (info.state, info.saved, info.recovered_from) == ("running", second.id, second.created_at)
    assert store.replace_saved(box.id, None, None) == second.id


def test_what_cannot_be_claimed(world: World) -> None:
    store = world.store
    box = world.sandbox("dev")
    with pytest.raises(errors.SandboxError, match="running"):
        store.claim(box.id, "next-owner", "keeper")
    store.mark_dead(box.id, "it broke")
    with pytest.raises(errors.SandboxDead, match="it broke"):
        store.claim(box.id, "next-owner", "keeper")
    with pytest.raises(errors.SandboxNotFound):
        store.claim("nosuch", "next-owner", "keeper")
    asleep = world.sandbox("asleep")
    world.pause(asleep)
    with store._write() as db:
        db.execute("UPDATE sandboxes SET spec = '{' WHERE id = ?", (asleep.id,))
    with pytest.raises(errors.SandboxDead, match="damaged"):
        store.claim(asleep.id, "next-owner", "keeper")
    assert store.record(asleep.id).owner == ""


@pytest.mark.parametrize(
    "act",
    [
        lambda store, box: store.mark_paused(box, "x", 1.0),
        lambda store, box: store.replace_saved(box, "x", 1.0),
        lambda store, box: store.mark_resumed(box, keep_saved=False),
    ],
)
def test_in_the_wrong_state(world: World, act: Callable[[Store, str], Any]) -> None:
    box = world.sandbox()
    world.store.mark_dead(box.id, "x")
    with pytest.raises(errors.SandboxError, match="is dead, not"):
        act(world.store, box.id)
    world.store.remove(box.id)
    for each in (act, lambda store, box: store.set_head(box, None)):
        with pytest.raises(errors.SandboxNotFound):
            each(world.store, box.id)


def test_one_of_many_claims_it(world: World) -> None:
    """Threads of one store and processes of their own, all at once, many times."""
    box = world.sandbox("dev")
    for _ in range(10):
        saved = world.pause(box)
        begin, go = os.pipe()

        def claim(store: Store, owner: str) -> str:
            try:
                store.claim(box.id, owner, "keeper")
            except errors.SandboxError:
                return ""
            return owner

        def work(owner: str, begin: int = begin, go: int = go) -> str:
            os.close(go)
            os.read(begin, 1)
            return claim(Store(Home(world.home.path)), owner)

        children = [start(lambda number=number: work(f"process-{number}")) for number in range(3)]  # type: ignore[misc]
        os.close(begin)
        os.close(go)
        with ThreadPoolExecutor(3) as pool:
            won = list(pool.map(lambda number: claim(world.store, f"thread-{number}"), range(3)))
        won += [finish(*child) for child in children]
        winners = [owner for owner in won if owner]
        assert len(winners) == 1
        assert world.store.record(box.id).owner == winners[0]
        world.store.mark_resumed(box.id, keep_saved=False)
        world.snapshots.delete(saved.id)


# -- the reaper --------------------------------------------------------------------------


@pytest.mark.parametrize("holder", ["keeper", "embedded"])
def test_after_the_holders_death(world: World, holder: str) -> None:
    asleep, broken = world.sandbox("asleep"), world.sandbox("broken")
    world.pause(asleep)
    checkpoint = world.save(broken, role="checkpoint")
    world.store.replace_saved(broken.id, checkpoint.id, 1.0)
    world.store.mark_dead(broken.id, "it broke", disown=True)

    def dies() -> None:
        mine = World(world.home.path)
        box = mine.sandbox("checkpointed", holder=holder)
        mine.snapshots.replace_saved(box.id, mine.save(box, role="checkpoint"))
        mine.save(box, "kept")
        mine.save(box, role="checkpoint")  # published, and killed before it was noted
        mine.save(mine.sandbox("gone", holder="embedded"), "with-it")
        mine.save(mine.sandbox("maker", holder="embedded"), "template", role="template")
        for sandbox_id in (asleep.id, broken.id):
            mine.store.claim(sandbox_id, mine.owner.token, holder)
        os._exit(1)

    with pytest.raises(AssertionError, match="said nothing"):
        in_child(dies)
    report = world.reap()
    assert report.errors == []
    box = world.store.find("checkpointed")
    assert (box.state, box.reason) == ("dead", KEEPER_DIED if holder == "keeper" else PROGRAM_DIED)
    assert box.saved is not None
    assert report.dead == [box.id]
    assert [(each.role, each.name) for each in world.store.list_snapshots(box.id)] == [
        ("checkpoint", None),
        ("snapshot", "kept"),
    ]
    again = world.store.find("asleep")
    assert (again.state, again.reason, again.saved is not None) == ("paused", "", True)
    again = world.store.find("broken")
    assert (again.state, again.saved) == ("dead", checkpoint.id)
    assert sorted(str(info.name) for info in world.store.list()) == ["asleep", "broken", "checkpointed"]
    assert world.store.find_snapshot("template").role == "template"
    world.check_whole()
    assert not world.reap()
    for name in ("asleep", "broken", "checkpointed"):
        world.store.claim(world.store.find(name).id, world.owner.token, "keeper")


def test_sleepers_whose_time_is_up(world: World) -> None:
    due, recoverable, later, held = (world.sandbox(name, ttl=100) for name in ("due", "recoverable", "later", "held"))
    for box in (due, later, held):
        world.pause(box)
    world.store.replace_saved(recoverable.id, world.save(recoverable, role="checkpoint").id, 1.0)
    world.save(recoverable, "named")
    template = world.save(recoverable, "template", role="template")
    world.store.mark_dead(recoverable.id, "x", disown=True)
    world.store.claim(held.id, world.owner.token, "keeper")
    assert not world.reap().expired
    with world.store._write() as db:
        db.execute("UPDATE sandboxes SET expires_at = 1 WHERE name != 'later'")
    assert sorted(world.reap().expired) == sorted([due.id, recoverable.id])
    assert sorted(str(info.name) for info in world.store.list()) == ["held", "later"]
    assert [each.id for each in world.store.list_snapshots() if each.role != "pause"] == [template.id]
    world.check_whole()
    assert not world.store.remove_expired(held.id), "somebody has it"


def test_a_saved_state_that_the_disk_lost(world: World) -> None:
    asleep, running = world.sandbox("asleep"), world.sandbox("running")
    lost = [world.pause(asleep), world.save(running, "named")]
    for snapshot in lost:
        for path in world.folder(snapshot).iterdir():
            path.unlink()
        world.folder(snapshot).rmdir()
    assert sorted(world.reap().snapshots) == sorted(snapshot.id for snapshot in lost)
    info = world.store.find("asleep")
    assert (info.state, info.reason, info.saved) == ("dead", STATE_GONE, None)
    assert world.store.find("running").state == "running"
    assert world.store.list_snapshots() == []
    world.check_whole()


def test_states_of_a_database_that_was_moved_away_stay(world: World) -> None:
    """The hint on a damaged state.db says to move it away: that must not cost what was saved."""
    box = world.sandbox("dev")
    saved = world.pause(box)
    named = world.save(box, "named")
    world.snapshots.begin()
    world.close()
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        if (world.home.path / name).exists():
            (world.home.path / name).rename(world.home.path / f"{name}.away")
    fresh = World(world.home.path)
    assert fresh.reap().snapshots == []
    fresh.save(fresh.sandbox("new"), "new")
    fresh.reap()
    fresh.close()
    (world.home.path / "state.db.away").rename(world.home.database)
    for name in ("state.db-wal", "state.db-shm"):
        (world.home.path / name).unlink(missing_ok=True)
    again = World(world.home.path)
    for snapshot in (saved, named):
        again.snapshots.open(snapshot.id, FORMAT).close()
    assert again.store.find("dev").state == "paused"
    again.close()


def test_what_is_not_ours_stays(world: World) -> None:
    world.home.open()
    (world.home.snapshots / "notes").mkdir()
    (world.home.snapshots / "README").write_text("x")
    (world.home.run / "snapshot-A B.lock").touch()
    assert not world.reap()
    assert sorted(os.listdir(world.home.snapshots)) == ["README", "notes"]


# -- names and the tree ------------------------------------------------------------------


def test_names(world: World) -> None:
    one, two = world.sandbox("one"), world.sandbox("two")
    first = world.save(one, "Base")
    world.save(two, "base")
    world.save(one)
    world.save(one)
    for name in ("Base", "base", "BASE"):
        with pytest.raises(errors.SnapshotExists, match="named 'Base'") as caught:
            world.save(one, name)
        assert ("case" in str(caught.value)) == (name != "Base")
        with pytest.raises(errors.SnapshotExists):
            world.store.check_snapshot_free(name, "snapshot", one.id)
        assert world.store.find_snapshot(name, one.id) == first
    template = world.save(one, "Base", role="template")
    with pytest.raises(errors.SnapshotExists, match="template"):
        world.save(two, "base", role="template")
    world.store.check_snapshot_free(None, "snapshot", one.id)
    world.store.check_snapshot_free("free", "template", one.id)
    assert world.store.find_snapshot("bASE") == template
    assert world.store.find_snapshot(first.id) == world.store.find_snapshot(first.id, two.id) == first
    for ref in ("nosuch", "../x", "", "a" * 10_000, first.id[:-1]):
        for box in (None, one.id):
            with pytest.raises(errors.SnapshotNotFound) as missing:
                world.store.find_snapshot(ref, box)
            assert len(str(missing.value)) < 300
    world.check_whole()


def test_a_name_may_look_like_an_id(world: World) -> None:
    box = world.sandbox()
    first = world.save(box, "a")
    world.save(box, first.id)
    assert world.store.find_snapshot(first.id, box.id) == first, "ids come first"


def test_lists(world: World) -> None:
    one, two = world.sandbox("one"), world.sandbox("two")
    made = [world.save(box, role=role) for box in (one, two) for role in ("snapshot", "undo", "pause")]
    assert world.store.list_snapshots() == made
    assert world.store.list_snapshots(one.id) == made[:3]
    assert world.store.list_snapshots(role="undo") == [made[1], made[4]]
    assert world.store.list_snapshots(two.id, "undo") == [made[4]]
    assert world.store.list_snapshots("nosuch") == []


def test_children(world: World) -> None:
    store = world.store
    box = world.sandbox("dev")
    a = world.save(box, "a")
    b = world.save(box, "b", parent=a.id)
    c = world.save(box, "c", parent=b.id)
    world.save(box, role="undo", parent=c.id)
    store.set_head(box.id, c.id)
    with pytest.raises(errors.SnapshotInUse, match="snapshot c descends from"):
        world.snapshots.delete(b.id)
    world.sandbox("child", head=b.id)
    grandchild = world.sandbox(None, head=c.id)
    with pytest.raises(errors.SnapshotInUse, match="snapshot c, sandbox child descend from"):
        world.snapshots.delete(b.id)
    assert store.list_snapshots(box.id, "snapshot") == [a, b, c]
    world.snapshots.delete(b.id, force=True)
    assert store.snapshot(c.id).parent == a.id
    assert store.find("child").head == a.id
    with pytest.raises(errors.SnapshotInUse, match=f"sandbox {grandchild.id}"):
        world.snapshots.delete(c.id)
    store.mark_dead(grandchild.id, "x")
    assert store.find("dev").head == c.id
    world.snapshots.delete(c.id)  # the sandbox it was made of is not its child, nor is what undo() keeps, nor the dead
    assert store.find("dev").head == a.id
    assert store.list_snapshots(box.id, "undo")[0].parent == a.id
    world.check_whole()


def test_many_children_are_not_all_named(world: World) -> None:
    parent = world.save(world.sandbox(), "a")
    for number in range(20):
        world.sandbox(f"child-{number}", head=parent.id)
    with pytest.raises(errors.SnapshotInUse, match="and 15 more"):
        world.snapshots.delete(parent.id)


def test_what_a_sandbox_goes_on_from_stays(world: World) -> None:
    box = world.sandbox("dev")
    saved = world.pause(box)
    for force in (False, True):
        with pytest.raises(errors.SnapshotInUse, match=r"dev \(paused\)"):
            world.snapshots.delete(saved.id, force=force)
    world.snapshots.delete_of_sandbox(box.id)
    world.snapshots.delete_of_sandbox(box.id)
    assert (world.store.find("dev").state, world.store.find("dev").reason) == ("dead", STATE_GONE)
    world.check_whole()


def test_undo_points(world: World) -> None:
    box, other = world.sandbox(), world.sandbox()
    points = [world.save(box, role="undo", note=f"command {number} \udcff") for number in range(5)]
    named = world.save(box, "named", parent=points[2].id)
    world.save(other, role="undo")
    world.snapshots.prune_undo(box.id, 7)
    assert world.store.list_snapshots(box.id, "undo") == points
    world.snapshots.prune_undo(box.id, 2)
    assert world.store.list_snapshots(box.id, "undo") == points[3:]
    assert world.store.snapshot(named.id).parent is None
    world.snapshots.prune_undo(box.id, 0)
    assert len(world.store.list_snapshots(role="undo")) == 1
    world.check_whole()


def test_a_sandbox_that_was_removed_meanwhile(world: World) -> None:
    box = world.sandbox()
    world.store.remove(box.id)
    with pytest.raises(errors.SandboxNotFound):
        world.save(box)
    template = world.save(box, "t", role="template")
    assert not world.reap()
    assert world.store.list_snapshots() == [template]
    world.check_whole()
