"""What a program's first bytes decide, piece by piece."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import pytest

from sloplet.network.channel import Refused
from sloplet.network.gate import Gate
from sloplet.network.needles import Scanner
from sloplet.network.target import Target

pytestmark = pytest.mark.anyone


class Told:
    """A connection that writes down what it is told."""

    def __init__(self, *, needs_requests: bool = False) -> None:
        self.target = Target("db.test", "198.18.0.1", 80)
        self.needs_requests = needs_requests
        self.gets_headers = False
        self.inspected = False
        self.protocol = ""
        self.http = b""
        self.released = b""
        self.late = asyncio.Event()

    def no_requests(self, what: str) -> str:
        return what

    def saw(self, protocol: str, request: str = "") -> None:
        self.protocol = self.protocol or protocol

    def go_on_http(self, first: bytes) -> None:
        self.http = first

    def release(self, held: Callable[[], bytes]) -> None:
        self.released += held()
        self.late.set()


def fed(gate: Gate, *pieces: bytes) -> bytes:
    return b"".join(gate.feed(piece) for piece in pieces)


def run(work: Callable[[Told, Gate], object], **settings: bool) -> None:
    async def main() -> None:
        told = Told(**settings)
        result = work(told, Gate(told, None))  # type: ignore[arg-type]
        if asyncio.iscoroutine(result):
            await result

    asyncio.run(main())


@pytest.mark.parametrize("text", [b"hello", b"0000", b"quit now", b'{"a": 1}', b"x", b"*1"])
def test_a_word_without_an_end_of_line_goes_out_at_once(text: bytes) -> None:
    def work(told: Told, gate: Gate) -> None:
        assert fed(gate, text) == text
        assert told.protocol == "tcp"
        assert fed(gate, b" more\n", b"GET / HTTP/1.1\r\n") == b" more\nGET / HTTP/1.1\r\n"

    run(work)


def test_what_begins_like_a_request_waits_for_a_moment_only() -> None:
    async def work(told: Told, gate: Gate) -> None:
        assert fed(gate, b"PING") == b""
        await asyncio.wait_for(told.late.wait(), 10)
        assert told.released == b"PING"
        assert fed(gate, b"\r\n") == b"\r\n"

    run(work)


def test_a_request_is_looked_into_whole() -> None:
    def work(told: Told, gate: Gate) -> None:
        assert fed(gate, b"GE", b"T /x HT", b"TP/1.1\r\nHost: db.test\r\n") == b""
        assert told.http.startswith(b"GET /x HTTP/")
        assert told.released == b""

    run(work)


@pytest.mark.parametrize("first", [b"g", b"get", b"xyz /", b"1", b'g"', b"A" * 40])
def test_a_request_that_was_let_through_in_pieces_is_cut_before_its_line_is_over(first: bytes) -> None:
    def work(told: Told, gate: Gate) -> None:
        assert fed(gate, first) == first
        with pytest.raises(Refused, match="pieces"):
            fed(gate, b" / HTTP/1.1\r\nHost: other.test\r\n\r\n")

    run(work)


def test_so_is_one_that_paused_after_its_method() -> None:
    async def work(told: Told, gate: Gate) -> None:
        assert fed(gate, b"GET ") == b""
        await asyncio.wait_for(told.late.wait(), 10)
        with pytest.raises(Refused, match="pieces"):
            fed(gate, b"/ HTTP/1.1\r\n")

    run(work)


@pytest.mark.parametrize(
    ("first", "later"),
    [(b"\x80\x2e\x01", b"\x03\x01" + bytes(40)), (b"\x14\3\1\0", b"\0\x16\3\1"), (b"\x80", b"\x2e\1\3\1")],
)
def test_so_is_what_becomes_tls_after_all(first: bytes, later: bytes) -> None:
    async def work(told: Told, gate: Gate) -> None:
        assert fed(gate, first) == b""
        await asyncio.wait_for(told.late.wait(), 10)
        with pytest.raises(Refused):
            fed(gate, later)

    run(work)


def test_a_few_bytes_that_may_be_old_tls_wait_for_a_moment_only() -> None:
    """A terminal's negotiation, for example."""

    async def work(told: Told, gate: Gate) -> None:
        assert fed(gate, b"\xff\xfd\x01") == b""
        await asyncio.wait_for(told.late.wait(), 10)
        assert told.released == b"\xff\xfd\x01"
        assert fed(gate, b"\xff\xfb\x18") == b"\xff\xfb\x18"

    run(work)


def test_an_end_without_an_end_of_line_sends_the_text() -> None:
    def work(told: Told, gate: Gate) -> None:
        assert fed(gate, b"HELO") == b""
        assert gate.end() == b"HELO"

    run(work)


def test_half_a_hello_is_never_sent() -> None:
    def work(told: Told, gate: Gate) -> None:
        assert fed(gate, b"\x16\x03\x01\x02") == b""
        with pytest.raises(Refused, match="before it could be seen"):
            gate.end()

    run(work)


def test_where_rules_are_about_requests_nothing_is_let_through_unseen() -> None:
    def work(told: Told, gate: Gate) -> None:
        assert fed(gate, b"hello") == b""
        with pytest.raises(Refused, match="not HTTP"):
            fed(gate, b"\n")
        held = Gate(told, None)  # type: ignore[arg-type]
        assert fed(held, b"hello") == b""
        with pytest.raises(Refused, match="before it could be seen"):
            held.end()

    run(work, needs_requests=True)


def test_placeholders_are_looked_for_in_what_is_let_through_too() -> None:
    async def main() -> None:
        told = Told()
        gate = Gate(told, Scanner({b"sloplet-secret-x": "a secret"}))  # type: ignore[arg-type]
        assert fed(gate, b"token=") == b"token="
        with pytest.raises(Refused, match="a secret"):
            fed(gate, b"sloplet-sec", b"ret-x\n")

    asyncio.run(main())


def test_tls_that_is_not_opened_does_not_pass_where_rules_are_about_requests() -> None:
    context, outgoing = ssl.create_default_context(), ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="db.test")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    hello = outgoing.read()

    def work(told: Told, gate: Gate) -> None:
        assert fed(gate, hello) == hello

    run(work)

    def refused(told: Told, gate: Gate) -> None:
        with pytest.raises(Refused, match="not opened"):
            fed(gate, hello)

    run(refused, needs_requests=True)
