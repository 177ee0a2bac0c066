"""The tunnel: the bytes of a keeper's socket over a WebSocket that may break and be taken up again (docs/remote.md).

A ``Session`` is what stays: the connection to the keeper, and what was sent and not acknowledged. An ``Attached`` is
the WebSocket that it has just now, if it has one. Bytes pass by their headers: of what the client sends only OPEN is
read (which operation, which sandbox), of what the keeper sends only CLOSE (no path of the host's leaves with an error).
Nothing here waits for one side while the other could go on, and nothing is kept beyond the session's window.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.websockets import WebSocket, WebSocketDisconnect

from .. import __version__
from ..errors import KeeperError, NotAllowed, ProtocolError, SandboxDead, SandboxNotFound, SlopletError, from_dict
from ..keeper import error_close, error_of
from ..spec import NAME_RE
from ..wire.fields import Fields, decode_fields
from ..wire.frames import FROM_HOST, Frame, encode_frame
from ..wire.schema import VERSION, FrameType, Op, Tag
from ..wire.session import ByteSession, gently
from ..wire.walk import Walker
from .keeperlink import KeeperLink, connect
from .problems import told

if TYPE_CHECKING:
    from .caller import Caller
    from .tunnels import Tunnels

#: What a client may ask of a sandbox. What needs a decision goes by the routes; what is the holder's own, nowhere.
ALLOWED = frozenset(
    {
        Op.EXEC, Op.ATTACH, Op.SIGNAL, Op.PS, Op.FORGET, Op.READ, Op.WRITE, Op.LIST, Op.STAT, Op.MKDIR, Op.REMOVE,
        Op.MOVE, Op.CHMOD, Op.CHOWN, Op.SYMLINK, Op.WATCH, Op.GETXATTRS, Op.SETXATTRS, Op.METRICS, Op.DIAL,
    }
)  # fmt: skip
NORMAL, PROTOCOL, POLICY, RESTART, REPLACED = 1000, 1002, 1008, 1012, 4000
_STOPS = frozenset({FrameType.HELLO, FrameType.OPEN, FrameType.PING, FrameType.PONG})
_MESSAGE = (1 << 18) + 4096  # bytes of one message: four full frames, and a little
_QUIET = 1.0  # seconds after which the rest is acknowledged
_HELD = 1 << 18  # bytes that wait for the keeper; more are not acknowledged
_SMALL, _JOINED = 4096, 16384
_TRIES = 5
_LAST_WORDS = 5.0


class Attached:
    """One WebSocket of a session. ``write`` is its task: it alone sends."""

    def __init__(self, websocket: WebSocket, again: Iterable[bytes]) -> None:
        self._websocket = websocket
        self._again = gently(again)
        self._unsent: deque[bytes | bytearray] = deque()
        self._ack: int | None = None
        self._closing: tuple[int, str] | None = None
        self._wake = asyncio.Event()

    def send(self, data: bytes) -> None:
        last = self._unsent[-1] if self._unsent else None
        if last is None or len(data) >= _SMALL:
            self._unsent.append(data)
        elif isinstance(last, bytearray) and len(last) < _JOINED:
            last += data  # many small ones, each an object of its own, would cost several times their bytes
        else:
            self._unsent.append(bytearray(data))
        self._wake.set()

    def ack(self, count: int) -> None:
        self._ack = count
        self._wake.set()

    def close(self, code: int, reason: str = "") -> None:
        """After what waits, as far as the client takes it."""
        self._closing = self._closing or (code, reason)
        self._wake.set()

    def drop(self, code: int, reason: str) -> None:
        """Another has its place, and sends all of it: here nothing waits any more. A client that takes up a session
        again and again, and reads nothing, would otherwise have it kept for each of its connections."""
        self._again = iter(())
        self._unsent.clear()
        self.close(code, reason)

    @property
    def closing(self) -> bool:
        return self._closing is not None

    async def write(self) -> None:
        """Until it is closed, or broken."""
        unsent, websocket = self._unsent, self._websocket
        try:
            while (piece := next(self._again, None)) is not None:
                await websocket.send({"type": "websocket.send", "bytes": piece})
            while True:
                if self._ack is not None:
                    count, self._ack = self._ack, None
                    await websocket.send({"type": "websocket.send", "text": f'{{"ack":{count}}}'})
                elif unsent:
                    await websocket.send({"type": "websocket.send", "bytes": self._next()})
                elif self._closing is not None:
                    await websocket.close(*self._closing)
                    return
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except (WebSocketDisconnect, RuntimeError):  # the reader sees that, too
            pass

    def _next(self) -> bytes:
        """One message: small pieces together, a large one as it is."""
        first = self._unsent.popleft()
        if not self._unsent or len(first) >= _MESSAGE // 2:
            return bytes(first)
        parts, size = [first], len(first)
        while self._unsent and size + len(self._unsent[0]) <= _MESSAGE:
            size += len(self._unsent[0])
            parts.append(self._unsent.popleft())
        return b"".join(parts)


class Session:
    """What outlives its WebSockets. ``window``: how much of each direction is kept at most."""

    def __init__(self, tunnels: Tunnels, caller: Caller, window: int) -> None:
        self.id = secrets.token_urlsafe(24)
        self.key, self.tenant, self.client, self.address = caller.key, caller.tenant, caller.client, caller.address
        self.window = window
        self.over = False
        self.idle_since: float | None = None  #: no stream is open since then
        self.detached_at: float | None = None  #: no WebSocket since then
        self._tunnels = tunnels
        self._server = tunnels.server
        self._bytes = ByteSession(window, window)
        self._streams: dict[int, str] = {}  # the sandbox of each
        self._last = 0
        self._attempt = -1
        self.greeted = False  #: whether the client has said anything
        self._walker = Walker(FROM_HOST, _STOPS, self._streams, wide=True)
        self._feeding = asyncio.Lock()
        self._unused = 0
        self._quiet: asyncio.TimerHandle | None = None
        self._link: KeeperLink | None = None
        self._attached: Attached | None = None
        self._loop = asyncio.get_running_loop()

    # -- its WebSocket -----------------------------------------------------------------

    def attach(self, websocket: WebSocket, received: int, attempt: int) -> Attached:
        """Go on with this one; ``received``: what the client has. ProtocolError if it cannot have come so far, or has
        made a later attempt already."""
        if attempt <= self._attempt:
            raise ProtocolError("an attempt that was overtaken by another")
        attached = Attached(websocket, self._bytes.again(received))
        self._attempt = attempt
        before, self._attached = self._attached, attached
        self.detached_at = None
        if before is not None:
            before.drop(REPLACED, "taken up by another connection")
        return attached

    async def serve(self, websocket: WebSocket, attached: Attached) -> None:
        """Until this WebSocket, which is accepted, ends."""
        writing, ended = None, False
        hello = {"session": self.id, "received": self._bytes.received, "grace": self._tunnels.grace,
                 "window": self.window, "version": __version__}  # fmt: skip
        try:
            await websocket.send_text(json.dumps(hello))
            attached.ack(self._bytes.ack())
            writing = asyncio.ensure_future(attached.write())
            ended = await self._read(websocket, attached)
        except (WebSocketDisconnect, RuntimeError):
            pass  # before it was greeted
        except ProtocolError as error:
            self.end(PROTOCOL, error.message)
        finally:
            self.detach(attached, ended=ended)
            if writing is not None:
                if attached.closing:
                    await asyncio.wait({writing}, timeout=_LAST_WORDS)
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    def detach(self, attached: Attached, *, ended: bool) -> None:
        """That WebSocket is gone. ``ended``: the client said that it is done."""
        if self._attached is attached:
            self._attached = None
            self.detached_at = self._loop.time()
            if ended:
                self.end(NORMAL, ended=True)

    async def _read(self, websocket: WebSocket, attached: Attached) -> bool:
        """Take what comes. Whether the client said that it is done."""
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                return message.get("code") == NORMAL and not attached.closing
            if self._attached is not attached:
                return False  # taken up by another connection: what is still under way here was sent there again
            data = message.get("bytes")
            if data is None:
                self._told(message.get("text") or "")
                continue
            self._bytes.take(len(data))
            async with self._feeding:
                await self._feed(data)

    def _told(self, text: str) -> None:
        try:
            count = json.loads(text)["ack"]
        except (ValueError, KeyError, TypeError):
            raise ProtocolError("a message that is not understood") from None
        if isinstance(count, bool) or not isinstance(count, int):
            raise ProtocolError("an acknowledgement that is no number")
        self._bytes.on_ack(count)
        if self._link is not None and self._bytes.room > 0:
            self._link.resume()

    def end(self, code: int, reason: str = "", *, ended: bool = False) -> None:
        """For good: what was opened is given up. Idempotent."""
        if self.over:
            return
        self.over = True
        if self._attached is not None:
            self._attached.close(code, reason[:100])
        if self._quiet is not None:
            self._quiet.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._streams.clear()
        self._tunnels.ended(self, ended=ended)

    # -- from the client ---------------------------------------------------------------

    async def _feed(self, data: bytes) -> None:
        for item in self._walker.walk(data):
            if not isinstance(item, bytes):
                await self._frame(item)
            elif self._link is not None:
                self._link.write(item)
            if self.over:
                return
        self._unused += len(data)
        self._use()

    def _use(self) -> None:
        """What the keeper has taken, or nearly, is acknowledged: the client may send on."""
        if self._unused and (self._link is None or self._link.waiting <= _HELD):
            self._bytes.use(self._unused)
            self._unused = 0
            if self._bytes.ack_due:
                self._acknowledge()
            elif self._quiet is None:
                self._quiet = self._loop.call_later(_QUIET, self._acknowledge)

    def _acknowledge(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None
        if self._attached is not None and self._bytes.untold:
            self._attached.ack(self._bytes.ack())

    async def _frame(self, frame: Frame) -> None:
        if frame.type is FrameType.HELLO:
            version = decode_fields(frame.payload).integer(Tag.VERSION)
            if self.greeted or version != VERSION:
                raise ProtocolError("a second HELLO" if self.greeted else f"version {version} of the wire")
            self.greeted = True
            self._out(_hello())
        elif not self.greeted:
            raise ProtocolError(f"{frame.type.name} before HELLO")
        elif frame.type is FrameType.OPEN:
            if frame.stream % 2 == 0 or frame.stream <= self._last:
                raise ProtocolError(f"OPEN with stream id {frame.stream}")
            self._last = frame.stream
            try:
                await self._open(frame)
            except ProtocolError:
                raise
            except SlopletError as error:
                self._out(encode_frame(FrameType.CLOSE, frame.stream, error_close(_cleaned(error)).encode()))
        elif frame.type is FrameType.PING:
            self._out(encode_frame(FrameType.PONG, 0, frame.payload))
        self._check_room()

    def _check_room(self) -> None:
        if self._bytes.room < -self.window:
            raise ProtocolError("asking and asking without reading the answers")

    async def _open(self, frame: Frame) -> None:
        request = decode_fields(frame.payload)
        op, sandbox = request.integer(Tag.OP), request.text(Tag.SANDBOX, "")
        if op not in ALLOWED:
            raise NotAllowed(f"operation {op} is not for clients of a server")
        if not sandbox:
            raise KeeperError(f"operation {op} names no sandbox")
        if not NAME_RE.match(sandbox):
            raise SandboxNotFound(f"there is no sandbox {sandbox[:80]!r}", hint="see `sloplet ls`")
        await self._tunnels.check_open(self, Op(op), sandbox, request)
        if self._link is None:
            self._link = await self._connect(sandbox)
        self._server.uses.use(self.tenant.name, self.client, sandbox)
        self._streams[frame.stream] = sandbox
        self.idle_since = None
        self._link.write(encode_frame(FrameType.OPEN, frame.stream, frame.payload))

    async def _connect(self, sandbox: str) -> KeeperLink:
        for _ in range(_TRIES):
            path = await self.tenant.controller.reach(sandbox)
            link = await connect(path, self._on_keeper, self._on_lost, self._use)
            if link is not None:
                if self.over:  # while we waited
                    link.close()
                    raise KeeperError("the session has ended")
                return link
        raise KeeperError("keepers come and go, and none stays to answer", hint="try again")

    # -- from the keeper ---------------------------------------------------------------

    def _on_keeper(self, item: bytes | Frame) -> None:
        if isinstance(item, bytes):
            self._out(item)
        elif item.type is FrameType.CLOSE:
            sandbox = self._streams.pop(item.stream, "")
            if not self._streams:
                self.idle_since = self._loop.time()
            payload, error = _without_paths(item.payload)
            if isinstance(error, SandboxNotFound):  # whoever makes up names is not to have them remembered
                self._server.uses.forget(self.tenant.name, self.client, sandbox)
            self._out(encode_frame(FrameType.CLOSE, item.stream, payload))
        elif item.type is FrameType.PING and self._link is not None:
            self._link.write(encode_frame(FrameType.PONG, 0, item.payload))
        if self._bytes.room <= 0 and self._link is not None:
            self._link.pause()

    def _on_lost(self) -> None:
        """The keeper has ended. The session goes on: the next OPEN finds the next keeper."""
        self._link = None
        died = error_close(
            SandboxDead("the keeper of this sandbox ended, and its sandboxes with it", hint="see `sloplet ls`")
        ).encode()
        for stream in sorted(self._streams):
            self._out(encode_frame(FrameType.CLOSE, stream, died))
        self._streams.clear()
        self._use()

    def let_go(self) -> None:
        """Nothing is asked of the keeper: it need not stay for us."""
        if self._link is not None and not self._streams and not self._feeding.locked():
            self._link.close()
            self._link = None
            self.idle_since = None

    def _out(self, data: bytes) -> None:
        self._bytes.put(data)
        if self._attached is not None:
            self._attached.send(data)


def _hello() -> bytes:
    return encode_frame(FrameType.HELLO, 0, Fields((Tag.VERSION, VERSION), (Tag.MESSAGE, __version__)).encode())


def _without_paths(payload: bytes) -> tuple[bytes, SlopletError | None]:
    """A CLOSE as it may leave: a keeper's own error, which is the second, has no path of the host's."""
    if b'"error"' not in payload:
        return payload, None
    try:
        error = error_of(decode_fields(payload))
    except SlopletError:
        return payload, None
    return (payload, None) if error is None else (error_close(_cleaned(error)).encode(), error)


def _cleaned(error: SlopletError) -> SlopletError:
    return from_dict(told(error))
