"""``sloplet mcp`` as clients start it: the official SDK's client, a real process, real sandboxes."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import sloplet
from mcp.shared.exceptions import MCPError

from mcp_kit import Talk, environment, images_of, stdio, text_of
from server_kit import end_keepers, need_container
from sloplet.engines import registry

pytestmark = pytest.mark.anyone

COMMAND = [sys.executable, "-m", "sloplet.cli", "mcp", "--engine", "container"]


def _png() -> bytes:
    """A picture of one red pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = (1).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0\xff\0\0")) + chunk(b"IEND", b"")
    )


PNG = _png()


@pytest.fixture(scope="module", autouse=True)
def container() -> None:
    need_container()


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    """One session for what does not mind others: its policy is small."""
    home = tmp_path_factory.mktemp("mcp") / "home"
    more = {"MCP_TEST_SECRET": "s3cr3t-value-of-the-host"}
    with stdio(
        home, "--engine", "container", "--max-output", "4000", "--max-sandboxes", "3", "--max-timeout", "20",
        "--allow", "allowed.test", "--secret", "TOKEN=env:MCP_TEST_SECRET@allowed.test", env=more,
    ) as found:  # fmt: skip
        yield found


# -- commands and code ---------------------------------------------------------------------------------------------


def test_a_command(talk: Talk) -> None:
    data = talk.data("run", command="echo out; echo err >&2; pwd; exit 3", env={"A": "b"})
    assert (data["exit_code"], data["stderr"]) == (3, "err\n")
    assert data["stdout"] == "out\n/workspace\n"
    text = talk.text("run", command="echo $A; cat", env={"A": "b"}, stdin="given", cwd="/tmp")
    assert text == "b\ngiven\n[exit code 0]"


def test_time_is_limited_by_the_model_and_by_policy(talk: Talk) -> None:
    began = time.monotonic()
    data = talk.data("run", command="sleep 60", timeout=0.5)
    assert data["timed_out"]
    assert time.monotonic() - began < 10
    assert "at most 20 s" in talk.refused("run", command="true", timeout=21)


def test_long_output_has_head_and_tail(talk: Talk) -> None:
    text = talk.text("run", command="seq 1 200000; echo end of it >&2")
    assert text.startswith("1\n2\n3\n")
    assert "199999\n200000\n" in text
    assert "characters left out" in text
    assert "end of it" in text
    assert len(text) < 4500


def test_progress_of_a_long_command(talk: Talk) -> None:
    talk.text("run", command="for i in 1 2 3; do echo step $i; sleep 0.7; done")
    messages = [message for _, message in talk.progress]
    assert "step 1" in messages
    assert "step 3" in messages
    times = [told for told, _ in talk.progress]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


def test_code_keeps_its_variables(talk: Talk) -> None:
    assert talk.data("run_code", code="x = 20\nprint('printed')\nx + 1") | {"duration": 0} == {
        "result": "21", "displayed": [], "stdout": "printed\n", "stderr": "", "error": None, "timed_out": False,
        "restarted": False, "truncated": False, "duration": 0,
    }  # fmt: skip
    assert talk.data("run_code", code="x")["result"] == "20"
    assert talk.data("run_code", code="x", context="other")["error"]["name"] == "NameError"
    assert talk.data("run_code", code="y=5; echo $y", language="shell")["stdout"] == "5\n"
    failed = talk.data("run_code", code="def f():\n    return 1/0\nf()")["error"]
    assert failed["name"] == "ZeroDivisionError"
    assert "line 2, in f" in failed["traceback"]
    slow = talk.data("run_code", code="while True: pass", timeout=0.5)
    assert slow["timed_out"]
    assert talk.data("run_code", code="x")["result"] == "20"


def test_images_of_code(talk: Talk) -> None:
    made = f"import base64\nclass P:\n    def _repr_png_(self): return base64.b64decode({base64.b64encode(PNG)!r})\n"
    result = talk.call("run_code", code=made + "display(P())\nP()")
    assert [base64.b64decode(image.data) for image in images_of(result)] == [PNG, PNG]
    assert {image.mime_type for image in images_of(result)} == {"image/png"}
    assert "[2 images below]" in text_of(result)
    assert result.structured_content is None  # clients that have data show a model nothing else


def test_figures_of_matplotlib(talk: Talk) -> None:
    find = "import sys\nsys.path.append('/usr/lib/python3/dist-packages')  # Debian's\nimport matplotlib"
    if talk.data("run_code", code=find, context="figures")["error"] is not None:
        pytest.skip("no matplotlib in the host image for this Python")
    draw = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    result = talk.call("run_code", code=draw, context="figures", timeout=20)
    assert base64.b64decode(images_of(result)[0].data).startswith(b"\x89PNG")


# -- files ---------------------------------------------------------------------------------------------------------


def test_files(talk: Talk) -> None:
    assert talk.data("write_file", path="src/a.py", content="one\ntwo\ntwo\n", executable=True)["created"]
    assert talk.text("read_file", path="src/a.py") == "one\ntwo\ntwo\n"
    assert talk.text("read_file", path="src/a.py", offset=2, lines=1) == "two\n[lines 2 to 2 of 3; go on with offset=3]"
    assert "2 times" in talk.refused("edit_file", path="src/a.py", old="two", new="2")
    assert "Similar: line 1 is 'one'" in talk.refused("edit_file", path="src/a.py", old="ones", new="1")
    edited = talk.data("edit_file", path="src/a.py", old="one\ntwo", new="1\n2")
    assert edited["replaced"] == 1
    assert "-one\n" in edited["diff"]
    assert "+1\n" in edited["diff"]
    assert talk.data("edit_file", path="src/a.py", old="two", new="zwei", all=True)["replaced"] == 1
    assert talk.data("run", command="stat -c %a src/a.py; cat src/a.py")["stdout"] == "755\n1\n2\nzwei\n"
    assert not talk.data("write_file", path="src/a.py", content="more", append=True)["created"]
    assert talk.text("read_file", path="src/a.py", offset=4) == "more"
    listed = talk.data("list_files", path="src")["entries"]
    assert [(entry["name"], entry["type"]) for entry in listed] == [("a.py", "file")]
    deep = talk.data("list_files", path=".", depth=2)["entries"]
    assert {"src", "src/a.py"} <= {entry["name"] for entry in deep}


def test_files_that_are_no_text(talk: Talk) -> None:
    talk.data("write_file", path="p.png", content=base64.b64encode(PNG).decode(), encoding="base64")
    shown = talk.call("read_file", path="p.png")
    assert base64.b64decode(images_of(shown)[0].data) == PNG
    raw = bytes(range(256))
    talk.data("write_file", path="b.bin", content=base64.b64encode(raw).decode(), encoding="base64")
    told = talk.call("read_file", path="b.bin")
    assert "256 bytes, no text" in text_of(told)
    link = next(block for block in told.content if block.type == "resource_link")
    found = talk.run("read_resource", link.uri).contents[0]
    assert base64.b64decode(found.blob) == raw
    blob = next(block for block in talk.call("read_file", path="b.bin", blob=True).content if block.type == "resource")
    assert base64.b64decode(blob.resource.blob) == raw


def test_large_files_are_read_in_parts(talk: Talk) -> None:
    talk.data("run", command="seq 1 2000000 > large.txt; head -c 30000000 /dev/zero | tr '\\0' x > line.txt")
    text = talk.text("read_file", path="large.txt")
    assert text.startswith("1\n2\n3\n")
    assert "go on with offset=" in text
    assert len(text) < 4500
    part = talk.text("read_file", path="large.txt", offset=1_000_000, lines=2)
    assert part.startswith("1000000\n1000001\n[lines 1000000 to 1000001 of more")
    line = talk.text("read_file", path="line.txt")
    assert "bytes of this line left out" in line
    assert len(line) < 4500


def test_errors_about_files(talk: Talk) -> None:
    assert "No such file" in talk.refused("read_file", path="/tmp/nothing")
    assert "/tmp/nothing" in talk.refused("read_file", path="/tmp/nothing")
    assert "folder" in talk.refused("read_file", path="/tmp")
    assert talk.refused("read_file", path="/proc/1/mem")
    assert talk.refused("write_file", path="/usr/nothing", content="x")
    assert "not base64" in talk.refused("write_file", path="x", content="???", encoding="base64")


# -- processes and ports -------------------------------------------------------------------------------------------


def test_a_server_in_the_background(talk: Talk) -> None:
    talk.data("write_file", path="web/index.html", content="from inside")
    serve = "exec python3 -u -m http.server 8123 --directory web"
    started = talk.data("start_process", command=serve, wait=0)
    assert started["running"]
    pid, url = started["pid"], talk.data("open_url", port=8123)["url"]
    for _ in range(200):
        if "Serving" in talk.data("process_output", pid=pid, wait=0.1)["process"]["stdout"]:
            break
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.read() == b"from inside"
    assert any(each["pid"] == pid and each["running"] for each in talk.data("process_output")["processes"])
    assert '"GET / ' in talk.data("process_output", pid=pid)["process"]["stderr"]
    stopped = talk.data("stop_process", pid=pid)
    assert not stopped["running"]
    assert talk.data("stop_process", pid=pid)["exit_code"] == stopped["exit_code"]
    assert "no process" in talk.refused("process_output", pid=99999)


def test_a_process_that_ends_soon_says_so(talk: Talk) -> None:
    data = talk.data("start_process", command="echo went wrong >&2; exit 7", wait=10)
    assert (data["running"], data["exit_code"], data["stderr"]) == (False, 7, "went wrong\n")


def test_one_that_will_not_stop_is_killed(talk: Talk) -> None:
    pid = talk.data("start_process", command="trap '' TERM; echo ready; while :; do sleep 1; done", wait=0.3)["pid"]
    assert talk.data("stop_process", pid=pid)["exit_code"] == 137


# -- time, copies, more sandboxes ----------------------------------------------------------------------------------


def test_snapshots_forks_and_differences(talk: Talk) -> None:
    box = talk.data("create_sandbox", name="history")["sandbox"]["name"]
    talk.data("write_file", path="a.txt", content="before\n", sandbox=box)
    assert talk.data("snapshot", name="base", sandbox=box) | {"snapshot": ""} == {
        "snapshot": "", "name": "base", "saved": "disk",
    }  # fmt: skip
    talk.data("run", command="echo after > a.txt; echo new > b.txt", sandbox=box)
    changes = talk.data("diff", against="base", sandbox=box)
    assert (changes["added"], changes["changed"], changes["removed"]) == (1, 1, 0)
    assert "-before\n+after" in talk.text("diff", against="base", path="a.txt", sandbox=box)
    copy = talk.data("fork", sandbox=box)
    name = copy["sandboxes"][0]["name"]
    assert copy["copied"] == "disk"
    talk.data("run", command="echo copy > a.txt", sandbox=name)
    assert "may have 3 sandboxes" in talk.refused("fork", count=2)
    assert talk.data("rollback", snapshot="base", sandbox=box)["restored"] == "disk"
    assert talk.data("run", command="cat a.txt; ls", sandbox=box)["stdout"] == "before\na.txt\n"
    assert talk.data("run", command="cat a.txt b.txt", sandbox=name)["stdout"] == "copy\nnew\n"
    listed = {each["name"]: each for each in talk.data("list_sandboxes")["sandboxes"]}
    assert set(listed) == {"main", "history", name}
    assert listed["history"]["snapshots"] == ["base"]
    talk.data("delete_snapshot", snapshot="base", sandbox=box)
    assert "SnapshotNotFound" in talk.refused("rollback", snapshot="base", sandbox=box)
    for each in (box, name):
        talk.data("delete_sandbox", sandbox=each)
    assert "no sandbox 'history'" in talk.refused("run", command="true", sandbox=box)
    assert [each["name"] for each in talk.data("list_sandboxes")["sandboxes"]] == ["main"]


def test_forks_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if named := os.environ.get("SLOPLET_TEST_RUNSC"):
        monkeypatch.setenv("SLOPLET_RUNSC", named)
    probe = registry.load("gvisor").probe()
    if not probe.available:
        pytest.skip(f"gvisor: {probe.reason}")
    with stdio(tmp_path / "home", "--engine", "gvisor") as talk:
        talk.data("run_code", code="x = 1")
        assert talk.data("snapshot", name="one")["saved"] == "live"
        talk.data("run_code", code="x = 2")
        copies = [each["name"] for each in talk.data("fork", count=2)["sandboxes"]]
        talk.data("run_code", code="x = 3", sandbox=copies[0])
        assert talk.data("rollback", snapshot="one")["restored"] == "live"
        found = [talk.data("run_code", code="x", sandbox=name)["result"] for name in ("main", *copies)]
        assert found == ["1", "3", "2"]


def test_the_own_sandbox_can_be_thrown_away(talk: Talk) -> None:
    talk.data("run", command="touch here")
    talk.data("delete_sandbox", sandbox="main")
    assert talk.data("run", command="ls")["stdout"] == ""


# -- resources -----------------------------------------------------------------------------------------------------


def test_resources(talk: Talk) -> None:
    templates = {each.uri_template for each in talk.run("list_resource_templates").resource_templates}
    assert templates == {"sloplet://{sandbox}/files/{+path}", "sloplet://{sandbox}/processes/{pid}/output"}
    talk.data("write_file", path="note ü.txt", content="noted")
    pid = talk.data("start_process", command="echo logged", wait=5)["pid"]
    listed = {each.name: each.uri for each in talk.run("list_resources").resources}
    assert talk.run("read_resource", listed["note ü.txt"]).contents[0].text == "noted"
    assert talk.run("read_resource", listed[f"output of process {pid}"]).contents[0].text == "logged\n"
    assert talk.run("read_resource", "sloplet://main/files/workspace/note%20%C3%BC.txt").contents[0].text == "noted"
    for wrong in ("sloplet://other/files/x", "sloplet://main/files/nothing", "file:///etc/passwd",
                  "sloplet://main/processes/99999/output", "sloplet://main/files/proc/kmsg"):  # fmt: skip
        with pytest.raises(MCPError) as caught:
            talk.run("read_resource", wrong)
        assert "Traceback" not in str(caught.value)


# -- policy --------------------------------------------------------------------------------------------------------


def test_what_is_refused_is_told_so_that_a_model_can_act(talk: Talk) -> None:
    fetch = "python3 -c 'import urllib.request as u; u.urlopen(\"http://refused.test/\", timeout=5)' 2>/dev/null"
    data = talk.data("run", command=fetch)
    assert data["exit_code"] == 1
    assert any("refused.test" in reason for reason in data["denied"])
    assert "trying again does not help" in talk.text("run", command=fetch)
    log = talk.data("network_log")
    assert "may reach allowed.test" in log["policy"]
    assert any(row["target"].startswith("refused.test:") and row["verdict"] == "deny" for row in log["log"])


def test_secrets_stay_outside(talk: Talk) -> None:
    seen = talk.data("run", command="echo $TOKEN; env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'")["stdout"]
    assert "TOKEN=" in seen
    assert "s3cr3t-value-of-the-host" not in seen
    for tool in ("list_sandboxes", "network_log", "process_output"):
        assert "s3cr3t-value-of-the-host" not in talk.text(tool)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("create_sandbox", {"image": "other"}),
        ("create_sandbox", {"engine": "process"}),
        ("create_sandbox", {"network": {"allow": ["*"]}}),
        ("create_sandbox", {"volumes": {"/host": "/"}}),
        ("create_sandbox", {"name": "x", "memory": "64g"}),
        ("run", {"command": "id", "user": "root"}),
        ("run", {"command": "id", "network": "all"}),
        ("run_code", {"code": "1", "python": "/bin/sh"}),
        ("start_process", {"command": "id", "user": "0"}),
        ("write_file", {"path": "x", "content": "", "user": "root"}),
        ("open_url", {"port": 80, "address": "0.0.0.0"}),
        ("network_log", {"allow": ["x.org"]}),
        ("fork", {"count": 1, "names": ["dev"]}),
        ("snapshot", {"role": "template"}),
    ],
)
def test_no_argument_widens_the_policy(talk: Talk, tool: str, arguments: dict[str, Any]) -> None:
    assert "has no argument" in talk.refused(tool, **arguments)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("run", {}),
        ("run", {"command": ["id"]}),
        ("run", {"command": ""}),
        ("run", {"command": "x" * 300_000}),
        ("run", {"command": "echo \0"}),
        ("run", {"command": "id", "timeout": -1}),
        ("run", {"command": "id", "timeout": "nan"}),
        ("run", {"command": "id", "timeout": 1e308}),
        ("run", {"command": "id", "env": {"A=B": "c"}}),
        ("run", {"command": "id", "env": {"A": "\0"}}),
        ("run", {"command": "id", "env": [1]}),
        ("run", {"command": "id", "cwd": "/nothing/here"}),
        ("run", {"command": "id", "sandbox": "../../dev"}),
        ("run", {"command": "id", "sandbox": {"$ne": 1}}),
        ("read_file", {"path": "\0"}),
        ("read_file", {"path": "x" * 5000}),
        ("read_file", {"path": "a", "offset": 0}),
        ("read_file", {"path": "a", "lines": 10**12}),
        ("edit_file", {"path": "a", "old": "", "new": "x"}),
        ("list_files", {"path": "/nothing"}),
        ("list_files", {"depth": 10**9}),
        ("process_output", {"pid": -1}),
        ("stop_process", {"pid": 1 << 40}),
        ("stop_process", {"pid": 424242, "signal": "STOP"}),
        ("open_url", {"port": 0}),
        ("open_url", {"port": 70000}),
        ("rollback", {"snapshot": "../x"}),
        ("snapshot", {"name": "a/b"}),
        ("fork", {"count": 0}),
        ("fork", {"count": 10**9}),
        ("diff", {"against": "nothing"}),
        ("run_code", {"code": "1", "language": "perl"}),
        ("run_code", {"code": "1", "context": "../x"}),
        ("delete_sandbox", {"sandbox": ""}),
    ],
)
def test_hostile_arguments_are_tool_errors(talk: Talk, tool: str, arguments: dict[str, Any]) -> None:
    told = talk.refused(tool, **arguments)
    assert len(told) < 1000
    assert "site-packages" not in told
    assert "bug" not in told


def test_unknown_tools_are_errors_of_the_protocol(talk: Talk) -> None:
    with pytest.raises(MCPError):
        talk.call("rm_rf_slash")
    assert talk.data("run", command="echo on")["stdout"] == "on\n"


def test_names_of_files_that_are_no_text(talk: Talk) -> None:
    talk.data("run", command="mkdir odd; cd odd; printf x > $(printf 'a\\377b'); printf 'line\\n' > $(printf 'c\\nd')")
    names = [entry["name"] for entry in talk.data("list_files", path="odd")["entries"]]
    assert len(names) == 2
    talk.data("diff", path="odd")
    talk.run("list_resources")


# -- sessions end --------------------------------------------------------------------------------------------------


def processes(marker: str) -> list[int]:
    """Processes with this word in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if marker.encode() in words:
                found.append(int(entry.name))
    return found


class Raw:
    """The process without the SDK: lines in, lines out."""

    def __init__(self, home: Path, *arguments: str) -> None:
        with open(f"{home}.err", "ab") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env={**os.environ, **environment(home)},
            )  # fmt: skip
        self._read = b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def send(self, *messages: dict[str, Any] | bytes) -> None:
        assert self.process.stdin is not None
        for message in messages:
            raw = message if isinstance(message, bytes) else json.dumps({"jsonrpc": "2.0", **message}).encode()
            self.process.stdin.write(raw + b"\n")
        self.process.stdin.flush()

    def answer(self, number: int) -> Any:
        """The answer to a request; each line on stdout must be the protocol's."""
        while True:
            message = json.loads(self._line())
            assert message["jsonrpc"] == "2.0"
            if message.get("id") == number:
                return message

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        while b"\n" not in self._read:
            assert select.select([self.process.stdout], [], [], 30)[0], "no answer came"
            piece = os.read(self.process.stdout.fileno(), 65536)
            assert piece, "it has ended"
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line

    def begin(self) -> None:
        info = {"name": "raw", "version": "1"}
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info}
        self.send({"id": 1, "method": "initialize", "params": hello})
        assert self.answer(1)["result"]["serverInfo"]["name"] == "sloplet"
        self.send({"method": "notifications/initialized"})

    def call(self, number: int, tool: str, **arguments: Any) -> None:
        self.send({"id": number, "method": "tools/call", "params": {"name": tool, "arguments": arguments}})


@pytest.mark.parametrize("how", ["eof", "TERM", "INT", "HUP", "KILL", "deaf"])
def test_however_a_session_ends_its_sandbox_is_gone(how: str, tmp_path: Path) -> None:
    home, marker = tmp_path / "home", f"3600.{os.getpid()}{len(how)}{ord(how[0])}"
    with Raw(home) as raw:
        raw.begin()
        raw.call(2, "start_process", command=f"exec sleep {marker}", wait=0)
        assert raw.answer(2)["result"]["structuredContent"]["running"]
        raw.call(3, "run", command="sleep 3600")  # something is under way
        inside = processes(marker)
        assert inside
        ends = [os.pidfd_open(pid) for pid in inside]
        assert raw.process.stdin is not None
        assert raw.process.stdout is not None
        began = time.monotonic()
        if how == "eof":
            raw.process.stdin.close()
        elif how == "deaf":
            raw.process.stdout.close()
            raw.send({"id": 9, "method": "tools/list"})
        else:
            raw.process.send_signal(signal.Signals[f"SIG{how}"])
        code = raw.process.wait(20)
        assert time.monotonic() - began < 10
        assert code == {"eof": 0, "deaf": 0, "TERM": 143, "INT": 130, "HUP": 129, "KILL": -9}[how]
        for fd in ends:
            assert select.select([fd], [], [], 10)[0], "a process of the sandbox goes on"
            os.close(fd)
    if how == "KILL":
        sloplet("gc", env={"SLOPLET_HOME": str(home)})
    assert list((home / "sandboxes").iterdir()) == []
    assert json.loads(sloplet("ls", "--json", env={"SLOPLET_HOME": str(home)}).stdout) == []
    assert "Traceback" not in Path(f"{home}.err").read_text()


def test_a_call_that_is_cancelled_ends_its_command(tmp_path: Path) -> None:
    marker = f"3601.{os.getpid()}"
    with Raw(tmp_path / "home") as raw:
        raw.begin()
        raw.call(2, "run", command="true")
        raw.answer(2)
        raw.call(3, "run", command=f"echo begun; exec sleep {marker}")
        for _ in range(500):
            if found := processes(marker):
                break
            time.sleep(0.01)
        fd = os.pidfd_open(found[0])
        raw.send({"method": "notifications/cancelled", "params": {"requestId": 3}})
        assert select.select([fd], [], [], 10)[0]
        os.close(fd)
        raw.call(4, "run", command="echo on")
        assert raw.answer(4)["result"]["structuredContent"]["stdout"] == "on\n"


def test_garbage_on_stdin_harms_nobody(tmp_path: Path) -> None:
    with Raw(tmp_path / "home") as raw:
        raw.send(b"\xff\xfe not json", b"", b"[]", b'"x"', b"[" * 5000, b'{"jsonrpc":"2.0"}')
        raw.begin()
        raw.send(
            b'{"jsonrpc":"2.0","id":5,"method":"tools/call","params":7}',
            b'{"jsonrpc":"2.0","id":6,"method":"nothing/here"}',
            b'{"jsonrpc":"2.0","id":null,"method":"tools/list"}',
            {"id": 7, "method": "tools/call", "params": {"name": "run", "arguments": {"command": {"a": {"b": []}}}}},
        )
        assert "error" in raw.answer(6)
        assert raw.answer(7)["result"]["isError"]
        feeder = threading.Thread(target=raw.send, args=(b"y" * (40 * 2**20),))  # longer than any message may be
        feeder.start()
        feeder.join(30)
        raw.call(8, "run", command="echo on")
        assert raw.answer(8)["result"]["structuredContent"]["stdout"] == "on\n"


def test_only_the_protocol_is_on_stdout(tmp_path: Path) -> None:
    """Whatever prints, in this process or what it starts, prints elsewhere."""
    noisy = "import os, sys; print('noise'); os.system('echo noise')"
    program = (
        "import sys; from sloplet.mcp import server; made = server.make_server\n"
        f"def loud(*a, **k):\n    exec({noisy!r}); sys.stdout.flush(); return made(*a, **k)\n"
        "server.make_server = loud\n"
        "import sloplet.mcp.call as c; whole = c.Tool.call\n"
        f"async def call(*a, **k):\n    exec({noisy!r}); sys.stdout.flush(); return await whole(*a, **k)\n"
        "c.Tool.call = call\n"
        "from sloplet.cli.main import main; main(['mcp', '--engine', 'container'])"
    )
    ask = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "list_sandboxes", "arguments": {}}},
    ]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **environment(tmp_path / "home")},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"".join(json.dumps(each).encode() + b"\n" for each in ask))
        process.stdin.flush()
        lines = [process.stdout.readline() for _ in range(2)]
        out, err = process.communicate(timeout=20)
    assert [json.loads(line)["id"] for line in lines] == [1, 2]
    assert out == b""
    assert err.count(b"noise") >= 3


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--ask"], "--ask is not for mcp"),
        (["--engine", "nothing!"], "not an engine name"),
        (["--memory", "lots"], "memory"),
        (["--max-sandboxes", "0"], "sandboxes"),
        (["--max-output", "1"], "output"),
        (["--timeout", "soon"], "timeout"),
        (["--sandbox", "../x"], "not a sandbox name"),
        (["--secret", "A=env:NOTHING@x.org"], "network"),
        (["--nothing"], "no such option"),
    ],
)
def test_a_senseless_start_is_refused_on_stderr(arguments: list[str], word: str) -> None:
    done = sloplet("mcp", *arguments)
    assert done.returncode == 125
    assert done.stdout == b""
    assert word in done.stderr.decode()


def test_without_the_package_the_command_says_what_to_install() -> None:
    program = "import sys; sys.modules['mcp'] = None; from sloplet.cli.main import main; main(['mcp'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False)
    assert done.returncode == 125
    assert "pip install 'sloplet[mcp]'" in done.stderr.decode()


# -- sandboxes that stay -------------------------------------------------------------------------------------------


def test_a_named_sandbox_stays_and_is_found_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    env = {"SLOPLET_HOME": str(home)}
    try:
        with stdio(home, "--engine", "container", "--sandbox", "dev") as talk:
            talk.data("write_file", path="kept.txt", content="here")
            extra = talk.data("create_sandbox")["sandbox"]["id"]
        left = json.loads(sloplet("ls", "--json", env=env).stdout)
        assert [each["name"] for each in left] == ["dev"]
        assert extra not in [each["id"] for each in left]
        sloplet("snapshot", "dev", "of-mine", env=env)
        with stdio(home, "--sandbox", "dev", mode="legacy") as talk:  # as it is
            assert talk.text("read_file", path="kept.txt") == "here"
            assert "NotAllowed" in talk.refused("delete_sandbox", sandbox="main")
            assert "NotAllowed" in talk.refused("delete_snapshot", snapshot="of-mine")
            talk.data("snapshot", name="of-the-model")
            talk.data("delete_snapshot", snapshot="of-the-model")
        with stdio(home, "--sandbox", "dev", "--engine", "container", "--memory", "64m") as talk:
            assert "SandboxMismatch" in talk.refused("run", command="true")
    finally:
        end_keepers(home)


def test_keep_leaves_all_of_them(tmp_path: Path) -> None:
    home = tmp_path / "home"
    env = {"SLOPLET_HOME": str(home)}
    try:
        with stdio(home, "--engine", "container", "--keep") as talk:
            talk.data("run", command="echo here > kept.txt")
            talk.data("fork")
        names = [each["name"] for each in json.loads(sloplet("ls", "--json", env=env).stdout)]
        assert len(names) == 2
        assert all(name.startswith("mcp-") for name in names)
        for name in names:
            assert sloplet("exec", name, "--", "cat", "kept.txt", env=env).stdout == b"here\n"
    finally:
        end_keepers(home)


def test_nothing_is_made_for_a_session_that_uses_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with stdio(home, "--engine", "container") as talk:
        talk.run("list_tools")
        talk.data("list_sandboxes")
        assert talk.run("list_resources").resources == []
        assert not (home / "sandboxes").exists() or list((home / "sandboxes").iterdir()) == []
