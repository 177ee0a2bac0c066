"""The CA of a sandbox: the same again from the same key and id, private, and believed by real clients."""

from __future__ import annotations

import multiprocessing
import os
import socket
import ssl
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from sloplet.errors import StateCorrupt, StateUnwritable
from sloplet.network import authority as module
from sloplet.network.authority import Authority, master_key, new_id

pytestmark = pytest.mark.anyone


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> ssl.SSLObject:
    """The client's end, once both are content."""
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [server.wrap_bio(a, b, server_side=True), client.wrap_bio(b, a, server_hostname=name)]
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return ends[1]


def trusting(pem: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=pem.decode())
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


@pytest.mark.parametrize(
    "name", ["example.com", "a" * 63 + "." + "b" * 60 + ".com", "10.1.2.3", "fd00::1", "_x.example.com"]
)
def test_a_leaf_is_believed_by_who_trusts_the_ca(name: str) -> None:
    made = Authority(b"k" * 32, "one")
    client = handshake(made.leaf(name), trusting(made.ca_pem), name)
    certificate = client.getpeercert()
    assert certificate is not None
    assert [value for _, value in certificate["subjectAltName"]] == [
        name if name != "fd00::1" else "FD00:0:0:0:0:0:0:1"
    ]
    assert client.version() == "TLSv1.3"


def test_a_leaf_is_not_believed_otherwise() -> None:
    made, other = Authority(b"k" * 32, "one"), Authority(b"k" * 32, "two")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made.leaf("example.com"), trusting(other.ca_pem), "example.com")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made.leaf("example.com"), trusting(made.ca_pem), "other.com")


def test_the_same_key_and_id_make_the_same_ca() -> None:
    one, again = Authority(b"k" * 32, "one"), Authority(b"k" * 32, "one")
    assert one.ca_pem == again.ca_pem
    handshake(again.leaf("example.com"), trusting(one.ca_pem), "example.com")
    assert len({one.ca_pem, Authority(b"k" * 32, "two").ca_pem, Authority(b"l" * 32, "one").ca_pem}) == 3
    assert new_id() != new_id()


def test_an_openssl_that_cannot_sign_the_same_twice_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older cryptography: the CA that was installed still vouches for the leaves of today."""
    from cryptography import x509

    sign = x509.CertificateBuilder.sign

    def old(self, key, algorithm):  # type: ignore[no-untyped-def]
        return sign(self, key, algorithm)

    monkeypatch.setattr(x509.CertificateBuilder, "sign", old)
    one, again = Authority(b"k" * 32, "one"), Authority(b"k" * 32, "one")
    assert one.ca_pem != again.ca_pem
    handshake(again.leaf("example.com"), trusting(one.ca_pem), "example.com")


def test_leaves_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CACHED", 3)
    made = Authority(b"k" * 32, "one")
    first = made.leaf("a.com")
    assert made.leaf("a.com") is first
    for name in ("b.com", "c.com"):
        made.leaf(name)
    assert made.leaf("a.com") is first
    made.leaf("d.com")
    assert made.leaf("a.com") is first
    assert len(made._leaves) == 3
    now = module.time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 40 * 86400)
    assert made.leaf("a.com") is not first


def test_no_key_is_on_disk_or_shown(tmp_path: Path) -> None:
    made = Authority(b"k" * 32, "one")
    assert b"PRIVATE" not in made.ca_pem
    assert repr(made) == f"Authority({made._name!r})"
    made.leaf("a.com")
    assert not [name for name in os.listdir("/proc/self/fd") if "leaf" in _link(f"/proc/self/fd/{name}")]


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def test_curl_believes_it(tmp_path: Path) -> None:
    made = Authority(b"k" * 32, "one")
    (tmp_path / "ca.pem").write_bytes(made.ca_pem)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with made.leaf("example.test").wrap_socket(connection, server_side=True) as tls:
            tls.recv(4096)
            tls.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    thread = threading.Thread(target=serve)
    thread.start()
    target = f"example.test:443:127.0.0.1:{listener.getsockname()[1]}"
    command = ["curl", "-sS", "--noproxy", "*", "--cacert", str(tmp_path / "ca.pem"), "--connect-to", target]
    done = subprocess.run([*command, "https://example.test/"], capture_output=True, text=True, timeout=30)
    thread.join()
    listener.close()
    assert (done.stdout, done.stderr) == ("ok", "")


# -- the master key ---------------------------------------------------------------------


def test_the_master_key_is_made_once_and_private(tmp_path: Path) -> None:
    key = master_key(tmp_path)
    assert len(key) == 32
    assert master_key(tmp_path) == key
    assert [path.name for path in (tmp_path / "ca").iterdir()] == ["master.key"]
    assert stat.S_IMODE((tmp_path / "ca" / "master.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "ca").stat().st_mode) == 0o700


def _ask(home: Path, start: object, answers: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    answers.put(master_key(home))  # type: ignore[attr-defined]


def test_many_who_make_it_at_once_get_the_same(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, answers = context.Event(), context.Queue()
    children = [context.Process(target=_ask, args=(tmp_path, start, answers)) for _ in range(8)]
    for child in children:
        child.start()
    start.set()
    keys = {answers.get(timeout=30) for _ in children}
    for child in children:
        child.join()
    assert keys == {master_key(tmp_path)}
    assert [path.name for path in (tmp_path / "ca").iterdir()] == ["master.key"]


@pytest.mark.parametrize("damage", ["short", "long", "open", "link", "folder", "fifo"])
def test_a_key_that_cannot_be_trusted_is_refused(tmp_path: Path, damage: str) -> None:
    key = master_key(tmp_path)
    path = tmp_path / "ca" / "master.key"
    if damage in ("short", "long"):
        path.write_bytes(key[:31] if damage == "short" else key + b"x")
    elif damage == "open":
        path.chmod(0o640)
    else:
        path.rename(tmp_path / "elsewhere")
        {
            "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
            "folder": path.mkdir,
            "fifo": lambda: os.mkfifo(path),
        }[damage]()
    with pytest.raises((StateCorrupt, StateUnwritable)) as caught:
        master_key(tmp_path)
    assert "ca" in str(caught.value)


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("not a folder")
    with pytest.raises(StateUnwritable, match="cannot be read or made"):
        master_key(tmp_path)
