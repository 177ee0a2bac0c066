"""The reaper: what the dead left goes, what the living hold stays, and no crash at any line leaves anything."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from state_helpers import fewer_and_fewer, finish, in_child, killed_at_line, on_two_cores, start

from sloplet.errors import SandboxExists, SandboxNotFound
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home, new_id
from sloplet.state.locks import FileLock, Owner, image_lock_path
from sloplet.state.reaper import KEEPER_DIED, reap
from sloplet.state.store import Store

pytestmark = pytest.mark.anyone


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def store(home: Home) -> Iterator[Store]:
    made = Store(home)
    yield made
    made.close()


def nothing(engine: str, sandbox_id: str) -> None:
    pass


def make(
    home: Home, store: Store, owner: Owner, *, name: str | None = None, holder: str = "embedded", steps: int = 3
) -> str:
    """As far as step 1 (reserved), 2 (a place), 3 (running)."""
    sandbox_id = new_id()
    spec = SandboxSpec.make(name)
    store.reserve(sandbox_id, spec, engine="fake", rung="process", holder=holder, owner=owner.token)
    if steps >= 2:
        place = home.make_place(owner.token, sandbox_id)
        (place / "upper").mkdir()
        (place / "upper" / "file").write_text("x")
    if steps >= 3:
        store.mark_running(sandbox_id)
    return sandbox_id


def left(home: Home) -> dict[str, list[str]]:
    """Everything that is not there in a fresh home."""
    folders = {"sandboxes": home.sandboxes, "owners": home.owners, "images": home.images, "run": home.run}
    folders["snapshots"], folders["network"], folders["volumes"] = home.snapshots, home.network, home.volumes
    found = {name: sorted(os.listdir(folder)) for name, folder in folders.items()}
    found["run"].remove("owners")
    found["home"] = sorted(
        set(os.listdir(home.path))
        - {"sandboxes", "images", "cache", "snapshots", "network", "volumes", "run"}
        - {"state.db", "state.db-wal", "state.db-shm"}
    )
    return {name: names for name, names in found.items() if names}


def test_nothing_to_do_is_cheap(home: Home, store: Store) -> None:
    owner = Owner(home)
    for _ in range(20):
        make(home, store, owner)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        assert not reap(home, store, nothing)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.001, "about 30 µs, and far below a millisecond on any machine"
    assert len(store.list()) == 20
    owner.release()


def test_the_dead_go_and_the_living_stay(home: Home, store: Store) -> None:
    living = Owner(home)
    mine = make(home, store, living, name="mine")

    def dies() -> list[str]:
        owner = Owner(Home(home.path))
        return [make(home, Store(home), owner, steps=steps) for steps in (1, 2, 3)]

    gone = in_child(dies)
    calls: list[tuple[str, str]] = []
    report = reap(home, store, lambda *call: calls.append(call))
    assert sorted(report.removed) == sorted(gone)
    assert sorted(calls) == sorted(("fake", sandbox_id) for sandbox_id in gone)
    assert (report.dead, report.orphans, report.errors) == ([], [], [])
    assert [info.id for info in store.list()] == [mine]
    assert (home.place(living.token, mine) / "upper" / "file").exists()
    assert not reap(home, store, nothing)
    assert left(home) == {"sandboxes": [living.token], "owners": [f"{living.token}.lock"]}
    living.release()


def test_what_a_keeper_ran_is_dead_not_gone(home: Home, store: Store) -> None:
    def dies() -> tuple[str, str, str]:
        own = Store(home)
        owner = Owner(home)
        running = make(home, own, owner, name="dev", holder="keeper")
        failed = make(home, own, owner, name="failed", holder="keeper")
        own.mark_dead(failed, "out of memory")
        return running, failed, make(home, own, owner, name="early", holder="keeper", steps=2)

    running, failed, early = in_child(dies)
    report = reap(home, store, nothing)
    assert (report.dead, report.removed) == ([running], [early])
    assert (store.find("dev").state, store.find("dev").reason) == ("dead", KEEPER_DIED)
    assert (store.find("failed").id, store.find("failed").reason) == (failed, "out of memory")
    with pytest.raises(SandboxNotFound):
        store.find("early")
    assert left(home) == {}
    assert not reap(home, store, nothing)
    with pytest.raises(SandboxExists, match="dead"):
        make(home, store, Owner(home), name="Dev")


def test_logs_of_those_that_are_gone_go_and_those_of_others_stay(home: Home, store: Store) -> None:
    living = Owner(home)
    mine = make(home, store, living)
    gone = new_id()
    for sandbox_id in (mine, gone):
        for ending in ("jsonl", "jsonl.1"):
            (home.network / f"{sandbox_id}.{ending}").write_text("{}\n")
    (home.network / "README.txt").write_text("not ours")
    reap(home, store, nothing)
    assert sorted(each.name for each in home.network.iterdir()) == sorted(
        ["README.txt", f"{mine}.jsonl", f"{mine}.jsonl.1"]
    )
    living.release()
    reap(home, store, nothing)  # its program has died: it goes, and what was written of it
    assert [each.name for each in home.network.iterdir()] == ["README.txt"]


def test_places_without_a_record_are_found(home: Home, store: Store) -> None:
    living = Owner(home)
    kept = make(home, store, living)
    home.make_place("dead-owner", "orphan")
    (home.sandboxes / "dead-owner" / "not an id").write_text("x")
    (home.sandboxes / "README").write_text("not ours, not touched")
    store.list()
    store.close()
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        home.path.joinpath(name).unlink(missing_ok=True)  # all records are lost
    calls: list[tuple[str, str]] = []
    report = reap(home, store, lambda *call: calls.append(call))
    assert sorted(report.orphans) == ["not an id", "orphan"]
    assert calls == [("", "orphan")]
    assert home.place(living.token, kept).exists(), "its owner lives, whatever the store has forgotten"
    assert (home.sandboxes / "README").exists()
    living.release()


def test_what_resists_is_reported_and_tried_again(home: Home, store: Store) -> None:
    sandbox_ids = in_child(lambda: [make(home, Store(home), Owner(home)) for _ in range(2)])

    def stubborn(engine: str, sandbox_id: str) -> None:
        if sandbox_id == sandbox_ids[0]:
            raise OSError(16, "the cgroup is busy")

    report = reap(home, store, stubborn)
    assert (report.removed, len(report.errors)) == ([sandbox_ids[1]], 1)
    assert "busy" in report.errors[0]
    assert sandbox_ids[0] in report.errors[0]
    assert [info.id for info in store.list()] == [sandbox_ids[0]]
    assert reap(home, store, nothing).removed == [sandbox_ids[0]]
    assert left(home) == {}


def test_half_written_images(home: Home, store: Store) -> None:
    home.open()
    for key in ("dead-writer", "living-writer"):
        (home.images / f".tmp-{key}" / "rootfs").mkdir(parents=True)
    (home.images / "0123abcd").mkdir()
    image_lock_path(home, "dead-too").touch()
    lock = FileLock.take(image_lock_path(home, "living-writer"))
    assert lock is not None
    assert reap(home, store, nothing).files == 2
    assert sorted(os.listdir(home.images)) == [".tmp-living-writer", "0123abcd"]
    lock.release()
    reap(home, store, nothing)
    assert left(home) == {"images": ["0123abcd"]}


def test_damaged_records(home: Home, store: Store) -> None:
    sandbox_ids = in_child(lambda: [make(home, Store(home), Owner(home)) for _ in range(3)])
    with store._write() as db:
        db.execute("UPDATE sandboxes SET spec = '{' WHERE id = ?", (sandbox_ids[0],))
        db.execute("UPDATE sandboxes SET owner = '../../x' WHERE id = ?", (sandbox_ids[1],))
        db.execute("UPDATE sandboxes SET id = '../../y' WHERE id = ?", (sandbox_ids[2],))
    outside = home.path.parent / "y"
    outside.mkdir()
    reap(home, store, nothing)
    reap(home, store, nothing)
    assert outside.exists()
    assert all(info.state == "dead" for info in store.list() if not info.id.startswith(".."))


def life(home: Home) -> None:
    """All that a holder does, in its order."""
    store, owner = Store(Home(home.path)), Owner(home)
    for name in ("dev", None):
        sandbox_id = make(home, store, owner, name=name)
        home.remove_place(owner.token, sandbox_id)
        store.remove(sandbox_id)
    store.close()
    owner.release()


def check(home: Home) -> None:
    """After one reap nothing is left, and everything works."""
    store = Store(Home(home.path))
    report = reap(home, store, nothing)
    assert report.errors == []
    assert left(home) == {}
    assert store.list() == []
    assert store.check() == []
    life(home)
    store.close()


@pytest.mark.parametrize("first_start", [True, False])
def test_killed_at_any_line_of_a_life(memory: Path, first_start: bool) -> None:
    def kill(name: str, lines: Iterator[int]) -> int:
        home = Home(memory / name)
        for line in lines:
            if first_start:
                home = Home(memory / f"{name}-{line}")
            else:
                life(home)
            if not killed_at_line(line, lambda home=home: life(home)):  # type: ignore[misc]
                return line
            check(home)
        raise AssertionError("there is no end of it")

    assert min(on_two_cores(lambda: fewer_and_fewer(60), kill)) > 200


def test_killed_at_any_line_of_a_reap(memory: Path) -> None:
    def kill(name: str, lines: Iterator[int]) -> int:
        home = Home(memory / name)

        def dies() -> None:
            store, owner = Store(home), Owner(home)
            for steps in (1, 2, 3):
                make(home, store, owner, steps=steps)
            home.make_place(owner.token, "orphan")
            os._exit(1)

        for line in lines:
            with pytest.raises(AssertionError, match="said nothing"):
                in_child(dies)
            if not killed_at_line(line, lambda: reap(Home(home.path), Store(home), nothing)):
                return line
            check(home)
        raise AssertionError("there is no end of it")

    assert min(on_two_cores(lambda: fewer_and_fewer(40), kill)) > 200


def test_many_reap_at_once(home: Home, store: Store) -> None:
    """Every dead sandbox is reaped by exactly one of six reapers that start together, and no living one by any."""
    living = Owner(home)
    kept = [make(home, store, living) for _ in range(5)]
    gone = []
    for _ in range(10):
        gone += in_child(lambda: [make(home, Store(home), Owner(home)) for _ in range(3)])
    begin, go = os.pipe()

    def work() -> list[str]:
        os.close(go)
        own = Store(home)
        own.list()
        os.read(begin, 1)
        report = reap(home, own, nothing)
        assert not report.errors, report.errors
        return report.removed

    children = [start(work) for _ in range(6)]
    os.close(go)
    os.close(begin)
    reaped = [sandbox_id for child in children for sandbox_id in finish(*child)]
    reaped += reap(home, store, nothing).removed
    assert sorted(reaped) == sorted(gone)
    assert sorted(info.id for info in store.list()) == sorted(kept)
    living.release()


def test_four_processes_of_random_work(home: Home) -> None:
    """GAUNTLET C-06: same names, first-start race, opening, closing and reaping in between, 0 errors."""
    operations = 2500
    begin, go = os.pipe()

    def work(seed: int) -> dict[str, int]:
        os.close(go)
        rng = random.Random(seed)
        store, owner = Store(Home(home.path)), Owner(home)
        held: dict[str, str | None] = {}
        done = {"made": 0, "taken": 0, "removed": 0}
        os.read(begin, 1)
        for _ in range(operations):
            action = rng.random()
            if action < 0.35 or not held:
                name = rng.choice([None, "dev", "Dev", "test", "TEST", "build"])
                try:
                    sandbox_id = make(home, store, owner, name=name, steps=1)
                    held[sandbox_id] = name
                    done["made"] += 1
                except SandboxExists:
                    done["taken"] += 1
            elif action < 0.55:
                sandbox_id = rng.choice(list(held))
                if store.find(sandbox_id).state == "starting":
                    store.mark_running(sandbox_id)
                if name := held[sandbox_id]:
                    assert store.find(name.upper()).id == sandbox_id, "a name is one sandbox's, until it is removed"
            elif action < 0.90:
                sandbox_id = rng.choice(list(held))
                assert store.remove(sandbox_id)
                del held[sandbox_id]
                done["removed"] += 1
            elif action < 0.96:
                names = [info.name.lower() for info in store.list() if info.name]
                assert len(names) == len(set(names))
            elif action < 0.98:
                assert reap(home, store, nothing).errors == []
            else:
                store.close()
        for sandbox_id in held:
            assert store.remove(sandbox_id)
        store.close()
        owner.release()
        return done

    children = [start(lambda seed=seed: work(seed)) for seed in range(4)]  # type: ignore[misc]
    os.close(begin)
    os.close(go)
    results = [finish(*child) for child in children]
    assert all(result["made"] > 100 for result in results)
    assert sum(result["taken"] for result in results) > 0
    check(home)
