"""One WebSocket to a server, without a task of its own: what comes is handed on in the same step.

``websockets`` speaks the protocol (its part without I/O), an asyncio transport carries the bytes. No compression: most
of what passes is small, or large and not text, and a round trip is the product's pulse.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, cast

from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN, SEND_EOF
from websockets.uri import WebSocketURI

from ..errors import ServerError, ServerUnreachable, SlopletError
from .place import Place
from .problems import error_of

ABNORMAL = 1006
_MAX_MESSAGE = 4 << 20
_HIGH_WATER = 1 << 19
_MOST_PONGS = 16 << 20  # bytes that may wait to be sent when a PING comes: more than all windows together
_LOOK = 10.0  # seconds between looks whether anything comes
_SILENT = 2  # looks without a word after which the connection is given up


class Handler(Protocol):
    """What becomes of what comes. Called in the transport's own step, also before ``connect`` has returned."""

    def on_text(self, socket: WebSocket, text: str) -> None:
        """A whole message."""

    def on_binary(self, data: bytes) -> None:
        """A whole message."""

    def on_lost(self, code: int, reason: str) -> None:
        """Once, unless it was closed from here."""

    def on_writable(self) -> None:
        """A transport that was full has room again."""


class WebSocket(asyncio.Protocol):
    """Made by ``connect``."""

    def __init__(self, uri: WebSocketURI, headers: Mapping[str, str], handler: Handler) -> None:
        self._loop = asyncio.get_running_loop()
        self._protocol = ClientProtocol(uri, max_size=_MAX_MESSAGE)
        self._headers = headers
        self._handler: Handler | None = handler
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._opcode = Opcode.BINARY
        self._silent = 0
        self._timer: asyncio.TimerHandle | None = None
        self.writable = True
        self.opened: asyncio.Future[None] = self._loop.create_future()

    # -- sending -----------------------------------------------------------------------

    def send_binary(self, data: bytes) -> None:
        """Dropped if it is not open."""
        if self._protocol.state is OPEN:
            self._protocol.send_binary(data)
            self._flush()

    def send_text(self, text: str) -> None:
        if self._protocol.state is OPEN:
            self._protocol.send_text(text.encode())
            self._flush()

    def close(self, code: int, reason: str = "") -> None:
        """Say goodbye; the handler is not called any more. Idempotent. Nothing is waited for."""
        self._handler = None
        if self._protocol.state is OPEN:
            self._protocol.send_close(code, reason)
            self._flush()
        self._stop()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Give it up as broken."""
        if self._transport is not None:
            self._transport.abort()

    def forget(self) -> None:
        """In a forked child: the connection is the parent's. Its descriptor must not keep it open here, and the number
        must not be taken by another file that an old object would close."""
        transport, self._transport = self._transport, None
        if transport is not None:
            _graveyard.append(transport)
            with suppress(OSError, ValueError, AttributeError):
                nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                os.dup2(nothing, transport.get_extra_info("socket").fileno(), inheritable=False)
                os.close(nothing)

    def _flush(self) -> None:
        assert self._transport is not None
        for data in self._protocol.data_to_send():
            if data is not SEND_EOF:
                self._transport.write(data)
            elif self._transport.can_write_eof():
                self._transport.write_eof()

    @property
    def _unread(self) -> int:
        """Bytes that the server has not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # -- asyncio.Protocol --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        request = self._protocol.connect()
        for name, value in self._headers.items():
            request.headers[name] = value
        self._protocol.send_request(request)
        self._flush()
        self._timer = self._loop.call_later(_LOOK, self._look)

    def data_received(self, data: bytes) -> None:
        self._silent = 0
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                if event.opcode is Opcode.PING and self._unread > _MOST_PONGS:
                    self.abort()  # a server that asks and asks whether we are there, and does not read that we are
                    return
                self._on_frame(event)
            elif isinstance(event, Response):
                self._on_response(event)
        if self._transport is None or self._transport.is_closing():
            return
        self._flush()
        if self._protocol.handshake_exc is not None and not self.opened.done():
            self.opened.set_exception(_not_a_server(self._protocol.handshake_exc))
        if self._protocol.close_expected():
            self._transport.close()

    def eof_received(self) -> None:
        self._protocol.receive_eof()
        if self._transport is not None:
            self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop()
        self.writable = False
        received = self._protocol.close_rcvd
        code, reason = (ABNORMAL, "") if received is None else (received.code, received.reason)
        if not self.opened.done():
            self.opened.set_exception(ServerUnreachable("the connection to the server was closed before it was made"))
        elif self._handler is not None:
            handler, self._handler = self._handler, None
            handler.on_lost(code, reason)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        if self._handler is not None:
            self._handler.on_writable()

    # -- receiving ---------------------------------------------------------------------

    def _on_response(self, response: Response) -> None:
        if self.opened.done():
            return
        if self._protocol.handshake_exc is None:
            self.opened.set_result(None)
        else:
            self.opened.set_exception(_refused(response, self._protocol.handshake_exc))

    def _on_frame(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.BINARY, Opcode.TEXT):
            self._opcode = frame.opcode
            if not frame.fin:
                self._parts = [bytes(frame.data)]
                return
            self._on_message(bytes(frame.data))
        elif frame.opcode is Opcode.CONT:
            self._parts.append(bytes(frame.data))
            if frame.fin:
                data, self._parts = b"".join(self._parts), []
                self._on_message(data)

    def _on_message(self, data: bytes) -> None:
        if self._handler is None:
            return  # we have said goodbye
        if self._opcode is Opcode.BINARY:
            self._handler.on_binary(data)
        else:
            self._handler.on_text(self, data.decode("utf-8", "replace"))

    # -- whether anybody is there ------------------------------------------------------

    def _look(self) -> None:
        """A connection over which nothing comes is asked whether it is one: a network may vanish without a word."""
        self._timer = self._loop.call_later(_LOOK, self._look)
        if self._silent >= _SILENT:
            self.abort()
        elif self._protocol.state is OPEN:
            self._protocol.send_ping(b"?")
            self._flush()
        self._silent += 1

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


#: Transports of a forked child's parent: never to be collected, which would close what is not theirs any more.
_graveyard: list[object] = []


async def connect(
    place: Place,
    path: str,
    query: str,
    headers: Mapping[str, str],
    handler: Handler,
    timeout: float,
) -> WebSocket:
    """Open one. ServerUnreachable, or what the server answered instead."""
    loop = asyncio.get_running_loop()
    uri = WebSocketURI(place.secure, place.host, place.port, path, query)
    context = place.context()
    made: WebSocket | None = None

    def factory() -> WebSocket:
        return WebSocket(uri, headers, handler)

    try:
        async with asyncio.timeout(timeout):
            proxy, name = place.proxy(), place.host if context is not None else None
            if proxy is not None:
                opened = await _through(proxy, uri)
                _, made = await loop.create_connection(factory, sock=opened, ssl=context, server_hostname=name)
            else:
                _, made = await loop.create_connection(
                    factory, place.host, place.port, ssl=context, server_hostname=name
                )
            await made.opened
            return made
    except TimeoutError:
        error: SlopletError = ServerUnreachable(f"the server {place.url} does not answer", hint="is it up?")
    except OSError as problem:
        error = unreachable(place, problem)
    except SlopletError as problem:
        error = problem
    except BaseException:
        if made is not None:
            made.abort()
        raise
    if made is not None:
        made.abort()
    raise error


_OTHER_NAME = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


def unreachable(place: Place, problem: BaseException) -> ServerUnreachable:
    """In words, with what to look at."""
    if isinstance(problem, ssl.SSLCertVerificationError) and problem.verify_code in _OTHER_NAME:
        return ServerUnreachable(
            f"the certificate of {place.url} is for other names: {problem.verify_message.rstrip('.')}",
            hint="use a name that it is for, or start the server with --name for this one",
        )
    if isinstance(problem, ssl.SSLCertVerificationError):
        return ServerUnreachable(
            f"the certificate of {place.url} is not trusted: {problem.verify_message}",
            hint="SLOPLET_CA, ca= or --ca: the ca.pem that `sloplet serve --tls` made",
        )
    if isinstance(problem, ssl.SSLError):
        return ServerUnreachable(f"no TLS with {place.url}: {problem.reason}", hint="is it http://, not https://?")
    if isinstance(problem, socket.gaierror):
        return ServerUnreachable(f"there is no host {place.host}: {problem.strerror}", hint="is the URL right?")
    why = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
    return ServerUnreachable(f"the server {place.url} cannot be reached: {why}", hint="is it up, and is the URL right?")


def _refused(response: Response, problem: Exception) -> SlopletError:
    """What the server said instead of opening the connection."""
    try:
        document = json.loads(bytes(response.body))
    except (ValueError, RecursionError):
        return _not_a_server(problem) if response.status_code < 500 else error_of(None, response.status_code)
    return error_of(document, response.status_code)


def _not_a_server(problem: Exception) -> SlopletError:
    if isinstance(problem, WebSocketException) and isinstance(problem.__cause__, EOFError):
        return ServerUnreachable("the server closed the connection before it was made", hint="is it going down?")
    return ServerError(f"what answers there is not a Sloplet server: {problem}", hint="is the URL right?")


async def _through(proxy: str, uri: WebSocketURI) -> socket.socket:
    """A connection to the server by a proxy's CONNECT."""
    from websockets.proxy import parse_proxy, prepare_connect_request

    way = parse_proxy(proxy)
    if way.scheme != "http":
        raise ServerUnreachable(
            f"a proxy of kind {way.scheme} cannot be used", hint="an http:// proxy, or NO_PROXY for this host"
        )
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(way.host, way.port, type=socket.SOCK_STREAM)
    family, kind, number, _, address = found[0]
    opened = socket.socket(family, kind, number)
    try:
        opened.setblocking(False)
        await loop.sock_connect(opened, address)
        await loop.sock_sendall(opened, prepare_connect_request(way, uri))
        answer = b""
        while b"\r\n\r\n" not in answer and len(answer) < 65536:
            piece = await loop.sock_recv(opened, 4096)
            if not piece:
                break
            answer += piece
        if answer.split(b"\r\n", 1)[0].split(b" ")[1:2] != [b"200"]:
            said = answer.split(b"\r\n", 1)[0][:80].decode("ascii", "replace")
            raise ServerUnreachable(f"the proxy {way.host}:{way.port} does not let us through: {said!r}")
    except BaseException:
        opened.close()
        raise
    return opened
