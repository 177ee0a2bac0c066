"""Live state through the CLI, as far as docs/live.md (test_docs_live.py) does not show it: terminals across a pause,
refusals, the container rung."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cli_helpers import Terminal, gvisor_environment, sloplet

pytestmark = pytest.mark.anyone


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of its own, with two gvisor sandboxes: dev and other."""
    wanted = {**gvisor_environment(), "SLOPLET_HOME": str(tmp_path_factory.mktemp("live") / "home")}
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        for name in ("dev", "other"):
            made = sloplet("create", name, "--engine", "gvisor")
            assert (made.returncode, made.stdout, made.stderr) == (0, name.encode() + b"\n", b"")
        yield Path(wanted["SLOPLET_HOME"])
        assert sloplet("rm", "--all", "--force").returncode == 0
        assert sloplet("snapshots", "--json").stdout == b"[]\n"
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def test_a_repl_in_mid_sentence_survives_a_pause(home: Path) -> None:
    pid = sloplet("exec", "dev", "-d", "-t", "--", "python3", "-iq").stdout.decode().strip()
    with Terminal("attach", "dev", pid) as terminal:
        terminal.expect(">>> ")
        terminal.send("answer = (40 +\r")
        terminal.expect("... ")
        terminal.send("\r~.")
        assert terminal.wait() == 0
    paused = sloplet("pause", "dev")
    assert paused.stdout.startswith(b"dev: paused, ")
    listed = {item["name"]: item for item in json.loads(sloplet("ls", "--json").stdout)}
    assert listed["dev"]["state"] == "paused"
    assert listed["dev"]["saved_at"] is not None
    with Terminal("attach", "dev", pid, "--no-replay") as terminal:
        terminal.send("2); print('=', answer)\r")
        terminal.expect("= 42")
        terminal.send("exit()\r")
        assert terminal.wait() == 0
        assert terminal.modes_restored()


def test_output_that_came_while_nobody_looked(home: Path) -> None:
    pid = sloplet("exec", "dev", "-d", "-c", "mkfifo f; echo before; read x < f; echo after").stdout.decode().strip()
    assert sloplet("pause", "dev").returncode == 0
    assert sloplet("exec", "dev", "-c", "echo go > f").returncode == 0
    assert sloplet("logs", "dev", pid, "-f").stdout == b"before\nafter\n"


def test_refusals_change_nothing(home: Path, tmp_path: Path) -> None:
    for name in ("base", "next"):
        assert sloplet("snapshot", "dev", name).returncode == 0
    [base, _] = json.loads(sloplet("snapshots", "dev", "--json").stdout)
    (tmp_path / "no-archive").write_bytes(b"PK\x03\x04 nonsense" * 1000)
    for words, said in (
        (("rollback", "other", base["id"]), b"base is a snapshot of dev"),
        (("rollback", "other", "base"), b"sloplet snapshots"),
        (("snapshots", "rm", "dev", "base"), b"next"),
        (("snapshot", "dev", "base"), b"another name"),
        (("fork", "dev", "2", "--snapshot", "none"), b"none"),
        (("undo", "dev"), b"undo"),
        (("import", str(tmp_path / "no-archive")), b"archive"),
        (("export", "dev", str(tmp_path / "no-archive")), b"no-archive"),
        (("create", "x", "--template", "none"), b"none"),
        (("create", "dev", "--engine", "gvisor", "--idle", "5m", "--reuse"), b"idle"),
    ):
        refused = sloplet(*words)
        assert (refused.returncode, refused.stdout) == (125, b""), words
        assert said in refused.stderr, words
        assert refused.stderr.count(b"\n") == 1, words
        assert refused.stderr.endswith(b")\n"), f"no hint: {refused.stderr!r}"
    assert sloplet("exec", "dev", "--", "echo", "runs").stdout == b"runs\n"
    states = {item["name"]: item["state"] for item in json.loads(sloplet("ls", "--json").stdout)}
    assert states == {"dev": "running", "other": "running"}
    assert (tmp_path / "no-archive").stat().st_size == 13000


def test_forks_skip_taken_names_and_go_with_rm(home: Path) -> None:
    assert sloplet("fork", "other", "1").stdout == b"other-1\n"
    assert sloplet("fork", "other", "2").stdout == b"other-2\nother-3\n"
    hosts = [sloplet("exec", name, "hostname").stdout for name in ("other-1", "other-3")]
    assert hosts == [b"other-1\n", b"other-3\n"]
    assert sloplet("snapshot", "other-1", "mine").returncode == 0
    with Terminal("rm", "other-1", "other-2", "other-3") as terminal:
        terminal.expect("other-1: 1 snapshot goes with it")
        assert terminal.wait() == 0


def test_diff_at_a_terminal_is_coloured_and_harmless(home: Path) -> None:
    sloplet("snapshot", "other", "clean")
    sloplet("exec", "other", "-c", r"printf 'red\033[31m\ttab\n' > text")
    with Terminal("diff", "other", "--against", "clean") as terminal:
        terminal.expect("added /workspace/text")
        shown = terminal.expect("1 added")
        assert terminal.wait() == 0
    assert b"\x1b[32m+red?[31m\ttab" in shown
    piped = sloplet("diff", "other", "--against", "clean").stdout
    assert b"+red\x1b[31m\ttab\n" in piped


def test_the_container_rung_saves_files_and_says_so(home: Path) -> None:
    from sloplet.engines import registry

    if not registry.load("container").probe().available:
        pytest.skip("no container engine here")
    assert sloplet("create", "box", "--engine", "container").returncode == 0
    sloplet("exec", "box", "-c", "echo one > file")
    saved = sloplet("snapshot", "box", "files")
    assert b"disk (files only: the container engine cannot save processes)" in saved.stdout
    sloplet("exec", "box", "-c", "echo two > file")
    back = sloplet("rollback", "box", "files")
    assert b"its files are back, and nothing runs" in back.stdout
    assert sloplet("exec", "box", "cat", "file").stdout == b"one\n"
    for words in (("pause", "box"), ("create", "x", "--engine", "container", "--idle", "5m")):
        refused = sloplet(*words)
        assert refused.returncode == 125
        assert b"gvisor" in refused.stderr
    assert sloplet("rm", "box").returncode == 0
