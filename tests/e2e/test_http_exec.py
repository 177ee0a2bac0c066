"""Commands over HTTP, on a real server with real clients: buffered, server-sent events, WebSockets."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from http_kit import Box, made, parsed, peak_memory
from server_kit import Served, need_container, served

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(180)]

FLOOD = 400_000_000
READY = "trap 'echo interrupted; exit 7' INT; echo ready; while :; do sleep 0.05; done"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need_container()
    with served(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="module")
def box(server: Served) -> Iterator[Box]:
    with made(server, "dev") as found:
        yield found


class TestBuffered:
    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            ({"command": "echo out; echo err >&2"}, {"exit_code": 0, "stdout": "out\n", "stderr": "err\n"}),
            ({"command": ["sh", "-c", "exit 3"]}, {"exit_code": 3, "stdout": "", "signal": None, "timed_out": False}),
            ({"command": "kill -9 $$"}, {"exit_code": 137, "signal": 9}),
            ({"command": "cat", "stdin": "hällo"}, {"stdout": "hällo", "stdout_size": 6}),
            ({"command": "od -An -tx1", "stdin_base64": "AP8="}, {"stdout": " 00 ff\n"}),
            ({"command": "printf '\\377'"}, {"stdout": "\ufffd", "encoding": "utf-8", "stdout_size": 1}),
            ({"command": "printf '\\377'", "encoding": "base64"}, {"stdout": "/w==", "encoding": "base64"}),
            ({"command": "sleep 60", "timeout": 0.3}, {"timed_out": True}),
            ({"command": "sleep 60", "timeout": "300ms"}, {"timed_out": True}),
            ({"command": "head -c 100000 /dev/zero", "max_output": 10}, {"stdout": "\0" * 10, "truncated": True}),
            ({"command": 'echo "$A $PWD"', "env": {"A": "b"}, "cwd": "/tmp"}, {"stdout": "b /tmp\n"}),
            ({"command": "id -u", "user": "root"}, {"stdout": "0\n"}),
        ],
    )  # fmt: skip
    def test_results(self, box: Box, asked: dict[str, Any], expected: dict[str, Any]) -> None:
        result = box.run(**asked)
        assert {key: result[key] for key in expected} == expected

    @pytest.mark.parametrize(
        ("asked", "status", "error"),
        [
            ({"command": ["/no/such"]}, 422, "CommandNotFound"),
            ({"command": "true", "cwd": "/no/such"}, 422, "WorkdirInvalid"),
            ({"command": "true", "user": "nobody-here"}, 422, "UserNotFound"),
            ({"command": "a\0b"}, 422, "SpecError"),
            ({"command": "  "}, 422, "SpecError"),
            ({"command": ["x" * 600_000, "y" * 600_000]}, 422, "SpecError"),
            ({"command": "true", "stdin": "a", "stdin_base64": "YQ=="}, 422, "SpecError"),
            ({"command": "true", "stdin_base64": "?"}, 422, "SpecError"),
            ({"command": "true", "env": {"a=b": "c"}}, 422, "SpecError"),
            ({"command": "true", "timeout": "soon"}, 422, "InvalidLimit"),
            ({"command": "true", "timeout": -1}, 422, "RequestInvalid"),
            ({"command": "true", "max_output": 1 << 40}, 422, "RequestInvalid"),
            ({"command": "true", "check": True}, 422, "RequestInvalid"),
            ({"command": 5}, 422, "RequestInvalid"),
            ({"command": []}, 422, "RequestInvalid"),
        ],
    )
    def test_what_cannot_be(self, box: Box, asked: dict[str, Any], status: int, error: str) -> None:
        for rest in ("/exec", "/exec/stream"):  # an error before the stream begins is no event
            answer = box.post(rest, asked)
            assert (answer.status_code, answer.json()["error"]) == (status, error), answer.text
            assert answer.headers["content-type"] == "application/problem+json"

    def test_no_such_sandbox(self, box: Box) -> None:
        answer = box.http.post("/v1/sandboxes/nobody/exec", json={"command": "true"})
        assert (answer.status_code, answer.json()["error"]) == (404, "SandboxNotFound")

    def test_a_client_that_goes_away_ends_its_command(self, box: Box) -> None:
        body = json.dumps({"command": "echo begun > /tmp/begun; sleep 600"}).encode()
        with box.raw() as connection:
            head = box.head("POST", "/exec", "Content-Type: application/json", f"Content-Length: {len(body)}")
            connection.sendall(head + body)
            with box.events("/files/watch?path=/tmp", method="GET") as changes:
                next(changes)
                while box.read("/tmp/begun").status_code != 200:
                    next(changes)
            pid = box.newest()["pid"]
            assert box.newest()["running"]
        assert box.wait_for_end(pid)["signal"] == 9


class TestEvents:
    def test_as_they_come(self, box: Box) -> None:
        """curl sees the first line while the command still waits for something that is done after it."""
        asked = {"command": "echo one; while [ ! -e /tmp/go ]; do sleep 0.02; done; echo two >&2; exit 5"}
        command = [*box.curl, "-H", "Content-Type: application/json", "-d", json.dumps(asked), box.url("/exec/stream")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as curl:
            assert curl.stdout is not None
            told = parsed(iter(curl.stdout.readline, ""))
            name, started = next(told)
            assert name == "started"
            assert started["pid"] > 0
            assert next(told) == ("stdout", {"data": "one\n"})
            assert box.put("/tmp/go", b"").status_code == 201
            assert next(told) == ("stderr", {"data": "two\n"})
            name, ended = next(told)
            assert (name, ended["exit_code"], ended["truncated"], ended["stdout_size"]) == ("exit", 5, False, 4)
            assert list(told) == []
        assert curl.returncode == 0

    def test_characters_are_not_cut_in_two(self, box: Box) -> None:
        with box.events("/exec/stream", {"command": "printf '\\303'; sleep 0.2; printf '\\244\\377'"}) as told:
            texts = [data["data"] for name, data in told if name == "stdout"]
        assert "".join(texts) == "ä\ufffd"

    def test_bytes(self, box: Box) -> None:
        with box.events("/exec/stream", {"command": "cat", "stdin_base64": "/wA=", "encoding": "base64"}) as told:
            data = b"".join(base64.b64decode(data["data"]) for name, data in told if name == "stdout")
        assert data == b"\xff\0"

    def test_what_is_beyond_the_limit_is_not_sent(self, box: Box) -> None:
        with box.events("/exec/stream", {"command": "head -c 1000000 /dev/zero", "max_output": 1000}) as told:
            found = list(told)
        assert sum(len(data["data"]) for name, data in found if name == "stdout") == 1000
        assert found[-1][1]["truncated"] is True
        assert found[-1][1]["stdout_size"] == 1_000_000

    def test_a_client_that_goes_away_ends_its_command(self, box: Box) -> None:
        with box.events("/exec/stream", {"command": READY}) as told:
            pid = next(told)[1]["pid"]
            next(told)
        assert box.wait_for_end(pid)["signal"] == 9

    def test_an_error_later_is_an_event(self, server: Served) -> None:
        with made(server, "doomed") as doomed, doomed.events("/exec/stream", {"command": READY}) as told:
            assert next(told)[0] == "started"
            next(told)
            with server.client() as other:
                other.delete(doomed.path)
            name, problem = list(told)[-1]
        assert (name, problem["error"], problem["status"]) == ("error", "SandboxDead", 409)
        assert problem["request_id"]

    def test_a_client_that_does_not_read_holds_the_command_up(self, box: Box) -> None:
        """Neither the server nor the keeper takes what nobody reads."""
        before = peak_memory(box.server.pid)
        body = json.dumps({"command": f"head -c {FLOOD} /dev/zero"}).encode()
        with box.raw() as connection:
            head = box.head("POST", "/exec/stream", "Content-Type: application/json", f"Content-Length: {len(body)}")
            connection.sendall(head + body)
            assert connection.recv(10) == b"HTTP/1.1 2"
            written = _settled(box, box.newest()["pid"])
        assert written < 32 << 20
        assert peak_memory(box.server.pid) - before < 32 << 20

    def test_a_flood_passes_through(self, box: Box) -> None:
        before = peak_memory(box.server.pid)
        size = 0
        with box.events("/exec/stream", {"command": f"head -c {FLOOD // 10} /dev/zero | tr '\\0' x"}) as told:
            for name, data in told:
                if name == "stdout":
                    size += len(data["data"])
                elif name == "exit":
                    assert not data["truncated"]
        assert size == FLOOD // 10
        assert peak_memory(box.server.pid) - before < 32 << 20


def _settled(box: Box, pid: int) -> int:
    """What a process has written when it writes no more."""
    seen = [-1]
    while len(seen) < 5 or len(set(seen[-5:])) > 1:
        assert len(seen) < 1000
        info = box.get(f"/processes/{pid}").json()
        assert info["running"], info
        box.run("sleep 0.05")
        seen.append(info["stdout_size"])
    return seen[-1]


def started(socket: ClientConnection) -> int:
    told = json.loads(socket.recv(30))
    assert told["type"] == "started", told
    return int(told["pid"])


def until(socket: ClientConnection, text: bytes, so_far: bytes = b"") -> bytes:
    """Output until ``text`` is in it."""
    while text not in so_far:
        message = socket.recv(30)
        assert isinstance(message, bytes), message
        so_far += message[1:]
    return so_far


def the_end(socket: ClientConnection) -> tuple[dict[int, bytes], dict[str, Any]]:
    """All output that is left, by channel, and how it ended."""
    output = {1: b"", 2: b""}
    while isinstance(message := socket.recv(30), bytes):
        output[message[0]] += message[1:]
    ended = json.loads(message)
    assert ended["type"] == "exit", ended
    with pytest.raises(ConnectionClosed) as closed:
        socket.recv(30)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1000
    return output, ended


class TestWebSocket:
    def test_input_and_output(self, box: Box) -> None:
        with box.websocket("/exec/ws", {"command": "cat; echo bye >&2; exit 4", "stdin": True}) as socket:
            assert started(socket) > 0
            socket.send(b"\x00one\xff")
            assert until(socket, b"\x00one\xff")
            socket.send(b"two" * 100_000)
            socket.send('{"type": "eof"}')
            output, ended = the_end(socket)
        assert output == {1: b"two" * 100_000, 2: b"bye\n"}
        assert (ended["exit_code"], ended["truncated"], ended["stdout_size"]) == (4, False, 5 + 300_000)

    def test_no_input_is_the_end_of_the_file(self, box: Box) -> None:
        with box.websocket("/exec/ws", {"command": ["cat"]}) as socket:
            started(socket)
            assert the_end(socket)[1]["exit_code"] == 0

    def test_a_terminal(self, box: Box) -> None:
        asked = {"command": ["/bin/sh"], "pty": {"rows": 40, "cols": 100}, "env": {"PS1": "NEXT> "}}
        with box.websocket("/exec/ws", asked) as socket:
            started(socket)
            socket.send(b"stty size; tty; echo E''ND\n")
            seen = until(socket, b"END\r\n")
            assert b"40 100" in seen
            assert b"/dev/pts/" in seen
            socket.send('{"type": "resize", "rows": 50, "cols": 132}')
            socket.send(b"stty size; echo A''GAIN\n")
            assert b"50 132" in until(socket, b"AGAIN\r\n")
            socket.send(b"echo sl''eep; sleep 100\n")
            until(socket, b"sleep\r\n")
            socket.send(b"\x03")  # which the terminal makes a signal of
            until(socket, b"NEXT> ", until(socket, b"^C").partition(b"^C")[2])
            socket.send(b"exit 9\n")
            assert the_end(socket)[1]["exit_code"] == 9

    @pytest.mark.parametrize("signal", ["INT", "SIGINT", 2])
    def test_signals(self, box: Box, signal: str | int) -> None:
        with box.websocket("/exec/ws", {"command": READY}) as socket:
            started(socket)
            until(socket, b"ready")
            socket.send(json.dumps({"type": "signal", "signal": signal, "tree": False}))
            output, ended = the_end(socket)
        assert (output[1], ended["exit_code"]) == (b"interrupted\n", 7)

    def test_a_signal_overtakes_input_that_nobody_takes(self, box: Box) -> None:
        with box.websocket("/exec/ws", {"command": READY, "stdin": True}) as socket:
            started(socket)
            until(socket, b"ready")
            socket.send(bytes(900_000))
            socket.send('{"type": "signal", "signal": "KILL"}')
            assert the_end(socket)[1]["signal"] == 9

    @pytest.mark.parametrize(
        "message",
        [
            '{"type": "dance"}', "{}", "[]", "5", "no JSON", '{"type": "resize", "rows": 0, "cols": 80}', b"input",
            '{"type": "signal", "signal": "DANCE"}', '{"type": "signal", "signal": 99}', '{"type": "eof", "more": 1}',
        ],
    )  # fmt: skip
    def test_a_message_that_makes_no_sense_ends_it(self, box: Box, message: str | bytes) -> None:
        with box.websocket("/exec/ws", {"command": READY}) as socket:
            pid = started(socket)
            until(socket, b"ready")
            socket.send(message)
            assert _refused(socket) in ("RequestInvalid", "SpecError")
        assert box.wait_for_end(pid)["signal"] == 9

    @pytest.mark.parametrize(
        ("first", "error"),
        [
            ({"command": ["/no/such"]}, "CommandNotFound"), ({"command": "true", "dance": True}, "RequestInvalid"),
            ({"command": "true", "pty": {"rows": 0}}, "RequestInvalid"),
            ({"command": "true", "cwd": "/no"}, "WorkdirInvalid"),
            ([], "RequestInvalid"), (b"binary", "RequestInvalid"),
        ],
    )  # fmt: skip
    def test_a_beginning_that_makes_no_sense(self, box: Box, first: Any, error: str) -> None:
        with box.websocket("/exec/ws", None if isinstance(first, bytes) else first) as socket:
            if isinstance(first, bytes):
                socket.send(first)
            assert _refused(socket) == error

    def test_no_such_sandbox(self, box: Box) -> None:
        with Box(box.server, "nobody", box.http).websocket("/exec/ws", {"command": "true"}) as socket:
            assert _refused(socket) == "SandboxNotFound"

    def test_a_client_that_goes_away_ends_its_command(self, box: Box) -> None:
        with box.websocket("/exec/ws", {"command": READY, "stdin": True}) as socket:
            pid = started(socket)
            until(socket, b"ready")
            socket.send(bytes(300_000))  # which nobody reads
            socket.socket.close()  # no goodbye
        assert box.wait_for_end(pid)["signal"] == 9

    def test_unless_it_was_detached(self, box: Box) -> None:
        with box.websocket("/exec/ws", {"command": READY, "detached": True, "tag": "mine"}) as socket:
            pid = started(socket)
            until(socket, b"ready")
        info = box.get(f"/processes/{pid}").json()
        assert (info["running"], info["tag"]) == (True, "mine")
        assert box.post(f"/processes/{pid}/signal", {"signal": "INT", "tree": False}).status_code == 204
        assert box.wait_for_end(pid)["exit_code"] == 7

    def test_a_client_that_does_not_read_holds_the_command_up(self, box: Box) -> None:
        before = peak_memory(box.server.pid)
        with box.websocket("/exec/ws", {"command": f"head -c {FLOOD} /dev/zero"}, max_queue=1) as socket:
            assert _settled(box, started(socket)) < 32 << 20
            socket.socket.close()
        assert peak_memory(box.server.pid) - before < 32 << 20

    def test_a_command_that_does_not_read_holds_the_client_up(self, box: Box) -> None:
        before = peak_memory(box.server.pid)
        with box.websocket("/exec/ws", {"command": READY, "stdin": True}) as socket:
            started(socket)
            until(socket, b"ready")
            socket.socket.settimeout(1)
            with pytest.raises((TimeoutError, ConnectionClosed)):
                _pour(socket, FLOOD)
            socket.socket.close()
        assert peak_memory(box.server.pid) - before < 32 << 20


def _pour(socket: ClientConnection, size: int) -> None:
    for _ in range(size >> 20):
        socket.send(bytes(1 << 20))


def _refused(socket: ClientConnection) -> str:
    told = json.loads(socket.recv(30))
    assert told["type"] == "error", told
    assert told["request_id"]
    with pytest.raises(ConnectionClosed) as closed:
        socket.recv(30)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008
    return str(told["error"])


class TestProcesses:
    def test_one_that_goes_on_without_anybody(self, box: Box) -> None:
        asked = {"command": ["sh", "-c", "echo kept; read line; echo got $line; exit 6"], "stdin": True, "tag": "t"}
        answer = box.post("/processes", asked)
        assert answer.status_code == 201, answer.text
        process = answer.json()
        pid = process["pid"]
        assert process["command"] == asked["command"]
        assert process["running"]
        assert process["tag"] == "t"
        assert pid in [each["pid"] for each in box.get("/processes").json()["items"]]
        with box.websocket(f"/processes/{pid}/attach") as first, box.websocket(f"/processes/{pid}/attach") as second:
            for socket in (first, second):
                assert started(socket) == pid
                until(socket, b"kept\n")
            with box.events(f"/processes/{pid}/output?follow=false", method="GET") as told:
                assert [name for name, _ in told] == ["started", "stdout", "end"]
            first.send(b"hello\n")
            for socket in (first, second):
                output, ended = the_end(socket)
                assert (output[1], ended["exit_code"]) == (b"got hello\n", 6)
        with box.events(f"/processes/{pid}/output", method="GET") as told:
            found = list(told)
        assert "".join(data["data"] for name, data in found if name == "stdout") == "kept\ngot hello\n"
        assert found[-1][0] == "exit"
        assert found[-1][1]["exit_code"] == 6
        with box.events(f"/processes/{pid}/output?replay=false", method="GET") as told:
            assert [name for name, _ in told] == ["started", "exit"]

    def test_leaving_lets_it_run(self, box: Box) -> None:
        pid = box.post("/processes", {"command": READY}).json()["pid"]
        with box.websocket(f"/processes/{pid}/attach?replay=true") as socket:
            started(socket)
            until(socket, b"ready")
        assert box.get(f"/processes/{pid}").json()["running"]
        box.post(f"/processes/{pid}/signal", {"signal": 9})
        assert box.wait_for_end(pid)["signal"] == 9

    @pytest.mark.parametrize("pid", [999_999, 2**40])
    def test_no_such_process(self, box: Box, pid: int) -> None:
        for answer in (
            box.get(f"/processes/{pid}"), box.get(f"/processes/{pid}/output"), box.post(f"/processes/{pid}/signal", {}),
        ):  # fmt: skip
            assert (answer.status_code, answer.json()["error"]) == (404, "ProcessNotFound")
        with box.websocket(f"/processes/{pid}/attach") as socket:
            assert _refused(socket) == "ProcessNotFound"

    @pytest.mark.parametrize("body", [{"signal": "DANCE"}, {"signal": 0}, {"signal": 65}, {"tree": "yes"}, {"a": 1}])
    def test_no_such_signal(self, box: Box, body: dict[str, Any]) -> None:
        assert box.post("/processes/1/signal", body).status_code == 422
