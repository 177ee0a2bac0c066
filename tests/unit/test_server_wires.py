"""Connections to ports inside that are kept for the next visitor: only good ones, for the same kind of visit."""

from __future__ import annotations

import asyncio
import ssl
from types import SimpleNamespace
from typing import Any, cast

import h11
import pytest

from sloplet.controller import Data
from sloplet.server.names.parts import Place
from sloplet.server.names.secure import SecureStream
from sloplet.server.names.wires import Way, Wire, Wires
from sloplet.wire.schema import Channel

pytestmark = pytest.mark.anyone
PLACE = Place(443, "abcdef234567")


class Stream:
    """What is inside has said ``said`` after its answer."""

    peer_ended = False
    outcome = None
    mux = SimpleNamespace(error=None)

    def __init__(self, *said: bytes) -> None:
        self._said = list(said)
        self.was_reset = False

    def take(self) -> Data | None:
        return Data(Channel.OUT, self._said.pop(0)) if self._said else None

    def reset(self) -> None:
        self.was_reset = True


def answered(stream: Any) -> Wire:
    """A wire whose exchange is over."""
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    http.send(h11.EndOfMessage())
    http.receive_data(b"HTTP/1.1 204 No Content\r\n\r\n")
    while http.next_event() is not h11.NEED_DATA and http.their_state is not h11.DONE:
        pass
    return Wire(cast(Any, stream), True, http)


class Dialled(Exception):
    """None that was kept was taken."""


class Alone(Wires):
    def __init__(self) -> None:
        super().__init__(cast(Any, None))

    async def dial(self, way: Way) -> Any:
        raise Dialled


def test_what_is_no_tls_is_not_kept() -> None:
    async def work() -> None:
        wires, inner = Alone(), Stream(b"no record of TLS")
        secure = SecureStream(cast(Any, inner))
        with pytest.raises(ssl.SSLError):  # the control
            SecureStream(cast(Any, Stream(b"no record of TLS"))).take()
        wires.keep(Way("t", PLACE, secure=True), answered(secure))
        assert inner.was_reset
        with pytest.raises(Dialled):
            await wires.wire(Way("t", PLACE, secure=True), kept=True)
        wires.close()

    asyncio.run(work())


@pytest.mark.parametrize("secure", [True, False])
def test_kept_ones_are_taken_for_the_same_kind_of_visit(secure: bool) -> None:
    async def work() -> None:
        wires, stream = Alone(), Stream()
        wire = answered(stream)
        wires.keep(Way("t", PLACE, secure=secure), wire)
        assert not stream.was_reset
        with pytest.raises(Dialled):
            await wires.wire(Way("t", PLACE, secure=not secure), kept=True)
        assert await wires.wire(Way("t", PLACE, secure=secure), kept=True) is wire
        wires.close()

    asyncio.run(work())
