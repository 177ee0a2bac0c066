"""``sloplet run`` as scripts use it: bytes, exit codes, signals, pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cli_helpers import SLOPLET, sloplet

ALL_BYTES = bytes(range(256))
#: Not `sleep`: dash loses a signal that comes while it starts a program (so it does outside of any sandbox).
_BUSY = "echo ready; while :; do :; done"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLOPLET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


#: Root's half of scripts/test has one engine: what is tried here is the command line, and it is the same for everyone.
@pytest.fixture(params=["container", *(pytest.param(name, marks=pytest.mark.anyone) for name in ("process", "fake"))])
def engine(request: pytest.FixtureRequest) -> str:
    from sloplet.engines import registry

    name: str = request.param
    try:
        probe = registry.load(name).probe()
    except ImportError as error:
        pytest.skip(str(error))
    if not probe.available:
        pytest.skip(probe.reason)
    return name


def run(engine: str, *words: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return sloplet("run", "--engine", engine, *words, **options)  # type: ignore[arg-type]


def test_all_bytes_pass_through_unchanged(engine: str) -> None:
    done = run(engine, "--", "cat", input=ALL_BYTES * 1000)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == ALL_BYTES * 1000


def test_nothing_is_added_to_output_without_a_newline(engine: str) -> None:
    done = run(engine, "-c", "printf out; printf err >&2")
    assert (done.stdout, done.stderr) == (b"out", b"err")


def test_fifty_megabytes_through_cat(engine: str, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 50
    (tmp_path / "in").write_bytes(data)
    with open(tmp_path / "in", "rb") as source, open(tmp_path / "out", "wb") as target:
        code = subprocess.run([*SLOPLET, "run", "--engine", engine, "cat"], stdin=source, stdout=target, check=False)
    assert code.returncode == 0
    assert (tmp_path / "out").read_bytes() == data


def test_output_is_passed_on_while_the_command_runs(engine: str) -> None:
    process = subprocess.Popen(
        [*SLOPLET, "run", "--engine", engine, "-c", "echo first; read line; echo got $line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"got hello\n"
    process.stdin.close()
    assert process.wait(20) == 0
    process.stdout.close()


@pytest.mark.parametrize(
    ("text", "code"), [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_the_exit_code_is_the_commands(engine: str, text: str, code: int) -> None:
    assert run(engine, "-c", text).returncode == code


def test_commands_that_cannot_start(engine: str) -> None:
    missing = run(engine, "--", "no-such-command")
    assert missing.returncode == 127
    assert missing.stderr.startswith(b"sloplet: ")
    assert missing.stderr.count(b"\n") == 1
    assert run(engine, "--", "/etc/passwd").returncode == 126


def test_timeout_is_124_and_says_so(engine: str) -> None:
    done = run(engine, "--timeout", "0.3", "--", "sleep", "60")
    assert done.returncode == 124
    assert b"time limit" in done.stderr


def test_words_are_the_argument_vector_and_not_shell_text(engine: str) -> None:
    done = run(engine, "--", "printf", "[%s]", "a b", "$HOME", "", "--", "-x", "*")
    assert done.stdout == b"[a b][$HOME][][--][-x][*]"
    assert run(engine, "echo -n x").returncode == 127


def test_options_end_where_the_command_begins(engine: str) -> None:
    assert run(engine, "echo", "--json", "-v").stdout == b"--json -v\n"


def test_shell_text_takes_arguments(engine: str) -> None:
    assert run(engine, "-c", 'echo "$0,$1"', "a", "b c").stdout == b"a,b c\n"


def test_environment(engine: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("# comment\n\nA=from file\nB=b=b\nFROM_HOST\n")
    done = run(
        engine, "--env-file", str(tmp_path / "file"), "-e", "A=option", "-e", "NOT_SET", "-e", "E=",
        "-c", 'echo "$A|$B|$FROM_HOST|${NOT_SET-unset}|${E-unset}"', env={"FROM_HOST": "host"},
    )  # fmt: skip
    assert done.stdout == b"option|b=b|host|unset|\n"


def test_json_result(engine: str) -> None:
    done = run(engine, "--json", "-c", "printf 'a\\377'; echo e >&2; exit 3")
    document = json.loads(done.stdout)
    assert done.returncode == 3
    assert (document["exit_code"], document["stderr"], document["stdout_base64"]) == (3, "e\n", "Yf8=")
    assert document["engine"] == engine


def test_copy_in_and_out(engine: str, tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "file").write_bytes(ALL_BYTES)
    done = run(
        engine, "--copy", f"{tmp_path}/in", "--copy", f"{tmp_path}/in/sub/file:renamed",
        "--out", f"result:{tmp_path}/out",
        "-c", "mkdir result && cp in/sub/file result/one && cp renamed result/two",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    copies = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert copies == {"one": ALL_BYTES, "two": ALL_BYTES}


def test_what_can_be_copied_out_is_whatever_is_missing(engine: str, tmp_path: Path) -> None:
    outs = [word for name in ("gone", "kept", "lost") for word in ("--out", f"{name}:{tmp_path}/{name}")]
    done = run(engine, *outs, "-c", "echo hours of work > kept")
    assert done.returncode == 125
    assert (tmp_path / "kept").read_text() == "hours of work\n"
    assert b"gone" in done.stderr
    assert b"lost" in done.stderr


def test_reader_that_goes_away(engine: str) -> None:
    process = subprocess.Popen(
        [*SLOPLET, "run", "--engine", engine, "yes"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.wait(20) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_closed_standard_fds(engine: str) -> None:
    for redirect in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        text = f'"$@" {redirect}'
        command = [*SLOPLET, "run", "--engine", engine, "-c", "cat; echo out; echo err >&2"]
        assert subprocess.run(["sh", "-c", text, "sh", *command], check=False).returncode == 0


def test_full_disk_behind_stdout(engine: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*SLOPLET, "run", "--engine", engine, "echo", "x"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 125
    assert b"No space left" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_end_the_command(engine: str, number: int, code: int) -> None:
    process = _started(engine, _BUSY)
    process.send_signal(number)
    assert process.wait(20) == code
    _close(process)


def test_a_command_may_handle_the_first_interrupt(engine: str) -> None:
    process = _started(engine, "trap 'echo caught; exit 5' INT; echo ready; while :; do :; done")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 5
    assert process.stdout is not None
    assert process.stdout.read() == b"caught\n"
    _close(process)


def test_the_second_interrupt_kills(engine: str) -> None:
    process = _started(engine, "trap 'echo ready' INT; echo ready; while :; do :; done")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    _close(process)


def test_an_interrupt_reaches_a_command_whose_output_nobody_reads(engine: str) -> None:
    process = _started(engine, "echo ready; cat /dev/zero")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    _close(process)


def _started(engine: str, text: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*SLOPLET, "run", "--engine", engine, "-c", text], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--engine", "nosuch", "true"), "there is no engine 'nosuch'"),
        (("--memory", "lots", "true"), "not a size"),
        (("--memory", "1", "true"), "too small"),
        (("--pids", "many", "true"), "not a whole number"),
        (("--cpus", "0", "true"), "out of range"),
        (("--at-least", "nosuch", "true"), "not a rung"),
        (("--at-least", "vm", "true"), "vm"),
        (("--image", "/no/such/image", "true"), "/no/such/image"),
        (("--user", "nosuchuser", "true"), "nosuchuser"),
        (("--workdir", "relative", "true"), "absolute path"),
        (("--env", "=x", "true"), "not a variable"),
        (("--env-file", "/no/such/file", "true"), "/no/such/file"),
        (("--copy", "/no/such/file", "true"), "/no/such/file"),
        (("--timeout", "-1", "true"), "not a duration"),
        (("--nosuch", "true"), "--nosuch"),
        ((), "no command"),
    ],
)
def test_bad_input_is_one_clear_line_and_125(words: tuple[str, ...], said: str) -> None:
    done = sloplet("run", *words)
    text = done.stderr.decode()
    assert done.returncode == 125
    assert text.startswith("sloplet: ")
    assert said in text
    assert text.count("\n") == 1
    assert "Traceback" not in text
    as_json = sloplet("run", "--json", *words)
    error = json.loads(as_json.stderr)
    assert as_json.returncode == 125
    assert set(error) >= {"error", "message", "hint"}
    assert as_json.stdout == b""


def test_nothing_is_left_behind(engine: str, home: Path) -> None:
    run(engine, "true")
    process = _started(engine, _BUSY)
    process.send_signal(signal.SIGINT)
    process.wait(20)
    _close(process)
    assert list((home / "sandboxes").iterdir()) == []
    assert sloplet("ls", "-q").stdout == b""


def test_a_killed_cli_leaves_nothing_that_the_next_does_not_clean_up(engine: str) -> None:
    process = _started(engine, _BUSY)
    process.kill()
    process.wait(20)
    _close(process)
    assert json.loads(sloplet("ls", "--json").stdout) == []
