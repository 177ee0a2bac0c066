"""A-04, A-05 and F-12 over HTTP: names that are more than names, bodies and heads that lie, uploads that break off.

Raw sockets say what no client would. Whatever is said: a 4xx or a closed connection, never a bug, never a second
request out of one, nothing of the host in the answer, and the server goes on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rude_http import Answer, Raw, request
from test_a_refusals import NAMES

from server_kit import Served, served
from sloplet.engines import registry

pytestmark = pytest.mark.anyone

JSON = ("Content-Type", "application/json")
CREATE = "/v1/sandboxes"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("g") / "home") as made:
        yield made
        assert made.log is not None
        assert "Traceback" not in made.log.read_text(), "a request was a bug"


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with server.client(server.new_key("tenant")) as made:
        yield made


@pytest.fixture
def victim(client: httpx.Client) -> Iterator[str]:
    """A sandbox that is still there afterwards."""
    found = client.post(CREATE, json={"engine": "fake", "name": "victim"})
    assert found.status_code == 201, found.text
    yield "victim"
    assert client.get(f"{CREATE}/victim").status_code == 200, "it was ended"
    client.delete(f"{CREATE}/victim")


def key_of(client: httpx.Client) -> str:
    return str(client.headers["authorization"]).split()[1]


def clean(server: Served, answer: httpx.Response | Answer) -> None:
    """No bug, and nothing of the host's is told."""
    text = answer.text if isinstance(answer, httpx.Response) else answer.body.decode("latin-1")
    status = answer.status_code if isinstance(answer, httpx.Response) else answer.status
    assert 400 <= status < 500, f"{status} {text[:500]}"
    for word in ("Traceback", str(server.home), "site-packages", "/src/sloplet"):
        assert word not in text
    if text and (text[0] == "{"):
        document = json.loads(text)
        assert {"type", "title", "status", "detail", "error", "hint"} <= set(document)
        assert document["status"] == status


# -- A-04 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a04_names(server: Served, client: httpx.Client, victim: str, name: str) -> None:
    """As a name to be given: refused. As one that is asked for: nothing that is there."""
    made: tuple[tuple[str, dict[str, Any]], ...] = (
        (CREATE, {"engine": "fake", "name": name}),
        (CREATE, {"engine": name}),
        (CREATE, {"engine": "fake", "template": name}),
        (f"{CREATE}/{victim}/snapshots", {"name": name}),
        (f"{CREATE}/{victim}/fork", {"count": 1, "names": [name]}),
        ("/v1/templates", {"sandbox": victim, "name": name}),
        ("/v1/volumes", {"name": name}),
        (f"{CREATE}/{victim}/contexts", {"name": name, "language": "shell"}),
    )
    for path, body in made:
        try:
            answer = client.post(path, json=body)
        except UnicodeEncodeError:
            continue  # a lone surrogate is no JSON that a client would send
        clean(server, answer)
    segment = quote(name.encode("utf-8", "surrogatepass"), safe="")
    for path in (
        f"{CREATE}/{segment}",
        f"/v1/templates/{segment}",
        f"/v1/volumes/{segment}",
        f"/v1/snapshots/{segment}",
    ):
        with Raw(server.url) as raw:
            raw.send(request("GET", path, raw.host, key=key_of(client)))
            found = raw.answer()
        if name in ("", ".", ".."):
            continue  # another path, which is its own matter
        assert found is None or 400 <= found.status < 500, (path, found)
    with Raw(server.url) as raw:
        raw.send(request("DELETE", f"{CREATE}/{segment}", raw.host, key=key_of(client)))
        found = raw.answer()
        assert found is None or found.status in (204, 400, 404, 405, 422), found


def test_a04_case(client: httpx.Client) -> None:
    first = client.post(CREATE, json={"engine": "fake", "name": "Same"})
    assert first.status_code == 201
    assert client.post(CREATE, json={"engine": "fake", "name": "same"}).status_code == 409
    client.delete(f"{CREATE}/Same")


@pytest.mark.parametrize("label", ["../x", "a\nb", "a\0b", "x" * 300, "", "=", "a=b"])
def test_a04_labels(server: Served, client: httpx.Client, label: str) -> None:
    answer = client.post(CREATE, json={"engine": "fake", "labels": {label: "x"}})
    clean(server, answer)
    found = client.get(CREATE, params={"label": f"{label}=x"})
    assert found.status_code in (200, 400, 422)


def test_a04_a_tenant_is_a_name(server: Served) -> None:
    """An admin cannot name a folder of the server's by way of a tenant's name."""
    for name in ("../x", "..", ".", "a/b", "main/..", "", " ", "a" * 300, "%2e%2e", "x\ty", "server", "no-such"):
        with Raw(server.url) as raw:
            raw.send(request("GET", CREATE, raw.host, [("Sloplet-Tenant", name)], key=server.key))
            found = raw.answer()
        assert found is not None
        assert found.status in (400, 404) or not name.strip(), (name, found)
    with server.client() as admin:
        for name in ("../x", "a/b", ".", "", "A", "x" * 40, "é"):
            assert admin.post("/v1/keys", json={"name": "k", "tenant": name}).status_code == 422, name
            assert admin.post("/v1/keys", json={"name": f"../{name}"}).status_code == 422, name


# -- bodies --------------------------------------------------------------------------------------------------

BODIES: dict[str, bytes] = {
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep and open": b'{"image":' + b"[" * 5_000_000,
    "twice": b'{"engine": "fake", "engine": "container"}',
    "twice, deeper": b'{"network": {"allow": [], "allow": ["x.test"]}}',
    "unknown": b'{"engine": "fake", "privileged": true}',
    "unknown, deeper": b'{"network": {"allow": [], "host": true}}',
    "a list": b"[]",
    "null": b"null",
    "a text": b'"fake"',
    "a number": b"1e400",
    "nan": b'{"memory": NaN}',
    "many digits": b'{"pids": ' + b"9" * 100_000 + b"}",
    "no utf-8": b'{"name": "\xff\xfe"}',
    "a lone surrogate": b'{"name": "\\ud800"}',
    "a null": b'{"name": "a\\u0000b"}',
    "utf-16": '{"engine": "fake"}'.encode("utf-16"),
    "a mark": b"\xef\xbb\xbf" + b'{"engine": 1}',
    "comments": b'{/* */ "engine": "fake"}',
    "more after it": b'{"engine": "fake"} {"engine": "fake"}',
    "half": b'{"engine": "fa',
    "nothing": b"",
    "prototype": b'{"__proto__": {"admin": true}, "constructor": 1}',
    "many names": b"{" + b",".join(b'"k%d": 1' % number for number in range(200_000)) + b"}",
    "many values": b'{"env": [' + b"1," * 2_000_000 + b"1]}",
    "wrong types": json.dumps(dict.fromkeys(("name", "image", "engine", "env", "volumes", "ports"), 1.5)).encode(),
}


@pytest.mark.parametrize("how", BODIES, ids=str)
def test_a05_bodies(server: Served, client: httpx.Client, how: str) -> None:
    with server.client(key_of(client)) as one:
        answer = one.post(CREATE, content=BODIES[how], headers=dict([JSON]))
    clean(server, answer)


def test_a05_a_gigabyte_is_refused_by_its_head(server: Served, client: httpx.Client) -> None:
    with Raw(server.url) as raw:
        head = [JSON, ("Content-Length", str(10**9))]
        raw.send(request("POST", CREATE, raw.host, head, key=key_of(client)))
        answer = raw.answer()
    assert answer is not None
    assert answer.status == 413
    clean(server, answer)


def test_a05_a_body_without_an_end_is_cut_off(server: Served, client: httpx.Client) -> None:
    """In chunks nobody says how much comes: what is taken is bounded all the same."""
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    before = _memory(server)
    with Raw(server.url, timeout=20) as raw:
        raw.send(request("POST", CREATE, raw.host, [JSON, ("Transfer-Encoding", "chunked")], key=key_of(client)))
        sent = raw.pour(piece, 1 << 30)
        answer = raw.answer()
    assert sent < 64 << 20, f"{sent} bytes were taken"
    assert answer is not None
    assert answer.status == 413
    assert _memory(server) - before < 128 << 20


def _memory(server: Served) -> int:
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["name", "image", "env", "network", "volumes", "ports", "allow", "source", "x"]), inner,
            max_size=5,
        ),
        max_leaves=12,
    )
)  # fmt: skip
def test_a05_random_json(server: Served, client: httpx.Client, value: Any) -> None:
    body = {**value, "engine": "fake"} if isinstance(value, dict) else value
    try:
        content = json.dumps(body).encode()
    except UnicodeEncodeError:
        return
    answer = client.post(CREATE, content=content, headers=dict([JSON]))
    if answer.status_code == 201:
        client.delete(f"{CREATE}/{answer.json()['id']}")
    else:
        clean(server, answer)


# -- heads ---------------------------------------------------------------------------------------------------

HOST = b"Host: localhost\r\nAuthorization: Bearer KEY\r\n"
SMUGGLED = b"DELETE /v1/sandboxes/victim HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /v1/sandboxes/victim/exec HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
SIZE = b"%x" % len(SMUGGLED)
#: Requests with a second one inside, or behind, that nobody may find. KEY is a good key: only their form is wrong.
HEADS: dict[str, bytes] = {
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 400\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": POST + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
    "two equal lengths": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}" + SMUGGLED,
    "a list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}" + SMUGGLED,
    "a length with a sign": POST + b"Content-Length: +2\r\n\r\n{}" + SMUGGLED,
    "a length in hex": POST + b"Content-Length: 0x2\r\n\r\n{}" + SMUGGLED,
    "a negative length": POST + b"Content-Length: -1\r\n\r\n{}" + SMUGGLED,
    "a length beyond numbers": POST + b"Content-Length: 99999999999999999999\r\n\r\n{}" + SMUGGLED,
    "a length with a letter": POST + b"Content-Length: 2a\r\n\r\n{}" + SMUGGLED,
    "chunks spelt wrong": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "chunks and more": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "chunks twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "chunks behind a space": POST + b"Transfer-Encoding : chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "chunks on a line below": POST + b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "chunks behind a tab": POST + b"Transfer-Encoding: \x0bchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a size that is none": POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a size beyond numbers": POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n" + SMUGGLED,
    "a negative size": POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a size that is too small": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a size without an end": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}0\r\n\r\n" + SMUGGLED,
    "a size by a bare line feed": POST + b"Transfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "an extension with a line feed": POST + b"Transfer-Encoding: chunked\r\n\r\n2;x\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a folded header": POST + b"X: a\r\n b\r\nContent-Length: 2\r\n\r\n{}" + SMUGGLED,
    "a folded host": b"GET /v1/me HTTP/1.1\r\nHost:\r\n localhost\r\nAuthorization: Bearer KEY\r\n\r\n" + SMUGGLED,
    "bare line feeds": b"GET /v1/me HTTP/1.1\nHost: localhost\nAuthorization: Bearer KEY\n\n" + SMUGGLED,
    "bare returns": b"GET /v1/me HTTP/1.1\rHost: localhost\rAuthorization: Bearer KEY\r\r" + SMUGGLED,
    "a null in a header": POST + b"X: a\0b\r\nContent-Length: 2\r\n\r\n{}" + SMUGGLED,
    "a header without a name": POST + b": x\r\nContent-Length: 2\r\n\r\n{}" + SMUGGLED,
    "a header without a colon": POST + b"Xabc\r\nContent-Length: 2\r\n\r\n{}" + SMUGGLED,
    "a space before a header": b"GET /v1/me HTTP/1.1\r\n X: y\r\n" + HOST + b"\r\n" + SMUGGLED,
    "no version": b"GET /v1/me\r\n\r\n" + SMUGGLED,
    "another version": b"GET /v1/me HTTP/9.9\r\n" + HOST + b"\r\n" + SMUGGLED,
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) + SMUGGLED,
    "a whole address": b"GET http://evil.test/v1/me HTTP/1.1\r\n" + HOST + b"\r\n" + SMUGGLED,
    "a connection to elsewhere": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n" + HOST + b"\r\n" + SMUGGLED,
    "a space in the target": b"GET /v1/me /x HTTP/1.1\r\n" + HOST + b"\r\n" + SMUGGLED,
    "a star": b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n" + SMUGGLED,
    "a method that is none": b"G\x01T /v1/me HTTP/1.1\r\n" + HOST + b"\r\n" + SMUGGLED,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + SMUGGLED,
}  # fmt: skip


@pytest.mark.parametrize("how", HEADS, ids=str)
def test_a05_no_request_hides_in_another(server: Served, client: httpx.Client, victim: str, how: str) -> None:
    """One answer at most, and it refuses; the connection is closed, so what is behind is never read as a request."""
    with Raw(server.url, timeout=3) as raw:
        raw.send(HEADS[how].replace(b"KEY", key_of(client).encode()))
        answers = raw.answers()
        assert len(answers) <= 1, answers
        for answer in answers:
            clean(server, answer)
        raw.send(SMUGGLED.replace(b"KEY", key_of(client).encode()))  # also not when it comes later
        assert raw.answers() == []


def test_a05_positive_control(server: Served, client: httpx.Client) -> None:
    """Two sound requests on one connection are two; and what was smuggled above does end a sandbox, asked properly."""
    with Raw(server.url, timeout=2) as raw:
        one = request("GET", "/v1/me", raw.host, key=key_of(client))
        raw.send(one + one)
        assert [answer.status for answer in raw.answers()] == [200, 200]
    assert client.post(CREATE, json={"engine": "fake", "name": "victim"}).status_code == 201
    with Raw(server.url) as raw:
        raw.send(SMUGGLED.replace(b"KEY", key_of(client).encode()))
        answer = raw.answer()
        assert answer is not None
        assert answer.status == 204
    with Raw(server.url) as raw:
        chunked = [JSON, ("Transfer-Encoding", "chunked")]
        raw.send(
            request("POST", CREATE, raw.host, chunked, key=key_of(client)) + b'11\r\n{"engine":"fake"}\r\n0\r\n\r\n'
        )
        answer = raw.answer()
        assert answer is not None
        assert answer.status == 201, answer
        client.delete(f"{CREATE}/{answer.document['id']}")


def test_a05_garbage(server: Served) -> None:
    """Bytes that are nothing at all: the server goes on."""
    source = random.Random(5)
    for _ in range(30):
        with Raw(server.url, timeout=1) as raw:
            raw.send(source.randbytes(source.randrange(1, 3000)) + b"\r\n\r\n")
            raw.send_end()
            for answer in raw.answers():
                assert 400 <= answer.status < 500
    with server.client() as client:
        assert client.get("/readyz").status_code == 200


# -- F-12 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def upload(client: httpx.Client) -> Iterator[str]:
    """Where files of a real sandbox are; it has 16 MiB."""
    probe = registry.load("container").probe()
    if not probe.available or "disk" not in probe.capabilities.controls:
        pytest.skip(f"container: {probe.reason or 'no limit of its disk here'}")
    made = client.post(CREATE, json={"engine": "container", "disk": "16m"})
    assert made.status_code == 201, made.text
    yield f"{CREATE}/{made.json()['id']}/files"
    client.delete(f"{CREATE}/{made.json()['id']}")


OLD = b"the old file" * 100


@pytest.fixture
def old(client: httpx.Client, upload: str) -> Iterator[None]:
    """A file that is still whole afterwards, and nothing beside it."""
    assert client.put(upload, params={"path": "dir/kept"}, content=OLD).status_code in (200, 201)
    yield
    assert client.get(upload, params={"path": "dir/kept"}).content == OLD
    listed = client.get(f"{upload}/list", params={"path": "dir"}).json()["items"]
    assert [each["name"] for each in listed] == ["kept"]


def _put(raw: Raw, client: httpx.Client, upload: str, *headers: tuple[str, str], body: bytes = b"") -> None:
    head = request("PUT", f"{upload}?path=dir/kept", raw.host, headers, key=key_of(client))
    raw.send(head + body)


def test_f12_less_than_was_said(server: Served, client: httpx.Client, upload: str, old: None) -> None:
    for sent in (b"", b"new", b"n" * 100_000):
        with Raw(server.url) as raw:
            _put(raw, client, upload, ("Content-Length", "1000000"), body=sent)
            raw.send_end()
            answer = raw.answer()
            assert answer is None or 400 <= answer.status < 500, answer
    for sent in (b"", b"new", b"n" * 100_000):
        with Raw(server.url) as raw:  # and without even that goodbye
            _put(raw, client, upload, ("Content-Length", "1000000"), body=sent)


def test_f12_chunks_that_lie(server: Served, client: httpx.Client, upload: str, old: None) -> None:
    for chunks in (
        b"5\r\nhello\r\n",
        b"ffff\r\nhello\r\n0\r\n\r\n",
        b"3\r\nhello\r\n0\r\n\r\n",
        b"zz\r\nhello\r\n",
        b"5\r\nhel",
    ):
        with Raw(server.url) as raw:
            _put(raw, client, upload, ("Transfer-Encoding", "chunked"), body=chunks)
            raw.send_end()
            answer = raw.answer()
            assert answer is None or 400 <= answer.status < 500, (chunks, answer)


def test_f12_more_than_the_disk_holds(server: Served, client: httpx.Client, upload: str, old: None) -> None:
    """A stream of 100 GB ends where the disk is full: told so, bounded, and the old file whole."""
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with Raw(server.url, timeout=30) as raw:
        _put(raw, client, upload, ("Transfer-Encoding", "chunked"))
        assert raw.pour(piece, 100 << 30) < 128 << 20
        found = raw.answer()
    assert found is not None
    assert found.status == 507
    answer = client.put(upload, params={"path": "dir/kept"}, content=b"x" * (32 << 20))
    assert answer.status_code == 507
    assert answer.json()["error"] == "DiskFull"


def test_f12_more_than_was_said(server: Served, client: httpx.Client, upload: str) -> None:
    """What is beyond the length is no part of the file, and no request either."""
    assert client.put(upload, params={"path": "dir/kept"}, content=OLD).status_code in (200, 201)
    with Raw(server.url) as raw:
        _put(raw, client, upload, ("Content-Length", "3"), body=b"newer and newer\r\n\r\n")
        answers = raw.answers()
    done = [answer for answer in answers if answer.status < 300]
    assert all(400 <= answer.status < 500 for answer in answers if answer not in done)
    assert client.get(upload, params={"path": "dir/kept"}).content in ((b"new",) if done else (b"new", OLD))


def test_f12_a_file_that_is_taken_away_at_once(client: httpx.Client, upload: str) -> None:
    """It was written: that a program inside was quicker than the answer is no error."""
    taker = "mkdir -p taken; while :; do rm -f taken/file; done"
    spawned = client.post(upload.replace("/files", "/processes"), json={"command": taker}).json()["pid"]
    try:
        for _ in range(20):
            answer = client.put(upload, params={"path": "taken/file"}, content=b"12345")
            assert answer.status_code in (200, 201), answer.text
            assert answer.json()["size"] == 5
    finally:
        client.post(f"{upload.replace('/files', '/processes')}/{spawned}/signal", json={"signal": "KILL"})


def test_f12_positive_control(client: httpx.Client, upload: str, old: None) -> None:
    assert client.put(upload, params={"path": "dir/kept"}, content=b"other").status_code == 200
    assert client.get(upload, params={"path": "dir/kept"}).content == b"other"
    assert client.put(upload, params={"path": "dir/kept"}, content=OLD).status_code == 200
