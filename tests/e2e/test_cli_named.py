"""Named sandboxes through the CLI, each command a process of its own: create, exec, ps, logs, cp, rm and the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cli_helpers import SLOPLET, Terminal, sloplet

pytestmark = pytest.mark.anyone

ALL_BYTES = bytes(range(256))


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A sandbox named dev in a home of its own."""
    from sloplet.engines import registry

    if not registry.load("container").probe().available:
        pytest.skip("no container engine here")
    before = os.environ["SLOPLET_HOME"]
    os.environ["SLOPLET_HOME"] = str(tmp_path_factory.mktemp("named") / "home")
    try:
        made = sloplet("create", "dev", "--engine", "container", "--env", "FROM_CREATE=1")
        assert (made.returncode, made.stdout, made.stderr) == (0, b"dev\n", b"")
        yield "dev"
        assert sloplet("rm", "--all", "--force").returncode == 0
        assert sloplet("ls", "-q").stdout == b""
    finally:
        os.environ["SLOPLET_HOME"] = before


def test_exec_passes_bytes_and_codes(box: str) -> None:
    done = sloplet("exec", box, "--", "cat", input=ALL_BYTES * 5000)
    assert (done.returncode, done.stdout, done.stderr) == (0, ALL_BYTES * 5000, b"")
    assert sloplet("exec", box, "-c", "exit 9").returncode == 9
    assert sloplet("exec", box, "no-such-command").returncode == 127


def test_exec_takes_options_on_both_sides_of_the_name(box: str) -> None:
    for words in (("--cwd", "/tmp", box), (box, "--cwd", "/tmp"), (box, "--cwd", "/tmp", "--")):
        assert sloplet("exec", *words, "pwd").stdout == b"/tmp\n"
    assert sloplet("exec", box, "--", "echo", "--", "--json").stdout == b"-- --json\n"


def test_exec_environment_and_user(box: str) -> None:
    assert sloplet("exec", box, "-e", "A=1", "-c", "echo $A$FROM_CREATE").stdout == b"11\n"
    assert sloplet("exec", box, "-u", "root", "id", "-u").stdout == b"0\n"
    assert sloplet("exec", box, "id", "-un").stdout == b"agent\n"


def test_files_stay_from_command_to_command(box: str) -> None:
    sloplet("exec", box, "-c", "echo kept > kept")
    assert sloplet("exec", box, "cat", "kept").stdout == b"kept\n"


def test_detached_commands_ps_and_logs(box: str) -> None:
    started = sloplet("exec", box, "-d", "-c", "echo out; echo err >&2; read never < /dev/zero")
    pid = int(started.stdout)
    listed = {item["pid"]: item for item in json.loads(sloplet("ps", box, "--json").stdout)}
    assert listed[pid]["running"]
    assert str(pid).encode() in sloplet("ps", box).stdout
    ended = json.loads(sloplet("exec", box, "-d", "--json", "-c", "for i in 1 2 3 4 5; do echo line $i; done").stdout)
    follow = sloplet("logs", box, str(ended["pid"]), "-f")
    assert follow.stdout == b"".join(b"line %d\n" % n for n in range(1, 6))
    assert sloplet("logs", box, str(ended["pid"]), "--tail", "2").stdout == b"line 4\nline 5\n"
    assert json.loads(sloplet("logs", box, str(ended["pid"]), "--json").stdout)["stdout"].endswith("line 5\n")
    done = sloplet("logs", box, str(pid))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out\n", b"err\n")
    assert sloplet("logs", box, "99999").returncode == 125


def test_following_logs_ends_without_the_command(box: str) -> None:
    pid = sloplet("exec", box, "-d", "-c", "echo ready; exec sleep 1000").stdout.decode().strip()
    follower = subprocess.Popen([*SLOPLET, "logs", "-f", box, pid], stdout=subprocess.PIPE)
    assert follower.stdout is not None
    assert follower.stdout.readline() == b"ready\n"
    follower.send_signal(signal.SIGINT)
    assert follower.wait(20) == 130
    follower.stdout.close()
    listed = {item["pid"]: item for item in json.loads(sloplet("ps", box, "--json").stdout)}
    assert listed[int(pid)]["running"]


def test_attach_and_leave_and_attach_again(box: str) -> None:
    started = sloplet("exec", box, "-d", "-t", "-c", "echo ready; while read x; do echo got $x; done")
    pid = started.stdout.decode().strip()
    with Terminal("attach", box, pid) as terminal:
        terminal.expect("ready")
        terminal.send("one\r")
        terminal.expect("got one")
        terminal.send("~.")
        assert terminal.wait() == 0
        assert terminal.modes_restored()
    with Terminal("attach", box, pid) as terminal:
        terminal.expect("got one")
        terminal.send("two\r")
        terminal.expect("got two")
        terminal.send("\x04")
        assert terminal.wait() == 0


def test_shell_in_a_named_sandbox(box: str) -> None:
    with Terminal("shell", box, "--shell", "sh") as terminal:
        terminal.send("echo from-shell > /tmp/shell; exit 5\r")
        assert terminal.wait() == 5
    assert sloplet("exec", box, "cat", "/tmp/shell").stdout == b"from-shell\n"
    refused = sloplet("shell", box, "--memory", "1g")
    assert refused.returncode == 125
    assert b"--memory" in refused.stderr


def test_shell_reads_commands_from_a_pipe(box: str) -> None:
    done = sloplet("shell", box, input=b"echo $((6*7))\nexit 4\n")
    assert (done.returncode, done.stdout) == (4, b"42\n")


def test_cp_follows_the_rules_of_cp(box: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(ALL_BYTES)
    for source, target in (
        ("folder/file", "plain"),
        ("folder/file", "new/dir/"),
        ("folder", "tree"),
        ("folder", "tree"),  # now it is there: goes into it
        ("folder/.", "content"),
    ):
        assert sloplet("cp", f"{tmp_path}/{source}", f"{box}:/workspace/cp/{target}").returncode == 0
    found = sloplet("exec", box, "--cwd", "/workspace/cp", "-c", "find . -type f | sort").stdout.split()
    assert found == [b"./content/file", b"./new/dir/file", b"./plain", b"./tree/file", b"./tree/folder/file"]
    assert sloplet("cp", f"{box}:cp/plain", str(tmp_path)).returncode == 0
    assert (tmp_path / "plain").read_bytes() == ALL_BYTES
    assert sloplet("cp", f"{box}:cp/tree", f"{tmp_path}/back").returncode == 0
    assert (tmp_path / "back" / "folder" / "file").read_bytes() == ALL_BYTES


def test_cp_of_stdin_and_to_stdout(box: str) -> None:
    data = ALL_BYTES * 20000
    assert sloplet("cp", "-", f"{box}:big", input=data).returncode == 0
    assert sloplet("cp", f"{box}:big", "-").stdout == data


def test_cp_errors(box: str) -> None:
    for words in (("a", "b"), (f"{box}:a", f"{box}:b"), (f"{box}:nosuch", "/tmp"), ("/no/such", f"{box}:"),
                  ("nobody:a", "/tmp/x")):  # fmt: skip
        done = sloplet("cp", *words)
        assert done.returncode == 125
        assert done.stderr.startswith(b"sloplet: ")
        assert b"Traceback" not in done.stderr


def test_ls_info_guarantees_top(box: str) -> None:
    (listed,) = json.loads(sloplet("ls", "--json").stdout)
    assert (listed["name"], listed["state"], listed["engine"]) == ("dev", "running", "container")
    assert b"dev" in sloplet("ls").stdout
    assert sloplet("ls", "-q").stdout == b"dev\n"
    info = json.loads(sloplet("inspect", box, "--json").stdout)
    assert info["metrics"]["memory"] > 0
    assert {item["control"] for item in info["guarantees"]} >= {"filesystem", "network", "memory"}
    assert b"container" in sloplet("info", listed["id"]).stdout
    assert json.loads(sloplet("guarantees", box, "--json").stdout)["engine"] == "container"
    (row,) = json.loads(sloplet("top", "--json").stdout)
    assert row["metrics"]["pids"] >= 1
    assert b"dev" in sloplet("top", "--once").stdout


def test_top_is_left_with_q(box: str) -> None:
    with Terminal("top", "--interval", "0.2") as terminal:
        terminal.expect("dev")
        terminal.send("q")
        assert terminal.wait() == 0
        assert terminal.modes_restored()


def test_create_refuses_what_is_there(box: str) -> None:
    again = sloplet("create", box)
    assert again.returncode == 125
    assert b"already is a sandbox named 'dev'" in again.stderr
    same = sloplet("create", box, "--engine", "container", "--env", "FROM_CREATE=1", "--reuse")
    assert same.returncode == 0
    other = sloplet("create", box, "--memory", "1g", "--reuse")
    assert other.returncode == 125


@pytest.mark.parametrize("name", ["", "a/b", "-x", ".", "a b", "x" * 300, "a\nb", "é"])
def test_names_that_are_not_allowed(box: str, name: str) -> None:
    done = sloplet("create", "--", name)
    assert done.returncode == 125
    assert b"is not a sandbox name" in done.stderr


def test_create_with_a_ttl_shows_it(box: str) -> None:
    made = json.loads(sloplet("create", "short", "--engine", "container", "--ttl", "1h", "--json").stdout)
    assert made["expires_at"] - made["created_at"] == pytest.approx(3600, abs=5)
    assert b"59m" in sloplet("ls").stdout
    assert sloplet("rm", "short").stdout == b"short\n"


def test_rm(box: str) -> None:
    assert sloplet("rm", "nosuch").returncode == 125
    assert sloplet("rm", "--force", "nosuch").returncode == 0
    assert sloplet("rm").returncode == 125
    asked = sloplet("rm", "--all")
    assert asked.returncode == 125
    assert b"--force" in asked.stderr


def test_completion_of_names_starts_nothing(box: str, tmp_path: Path) -> None:
    env = {"_SLOPLET_COMPLETE": "bash_complete", "COMP_WORDS": "sloplet exec d", "COMP_CWORD": "2"}
    assert b"dev" in sloplet(env=env).stdout
    empty = tmp_path / "empty"
    assert sloplet(env={**env, "SLOPLET_HOME": str(empty)}).stdout.strip() == b""
    assert not empty.exists()


def test_interrupting_exec_ends_the_command_not_the_sandbox(box: str) -> None:
    process = subprocess.Popen(
        [*SLOPLET, "exec", box, "-c", "echo ready; while :; do :; done"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    process.stdout.close()
    assert sloplet("exec", box, "true").returncode == 0


def test_killing_exec_ends_its_command(box: str) -> None:
    process = subprocess.Popen(
        [*SLOPLET, "exec", box, "-c", "echo ready; exec sleep 1234"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    pid = max(item["pid"] for item in json.loads(sloplet("ps", box, "--json").stdout))
    process.kill()
    process.wait(20)
    process.stdout.close()
    assert sloplet("logs", box, str(pid), "-f").returncode == 0  # ends with the command
    listed = {item["pid"]: item for item in json.loads(sloplet("ps", box, "--json").stdout)}
    assert not listed[pid]["running"]


def test_gc_says_what_it_did(box: str) -> None:
    assert sloplet("gc").returncode == 0
    told = {"removed", "dead", "orphans", "expired", "snapshots", "files", "errors"}
    assert set(json.loads(sloplet("gc", "--json").stdout)) == told


def test_any_name_passes_from_diff_to_apply(box: str, tmp_path: Path) -> None:
    """Spaces, newlines, what is no text: by way of `xargs -0`."""
    names = {b"a b", b"c\nd", b" -x ", b"'$(id)\"", b"g\xffh"}
    sloplet("exec", box, "--", "mkdir", "odd")
    for name in names:
        assert sloplet("exec", box, "--cwd", "/workspace/odd", "--", "touch", "--", os.fsdecode(name)).returncode == 0
    listed = sloplet("diff", box, "odd", "--name-only", "-z").stdout
    assert set(listed.split(b"\0")) == {b"/workspace/odd", b""} | {b"/workspace/odd/" + name for name in names}
    assert sloplet("diff", box, "odd", "--name-only").stdout == listed.replace(b"\0", b"\n")
    words = ["xargs", "-0", *SLOPLET, "apply", box, "--to", str(tmp_path / "new")]
    done = subprocess.run(words, input=listed, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(os.listdir(os.fsencode(tmp_path / "new"))) == names
    refused = sloplet("diff", box, "-z")
    assert (refused.returncode, refused.stdout) == (125, b"")
    assert b"--name-only" in refused.stderr
