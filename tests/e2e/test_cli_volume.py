"""``sloplet volume`` and ``-v``, as people use them, with a keeper that holds the sandboxes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cli_helpers import sloplet

from server_kit import need_container


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    need_container()
    chosen = tmp_path_factory.mktemp("volumes") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOPLET_HOME", str(chosen))
        yield chosen
        assert sloplet("rm", "--all", "--force").returncode == 0


def ok(*words: str) -> str:
    done = sloplet(*words)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def refused(*words: str) -> str:
    done = sloplet(*words)
    assert done.returncode == 125
    return done.stderr.decode()


def test_a_volumes_life(home: Path) -> None:
    assert ok("volume", "create", "data") == "data\n"
    assert "already is a volume" in refused("volume", "create", "data")
    assert ok("run", "--engine", "container", "-v", "data:/data", "-c", "echo one > /data/f; cat /data/f") == "one\n"
    assert ok("volume", "snapshot", "data", "before") == "before\n"
    ok("run", "--engine", "container", "-v", "data:/data", "-c", "echo two > /data/f")
    assert json.loads(ok("volume", "clone", "data:before", "old", "--json"))["source"] == "data:before"
    assert ok("run", "--engine", "container", "-v", "old:/o:ro", "-v", "data:/d", "-c", "cat /o/f /d/f") == "one\ntwo\n"
    assert ok("volume", "ls", "-q") == ok("volume", "-q") == "data\nold\n"
    told = json.loads(ok("volume", "inspect", "data", "--json"))
    assert [each["name"] for each in told["snapshots"]] == ["before"]
    assert "snapshot:  before" in ok("volume", "inspect", "data")
    assert ok("volume", "rm", "data:before", "data", "old") == "data:before\ndata\nold\n"
    assert json.loads(ok("volume", "ls", "--json")) == []
    assert "no volume 'data'" in refused("volume", "rm", "data")


def test_a_named_sandbox_has_it_until_it_is_removed(home: Path, tmp_path: Path) -> None:
    ok("create", "dev", "--engine", "container", "-v", "work:/work")
    ok("exec", "dev", "-c", "echo kept > /work/f")
    assert "the sandbox dev (read-write)" in ok("volume", "inspect", "work")
    assert "dev" in ok("volume", "ls")
    said = refused("run", "--engine", "container", "-v", "work:/w", "--", "true")
    assert "in use by the sandbox dev" in said
    assert "in use by the sandbox dev" in refused("volume", "rm", "work")
    assert "other settings: volumes" in refused("create", "dev", "--engine", "container", "-v", "work:/w", "--reuse")
    ok("create", "dev", "--engine", "container", "-v", "work:/work", "--reuse")
    assert "volume /work" in ok("guarantees", "dev") or "/work" in ok("guarantees", "dev", "--json")
    exported = sloplet("export", "dev", str(tmp_path / "dev.sloplet"))
    assert b"what is in its volumes is not in the archive: /work" in exported.stderr
    ok("rm", "dev", "--force")
    loaded = ok("import", str(tmp_path / "dev.sloplet"), "--name", "moved").strip()
    assert "kept" not in ok("exec", loaded, "-c", "cat /work/f 2>/dev/null; true")
    ok("rm", loaded, "--force")
    assert ok("run", "--engine", "container", "-v", "work:/w:ro", "--", "cat", "/w/f") == "kept\n"
    ok("volume", "rm", "work")


def test_a_copy_goes_back(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    (folder / "b.txt").write_text("b\n")
    monkeypatch.chdir(tmp_path)
    ok("create", "work", "--engine", "container", "-v", "./project:/workspace:copy")
    ok("create", "work", "--engine", "container", "-v", "./project:/workspace:copy", "--reuse")
    assert sloplet("diff", "work").stderr == b"no changes since the image\n"
    ok("exec", "work", "-c", "echo two >> a.txt; rm b.txt; echo c > c.txt")
    shown = ok("diff", "work")
    assert "+two" in shown
    assert "removed /workspace/b.txt" in shown
    assert ok("apply", "work", "--dry-run") == (
        "would write a.txt\nwould write c.txt\nwould skip b.txt: it was removed; --delete removes it\n"
    )
    assert ok("apply", "work", "a.txt") == "wrote a.txt\n"
    assert ok("apply", "work", "--delete") == "wrote c.txt\nremoved b.txt\n"
    assert (folder / "a.txt").read_text() == "one\ntwo\n"
    assert sorted(os.listdir(folder)) == ["a.txt", "c.txt"]
    (folder / "a.txt").write_text("mine\n")
    ok("exec", "work", "-c", "echo three >> a.txt")
    assert ok("apply", "work", "a.txt") == "skipped a.txt: it has changed here since it was copied\n"
    assert ok("apply", "work", "a.txt", "--to", str(folder)) == "wrote a.txt\n"
    assert "which changes?" in refused("apply", "work", "--to", str(folder))
    ok("rm", "work", "--force")
    assert os.listdir(home / "volumes" / ".copies") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-v", "data"), "is not a volume"),
        (("-v", "data:/x:maybe"), "makes no sense here"),
        (("-v", "data:/proc"), "the sandbox itself needs it"),
        (("-v", "a:/x", "-v", "b:/x"), "already"),
        (("-v", "./missing:/x"), "does not exist"),
        (("--volume", "missing:/x:ro"), "no volume 'missing'"),
    ],
)
def test_refusals(words: tuple[str, ...], said: str) -> None:
    assert said in refused("run", "--engine", "container", *words, "--", "true")


def test_the_process_rung_has_none() -> None:
    assert "cannot have volumes" in refused("run", "--engine", "process", "-v", "data:/x", "--", "true")


def test_a_shell_of_a_named_sandbox_takes_none() -> None:
    assert "--volume is for a fresh sandbox" in refused("shell", "dev", "-v", "data:/x")
