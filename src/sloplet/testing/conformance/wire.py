"""Conformance: what docs/wire.md promises beyond what Sandbox shows."""

from __future__ import annotations

import asyncio
import errno

import pytest

from ...controller import Stream
from ...errors import FileError, ProcessNotFound, SandboxError, SlopletError
from ...sync import Sandbox
from ...wire.fields import Fields
from ...wire.mux import request
from ...wire.schema import INITIAL_CREDIT, Op, SignalFlag, Tag
from .support import gone, inner, read_until, run_async, wait_ended


async def _answer(box: Sandbox, fields: Fields) -> Fields:
    stream = await inner(box)._open(fields)
    try:
        return await stream.result()
    finally:
        stream.reset()


async def _output(stream: Stream) -> bytes:
    found = b""
    while (piece := await stream.recv()) is not None:
        found += piece.data
    await stream.result()
    return found


def _failure(box: Sandbox) -> SlopletError:
    """How commands fail, once they do."""
    while True:
        try:
            box.run("true")
        except SlopletError as error:
            return error


class TestWire:
    def test_unknown_operations_are_refused(self, box: Sandbox) -> None:
        for number in (0, 6, 77, 2**40, -1):
            with pytest.raises(SlopletError):
                run_async(_answer(box, Fields((Tag.OP, number))))
        assert box.run("echo alive").ok

    def test_unknown_fields_are_refused(self, box: Sandbox) -> None:
        with pytest.raises(FileError) as caught:
            run_async(_answer(box, request(Op.STAT, (Tag.PATH, "."), (Tag.SIGNUM, 9))))
        assert caught.value.errno == errno.EPROTO
        with pytest.raises(SlopletError):
            run_async(_answer(box, request(Op.EXEC, (Tag.ARGV, "true"), (Tag.PATH, "x"))))
        with pytest.raises(SlopletError):
            run_async(_answer(box, request(Op.STAT)))
        with pytest.raises(SlopletError):
            run_async(_answer(box, request(Op.EXEC)))
        assert box.run("echo alive").ok

    def test_following_from_an_offset(self, box: Sandbox) -> None:
        process = box.spawn("seq 1 1000", detached=True)
        whole = process.wait().stdout_raw

        async def scenario() -> None:
            for offset in (0, 1, 1000, len(whole) - 1, len(whole)):
                stream = await inner(box)._open(request(Op.ATTACH, (Tag.PID, process.pid), (Tag.FROM_OUT, offset)))
                assert (await stream.started()).integer(Tag.OFFSET_OUT) == offset
                assert await _output(stream) == whole[offset:]

        run_async(scenario())

    def test_offsets_tell_what_is_lost(self, box: Sandbox) -> None:
        process = box.spawn("seq 1 150000", detached=True)
        process.detach()
        size = wait_ended(box, process.pid).stdout_size
        follower = box.attach(process.pid)
        result = follower.wait()
        assert follower.offsets[0] == size - len(result.stdout_raw) > 0

    def test_forgetting_a_process(self, box: Sandbox) -> None:
        process = box.spawn("sleep 1000")
        with pytest.raises(SlopletError):
            run_async(_answer(box, request(Op.FORGET, (Tag.PID, process.pid))))
        process.kill()
        process.wait()
        run_async(_answer(box, request(Op.FORGET, (Tag.PID, process.pid))))
        assert process.pid not in {info.pid for info in box.processes()}
        with pytest.raises(ProcessNotFound):
            box.attach(process.pid)

    def test_signals_count(self, box: Sandbox) -> None:
        process = box.spawn("sleep 1000 & sleep 1000 & echo up; wait")
        read_until(process, "up")

        async def send(flags: int) -> int:
            fields = request(Op.SIGNAL, (Tag.PID, process.pid), (Tag.SIGNUM, 18), (Tag.FLAGS, flags))
            return (await _answer(box, fields)).integer(Tag.COUNT)

        assert run_async(send(int(SignalFlag.MAIN_ONLY))) == 1
        assert run_async(send(0)) >= 3
        process.kill()

    def test_an_ended_process_has_a_tree_still(self, box: Sandbox) -> None:
        process = box.spawn("sleep 1000 & echo $!")
        child = process.wait().stdout
        box.signal(process.pid, "KILL")
        assert gone(box, child)

    def test_too_many_streams(self, box: Sandbox) -> None:
        process = box.spawn("sleep 1000", detached=True)

        async def scenario() -> None:
            mine = inner(box)
            streams = [await mine._open(request(Op.ATTACH, (Tag.PID, process.pid))) for _ in range(1100)]
            outcomes = await asyncio.gather(*(stream.started() for stream in streams), return_exceptions=True)
            refused = [outcome for outcome in outcomes if isinstance(outcome, SlopletError)]
            assert 70 <= len(refused) <= 90, "1,024 streams may be open at once"
            for stream in streams:
                stream.reset()
            await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
            assert (await mine.run("echo alive")).stdout == "alive\n"

        run_async(scenario())

    def test_an_unread_file(self, box: Sandbox) -> None:
        box.files.write("big", bytes(3_000_000))

        async def scenario() -> None:
            stream = await inner(box)._open(request(Op.READ, (Tag.PATH, "big")))
            assert (await stream.started()).integer(Tag.SIZE) == 3_000_000
            assert (await inner(box).run("echo other")).ok
            got = 0
            while got < INITIAL_CREDIT:
                piece = await stream.recv(auto_credit=False)
                assert piece is not None
                got += len(piece.data)
            assert got == INITIAL_CREDIT
            stream.grant(10)
            piece = await stream.recv(auto_credit=False)
            assert piece is not None
            assert len(piece.data) == 10
            stream.reset()

        run_async(scenario())
        assert box.files.stat("big").size == 3_000_000

    def test_shutdown(self, box: Sandbox) -> None:
        process = box.spawn("trap 'echo told; exit 0' TERM; echo up; while :; do sleep 0.05; done")
        read_until(process, "up")
        run_async(_answer(box, request(Op.SHUTDOWN, (Tag.TIMEOUT_MS, 2000))))
        assert isinstance(_failure(box), SandboxError)
