"""What programs connect to, as the agent tells it: a namespace with the real redirect, and a host that answers by hand.

The names behind synthetic addresses are DNS's matter: see test_agent_dns.py.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import select
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from agent_helpers import anonymous_kib, can, eventually

from agentclient import AGENT, AgentClient, Asked, Stream, encode, frame
from sloplet.wire.schema import INITIAL_CREDIT, VERSION, ExecFlag, Feature, FrameType, HelloFlag, Op, Tag

pytestmark = pytest.mark.anyone

NETWORK = ["unshare", "-Urn"]
FLAGS = HelloFlag.NO_USERS | HelloFlag.EGRESS
_PIDFD_GETFD = 438  # on every architecture

#: What the program inside does, in Python: `s` is connected, `say` tells the test.
PROGRAM = """
import os, socket, struct, sys, select, time
def say(*words): print(*words, flush=True)
def wait(): return sys.stdin.readline().strip()
def dial(address="1.2.3.4", port=443):
    s = socket.socket(); s.connect((address, port)); s.settimeout(30); return s
def tried(*where):
    try: return fate(dial(*where))
    except OSError as error: return type(error).__name__
def fate(s):
    try:
        data = s.recv(100)
        return "end" if not data else data.decode()
    except OSError as error: return type(error).__name__
def reset(s):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)); s.close()
"""


def _start(place: Path, *words: str) -> AgentClient:
    if not can(NETWORK):
        pytest.skip("no user namespaces here")
    return AgentClient(
        [*NETWORK, str(AGENT), "agent", *words],
        [(Tag.USER, "root"), (Tag.WORKDIR, str(place)), (Tag.HOME, str(place)), (Tag.FLAGS, FLAGS)],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )


@pytest.fixture
def box(tmp_path: Path) -> Iterator[AgentClient]:
    client = _start(tmp_path, "egress")
    yield client
    client.close()
    assert client.process.returncode == 0


def _program(box: AgentClient, text: str) -> Stream:
    return box.spawn(["/usr/bin/env", "python3", "-c", PROGRAM + text], flags=ExecFlag.STDIN | ExecFlag.MERGE)


def _said(box: AgentClient, program: Stream, text: str) -> None:
    box.until(lambda: text.encode() in bytes(program.out).split(b"\n") or program.close is not None)
    assert text in program.out.decode().split("\n"), program.out.decode()


def _go_on(box: AgentClient, program: Stream) -> None:
    box.data(program, b"\n")


def _fds(box: AgentClient) -> int:
    return len(os.listdir(f"/proc/{box.process.pid}/fd"))


def _cpu(box: AgentClient) -> int:
    words = Path(f"/proc/{box.process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


def _silent(box: AgentClient) -> bool:
    return not select.select([box.fro], [], [], 0.15)[0]


def _unused(box: AgentClient, before: int) -> None:
    def done() -> bool:
        box.receive(0)
        return _fds(box) <= before

    eventually(done, "the end of the sockets")


def test_it_says_that_it_serves(box: AgentClient) -> None:
    assert box.hello is not None
    assert box.hello[Tag.FEATURES] == Feature.EGRESS


def test_a_connection_is_asked_for_with_its_address(box: AgentClient) -> None:
    before = _fds(box)
    program = _program(
        box, 's = dial("93.184.216.34", 8443); s.sendall(b"hi"); s.shutdown(1); say("got", fate(s), fate(s))'
    )
    asked = box.next_asked()
    assert (asked.op, asked.request[Tag.ADDRESS], asked.request[Tag.PORT]) == (Op.CONNECT, b"93.184.216.34", 8443)
    assert asked.request[Tag.NAME] is None
    box.until(lambda: bytes(asked.out) == b"hi" and asked.ended)  # before any REPLY: the host may need it to judge
    box.answer(asked)
    box.data(asked, b"there")
    box.end(asked)
    box.finish(asked)
    _said(box, program, "got there end")
    box.wait(program)
    _unused(box, before)


@pytest.mark.parametrize("replied", [False, True])
def test_refused_is_reset(box: AgentClient, replied: bool) -> None:
    before = _fds(box)
    program = _program(box, "say(tried())")
    asked = box.next_asked()
    if replied:
        box.answer(asked)
    box.finish(asked, (Tag.ERRNO, errno.EACCES), (Tag.MESSAGE, "not allowed"))
    _said(box, program, "ConnectionResetError")
    box.wait(program)
    _unused(box, before)


def test_the_listener_itself_is_reset(box: AgentClient) -> None:
    """Past the redirect there is nothing, wherever it listens; what is redirected is the positive control."""
    text = """
ports = {line.split()[1].rpartition(":")[2] for line in open("/proc/net/tcp") if line.split()[3] == "0A"}
fates = set()
for port in ports:
    if int(port, 16) == 53: continue
    for address in ("127.0.0.1", "127.1.2.3"):
        fates.add(tried(address, int(port, 16)))
say(len(ports), *sorted(fates))
say(fate(dial()))
"""
    program = _program(box, text)
    asked = box.next_asked()
    assert asked.request[Tag.ADDRESS] == b"1.2.3.4"
    box.until(lambda: b"\n" in program.out)  # what it says and what it asks for come in any order
    found = re.match(rb"(\d+) ([\w ]+)\n", bytes(program.out))
    assert found, bytes(program.out)
    assert int(found[1]) >= 2
    assert set(found[2].split()) <= {b"ConnectionResetError", b"ConnectionRefusedError"}
    assert b"ConnectionResetError" in found[2].split()
    box.finish(asked)
    _said(box, program, "end")
    assert len(box.asked) == 1


def test_a_program_that_gives_up(box: AgentClient) -> None:
    before = _fds(box)
    program = _program(box, 's = dial(); s.sendall(b"x"); wait(); reset(s); say("gone"); wait()')
    asked = box.next_asked()
    box.answer(asked)
    box.until(lambda: bytes(asked.out) == b"x")
    _go_on(box, program)
    box.until(lambda: asked.was_reset)
    box.data(asked, b"late")  # it crossed on the wire: dropped
    box.send(frame(FrameType.CREDIT, asked.number, b"\1\0\0\0"))
    box.finish(asked)
    box.ping()
    _go_on(box, program)
    box.wait(program)
    _unused(box, before)


@contextmanager
def _connection(box: AgentClient) -> Iterator[socket.socket]:
    """The agent's one connection, as a descriptor of ours."""
    libc, numbers = ctypes.CDLL(None), os.listdir(f"/proc/{box.process.pid}/fd")
    with ExitStack() as stack:
        pidfd = os.pidfd_open(box.process.pid)
        stack.callback(os.close, pidfd)
        taken = [fd for number in numbers if (fd := libc.syscall(_PIDFD_GETFD, pidfd, int(number), 0)) >= 0]
        for fd in taken:
            stack.callback(os.close, fd)
        sockets = [socket.socket(fileno=os.dup(fd)) for fd in taken if stat.S_ISSOCK(os.fstat(fd).st_mode)]
        for each in sockets:
            stack.enter_context(each)
        streams = [each for each in sockets if each.type == socket.SOCK_STREAM]
        (found,) = [each for each in streams if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
        yield found


def test_a_program_that_is_gone_is_noticed(box: AgentClient) -> None:
    """It has closed its end, and the host does not answer that: nobody would ever end the connection. The agent asks
    the program's kernel from time to time; here sooner, and that forgets a connection after a second, not a minute."""
    before = _fds(box)
    sooner = "s.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)"
    program = _program(box, f's = dial(); {sooner}; s.sendall(b"x"); wait(); s.close(); say("gone"); wait()')
    asked = box.next_asked()
    box.answer(asked)
    box.until(lambda: bytes(asked.out) == b"x")
    with _connection(box) as line:
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            line.setsockopt(socket.IPPROTO_TCP, option, 1)
    _go_on(box, program)
    _said(box, program, "gone")
    box.until(lambda: asked.was_reset)
    box.finish(asked)
    _go_on(box, program)
    box.wait(program)
    _unused(box, before)


def test_the_last_bytes_reach_a_slow_program(box: AgentClient) -> None:
    """CLOSE comes right behind END; what the kernel has not taken yet is not lost."""
    before = _fds(box)
    text = """
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536); s.connect(("1.2.3.4", 80))
wait()
size = 0
while data := s.recv(65536): size += len(data)
say(size)
"""
    program = _program(box, text)
    asked = box.next_asked()
    box.answer(asked)
    for _ in range(INITIAL_CREDIT // 65536):
        box.send(frame(FrameType.DATA, asked.number, bytes(65536), 1))
    box.send(frame(FrameType.END, asked.number, b"", 1))
    box.finish(asked)
    box.ping()
    _go_on(box, program)
    _said(box, program, str(INITIAL_CREDIT))
    box.wait(program)
    _unused(box, before)


def test_credit_holds_both_sides(box: AgentClient) -> None:
    text = """
s = dial(); s.setblocking(False)
try:
    while True: s.send(bytes(65536))
except BlockingIOError: say("full")
wait()
"""
    program = _program(box, text)
    asked = box.next_asked()
    asked.grants = False
    _said(box, program, "full")
    box.until(lambda: len(asked.out) == INITIAL_CREDIT)
    ticks = _cpu(box)
    assert _silent(box)
    assert _cpu(box) - ticks <= 2, "it waits, and does not spin"
    before = anonymous_kib(box.process.pid)
    box.answer(asked)
    sent = 0
    while sent < 64 << 20:  # until no credit comes any more
        room = min(asked.credit, 65536)
        if room:
            box.send(frame(FrameType.DATA, asked.number, bytes(room), 1))
            asked.credit -= room
            sent += room
        elif not box.receive(0.3):
            break
    assert INITIAL_CREDIT <= sent < 64 << 20
    box.ping()
    assert anonymous_kib(box.process.pid) - before < 1500
    box.finish(asked, (Tag.ERRNO, errno.EPIPE))
    _go_on(box, program)
    box.wait(program)


def test_a_flood_waits_in_the_backlog(box: AgentClient) -> None:
    """No more than 960 at once, no descriptor beyond them, and all are served in the end."""
    text = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
flood = []
for number in range(1200):
    s = socket.socket(); s.setblocking(False)
    s.connect_ex(("1.2.3.4", 1000 + number)); flood.append(s)
say("begun")
wait()
for s in flood: s.settimeout(60)
say(sorted({fate(s) for s in flood}))
"""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("too few descriptors here")
    before = _fds(box)
    program = _program(box, text)
    _said(box, program, "begun")
    box.until(lambda: len(box.asked) >= 960)
    box.ping()
    assert _silent(box)
    assert len(box.asked) == 960
    assert _fds(box) < before + 980
    ticks = _cpu(box)
    assert _silent(box)
    assert _cpu(box) - ticks <= 2

    def refuse(asked: Asked) -> None:
        box.finish(asked, (Tag.ERRNO, errno.EACCES))

    box.on_asked = refuse
    for asked in list(box.asked):
        refuse(asked)
    box.until(lambda: len(box.asked) == 1200)
    assert len({asked.request[Tag.PORT] for asked in box.asked}) == 1200
    _go_on(box, program)
    _said(box, program, "['ConnectionResetError']")
    box.wait(program)
    _unused(box, before)


def test_no_descriptors_left(box: AgentClient) -> None:
    """They wait until there are some again, and the agent does not spin meanwhile."""
    text = """
all = [socket.socket() for _ in range(20)]
for s in all: s.settimeout(30); s.connect(("1.2.3.4", 80))
say("connected")
say(sorted({fate(s) for s in all}))
"""
    program = _program(box, f"wait()\n{text}")
    box.started(program)
    have = _fds(box)
    old = resource.prlimit(
        box.process.pid, resource.RLIMIT_NOFILE, (have + 5, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    _go_on(box, program)
    _said(box, program, "connected")
    box.until(lambda: len(box.asked) >= 4)
    box.ping()
    ticks = _cpu(box)
    assert not select.select([box.fro], [], [], 0.5)[0]
    assert _cpu(box) - ticks <= 5
    assert len(box.asked) <= 5
    resource.prlimit(box.process.pid, resource.RLIMIT_NOFILE, old)
    box.until(lambda: len(box.asked) == 20)
    for asked in box.asked:
        box.finish(asked)
    _said(box, program, "['end']")


def test_a_second_hello_resets_everything(box: AgentClient) -> None:
    before = _fds(box)
    program = _program(box, "a = dial(); b = dial(); wait(); say(fate(a), fate(b)); wait(); say(fate(dial('5.6.7.8')))")
    first, second = box.next_asked(1), box.next_asked(2)
    box.answer(first)
    assert (first.number, second.number) == (2, 4)
    pid = box.started(program)
    box.asked.clear()
    box.streams.clear()
    box.hello, box.next = None, 1
    fields = [(Tag.VERSION, VERSION), (Tag.FLAGS, FLAGS), (Tag.USER, "root"), (Tag.WORKDIR, "/")]
    box.send(frame(FrameType.HELLO, 0, encode(fields)))
    box.until(lambda: box.hello is not None)
    again = box.open(Op.ATTACH, (Tag.PID, pid), (Tag.FLAGS, 0))
    box.until(lambda: again.reply is not None)
    _go_on(box, again)
    _said(box, again, "ConnectionResetError ConnectionResetError")
    assert _fds(box) <= before + 10
    _go_on(box, again)
    asked = box.next_asked()
    assert (asked.number, asked.request[Tag.ADDRESS]) == (2, b"5.6.7.8")
    box.finish(asked)
    _said(box, again, "end")


def test_frozen_nothing_moves(box: AgentClient) -> None:
    program = _program(box, 's = dial(); wait(); s.sendall(b"x"); say("sent"); say(fate(s)); wait()')
    asked = box.next_asked()
    box.answer(asked)
    _go_on(box, program)
    _said(box, program, "sent")
    box.until(lambda: bytes(asked.out) == b"x")
    assert box.call(Op.FREEZE).error is None
    box.send(frame(FrameType.DATA, asked.number, b"kept", 1))
    assert _silent(box)
    assert b"kept" not in program.out
    assert box.call(Op.THAW).error is None
    _said(box, program, "kept")


@pytest.mark.parametrize(
    "lie",
    [
        lambda n: frame(FrameType.DATA, n, b"x", 0),  # the request's channel
        lambda n: frame(FrameType.DATA, n + 2, b"x", 1),  # never opened
        lambda n: frame(FrameType.CLOSE, n + 2, b""),
        lambda n: frame(FrameType.CLOSE, 0, b""),
        lambda n: frame(FrameType.REPLY, n, b"\1"),
        lambda n: frame(FrameType.CLOSE, n, encode([(Tag.EXIT_CODE, 1)])),
        lambda n: frame(FrameType.RESET, n),
        lambda n: frame(FrameType.OPEN, n, encode([(Tag.OP, Op.STAT), (Tag.PATH, "/")])),
        lambda n: frame(FrameType.CTRL, n, encode([(Tag.KIND, 3)])),
        lambda n: frame(FrameType.CREDIT, n, b"\xff\xff\xff\xff"),
        lambda n: frame(FrameType.END, n, b"", 1) * 2,
        lambda n: frame(FrameType.END, n, b"", 2),
        lambda n: frame(FrameType.END, n, b"", 1) + frame(FrameType.DATA, n, b"x", 1),
        lambda n: frame(FrameType.CLOSE, 1, b""),  # one of the host's own
        lambda n: frame(FrameType.REPLY, 1, b""),
    ],
)
def test_a_host_that_breaks_the_rules(tmp_path: Path, lie: Callable[[int], bytes]) -> None:
    with closing(_start(tmp_path, "egress")) as box:
        assert _program(box, "s = dial(); time.sleep(1000)").number == 1
        box.send(lie(box.next_asked().number))
        assert box.wait_exit() == 2
        assert b"protocol error" in box.errors()


def test_without_egress_it_is_not_served(tmp_path: Path) -> None:
    with closing(_start(tmp_path)) as box:
        assert box.hello is not None
        assert box.hello[Tag.FEATURES] == 0
        program = box.wait(_program(box, "s = dial()"))
        assert b"unreachable" in program.out
        assert not box.asked


if not AGENT.exists():
    pytest.skip("the agent is not built here", allow_module_level=True)
