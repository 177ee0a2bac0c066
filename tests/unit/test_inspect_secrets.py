"""Requests that wait: what a program keeps back gets the values of the moment at which it is sent, and grows only so
far; and what follows a WebSocket's handshake."""

from __future__ import annotations

import asyncio

import pytest
from inspect_helpers import NAME, PLACE, VALUE, Spec, World, drain, echo, program_context, read_head, run, world

from sloplet.network.secrets import SecretTable

pytestmark = pytest.mark.anyone

P, V = PLACE.encode(), VALUE.encode()
POST = b"POST / HTTP/1.1\r\nHost: " + NAME.encode() + b"\r\nConnection: close\r\n"
NEW = b"the value of now"


def table(*where: str, value: str = VALUE) -> SecretTable:
    return SecretTable([Spec(where=where)], {"TOKEN": value})


async def until_seen(here: World, count: int = 1) -> None:
    """So many requests have been looked at."""
    while len(here.seen) < count:
        await asyncio.sleep(0.01)


_LENGTH = b"Content-Length: %d\r\n"
KEPT = {
    "head of a short body": (POST + b"X: " + P + b"\r\n" + _LENGTH % 5 + b"\r\n", b"hello"),
    "short body": (POST + _LENGTH % len(P) + b"\r\n" + P[:5], P[5:]),
    "chunked body": (
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"%x\r\n%b\r\n0\r\n\r\n" % (len(P), P),
    ),
    "long body": (POST + _LENGTH % (1 << 21) + b"\r\n" + P[:5], P[5:] + bytes((1 << 21) - len(P))),
}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("then", [None, NEW.decode()])
def test_a_value_that_was_taken_away_cannot_be_kept_in_a_request(kind: str, then: str | None) -> None:
    first, rest = KEPT[kind]

    async def main() -> None:
        log: list[bytes] = []
        secrets = table("headers", "body")
        async with world(echo(log), tls=True, secrets=secrets) as here:
            pipe = await here.open(program_context())
            await pipe.write(first)
            await until_seen(here)
            secrets.set({"TOKEN": then})
            await pipe.write(rest)
            try:
                got = await drain(pipe)
            except ConnectionError:
                got = b""
            pipe.abort()
            if then is None:
                assert "give it again" in here.refused[0]
                assert b"".join(log) == b""
            else:
                assert got.startswith(b"HTTP/1.1 200")
                assert NEW in log[0]
                assert V not in log[0]

    run(main())


def test_nor_behind_an_answer_that_is_waited_for() -> None:
    """A body that is held until it is asked for is asked for when the answers before it are there."""

    async def main() -> None:
        answered = asyncio.Event()
        heads: list[bytes] = []

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                heads.append(await read_head(reader))
                await answered.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        secrets = table("headers")
        async with world(handler, tls=True, secrets=secrets) as here:
            pipe = await here.open(program_context())
            await pipe.write(b"GET / HTTP/1.1\r\nHost: " + NAME.encode() + b"\r\n\r\n")
            await until_seen(here)
            await pipe.write(POST + b"X: " + P + b"\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
            await until_seen(here, 2)
            secrets.set({"TOKEN": None})
            answered.set()
            assert b"HTTP/1.1 100" in await pipe.reader.readuntil(b"100 Continue\r\n\r\n")
            await pipe.write(b"hi")
            assert b"give it again" in await drain(pipe)
            pipe.abort()
            assert len(heads) == 1

    run(main())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_nothing_but_placeholders_is_refused_before_it_is_large(chunked: bool) -> None:
    async def main() -> None:
        log: list[bytes] = []
        body = P * 1000  # 16 MB, if all of them became the value
        framing = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" if chunked else b"Content-Length: %d\r\n\r\n"
        async with world(echo(log), tls=True, secrets=table("body", value="v" * 16000)) as here:
            await here.say(
                POST + framing % len(body) + body + (b"\r\n0\r\n\r\n" if chunked else b""), program_context()
            )
            assert "would grow by more than" in here.refused[0]
            assert log == []

    run(main())


def test_frames_to_its_own_host_are_never_swapped() -> None:
    """What follows the handshake is no part of a request that `where` speaks of."""

    async def main() -> None:
        frames = bytearray()
        done = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await read_head(reader)
            assert b"X: " + V in head
            writer.write(b"HTTP/1.1 101 S\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
            frames.extend(await reader.readexactly(len(P) + 2))
            done.set()

        async with world(handler, tls=True, secrets=table("headers", "query", "body")) as here:
            pipe = await here.open(program_context())
            upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nX: " + P + b"\r\n\r\n"
            await pipe.write(b"GET / HTTP/1.1\r\nHost: " + NAME.encode() + b"\r\n" + upgrade)
            await pipe.reader.readuntil(b"\r\n\r\n")
            await pipe.write(b"\x81%c" % len(P) + P)
            await done.wait()
            pipe.abort()
            assert bytes(frames[2:]) == P
            assert here.refused == []

    run(main())
