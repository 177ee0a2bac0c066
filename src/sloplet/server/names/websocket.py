"""One WebSocket of a visitor, carried to a port inside: whole messages both ways, close codes, subprotocols.

The server speaks WebSocket with the visitor; ``websockets`` speaks it with what is inside, strictly and within a size.
Each message is passed on before the next is read, so a side that does not read holds up the other.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass

from starlette.types import Message, Receive, Send
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidState, InvalidStatus, WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from ...errors import SandboxNotFound, SlopletError
from .parts import Headers, Unsafe, outer_headers
from .wires import Inside, Refusal, Way, Wires

MAX_MESSAGE = 4 << 20  #: bytes of a message from inside; the server holds visitors to the same
_HANDSHAKE = 60.0
_VISITOR = 120.0  # that a visitor may take to read the next message
_SILENCE = 120.0  # the same of what is inside
_GOODBYE = 5.0  # that what is inside may take to close after the visitor has
#: Codes that are never sent (RFC 6455, 7.4.1), and what stands for them.
_NOT_SENT = {1005: 1000, 1006: 1011, 1015: 1011}
_SOCKET_HEADERS = tuple(
    f"sec-websocket-{name}".encode() for name in ("accept", "extensions", "key", "protocol", "version")
)


@dataclass(frozen=True)
class AskedSocket:
    """A WebSocket as it goes in."""

    path: bytes
    query: bytes
    headers: Headers
    subprotocols: tuple[str, ...]


class Crossing:
    """``run`` once. Refusal only before the visitor's WebSocket stands."""

    def __init__(self, wires: Wires, way: Way, asked: AskedSocket, receive: Receive, send: Send) -> None:
        self._wires, self._way, self._place, self._asked = wires, way, way.place, asked
        self._receive, self._send = receive, send
        self.begun = False  # the visitor's stands
        words = [Subprotocol(word) for word in asked.subprotocols]
        self._inside = ClientProtocol(
            WebSocketURI(False, "localhost", 80, asked.path.decode("ascii"), asked.query.decode("ascii")),
            subprotocols=words or None, max_size=MAX_MESSAGE,
        )  # fmt: skip
        self._stream: Inside | None = None
        self._writing = asyncio.Lock()  # a frame goes inwards
        self._left: Message | None = None  # the visitor's farewell

    async def run(self) -> None:
        """Until either side has closed."""
        if (await self._receive())["type"] != "websocket.connect":
            return
        inwards = asyncio.ensure_future(self._inwards())
        outwards = asyncio.ensure_future(self._outwards())
        try:
            await asyncio.wait((inwards, outwards), return_when=asyncio.FIRST_COMPLETED)
            if inwards.done() and inwards.exception() is not None and not outwards.done():
                await self._end()
            elif not outwards.done():
                await self._farewell(outwards)
            if outwards.done():
                self._told(outwards.exception())
        finally:
            for task in (inwards, outwards):
                task.cancel()
            await asyncio.gather(inwards, outwards, return_exceptions=True)
            if self._stream is not None:
                self._stream.reset()

    def _told(self, error: BaseException | None) -> None:
        """What failed, as the visitor is told: once its WebSocket stands, by its end."""
        if error is None or (self.begun and isinstance(error, (TimeoutError, OSError))):
            return
        if isinstance(error, TimeoutError):
            raise Refusal(504, f"the server on port {self._place.port} inside did not answer within {_HANDSHAKE:g} s")
        if isinstance(error, Unsafe):
            raise Refusal(502, f"what answers on port {self._place.port} inside does not speak proper WebSocket")
        if isinstance(error, SlopletError) and not isinstance(error, SandboxNotFound):
            raise Refusal(503, "the sandbox stopped in the middle of it", "try again", error=type(error).__name__)
        raise error

    async def _farewell(self, outwards: asyncio.Task[None]) -> None:
        """The visitor has gone: what is inside is told how, and has a moment to say goodbye itself."""
        if self._left is None or not self.begun or self._stream is None:
            return
        code = self._left.get("code") or 1005
        if code != 1006 and self._inside.state is State.OPEN:
            with suppress(WebSocketException, SlopletError, TimeoutError):
                async with asyncio.timeout(_GOODBYE):
                    if code == 1005:
                        self._inside.send_close()
                    else:
                        self._inside.send_close(_NOT_SENT.get(code, code), self._left.get("reason") or "")
                    await self._flush(self._stream)
                    await asyncio.wait((outwards,))

    # -- visitor to inside -------------------------------------------------------------

    async def _inwards(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] != "websocket.receive":
                self._left = message
                return
            assert self._stream is not None  # nothing is received before it was accepted
            text, data = message.get("text"), message.get("bytes")
            try:
                if text is not None:
                    self._inside.send_text(text.encode())
                else:
                    self._inside.send_binary(data or b"")
            except InvalidState:  # it is closing: what comes from inside tells
                continue
            await self._flush(self._stream)

    async def _flush(self, stream: Inside) -> None:
        """Send what is to be sent, frame after frame, whichever task it is of."""
        async with asyncio.timeout(_SILENCE), self._writing:
            while parts := self._inside.data_to_send():
                for data in parts:
                    if data:
                        await stream.send(data)
                    else:
                        await stream.send_end()

    # -- inside to visitor -------------------------------------------------------------

    async def _outwards(self) -> None:
        stream = self._stream = await self._wires.dial(self._way)
        async with asyncio.timeout(_HANDSHAKE):
            if not await self._shake(stream):
                return
        try:
            await self._listen(stream)
        except (SlopletError, ssl.SSLError, TimeoutError):
            await self._end()

    async def _listen(self, stream: Inside) -> None:
        message, text = bytearray(), False
        while True:
            for frame in self._inside.events_received():
                if not isinstance(frame, Frame) or frame.opcode in (Opcode.PING, Opcode.PONG, Opcode.CLOSE):
                    continue
                if frame.opcode is not Opcode.CONT:
                    text = frame.opcode is Opcode.TEXT
                message += frame.data
                if frame.fin:
                    whole = bytes(message)
                    message.clear()
                    if not await self._pass(whole, text=text):
                        return
            if not self._writing.locked():
                await self._flush(stream)
            elif self._inside.state is State.OPEN:
                # Who writes just now sends our pongs, too, and we do not wait for that; the last of them answers all
                # pings that came before it (RFC 6455, 5.5.3).
                del self._inside.writes[:-1]
            closing = self._inside.state is not State.OPEN
            answered = self._left is None or self._inside.close_rcvd is not None
            if (closing and answered) or not await self._hear(stream):
                await self._end()
                return

    async def _hear(self, stream: Inside) -> bool:
        """Read a piece. False: there is no more."""
        piece = await stream.recv()
        if piece is None:
            self._inside.receive_eof()
            return False
        self._inside.receive_data(piece.data)
        return True

    async def _pass(self, data: bytes, *, text: bool) -> bool:
        message: Message = {"type": "websocket.send"}
        if text:
            try:
                message["text"] = data.decode()
            except UnicodeDecodeError:
                await self._tell({"type": "websocket.close", "code": 1007, "reason": ""})
                return False
        else:
            message["bytes"] = data
        await self._tell(message)
        return True

    async def _end(self) -> None:
        """Tell the visitor how it ended inside."""
        if self._left is not None:
            return
        closed = self._inside.close_rcvd
        code, reason = (1011, "the connection inside broke") if closed is None else (closed.code, closed.reason)
        if closed is None and self._inside.close_sent is not None:  # it broke the protocol, or sent too much
            code, reason = self._inside.close_sent.code, "from inside: " + self._inside.close_sent.reason[:80]
        await self._tell({"type": "websocket.close", "code": _NOT_SENT.get(code, code), "reason": reason})

    async def _tell(self, message: Message) -> None:
        async with asyncio.timeout(_VISITOR):
            await self._send(message)

    async def _shake(self, stream: Inside) -> bool:
        """False: it answered with something else, and that was passed on."""
        request = self._inside.connect()
        del request.headers["Host"]
        for name, value in self._asked.headers:
            if not name.lower().startswith(b"sec-websocket-"):
                request.headers[name.decode("ascii")] = value.decode("latin-1")
        self._inside.send_request(request)
        await self._flush(stream)
        while not self._inside.events and self._inside.handshake_exc is None:
            await self._hear(stream)
        response = self._inside.events.pop(0) if self._inside.events else None
        failed = self._inside.handshake_exc
        if isinstance(failed, InvalidStatus) and isinstance(response, Response) and response.status_code >= 200:
            await self._pass_refusal(response)
            return False
        if failed is not None or not isinstance(response, Response):
            raise Refusal(502, f"what answers on port {self._place.port} inside does not speak proper WebSocket")
        headers = outer_headers(_raw(response), drop=_SOCKET_HEADERS)
        self.begun = True
        await self._tell({"type": "websocket.accept", "subprotocol": self._inside.subprotocol, "headers": headers})
        return True

    async def _pass_refusal(self, response: Response) -> None:
        """It answered with a page instead: a redirect, a login."""
        headers = outer_headers(_raw(response), drop=_SOCKET_HEADERS)
        self.begun = True
        await self._tell({"type": "websocket.http.response.start", "status": response.status_code, "headers": headers})
        await self._tell({"type": "websocket.http.response.body", "body": bytes(response.body)})


def _raw(response: Response) -> Headers:
    return [
        (name.encode("ascii"), value.encode("latin-1", "surrogateescape"))
        for name, value in response.headers.raw_items()
    ]
