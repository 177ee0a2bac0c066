"""Conformance: run() - results, input, output, time limits."""

from __future__ import annotations

import hashlib
import signal
from typing import Any

import pytest

from ...engines.base import Capabilities
from ...errors import CommandFailed, CommandTimeout
from ...sync import Sandbox
from .support import gone, needs, needs_command

ALL_BYTES = bytes(range(256))


class TestRun:
    @pytest.mark.parametrize("code", [0, 1, 2, 42, 126, 127, 255])
    def test_exit_codes(self, box: Sandbox, code: int) -> None:
        result = box.run(f"exit {code}")
        assert (result.exit_code, result.ok, result.signal) == (code, code == 0, None)

    @pytest.mark.parametrize("name", ["TERM", "KILL", "INT", "HUP", "USR1"])
    def test_ended_by_a_signal(self, box: Sandbox, name: str) -> None:
        number = int(signal.Signals["SIG" + name])
        result = box.run(f"kill -{name} $$; sleep 10")
        assert (result.exit_code, result.signal, result.timed_out) == (128 + number, number, False)

    def test_a_list_is_the_argument_vector(self, box: Sandbox) -> None:
        args = ["a b", "", "*", "$HOME", "`id`", "new\nline", "ünï", "'quotes\"", "-n", "\\"]
        assert box.run(["printf", "%s|", *args]).stdout == "".join(arg + "|" for arg in args)

    def test_a_string_is_for_the_shell(self, box: Sandbox) -> None:
        assert box.run("A=1; echo $((A + 1)) | tr 2 3 && echo 'x  y'").stdout == "3\nx  y\n"

    def test_commands_share_nothing_but_files(self, box: Sandbox) -> None:
        box.run("A=1; cd /; echo kept > /tmp/note || true")
        assert box.run('echo "$A"; pwd').stdout == f"\n{box.workdir}\n"

    def test_environment(self, box: Sandbox) -> None:
        env = {"ONE": "1", "SPACE": " a  b ", "LINES_": "x\ny", "EQUALS": "a=b", "HOME": "/elsewhere"}
        for key, value in env.items():
            assert box.run(f'printf %s "${key}"', env=env).stdout == value
        assert box.run('echo "$ONE"').stdout == "\n", "it is for that command only"

    def test_cwd(self, box: Sandbox) -> None:
        box.files.mkdir("sub/dir")
        assert box.run("pwd").stdout.strip() == box.workdir
        assert box.run("pwd", cwd="sub/dir").stdout.strip() == f"{box.workdir}/sub/dir"
        assert box.run(["pwd"], cwd=f"{box.workdir}/sub").stdout.strip() == f"{box.workdir}/sub"

    def test_users(self, box: Sandbox, capabilities: Capabilities) -> None:
        needs(capabilities.users, "one user only")
        assert box.run("id -un").stdout == "agent\n"
        assert box.run("id -u", user="root").stdout == "0\n"
        assert box.run("id -u; id -g", user="1234:567").stdout == "1234\n567\n"
        assert box.run("id -u", user="0").stdout == "0\n"

    def test_is_not_root(self, box: Sandbox, capabilities: Capabilities) -> None:
        needs(capabilities.users, "one user only")
        assert box.run("id -u").stdout != "0\n"

    def test_check(self, box: Sandbox) -> None:
        assert box.run("true", check=True).ok
        with pytest.raises(CommandFailed, match=r"exit code 3.*broken") as caught:
            box.run("echo broken >&2; exit 3", check=True)
        assert caught.value.result.exit_code == 3
        assert caught.value.result.stderr == "broken\n"

    def test_measures(self, box: Sandbox) -> None:
        result = box.run("sleep 0.05")
        assert 0.04 < result.duration < 30
        assert result.cpu_seconds >= 0
        assert set(result.to_dict()) >= {"exit_code", "stdout", "stderr", "timed_out", "oom", "truncated"}

    def test_scripts(self, box: Sandbox) -> None:
        box.files.write("hello", '#!/bin/sh\necho "script $1"\nexit 5\n', mode=0o755)
        result = box.run([f"{box.workdir}/hello", "arg"])
        assert (result.exit_code, result.stdout) == (5, "script arg\n")
        assert box.run("./hello x").stdout == "script x\n"


class TestInput:
    def test_text_and_bytes(self, box: Sandbox) -> None:
        assert box.run("cat", input="grüße\n").stdout == "grüße\n"
        assert box.run(["cat"], input=ALL_BYTES).stdout_raw == ALL_BYTES

    def test_large(self, box: Sandbox) -> None:
        data = ALL_BYTES * 8192
        result = box.run("sha256sum; echo", input=data)
        assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()
        assert box.run("wc -c", input=data).stdout.split() == [str(len(data))]

    def test_empty_and_none(self, box: Sandbox) -> None:
        assert box.run("cat", input="").stdout == ""
        assert box.run("cat; echo end").stdout == "end\n", "without input stdin is empty"

    def test_a_command_that_does_not_read(self, box: Sandbox) -> None:
        assert box.run("exec 0<&-; echo done", input=b"x" * 5_000_000).stdout == "done\n"
        assert box.run("true", input=b"x" * 5_000_000).exit_code == 0


class TestOutput:
    def test_both_channels(self, box: Sandbox) -> None:
        result = box.run("echo out; echo err >&2")
        assert (result.stdout, result.stderr) == ("out\n", "err\n")

    def test_every_byte(self, box: Sandbox) -> None:
        octal = "".join(f"\\{byte:03o}" for byte in range(256))
        result = box.run(f"printf '{octal}'; printf '{octal}' >&2")
        assert result.stdout_raw == ALL_BYTES
        assert result.stderr_raw == ALL_BYTES
        assert result.stdout == ALL_BYTES.decode("utf-8", "replace")

    def test_none_and_no_newline(self, box: Sandbox) -> None:
        assert box.run("true").stdout_raw == b""
        assert box.run("printf abc").stdout == "abc"

    def test_large_is_whole(self, box: Sandbox) -> None:
        result = box.run("seq 1 200000")
        assert result.stdout_raw == b"".join(b"%d\n" % number for number in range(1, 200001))
        assert not result.truncated

    def test_cut_with_exact_counts(self, box: Sandbox) -> None:
        result = box.run("head -c 5000000 /dev/zero; head -c 70001 /dev/zero >&2; echo >&2", max_output=1000)
        assert len(result.stdout_raw) + len(result.stderr_raw) <= 1000
        assert (result.stdout_size, result.stderr_size) == (5_000_000, 70_002)
        assert (result.truncated, result.exit_code) == (True, 0)

    def test_cut_at_the_limit_exactly(self, box: Sandbox) -> None:
        exact = box.run("head -c 4096 /dev/zero", max_output=4096)
        assert (len(exact.stdout_raw), exact.truncated) == (4096, False)
        over = box.run("head -c 4097 /dev/zero", max_output="4k")
        assert (len(over.stdout_raw), over.stdout_size, over.truncated) == (4096, 4097, True)

    def test_callbacks_text(self, box: Sandbox) -> None:
        text = "aé€😀" * 30_000
        out: list[str] = []
        err: list[str] = []
        result = box.run("cat; echo problem >&2", input=text, on_stdout=out.append, on_stderr=err.append)
        assert "".join(out) == text == result.stdout
        assert "".join(err) == "problem\n"

    def test_callbacks_bytes_and_async(self, box: Sandbox) -> None:
        pieces: list[bytes] = []

        async def take(piece: bytes) -> None:
            pieces.append(piece)

        box.run(["cat"], input=ALL_BYTES * 2000, text=False, on_stdout=take)
        assert b"".join(pieces) == ALL_BYTES * 2000

    def test_callbacks_see_all_beyond_the_limit(self, box: Sandbox) -> None:
        sizes: list[int] = []
        result = box.run(
            "head -c 3000000 /dev/zero", text=False, max_output=10, on_stdout=lambda piece: sizes.append(len(piece))
        )
        assert sum(sizes) == 3_000_000
        assert (len(result.stdout_raw), result.stdout_size) == (10, 3_000_000)

    def test_a_failing_callback_ends_the_command(self, box: Sandbox) -> None:
        def fail(piece: Any) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            box.run("echo $$; sleep 1000", on_stdout=fail)
        assert box.run("echo fine").stdout == "fine\n"

    def test_output_as_it_comes(self, box: Sandbox) -> None:
        seen: list[str] = []
        process = box.spawn("echo first; while [ ! -e go ]; do sleep 0.01; done; echo second")
        for _, piece in process:
            seen.append(piece)
            if "first\n" in seen:
                box.files.write("go", "")
        assert "".join(seen) == "first\nsecond\n"


class TestTimeout:
    def test_is_a_result(self, box: Sandbox) -> None:
        result = box.run("echo begun; sleep 1000", timeout=0.3)
        assert (result.timed_out, result.ok, result.stdout) == (True, False, "begun\n")
        assert result.exit_code == 137
        assert 0.25 < result.duration < 20
        assert "time limit" in result.describe()

    def test_check_raises(self, box: Sandbox) -> None:
        with pytest.raises(CommandTimeout) as caught:
            box.run("sleep 1000", timeout="100ms", check=True)
        assert caught.value.result.timed_out

    def test_not_reached(self, box: Sandbox) -> None:
        assert not box.run("true", timeout=60).timed_out

    def test_ends_the_whole_tree(self, box: Sandbox) -> None:
        result = box.run("sleep 1000 & echo $!; (sleep 1000 & echo $!); trap '' TERM; sleep 1000", timeout=0.5)
        child, grandchild = result.stdout.split()
        assert result.timed_out
        assert gone(box, child)
        assert gone(box, grandchild)

    def test_ends_what_left_the_session(self, box: Sandbox) -> None:
        needs_command(box, "setsid")
        result = box.run("setsid sh -c 'echo $$; sleep 1000' & sleep 1000", timeout=0.5)
        assert result.timed_out
        assert gone(box, result.stdout.split()[0])

    def test_background_children_do_not_hold_the_result(self, box: Sandbox) -> None:
        result = box.run("sleep 1000 & echo $!", timeout=30)
        assert not result.timed_out
        assert not box.run(f"kill {result.stdout.strip()}").exit_code, "the child lives on"
        assert gone(box, result.stdout)
