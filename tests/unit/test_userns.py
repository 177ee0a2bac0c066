"""The child that gives an ordinary user's files to his subordinate ids: what it may, what it has, when it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from state_helpers import finish, start

from layer_kit import MODE
from sloplet.engines.machine import machine
from sloplet.errors import EngineError, StateUnwritable
from sloplet.images import userns

pytestmark = pytest.mark.skipif(MODE != "range", reason="only for an ordinary user with subordinate ids")
CHOWN, DAC_OVERRIDE, FOWNER = 1 << 0, 1 << 1, 1 << 3


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_what_it_is(folder: int) -> None:
    secret = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(secret, True)
    child = userns._Child(machine())
    try:
        assert child.run("remove", {"name": "nothing"}, [folder], lambda done: None) == {"removed": 0}
        facts = status(child._process.pid)
        for caps in ("CapEff", "CapPrm"):
            assert int(facts[caps], 16) == CHOWN | DAC_OVERRIDE | FOWNER
        assert facts["NoNewPrivs"] == "1"
        assert int(facts["CapInh"], 16) == 0
        links = {os.readlink(path) for path in Path(f"/proc/{child._process.pid}/fd").iterdir()}
        assert len([link for link in links if link.startswith("socket:")]) == 1
        assert {link for link in links if not link.startswith("socket:")} == {"/dev/null"}
        assert "PYTEST_CURRENT_TEST" not in Path(f"/proc/{child._process.pid}/environ").read_text()
    finally:
        child.end()
        os.close(secret)


def test_it_dies_with_its_parent() -> None:
    def parent() -> int:
        child = userns._Child(machine())
        fd = os.open("/tmp", os.O_RDONLY)
        child.run("remove", {"name": "nothing-of-that-name"}, [fd], lambda done: None)
        pid = os.fork()
        if not pid:
            time.sleep(60)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return child._process.pid

    pid = finish(*start(parent))
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and status(pid)["State"][:1] != "Z" and time.monotonic() < until:
        time.sleep(0.005)
    assert not os.path.exists(f"/proc/{pid}") or status(pid)["State"][:1] == "Z"


def test_what_goes_wrong_is_typed(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with userns.Session() as session:
        with pytest.raises(EngineError, match="KeyError"):
            session.run("no such job", {}, [folder])
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        with pytest.raises(StateUnwritable):
            session.run("remove", {"name": "1"}, [proc])
        os.close(proc)
        assert session.run("remove", {"name": "nothing"}, [folder]) == {"removed": 0}, "it goes on after that"
    here = machine()
    for changes, says in (({"newuidmap": "/bin/false"}, "did not map"), ({"newgidmap": "/none/such"}, "did not map")):
        monkeypatch.setattr(userns, "machine", lambda changes=changes: replace(here, **changes))
        with pytest.raises(EngineError, match=says):
            userns.run("remove", {"name": "x"}, [folder])


def test_a_killed_child_is_an_error(folder: int) -> None:
    child = userns._Child(machine())
    os.kill(child._process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended unexpectedly"):
        child.run("remove", {"name": "x"}, [folder], lambda done: None)
    child.end()


def test_removing_what_is_others(tmp_path: Path, folder: int) -> None:
    """Positive control: without the child it cannot be removed."""
    from layer_kit import folder as entry
    from layer_kit import make_image, member, tar
    from sloplet.fs import remove_tree
    from sloplet.images.store import ImageStore
    from sloplet.state.home import Home

    store = ImageStore(Home(tmp_path / "home"))
    image = make_image(store, tar(entry("d", 0o700, uid=1000), member("d/f", b"x", uid=1000, mode=0o600)))
    store.resolve(image).close()
    store.close()
    with pytest.raises(StateUnwritable):
        remove_tree(folder, "home")
    assert userns.remove(tmp_path, "home") > 0
    assert os.listdir(tmp_path) == []
