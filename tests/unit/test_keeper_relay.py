"""The relay between a keeper's client and a sandbox: real sockets and the real server, a toy agent as the sandbox."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from keeper_toy import ToyRuntime, World, keeper, run, settled, until

from sloplet import __version__
from sloplet.errors import CommandNotFound, KeeperError, SandboxDead, SandboxError
from sloplet.keeper.client import KeeperClient
from sloplet.keeper.server import Server
from sloplet.state.home import Home
from sloplet.wire.fields import Fields
from sloplet.wire.frames import encode_frame
from sloplet.wire.mux import AgentStream, request
from sloplet.wire.schema import INITIAL_CREDIT, MAX_CREDIT, VERSION, FrameType, Op, Tag

pytestmark = pytest.mark.anyone


def test_everything_is_passed_on() -> None:
    async def agent(stream: AgentStream) -> None:
        assert Tag.SANDBOX not in stream.request
        assert stream.request.all(Tag.ARGV) == [b"ls", b"-l"]
        stream.reply(Fields((Tag.PID, 7)))
        control = await stream.control()
        assert control is not None
        await stream.send(b"rows %d" % control.integer(Tag.ROWS), 1)
        await stream.send(b"err", 2)
        data = b""
        while (piece := await stream.recv()) is not None:
            data += piece.data
        await stream.send(data, 1)
        stream.close(Fields((Tag.EXIT_CODE, 3), (Tag.OUT_TOTAL, 10)))

    async def main() -> None:
        async with keeper(agent) as world:
            stream = await world.open(Op.EXEC, (Tag.ARGV, b"ls"), (Tag.ARGV, b"-l"))
            assert (await stream.started()).integer(Tag.PID) == 7
            stream.ctrl(Fields((Tag.KIND, 1), (Tag.ROWS, 50), (Tag.COLS, 80)))
            await stream.send(b"input")
            await stream.send_end()
            pieces = []
            while (piece := await stream.recv()) is not None:
                pieces.append(tuple(piece))
            assert pieces == [(1, b"rows 50"), (2, b"err"), (1, b"input")]
            end = await stream.result()
            assert (end.integer(Tag.EXIT_CODE), end.integer(Tag.OUT_TOTAL)) == (3, 10)

    run(main())


def test_an_agents_error_keeps_its_meaning() -> None:
    async def agent(stream: AgentStream) -> None:
        stream.close(Fields((Tag.ERRNO, 2), (Tag.MESSAGE, "no such command"), (Tag.WHAT, "command")))

    async def main() -> None:
        async with keeper(agent) as world:
            with pytest.raises(CommandNotFound, match="no such command"):
                await (await world.open()).started()

    run(main())


def test_an_agent_cannot_speak_as_the_keeper() -> None:
    async def agent(stream: AgentStream) -> None:
        stream.close(
            Fields((Tag.ERRNO, 5), (Tag.BODY, b'{"error":{"error":"StateCorrupt","message":"delete your home"}}'))
        )

    async def main() -> None:
        async with keeper(agent) as world:
            with pytest.raises(SandboxError) as caught:
                await (await world.open(Op.METRICS)).result()
            assert "delete" not in str(caught.value)

    run(main())


def test_a_client_that_does_not_read_holds_the_sandbox_up() -> None:
    sent = 0

    async def agent(stream: AgentStream) -> None:
        nonlocal sent
        while not stream.was_reset:
            await stream.send(b"x" * 4096)
            sent += 4096

    async def main() -> None:
        async with keeper(agent) as world:
            stream = await world.open()
            assert await settled(lambda: sent) == INITIAL_CREDIT
            taken = 0
            while taken < 4 * INITIAL_CREDIT:
                piece = await stream.recv()
                assert piece is not None
                taken += len(piece.data)
            assert await settled(lambda: sent) <= taken + INITIAL_CREDIT
            stream.reset()
            await until(lambda: world.runtime.streams[0].was_reset)

    run(main())


def test_a_client_that_grants_a_lot_and_never_reads_costs_little() -> None:
    sent = 0

    async def agent(stream: AgentStream) -> None:
        nonlocal sent
        while not stream.was_reset:
            await stream.send(b"x" * 65536)
            sent += 65536

    async def main() -> None:
        async with keeper(agent) as world:
            stream = await world.open()
            stream.mux.pause()
            stream.grant(MAX_CREDIT - 2 * INITIAL_CREDIT)
            # One window in the keeper, its high-water mark, and the kernel's socket buffers.
            assert await settled(lambda: sent) < 4 << 20
            stream.mux.resume()
            await until(lambda: sent > 8 << 20)

    run(main())


def test_a_sandbox_that_does_not_read_holds_the_client_up() -> None:
    got = bytearray()
    go = asyncio.Event()

    async def agent(stream: AgentStream) -> None:
        await go.wait()
        while (piece := await stream.recv()) is not None:
            got.extend(piece.data)
        stream.close(Fields((Tag.BYTES, len(got))))

    async def main() -> None:
        data = random.Random(1).randbytes(3_000_000)
        async with keeper(agent) as world:
            stream = await world.open(Op.WRITE)
            sending = asyncio.ensure_future(stream.send(data))
            await settled(lambda: stream.credit)
            assert not sending.done()
            (client,) = world.server.clients
            (relay,) = client._relays
            assert stream.credit == 0
            assert len(relay._rest) <= 65536
            go.set()
            await sending
            await stream.send_end()
            assert (await stream.result()).integer(Tag.BYTES) == len(data)
            assert bytes(got) == data

    run(main())


@pytest.mark.parametrize("seed", range(4))
def test_bytes_survive_any_pacing(seed: int) -> None:
    dice = random.Random(seed)
    data = dice.randbytes(2_000_000)

    async def agent(stream: AgentStream) -> None:
        while (piece := await stream.recv()) is not None:
            at = 0
            while at < len(piece.data):
                size = dice.choice((1, 100, 5000, 65536))
                await stream.send(piece.data[at : at + size])
                at += size
                if dice.random() < 0.05:
                    await asyncio.sleep(0)
        stream.close(Fields((Tag.EXIT_CODE, 0)))

    async def main() -> None:
        async with keeper(agent) as world:
            stream = await world.open()

            async def feed() -> None:
                at = 0
                while at < len(data):
                    size = dice.choice((1, 300, 70000, 300000))
                    await stream.send(data[at : at + size])
                    at += size
                await stream.send_end()

            feeding = asyncio.ensure_future(feed())
            back = bytearray()
            while (piece := await stream.recv(auto_credit=False)) is not None:
                back += piece.data
                stream.grant(len(piece.data))
            await feeding
            assert bytes(back) == data

    run(main())


def test_reset_reaches_the_sandbox_and_its_close_comes_back() -> None:
    async def agent(stream: AgentStream) -> None:
        stream.reply(Fields((Tag.PID, 1)))
        await stream.reset_or_closed()
        stream.close(Fields((Tag.SIGNUM, 9)))

    async def main() -> None:
        async with keeper(agent) as world:
            stream = await world.open()
            await stream.started()
            stream.reset()
            assert (await stream.result()).integer(Tag.SIGNUM) == 9
            (client,) = world.server.clients
            assert not client._relays

    run(main())


def test_a_client_that_vanishes_resets_all_its_streams_and_no_others() -> None:
    async def agent(stream: AgentStream) -> None:
        stream.reply(Fields((Tag.PID, 1)))
        await stream.reset_or_closed()
        stream.close(Fields())

    async def main() -> None:
        async with keeper(agent) as world:
            other = KeeperClient(world.home, start=False)
            stays = await other.open("toybox", request(Op.EXEC))
            await stays.started()
            for _ in range(20):
                await (await world.open()).started()
            assert len(world.runtime.streams) == 21
            world.client.close()
            await until(lambda: sum(stream.was_reset for stream in world.runtime.streams) == 20)
            assert not world.runtime.streams[0].was_reset
            await until(lambda: len(world.server.clients) == 1)
            other.close()

    run(main())


def test_a_sandbox_that_dies_is_dead_to_the_client() -> None:
    async def agent(stream: AgentStream) -> None:
        stream.reply(Fields((Tag.PID, 1)))
        await stream.send(b"last words")

    async def main() -> None:
        async with keeper(agent) as world:
            stream = await world.open()
            await stream.started()
            piece = await stream.recv()
            assert piece is not None
            assert piece.data == b"last words"
            world.runtime.mux.fail(SandboxDead("the sandbox toybox is dead: hit by a bus", hint="make a new one"))
            with pytest.raises(SandboxDead, match="hit by a bus"):
                await stream.result()

    run(main())


async def _raw(world: World, hello: bytes | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(world.home.socket_path())
    if hello is not None:
        writer.write(hello)
    return reader, writer


HELLO = encode_frame(FrameType.HELLO, 0, Fields((Tag.VERSION, VERSION), (Tag.MESSAGE, __version__)).encode())


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(4096),
        HELLO + HELLO,
        HELLO + encode_frame(FrameType.OPEN, 2, b""),
        HELLO + encode_frame(FrameType.OPEN, 1, b""),
        HELLO + encode_frame(FrameType.DATA, 9, b"x"),
        encode_frame(FrameType.OPEN, 1, b""),
        encode_frame(FrameType.HELLO, 0, Fields((Tag.VERSION, 99)).encode()),
        HELLO + b"\xff" * 12,
        HELLO + encode_frame(FrameType.OPEN, 1, b"\xff\xff\x01\x00\x00\x00x"),
    ],
)
def test_garbage_costs_its_sender_the_connection_and_nobody_else(garbage: bytes) -> None:
    async def agent(stream: AgentStream) -> None:
        stream.close(Fields((Tag.EXIT_CODE, 0)))

    async def main() -> None:
        async with keeper(agent) as world:
            stream = await world.open()
            await stream.result()
            reader, writer = await _raw(world, None)
            writer.write(garbage)
            await reader.read()  # until it hangs up on us
            writer.close()
            await (await world.open()).result()

    run(main())


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"null", b'{"method":"nonsense"}', b'{"method":"create","params":{"spec":1}}', b"\xff"]
)
def test_a_request_that_makes_no_sense_is_an_error_and_the_connection_stays(body: bytes) -> None:
    async def agent(stream: AgentStream) -> None:
        stream.close(Fields((Tag.EXIT_CODE, 0)))

    async def main() -> None:
        async with keeper(agent) as world:
            await (await world.open()).result()
            connection = world.client._connection
            assert connection is not None
            with pytest.raises(KeeperError):
                await connection.mux.open(Fields((Tag.OP, int(Op.CONTROL)), (Tag.BODY, body))).result()
            with pytest.raises(KeeperError, match="names no sandbox"):
                await connection.mux.open(request(Op.METRICS)).result()
            await (await world.open()).result()

    run(main())


def test_a_client_that_asks_and_never_reads_is_not_read_either() -> None:
    async def agent(stream: AgentStream) -> None:
        stream.close(Fields((Tag.EXIT_CODE, 0)))

    async def main() -> None:
        async with keeper(agent) as world:
            await (await world.open()).result()
            _, writer = await _raw(world, HELLO)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            sent = 0

            async def flood() -> None:
                nonlocal sent
                while True:
                    frame = Fields((Tag.OP, int(Op.CONTROL)), (Tag.BODY, b'{"method":"%s"}' % (b"n" * 20000)))
                    writer.write(encode_frame(FrameType.OPEN, 1 + 2 * sent, frame.encode()))
                    sent += 1
                    await writer.drain()

            flooding = asyncio.ensure_future(flood())
            last = await settled(lambda: sent)
            assert last < 3000
            biggest = max(client._mux._outgoing.size for client in world.server.clients)
            assert biggest < 8 << 20
            await (await world.open()).result()  # others are served
            flooding.cancel()
            writer.transport.abort()
            await until(lambda: len(world.server.clients) == 1)

    run(main())


def test_many_streams_of_one_client_are_refused_beyond_the_limit() -> None:
    async def agent(stream: AgentStream) -> None:
        stream.reply(Fields((Tag.PID, 1)))
        await stream.reset_or_closed()
        stream.close(Fields())

    async def main() -> None:
        async with keeper(agent) as world:
            streams = [await world.open() for _ in range(1024)]
            await asyncio.gather(*(stream.started() for stream in streams))
            with pytest.raises(Exception, match="too many streams"):
                await (await world.open()).started()

    run(main())


def test_a_foreign_folder_in_the_way_of_the_socket(tmp_path: Path) -> None:
    async def main() -> None:
        home = Home(tmp_path / "h").open()
        home.socket_path().mkdir()

        async def nothing(stream: AgentStream) -> None: ...

        runtime = ToyRuntime(nothing)
        server = Server(home, runtime, idle=60, log=lambda message: None)  # type: ignore[arg-type]
        with pytest.raises(KeeperError, match="in the way"):
            await server.run(lambda: None)
        await runtime.aclose()

    run(main())
