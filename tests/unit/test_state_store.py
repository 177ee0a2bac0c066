"""The store: records come and go as promised, names clash, damage is said and never repaired by guessing."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from state_helpers import finish, in_child, on_small_disk, start

from sloplet.controller import SandboxInfo
from sloplet.errors import SandboxExists, SandboxNotFound, StateBusy, StateCorrupt, StateUnwritable
from sloplet.spec import SandboxSpec
from sloplet.state import database
from sloplet.state.home import Home, new_id
from sloplet.state.store import Store

pytestmark = pytest.mark.anyone

OWNER = "owner-token"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(Home(tmp_path / "home"))
    yield made
    made.close()


def reserve(
    store: Store, name: str | None = None, *, sandbox_id: str = "", holder: str = "keeper", **spec: object
) -> str:
    sandbox_id = sandbox_id or new_id()
    asked = SandboxSpec.make(name, **spec)  # type: ignore[arg-type]
    store.reserve(sandbox_id, asked, engine="fake", rung="process", holder=holder, owner=OWNER)
    return sandbox_id


def test_constructing_touches_nothing(tmp_path: Path) -> None:
    store = Store(Home(tmp_path / "home"))
    store.close()
    assert os.listdir(tmp_path) == []


def test_a_life(store: Store) -> None:
    spec = SandboxSpec.make("dev", ttl=60, memory="64m", env={"A": "ü\n"})
    made = store.reserve("abcd", spec, engine="fake", rung="process", holder="keeper", owner=OWNER, created_at=1000.0)
    assert made == store.find("abcd") == store.find("dev") == store.find("DEV")
    assert made == SandboxInfo(
        "abcd", "dev", "starting", "fake", "process", "keeper", 1000.0, 1060.0, "/workspace", spec
    )
    store.mark_running("abcd", workdir="/elsewhere")
    assert (store.find("dev").state, store.find("dev").workdir) == ("running", "/elsewhere")
    assert store.record("dev").owner == OWNER
    assert store.mark_dead("abcd", "it broke")
    assert not store.mark_dead("abcd", "a later reason does not count")
    assert (store.find("dev").state, store.find("dev").reason) == ("dead", "it broke")
    assert store.remove("abcd")
    assert not store.remove("abcd")
    assert store.list() == []
    with pytest.raises(SandboxNotFound, match="no sandbox 'dev'"):
        store.find("dev")
    assert not store.mark_dead("abcd", "gone")
    with pytest.raises(SandboxNotFound):
        store.mark_running("abcd")


def test_other_processes_see_it(store: Store) -> None:
    sandbox_id = reserve(store, "dev")
    assert in_child(lambda: Store(Home(store.home.path)).find("dev").id) == sandbox_id
    assert in_child(lambda: store.find("dev").id) == sandbox_id, "the same object works after a fork"
    in_child(lambda: store.mark_dead(sandbox_id, "said the child"))
    assert store.find("dev").reason == "said the child"


def test_a_fork_in_the_middle_of_a_transaction(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloplet.state.connection._FORK_PATIENCE", 0.1)  # here the forking thread itself holds the lock
    reserve(store, "before")
    with store._write() as db:
        db.execute("UPDATE sandboxes SET name = 'after'")
        names = in_child(lambda: [info.name for info in store.list()])  # over a connection and a lock of its own
        assert names == ["before"]
    assert store.find("after")


def test_a_transaction_that_fails_leaves_nothing(store: Store) -> None:
    reserve(store, "before")

    def fail() -> None:
        with store._write() as db:
            db.execute("DELETE FROM sandboxes")
            raise RuntimeError("undo")

    with pytest.raises(RuntimeError, match="undo"):
        fail()
    assert store.find("before")


@pytest.mark.parametrize("second", ["dev", "Dev", "DEV"])
@pytest.mark.parametrize("state", ["starting", "running", "dead"])
def test_a_name_is_taken_until_removed(store: Store, second: str, state: str) -> None:
    sandbox_id = reserve(store, "dev")
    if state != "starting":
        store.mark_running(sandbox_id)
    if state == "dead":
        store.mark_dead(sandbox_id, "x")
    with pytest.raises(SandboxExists, match=f"named 'dev' .*{state}") as caught:
        reserve(store, second)
    assert ("case" in str(caught.value)) == (second != "dev")
    assert len(store.list()) == 1
    store.remove(sandbox_id)
    reserve(store, second)


def test_unnamed_ones_do_not_clash_but_ids_do(store: Store) -> None:
    first = reserve(store)
    reserve(store)
    with pytest.raises(SandboxExists, match="id"):
        reserve(store, sandbox_id=first)
    with pytest.raises(ValueError, match="not an id"):
        reserve(store, sandbox_id="../x")


def test_an_id_wins_over_a_name(store: Store) -> None:
    first = reserve(store, sandbox_id="same")
    reserve(store, "same")
    assert store.find("same").id == first


@pytest.mark.parametrize("ref", ["", "none", "x" * 10_000, "a\0b", "'; DROP TABLE sandboxes; --", "%", "\udcff"])
def test_odd_references_find_nothing(store: Store, ref: str) -> None:
    reserve(store, "dev")
    with pytest.raises(SandboxNotFound) as caught:
        store.find(ref)
    assert len(str(caught.value)) < 300
    assert len(store.list()) == 1


def test_text_that_is_not_unicode(store: Store) -> None:
    sandbox_id = reserve(store, workdir="/w\udcff", image="./\udcfe.tar")
    assert (store.find(sandbox_id).workdir, store.find(sandbox_id).spec.image) == ("/w\udcff", "./\udcfe.tar")
    store.mark_running(sandbox_id, workdir="/x\udcfd")
    assert store.find(sandbox_id).workdir == "/x\udcfd"
    store.mark_dead(sandbox_id, "no \udcfc and \ud800")
    assert "no " in store.find(sandbox_id).reason
    with store._write() as db:
        db.execute("UPDATE sandboxes SET engine = CAST(x'ff00fe' AS TEXT)")
    assert store.list()[0].id == sandbox_id


def test_order_and_owners(store: Store) -> None:
    ids = [new_id() for _ in range(5)]
    for age, sandbox_id in enumerate(ids):
        store.reserve(
            sandbox_id, SandboxSpec(), engine="fake", rung="process", holder="embedded",
            owner=f"owner-{age % 2}", created_at=100.0 - age,
        )  # fmt: skip
    assert [info.id for info in store.list()] == ids[::-1]
    assert [record.info.id for record in store.records("owner-1")] == [ids[3], ids[1]]
    assert store.owners() == {"owner-0", "owner-1"}
    for sandbox_id in ids[::2]:
        store.mark_dead(sandbox_id, "x", disown=True)
    assert store.owners() == {"owner-1"}


def test_expired(store: Store) -> None:
    first = store.find(reserve(store, "a", ttl=10))
    reserve(store, "b", ttl=1000)
    reserve(store, "c")
    assert first.expires_at is not None
    assert [info.name for info in store.expired(first.expires_at)] == ["a"]
    assert store.expired(first.expires_at - 1) == []
    store.mark_dead(first.id, "x")
    assert store.expired(first.expires_at) == []


def test_many_threads(store: Store) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(50):
                sandbox_id = reserve(store, f"thread-{number}")
                store.mark_running(sandbox_id)
                store.remove(sandbox_id)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.list() == []
    assert store.check() == []


# Damage


def damaged(store: Store, content: bytes | None) -> None:
    reserve(store, "kept")
    store.close()
    if content is None:
        store.home.database.unlink()
    else:
        store.home.database.write_bytes(content)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"garbage" * 1000, "not a database"),
        (b"\0" * 8192, "not a database"),
        (b"SQLite format 3\0" + b"\xff" * 5000, "damaged"),
    ],
)
def test_a_damaged_file_is_said_and_left_alone(store: Store, content: bytes, says: str) -> None:
    damaged(store, content)
    for _ in range(2):
        with pytest.raises(StateCorrupt, match=says) as caught:
            store.list()
        assert "mv " in str(caught.value)
    assert store.home.database.read_bytes() == content
    assert not store.home.database.with_name("state.db.new").exists()
    store.home.database.rename(store.home.path / "state.db.damaged")  # what the hint says
    assert store.list() == []


def test_a_torn_file(store: Store) -> None:
    for number in range(200):
        reserve(store, f"n{number}")
    store.close()
    whole = store.home.database.read_bytes()
    page = 4096
    torn = whole[:page] + b"\xa5" * (len(whole) - page)
    store.home.database.write_bytes(torn)
    with pytest.raises(StateCorrupt, match="malformed"):
        store.list()
    store.close()
    assert store.home.database.read_bytes() == torn
    store.home.database.write_bytes(whole[: len(whole) // 2 // page * page])
    with pytest.raises(StateCorrupt):
        store.list()


def test_another_programs_database(store: Store) -> None:
    store.home.open()
    other = sqlite3.connect(store.home.database)
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    before = store.home.database.read_bytes()
    with pytest.raises(StateCorrupt, match="other program"):
        store.list()
    assert store.home.database.read_bytes() == before


def test_a_wal_without_its_database(store: Store) -> None:
    reserve(store, "dev")
    wal = store.home.path / "state.db-wal"
    kept = wal.read_bytes()
    assert kept
    store.close()
    store.home.database.unlink()
    wal.write_bytes(kept)
    with pytest.raises(StateCorrupt, match=r"state\.db-wal"):
        store.list()
    assert wal.read_bytes() == kept


def test_a_wal_that_a_crash_left_is_used(store: Store) -> None:
    def crash() -> None:
        reserve(Store(Home(store.home.path)), "from-the-dead")
        os._exit(9)

    pid = os.fork()
    if pid == 0:
        crash()
    os.waitpid(pid, 0)
    assert (store.home.path / "state.db-wal").stat().st_size
    assert store.find("from-the-dead").state == "starting"


def test_a_newer_schema(store: Store) -> None:
    reserve(store)
    store.close()
    db = sqlite3.connect(store.home.database)
    db.execute(f"PRAGMA user_version={len(database.MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(StateCorrupt, match="newer sloplet"):
        store.list()


def test_an_older_schema_is_migrated_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(store, "old")
    store.close()
    step = ("ALTER TABLE sandboxes ADD COLUMN extra TEXT NOT NULL DEFAULT 'new'",)
    monkeypatch.setattr(database, "MIGRATIONS", (*database.MIGRATIONS, step))
    children = [start(lambda: len(Store(Home(store.home.path)).list())) for _ in range(6)]
    assert [finish(*child) for child in children] == [1] * 6
    assert store._read("SELECT name, extra FROM sandboxes", ()) == [("old", "new")]


def test_a_failed_migration_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(store, "old")
    store.close()
    step = ("ALTER TABLE sandboxes ADD COLUMN extra TEXT", "THIS IS NOT SQL")
    with monkeypatch.context() as patch:
        patch.setattr(database, "MIGRATIONS", (*database.MIGRATIONS, step))
        with pytest.raises(StateCorrupt):
            store.list()
    assert store.find("old")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"limits": 3}', '{"name": "x", "limits": {}, "env": []}']
)
def test_one_damaged_record_does_not_hide_the_others(store: Store, text: str) -> None:
    good, bad = reserve(store, "good"), reserve(store, "bad")
    with store._write() as db:
        db.execute("UPDATE sandboxes SET spec = ? WHERE id = ?", (text, bad))
    assert {info.name: info.state for info in store.list()} == {"good": "starting", "bad": "dead"}
    assert "damaged" in store.find("bad").reason
    json.dumps(store.find("bad").to_dict())
    assert store.remove(bad)
    assert [info.id for info in store.list()] == [good]


def test_a_new_database_is_whole_or_not_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's close says nothing when it cannot move the WAL into the file; renaming then would lose the schema."""
    with monkeypatch.context() as patch:
        patch.setattr(database, "_is_whole", lambda path: False)
        with pytest.raises(StateUnwritable, match="could not be completed"):
            store.list()
    assert [name for name in os.listdir(store.home.path) if name.startswith("state.db")] == []
    connection = sqlite3.connect(store.home.path / "x.db")
    connection.execute("PRAGMA journal_mode=WAL")
    assert not database._is_whole(store.home.path / "x.db")
    connection.execute(f"PRAGMA application_id={database.APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={len(database.MIGRATIONS)}")
    assert not database._is_whole(store.home.path / "x.db"), "all of it is in the WAL"
    connection.close()
    assert database._is_whole(store.home.path / "x.db")
    assert store.list() == []


def test_busy_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(store, "dev")
    store.close()
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    other = sqlite3.connect(store.home.database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StateBusy, match="another process"):
        reserve(store)
    assert store.find("dev"), "reading goes on"
    other.execute("ROLLBACK")
    other.close()
    reserve(store)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    def check() -> tuple[int, list[str]]:
        store = Store(Home(tmp_path / "home"))
        made, refused = [], []
        for number in range(1000):
            try:
                made.append(reserve(store, f"n{number}", env={"X": os.urandom(2000).hex()}))
            except StateUnwritable as error:
                refused.append(str(error))
            if len(refused) == 8:
                break
        assert all("full" in text for text in refused), refused
        assert [info.id for info in store.list()] == made
        store.close()
        again = Store(Home(tmp_path / "home"))
        assert [info.id for info in again.list()] == made
        return len(refused), again.check()

    assert on_small_disk(tmp_path, "600k", check) == (8, [])


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    def check() -> list[str]:
        Home(tmp_path / "home").open()
        with pytest.raises(OSError, match="space"):
            fill(tmp_path / "filler")
        store = Store(Home(tmp_path / "home"))
        with pytest.raises(StateUnwritable, match=r"full|cannot write"):
            reserve(store)
        (tmp_path / "filler").unlink()
        reserve(store, "dev")
        return sorted(os.listdir(tmp_path / "home"))

    names = on_small_disk(tmp_path, "512k", check)
    assert [name for name in names if "new" in name] == []
