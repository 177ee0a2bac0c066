"""Commands: in the foreground and behind, with input, as users, in folders, ended and found again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2b.exceptions import AuthenticationException, SandboxException

from conftest import until
from e2b import CommandExitException, InvalidArgumentException, NotFoundException, Sandbox, TimeoutException


def test_output_and_exit(shared: Sandbox) -> None:
    result = shared.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)
    with pytest.raises(CommandExitException) as failed:
        shared.commands.run("echo so far; exit 7")
    assert (failed.value.exit_code, failed.value.stdout) == (7, "so far\n")


def test_special_characters_and_broken_text(shared: Sandbox) -> None:
    assert shared.commands.run("echo '!@#$%^&*()_+ äöü'").stdout == "!@#$%^&*()_+ äöü\n"
    assert shared.commands.run("printf '%8191s\\xe2' | tr ' ' a").stdout == "a" * 8191 + "\ufffd"


def test_where_users_install_programs(shared: Sandbox) -> None:
    """As E2B has it: ``npm install -g`` and its like need no sudo."""
    shared.commands.run("touch /usr/local/mine /usr/local/bin/mine /usr/local/lib/mine /code/mine")
    assert shared.commands.run("sudo id -un").stdout == "root\n"


def test_who_and_where(shared: Sandbox) -> None:
    said = shared.commands.run("id -un; pwd; echo $HOME $USER; echo $E2B_SANDBOX").stdout.split()
    assert said == ["user", "/home/user", "/home/user", "user", "true"]
    assert shared.commands.run("id -un; pwd", user="root").stdout.split() == ["root", "/root"]
    assert shared.commands.run("pwd", cwd="/usr").stdout == "/usr\n"
    shared.files.make_dir("some/where")
    assert shared.commands.run("pwd", cwd="some/where").stdout == "/home/user/some/where\n"
    assert shared.commands.run("sudo id -un").stdout == "root\n"
    with pytest.raises(InvalidArgumentException, match="cwd '/no/where' does not exist"):
        shared.commands.run("pwd", cwd="/no/where")
    with pytest.raises(AuthenticationException, match="nobody-here"):
        shared.commands.run("true", user="nobody-here")


def test_variables(make: Callable[..., Sandbox]) -> None:
    box = make(envs={"OF": "sandbox", "BOTH": "sandbox"})
    assert box.commands.run("echo $OF $BOTH $OWN").stdout == "sandbox sandbox\n"
    assert box.commands.run("echo $OF $BOTH $OWN", envs={"BOTH": "command", "OWN": "1"}).stdout == "sandbox command 1\n"
    assert box.commands.run("echo $OF $BOTH $OWN").stdout == "sandbox sandbox\n"


def test_streams(shared: Sandbox) -> None:
    out: list[str] = []
    err: list[str] = []
    shared.commands.run("for n in 1 2 3; do echo $n; echo $n >&2; done", on_stdout=out.append, on_stderr=err.append)
    assert "".join(out) == "".join(err) == "1\n2\n3\n"


def test_much_output(shared: Sandbox) -> None:
    assert len(shared.commands.run("head -c 5000000 /dev/zero | tr '\\0' x").stdout) == 5_000_000


def test_time_limits(shared: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        shared.commands.run("sleep 1000 #limit", timeout=1)
    until(lambda: not any("#limit" in " ".join(each.args) for each in shared.commands.list()))
    handle = shared.commands.run("sleep 1000 #behind", background=True, timeout=1)
    with pytest.raises(TimeoutException):
        handle.wait()
    assert shared.commands.run("sleep 1.2; echo done", timeout=0).stdout == "done\n"


def test_behind(shared: Sandbox) -> None:
    handle = shared.commands.run("echo begun; sleep 1000", background=True)
    assert next(iter(handle))[0] == "begun\n"
    assert handle.pid in [each.pid for each in shared.commands.list()]
    assert shared.commands.run(f"cat /proc/{handle.pid}/comm").stdout.strip() in ("bash", "sleep")
    assert handle.kill() is True
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert ended.value.exit_code == -1
    assert "killed" in (ended.value.error or "")
    with pytest.raises(CommandExitException):
        shared.commands.run(f"kill -0 {handle.pid}")
    assert handle.pid not in [each.pid for each in shared.commands.list()]
    assert shared.commands.kill(handle.pid) is False
    assert shared.commands.kill(999_999) is False


def test_followed_again(shared: Sandbox) -> None:
    handle = shared.commands.run("while read line; do echo got $line; done", background=True, stdin=True)
    handle.disconnect()
    again = shared.commands.connect(handle.pid)
    assert again.pid == handle.pid
    shared.commands.send_stdin(again.pid, "one\n")
    assert next(iter(again))[0] == "got one\n"
    again.kill()
    with pytest.raises(NotFoundException):
        shared.commands.connect(999_999)


def test_input(shared: Sandbox) -> None:
    handle = shared.commands.run("cat", background=True, stdin=True)
    for text in ("Hello, World!", "!@#$%^&*()_+", "two\nlines"):
        shared.commands.send_stdin(handle.pid, text)
        assert next(iter(handle))[0] == text
    shared.commands.close_stdin(handle.pid)
    assert handle.wait().exit_code == 0


def test_input_that_nobody_takes(shared: Sandbox) -> None:
    handle = shared.commands.run("sleep 1000", background=True)
    with pytest.raises(SandboxException, match="stdin"):
        shared.commands.send_stdin(handle.pid, "x")
    handle.kill()


def test_a_lot_of_input_in_its_order(shared: Sandbox) -> None:
    handle = shared.commands.run("sha256sum", background=True, stdin=True)
    import hashlib

    pieces = [bytes([65 + n % 26]) * 50_000 for n in range(40)]
    for piece in pieces:
        shared.commands.send_stdin(handle.pid, piece.decode())
    shared.commands.close_stdin(handle.pid)
    assert handle.wait().stdout.split()[0] == hashlib.sha256(b"".join(pieces)).hexdigest()


def test_children_that_stay_do_not_hold_it_up(shared: Sandbox) -> None:
    assert shared.commands.run("sleep 1000 & echo done").stdout == "done\n"


def test_it_goes_on_when_its_client_leaves(shared: Sandbox, word: str) -> None:
    handle = shared.commands.run(f"for n in $(seq 2000); do echo some line; done; touch /tmp/{word}", background=True)
    handle.disconnect()
    until(lambda: shared.files.exists(f"/tmp/{word}"))


def test_the_sandbox_ends_meanwhile(make: Callable[..., Sandbox]) -> None:
    box = make()
    handle = box.commands.run("sleep 1000", background=True)
    box.kill()
    with pytest.raises(Exception, match="killed or reached its end of life"):
        handle.wait()
    with pytest.raises(TimeoutException, match="not found"):
        box.commands.run("true")
