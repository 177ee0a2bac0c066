"""``sloplet code`` as people type it."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import SLOPLET, sloplet

from sloplet.engines import registry

pytestmark = pytest.mark.anyone

RICH = "class Rich:\n    def _repr_html_(self): return '<b>x</b>'\n    def _repr_png_(self): return b'PNG'\nRich()"


@pytest.fixture(scope="module")
def engine() -> str:
    for name in ("container", "process"):
        if registry.load(name).probe().available:
            return name
    pytest.skip("capability: neither container nor process runs here")


@pytest.fixture(scope="module")
def dev(engine: str) -> Iterator[str]:
    name = f"code-{secrets.token_hex(4)}"
    assert sloplet("create", name, "--engine", engine).returncode == 0
    yield name
    sloplet("rm", name)


def test_variables_stay_from_call_to_call(dev: str, tmp_path: Path) -> None:
    assert sloplet("code", dev, "-c", "x = 41").stdout == b""
    done = sloplet("code", dev, "-c", "import sys; print('out'); print('err', file=sys.stderr); x + 1")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out\n42\n", b"err\n")
    assert sloplet("code", dev, input=b"x").stdout == b"41\n"
    script = tmp_path / "cell.sh"
    script.write_text("echo from $0; exit 7")
    done = sloplet("code", dev, str(script))
    assert (done.returncode, done.stdout[:5]) == (7, b"from ")


def test_errors_and_time_limits(dev: str) -> None:
    done = sloplet("code", dev, "-c", "1 / 0")
    assert done.returncode == 1
    assert done.stderr.startswith(b"Traceback (most recent call last):\n")
    assert done.stderr.endswith(b"ZeroDivisionError: division by zero\n")
    done = sloplet("code", dev, "--timeout", "0.3", "-c", "while True: pass")
    assert done.returncode == 124
    assert b"its time limit was reached" in done.stderr


def test_a_fresh_sandbox_and_json(engine: str, tmp_path: Path) -> None:
    done = sloplet("code", "--engine", engine, "--json", "--out", str(tmp_path / "out"), "-c", RICH)
    document = json.loads(done.stdout)
    assert document["results"][0]["data"]["text/html"] == "<b>x</b>"
    assert document["results"][0]["data"]["image/png"] == "UE5H"
    assert (document["ok"], document["sandbox"], document["engine"]) == (True, None, engine)
    assert (tmp_path / "out" / "1.png").read_bytes() == b"PNG"
    assert (tmp_path / "out" / "1.html").read_text() == "<b>x</b>"


def test_rich_results_are_not_lost_silently(dev: str) -> None:
    assert b"--out DIR saves them" in sloplet("code", dev, "-c", RICH).stderr
    assert sloplet("code", dev, "-c", "display(5); print(6); display('7'); 8").stdout == b"5\n6\n'7'\n8\n"


def test_a_dead_context(dev: str) -> None:
    assert sloplet("code", dev, "--context", "shell", "-c", "kept=5").returncode == 0
    done = sloplet("code", dev, "--language", "shell", "-c", "kill -9 $$")
    assert done.returncode == 125
    assert b"signal 9" in done.stderr
    done = sloplet("code", dev, "--language", "shell", "-c", "echo $kept")
    assert done.returncode == 125
    assert b"restart" in done.stderr
    done = sloplet("code", dev, "--language", "shell", "--restart", "-c", "echo $kept.")
    assert (done.returncode, done.stdout) == (0, b".\n")


def test_ctrl_c_interrupts_the_cell_and_leaves_its_variables(dev: str) -> None:
    command = [*SLOPLET, "code", dev, "-c", "kept = 9\nprint('begun', flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert sloplet("code", dev, "--timeout", "20", "-c", "kept").stdout == b"9\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--language", "cobol", "-c", "1"), "language"),
        (("NAME", "--memory", "1g", "-c", "1"), "fresh sandbox"),
        (("NAME", "file.py", "-c", "1"), "both code"),
        (("NAME", "/no/such/file.py"), "No such file"),
        (("NAME", "/bin/ls"), "not UTF-8"),
        (("NAME", "--out", "/dev/null/x", "-c", "print('not run')"), "--out /dev/null/x: Not a directory"),
        (("NAME", "--context", "a/b", "-c", "1"), "name for a context"),
        (("NAME", "--context", "other", "-c", "1"), "no context"),
        (("no-such-sandbox", "-c", "1"), "no-such-sandbox"),
    ],
)
def test_refusals(dev: str, words: tuple[str, ...], why: str) -> None:
    done = sloplet("code", *(dev if word == "NAME" else word for word in words))
    assert done.returncode == 125
    assert why in done.stderr.decode()
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1
