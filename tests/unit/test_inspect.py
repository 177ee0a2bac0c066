"""Plain HTTP through ours: whatever HTTP/1 can do works, and no request for another host gets through."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest
from inspect_helpers import NAME, PLACE, Spec, Verdict, World, drain, echo, pair, read_head, run, world

from sloplet.network.guard import Guard
from sloplet.network.inspect import check_http
from sloplet.network.secrets import SecretTable

pytestmark = pytest.mark.anyone

HOST = b"Host: " + NAME.encode() + b"\r\n"
GET = b"GET /one HTTP/1.1\r\n" + HOST + b"\r\n"


def says(*parts: bytes, log: list[bytes] | None = None) -> Callable[..., Awaitable[None]]:
    """A server that answers one request with these bytes and closes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await read_head(reader)
        if log is not None:
            log.append(head)
        for part in parts:
            writer.write(part)
            await writer.drain()

    return handler


def test_requests_one_after_the_other_and_all_at_once() -> None:
    async def main() -> None:
        log: list[bytes] = []
        async with world(echo(log)) as here:
            asked = [b"GET /%d HTTP/1.1\r\n%bX-N: %d\r\n\r\n" % (n, HOST, n) for n in range(100)]
            got = await here.say(b"".join(asked))
            assert log == asked
            assert got.count(b"HTTP/1.1 200 OK") == 100
            assert [got.index(b"X-N: %d\r" % n) for n in range(100)] == sorted(
                got.index(b"X-N: %d\r" % n) for n in range(100)
            )
            pipe = await here.open()
            for n in range(3):
                await pipe.write(asked[n])
                assert await pipe.reader.readuntil(b"X-N: %d\r\n\r\n" % n)
            pipe.abort()
            assert here.refused == []
            assert here.seen[:2] == [("GET", "/0"), ("GET", "/1")]

    run(main())


@pytest.mark.parametrize(
    "second",
    [
        b"GET /two HTTP/1.1\r\nHost: evil.test\r\n\r\n", b"GET http://evil.test/two HTTP/1.1\r\n" + HOST + b"\r\n",
        b"CONNECT evil.test:443 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /two HTTP/1.1\r\n" + HOST + b"Host: evil.test\r\n\r\n",
        b"GET /two HTTP/1.1\r\n" + HOST + b" folded: two\r\n\r\n", b"GET /two HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\ntwo",
        b"GET /two HTTP/1.0\r\n\r\n", b"GET /two\r\n\r\n", b"get /two HTTP/1.1\r\n" + HOST + b"\r\n",
        b"POST /two HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /two HTTP/1.1\nHost: evil.test\n\n",
    ],
)  # fmt: skip
def test_a_later_request_that_is_refused_does_not_reach_the_server(second: bytes) -> None:
    async def main() -> None:
        log: list[bytes] = []
        async with world(echo(log)) as here:
            got = await here.say(GET + second)
            assert log == [GET]
            first, _, rest = got.partition(GET)
            assert first.startswith(b"HTTP/1.1 200 OK")
            assert rest.startswith(b"HTTP/1.1 403 Forbidden\r\n")
            assert b"\r\nX-Sloplet-Denied: 1\r\n" in rest
            assert len(here.refused) == 1
            assert here.refused[0].encode() in rest
            assert (await here.say(second)).startswith(b"HTTP/1.1 403")
            assert log == [GET]

    run(main())


@pytest.mark.parametrize("last", [GET.replace(HOST, HOST + b"Connection: close\r\n"), GET.replace(b"1.1", b"1.0")])
def test_nothing_follows_a_last_request(last: bytes) -> None:
    async def main() -> None:
        got: list[bytes] = []

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_head(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            got.append(await reader.read())

        async with world(handler) as here:
            assert (await here.say(last + GET)).startswith(b"HTTP/1.1 200")
            assert got == [b""]

    run(main())


def test_smuggled_requests_stay_bodies() -> None:
    """What hides in a body is forwarded as one, in the only framing that the server is told."""

    async def main() -> None:
        log: list[bytes] = []
        hidden = b"GET /two HTTP/1.1\r\nHost: evil.test\r\n\r\n"
        async with world(echo(log)) as here:
            await here.say(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(hidden) + hidden)
            chunked = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
            await here.say(chunked + b"%x;ext=1\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden))
            assert len(log) == 2
            assert log[0].endswith(b"\r\n\r\n" + hidden)
            assert log[1].endswith(b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden))

    run(main())


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (GET, b"HTTP/1.1 204 No Content\r\nX: y\r\n\r\n"),
        (GET, b"HTTP/1.1 304 Not Modified\r\nContent-Length: 500\r\n\r\n"),
        (GET.replace(b"GET", b"HEAD"), b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"),
        (GET.replace(b"GET", b"HEAD"), b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        (GET, b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
        (GET, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-T: 1\r\n\r\n"),
        (GET, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        (GET, b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end"),
        (b"GET / HTTP/1.0\r\n" + HOST + b"\r\n", b"HTTP/1.0 200 OK\r\n\r\nuntil the end"),
        (GET, b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n\r\n"),
    ],
)
def test_answers_of_all_kinds_come_as_they_were(asked: bytes, answer: bytes) -> None:
    async def main() -> None:
        async with world(says(answer)) as here:
            assert await here.say(asked) == answer
            assert here.refused == []
        async with world(says(*(answer[n : n + 1] for n in range(len(answer))))) as here:
            if b"chunked" not in answer:  # each piece would be a chunk
                assert await here.say(asked) == answer

    run(main())


def test_old_programs_get_no_interim_answers() -> None:
    async def main() -> None:
        async with world(says(b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")) as here:
            got = await here.say(b"GET / HTTP/1.0\r\n" + HOST + b"\r\n")
            assert got.startswith(b"HTTP/1.1 200")

    run(main())


def test_a_server_that_speaks_unasked_is_heard_once() -> None:
    async def main() -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(
                b"HTTP/1.1 408 Too slow\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
            )
            await reader.read()

        async with world(handler) as here:
            pipe = await here.open()
            assert await drain(pipe) == b"HTTP/1.1 408 Too slow\r\nContent-Length: 0\r\n\r\n"
            pipe.abort()

    run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\n A: b\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\n\r\n", b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    ],
)  # fmt: skip
def test_a_server_that_speaks_no_http_is_told_in_words(answer: bytes) -> None:
    async def main() -> None:
        async with world(says(answer)) as here:
            assert (await here.say(GET)).startswith(b"HTTP/1.1 502 Bad Gateway")
            assert len(here.refused) == 1

    run(main())


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf",
     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhalf", b"HTTP/1.1 200 OK\r\nConte"],
)  # fmt: skip
def test_an_answer_that_is_cut_is_not_made_whole(answer: bytes) -> None:
    async def main() -> None:
        async with world(says(answer)) as here:
            assert (await here.say(GET)).endswith(b"<RESET>")
            assert here.ends == ["Cut"]

    run(main())


@pytest.mark.parametrize("expect", [b"100-continue", b"100-Continue, something-else"])
def test_who_waits_for_continue_is_told_here(expect: bytes) -> None:
    """A server that is asked could answer at once, and then take the body for a request."""
    heads = []

    async def main() -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await read_head(reader))
            body = await reader.readexactly(4)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n" + body)

        async with world(handler) as here:
            pipe = await here.open()
            await pipe.write(b"PUT / HTTP/1.1\r\n" + HOST + b"Expect: " + expect + b"\r\nContent-Length: 4\r\n\r\n")
            assert await pipe.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await pipe.write(b"body")
            assert (await drain(pipe)).endswith(b"\r\n\r\nbody")
            assert b"expect" not in heads[0].lower()
            pipe.abort()

    run(main())


@pytest.mark.parametrize("piece", [b"", b"GET /hidden HTTP/1.1\r\nHost: oth"])
def test_nothing_follows_an_answer_that_came_too_early(piece: bytes) -> None:
    """A server that did not read a body takes it for the next request: it does not get to answer that one."""
    body = b"GET /hidden HTTP/1.1\r\nHost: other.example\r\n\r\n"

    async def main() -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_head(reader)
            writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 2\r\n\r\nno")
            await read_head(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhidden")

        async with world(handler) as here:
            pipe = await here.open()
            await pipe.write(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(body) + piece)
            head = await pipe.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 401")
            assert b"\r\nConnection: close\r\n" in head
            try:
                await pipe.write(body[len(piece) :])
                assert await drain(pipe) == b"no"
            except ConnectionError:
                pass
            pipe.abort()

    run(main())


def test_trailers_of_a_request_go_no_further() -> None:
    """Servers that take them for headers would see what nobody has judged."""
    got = []

    async def main() -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            got.append(await read_head(reader) + await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Sum: 1\r\n\r\n")

        async with world(handler) as here:
            chunked = b"Trailer: X-Original-URL\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"
            answer = await here.say(b"PUT / HTTP/1.1\r\n" + HOST + chunked + b"X-Original-URL: /admin\r\n\r\n")
            assert answer.endswith(b"0\r\nX-Sum: 1\r\n\r\n"), "a server's are nobody's danger"
            assert got[0].endswith(b"5\r\nhello\r\n0\r\n\r\n")
            assert b"original-url" not in got[0].lower()

    run(main())


def test_an_early_answer_reaches_a_program_that_still_sends() -> None:
    async def main() -> None:
        async with world(says(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")) as here:
            pipe = await here.open()
            await pipe.write(b"PUT / HTTP/1.1\r\n" + HOST + b"Content-Length: 10000000\r\n\r\n" + b"x" * 100_000)
            assert (await pipe.reader.readuntil(b"no")).startswith(b"HTTP/1.1 413")
            pipe.abort()

    run(main())


def test_a_program_that_leaves_takes_the_server_along() -> None:
    async def main() -> None:
        gone = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_head(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
            try:
                while True:
                    writer.write(b"x" * 65536)
                    await writer.drain()
            finally:
                gone.set()

        async with world(handler) as here:
            pipe = await here.open()
            await pipe.write(GET)
            await pipe.reader.readexactly(100_000)
            pipe.abort()
            await gone.wait()
            await here.idle.wait()
            assert here.ends[0] != ""

    run(main())


def test_it_can_be_cancelled_anywhere() -> None:
    async def main() -> None:
        for sent in (b"", b"GET /", GET, GET + b"GET", b"PUT / HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\nab"):
            program, client = await pair()
            server, far = await pair()
            await program.write(sent)
            serving = asyncio.create_task(check_http(client, server, Guard(NAME, 80)))
            for _ in range(20):
                await asyncio.sleep(0)
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
            assert await drain(program) == b""
            far.abort()

    run(main())


# -- WebSocket --------------------------------------------------------------------------

UPGRADE = b"GET /ws HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n\r\n"
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"


async def talk(here: World) -> None:
    """Both sides say things after the switch that are no HTTP at all."""
    pipe = await here.open()
    await pipe.write(UPGRADE)
    assert await pipe.reader.readuntil(b"\r\n\r\n") == SWITCHED
    assert await pipe.reader.readexactly(5) == b"\x81\x03abc"
    for _ in range(3):
        await pipe.write(b"\x81\x82\0\n\r\0hi")
        assert await pipe.reader.readexactly(8) == b"\x81\x82\0\n\r\0hi"
    await pipe.end()
    assert await drain(pipe) == b"bye"
    pipe.abort()


async def websocket(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await read_head(reader)
    assert b"Connection: Upgrade\r\n" in head
    writer.write(SWITCHED + b"\x81\x03abc")
    while data := await reader.read(100):
        writer.write(data)
        await writer.drain()
    writer.write(b"bye")


def test_websocket() -> None:
    async def main() -> None:
        async with world(websocket) as here:
            await talk(here)

    run(main())


def test_a_switch_that_the_server_declines_changes_nothing() -> None:
    async def main() -> None:
        log: list[bytes] = []
        async with world(echo(log)) as here:
            got = await here.say(UPGRADE + GET + b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n")
            assert log == [UPGRADE, GET]
            assert b"403 Forbidden" in got

    run(main())


def test_after_a_switch_placeholders_are_refused_too() -> None:
    async def main() -> None:
        async with world(websocket, secrets=SecretTable([Spec()])) as here:
            pipe = await here.open()
            await pipe.write(UPGRADE)
            await pipe.reader.readexactly(len(SWITCHED) + 5)
            await pipe.write(PLACE[:10].encode())
            assert await pipe.reader.readexactly(10) == PLACE[:10].encode()
            await pipe.write(PLACE[10:].encode())
            with pytest.raises(ConnectionError):
                await drain(pipe)
            assert "TOKEN" in here.refused[0]

    run(main())


# -- rules ------------------------------------------------------------------------------


def test_methods_and_paths_are_judged_on_every_request() -> None:
    def judge(method: str, path: str) -> Verdict:
        return Verdict(method == "GET" and path.startswith("/ok"), f"{method} {path} is not for you")

    async def main() -> None:
        log: list[bytes] = []
        async with world(echo(log), judge=judge) as here:
            good = b"GET /ok/%61?x=/../ HTTP/1.1\r\n" + HOST + b"\r\n"
            for bad in (
                b"GET /bad HTTP/1.1\r\n", b"POST /ok HTTP/1.1\r\n", b"GET /ok/../bad HTTP/1.1\r\n",
                b"GET /ok/%2e%2e/bad HTTP/1.1\r\n",
                b"GET /ok%2f..%2fbad HTTP/1.1\r\n", b"GET //ok HTTP/1.1\r\n", b"GET /ok\\..\\bad HTTP/1.1\r\n",
                b"GET /ok/..;/bad HTTP/1.1\r\n",
                b"GET /ok HTTP/1.1\r\nX-HTTP-Method-Override: DELETE\r\n", b"OPTIONS * HTTP/1.1\r\n",
            ):  # fmt: skip
                log.clear()
                got = await here.say(good + bad + HOST + b"\r\n")
                assert log == [good], bad
                assert b"403 Forbidden" in got
            assert "POST /ok is not for you" in here.refused
            assert ("GET", "/ok/a") in here.seen
        async with world(echo(log), judge=lambda *_: Verdict(None)) as here:  # undecided is not allowed
            assert (await here.say(GET)).startswith(b"HTTP/1.1 403")
        odd = b"GET //a/../b;c HTTP/1.1\r\nX-HTTP-Method: PUT\r\n" + HOST + b"\r\n"
        async with world(echo(log)) as here:  # no rules about paths: servers may have their own ideas
            assert (await here.say(odd)).startswith(b"HTTP/1.1 200")
        async with world(echo(log), judge=lambda *_: Verdict(True), strict=False) as here:
            assert (await here.say(odd)).startswith(b"HTTP/1.1 200")
        async with world(echo(log), judge=lambda *_: Verdict(True)) as here:
            assert (await here.say(odd)).startswith(b"HTTP/1.1 403")

    run(main())


# -- placeholders without TLS -----------------------------------------------------------


def test_a_placeholder_in_the_head_never_leaves() -> None:
    async def main() -> None:
        log: list[bytes] = []
        async with world(echo(log), secrets=SecretTable([Spec()], {"TOKEN": "value-of-it"})) as here:
            got = await here.say(
                b"GET / HTTP/1.1\r\n" + HOST + b"Authorization: Bearer " + PLACE.encode() + b"\r\n\r\n"
            )
            assert got.startswith(b"HTTP/1.1 403")
            assert "without TLS" in here.refused[0]
            assert log == []

    run(main())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_placeholder_in_a_body_is_never_whole_at_the_server(chunked: bool) -> None:
    async def main() -> None:
        got = bytearray()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1000):
                got.extend(data)

        async with world(handler, secrets=SecretTable([Spec()])) as here:
            pipe = await here.open()
            framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 100000"
            await pipe.write(b"POST / HTTP/1.1\r\n" + HOST + framing + b"\r\n\r\n")
            for letter in PLACE.encode():
                await pipe.write(b"1\r\n%c\r\n" % letter if chunked else b"%c" % letter)
                await asyncio.sleep(0)
            assert (await drain(pipe)).startswith(b"HTTP/1.1 403")
            pipe.abort()
            await here.idle.wait()
        assert PLACE.encode() not in bytes(got).replace(b"\r\n1\r\n", b"")

    run(main())


# -- much -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_download_to_a_slow_reader_stays_small_in_memory(chunked: bool) -> None:
    size = 64 * 2**20
    sent = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_head(reader)
        framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n")
        piece = b"x" * 65536
        for _ in range(size // len(piece)):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
            sent += len(piece)
        writer.write(b"0\r\n\r\n" if chunked else b"")

    async def main() -> None:
        async with world(handler) as here:
            pipe = await here.open()
            await pipe.write(GET)
            before = -1
            while before != sent:  # until nothing moves any more
                before = sent
                for _ in range(300):
                    await asyncio.sleep(0)
            assert 0 < sent < 16 * 2**20  # the kernel's buffers, on three connections
            tracemalloc.start()
            got = 0
            await pipe.reader.readuntil(b"\r\n\r\n")
            while not pipe.reader.at_eof() and got < size:
                got += len(await pipe.read())
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert got >= size
            assert peak < 4 * 2**20
            pipe.abort()

    run(main())


def test_a_large_upload() -> None:
    async def main() -> None:
        size = 32 * 2**20
        got = 0

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal got
            await read_head(reader)
            while got < size:
                got += len(await reader.read(65536))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        async with world(handler) as here:
            pipe = await here.open()
            await pipe.write(b"PUT / HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % size)
            for _ in range(size // 65536):
                await pipe.write(b"y" * 65536)
            assert (await drain(pipe)).endswith(b"ok")
            assert got == size
            pipe.abort()

    run(main())
