"""K: a kernel that lies. Everything a cell's kernel says comes from inside: it is bounded, or refused."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sloplet import Sandbox
from sloplet.engines import registry
from sloplet.errors import KernelError

KEY = "0123456789abcdef"
#: Answers each request with what its last argument makes of the cell's id and the frame maker.
LIAR = """
import json, os, sys
def frame(kind, cell=None):
    return b"\\x1e%s %s %s\\n" % (KEY, cell or ID, kind)
def out(data, fd=1):
    while data:
        data = data[os.write(fd, data):]
KEY = b"0123456789abcdef"
for line in sys.stdin:
    ID = json.loads(line)["id"].encode()
    exec(sys.argv[1])
"""
BEGIN = "out(frame(b'begin 1')); out(frame(b'begin'), 2);"
END = "out(frame(b'end 0')); out(frame(b'end'), 2)"


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    for engine in ("container", "process"):
        if registry.load(engine).probe().available:
            with Sandbox(engine=engine) as made:
                yield made
            return
    pytest.skip("capability: neither container nor process runs here")


def liar(box: Sandbox, name: str, answer: str) -> str:
    tag = f"sloplet-code/1/python/{name}/{KEY}"
    box.spawn(["python3", "-c", LIAR, answer], stdin=True, detached=True, tag=tag).detach()
    return name


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("unended", BEGIN + "out(frame(b'data x ')[:-1] + b'A' * 100000)"),
        ("wordless", BEGIN + "out(b'\\x1e' + KEY + b' !!!\\n')"),
        ("unknown", BEGIN + "out(frame(b'reboot'))"),
        ("base64", BEGIN + "out(frame(b'data x A'))"),
        ("gone", BEGIN + "os._exit(9)"),
    ],
)
def test_nonsense_is_an_error(box: Sandbox, name: str, answer: str) -> None:
    with pytest.raises(KernelError):
        box.code("1", context=liar(box, name, answer), timeout=20)


def test_more_than_fits_is_dropped_and_told(box: Sandbox) -> None:
    piece = "b'A' * 3800"
    flood = f"[out(frame(b'data image/png ' + {piece})) for _ in range(15000)];"
    names = f"[out(frame(b'data text/x-%d ' % n + {piece})) for n in range(200)];"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = BEGIN + flood + "out(frame(b'value'));" + names + "out(frame(b'shown'));" + END
    result = box.code("1", context=liar(box, "flood", answer), timeout=60)
    assert result.truncated
    assert sum(len(raw) for one in result.results for raw in one.data.values()) <= 32 * 2**20
    assert all(len(one.data) <= 64 for one in result.results)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_output_without_end_costs_the_host_nothing(box: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = box.code("import sys\nfor _ in range(100): sys.stdout.write('x' * 1_000_000)", timeout=60)
    assert (len(result.stdout), result.truncated, result.error) == (4 * 2**20, True, None)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_one_that_says_nothing_is_ended_by_the_time_limit(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloplet.code.cell.PATIENCE", (0.1, 0.2, 0.3))
    name = liar(box, "mute", BEGIN + "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(1000)")
    began = time.monotonic()
    result = box.code("1", context=name, timeout=0.3)
    assert (result.timed_out, result.restarted) == (True, True)
    assert time.monotonic() - began < 30
    assert box.code("2", context=name).text == "2"  # a true one, by now


def test_ends_and_frames_of_others_are_not_ours(box: Sandbox) -> None:
    answer = (
        "out(frame(b'end 0', b'ffff')); out(frame(b'end', b'ffff'), 2); out(frame(b'value', b'ffff'));"
        + BEGIN
        + "out(b'said');"
        + END
    )
    result = box.code("1", context=liar(box, "stranger", answer), timeout=20)
    assert (result.stdout, result.results, result.error) == ("said", (), None)


def test_names_of_types_never_become_paths(box: Sandbox, tmp_path: Path) -> None:
    from sloplet.cli.code import _save

    answer = (
        BEGIN + "[out(frame(b'data ' + m + b' aGk=')) for m in (b'../../x', b'text/../../x', b'text/html', b'/etc/x')];"
        "out(frame(b'value'));" + END
    )
    result = box.code("1", context=liar(box, "paths", answer), timeout=20)
    assert [set(one.data) for one in result.results] == [{"text/html"}]
    assert _save(result.results, str(tmp_path)) == [str(tmp_path / "1.html")]


def test_tags_that_are_not_quite_ours_are_no_contexts(box: Sandbox) -> None:
    for tag in (f"sloplet-code/1/python/a b/{KEY}", f"sloplet-code/1/cobol/x/{KEY}", "sloplet-code/1/python/x/zz",
                f"sloplet-code/3/python/newer/{KEY}"):  # fmt: skip
        box.spawn(["sleep", "30"], detached=True, tag=tag).detach()
    assert not {"a b", "x", "newer"} & {one.name for one in box.contexts.list()}


def test_settings_that_were_tampered_with_make_nobody_root(box: Sandbox) -> None:
    if box.engine != "container":
        pytest.skip("capability: no other users on the process rung")
    lie = "import json, os\nfor n in ({names}):\n    path = f'/tmp/.sloplet-code/{{n}}.json'\n    "
    lie += "os.path.exists(path) and os.remove(path)\n    json.dump({{'language': 'python', 'user': 'root', "
    lie += "'env': {{'EVIL': '1'}}, 'python': None, 'cwd': None}}, open(path, 'w'))\n"
    me = box.code("import os; os.getuid()", restart=True).text
    box.contexts.create(name="elevated", user="root")
    box.contexts.create(name="custom", env={"A": "1"})
    assert box.code("import os; os.getuid()", context="elevated").text == "0" != me
    box.code(lie.format(names="'python', 'elevated', 'custom', 'planted'"))
    for name in ("python", "elevated", "custom", "planted"):
        with contextlib.suppress(KernelError):
            box.contexts.restart(name)
        with contextlib.suppress(KernelError):
            found = box.code("import os; os.getuid(), 'EVIL' in os.environ", context=name, restart=True).text
            assert found in ((f"({me}, False)", "(0, False)") if name == "elevated" else (f"({me}, False)",))
    with pytest.raises(KernelError, match="cannot be started anew as it was"):
        box.contexts.restart("elevated")
    box.contexts.remove("elevated")
    box.contexts.remove("planted")


def test_long_code_of_another_user_is_in_nobody_elses_hands(box: Sandbox) -> None:
    """Whoever watches the folders cannot change what root's context runs."""
    if box.engine != "container":
        pytest.skip("capability: no other users on the process rung")
    box.contexts.create(name="above", user="root")
    look = (
        "import glob, os, threading\nfound, done = set(), threading.Event()\n"
        "def swap():\n    while not done.is_set():\n"
        "        for path in glob.glob('/tmp/.sloplet-code*') + glob.glob('/tmp/.sloplet-code*/*'):\n"
        "            if path.endswith(('.json', '.sloplet-code')): continue\n"
        "            found.add(path)\n"
        "            try:\n                os.rename(path, path + 'x'); open(path, 'w').write('666')\n"
        "            except OSError: pass\n"
        "thread = threading.Thread(target=swap); thread.start()"
    )
    box.code(look, restart=True)
    before = threading.Thread(target=box.code, args=["import time; time.sleep(1)"], kwargs={"context": "above"})
    before.start()  # the next cell's code lies there while this one runs
    answer = box.code("#" * 5000 + "\n5", context="above")
    before.join()
    box.code("done.set(); thread.join()")
    assert (answer.text, answer.error) == ("5", None)
    assert box.code("len(found) > 0").text == "True"
    box.contexts.remove("above")
    assert [info.name for info in box.files.list("/tmp") if "sloplet-code-" in info.name] == []


def test_settings_that_were_tampered_with(box: Sandbox) -> None:
    folder = "/tmp" if box.engine != "process" else box.workdir.rpartition("/")[0] + "/tmp"
    box.contexts.create(name="tampered")
    for text in ("[" * 100_000, "{}", '{"language": "python", "cwd": 5}', "x" * 1_000_000):
        box.files.write(f"{folder}/.sloplet-code/tampered.json", text)
        assert box.contexts.restart("tampered").running
        assert box.code("3", context="tampered").text == "3"
