"""Conformance: bad commands, bad places, bad users, bad values. Each is a typed error, and nothing is harmed."""

from __future__ import annotations

from typing import Any

import pytest

from ...engines.base import Capabilities
from ...errors import (
    CommandNotExecutable,
    CommandNotFound,
    InvalidLimit,
    InvalidName,
    ProcessNotFound,
    SlopletError,
    SpecError,
    UserNotFound,
    WorkdirInvalid,
)
from ...sync import Sandbox
from .support import needs


class TestBadCommands:
    @pytest.mark.parametrize(
        "name", ["no-such-command", "/no/such/command", "./missing", pytest.param("x" * 3000, id="long"), "new\nline"]
    )
    def test_missing(self, box: Sandbox, name: str) -> None:
        with pytest.raises(CommandNotFound) as caught:
            box.run([name])
        assert isinstance(caught.value, FileNotFoundError)
        assert box.run("echo alive").ok

    def test_missing_in_the_shell_is_a_result(self, box: Sandbox) -> None:
        result = box.run("no-such-command")
        assert result.exit_code == 127
        assert "not found" in result.stderr

    def test_missing_when_spawned(self, box: Sandbox) -> None:
        with pytest.raises(CommandNotFound):
            box.spawn(["no-such-command"])

    def test_not_executable(self, box: Sandbox) -> None:
        box.files.write("plain", "echo no", mode=0o644)
        box.files.write("garbage", b"\x01\x02\x03", mode=0o755)
        box.files.mkdir("folder")
        for name in ("plain", "garbage", "folder"):
            with pytest.raises(CommandNotExecutable) as caught:
                box.run([f"{box.workdir}/{name}"])
            assert isinstance(caught.value, PermissionError)
        assert box.run("./plain").exit_code == 126

    @pytest.mark.parametrize(
        "command", ["", "  ", "\n", [], [""], ["a\0b"], "echo \0", ["echo", 1], [b"echo"], 42, None]
    )
    def test_nonsense(self, box: Sandbox, command: Any) -> None:
        with pytest.raises(SpecError):
            box.run(command)

    def test_text_that_cannot_be_sent(self, box: Sandbox) -> None:
        with pytest.raises(SpecError):
            box.run(["echo", "\ud800"])
        assert box.run(["printf", "%s", "\udcff"]).stdout_raw == b"\xff", "bytes that are no UTF-8 go through"

    def test_too_long(self, box: Sandbox) -> None:
        with pytest.raises(SpecError, match="too long"):
            box.run(["true", *["x" * 100_000] * 20])

    @pytest.mark.parametrize("env", [{"A=B": "x"}, {"": "x"}, {"A\0": "x"}, {"A": "x\0"}, {"A": 1}, {1: "x"}])
    def test_environment(self, box: Sandbox, env: Any) -> None:
        with pytest.raises(SpecError):
            box.run("true", env=env)

    @pytest.mark.parametrize(
        "timeout", [0, -1, float("nan"), float("inf"), "soon", "1e999", True, pytest.param(10**400, id="googol"), []]
    )
    def test_timeout(self, box: Sandbox, timeout: Any) -> None:
        with pytest.raises(InvalidLimit):
            box.run("true", timeout=timeout)

    @pytest.mark.parametrize("size", [0, -1, "lots", True, None])
    def test_max_output(self, box: Sandbox, size: Any) -> None:
        with pytest.raises(InvalidLimit):
            box.run("true", max_output=size)

    @pytest.mark.parametrize("size", [(0, 80), (24, -1), (24, 10**9), (True, 80), ("24", "80"), (24,)])
    def test_terminal_size(self, box: Sandbox, size: Any) -> None:
        with pytest.raises(SpecError):
            box.run("true", pty=size)

    @pytest.mark.parametrize("pid", [0, -1, 999_999, 2**40])
    def test_unknown_process(self, box: Sandbox, pid: int) -> None:
        with pytest.raises(ProcessNotFound):
            box.attach(pid)
        with pytest.raises(ProcessNotFound):
            box.signal(pid)

    def test_numbers_out_of_range(self, box: Sandbox) -> None:
        with pytest.raises(SpecError):
            box.attach(2**70)
        with pytest.raises(SpecError):
            box.files.read("x", offset=2**70)

    @pytest.mark.parametrize("number", [0, -9, 65, "NOPE", "", True, None])
    def test_unknown_signal(self, box: Sandbox, number: Any) -> None:
        with pytest.raises(SpecError):
            box.signal(1, number)


class TestBadPlaces:
    @pytest.mark.parametrize(
        "cwd",
        ["/no/such/place", "missing", "", "file", "file/x", "new\nline", "nul\0nul", "."]
        + [pytest.param("a" * 5000, id="long-name"), pytest.param("x/" * 3000, id="long-path")]
        + [f"/proc/self/fd/{fd}" for fd in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 20)]
        + ["/proc/1/root", "/proc/1/cwd", "/proc/self/root/proc/1/root", "/proc/self/fd/7/../..", "/dev/fd/7"],
    )
    def test_cwd(self, box: Sandbox, cwd: str) -> None:
        box.files.write("file", "")
        if cwd == ".":
            assert box.run("pwd", cwd=cwd).stdout.strip() == box.workdir
            return
        with pytest.raises((WorkdirInvalid, SpecError)):
            box.run("pwd", cwd=cwd)
        assert box.run("pwd").stdout.strip() == box.workdir

    def test_cwd_through_a_link(self, box: Sandbox) -> None:
        box.files.mkdir("real")
        box.files.symlink("good", "real")
        box.files.symlink("loop", "loop")
        box.files.symlink("out", "/proc/self/fd/0")
        assert box.run("pwd", cwd="good").ok
        for name in ("loop", "out"):
            with pytest.raises(WorkdirInvalid):
                box.run("pwd", cwd=name)

    @pytest.mark.parametrize(
        "user", ["nobody-here", "", "x" * 300, "-1", "4294967295", "1:2:3", "12abc", "a\nb", "ro\0ot"]
    )
    def test_user(self, box: Sandbox, capabilities: Capabilities, user: str) -> None:
        needs(capabilities.users, "one user only")
        with pytest.raises((UserNotFound, SpecError)):
            box.run("id", user=user)
        with pytest.raises((UserNotFound, SpecError)):
            box.files.stat(".", user=user)


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "kind"),
        [
            ({"name": "a/b"}, InvalidName),
            ({"name": ".."}, InvalidName),
            ({"name": "x" * 300}, InvalidName),
            ({"name": "a\nb"}, InvalidName),
            ({"name": ""}, InvalidName),
            ({"memory": 0}, InvalidLimit),
            ({"memory": "1e999"}, InvalidLimit),
            ({"memory": "10kb"}, InvalidLimit),
            ({"disk": -5}, InvalidLimit),
            ({"disk": float("nan")}, InvalidLimit),
            ({"pids": 1}, InvalidLimit),
            ({"pids": 2.5}, InvalidLimit),
            ({"pids": True}, InvalidLimit),
            ({"cpus": 0}, InvalidLimit),
            ({"cpus": float("inf")}, InvalidLimit),
            ({"open_files": 3}, InvalidLimit),
            ({"ttl": 0}, InvalidLimit),
            pytest.param({"ttl": 10**400}, InvalidLimit, id="ttl-googol"),
            ({"engine": "Not An Engine"}, SpecError),
            ({"at_least": "castle"}, SpecError),
            ({"network": "all"}, SpecError),
            ({"image": ""}, SpecError),
            ({"workdir": "relative"}, SpecError),
            ({"workdir": "/a/../../b"}, SpecError),
            ({"workdir": "/nul\0"}, SpecError),
            ({"user": ""}, SpecError),
            ({"env": {"A=": "b"}}, SpecError),
        ],
    )
    def test_settings(self, engine: str, options: dict[str, Any], kind: type[SlopletError]) -> None:
        with pytest.raises(kind) as caught:
            Sandbox(**{"engine": engine, **options})
        assert isinstance(caught.value, ValueError)
        assert str(caught.value)
