"""Conformance: what leaves a sandbox goes where its policy allows and nowhere else, and its ports can be reached.

Servers are this process's own, on loopback, reached by the name ``host.sloplet``: nothing leaves this machine. What is
denied is judged before anything is asked or dialled.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ...engines.base import Capabilities
from ...netspec import Network
from ...sync import Sandbox
from .. import attempts
from .support import MakeBox, needs, needs_command, read_until

HOST = "host.sloplet"
QUICK_MS = 2000  # for what is refused; a program that is denied must not wait for a time limit
_PROGRAM = Path(attempts.__file__)
_SYNTHETIC = ipaddress.ip_network("198.18.0.0/15")


@contextmanager
def served(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server on loopback, each connection in a thread of its own; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    line, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=work, args=(line,), daemon=True).start()

        def work(line: socket.socket) -> None:
            with line, suppress(OSError):
                talk(line)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def echo(line: socket.socket) -> None:
    while data := line.recv(65536):
        line.sendall(data)


def count(line: socket.socket) -> None:
    """Answers once the other side has said that no more will come."""
    size, digest = 0, hashlib.sha256()
    while data := line.recv(65536):
        size += len(data)
        digest.update(data)
    line.sendall(f"{size} {digest.hexdigest()}\n".encode())


def greet(line: socket.socket) -> None:
    line.sendall(b"220 welcome\r\n")
    line.sendall(b"250 " + line.recv(1000))


def web(line: socket.socket) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        head += line.recv(65536)
    line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")


def tried(box: Sandbox, *asked: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """How attempts from inside went, and what the command's result says was denied."""
    if not box.files.exists("attempts.py"):
        needs_command(box, "python3")
        box.files.write("attempts.py", _PROGRAM.read_bytes())
    result = box.run(["python3", "attempts.py", json.dumps(asked)], timeout=60)
    assert result.ok, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()], list(result.denied)


def one(box: Sandbox, **asked: Any) -> dict[str, Any]:
    return tried(box, asked)[0][0]


def tcp(to: str, port: int, *talk: tuple[str, str | None]) -> dict[str, Any]:
    return {"way": "tcp", "to": to, "port": port, "talk": talk or [("", None)]}


def refused(outcome: dict[str, Any]) -> bool:
    return outcome["error"] not in (None, "TIMEOUT") and not outcome["data"] and outcome["ms"] < QUICK_MS


class TestEgress:
    @pytest.fixture(autouse=True)
    def _needs_egress(self, capabilities: Capabilities) -> None:
        needs(capabilities.egress, "this engine lets nothing out")

    def test_an_allowed_name(self, make_box: MakeBox) -> None:
        request = f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n"
        with served(web) as port, served(greet) as first, served(count) as counting:
            box = make_box(network=Network(allow=[f"{HOST}:{port}", f"{HOST}:{first}", f"{HOST}:{counting}"]))
            outcomes, denied = tried(
                box,
                tcp(HOST, port, (request.replace(HOST, f"{HOST}:{port}"), None)),
                tcp(HOST, first, ("", "220 welcome\r\n"), ("hi\n", None)),
            )
            assert outcomes[0]["data"].endswith("hello"), outcomes
            assert outcomes[1]["data"] == "220 welcome\r\n250 hi\n"
            assert denied == []
            assert [(line.name, line.port, line.verdict) for line in box.network.log()] == [
                (HOST, port, "allow"), (HOST, first, "allow"),
            ]  # fmt: skip
            script = (
                "import socket\nline = socket.create_connection(('%s', %d))\nline.sendall(bytes(range(250)) * 20000)\n"
                "line.shutdown(socket.SHUT_WR)\nprint(line.makefile().read(), end='')"
            )
            said = box.run(["python3", "-c", script % (HOST, counting)], timeout=60).stdout
            assert said == f"5000000 {hashlib.sha256(bytes(range(250)) * 20000).hexdigest()}\n"

    def test_what_is_denied_fails_at_once(self, make_box: MakeBox) -> None:
        with served(echo) as port, served(echo) as other:
            box = make_box(network=Network(allow=[f"{HOST}:{port}"]))
            outcomes, denied = tried(
                box,
                tcp(HOST, other, ("x", None)),
                tcp("denied.example", 443),
                tcp("192.0.2.7", 80),
                tcp("1.2.3.4", 443),
            )
            for outcome in outcomes:
                assert refused(outcome), outcome
            for wanted in (str(other), "denied.example", "192.0.2.7", "1.2.3.4"):
                assert any(wanted in text for text in denied), f"{wanted}: {denied}"
            lines = box.network.log()
            assert {line.verdict for line in lines} == {"deny"}
            assert ("", "1.2.3.4") in {(line.name, line.address) for line in lines}, "a literal is judged as an address"
            assert one(box, **tcp(HOST, port, ("still", "still")))["data"] == "still"
            assert box.run("true").denied == ()

    def test_nothing_but_tcp(self, make_box: MakeBox) -> None:
        box = make_box(network=Network(allow=["*:*", "0.0.0.0/0:*"]))
        ways: list[dict[str, Any]] = [{"way": "udp", "to": to, "port": 443} for to in ("1.2.3.4", "10.0.0.1")]
        ways += [{"way": way, "to": "1.2.3.4"} for way in ("icmp", "raw")]
        ways += [{"way": "udp", "to": "2606:4700::1111", "port": 443}, tcp("2606:4700::1111", 443)]
        for way, outcome in zip(ways, tried(box, *ways)[0], strict=True):
            assert refused(outcome), (way, outcome)

    def test_its_own_loopback(self, make_box: MakeBox) -> None:
        box = make_box(network=Network())
        server = box.spawn(
            ["python3", "-uc", "import socket\nl = socket.create_server(('127.0.0.1', 4567))\n"
             "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 4567))\nprint('up')\n"
             "l.accept()[0].sendall(b'mine')\nprint(u.recv(100))"]
        )  # fmt: skip
        read_until(server, "up")
        assert one(box, **tcp("127.0.0.1", 4567))["data"] == "mine"
        one(box, way="udp", to="127.0.0.1", port=4567, send="datagram", wait=0.1)
        assert "datagram" in read_until(server, "datagram")
        assert one(box, way="name", to="localhost")["data"]

    def test_names(self, make_box: MakeBox) -> None:
        box = make_box(network=Network())
        ask = {"way": "dns", "to": "one.example"}
        outcomes, _ = tried(
            box, ask, ask, {**ask, "to": "two.example"}, {**ask, "tcp": True}, {**ask, "server": "8.8.8.8"},
            {**ask, "server": "10.9.8.7", "tcp": True}, {**ask, "to": "ONE.example"},
            {"way": "name", "to": "one.example"},
        )  # fmt: skip
        first, again, second, *others = (outcome["data"] for outcome in outcomes)
        assert ipaddress.ip_address(first) in _SYNTHETIC, outcomes
        assert again == first
        assert second != first
        assert set(others) == {first}, "whoever is asked, and however"
        for kind in (28, 16, 65, 15, 2):  # AAAA, TXT, HTTPS, MX, NS: there is such a name, and nothing else about it
            outcome = one(box, **ask, type=kind)
            assert (outcome["error"], outcome["code"], outcome["count"]) == (None, 0, 0), (kind, outcome)

    def test_another_policy(self, make_box: MakeBox) -> None:
        with served(echo) as port:
            box = make_box(network=Network())
            assert refused(one(box, **tcp(HOST, port, ("x", "x"))))
            box.network.allow(f"{HOST}:{port}")
            assert one(box, **tcp(HOST, port, ("x", "x")))["data"] == "x"
            holds = box.spawn(["python3", "-uc", _HOLDS % (HOST, port)])
            read_until(holds, "up")
            box.network.deny(f"{HOST}:{port}")
            read_until(holds, "ConnectionResetError")
            assert refused(one(box, **tcp(HOST, port, ("x", "x"))))
            assert [line.verdict for line in box.network.log()].count("cut") == 1

    def test_what_a_template_may_reach(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        """What it could when it was made, not when its sandbox was: neither more nor less."""
        needs(capabilities.live_snapshots or capabilities.disk_snapshots, "this engine cannot save anything")
        box = make_box(network=Network(allow=["once.example"]))
        saved = []
        try:
            box.network.set(allow=["first.example"])
            saved.append(box.template(f"a-{box.id}"))
            if capabilities.live_snapshots:
                box.pause()
                box.network.set(allow=["second.example"])
                saved.append(box.template(f"b-{box.id}"))
            box.network.set(allow=["later.example"])
            for template, wanted in zip(saved, ("first.example", "second.example"), strict=False):
                assert make_box(template=template.name).network.policy().allow == (wanted,)
            asked = make_box(template=saved[0].name, network=Network(allow=["asked.example"]))
            assert asked.network.policy().allow == ("asked.example",)
            assert make_box(template=saved[0].name, network=Network()).network.policy().allow == ()
        finally:
            for template in saved:
                box.delete_snapshot(template, force=True)

    def test_no_network(self, make_box: MakeBox) -> None:
        box = make_box()
        outcomes, _ = tried(box, tcp("1.2.3.4", 80), tcp("denied.example", 80), tcp(HOST, 80), tcp("198.18.0.1", 80))
        for outcome in outcomes:
            assert refused(outcome), outcome

    def test_connections_end_with_a_restore(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        """A program that goes on later, or elsewhere, is told; its names are what they were."""
        needs(capabilities.live_snapshots, "this engine cannot save processes")
        with served(echo) as port:
            box = make_box(network=Network(allow=[f"{HOST}:{port}"]))
            before = [one(box, way="name", to=name)["data"] for name in (HOST, "a.example", "b.example")]
            holds = box.spawn(["python3", "-uc", _HOLDS % (HOST, port)], detached=True)
            read_until(holds, "up")
            (child,) = box.fork(1)
            try:
                box.pause()
                box.resume()
                for each in (box, child):
                    read_until(each.attach(holds.pid), "ConnectionResetError")
                    names = [one(each, way="name", to=name)["data"] for name in ("b.example", "a.example", HOST)]
                    assert names == before[::-1]
                    assert one(each, **tcp(before[0], port, ("x", "x")))["data"] == "x"
            finally:
                child.kill()


_HOLDS = """
import socket
line = socket.create_connection(("%s", %d))
line.sendall(b"up")
print(line.recv(10))
try:
    print(line.recv(10))
except OSError as error:
    print(type(error).__name__)
"""

_WEB = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.path.encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler)
print("up", flush=True)
server.serve_forever()
"""

_COUNT = """
import socket
listener = socket.create_server(("127.0.0.1", 8001))
print("up", flush=True)
while True:
    line, _ = listener.accept()
    size = 0
    while data := line.recv(65536):
        size += len(data)
    line.sendall(str(size).encode())
    line.close()
"""


def fetched(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=20) as answer:
        return str(answer.read().decode())


class TestPorts:
    @pytest.fixture(autouse=True)
    def _needs_ports(self, capabilities: Capabilities) -> None:
        needs(capabilities.ports, "nothing of this engine's can be reached")

    def test_http(self, make_box: MakeBox) -> None:
        box = make_box()
        needs_command(box, "python3")
        server = box.spawn(["python3", "-uc", _WEB], detached=True)
        read_until(server, "up")
        url = box.url(8000)
        assert url.startswith("http://127.0.0.1:")
        assert fetched(f"{url}/one") == "/one"
        assert fetched(f"{url}/two") == "/two"
        assert box.url(8000) == url
        assert [port.inside for port in box.ports()] == [8000]
        box.unexpose(8000)
        with pytest.raises(OSError, match=r"refused|reset"):
            fetched(url)
        assert box.ports() == []

    def test_any_tcp(self, make_box: MakeBox) -> None:
        box = make_box()
        needs_command(box, "python3")
        server = box.spawn(["python3", "-uc", _COUNT], detached=True)
        read_until(server, "up")
        port = box.expose(8001)
        for size in (0, 1, 3_000_000):
            with socket.create_connection((port.address, port.outside), 20) as line:
                line.sendall(bytes(size))
                line.shutdown(socket.SHUT_WR)
                assert line.recv(100) == str(size).encode()

    def test_nothing_listens_there(self, make_box: MakeBox) -> None:
        box = make_box()
        port = box.expose(9)
        start = time.monotonic()
        with socket.create_connection((port.address, port.outside), 20) as line, suppress(ConnectionResetError):
            assert line.recv(100) == b""
        assert time.monotonic() - start < 10
        assert box.run("echo alive").stdout == "alive\n"

    def test_a_connection_wakes_it(self, make_box: MakeBox, capabilities: Capabilities) -> None:
        needs(capabilities.live_snapshots, "this engine cannot save processes")
        box = make_box()
        server = box.spawn(["python3", "-uc", _WEB], detached=True)
        read_until(server, "up")
        url = box.url(8000)
        assert fetched(f"{url}/before") == "/before"
        box.pause()
        assert fetched(f"{url}/after") == "/after"
        assert box.info().state == "running"
