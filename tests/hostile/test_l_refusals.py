"""L: what cannot be done with a sandbox's state is refused in words; the source runs on, nothing is lost or left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_kit import eventually, host_pids, runtime
from live_kit import CHAIN, Chain, all_ended, box, call, home, saved_states, talk, talk_on

from sloplet import Sandbox, errors

pytestmark = [pytest.mark.anyone, pytest.mark.usefixtures("gvisor")]


@pytest.fixture(scope="module")
def made(gvisor: None) -> Iterator[Sandbox]:
    """One for all tests that must not harm it; a process with a state in memory runs in it."""
    with box() as source:
        yield source


@pytest.fixture
def source(made: Sandbox) -> Iterator[Sandbox]:
    """It runs on: the process in it, and all its files."""
    program, mirror = talk(made, CHAIN), Chain()
    assert program.ask("a") == mirror.add("a")
    made.files.write("kept", "kept")
    listed = [snapshot.id for snapshot in made.snapshots()]
    pids = set(host_pids(made))
    yield made
    assert talk_on(made, program.pid).ask("b") == mirror.add("b")
    assert made.files.read_text("kept") == "kept"
    assert [snapshot.id for snapshot in made.snapshots()] == listed
    assert set(host_pids(made)) & pids
    program.process.kill()


@pytest.mark.parametrize("count", [0, -1, 100_000, 10**30, "3", True, False, None, 1.0, [1]], ids=repr)
def test_forks_that_make_no_sense(count: Any, source: Sandbox) -> None:
    before = runtime().held
    with pytest.raises(errors.InvalidLimit, match=r"fork\("):
        source.fork(count)
    assert runtime().held == before


@pytest.mark.parametrize(
    "names", [[], ["a"], ["a", "A"], ["a", "b", "c"], ["a", "../b"], ["a", ""], ["a", 3]], ids=repr
)
def test_names_of_copies_that_make_no_sense(names: Any, source: Sandbox) -> None:
    with pytest.raises(errors.SpecError):
        source.fork(2, names=names)


def test_what_is_not_there(source: Sandbox) -> None:
    for job in (source.rollback, source.delete_snapshot, source.diff, lambda ref: source.fork(snapshot=ref)):
        for ref in ("nothing", "aaaaaaaaaaaa", "../../etc", "x" * 5000, ""):
            with pytest.raises((errors.SnapshotNotFound, errors.SpecError)):
                job(ref)
    for call_it in (runtime().pause, runtime().resume, runtime().snapshot):
        with pytest.raises(errors.SandboxNotFound):
            call(call_it("aaaaaaaaaaaa"))
    with pytest.raises(errors.SnapshotNotFound):
        Sandbox(template="nothing").start()


def test_what_belongs_to_another(source: Sandbox) -> None:
    """Another's snapshot, a template, one that is gone: neither by name nor by id."""
    with box() as other:
        theirs, template = other.snapshot("theirs"), other.template("theirs")
        gone = other.snapshot("gone")
        other.delete_snapshot("gone")
        try:
            for ref in (theirs, template, gone, "theirs", theirs.id, template.id, gone.id):
                with pytest.raises(errors.SnapshotNotFound):
                    source.rollback(ref)
                with pytest.raises(errors.SnapshotNotFound):
                    source.fork(snapshot=ref)
            assert [each.name for each in other.snapshots()] == ["theirs"]
        finally:
            call(runtime().delete_snapshot(template.id))


def test_names_that_are_taken(source: Sandbox) -> None:
    first = source.snapshot("first")
    try:
        for name in ("first", "FIRST"):
            with pytest.raises(errors.SnapshotExists):
                source.snapshot(name)
        for name in ("", "a/b", "a b", "x" * 64, "-a", "\0"):
            with pytest.raises(errors.SpecError):
                source.snapshot(name)
    finally:
        source.delete_snapshot(first)


def test_undo_without_undo(source: Sandbox) -> None:
    with pytest.raises(errors.SnapshotNotFound, match="undo=N"):
        source.undo()
    for steps in (0, -1, True, "1", 1.0):
        with pytest.raises(errors.SpecError):
            source.undo(steps)  # type: ignore[arg-type]


def test_undo_no_further_than_it_goes() -> None:
    with box(undo=2) as made:
        for number in range(4):
            made.run(f"echo {number} > note")
        with pytest.raises(errors.SnapshotNotFound, match=r"99 commands ago: .*2"):
            made.undo(99)
        made.undo(2)
        assert made.files.read_text("note") == "1\n"  # reading leaves no point to go back to
        with pytest.raises(errors.SnapshotNotFound, match="none"):
            made.undo()


def test_the_dead_and_the_gone() -> None:
    with box() as made:
        made.snapshot("first")
        os.kill(host_pids(made)[0], 9)
        eventually(lambda: _is_dead(made), 10)
        jobs = (made.snapshot, made.pause, made.resume, lambda: made.fork(2), lambda: made.rollback("first"), made.diff)
        for job in jobs:
            with pytest.raises((errors.SandboxDead, errors.SandboxNotFound, errors.SnapshotNotFound)):
                job()
    assert saved_states() == []


def _is_dead(made: Sandbox) -> bool:
    try:
        made.run("true")
    except errors.SandboxDead:
        return True
    return False


def test_children_hold_on_to_their_past(source: Sandbox) -> None:
    first = source.snapshot("first")
    second = source.snapshot("second")
    with all_ended(source.fork(1, snapshot="second")) as (child,):
        with pytest.raises(errors.SnapshotInUse, match="second"):
            source.delete_snapshot("first")
        with pytest.raises(errors.SnapshotInUse, match=child.id):
            source.delete_snapshot(second)
        source.delete_snapshot("first", force=True)
        source.delete_snapshot("second", force=True)
        with pytest.raises(errors.SnapshotNotFound):
            source.delete_snapshot(first)
        assert child.run("cat kept").stdout == "kept", "it feels nothing of it"
        child.pause()
        assert child.files.read_text("kept") == "kept"
    # What it stood on is gone, and it stands on.
    third = source.snapshot("third")
    assert third.parent is None
    source.delete_snapshot(third)


def test_other_settings_than_the_template_has(source: Sandbox, tmp_path: Path) -> None:
    template = source.template("warm")
    try:
        for settings in (
            {"image": f"dir:{tmp_path}"}, {"engine": "container"}, {"engine": "process"}, {"disk": "77m"},
            {"workdir": "/elsewhere"}, {"user": "root"}, {"at_least": "vm"},
        ):  # fmt: skip
            with pytest.raises(errors.SlopletError) as caught:
                Sandbox(template="warm", **settings).start()
            assert type(caught.value) in (errors.SpecError, errors.EngineUnavailable, errors.InvalidLimit), settings
        with pytest.raises(errors.SnapshotExists):
            source.template("WARM")
        with box(engine="auto", template="warm", env={"A": "1"}) as warm:
            assert warm.run("cat kept; echo $A").stdout == "kept1\n"
    finally:
        call(runtime().delete_snapshot(template.id))


@pytest.mark.parametrize("engine", ["container", "process"])
def test_engines_that_cannot(engine: str) -> None:
    try:
        made = Sandbox(engine=engine)
        made.start()
    except errors.EngineUnavailable as error:
        pytest.skip(str(error))
    try:
        for job in (made.pause, lambda: made.fork(2)):
            with pytest.raises(errors.UnsupportedOperation, match="gvisor"):
                job()
        assert made.run("echo on").stdout == "on\n"
        with pytest.raises(errors.UnsupportedOperation, match="gvisor"):
            Sandbox(engine=engine, idle="5m").start()
    finally:
        made.kill()


# -- damage ------------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def test_what_was_damaged_is_not_believed(source: Sandbox) -> None:
    """Every file of a snapshot, flipped, cut and grown: refused, and the sandbox runs on."""
    snapshot = source.snapshot("first")
    folder = home().snapshots / snapshot.id
    assert home().snapshots.stat().st_mode & 0o077 == 0, "memory lies there: it is nobody else's"
    files = sorted(folder.iterdir())
    assert len(files) >= 2
    for path in files:
        whole = path.read_bytes()
        for damage in (_flip, _cut, _grow, os.unlink):
            damage(path)
            with pytest.raises(errors.SnapshotDamaged):
                source.rollback("first")
            path.write_bytes(whole)
    for damage in (_flip, _cut):
        damage(files[0])
        with pytest.raises(errors.SnapshotDamaged):
            source.fork(3, snapshot="first")
        files[0].write_bytes(files[0].read_bytes())
    source.delete_snapshot("first")


def test_a_sleeper_whose_state_was_damaged() -> None:
    """It is told, again and again, and stays as it is; mended, it goes on."""
    with box() as made:
        made.files.write("kept", "kept")
        info = made.pause()
        assert info.saved is not None
        path = max((home().snapshots / info.saved).iterdir(), key=lambda file: file.stat().st_size)
        whole = path.read_bytes()
        _flip(path)
        for job in (made.resume, lambda: made.run("true"), lambda: made.fork(2), made.snapshot):
            with pytest.raises(errors.SnapshotDamaged):
                job()
            assert made.info().state == "paused"
        path.write_bytes(whole)
        assert made.run("cat kept").stdout == "kept"
