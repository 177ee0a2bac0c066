"""The same Sandbox on a server, over connections that break. No command ever runs twice."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutting_kit import Cutter
from remote_kit import goodbye, listed, through, until
from server_kit import Served, served
from sloplet import Sandbox
from sloplet.errors import (
    KeyRefused,
    SandboxMismatch,
    SandboxNotFound,
    ServerUnreachable,
    SpecError,
    UnsupportedOperation,
)
from sloplet.remote import websocket
from sloplet.remote.place import Place

pytestmark = pytest.mark.anyone

ENGINE = "container"
GRACE = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("remote") / "home", "--grace", str(GRACE)) as running:
        yield running
        goodbye(running.url, running.key)


class Cutting:
    """Cuts what is connected, at random moments, for a block."""

    def __init__(self, cutter: Cutter, seed: int, pause: float) -> None:
        self._cutter, self._random, self._pause = cutter, random.Random(seed), pause
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.broken = 0

    def __enter__(self) -> Cutting:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(self._random.uniform(0, self._pause)):
            self.broken += self._cutter.cut()


# -- it is the same object -----------------------------------------------------------------------------------------


def test_the_same_object(server: Served) -> None:
    with Sandbox(engine=ENGINE, server=server.url, key=server.key) as box:
        result = box.run("echo out; echo err >&2; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
        box.files.write("deep/er/file", "content")
        assert box.files.read_text("deep/er/file") == "content"
        assert box.code("x = 6\nx * 7").text == "42"
        sandbox = box.id
        assert sandbox in listed(server)
    assert sandbox not in listed(server)
    with pytest.raises(SandboxNotFound):
        Sandbox.connect(sandbox, server=server.url, key=server.key)


def test_by_the_environment(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOPLET_URL", server.url)
    monkeypatch.setenv("SLOPLET_KEY", server.key)
    box = Sandbox("by-environment", engine=ENGINE)
    try:
        assert box.run("echo $HOME").ok
        assert box.id in {info.id for info in Sandbox.list()}
        assert Sandbox.connect("by-environment").id == box.id
        assert box.id not in {info.id for info in Sandbox.list(server="")}
        with pytest.raises(SandboxMismatch):
            Sandbox("by-environment", engine=ENGINE, env={"A": "1"}).start()
    finally:
        box.kill()


def test_archives_come_and_go(server: Served, tmp_path: Path) -> None:
    archive = tmp_path / "box.sloplet"
    with Sandbox(engine=ENGINE, server=server.url, key=server.key) as box:
        box.files.write("kept", "in the archive")
        saved = box.export(archive)
        assert (saved.role, saved.kind, saved.sandbox) == ("export", "disk", box.id)
        assert saved.bytes == archive.stat().st_size
        with pytest.raises(FileExistsError):
            box.export(archive)
    loaded = Sandbox.load(archive, server=server.url, key=server.key)
    try:
        assert loaded.files.read_text("kept") == "in the archive"
        assert loaded.id != box.id
    finally:
        loaded.close()
    assert sorted(os.listdir(tmp_path)) == ["box.sloplet"]


def test_ports_are_this_machines(server: Served) -> None:
    """Those of the settings, too."""
    import urllib.request

    with Sandbox(engine=ENGINE, server=server.url, key=server.key, ports=[8000]) as box:
        web = box.spawn("python3 -u -m http.server 8000 --bind 127.0.0.1", detached=True)
        for _, text in web:
            if "Serving" in str(text):
                break
        (port,) = box.ports()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        assert opener.open(port.url, timeout=20).status == 200
        assert box.url(8000) == port.url
        outside = box.public_url(8000)
        assert "sloplet_token=" in outside
        assert box.public_url(8000, public=True) in outside
    with pytest.raises(UnsupportedOperation, match="server"), Sandbox(engine="fake", server="") as here:
        here.public_url(8000)


# -- what cannot be reached ----------------------------------------------------------------------------------------


def test_nobody_there() -> None:
    began = time.monotonic()
    with pytest.raises(ServerUnreachable, match="cannot be reached"):
        Sandbox(server="http://127.0.0.1:9", key="slp_x").start()
    assert time.monotonic() - began < 5


def test_a_key_that_is_none(server: Served) -> None:
    with pytest.raises(KeyRefused):
        Sandbox(server=server.url, key="slp_wrong").start()
    with pytest.raises(SpecError, match="key"):
        Sandbox(server=server.url)


def test_a_key_that_is_revoked_in_the_middle(server: Served) -> None:
    key = server.new_key("leaver", "--tenant", "leaver")
    box = Sandbox("stays", engine=ENGINE, server=server.url, key=key)
    box.start()
    waiting = box.spawn("echo up; sleep 1000")
    for _ in waiting:
        break
    with server.client() as admin:
        assert admin.delete("/v1/keys/leaver").status_code == 204
    with pytest.raises(KeyRefused):
        waiting.wait()
    with pytest.raises(KeyRefused):
        box.run("true")
    goodbye(server.url, key)


# -- connections that break ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_cut_at_random_moments(server: Served, seed: int) -> None:
    """Output, input, files and terminals are byte for byte what they are without cuts."""
    with through(server, seed=seed) as cutter:
        box = Sandbox(f"cut-{seed}", engine=ENGINE, server=cutter.url, key=server.key)
        box.start()
        sent = random.Random(seed).randbytes(3_000_000)
        try:
            with Cutting(cutter, seed, 0.08) as cutting:
                out = box.run("seq 1 300000", text=False, max_output="16m")
                assert out.stdout_raw == b"".join(b"%d\n" % number for number in range(1, 300001))
                back = box.run("cat", input=sent, text=False, max_output="16m")
                assert hashlib.sha256(back.stdout_raw).digest() == hashlib.sha256(sent).digest()
                box.files.write("big", sent)
                assert box.files.read("big") == sent
                slow = box.run("for i in $(seq 1 20); do echo $i; sleep 0.02; done", pty=True)
                assert slow.stdout.split() == [str(number) for number in range(1, 21)]
            assert cutting.broken >= 5
        finally:
            box.kill()


@pytest.mark.parametrize("every", [4_000, 30_000, 300_000])
def test_cut_after_so_many_bytes(server: Served, every: int) -> None:
    """Between any two bytes, of the greeting and of a message, too."""
    with through(server, seed=every) as cutter:
        box = Sandbox(engine=ENGINE, server=server.url, key=server.key)
        box.start()
        same = Sandbox.connect(box.id, server=cutter.url, key=server.key)
        try:
            cutter.every = every
            same.run("true")
            for number in range(12):
                assert same.run(["echo", str(number)]).stdout == f"{number}\n"
            data = random.Random(every).randbytes(min(1_000_000, every * 10))
            same.files.write("file", data)
            assert same.files.read("file") == data
            assert cutter.cuts >= 3
        finally:
            cutter.every = None
            box.close()


def test_no_command_runs_twice(server: Served) -> None:
    """Each leaves one line, whatever happened to the connection it was asked over; and nothing that was asked for is
    left out, nor made twice."""
    with through(server, seed=5) as cutter:
        before = set(listed(server))
        box = Sandbox(engine=ENGINE, server=cutter.url, key=server.key)
        box.start()
        made = []
        with Cutting(cutter, 5, 0.05) as cutting:
            for number in range(40):
                assert box.run(f"echo {number} >> ran").ok
            for _ in range(4):
                made.append(Sandbox(engine="fake", server=cutter.url, key=server.key))
                made[-1].start()
        lines = box.files.read_text("ran").split()
        assert lines == [str(number) for number in range(40)]
        assert cutting.broken >= 5
        new = set(listed(server)) - before
        assert new == {box.id, *(each.id for each in made)}
        for each in (box, *made):
            each.close()
        assert not set(listed(server)) - before


def test_a_network_that_goes_dark(server: Served) -> None:
    """Nothing is refused and nothing comes: it is noticed when it is back, and nothing was lost."""
    with through(server) as cutter:
        with Sandbox(engine=ENGINE, server=cutter.url, key=server.key) as box:
            process = box.spawn("for i in $(seq 1 30); do echo $i; sleep 0.05; done")
            seen = ""
            for _, text in process:
                seen += str(text)
                if "5\n" in seen and not cutter.dark:
                    cutter.dark = True  # what it takes from now on is lost
                    threading.Timer(0.5, lambda: (setattr(cutter, "dark", False), cutter.cut())).start()
            assert seen.split() == [str(number) for number in range(1, 31)]


def test_silence_is_noticed(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is refused, nothing breaks, nothing comes: this side gives the connection up and makes another."""
    monkeypatch.setattr(websocket, "_LOOK", 0.1)
    with through(server) as cutter:
        with Sandbox(engine=ENGINE, server=cutter.url, key=server.key) as box:
            process = box.spawn("for i in $(seq 1 10); do echo $i; sleep 0.1; done")
            seen, before = "", cutter.taken
            for _, text in process:
                seen += str(text)
                if not cutter.dark and cutter.taken == before:
                    cutter.dark = True
                    threading.Timer(0.8, lambda: setattr(cutter, "dark", False)).start()
            assert seen.split() == [str(number) for number in range(1, 11)]
            assert cutter.taken > before


def test_away_for_too_long(server: Served) -> None:
    """The command is ended, not run again; what is detached goes on, and the next call connects."""
    with through(server) as cutter:
        box = Sandbox("away", engine=ENGINE, server=cutter.url, key=server.key)
        box.start()
        try:
            stays = box.spawn("while :; do echo tick; sleep 0.1; done", detached=True)
            goes = box.spawn("echo begun >> begun; echo up; sleep 1000; echo ended >> begun")
            for _ in goes:
                break
            cutter.dark = True
            cutter.cut()
            with pytest.raises(ServerUnreachable, match="nothing is run twice"):
                goes.wait()
            cutter.dark = False
            cutter.cut()
            assert box.files.read_text("begun") == "begun\n"
            until(lambda: not next(info for info in box.processes() if info.pid == goes.pid).running)
            assert next(info for info in box.processes() if info.pid == stays.pid).running
            again = box.attach(stays.pid, replay=False)
            for _, text in again:
                assert "tick" in str(text)
                break
        finally:
            cutter.dark = False
            box.kill()


def test_tls(tmp_path: Path) -> None:
    with served(tmp_path / "home", "--tls") as server:
        ca = str(next((tmp_path / "home").rglob("ca.pem")))
        with pytest.raises(ServerUnreachable, match="not trusted"):
            Sandbox(server=server.url, key=server.key).start()
        with pytest.raises(ServerUnreachable, match="is it https://"):
            Sandbox.list(server=server.url.replace("https:", "http:"), key=server.key)
        with Sandbox(engine="fake", server=server.url, key=server.key, ca=ca) as box:
            assert box.run("echo over TLS").stdout == "over TLS\n"
            data = random.Random(1).randbytes(2_000_000)
            box.files.write("file", data)
            assert box.files.read("file") == data
        goodbye(server.url, server.key, ca)


class Proxy:
    """An HTTP proxy as companies have them: CONNECT, and requests for whole URLs."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.asked: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            try:
                piece = line.recv(65536)
            except ConnectionError:
                piece = b""
            if not piece:  # it has gone without asking for anything
                line.close()
                return
            head += piece
        method, target = head.decode("latin-1").split(" ")[:2]
        self.asked.append(method)
        host, _, port = target.removeprefix("http://").split("/")[0].rpartition(":")
        with socket.create_connection((host, int(port)), 10) as there:
            whole = f" http://{host}:{port}/".encode() if method != "CONNECT" else None
            if whole is None:
                line.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                there.sendall(head.replace(whole, b" /"))
            back = threading.Thread(target=self._copy, args=(there, line), daemon=True)
            back.start()
            self._copy(line, there, whole)
            back.join()
        line.close()

    def _copy(self, source: socket.socket, target: socket.socket, whole: bytes | None = None) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data if whole is None else data.replace(whole, b" /"))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_through_a_proxy(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one is set, all goes through it: requests, streams of them, and the tunnel."""
    proxy = Proxy()
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setattr(Place, "loopback", False)
    url = server.url.replace("127.0.0.1", "localhost")  # another connection than those that are there
    try:
        with Sandbox(engine="fake", server=url, key=server.key) as box:
            assert box.run("echo through").stdout == "through\n"
            assert box.info().state == "running"
        assert proxy.asked.count("CONNECT") == 1
        assert len(proxy.asked) >= 2
        goodbye(url, server.key)
    finally:
        proxy.listener.close()
