"""The WebSocket protocol of the server: uvicorn's, with its three edges taken off.

- A connection that one side holds up (a command that does not read its input; a client that does not read the output)
  cannot pass a PONG, which stands in line behind what waits. That is back-pressure, not a dead peer: it is not closed.
  PINGs go on, so a peer that is gone is found out by TCP.
- One that is refused by an HTTP answer has been answered: the log has no error of it, which anybody could fill it with.
- A peer that sends PINGs and never reads the PONGs would fill the server's memory: it is dropped.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

_MOST_PONGS = 1 << 20  # bytes that may wait to be written when a PING comes


class PatientWebSockets(WebSocketsSansIOProtocol):
    """For ``uvicorn.Config(ws=...)``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        found = transport.get_extra_info("socket")
        if found is not None:
            cast(socket.socket, found).setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    async def run_asgi(self) -> None:
        answered = self.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await answered(scope, receive, send)
            if self.close_sent and self.initial_response is not None:
                self.handshake_complete = True

        self.app = cast(Any, app)
        await super().run_asgi()

    def keepalive_timeout(self) -> None:
        if not self.read_paused and self.writable.is_set():
            super().keepalive_timeout()
            return
        self.pong_timer = None
        self.pending_ping_payload = None
        if not self.close_sent and not self.transport.is_closing():
            self.schedule_ping()

    def handle_ping(self) -> None:
        if self.transport.get_write_buffer_size() > _MOST_PONGS:
            self.transport.abort()
            return
        super().handle_ping()
