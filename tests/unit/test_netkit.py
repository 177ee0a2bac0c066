"""The fake internet itself: were its judge blind, the tests that lean on it would prove nothing."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from netkit import Internet
from netkit.internet import METADATA, PRIVATE, PUBLIC, PUBLIC_TOO, PUBLIC_V6


@pytest.fixture(scope="module")
def whole() -> Iterator[Internet]:
    with Internet() as internet:
        yield internet


@pytest.fixture
def net(whole: Internet) -> Internet:
    whole.forget()
    return whole


def dial(net: Internet, address: str, port: int) -> socket.socket:
    made = net.connect(address, port)
    made.settimeout(10)
    return made


def get(net: Internet, host: str, path: str = "/", *, address: str = PUBLIC, tls: bool = False) -> bytes:
    line = dial(net, address, 443 if tls else 80)
    if tls:
        context = ssl.create_default_context(cafile=str(net.ca_file))
        line = context.wrap_socket(line, server_hostname=host)
    with line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while piece := line.recv(65536):
            answer += piece
    return answer


def resolve(net: Internet, name: str) -> list[str]:
    return asyncio.run(net.upstream.resolve(name))


def test_names(net: Internet) -> None:
    net.name("plain.example", PUBLIC)
    net.name("many.example", [PUBLIC, PUBLIC_TOO, PUBLIC_V6])
    net.name("six.example", PUBLIC_V6)
    net.name("flip.example", PUBLIC, PRIVATE)
    net.name("*.wild.example", PUBLIC)
    net.name("none.example", [])
    net.name("broken.example", PUBLIC, code=2)
    assert resolve(net, "plain.example") == [PUBLIC]
    assert resolve(net, "MANY.example") == [PUBLIC, PUBLIC_TOO, PUBLIC_V6]
    assert resolve(net, "six.example") == [PUBLIC_V6]
    assert [resolve(net, "flip.example") for _ in range(3)] == [[PUBLIC], [PRIVATE], [PRIVATE]]
    assert resolve(net, "a.b.wild.example") == [PUBLIC]
    assert resolve(net, "none.example") == []
    assert resolve(net, "nobody.example") == []
    with pytest.raises(OSError, match=r"broken\.example"):
        resolve(net, "broken.example")
    assert {"kind": "dns", "name": "nobody.example", "type": "A", "how": "udp"} in net.seen("dns")


def test_the_judge_sees_what_is_sent(net: Internet) -> None:
    assert net.heard("canary-in-a-name") == []
    resolve(net, "canary-in-a-name.example")
    assert net.heard("Canary-In-A-Name")
    get(net, "a.example", "/canary-in-a-path")
    assert net.heard("canary-in-a-path")
    get(net, "a.example", "/canary-in-tls", tls=True)
    assert [each["kind"] for each in net.heard("canary-in-tls")] == ["http"]  # a packet shows nothing, the server does
    with dial(net, PUBLIC, 7) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in (b"cana", b"ry-in-", b"pieces"):
            line.sendall(piece)
            assert line.recv(10) == piece
    assert net.heard("canary-in-pieces")
    with pytest.raises(OSError, match="failed"):
        net.connect(PRIVATE, 81)
    assert net.dialled() == {PUBLIC, PRIVATE}  # a refused connection is a packet, too
    net.forget()
    assert net.packets() == []
    assert net.heard("canary-in-a-name") == []


def test_the_judge_forgets_how_what_was_before_ends_and_nothing_else(net: Internet) -> None:
    line = dial(net, PUBLIC, 7)
    line.sendall(b"before")
    assert line.recv(100) == b"before"
    net.forget()
    line.sendall(b"after")
    assert line.recv(100) == b"after"
    assert {packet["size"] for packet in net.packets()} == {5}
    assert net.heard("after")
    net.forget()
    line.close()
    with dial(net, PUBLIC, 7):
        assert [packet["size"] for packet in net.packets()][:2] == [0, 0], "a connection is seen though nothing is said"
        assert net.dialled() == {PUBLIC}


def test_the_web(net: Internet) -> None:
    assert b"hello from a.example" in get(net, "a.example")
    told = json.loads(get(net, "a.example", "/echo", tls=True).partition(b"\r\n\r\n")[2])
    assert (told["sni"], told["address"], told["tls"]) == ("a.example", PUBLIC, True)
    assert [event["sni"] for event in net.seen("tls")] == ["a.example"]
    assert [(event["host"], event["tls"]) for event in net.seen("http")] == [("a.example", False), ("a.example", True)]
    assert get(net, "anything", address=METADATA).endswith(b"metadata-of-the-host")
    assert b"Location: http://x/" in get(net, "a", "/redirect?to=http://x/")
    assert len(get(net, "a", "/bytes?n=100000")) > 100000
    assert get(net, "a", address=PUBLIC_V6).endswith(b"hello from a\n")
    with pytest.raises(ssl.SSLCertVerificationError):
        get(net, "untrusted.example", tls=True)


def test_websocket(net: Internet) -> None:
    key = base64.b64encode(bytes(16))
    with dial(net, PUBLIC, 80) as line:
        line.sendall(
            b"GET /ws HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: "
            + key + b"\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )  # fmt: skip
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += line.recv(1)
        assert b" 101 " in head
        line.sendall(b"\x81\x85\0\0\0\0hello")
        assert line.recv(100) == b"\x81\x05hello"


def test_other_servers(net: Internet) -> None:
    with dial(net, PUBLIC, 25) as line:
        assert line.recv(100) == b"220 mail.example ESMTP\r\n"
    with dial(net, PUBLIC, 9) as line:
        line.sendall(b"x" * 1000)
        line.shutdown(socket.SHUT_WR)
        assert line.recv(200).decode().split() == ["1000", hashlib.sha256(b"x" * 1000).hexdigest()]
    result = subprocess.run(net.command("id", "-u"), capture_output=True, check=True)
    assert result.stdout == b"1000\n"
    assert {event["port"] for event in net.seen("tcp")} == {9, 25}


def test_sites(net: Internet, tmp_path: Path) -> None:
    (tmp_path / "web/simple").mkdir(parents=True)
    (tmp_path / "web/simple/index.html").write_text("an index")
    (tmp_path / "outside").write_text("not served")
    net.site("files.example", tmp_path / "web")
    assert get(net, "files.example", "/simple/").endswith(b"an index")
    assert b" 404 " in get(net, "files.example", "/../outside")
    repository = tmp_path / "repo.git"
    subprocess.run(["git", "init", "-q", "--bare", repository], check=True)
    net.site("git.example", tmp_path, git=True)
    assert b"git-upload-pack" in get(net, "git.example", "/repo.git/info/refs?service=git-upload-pack")


def test_its_namespace_is_its_own(net: Internet) -> None:
    """Nothing of it can be reached from here, and it ends with us."""
    mine = os.readlink("/proc/self/ns/net")
    child = net._child.pid
    assert os.readlink(f"/proc/{child}/ns/net") != mine
    with Internet() as other:
        pid = other._child.pid
        other.name("a.example", PRIVATE)
        net.name("a.example", PUBLIC)
        assert resolve(other, "a.example") == [PRIVATE]
    assert not os.path.exists(f"/proc/{pid}")
