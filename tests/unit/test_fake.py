"""The fake engine: its shell says what a real one says, its commands can be taught, its promises are modest."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sloplet import Sandbox
from sloplet.engines import registry
from sloplet.engines.fake import FakeCall, FakeEngine, programs
from sloplet.errors import EngineError, UnsupportedOperation
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

#: Scripts whose output and exit code must be what the host's own /bin/sh gives.
SCRIPTS = [
    "echo a b  'c  d' \"e  f\" g\\ h",
    'echo "$HOME_" \'$HOME\' "\\$x"',
    'A=1; B=$A$A; echo ${B} "${B}x" ${C:-none} ${A:+some}',
    "true && echo yes || echo no; false && echo yes || echo no",
    "! true; echo $?; ! false; echo $?",
    "false; echo $?; (exit 7); echo $?; sh -c 'exit 9'; echo $?",
    "echo one; exit 3; echo two",
    "if [ 1 = 1 ]; then echo same; elif true; then echo other; else echo none; fi",
    "if false; then echo a; elif [ -n x ]; then echo b; fi",
    "if false; then echo a; fi; echo $?",
    "i=0; while [ $i -lt 5 ]; do i=$((i+1)); if [ $i = 2 ]; then continue; fi; if [ $i = 4 ]; then break; fi; echo $i"
    "; done",
    "i=3; until [ $i -eq 0 ]; do echo $i; i=$((i - 1)); done",
    "for x in a 'b c' d; do echo \"<$x>\"; done",
    "for x in; do echo never; done; echo end",
    'f() { echo "in $1 of $#"; return 4; }; f x y; echo $?',
    "echo a | tr a b | tr b c",
    "seq 1 5 | head -n 2",
    "seq 1 10 | tail -n 3",
    "seq 1 3 | sort -r",
    "yes | head -n 3",
    "printf '%s-%d\\n' a 1 b 2",
    "printf 'x\\ty\\101\\n'",
    "printf '%5s|%-5s|%05d\\n' a b 7",
    "printf '%%\\n'",
    "printf abc",
    "echo hello | wc -c",
    "printf 'a b\\nc\\n' | wc -l",
    "echo abc > f; cat f; echo def >> f; cat f; cat < f | wc -l",
    "echo out; echo err >&2",
    "echo err >&2 2>/dev/null; (echo x >&2) 2>&1",
    "{ echo a; echo b; } | sort -r",
    "cat nothing; echo $?",
    "ls nothing 2>/dev/null; echo $?",
    "no-such-command-here 2>/dev/null; echo $?",
    "mkdir -p a/b; touch a/b/c; ls a a/b; rm -r a; ls",
    "mkdir d; echo x > d/.hidden; echo y > d/seen; ls d; ls -a d | wc -l",
    "touch b a c; echo *; echo [ab]; echo '*' \"*\" nomatch*",
    'x=$(echo hi; echo there); echo "$x"; echo $x',
    "echo $(echo a; exit 3); y=$(exit 5); echo $?",
    "echo `echo back`",
    "echo $((1 + 2 * 3)) $((7 / 2)) $((7 % 3)) $(( (1+1)*4 )) $((2 > 1)) $((-3))",
    "x=5; echo $((x * 2)) $(($x + 1))",
    'set -- a b c; echo $# $1 $3; shift; echo $1; for x; do echo "[$x]"; done',
    'set -- \'a b\' c; for x in "$@"; do echo "[$x]"; done',
    "cd /; pwd; cd /tmp && pwd",
    "cd nowhere 2>/dev/null || echo failed",
    "export X=1; sh -c 'echo $X'; Y=2; sh -c 'echo \"$Y\"'; Z=3 sh -c 'echo $Z'",
    "unset HOME_; echo ${HOME_-unset}",
    "[ -e f ] || echo no; touch f; [ -f f ] && echo file; [ -d . ] && echo dir; [ -s f ] || echo empty",
    "test a = b; echo $?; test 3 -gt 2; echo $?; [ 1 -eq 1 -a 2 -eq 2 ]; echo $?",
    "[ ! -e x ] && echo fine; [ -z '' ] && echo empty",
    "ln -s target link; readlink link; [ -L link ] && echo link; [ -e link ] || echo dangling",
    "echo data > t; ln -s t l; cat l; rm l; cat t",
    "echo a > x; mv x y; cat y; cp y z; cat z",
    "sleep 0.01 & wait; echo $?",
    "(exit 4) & wait $!; echo $?",
    "sleep 0.01 & echo started; wait; echo done",
    "kill -0 $$; echo $?",
    "sh -c 'kill -9 $$'; echo $?",
    "sh -c 'kill $$; sleep 1' 2>/dev/null; echo $?",
    "trap 'echo bye' EXIT; echo hi",
    "trap 'echo caught' USR1; kill -USR1 $$; echo after",
    "trap '' TERM; kill $$; echo alive",
    "set -e; true; false; echo never",
    "set -e; false || true; echo reached",
    "eval 'echo evaluated; A=9'; echo $A",
    "echo 'echo sourced $1; B=2' > s; . ./s; echo $B",
    "printf '#!/bin/sh\\necho script $1\\n' > s; chmod +x s; ./s arg; ./nothing 2>/dev/null; echo $?",
    "echo x > s; chmod 644 s; ./s 2>/dev/null; echo $?",
    "printf 'l1\\nl2\\n' | while read x; do echo \"got $x\"; done",
    "printf 'a b c' | { read x y; echo \"$x|$y\"; }",
    "echo abc | grep b; echo abc | grep -q z; echo $?",
    "printf 'b\\na\\nb\\n' | sort -u; printf '10\\n9\\n' | sort -n",
    "head -c 5 /dev/zero | wc -c; printf 'abcdef' | head -c 3; echo",
    "printf 'abcdef' | tail -c 2; echo",
    "echo x | tee copy; cat copy",
    "echo abc | tr -d b; echo abc | tr '[:lower:]' '[:upper:]'",
    "# a comment\necho visible # another\n\n\necho more",
    "echo a;echo b&&echo c",
    'echo "unterminated',
    "if true; then",
    "echo )",
    "exec sh -c 'echo replaced; exit 6'",
    "exec > out; echo hidden; cat out >&2",
    "exec 3< /dev/null; cat <&3; echo ok",
    "command -v no-such-thing; echo $?",
    "command -v sh >/dev/null && echo have",
    "env -i A=1 /usr/bin/env 2>/dev/null | grep A=; echo",
    "umask 022; echo $?",
    "true | false; echo $?; false | true; echo $?",
    "echo $0 $#",
    "basename /a/b/c",
    "id -u >/dev/null; echo $?",
    "while true; do break; done; echo $?",
    "x='a   b'; echo $x; echo \"$x\"",
    "echo ~root | wc -l",
    "echo a\\\nb",
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script[:40])
def test_the_shell_says_what_a_real_one_says(script: str, tmp_path: Path) -> None:
    real = subprocess.run(["/bin/sh", "-c", script], cwd=tmp_path, capture_output=True, check=False, timeout=20)
    with Sandbox(engine="fake") as box:
        fake = box.run(script, timeout=20)
    code = real.returncode if real.returncode >= 0 else 128 - real.returncode
    assert (fake.stdout_raw, fake.exit_code) == (real.stdout, code), fake.stderr
    assert bool(fake.stderr_raw) == bool(real.stderr), (fake.stderr_raw, real.stderr)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    FakeEngine.forget()


def test_teaching_it_a_command() -> None:
    calls: list[FakeCall] = []

    @FakeEngine.on("pytest")
    def handler(call: FakeCall) -> tuple[int, str, str]:
        calls.append(call)
        call.files["report.txt"] = b"made"
        return 1, "2 passed, 1 failed\n", "warning\n"

    with Sandbox(engine="fake") as box:
        result = box.run("echo input | pytest -q 'a b' && echo fine", env={"CI": "1"})
        assert (result.exit_code, result.stdout, result.stderr) == (1, "2 passed, 1 failed\n", "warning\n")
        assert box.files.read_text("report.txt") == "made"
        assert box.run(["pytest"]).exit_code == 1
    assert calls[0].argv == ("pytest", "-q", "a b")
    assert (calls[0].stdin, calls[0].env["CI"], calls[0].cwd) == (b"input\n", "1", "/workspace")


def test_handlers_of_every_kind() -> None:
    async def streaming(call: FakeCall) -> int:
        await call.write("one ")
        await call.write(b"two")
        await call.write_error("problem")
        return 3

    FakeEngine.on("text", lambda call: "text")
    FakeEngine.on("bytes", lambda call: b"\xff")
    FakeEngine.on("nothing", lambda call: None)
    FakeEngine.on("code", lambda call: 300)
    FakeEngine.on("streaming", streaming)
    with Sandbox(engine="fake") as box:
        assert box.run(["text"]).stdout == "text"
        assert box.run(["bytes"]).stdout_raw == b"\xff"
        assert box.run(["nothing"]).ok
        assert box.run(["code"]).exit_code == 300 & 0xFF
        result = box.run(["streaming"])
        assert (result.stdout, result.stderr, result.exit_code) == ("one two", "problem", 3)
    with pytest.raises(ValueError, match="not the name"):
        FakeEngine.on("a/b", lambda call: 0)


def test_files_of_a_handler() -> None:
    def handler(call: FakeCall) -> str:
        assert call.files["/workspace/given"] == b"1"
        del call.files["/workspace/given"]
        assert "/workspace/given" not in call.files
        call.files["made"] = b"2"
        assert "/workspace/made" in list(call.files)
        assert len(call.files) > 10
        with pytest.raises(KeyError):
            call.files["none"]
        return "checked"

    FakeEngine.on("check", handler)
    with Sandbox(engine="fake") as box:
        box.files.write("given", "1")
        assert box.run(["check"]).stdout == "checked"
        assert box.run("ls").stdout == "made\n"


def test_it_promises_no_isolation() -> None:
    with Sandbox(engine="fake") as box:
        promised = {item.control: item for item in box.guarantees()}
    for control in ("filesystem", "processes", "network", "syscalls", "privileges"):
        assert not promised[control].enforced
        assert "not isolated" in promised[control].how


@pytest.mark.parametrize("rung", ["process", "container", "microvm"])
def test_it_is_on_no_rung(rung: str) -> None:
    with pytest.raises(EngineError):
        Sandbox(engine="fake", at_least=rung).start()


def test_it_is_never_chosen() -> None:
    assert "fake" in registry.all_names()
    assert registry.choose(SandboxSpec.make()).name != "fake"


def test_it_has_no_images(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    with pytest.raises((UnsupportedOperation, LookupError)):
        Sandbox(engine="fake", image=str(tmp_path)).start()


def test_the_vocabulary_is_listed() -> None:
    known = programs()
    assert {"sh", "echo", "cat", "sleep", "grep", "stty", "cd", "wait"} <= set(known)
    with Sandbox(engine="fake") as box:
        for name in known:
            assert box.run(["/bin/sh", "-c", f"command -v '{name}'"]).ok, name
