"""C-09 and C-06: a damaged, foreign, read-only or full SLOPLET_HOME, leftovers without a record and records without
anything, through the CLI as people meet them; and four programs that do random things to one SLOPLET_HOME at once.

Whatever is wrong, the message says what and how to go on, nothing is deleted silently, and once it is put right
everything that was there is there again.
"""

from __future__ import annotations

import ctypes
import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_kit import files_of

sys.path.append(str(Path(__file__).parent.parent / "unit"))
from state_helpers import as_nobody, on_small_disk, open_folder, remount_read_only

from sloplet.engines.machine import machine
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home
from sloplet.state.store import Store

OPS = int(os.environ.get("SLOPLET_STATE_OPS", "120"))
TOKEN, ORPHAN = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


def cli(home: Path, *words: str) -> tuple[int, str]:
    """(exit code, all that was said)."""
    done = subprocess.run(
        [sys.executable, "-m", "sloplet.cli", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "SLOPLET_HOME": str(home), "SLOPLET_KEEPER_IDLE": "0"},
    )
    assert "Traceback" not in done.stdout
    return done.returncode, done.stdout


def make_home(path: Path) -> Path:
    """A SLOPLET_HOME with something to lose: a dead sandbox that somebody may want to hear of."""
    store = Store(Home(path))
    keep(store, "keptkeptkept", "dev")
    store.mark_dead("keptkeptkept", "for a reason", disown=True)
    store.close()
    return path


def keep(store: Store, sandbox_id: str, name: str | None = None, holder: str = "keeper") -> None:
    spec = SandboxSpec(name=name)
    store.reserve(sandbox_id, spec, engine="container", rung="container", holder=holder, owner=TOKEN)


def listed(home: Path) -> dict[str, str]:
    code, said = cli(home, "ls", "--json")
    assert code == 0, said
    return {info["name"] or info["id"]: info["state"] for info in json.loads(said)}


# -- damage ------------------------------------------------------------------------------------------


def _edit(pragma: str) -> Callable[[Path], None]:
    def damage(database: Path) -> None:
        with sqlite3.connect(database) as connection:
            connection.execute(pragma)
        connection.close()

    return damage


def _flip(start: int, size: int) -> Callable[[Path], None]:
    def damage(database: Path) -> None:
        data = bytearray(database.read_bytes())
        for at in range(start, start + size):
            data[at] ^= 0x5A
        database.write_bytes(data)

    return damage


def _lose(database: Path) -> None:
    database.rename(database.with_name("state.db-wal"))


DAMAGE = {
    "empty": (lambda path: path.write_bytes(b""), "it is empty"),
    "header": (_flip(0, 16), "not a database"),
    "schema page": (_flip(100, 12), "damaged"),
    "newer": (_edit("PRAGMA user_version=99"), "written by a newer sloplet (schema 99"),
    "foreign": (_edit("PRAGMA application_id=1"), "some other program"),
    "database gone": (_lose, "is gone, but state.db-wal"),
}


@pytest.mark.anyone
@pytest.mark.parametrize("kind", DAMAGE)
def test_c09_damaged_store(kind: str, tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    database = home / "state.db"
    whole = database.read_bytes()
    damage, expected = DAMAGE[kind]
    damage(database)
    before = {name: (home / name).read_bytes() for name in ("state.db", "state.db-wal") if (home / name).exists()}
    for words in (("ls",), ("gc",), ("run", "--engine", "fake", "--", "true"), ("create", "new"), ("rm", "dev")):
        if kind == "database gone" and words == ("ls",):
            continue  # nothing on record, nothing is made: an empty list
        code, said = cli(home, *words)
        assert code == 125, (words, said)
        assert expected in said, (words, said)
        assert any(advice in said for advice in ("move", "upgrade", "restore")), said
    after = {name: (home / name).read_bytes() for name in before}
    assert after == before, "what was damaged is not touched: somebody may still save it"
    for name in before:
        (home / name).unlink()
    database.write_bytes(whole)  # restored from a backup
    assert listed(home) == {"dev": "dead"}, "nothing was lost"
    database.rename(home / "state.db.damaged")  # or moved away, as the hint says
    assert listed(home) == {}
    assert cli(home, "run", "--engine", "fake", "--", "true")[0] == 0


def test_c09_one_damaged_record_hides_no_other(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    store = Store(Home(home))
    keep(store, "halfhalfhalf", "half")
    store.close()
    with sqlite3.connect(home / "state.db") as connection:
        connection.execute("UPDATE sandboxes SET spec = substr(spec, 1, 20) WHERE name = 'half'")
    connection.close()
    assert listed(home) == {"dev": "dead", "half": "dead"}
    assert cli(home, "rm", "half") == (0, "half\n")
    assert listed(home) == {"dev": "dead"}


def test_c09_records_without_anything_and_things_without_a_record(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    store = Store(Home(home))
    keep(store, "startstarted", "starting")
    keep(store, "ranranranran", "running")
    store.mark_running("ranranranran")
    keep(store, "embeddedembe", None, "embedded")
    store.close()
    base = set(files_of(home))
    place = home / "sandboxes" / TOKEN / ORPHAN
    (place / "deep/er").mkdir(parents=True)
    (place / "deep/file").write_text("left")
    (home / "run/owners" / f"{TOKEN}.lock").touch()
    (home / "run/owners/cccccccccccc.lock").touch()
    (home / "images/.tmp-dddddddddddd/rootfs").mkdir(parents=True)
    (home / "run/image-dddddddddddd.lock").touch()
    groups = [f"{folder}/sloplet-{ORPHAN}" for folder in set(machine().cgroup.bases.values())]
    for group in groups:
        os.mkdir(group)
    try:
        code, said = cli(home, "gc", "--json")
        assert code == 0, said
        report = json.loads(said)
        assert not any(map(os.path.exists, groups)), "the cgroups of a place without a record"
    finally:
        for group in groups:
            if os.path.exists(group):
                os.rmdir(group)
    assert sorted(report["removed"]) == ["embeddedembe", "startstarted"]
    assert report["dead"] == ["ranranranran"]
    assert report["orphans"] == [ORPHAN]
    assert report["errors"] == []
    assert set(files_of(home)) <= base
    assert listed(home) == {"dev": "dead", "running": "dead"}, "what a keeper ran for somebody is reported, not dropped"
    assert cli(home, "gc") == (0, "nothing to clean up\n")


# -- read-only and full ------------------------------------------------------------------------------


def _refused(home: Path, *expected: str) -> None:
    for words in (("run", "--", "true"), ("run", "--engine", "fake", "--", "true"), ("create", "new"), ("rm", "dev")):
        code, said = cli(home, *words)
        assert code == 125, (words, said)
        assert any(text in said for text in expected), (words, said)
        assert "SLOPLET_HOME" in said or "writable" in said or "disk" in said, said


def _library_refuses(home: Path) -> None:
    script = (
        "from sloplet import Sandbox\nfrom sloplet.errors import StateUnwritable\n"
        "try:\n    Sandbox(engine='fake').start()\nexcept StateUnwritable as error:\n    print(error.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SLOPLET_HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr == ""


def test_read_only_filesystem(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def run() -> None:
        home = make_home(disk / "home")
        before = set(files_of(home))
        remount_read_only(disk)
        _refused(home, "ead-only", "readonly")
        _library_refuses(home)
        _remount_writable(disk)
        assert {name for name in files_of(home) if "-wal" not in name and "-shm" not in name} <= before
        assert listed(home) == {"dev": "dead"}
        assert cli(home, "run", "--engine", "fake", "--", "true")[0] == 0

    on_small_disk(disk, "8m", run)


def _remount_writable(path: Path) -> None:
    if ctypes.CDLL(None).mount(b"none", os.fsencode(path), None, 32, None):  # MS_REMOUNT
        raise OSError("remount")


def test_folder_that_may_not_be_written() -> None:
    """As an ordinary user, for whom modes count."""
    from crash_kit import _main_modules

    from sloplet.cli.main import invoke

    _main_modules()  # that user may not be able to read the interpreter's files
    with open_folder() as folder:

        def run() -> list[int]:
            os.environ["SLOPLET_HOME"] = str(folder / "home")
            os.chmod(folder, 0o500)
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            try:
                return [invoke(["run", "--engine", "fake", "--", "true"]), invoke(["create", "new"]), invoke(["ls"])]
            finally:
                os.chmod(folder, 0o700)

        assert as_nobody(run) == [125, 125, 0]
        assert os.listdir(folder) == [], "nothing was made"


@pytest.mark.parametrize("first", [True, False], ids=["at the first start", "later"])
def test_full_disk(tmp_path: Path, first: bool) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    def run() -> None:
        home = disk / "home"
        if not first:
            make_home(home)
        ballast = disk / "ballast"
        with open(ballast, "wb", buffering=0) as file:
            while True:
                try:
                    file.write(b"x" * 4096)
                except OSError:
                    break
        before = set(files_of(home))
        for words in (("run", "--engine", "fake", "--", "true"), ("create", "new")):
            code, said = cli(home, *words)
            assert code == 125, (words, said)
            assert "full" in said or "No space" in said, said
        _library_refuses(home)
        ballast.unlink()
        assert listed(home) == ({} if first else {"dev": "dead"})
        assert cli(home, "run", "--engine", "fake", "--", "true")[0] == 0
        allowed = ("state.db", "run", "sandboxes", "snapshots", "network", "images", "volumes", "cache")
        assert not [name for name in set(files_of(home)) - before if not name.startswith(allowed)]
        assert not [name for name in files_of(home) if name.startswith("sandboxes/")]

    on_small_disk(disk, "400k", run)


# -- many at once ------------------------------------------------------------------------------------

RANDOM_WORK = """
import asyncio, collections, json, random, sys
from sloplet import AsyncSandbox
from sloplet.errors import SandboxExists, SandboxNotFound
from sloplet.keeper.client import keeper_controller
from sloplet.spec import SandboxSpec

async def main(seed, count):
    pick, done = random.Random(seed), collections.Counter()
    keeper = await keeper_controller()
    for number in range(count):
        name = pick.choice(["one", "two", "three", "Two"])
        what = pick.choice(["create", "create", "kill", "kill", "list", "own"])
        try:
            if what == "create":
                engine = "container" if sys.argv[3] == "yes" and number % 20 == 0 else "fake"
                info = await keeper.create(SandboxSpec(name=name, engine=engine))
                assert info.state == "running" and info.name == name
            elif what == "kill":
                await keeper.kill((await keeper.find(name)).id)
            elif what == "list":
                names = [info.name.casefold() for info in await keeper.list() if info.name]
                assert len(names) == len(set(names)), names
            else:
                async with AsyncSandbox(engine="fake") as box:
                    assert (await box.run("echo hello")).stdout == "hello\\n"
            done[what] += 1
        except SandboxExists:
            done["exists"] += what == "create"
            assert what == "create"
        except SandboxNotFound:
            done["not found"] += 1
            assert what == "kill"
    print(json.dumps(done))

asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
"""


@pytest.mark.timeout(120 if OPS <= 500 else 0)
def test_c06_four_programs_at_random(tmp_path: Path) -> None:
    home = tmp_path / "home"  # not there yet: they make it together
    from sloplet.engines import registry

    container = "yes" if registry.load("container").probe().available else "no"
    environment = {**os.environ, "SLOPLET_HOME": str(home), "SLOPLET_KEEPER_IDLE": "0"}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", RANDOM_WORK, str(seed), str(OPS), container],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for seed in range(4)
    ]
    said = [program.communicate() for program in programs]
    left = listed(home)
    for name in left:  # first of all: whatever fails below, no keeper stays
        assert cli(home, "rm", name)[0] == 0
    assert [(program.returncode, errors) for program, (_, errors) in zip(programs, said, strict=True)] == [(0, "")] * 4
    total: Counter[str] = Counter()
    for output, _ in said:
        total.update(json.loads(output))
    print(dict(total))
    assert sum(total.values()) == 4 * OPS
    assert min(total[key] for key in ("create", "kill", "list", "own", "exists")) > 0
    assert set(left.values()) <= {"running"}
    assert len(left) <= 3, "`two` and `Two` are one name"
    store = Store(Home(home))
    assert store.list() == []
    assert store.check() == []
    store.close()
    assert cli(home, "gc")[0] == 0
    assert not [
        name for name in files_of(home) if name.startswith(("sandboxes/", "snapshots/", "run/owners/", "images/"))
    ]
