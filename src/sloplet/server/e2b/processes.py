"""envd's ``process.Process``: commands and terminals of a sandbox. A command is the sandbox's own: whoever follows it
may leave and come back, and others may follow it, too.

E2B knows a command by its pid inside; the wire by a number of its own.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import signal
from typing import Any

from ...controller import Stream
from ...errors import (
    CommandError,
    ProcessLimit,
    ProcessNotFound,
    SlopletError,
    SpecError,
    UserNotFound,
    WorkdirInvalid,
)
from ...process import exec_request
from ...wire.fields import Fields
from ...wire.mux import request
from ...wire.schema import Channel, CtrlKind, Op, Tag
from . import connect
from .answers import Refused, rpc_error
from .calls import Call, is_gone
from .connect import Out
from .inputs import Inputs
from .ps import Command, os_pid, running

_SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL, 15: signal.SIGTERM, 9: signal.SIGKILL}
_GO = {1: "hangup", 2: "interrupt", 3: "quit", 6: "aborted", 9: "killed", 11: "segmentation fault", 15: "terminated"}
_KERNEL = "sloplet-code/"  # what the code interpreter runs is not in lists


class Processes:
    """The service. One per server."""

    def __init__(self) -> None:
        self._inputs = Inputs()

    # -- streams -----------------------------------------------------------------------

    async def start(self, call: Call, out: Out) -> None:
        asked = await connect.first(call.receive)
        process = _object(asked, "process")
        pty = asked.get("pty")
        size = _size(pty) if isinstance(pty, dict) else None
        user = call.user
        argv = [_text(process, "cmd"), *_texts(process.get("args"))]
        cwd = await _cwd(call, process.get("cwd"), user)
        fields = _exec(
            argv,
            cwd=cwd,
            env={**call.facade.environment(call.record), **_env(process.get("envs"))},
            user=user,
            timeout=connect.seconds_of(call.headers),
            pty=size or False,
            stdin=asked.get("stdin", True) is not False,
            tag=_tag(asked.get("tag")),
        )
        stream = await call.open(fields)
        try:
            try:
                started = await stream.started()
            except SlopletError as error:
                raise _not_started(call, error, argv, cwd) from None
            grown = call.facade.young.began(call.record.sandbox)
            await self._follow(call, out, stream, started, pty=size is not None)
            grown()
        finally:
            stream.reset()

    async def connect(self, call: Call, out: Out) -> None:
        """Follow one that runs, from now on."""
        asked = await connect.first(call.receive)
        found = await self._find(call, asked)
        fields = request(Op.ATTACH, (Tag.PID, found.pid)).add(Tag.FLAGS, 0).add(Tag.FROM_OUT, -1).add(Tag.FROM_ERR, -1)
        stream = await call.open(fields)
        try:
            try:
                started = await stream.started()
            except ProcessNotFound:
                raise _unknown(found.os_pid) from None
            seconds = connect.seconds_of(call.headers)
            try:
                async with asyncio.timeout(seconds):
                    await self._follow(call, out, stream, started, pty=found.tty)
            except TimeoutError:
                raise rpc_error("deadline_exceeded", "the time to follow the command is over") from None
        finally:
            stream.reset()

    async def _follow(self, call: Call, out: Out, stream: Stream, started: Fields, *, pty: bool) -> None:
        number = await os_pid(call, started)
        await out.tell({"event": {"start": {"pid": number}}})
        interval = connect.keepalive_of(call.headers)
        while True:
            try:
                async with asyncio.timeout(interval):
                    piece = await stream.recv()
            except TimeoutError:
                await out.tell({"event": {"keepalive": {}}})
                continue
            if piece is None:
                break
            kind = "pty" if pty else "stdout" if piece.channel == Channel.OUT else "stderr"
            await out.tell({"event": {"data": {kind: base64.b64encode(piece.data).decode()}}})
        end = await stream.result()
        if end.integer(Tag.TIMED_OUT, 0):
            raise rpc_error("deadline_exceeded", "the command was ended: its time was over")
        await out.tell({"event": {"end": ended(end)}})

    async def stream_input(self, call: Call, out: Out) -> None:
        found: Command | None = None
        async for message in connect.messages(call.receive):
            if "start" in message:
                found = await self._find(call, _object(message, "start"))
            elif "data" in message:
                if found is None:
                    raise rpc_error("invalid_argument", "the first message names the process")
                await self._inputs.send(call, found, _input(_object(message, "data")))
            elif "keepalive" not in message and message:
                raise rpc_error("invalid_argument", "a message of no known kind")
        await out.tell({})

    # -- unary calls -------------------------------------------------------------------

    async def list(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        return {"processes": [_listed(each) for each in await running(call) if not each.tag.startswith(_KERNEL)]}

    async def send_signal(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        found = await self._find(call, asked)
        number = _SIGNALS.get(asked.get("signal", ""))
        if number is None:
            raise rpc_error("unimplemented", "there are SIGNAL_SIGTERM and SIGNAL_SIGKILL")
        fields = request(Op.SIGNAL, (Tag.PID, found.pid)).add(Tag.SIGNUM, int(number)).add(Tag.FLAGS, 0)
        stream = await call.open(fields)
        try:
            await stream.result()
        except ProcessNotFound:
            raise _unknown(found.os_pid) from None
        finally:
            stream.reset()
        return {}

    async def send_input(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        await self._inputs.send(call, await self._find(call, asked), _input(asked))
        return {}

    async def close_stdin(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        found = await self._find(call, asked)
        if found.tty:
            raise rpc_error("failed_precondition", "cannot close stdin for PTY process: send Ctrl+D (0x04) instead")
        await self._inputs.close(call, found)
        return {}

    async def update(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        found = await self._find(call, asked)
        pty = asked.get("pty")
        if isinstance(pty, dict):
            if not found.tty:
                raise rpc_error("internal", "tty not assigned to process")
            rows, cols = _size(pty)
            control = Fields((Tag.KIND, int(CtrlKind.RESIZE)), (Tag.ROWS, rows), (Tag.COLS, cols))
            await self._inputs.control(call, found, control)
        return {}

    async def _find(self, call: Call, asked: dict[str, Any]) -> Command:
        """The running process that a selector means: by pid, or by tag."""
        selector = _object(asked, "process")
        if isinstance(tag := selector.get("tag"), str):
            for each in await running(call):
                if each.tag == tag:
                    return each
            raise rpc_error("not_found", f"process with tag {tag[:80]} not found")
        pid = selector.get("pid")
        if isinstance(pid, bool) or not isinstance(pid, int):
            raise rpc_error("invalid_argument", "a process is named by its pid or its tag")
        found = next((each for each in await running(call) if each.os_pid == pid), None)
        if found is None:
            raise _unknown(pid)
        return found


def ended(end: Fields) -> dict[str, Any]:
    """How a command ended, in Go's words."""
    number = end.integer(Tag.SIGNUM, 0)
    if number:
        status = f"signal: {_signal_name(number)}" + (" (core dumped)" if number == signal.SIGQUIT else "")
        return {"exitCode": -1, "exited": False, "status": status, "error": status}
    code = end.integer(Tag.EXIT_CODE, 0) & 0xFF
    status = f"exit status {code}"
    return {"exitCode": code, "exited": True, "status": status, **({"error": status} if code else {})}


def _signal_name(number: int) -> str:
    return _GO.get(number) or (signal.strsignal(number) or f"signal {number}").lower()


def _listed(each: Command) -> dict[str, Any]:
    config = {"cmd": each.argv[0] if each.argv else "", "args": list(each.argv[1:]), "envs": {}}
    found: dict[str, Any] = {"pid": each.os_pid, "config": config}
    if each.tag:
        found["tag"] = each.tag
    return found


def _unknown(pid: int) -> Refused:
    return rpc_error("not_found", f"process with pid {pid} not found")


def _not_started(call: Call, error: SlopletError, argv: list[str], cwd: str | None) -> SlopletError:
    if is_gone(error):
        return call.gone(error)
    if isinstance(error, UserNotFound):
        return rpc_error("unauthenticated", f"invalid username: '{call.user}'")
    if isinstance(error, WorkdirInvalid):
        return rpc_error("invalid_argument", f"cwd '{cwd}' does not exist")
    if isinstance(error, ProcessLimit):
        return rpc_error("resource_exhausted", f"error starting process '{argv[0]}': {error.message}")
    if isinstance(error, (CommandError, SpecError)):
        return rpc_error("invalid_argument", f"error starting process '{argv[0]}': {error.message}")
    return error


async def _cwd(call: Call, given: Any, user: str | None) -> str | None:
    """None: where the sandbox's own commands begin."""
    if not given and (user is None or user == call.record.user):
        return None
    return await call.path(given or "", user) if given else await call.home(user)


def _exec(argv: list[str], **options: Any) -> Fields:
    try:
        return exec_request(argv, detached=True, **options)
    except SpecError as error:
        raise rpc_error("invalid_argument", error.message) from None


def _object(asked: dict[str, Any], name: str) -> dict[str, Any]:
    found = asked.get(name)
    if not isinstance(found, dict):
        raise rpc_error("invalid_argument", f"{name} is missing")
    return found


def _text(asked: dict[str, Any], name: str) -> str:
    found = asked.get(name)
    if not isinstance(found, str) or not found:
        raise rpc_error("invalid_argument", f"{name} is missing")
    return found


def _texts(given: Any) -> list[str]:
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise rpc_error("invalid_argument", "args is a list of texts")
    return given


def _env(given: Any) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(each, str) for each in given.values()):
        raise rpc_error("invalid_argument", "envs has texts for values")
    return {name: value for name, value in given.items() if name}


def _tag(given: Any) -> str | None:
    if given is None or given == "":
        return None
    if not isinstance(given, str) or len(given) > 256 or given.startswith(_KERNEL):
        raise rpc_error("invalid_argument", "a tag is a text of at most 256 characters")
    return given


def _size(pty: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns."""
    size = pty.get("size")
    size = size if isinstance(size, dict) else {}
    rows, cols = size.get("rows", 24), size.get("cols", 80)
    for each in (rows, cols):
        if isinstance(each, bool) or not isinstance(each, int) or not 1 <= each <= 10000:
            raise rpc_error("invalid_argument", "a terminal has 1 to 10000 rows and columns")
    return rows, cols


def _input(asked: dict[str, Any]) -> tuple[str, bytes]:
    """Which input, stdin or pty, and what."""
    given = _object(asked, "input")
    for kind in ("stdin", "pty"):
        if isinstance(text := given.get(kind), str):
            try:
                return kind, base64.b64decode(text, validate=True)
            except binascii.Error:
                raise rpc_error("invalid_argument", "input is base64") from None
    raise rpc_error("unimplemented", "input is stdin or pty")
