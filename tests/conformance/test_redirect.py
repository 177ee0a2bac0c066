"""The redirect itself, at the level of the engine: what a program connects to, whatever it is, comes to the host as one
CONNECT that names it; what is no TCP is refused at once; loopback stays the sandbox's own; a saved one goes on so."""

from __future__ import annotations

import asyncio
import errno
import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gvisor_kit
import pytest
from gvisor_kit import Held, started

from sloplet.engines.base import ResolvedImage, StartRequest
from sloplet.engines.machine import machine
from sloplet.engines.registry import load
from sloplet.errors import ControlUnavailable, WireClosed
from sloplet.netspec import Network
from sloplet.spec import SandboxSpec
from sloplet.wire.fields import Fields
from sloplet.wire.schema import Op, Tag
from sloplet.wire.streams import AgentStream

#: What every script below begins with: how to try something and say how it went, as JSON.
_TRY = """
import ctypes, json, os, socket, struct, time

def tried(act):
    before = time.monotonic()
    try:
        said = act()
    except OSError as error:
        said = error.errno if error.errno else "timeout"
    return said if time.monotonic() - before < 3 else ("slow", said)

def tcp(address, port, text=b"", family=socket.AF_INET):
    with socket.socket(family) as sock:
        sock.settimeout(20)
        sock.connect((address, port))
        sock.sendall(text)
        return sock.recv(100).decode() if text else "connected"

def udp(address, port, connected, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)
        if connected:
            sock.connect((address, port))
            sock.send(b"x")
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sock.sendto(b"x", (address, port))
        return sock.recv(100).decode()

def made(family, kind, protocol):
    socket.socket(family, kind, protocol).close()
    return "made"
"""


def engines_for(tests: str) -> list[str]:
    return ["container", "gvisor"]


def networked() -> SandboxSpec:
    return SandboxSpec.make(network=Network(allow=["example.com"]))


@dataclass
class Echo:
    """The host's side: says to each connection where it wanted to go, and knows the names of all."""

    asked: list[tuple[str, str, int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    known: bool = True
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def accept(self, stream: AgentStream) -> None:
        task = asyncio.ensure_future(self._serve(stream))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _serve(self, stream: AgentStream) -> None:
        with suppress(WireClosed):  # the sandbox has ended
            await self._answer(stream)

    async def _answer(self, stream: AgentStream) -> None:
        request = stream.request
        name = request.text(Tag.NAME, "")
        if request.integer(Tag.OP) == Op.RESOLVE:
            self.names.append(name)
            stream.close(Fields() if self.known else Fields((Tag.ERRNO, errno.ENOENT)))
            return
        where = (name, request.text(Tag.ADDRESS), request.integer(Tag.PORT))
        self.asked.append(where)
        stream.reply(Fields())
        data = await stream.recv()
        if data is not None:
            await stream.send(f"{data.data.decode()} {where[1]}:{where[2]}".encode())
        if data is None or data.data != b"hold":
            stream.end_now()
        while await stream.recv() is not None:
            pass
        stream.close(Fields())


async def said(box: Held, script: str, user: str = "") -> Any:
    result = await box.run("python3", "-c", _TRY + script, user=user)
    assert result.ok, result
    return json.loads(str(result.stdout))


def test_every_address_comes_to_the_host(engine: str) -> None:
    places = [["1.2.3.4", 80], ["198.18.77.7", 443], ["10.0.0.5", 22], ["169.254.169.254", 80], ["223.255.255.254", 1]]
    script = f"print(json.dumps([tcp(*place, b'hello') for place in {places}]))"
    mapped = "print(json.dumps(tcp('::ffff:5.6.7.8', 99, b'six', socket.AF_INET6)))"

    async def main() -> None:
        host = Echo()
        async with started(spec=networked(), name=engine, accept=host.accept) as box:
            for user in ("", "root"):
                assert await said(box, script, user) == [f"hello {address}:{port}" for address, port in places]
            assert await said(box, mapped) == "six 5.6.7.8:99"
        assert [place[1:] for place in host.asked] == [*map(tuple, places)] * 2 + [("5.6.7.8", 99)]

    asyncio.run(main())


def test_a_name_of_one_word_is_looked_up_as_it_is(engine: str) -> None:
    """Whatever the sandbox is called: what follows a dot in a host name would be searched in first."""
    script = "print(json.dumps([socket.gethostbyname('db'), socket.gethostname()]))"

    async def main() -> None:
        host = Echo()
        async with started(spec=replace(networked(), name="my.box"), name=engine, accept=host.accept) as box:
            assert await said(box, script) == ["198.18.0.1", "my-box"]
        assert host.names == ["db"]

    asyncio.run(main())


def test_who_connects_to_the_agent_itself_gets_nowhere(engine: str) -> None:
    script = "print(json.dumps([tried(lambda p=p: tcp('127.0.0.1', p, b'hello')) for p in (1, 2)]))"

    async def main() -> None:
        host = Echo()
        async with started(spec=networked(), name=engine, accept=host.accept) as box:
            direct, closed = await said(box, script)
            assert direct in ("", errno.ECONNRESET, errno.EPIPE)
            assert closed == errno.ECONNREFUSED
            assert await said(box, "print(json.dumps(tcp('1.2.3.4', 5, b'control')))") == "control 1.2.3.4:5"
        assert host.asked == [("", "1.2.3.4", 5)]

    asyncio.run(main())


_OTHERS = """
print(json.dumps({
    "udp connected": tried(lambda: udp("1.2.3.4", 443, True)),
    "udp": tried(lambda: udp("1.2.3.4", 443, False)),
    "udp mapped": tried(lambda: udp("::ffff:1.2.3.4", 443, True, socket.AF_INET6)),
    "udp6 connected": tried(lambda: udp("2001:db8::1", 443, True, socket.AF_INET6)),
    "udp6": tried(lambda: udp("2001:db8::1", 443, False, socket.AF_INET6)),
    "tcp6": tried(lambda: tcp("2001:db8::1", 443, family=socket.AF_INET6)),
    "ping": tried(lambda: made(socket.AF_INET, socket.SOCK_DGRAM, 1)),
    "ping6": tried(lambda: made(socket.AF_INET6, socket.SOCK_DGRAM, 58)),
    "raw": tried(lambda: made(socket.AF_INET, socket.SOCK_RAW, 255)),
    "raw icmp": tried(lambda: made(socket.AF_INET, socket.SOCK_RAW, 1)),
    "packet": tried(lambda: made(socket.AF_PACKET, socket.SOCK_RAW, 0)),
    "control": tried(lambda: tcp("1.2.3.4", 80, b"hello")),
}))
"""


def test_what_is_not_tcp_is_refused_at_once(engine: str) -> None:
    """Errnos, not silence; but for a datagram without a connection in gVisor, which has none to give (ADR 0050)."""
    refused = {errno.EPERM, errno.EACCES, errno.EAFNOSUPPORT}
    expected: dict[str, set[object]] = {
        "udp connected": {errno.EPERM, errno.ECONNREFUSED},
        "udp": {errno.EPERM} if engine == "container" else {"timeout"},
        "udp mapped": {errno.EPERM, errno.ECONNREFUSED},
        "udp6 connected": {errno.ENETUNREACH, errno.EHOSTUNREACH},
        "udp6": {errno.ENETUNREACH, errno.EHOSTUNREACH},
        "tcp6": {errno.ENETUNREACH, errno.EHOSTUNREACH},
        **{what: set(refused) for what in ("ping", "ping6", "raw", "raw icmp", "packet")},
        "control": {"hello 1.2.3.4:80"},
    }

    async def main() -> None:
        host = Echo()
        async with started(spec=networked(), name=engine, accept=host.accept) as box:
            for user in ("", "root"):
                found = await said(box, _OTHERS, user)
                assert {what: how for what, how in found.items() if how not in expected[what]} == {}
        assert [place[1:] for place in host.asked] == [("1.2.3.4", 80)] * 2

    asyncio.run(main())


def test_with_one_user_inside(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host gives a user no more ids than his own."""
    facts = machine()
    if facts.root:
        pytest.skip("capability: root always has ids to give")
    alone = type(load(engine))(facts=replace(facts, newuidmap=None, newgidmap=None))  # type: ignore[call-arg]
    monkeypatch.setattr(gvisor_kit, "engine", lambda _: alone)

    async def main() -> None:
        host = Echo()
        async with started(spec=networked(), name=engine, accept=host.accept) as box:
            assert await said(box, "print(json.dumps(tcp('1.2.3.4', 80, b'hello')))") == "hello 1.2.3.4:80"
            assert await said(box, "print(json.dumps(tried(lambda: udp('1.2.3.4', 443, True))))") in (
                errno.EPERM,
                errno.ECONNREFUSED,
            )

    asyncio.run(main())


_OWN = """
server = socket.create_server(("0.0.0.0", 8000))
six = socket.create_server(("::1", 8001), family=socket.AF_INET6)
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("0.0.0.0", 8002))
datagrams.settimeout(0.5)

def met(address, listener=server, port=8000):
    with socket.create_connection((address, port), 5):
        listener.settimeout(5)
        return listener.accept()[1][0]

def got(address):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.sendto(b"mine", (address, 8002))
    except PermissionError:
        return "refused"
    return datagrams.recv(10).decode()

def reached():
    server.settimeout(0.5)
    return server.accept()[1][0]

print(json.dumps({
    "own": met("127.0.0.1"), "own too": met("127.9.9.9"), "own six": met("::1", six, 8001),
    "own datagram": got("127.0.0.1"), "closed": tried(lambda: tcp("127.0.0.1", 8003)),
    "other": tcp("9.9.9.9", 8000, b"x"), "not reached": tried(reached), "other datagram": tried(lambda: got("9.9.9.9")),
}))
"""


def test_loopback_is_the_sandboxs_own(engine: str) -> None:
    """Servers inside are met by 127.0.0.0/8 and ::1 alone, though every address seems to be the sandbox's."""

    async def main() -> None:
        host = Echo()
        async with started(spec=networked(), name=engine, accept=host.accept) as box:
            found = await said(box, _OWN)
            assert found.pop("own too").startswith("127.")
            assert found.pop("other datagram") in ("refused", "timeout")
            assert found == {
                "own": "127.0.0.1", "own six": "::1", "own datagram": "mine", "closed": errno.ECONNREFUSED,
                "other": "x 9.9.9.9:8000", "not reached": "timeout",
            }  # fmt: skip
        assert [place[1:] for place in host.asked] == [("9.9.9.9", 8000)]

    asyncio.run(main())


#: A question for the address of `name.test`, by hand: answers count only from where the question went.
_ASK = """
def ask(server, connected):
    question = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + b"\\x04name\\x04test\\0" + struct.pack(">2H", 1, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(10)
        if connected:
            sock.connect((server, 53))
            sock.send(question)
        else:
            sock.sendto(question, (server, 53))
        answer, where = sock.recvfrom(512)
        return [where[0], socket.inet_ntoa(answer[-4:])]
"""
_ASKED = """
servers = ("8.8.8.8", "192.168.1.1", "127.0.0.1", "127.0.0.53")
print(json.dumps([[ask(server, connected) for server in servers] for connected in (True, False)]))
"""


def test_names_are_answered_from_the_address_that_was_asked(engine: str) -> None:
    async def main() -> None:
        host = Echo()
        async with started(spec=networked(), name=engine, accept=host.accept) as box:
            servers = ("8.8.8.8", "192.168.1.1", "127.0.0.1", "127.0.0.53")
            found = await said(box, _ASK + _ASKED)
            address = found[0][0][1]
            assert address.startswith(("198.18.", "198.19."))
            assert found == [[[server, address] for server in servers]] * 2
            # the libc's own resolver, which nobody has told of a server
            by_name = "print(json.dumps(tcp('name.test', 4711, b'hello')))"
            assert await said(box, by_name) == f"hello {address}:4711"
        assert host.asked == [("name.test", address, 4711)]
        assert set(host.names) == {"name.test"}

    asyncio.run(main())


_UNDO = """
def netlink(protocol, message):
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    sock.settimeout(5)
    sock.send(message)
    return -struct.unpack_from("<i", sock.recv(1000), 16)[0]

def message(kind, body):
    return struct.pack("<IHHII", 16 + len(body), kind, 5, 1, 0) + body

lo = struct.pack("<HHI", 8, 4, 1)
table = struct.pack(">BBH", 2, 0, 0) + struct.pack("<HH", 12, 1) + b"sloplet\\0"
old = struct.pack("<HH4s", 8, 2, socket.inet_aton("1.0.0.1"))

def rights(pid):
    with open(f"/proc/{pid}/status") as file:
        return {line[:6]: int(line.split()[1], 16) for line in file if line.startswith(("CapEff", "CapPrm", "CapBnd"))}

print(json.dumps({
    "del route": tried(lambda: netlink(0, message(25, struct.pack("<8BI", 2, 0, 0, 0, 255, 4, 254, 2, 0) + lo))),
    "del address": tried(lambda: netlink(0, message(21, struct.pack("<4BI", 2, 1, 0, 0, 1) + old))),
    "del table": tried(lambda: netlink(12, message(10 << 8 | 2, table))),
    "iptables": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 255).setsockopt(0, 64, bytes(96))),
    "transparent": tried(lambda: socket.socket().setsockopt(0, 19, 1)),
    "command": rights("self"), "agent": rights(1),
    "still": tcp("1.2.3.4", 80, b"hello"),
}))
"""


def check_rights(command: dict[str, int], agent: dict[str, int]) -> None:
    """Commands have none at all, the agent has given up those over the network."""
    assert set(command.values()) == {0}
    assert agent["CapBnd"] == 0
    assert {agent[name] & (1 << 12 | 1 << 13) for name in ("CapEff", "CapPrm")} == {0}


def test_nobody_inside_can_undo_it(engine: str) -> None:
    async def main() -> None:
        host = Echo()
        async with started(spec=networked(), name=engine, accept=host.accept) as box:
            for user in ("", "root"):
                found = await said(box, _UNDO, user)
                assert found.pop("still") == "hello 1.2.3.4:80"
                check_rights(found.pop("command"), found.pop("agent"))
                if engine == "gvisor":  # it has no such thing, and takes it for done
                    assert found.pop("transparent") is None
                none = {errno.EPERM, errno.EACCES, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP, errno.ENOPROTOOPT}
                assert {what: how for what, how in found.items() if how not in none} == {}

    asyncio.run(main())


def test_without_a_network_there_is_nothing_of_it(engine: str) -> None:
    script = """
    print(json.dumps([
        tried(lambda: tcp("1.2.3.4", 80)), tried(lambda: udp("8.8.8.8", 53, True)),
        tried(lambda: tcp("127.0.0.1", 1)), tried(lambda: tcp("127.0.0.1", 53)),
        tried(lambda: udp("127.0.0.1", 53, True)),
    ]))
    """.replace("\n    ", "\n")

    async def main() -> None:
        host = Echo()
        async with started(name=engine, accept=host.accept) as box:
            assert box.instance.hello.egress is False
            [control] = [each for each in box.instance.guarantees if each.control == "network"]
            assert (control.enforced, control.value) == (True, "none")
            out, names, *inside = await said(box, script)
            assert {out, names} <= {errno.ENETUNREACH, errno.EHOSTUNREACH}
            assert inside == [errno.ECONNREFUSED] * 3
        assert host.asked == []

    asyncio.run(main())


def test_what_is_promised(engine: str, tmp_path: Path) -> None:
    request = StartRequest("abc", networked(), ResolvedImage("host"), tmp_path)
    [control] = [each for each in load(engine).check(request) if each.control == "network"]
    assert (control.enforced, control.value) == (True, "by policy")
    assert "without devices" in control.how
    assert load(engine).probe().capabilities.egress
    for other in ("fake", "process"):
        assert not load(other).probe().capabilities.egress
        assert not load(other).probe().capabilities.ports
        if load(other).probe().available:
            with pytest.raises(ControlUnavailable) as refused:
                load(other).check(request)
            assert "container" in str(refused.value.hint)


_GOES_ON = (
    _ASK
    + """
print(json.dumps([tcp("1.2.3.4", 80, b"hello"), ask("8.8.8.8", True)[0], tried(lambda: udp("1.2.3.4", 9, True))]))
"""
)
#: Keeps connections open, more than are reset at a time, and says what becomes of them: while it is silent, or as soon
#: as it sends something. One more is over already.
_HOLDS = """
def held(port, text=b"hold"):
    sock = socket.create_connection(("7.7.7.7", port), 30)
    sock.sendall(text)
    sock.recv(100)
    sock.settimeout(None)
    return sock

def ended(sock):
    for silent in (True, False):
        sock.settimeout(5)
        try:
            if not silent:
                sock.sendall(b"x")
            return [silent, sock.recv(100).decode()]
        except TimeoutError:
            continue
        except OSError as error:
            return [silent, error.errno]
    return [False, "nothing"]

socks = [held(port) for port in range(100, 140)]
assert held(80, b"over").recv(100) == b""
open("/workspace/holds", "w").close()
print(json.dumps([ended(sock) for sock in socks]), flush=True)
"""


@pytest.mark.usefixtures("runsc_is_here")
def test_a_saved_sandbox_goes_on_with_its_way_out(tmp_path: Path) -> None:
    """Twice, beside the original, whose own connections stay. In the copies they are reset: nothing is there twice."""
    if not load("gvisor").probe().available:
        pytest.skip("capability: gvisor cannot run here")
    folder = tmp_path / "saved"
    folder.mkdir(mode=0o700)

    async def main() -> None:
        hosts = [Echo(), Echo(), Echo()]
        expected = ["hello 1.2.3.4:80", "8.8.8.8", errno.ECONNREFUSED]
        async with started(spec=networked(), accept=hosts[0].accept) as original:
            assert await said(original, _GOES_ON) == expected
            holds = f"cat > /workspace/it <<'END'\n{_TRY}{_HOLDS}END\npython3 /workspace/it >/workspace/said 2>&1 &"
            wait = "until test -e /workspace/holds || test -s /workspace/said; do sleep 0.05; done; cat /workspace/said"
            assert str((await original.run("sh", "-c", f"{holds}\n{wait}")).stdout) == ""
            before = len(hosts[0].asked)
            await original.save(folder)
            async with (
                started(folder, networked(), accept=hosts[1].accept) as one,
                started(folder, networked(), accept=hosts[2].accept) as two,
            ):
                for box in (one, two):
                    ended = await box.run(
                        "sh", "-c", "until test -s /workspace/said; do sleep 0.05; done; cat /workspace/said"
                    )
                    outcomes = json.loads(str(ended.stdout))
                    assert [how for _, how in outcomes] == [errno.ECONNRESET] * 40
                    assert sum(silent for silent, _ in outcomes) >= 36, (
                        "but for a few, without saying a word (ADR 0050)"
                    )
                assert (await original.run("test", "-s", "/workspace/said")).exit_code == 1
                for box in (one, two, original, two, one):
                    for user in ("", "root"):
                        assert await said(box, _GOES_ON, user) == expected
                found = await said(one, _UNDO, "root")
                check_rights(found["command"], found["agent"])
                assert found["still"] == "hello 1.2.3.4:80"
        assert [len(host.asked) for host in hosts] == [before + 2, 5, 4]

    asyncio.run(main())
