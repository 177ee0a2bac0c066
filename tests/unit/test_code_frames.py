"""What kernels say is read piece by piece, whatever the pieces are; and how cells are written to them. Pure."""

from __future__ import annotations

import json
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloplet.code import languages
from sloplet.code.frames import Frame, Reader, Text
from sloplet.code.registry import Settings, check_context
from sloplet.errors import KernelError, SpecError

pytestmark = pytest.mark.anyone

KEY, CELL, OTHER = "0123456789abcdef", "aa", "bb"


def frame(kind: str, cell: str = CELL) -> bytes:
    return f"\x1e{KEY} {cell} {kind}\n".encode()


def read(*pieces: bytes, early: bool = False, channel: int = 1) -> list[Frame | Text]:
    reader = Reader(KEY, CELL, early=early)
    found: list[Frame | Text] = []
    for piece in pieces:
        found += reader.feed(channel, piece)
    return found


def output(found: list[Frame | Text]) -> bytes:
    return b"".join(part.data for part in found if isinstance(part, Text))


def kinds(found: list[Frame | Text]) -> list[str]:
    return [part.kind for part in found if isinstance(part, Frame)]


def test_output_between_frames_is_the_cells() -> None:
    found = read(b"noise" + frame("begin 3") + b"a\x1eb\n" + frame("data x eA==") + b"c" + frame("end 0") + b"later")
    assert output(found) == b"a\x1eb\nc"
    assert kinds(found) == ["begin", "data", "end"]
    assert [part.rest for part in found if isinstance(part, Frame)] == [b"3", b"x eA==", b"0"]


@given(st.lists(st.integers(1, 30), max_size=30), st.binary(max_size=40).filter(lambda data: KEY.encode() not in data))
def test_any_pieces_give_the_same(cuts: list[int], noise: bytes) -> None:
    half = b"\x1e" + KEY.encode()[:9]
    whole = noise + frame("begin 1") + noise + frame("shown") + half + noise + frame("end 0") + b"!"
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(whole[at : at + cut])
        at += cut
    pieces.append(whole[at:])
    found = read(*pieces)
    assert output(found) == output(read(whole)) == noise + half + noise
    assert kinds(found) == ["begin", "shown", "end"]


def test_others_cells_are_left_out() -> None:
    stream = b"early" + frame("begin", OTHER) + b"theirs" + frame("end", OTHER) + b"between" + frame("begin") + b"ours"
    assert output(read(stream)) == b"ours"
    assert output(read(stream, early=True)) == b"earlybetweenours"
    assert kinds(read(stream)) == ["begin"]


def test_it_ends_where_both_channels_have_ended() -> None:
    reader = Reader(KEY, CELL)
    list(reader.feed(1, frame("begin") + frame("end 0") + b"of nobody"))
    assert not reader.ended
    list(reader.feed(2, frame("begin") + b"x" + frame("end")))
    assert reader.ended
    assert reader.taken == (len(frame("begin") + frame("end 0")), len(frame("begin") + b"x" + frame("end")))


@pytest.mark.parametrize(
    "bad",
    [
        f"\x1e{KEY} {CELL} data x ".encode() + b"A" * 5000,
        f"\x1e{KEY} no words at all!\n".encode(),
        f"\x1e{KEY} \n".encode(),
        f"\x1e{KEY} {CELL} {'k' * 20}\n".encode(),
    ],
)
def test_nonsense_is_refused(bad: bytes) -> None:
    with pytest.raises(KernelError):
        read(frame("begin"), bad)


def test_a_frame_that_never_ends_costs_no_memory() -> None:
    reader = Reader(KEY, CELL)
    begun = f"\x1e{KEY} {CELL} data x ".encode()
    list(reader.feed(1, begun + b"A" * (4095 - len(begun))))
    with pytest.raises(KernelError, match="does not end"):
        list(reader.feed(1, b"A"))


# -- how cells are written ---------------------------------------------------------------


@pytest.mark.parametrize("language", languages.LANGUAGES)
@given(st.text(max_size=5000))
def test_a_request_is_one_write_or_a_file(language: str, code: str) -> None:
    raw = code.replace("\0", "").encode("utf-8", "replace")
    request = languages.request(language, KEY, CELL, raw)
    assert request is None or (len(request) <= 4096 and request.endswith(b"\n"))
    assert (request is None) == (len(raw) > 4096) or len(raw) > 700
    if request is not None and language != "shell":
        assert request.count(b"\n") == 1
        if language in ("r", "java"):
            assert request == f"{KEY} {CELL} code x{raw.hex()}\n".encode()
        else:
            assert json.loads(request) == {"key": KEY, "id": CELL, "code": raw.decode()}


@settings(max_examples=30)
@given(st.text(alphabet="a'\\\"\n$`!; é", max_size=60))
def test_shell_code_is_quoted(code: str) -> None:
    request = languages.request("shell", KEY, CELL, code.encode())
    assert request is not None
    script = b'sloplet_begin() { :; }; sloplet_end() { :; }; eval() { printf %s "$1"; }\n' + request.replace(
        b"command ", b""
    )
    done = subprocess.run(["bash", "--norc"], input=script, capture_output=True, check=True)
    assert done.stdout == code.encode()


def test_a_path_is_quoted() -> None:
    assert b"'/tmp/it'\\''s'" in languages.request_by_file("shell", KEY, CELL, "/tmp/it's")


def test_languages_have_other_names() -> None:
    assert [languages.language_of(name) for name in ("Python", "py", "js", "javascript", "bash", "sh", "node")] == [
        "python", "python", "node", "node", "shell", "shell", "node",
    ]  # fmt: skip
    for name in ("cobol", "", None, 5):
        with pytest.raises(SpecError):
            languages.language_of(name)


@pytest.mark.parametrize("language", languages.LANGUAGES)
def test_a_kernel_fits_into_a_pipe(language: str) -> None:
    """It must lie there whole before anybody else can write to it."""
    how = languages.launch(language, KEY)
    assert 0 < len(how.input) < 60_000
    assert sum(map(len, how.argv)) < 3000


def test_the_python_kernel_is_for_old_pythons_too() -> None:
    import ast

    for part in languages.launch("python", KEY).input.split(b"\0"):
        ast.parse(part, feature_version=(3, 7))


def test_names_of_contexts() -> None:
    assert check_context("a.b-C_1") == "a.b-C_1"
    for name in ("", ".hidden", "a/b", "..", "a b", "x" * 64, "a\n", None, 5, "-a"):
        with pytest.raises(SpecError):
            check_context(name)


def test_settings_of_a_sandbox_are_not_believed() -> None:
    made = Settings("python", "/", {"A": "1"}, "root", "/usr/bin/python3")
    assert Settings.from_bytes(made.to_bytes()) == made
    python = {"language": "python"}
    bad: list[object] = [[], 5, {}, {"language": "cobol"}, python | {"cwd": 5}, python | {"env": 5}]
    bad.append(python | {"env": {"A=B": "x"}})
    for value in bad:
        with pytest.raises((ValueError, TypeError, AttributeError)):
            Settings.from_bytes(json.dumps(value).encode())
    for raw in (b"", b"\xff", b"[" * 100_000):
        with pytest.raises(ValueError):  # noqa: PT011
            Settings.from_bytes(raw)


def test_variables_of_a_cell_go_with_it_or_with_its_file() -> None:
    line = languages.request("python", KEY, CELL, b"1", {"A": "x"})
    assert line is not None
    assert json.loads(line) == {"key": KEY, "id": CELL, "code": "1", "env": {"A": "x"}}
    long = {"A": "x" * 5000}
    assert languages.request("node", KEY, CELL, b"1", long) is None
    assert json.loads(languages.by_file("node", b"1", long)) == {"code": "1", "env": long}
    assert json.loads(languages.request_by_file("node", KEY, CELL, "/tmp/c", long))["whole"] is True
    assert languages.by_file("python", b"code") == b"code"
    assert "whole" not in json.loads(languages.request_by_file("python", KEY, CELL, "/tmp/c"))


@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), st.text(max_size=30), max_size=3))
@settings(max_examples=40, deadline=None)
def test_a_shell_is_lent_what_was_asked_for(env: dict[str, str]) -> None:
    env = {f"V_{name}": value.replace("\0", "") for name, value in env.items()}
    env = {name: value for name, value in env.items() if value.isprintable()}
    script = b"sloplet_lend() { printf '%s\\0' \"$@\"; }\n" + languages.by_file("shell", b":", env)
    said = subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout.decode().split("\0")[:-1]
    assert said == [part for pair in env.items() for part in pair]


@pytest.mark.parametrize(
    ("language", "env"),
    [("shell", {"a-b": ""}), ("shell", {"x; reboot": ""}), ("python", {"a=b": ""}), ("node", {"": ""}),
     ("python", {"a": "\0"}), ("python", {"a": "\ud800"}), ("python", {"a": 5})],
)  # fmt: skip
def test_variables_that_cannot_be_set(language: str, env: dict[str, str]) -> None:
    with pytest.raises(SpecError):
        languages.check_variables(language, env)
