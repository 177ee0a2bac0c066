"""Requests to a server that does not behave: what is asked again, what is not, and what the error says."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from sloplet.errors import (
    ProtocolError,
    QuotaExceeded,
    RateLimited,
    SandboxNotFound,
    ServerBusy,
    ServerError,
    ServerUnreachable,
)
from sloplet.remote.http import Http
from sloplet.remote.place import parse
from sloplet.remote.session import Session
from sloplet.remote.told import lines_of, server_sent
from sloplet.remote.websocket import unreachable
from sloplet.server.problems import problem, status_of

pytestmark = pytest.mark.anyone


class Request:
    def __init__(self, head: str, body: bytes) -> None:
        first, *lines = head.split("\r\n")
        self.method, self.target = first.split(" ")[:2]
        self.headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in lines)}
        self.body = body


class Scripted:
    """Answers each request with the next of its answers: bytes, or None to hang up. Then it says {"n": N}."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[Request] = []
        self.connections = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Scripted:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.http = Http(parse(f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}", "key"), {"X-Test": "1"})
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()
        self.hang_up()
        self._server.close()
        await self._server.wait_closed()

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip("\r\n")
                request = Request(head, b"")
                request.body = await reader.readexactly(int(request.headers.get("content-length", "0")))
                self.requests.append(request)
                answer = self.answers.pop(0) if self.answers else ok({"n": len(self.requests)})
                if answer is None:
                    writer.close()
                    return
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def ok(value: Any, status: str = "200 OK", more: str = "") -> bytes:
    body = json.dumps(value).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body


def failed(error: Any, more: str = "") -> bytes:
    return ok(problem(error, "r"), f"{status_of(error)} No", more)


def play(*answers: bytes | None) -> Callable[[Callable[[Scripted], Awaitable[None]]], None]:
    def run(scenario: Callable[[Scripted], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with Scripted(*answers) as server:
                async with asyncio.timeout(20):
                    await scenario(server)

        asyncio.run(whole())

    return run


def test_connections_stay() -> None:
    @play()
    async def _(server: Scripted) -> None:
        for number in range(1, 6):
            assert await server.http.get("/x", {"a": "b c", "n": number}) == {"n": number}
        assert server.connections == 1
        assert server.requests[0].target == "/x?a=b+c&n=1"
        assert server.requests[0].headers["x-test"] == "1"
        await asyncio.gather(*(server.http.get("/x") for _ in range(5)))
        assert server.connections <= 5


def test_what_looks_is_asked_again() -> None:
    @play(None, None)
    async def _(server: Scripted) -> None:
        assert await server.http.get("/x") == {"n": 3}
        assert await server.http.ask("DELETE", "/x") == {"n": 4}


def test_what_may_have_been_done_is_not_asked_again() -> None:
    @play(ok({}), None)
    async def _(server: Scripted) -> None:
        await server.http.get("/x")
        with pytest.raises(ServerUnreachable, match="before the answer came"):
            await server.http.post("/x", {"a": 1})
        assert len(server.requests) == 2


def test_with_a_key_it_is_asked_again_by_the_same() -> None:
    @play(None, None)
    async def _(server: Scripted) -> None:
        assert await server.http.post("/x", {"a": 1}, headers={"Idempotency-Key": "k"}) == {"n": 3}
        assert [request.headers["idempotency-key"] for request in server.requests] == ["k"] * 3
        assert {request.body for request in server.requests} == {b'{"a": 1}'}


def test_a_connection_that_ended_while_nobody_used_it() -> None:
    """Nothing was sent on it, so anything may be asked."""

    @play()
    async def _(server: Scripted) -> None:
        await server.http.get("/x")
        server.hang_up()
        await asyncio.sleep(0.05)
        assert await server.http.post("/x", {}) == {"n": 2}
        assert server.connections == 2


def test_busy_is_waited_for() -> None:
    @play(failed(ServerBusy("b"), "retry-after: 0.1\r\n"), failed(RateLimited("r"), "retry-after: 0.1\r\n"))
    async def _(server: Scripted) -> None:
        began = asyncio.get_running_loop().time()
        assert await server.http.post("/x", {}) == {"n": 3}
        assert asyncio.get_running_loop().time() - began >= 0.2


@pytest.mark.parametrize("error", [QuotaExceeded("q"), SandboxNotFound("s")])
def test_refusals_are_not(error: Exception) -> None:
    @play(failed(error, "retry-after: 0.1\r\n"))
    async def _(server: Scripted) -> None:
        with pytest.raises(type(error)):
            await server.http.post("/x", {})
        assert len(server.requests) == 1


def test_a_long_wait_is_not_waited_for() -> None:
    @play(*[failed(ServerBusy("b"), "retry-after: 4000\r\n")] * 9)
    async def _(server: Scripted) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await server.http.post("/x", {})
        assert len(server.requests) == 1


def test_answers_in_pieces() -> None:
    chunked = b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\n{"a"\r\n3\r\n: 1\r\n1\r\n}\r\n0\r\n\r\n'
    closed = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"

    @play(chunked, closed, ok([]), b"HTTP/1.1 204 No Content\r\n\r\n")
    async def _(server: Scripted) -> None:
        assert await server.http.get("/x") == {"a": 1}
        assert await server.http.get("/x") == {}
        assert await server.http.get("/x") == []
        assert await server.http.get("/x") is None
        assert server.connections == 2


@pytest.mark.parametrize("answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"])
def test_what_is_no_http(answer: bytes) -> None:
    @play(ok({}), *[answer] * 50)
    async def _(server: Scripted) -> None:
        await server.http.get("/x")
        with pytest.raises(ServerUnreachable):
            await server.http.post("/x", {})


@pytest.mark.parametrize(
    ("answer", "stays"),
    [
        (b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"n": 1}', True),
        (b'HTTP/1.1 103 Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"n": 1}', True),
        (b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 8\r\n\r\n{"n": 1}', False),
        (b'HTTP/1.0 200 OK\r\nContent-Length: 8\r\n\r\n{"n": 1}', False),
        (b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{"n": 1}\r\n0\r\n\r\n', True),
    ],
)
def test_ways_to_say_the_same(answer: bytes, stays: bool) -> None:
    async def talk(server: Scripted) -> None:
        assert await server.http.get("/v1/me") == {"n": 1}
        assert await server.http.get("/v1/me") == {"n": 2}
        assert server.connections == (1 if stays else 2)

    play(answer)(talk)


def test_an_answer_that_ends_with_its_connection() -> None:
    async def talk(server: Scripted) -> None:
        asked = asyncio.ensure_future(server.http.get("/v1/me"))
        while not server.requests:
            await asyncio.sleep(0)
        for _ in range(20):  # the answer is on its way
            await asyncio.sleep(0)
        server.hang_up()
        assert await asked == {"n": 1}

    play(b'HTTP/1.1 200 OK\r\n\r\n{"n": 1}')(talk)


@pytest.mark.parametrize("length", [1, 2, 20, 40, None])
def test_an_answer_that_nobody_asked_for(length: int | None) -> None:
    """It, or the beginning of it, is not taken for the next one's."""

    async def talk(server: Scripted) -> None:
        assert await server.http.get("/v1/me") == {"n": 1}
        assert await server.http.get("/v1/me") == {"n": 2}
        assert server.connections == 2

    play(ok({"n": 1}) + ok({"n": "another one's"})[:length])(talk)


@pytest.mark.parametrize("head", [b"X: " + b"x" * (1 << 19), b"X: y\r\n" * (1 << 16)], ids=["long", "many"])
def test_a_head_without_an_end(head: bytes) -> None:
    async def talk(server: Scripted) -> None:
        with pytest.raises(ServerUnreachable):
            await server.http.post("/v1/sandboxes", {})

    play(b"HTTP/1.1 200 OK\r\n" + head)(talk)


def test_another_kind_of_server_is_told_at_once() -> None:
    @play(*[b"SSH-2.0-Something\r\n"] * 50)
    async def _(server: Scripted) -> None:
        with pytest.raises(ServerUnreachable, match="is not HTTP"):
            await server.http.get("/x")
        assert len(server.requests) == 1


def test_a_server_that_never_answers_may_want_tls() -> None:
    @play(*[None] * 200)
    async def _(server: Scripted) -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(ServerUnreachable, match="is it https://, not http://") as caught:
            await server.http.get("/x")
        assert asyncio.get_running_loop().time() - began < 6
        assert "look whether it was done" not in str(caught.value)
        with pytest.raises(ServerUnreachable, match="look whether it was done"):
            await server.http.post("/x", {})


def test_a_certificate_for_other_names() -> None:
    found = ssl.SSLCertVerificationError("no")
    found.verify_code, found.verify_message = 64, "IP address mismatch, certificate is not valid for '10.0.0.1'."
    assert "--name" in str(unreachable(parse("https://10.0.0.1", "key"), found))
    found.verify_code, found.verify_message = 19, "self-signed certificate in certificate chain"
    assert "SLOPLET_CA" in str(unreachable(parse("https://10.0.0.1", "key"), found))


def test_what_is_no_json() -> None:
    @play(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n<htm", b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\nno")
    async def _(server: Scripted) -> None:
        with pytest.raises(ServerError, match="JSON"):
            await server.http.get("/x")
        with pytest.raises(ServerError, match="500"):
            await server.http.get("/x")


def test_given_up() -> None:
    """A request that nobody waits for any more leaves no connection with half an answer."""

    @play()
    async def _(server: Scripted) -> None:
        server.answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await server.http.get("/x")
        assert await server.http.get("/x") == {"n": 2}
        assert server.connections == 2


# -- servers that would fill or stop this program ----------------------------------------------------------------------

NESTED = b"[" * 200_000


@pytest.mark.parametrize("body", [NESTED, b'{"a":' * 200_000])
def test_json_that_is_too_deep(body: bytes) -> None:
    @play(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    async def scenario(server: Scripted) -> None:
        with pytest.raises(ServerError, match="not JSON"):
            await server.http.get("/")


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "304 Not Modified"])
def test_nobody_is_followed_elsewhere(status: str) -> None:
    answer = f"HTTP/1.1 {status}\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n".encode()

    @play(answer, answer)
    async def scenario(server: Scripted) -> None:
        with pytest.raises(ServerError):
            await server.http.get("/a")
        with pytest.raises(ServerError):
            async with server.http.stream("GET", "/b"):
                pass
        assert [request.target for request in server.requests] == ["/a", "/b"]


def test_an_error_without_an_end() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = 0
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"accept-encoding: identity\r\n" in head.lower()
            writer.write(b"HTTP/1.1 500 No\r\ncontent-type: application/problem+json\r\n\r\n")
            while sent < 1 << 27:
                writer.write(b" " * 65536)
                await writer.drain()
                sent += 65536
        except ConnectionError:
            pass
        finally:
            writer.close()
            took.append(sent)

    took: list[int] = []

    async def main() -> None:
        server = await asyncio.start_server(endless, "127.0.0.1", 0)
        http = Http(parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key"), {})
        with pytest.raises(ServerError):
            async with http.stream("GET", "/"):
                pass
        await http.aclose()
        server.close()
        await server.wait_closed()
        while not took:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert took[0] < 1 << 26


def test_an_event_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloplet.remote.told._MOST_EVENT", 100_000)

    class Stream:
        def __init__(self, *pieces: bytes) -> None:
            self._pieces = pieces

        async def aiter_raw(self) -> AsyncIterator[bytes]:
            for piece in self._pieces:
                yield piece

    async def read(*pieces: bytes) -> list[Any]:
        return [each async for each in server_sent(lines_of(Stream(*pieces)))]  # type: ignore[arg-type]

    said = 'event: x\r\ndata: {"a": "\u2028"}\r\n\r\n: quiet\n\ndata: 2\n\n'.encode()
    for size in (1, 3, 1000):
        pieces = [said[at : at + size] for at in range(0, len(said), size)]
        assert asyncio.run(read(*pieces)) == [("x", {"a": "\u2028"}), ("message", 2)]
    line = b"data: " + b"1" * 1000 + b"\n"
    for endless in ([b"data: ", *[b"x" * 1000] * 200], [line] * 200, [b"data: " + NESTED[:90_000], b"\n\n"]):
        with pytest.raises(ServerError):
            asyncio.run(read(*endless))


@pytest.mark.parametrize(
    "hello",
    [
        {"session": "a b", "window": 1000, "grace": 1}, {"session": ["x"], "window": 1000, "grace": 1},
        {"session": "x", "window": float("inf"), "grace": 1}, {"session": "x&y", "window": 1000, "grace": 1},
    ],
)  # fmt: skip
def test_greetings_that_make_no_sense(hello: dict[str, Any]) -> None:
    async def main() -> None:
        with pytest.raises((ProtocolError, OverflowError)):
            Session(hello, lambda session, error: None)

    asyncio.run(main())


def test_what_a_server_says_is_not_believed_beyond_reason() -> None:
    lost: list[Any] = []

    async def main() -> None:
        said = {"session": "x", "window": 2**60, "grace": float("nan")}
        session = Session(said, lambda session, error: lost.append(error))
        assert session.bytes.window <= 8 << 20
        assert 0 <= session.grace <= 86400
        for text in ('{"ack": 1e999}', "[" * 200_000, '{"ack": -1}', '{"ack": 5e9}', "null"):
            session.on_text(text)

    asyncio.run(main())
    assert len(lost) == 5
    assert all(isinstance(error, ProtocolError) for error in lost)
