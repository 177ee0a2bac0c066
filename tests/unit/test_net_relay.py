"""Bytes between a program and a socket: half closes, resets, credit, and memory that does not grow."""

from __future__ import annotations

import asyncio
import errno
import socket
import tracemalloc

import pytest
from net_inside import Inside, World, echo, with_world

from sloplet.errors import WireClosed
from sloplet.netspec import Network
from sloplet.wire.schema import INITIAL_CREDIT

pytestmark = pytest.mark.anyone

PUBLIC = "93.184.216.34"
ALLOWED = Network(allow=["a.example.com:7000"])


def test_a_half_close_goes_both_ways() -> None:
    async def scenario(world: World) -> None:
        seen = asyncio.Event()

        async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            got = await reader.read()  # to the end
            seen.set()
            writer.write(b"you said " + got)
            await writer.drain()
            writer.close()

        async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write_eof()
            writer.close() if await reader.read() == b"\x00still" else None

        await world.serve(PUBLIC, 7000, late, "a.example.com")
        inside = await Inside(ALLOWED, world).hello()
        program = await inside.connect("a.example.com", 7000)
        await program.send(b"\x00words")
        await program.end()
        await asyncio.wait_for(seen.wait(), 5)
        assert await program.recv(100) == b"you said \x00words"
        assert await program.over() == 0
        await world.serve(PUBLIC, 7000, early)
        program = await inside.connect("a.example.com", 7000)
        await program.until(lambda: program.ended)
        assert program.closed is None
        await program.send(b"\x00still")
        await program.end()
        assert await program.over() == 0
        await inside.close()

    with_world(scenario)


def test_a_reset_from_inside_is_a_reset_outside() -> None:
    async def scenario(world: World) -> None:
        error: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

        async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await reader.read(1000):
                    pass
                error.set_result(EOFError())
            except OSError as failure:
                error.set_result(failure)
            finally:
                writer.close()

        await world.serve(PUBLIC, 7000, watch, "a.example.com")
        inside = await Inside(ALLOWED, world).hello()
        program = await inside.connect("a.example.com", 7000)
        await program.send(b"\x00")
        await program.reset()
        assert isinstance(await error, ConnectionResetError)
        assert await program.over() == errno.ECONNRESET
        await inside.close()

    with_world(scenario)


def test_a_reset_outside_is_a_reset_inside() -> None:
    async def scenario(world: World) -> None:
        async def slam(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()

        await world.serve(PUBLIC, 7000, slam, "a.example.com")
        inside = await Inside(ALLOWED, world).hello()
        program = await inside.connect("a.example.com", 7000)
        await program.send(b"\x00go")
        assert await program.over() == errno.ECONNRESET
        assert inside.last().verdict == "allow"
        await inside.close()

    with_world(scenario)


def test_the_end_of_the_sandbox_ends_its_connections() -> None:
    async def scenario(world: World) -> None:
        gone = asyncio.Event()

        async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.read()
            except OSError:
                pass
            gone.set()
            writer.close()

        await world.serve(PUBLIC, 7000, watch, "a.example.com")
        inside = await Inside(ALLOWED, world).hello()
        await inside.connect("a.example.com", 7000)
        inside.mux.fail(WireClosed("it has ended"))
        await gone.wait()
        assert inside.egress.open == 0
        assert inside.last().state == "done"
        await inside.close()

    with_world(scenario)


def test_a_lot_goes_through_unchanged() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "a.example.com")
        inside = await Inside(ALLOWED, world).hello()
        program = await inside.connect("a.example.com", 7000)
        data = bytes(range(256)) * 20_000
        sending = asyncio.ensure_future(program.send(data))
        assert await program.recv(len(data)) == data
        await sending
        await program.end()
        assert await program.over() == 0
        assert (inside.last().bytes_out, inside.last().bytes_in) == (len(data), len(data))
        await inside.close()

    with_world(scenario)


def test_a_program_that_reads_slowly_costs_no_memory_here() -> None:
    async def scenario(world: World) -> None:
        async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    writer.write(bytes(65536))
                    await writer.drain()
            except OSError:
                writer.close()

        await world.serve(PUBLIC, 7000, flood, "a.example.com")
        inside = await Inside(ALLOWED, world).hello()
        programs = []
        for _ in range(20):
            program = await inside.connect("a.example.com", 7000)
            program.reads = False
            programs.append(program)
        for program in programs:
            await program.until(lambda program=program: len(program.got) == INITIAL_CREDIT)  # type: ignore[misc]
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(20):  # a little more is read, again and again
                for program in programs:
                    del program.got[:]
                    await program.grant(10_000)
                    await program.until(lambda program=program: len(program.got) == 10_000)  # type: ignore[misc]
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < 2 * 2**20
        assert not inside.mux.congested
        await inside.close()

    with_world(scenario)


def test_a_server_that_reads_slowly_stops_the_program() -> None:
    async def scenario(world: World) -> None:
        go_on = asyncio.Event()
        got = 0

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal got
            await go_on.wait()
            while data := await reader.read(65536):
                got += len(data)
            writer.close()

        await world.serve(PUBLIC, 7000, slow, "a.example.com")
        inside = await Inside(ALLOWED, world).hello()
        program = await inside.connect("a.example.com", 7000)
        size = 64 * 2**20
        sending = asyncio.ensure_future(program.send(bytes(size)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(sending), 0.5)
        assert inside.last().bytes_out < size
        go_on.set()
        await sending
        await program.end()
        assert await program.over() == 0
        assert got == size
        await inside.close()

    with_world(scenario)


def test_two_hundred_at_once() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "a.example.com")
        inside = await Inside(ALLOWED, world).hello()

        async def one(number: int) -> None:
            program = await inside.connect("a.example.com", 7000)
            words = b"\x00" + str(number).encode() * 1000
            await program.send(words)
            assert await program.recv(len(words)) == words
            await program.end()
            assert await program.over() == 0

        await asyncio.gather(*(one(number) for number in range(200)))
        assert inside.egress.open == 0
        assert len(inside.log.read()) == 200
        assert len(world.asked) == 1
        await inside.close()

    with_world(scenario)
