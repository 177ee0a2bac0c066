"""SLOPLET_HOME and owner locks: where, whose, refused when unsafe; owners live exactly as long as their lock."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from state_helpers import as_nobody, finish, in_child, on_small_disk, open_folder, remount_read_only, start

from sloplet.errors import StateUnwritable
from sloplet.state.home import ID_RE, Home, new_id
from sloplet.state.locks import FileLock, Owner, is_held, owner_lock_path
from sloplet.state.store import Store


def owner_alive(home: Home, token: str) -> bool:
    return is_held(owner_lock_path(home, token))


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SLOPLET_HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert Home().path == tmp_path / ".local/share/sloplet"
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    assert Home().path == tmp_path / ".local/share/sloplet"
    monkeypatch.setenv("XDG_DATA_HOME", "/xdg")
    assert Home().path == Path("/xdg/sloplet")
    monkeypatch.setenv("SLOPLET_HOME", "")
    assert Home().path == Path("/xdg/sloplet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLOPLET_HOME", "here")
    assert Home().path == tmp_path / "here"
    assert Home("~/x").path == tmp_path / "x"
    with pytest.raises(StateUnwritable):
        Home("a\0b")
    assert os.listdir(tmp_path) == []


def test_made_private_on_demand(tmp_path: Path) -> None:
    home = Home(tmp_path / "deep" / "er" / "home")
    assert not (tmp_path / "deep").exists()
    home.open()
    for folder in (home.path, home.sandboxes, home.images, home.cache, home.run, home.owners, home.snapshots):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert Home(home.path).open().path == home.path


def test_a_linked_home_is_fine(tmp_path: Path) -> None:
    (tmp_path / "big-disk").mkdir(mode=0o700)
    (tmp_path / "home").symlink_to("big-disk")
    Home(tmp_path / "home").open()
    assert (tmp_path / "big-disk" / "run").is_dir()


def test_refused_when_others_may_write(tmp_path: Path) -> None:
    for mode in (0o777, 0o770, 0o702):
        tmp_path.chmod(mode)
        with pytest.raises(StateUnwritable, match="chmod go-w"):
            Home(tmp_path).open()
    assert os.listdir(tmp_path) == []
    tmp_path.chmod(0o755)
    Home(tmp_path).open()


def test_refused_when_it_is_another_users() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of somebody else's")
    with open_folder() as folder:
        with pytest.raises(StateUnwritable, match="belongs to user 65534"):
            Home(folder).open()
        assert os.listdir(folder) == []


def test_refused_when_it_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StateUnwritable, match="not a folder"):
        Home(tmp_path / "file").open()
    with pytest.raises(StateUnwritable, match="is a file"):
        Home(tmp_path / "file" / "below").open()
    assert (tmp_path / "file").read_text() == "mine"


def test_refused_without_rights() -> None:
    def check() -> None:
        folder.chmod(0o500)
        Home(folder / "home").open()

    with open_folder() as folder, pytest.raises(StateUnwritable, match="not writable for this user"):
        as_nobody(check)


def test_read_only_filesystem(tmp_path: Path) -> None:
    def fresh() -> None:
        remount_read_only(tmp_path)
        Store(Home(tmp_path / "home")).list()

    def existing() -> None:
        home = Home(tmp_path / "home")
        store = Store(home)
        store.list()
        store.close()
        remount_read_only(tmp_path)
        Store(Home(tmp_path / "home")).list()

    with pytest.raises(StateUnwritable, match="read-only"):
        on_small_disk(tmp_path, "1m", fresh)
    with pytest.raises(StateUnwritable, match="cannot write"):
        on_small_disk(tmp_path, "1m", existing)


def test_places(tmp_path: Path) -> None:
    home = Home(tmp_path).open()
    place = home.make_place("owner", "sandbox")
    assert os.listdir(place) == []
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    with pytest.raises(StateUnwritable, match="exists"):
        home.make_place("owner", "sandbox")
    (place / "sub").mkdir()
    (place / "sub" / "file").write_text("x")
    home.remove_place("owner", "sandbox")
    home.remove_place("owner", "sandbox")
    home.remove_place("nobody", "nothing")
    assert not place.exists()
    for bad in ("", "..", "a/b", "a", "x" * 41, "A" * 8, "abcd\n"):
        with pytest.raises(ValueError, match="not an id"):
            home.place("owner", bad)
        with pytest.raises(ValueError, match="not an id"):
            home.place(bad, "sandbox")


def test_ids() -> None:
    made = {new_id() for _ in range(1000)}
    assert len(made) == 1000
    assert all(ID_RE.match(one) and len(one) == 12 for one in made)


def test_sockets_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Home("/h").socket_path() == Path("/h/run/keeper.sock")
    long = Home(tmp_path / ("x" * 100))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    with open_folder() as folder:
        if os.geteuid() == 0:
            os.chown(folder, 0, 0)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        short = long.socket_path()
        assert short.parent.parent == folder / "sloplet"
        assert len(os.fsencode(short)) <= 107
        assert short == long.socket_path()
        assert short != Home(tmp_path / ("y" * 100)).socket_path()
        (folder / "sloplet").chmod(0o777)
        assert long.socket_path().is_relative_to(f"/tmp/sloplet-{os.geteuid()}")
    shared = Path(f"/tmp/sloplet-{os.geteuid()}")
    for made in (*shared.iterdir(), shared):
        with suppress(OSError):  # only what is empty: a keeper's socket may be here
            made.rmdir()


# Locks


def test_an_owner_lives_as_long_as_its_process(tmp_path: Path) -> None:
    home = Home(tmp_path)
    go, wait = os.pipe()
    ready, tell = os.pipe()

    def hold() -> None:
        os.close(wait)
        os.write(tell, Owner(home).token.encode())
        os.read(go, 1)

    pid, pipe = start(hold)
    os.close(go)
    token = os.read(ready, 100).decode()
    assert owner_alive(home, token)
    assert FileLock.take(owner_lock_path(home, token)) is None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(AssertionError, match="said nothing"):
        finish(pid, pipe)
    assert not owner_alive(home, token)
    for fd in (wait, ready, tell):
        os.close(fd)


def test_release(tmp_path: Path) -> None:
    home = Home(tmp_path)
    owner = Owner(home)
    assert not tmp_path.joinpath("run").exists()
    token = owner.token
    assert token == owner.token
    assert owner_alive(home, token)
    owner.release()
    owner.release()
    assert not owner_alive(home, token)
    assert os.listdir(home.owners) == []
    assert owner.token != token
    home.make_place(owner.token, "left")
    last = owner.token
    owner.release()
    assert os.listdir(home.owners) == [f"{last}.lock"]
    assert not owner_alive(home, last)


def test_a_command_does_not_keep_the_lock(tmp_path: Path) -> None:
    home = Home(tmp_path)
    owner = Owner(home)
    token = owner.token
    with subprocess.Popen(["sleep", "60"], close_fds=False) as sleeper:
        owner.release()
        assert not owner_alive(home, token)
        sleeper.kill()


def test_a_forked_child_neither_holds_nor_releases(tmp_path: Path) -> None:
    home = Home(tmp_path)
    owner = Owner(home)
    token = owner.token

    def child() -> tuple[bool, bool, str]:
        held = owner.held
        owner.release()
        mine = owner.token
        return held, owner_alive(home, token), mine

    held, parent_alive, mine = in_child(child)
    assert (held, parent_alive) == (False, True)
    assert mine != token
    assert owner.token == token
    assert owner_alive(home, token)
    assert not owner_alive(home, mine)

    # A child that goes on must not keep its dead parent's claim alive.
    go, wait = os.pipe()
    ready, tell = os.pipe()
    pid, pipe = start(lambda: (os.close(wait), os.write(tell, b"x"), os.read(go, 1)))
    os.close(go)
    os.read(ready, 1)
    lock = owner._lock
    assert lock is not None
    os.close(lock._fd)  # as the kernel does when the parent dies: no LOCK_UN
    lock._fd = -1
    assert not owner_alive(home, token)
    for fd in (wait, ready, tell):
        os.close(fd)
    finish(pid, pipe)


def test_taking_and_removing_cannot_cross(tmp_path: Path) -> None:
    """Four processes take, check that they are alone, and remove the same lock file, again and again."""
    path, inside = tmp_path / "x.lock", tmp_path / "inside"

    def work() -> int:
        for _ in range(300):
            lock = FileLock.take(path, wait=True)
            assert lock is not None
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if another is in here
            os.unlink(inside)
            lock.release()
        return 300

    children = [start(work) for _ in range(4)]
    assert [finish(*child) for child in children] == [300] * 4
    assert not path.exists()
    assert not is_held(path)
