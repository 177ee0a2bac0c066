"""The CLI's pure parts: keys, terminal modes, numbers, names, environments, and what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from sloplet.cli.copying import bar_text, own_name
from sloplet.cli.cp import in_sandbox
from sloplet.cli.main import ALIASES, VERBS, cli, invoke
from sloplet.cli.options import environment
from sloplet.cli.output import plain, size, span
from sloplet.cli.terminal import Escapes, ModeTracker
from sloplet.errors import SpecError
from sloplet.results import Progress

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize(
    ("typed", "passed", "leaves"),
    [
        ([b"hello\r"], b"hello\r", False),
        ([b"~."], b"", True),
        ([b"ls\r~."], b"ls\r", True),
        ([b"ls\r", b"~", b"."], b"ls\r", True),
        ([b"~~"], b"~", False),
        ([b"~x"], b"~x", False),
        ([b"a~."], b"a~.", False),
        ([b"cd ~\r"], b"cd ~\r", False),
        ([b"\n~a~.\n~."], b"\n~a~.\n", True),
        ([b"", b"~."], b"", True),
    ],
)
def test_the_way_out(typed: list[bytes], passed: bytes, leaves: bool) -> None:
    escapes = Escapes()
    got, left = b"", False
    for piece in typed:
        data, left = escapes.feed(piece)
        got += data
    assert (got, left) == (passed, leaves)


@pytest.mark.parametrize(
    ("printed", "undone"),
    [
        ([b"plain text"], b""),
        ([b"\x1b[31mred\x1b[0m"], b""),
        ([b"\x1b[?1049h"], b"\x1b[?1049l"),
        ([b"\x1b[?1049h...\x1b[?1049l"], b""),
        ([b"\x1b[?10", b"49h"], b"\x1b[?1049l"),
        ([b"\x1b", b"[?25l"], b"\x1b[?25h"),
        ([b"\x1b[?25l", b"\x1b[?25h"], b""),
        ([b"\x1b[?1000;1006h"], b"\x1b[?1000l\x1b[?1006l"),
        ([b"\x1b[?9999h"], b""),
        ([b"\x1b[?" + b"1" * 100 + b"h"], b""),
    ],
)
def test_terminal_modes_left_on(printed: list[bytes], undone: bytes) -> None:
    tracker = ModeTracker()
    for piece in printed:
        tracker.feed(piece)
    assert tracker.undo() == undone


def test_mode_tracker_keeps_little_of_hostile_output() -> None:
    tracker = ModeTracker()
    for _ in range(1000):
        tracker.feed(b"\x1b[?1;" * 100)
    assert len(tracker._tail) < 100


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (1023, "1023"), (1024, "1K"), (1536, "1.5K"), (512 * 2**20, "512M"), (2**40, "1T")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (61, "1m1s"), (3600, "1h"), (3660, "1h1m"), (90061, "1d1h"), (-5, "0s")],
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_hostile_text_cannot_drive_the_terminal() -> None:
    assert plain("a\x1b]0;title\x07b\r\n\u202e") == "a?]0;title?b?\\n?"
    assert plain("x" * 100, 10) == "x" * 9 + "…"


def test_environment_later_wins_and_bare_names_take_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OURS", "yes")
    (tmp_path / "env").write_text("A=file\n# B=no\n  C=spaces \nOURS\n")
    assert environment(["A=1", "MISSING_XYZ"], [str(tmp_path / "env")]) == {"A": "1", "C": "spaces", "OURS": "yes"}
    with pytest.raises(SpecError):
        environment(["=x"], [])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("dev:/x", ("dev", "/x")),
        ("dev:", ("dev", "./")),
        ("dev:a:b", ("dev", "a:b")),
        ("./a:b", None),
        ("/a:b", None),
        ("plain", None),
        ("-", None),
        ("a b:c", None),
    ],
)
def test_which_side_of_cp_is_a_sandbox(text: str, found: tuple[str, str] | None) -> None:
    assert in_sandbox(text) == found


@pytest.mark.parametrize(
    ("path", "absolute", "name"),
    [
        ("a/b", "/x/a/b", "b"),
        (".", "/x", ""),
        ("a/.", "/x/a", ""),
        ("a/", "/x/a", "a"),
        ("..", "/x", "x"),
        ("/", "/", ""),
    ],
)
def test_what_a_copy_is_called(path: str, absolute: str, name: str) -> None:
    assert own_name(path, absolute) == name


def test_progress_text() -> None:
    assert bar_text(Progress("a", 1, 512, 2, 1024), 1.0).startswith(
        " 50% [##########----------] 512 of 1K, 1 of 2 files"
    )
    assert "3 files" in bar_text(Progress("a", 3, 512), 0.0)


@pytest.mark.parametrize("verb", [verb for verb in [*VERBS, *ALIASES] if verb != "bench"])
def test_every_verb_has_help_with_examples(verb: str) -> None:
    context = click.Context(cli)
    command = cli.get_command(context, verb)
    assert command is not None
    text = command.get_help(click.Context(command, info_name=verb))
    assert "Examples:" in text
    assert f"sloplet {ALIASES.get(verb, verb)}" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu"], "did you mean `sloplet run`"),
        (["lst"], "did you mean `sloplet list`"),
        (["qqqqqq"], "--help"),
        (["run", "--memroy", "1g"], "--memory"),
        (["setup", "everything"], "everything"),
        (["completion", "tcsh"], "tcsh"),
    ],
)
def test_mistyped_words_get_a_hint(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(words) == 125
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("sloplet: ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["completion", shell]) == 0
    assert "_SLOPLET_COMPLETE" in capsys.readouterr().out


def test_run_imports_no_more_than_it_needs() -> None:
    code = (
        "import sys\n"
        "from sloplet.cli.main import invoke\n"
        "assert invoke(['run', '--engine', 'fake', '--', 'true']) == 0\n"
        "print(*[name for name in ('rich', 'httpx', 'sloplet.doctor', 'sloplet.setup', 'sloplet.keeper', 'difflib')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "--memory", "x", "true"]) == 125
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("SLOPLET_DEBUG", "1")
    assert invoke(["run", "--memory", "x", "true"]) == 125
    assert "Traceback" in capsys.readouterr().err
