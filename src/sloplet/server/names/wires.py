"""Connections to ports inside, for visitors: woken sandboxes, bounds, and a few connections kept for the next request.

Visitors have a connection to each tenant's keeper that is theirs alone: however many come, the tenant's own calls do
not wait behind them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import h11

from ...errors import SandboxDead, SandboxNotFound, SandboxPaused, SlopletError
from ...network.ports import was_refused
from ...wire.mux import request
from ...wire.schema import Op, Tag
from ...wire.streams import HostStream
from ..served import ServedKeeper
from .parts import MAX_HEAD, Place
from .secure import SecureStream

if TYPE_CHECKING:
    from ..state import ServerState

MOST_OF_SANDBOX = 256  #: requests and WebSockets at a time; as many of its wire's streams stay for its owner
MOST_OF_TENANT = 768  #: a keeper's client has 1,024 streams
_OPENING = 60.0  # until a connection is through, a wake included
_JUST_WOKEN = 2.0  # a server may need a moment to listen again
_AGAIN = 0.05
_AWAKE = 1.0  # one that was reached so lately is not asked for its state
_KEPT = 2.0  # seconds that an idle connection is kept: while it is open the sandbox does not go to sleep
_MOST_KEPT = 8  # of one port


class Refusal(Exception):
    """What a visitor is told instead. ``error`` is a class of the tree, for programs."""

    def __init__(
        self, status: int, message: str, hint: str = "", *, error: str = "SandboxError",
        document: dict[str, object] | None = None, title: str = "",
    ) -> None:  # fmt: skip
        """``document`` is told as it is, instead; browsers are shown a page with that title, if it has one."""
        super().__init__(message)
        self.status, self.message, self.hint, self.error = status, message, hint, error
        self.document, self.title = document, title


class Broken(Exception):
    """The connection inside was reset, or its sandbox was paused or ended."""


def unknown() -> Refusal:
    """One answer for all that a visitor may not know: no such sandbox, no such port, no right to it."""
    return Refusal(
        404,
        "nothing is published under this name, or it needs its token",
        "open it once with ?sloplet_token=TOKEN, or send the header Sloplet-Token",
        error="SandboxNotFound",
    )


Inside = HostStream | SecureStream
_Port = tuple[str, int, bool]  # of a sandbox, and whether it speaks TLS


@dataclass(frozen=True)
class Way:
    """Where a visit goes, and how."""

    tenant: str
    place: Place
    wake: Callable[[], Awaitable[None]] | None = None  #: who sleeps is woken by this; None: by the connection itself
    patience: float = 0.0  #: seconds that a server may take until it listens
    secure: bool = False  #: what is inside speaks TLS


@dataclass(eq=False)
class Wire:
    """One connection to a port inside that speaks HTTP/1.1."""

    stream: Inside
    fresh: bool
    http: h11.Connection
    heard: bool = False  #: something of the answer has come

    async def next_event(self) -> h11.Event | type[h11.PAUSED]:
        """h11.RemoteProtocolError for what is no HTTP, Broken, and errors of the tree."""
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]
            piece = await self.stream.recv()
            if piece is not None:
                self.heard = True
                self.http.receive_data(piece.data)
            elif self.stream.peer_ended and not is_broken(self.stream):
                self.http.receive_data(b"")
            else:
                raise Broken

    async def send(self, event: h11.Event) -> None:
        data = self.http.send(event)
        if data:
            await self.stream.send(data)

    def reusable(self) -> bool:
        http = self.http
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE or http.trailing_data[0]:
            return False
        stream = self.stream
        try:
            quiet = stream.take() is None and not stream.peer_ended
        except ssl.SSLError:
            return False
        return quiet and stream.outcome is None and stream.mux.error is None


def is_broken(stream: Inside) -> bool:
    outcome = stream.outcome
    return stream.mux.error is not None or (outcome is not None and Tag.ERRNO in outcome)


class Wires:
    """All of one server. Belongs to its loop."""

    def __init__(self, server: ServerState) -> None:
        self._server = server
        self._clients: dict[str, ServedKeeper] = {}
        self._of_sandbox: Counter[str] = Counter()
        self._of_tenant: Counter[str] = Counter()
        self._kept: dict[_Port, list[tuple[Wire, asyncio.TimerHandle]]] = {}
        self._awake: dict[str, float] = {}  # when one was last reached, by the loop's clock

    @asynccontextmanager
    async def slot(self, tenant: str, sandbox: str) -> AsyncIterator[None]:
        """Room for one visitor. Refusal if there is none."""
        if self._of_sandbox[sandbox] >= MOST_OF_SANDBOX or self._of_tenant[tenant] >= MOST_OF_TENANT:
            raise Refusal(503, "too many visitors at once", "try again after a while", error="ServerBusy")
        self._of_sandbox[sandbox] += 1
        self._of_tenant[tenant] += 1
        try:
            yield
        finally:
            for counter, key in ((self._of_sandbox, sandbox), (self._of_tenant, tenant)):
                counter[key] -= 1
                if not counter[key]:
                    del counter[key]

    async def wire(self, way: Way, *, kept: bool) -> Wire:
        """A connection for one exchange. ``kept``: it may be one that was used before."""
        while kept and (there := self._kept.get(_port(way))):
            wire, timer = there.pop()
            timer.cancel()
            if wire.reusable():
                wire.http.start_next_cycle()
                return wire
            wire.stream.reset()
        return Wire(await self.dial(way), True, h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD))

    def keep(self, way: Way, wire: Wire) -> None:
        """The exchange is over: keep the connection for the next, if it can be."""
        there = self._kept.setdefault(_port(way), [])
        if len(there) >= _MOST_KEPT or not wire.reusable():
            wire.stream.reset()
            return
        wire.fresh = wire.heard = False
        there.append((wire, asyncio.get_running_loop().call_later(_KEPT, self._drop, _port(way), wire)))

    def _drop(self, key: _Port, wire: Wire) -> None:
        wire.stream.reset()
        left = [each for each in self._kept.pop(key, []) if each[0] is not wire]
        if left:
            self._kept[key] = left

    async def dial(self, way: Way) -> Inside:
        """A stream to the port, connected; wakes who sleeps. Refusal, and SandboxNotFound."""
        try:
            async with asyncio.timeout(_OPENING):
                stream = await self._dial(way)
                return await _secured(stream, way.place.port) if way.secure else stream
        except TimeoutError:
            raise Refusal(503, f"the sandbox did not answer within {_OPENING:g} s", "try again") from None
        except SandboxNotFound:
            raise
        except SandboxDead:
            raise Refusal(503, "the sandbox is not running, and nothing is left to wake", error="SandboxDead") from None
        except SlopletError as error:
            raise Refusal(503, "the sandbox cannot be reached", "try again", error=type(error).__name__) from error

    async def _dial(self, way: Way) -> HostStream:
        client, place = self._client(way.tenant), way.place
        loop = asyncio.get_running_loop()
        deadline = loop.time() + way.patience
        lately = loop.time() - self._awake.get(place.sandbox, -1e9) < _AWAKE
        if way.wake is None and not lately and (await client.find(place.sandbox)).state != "running":
            deadline += _JUST_WOKEN
        woken = way.wake is None
        while True:
            opened = await client.open(place.sandbox, request(Op.DIAL, (Tag.PORT, place.port)), wake=way.wake is None)
            stream = cast(HostStream, opened)
            try:
                await stream.started()
                break
            except BaseException as error:
                stream.reset()
                if isinstance(error, SandboxPaused) and way.wake is not None and not woken:
                    await way.wake()
                    woken, deadline = True, loop.time() + max(_JUST_WOKEN, way.patience)
                    continue
                if not isinstance(error, SlopletError) or not was_refused(stream):
                    raise
                if loop.time() >= deadline:
                    raise _nobody(place.port) from None
            await asyncio.sleep(_AGAIN)
        if len(self._awake) > 10_000:
            self._awake.clear()
        self._awake[place.sandbox] = loop.time()
        return stream

    def _client(self, tenant: str) -> ServedKeeper:
        client = self._clients.get(tenant)
        if client is None:
            client = self._clients[tenant] = ServedKeeper(self._server.tenants.get(tenant), self._server)
        return client

    def rest(self) -> None:
        """Let go of keepers that nobody visits just now: one that holds nothing may then leave."""
        for tenant in [name for name in self._clients if not self._of_tenant[name]]:
            self._clients.pop(tenant).close()

    def close(self) -> None:
        for there in self._kept.values():
            for wire, timer in there:
                timer.cancel()
                wire.stream.reset()
        self._kept.clear()
        for client in self._clients.values():
            client.close()
        self._clients.clear()


def _port(way: Way) -> _Port:
    return way.place.sandbox, way.place.port, way.secure


async def _secured(stream: HostStream, port: int) -> SecureStream:
    secure = SecureStream(stream)
    try:
        await secure.handshake()
    except BaseException as error:
        stream.reset()
        if isinstance(error, ssl.SSLError):
            raise Refusal(502, f"what answers on port {port} inside does not speak proper TLS") from None
        raise
    return secure


def _nobody(port: int) -> Refusal:
    return Refusal(
        502,
        f"nothing answers on port {port} inside the sandbox",
        f"start a server there that listens on 127.0.0.1:{port} or 0.0.0.0:{port}",
        error="PortUnavailable",
    )
