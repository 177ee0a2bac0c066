"""Running the server: its sockets, uvicorn, signals.

TERM or INT: nothing more is accepted, what streams ends, WebSockets are closed with 1012 (come back), short requests
have some seconds to be answered. A second signal ends it at once. Sandboxes are their keepers' and see none of it.
"""

from __future__ import annotations

import asyncio
import asyncio.constants
import contextlib
import errno
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import uvicorn

from ..errors import ServerError
from ..state.home import Home
from ..state.locks import FileLock
from . import tls
from .app import make_app
from .e2b.settings import E2BSettings
from .logs import log
from .protocol import Door, most_connections
from .settings import ServeSettings
from .sockets import PatientWebSockets
from .state import ServerState

Ready = Callable[[ServerState], None]

GRACE = 5.0  #: seconds for requests that are under way when the server is to end
_PATIENCE = 12.0  # seconds for all of the end
_BACKLOG = 2048
#: Accepted at a time. asyncio would take all that wait before the first of them is looked at, and where this process
#: may not open so many files it would then rest for a second.
_BATCH = 4
_HANDSHAKE = 10.0  # seconds for TLS to come about


def listen(settings: ServeSettings, port: int | None = None, option: str = "--port") -> socket.socket:
    """Bind. ServerError if that cannot be. ``option``: which one chooses the port."""
    port = settings.port if port is None else port
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off (40 ms an answer) for sockets that name it only.
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ServerError(
            f"cannot listen on {settings.host}:{port}: {os.strerror(error.errno or 0)}",
            hint=_listen_hint(error, option),
        ) from error
    return listener


def _listen_hint(error: OSError, option: str) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "--host is an address of this machine, or 0.0.0.0 for all that it has"
    if error.errno == errno.EACCES:
        return f"ports below 1024 are root's: {option} chooses another"
    return f"is another server running? {option} chooses another"


async def serve(home: Home, settings: ServeSettings, ready: Ready) -> None:
    """Serve until TERM or INT; ``ready`` is called when requests are answered."""
    lock = FileLock.take(home.open().run / "server.lock")
    if lock is None:
        raise ServerError(
            "a server of this SLOPLET_HOME runs already", hint="end it first, or set another SLOPLET_HOME"
        )
    try:
        await _serve(home, settings, ready)
    finally:
        lock.release()


async def _serve(home: Home, settings: ServeSettings, ready: Ready) -> None:
    context = None if settings.certificate is None else tls.make_context(settings.certificate, settings.private_key)
    most = most_connections(settings.max_connections)
    listener = listen(settings)
    second = None if settings.e2b is None else _second(settings, settings.e2b)
    server = ServerState(home, settings)
    if second is not None and server.e2b is not None:
        server.e2b.tls_port = second.socket.getsockname()[1]
    server.url = settings.url or url_of(settings, listener.getsockname()[1])
    config = uvicorn.Config(
        make_app(server), log_config=None, access_log=False, server_header=False, date_header=False,
        http=Door(most, server.metrics).protocol,  # type: ignore[arg-type]
        ws=PatientWebSockets, lifespan="on", ws_max_size=4 << 20, ws_per_message_deflate=False, ws_ping_interval=20.0,
        ws_ping_timeout=40.0, timeout_keep_alive=75, timeout_graceful_shutdown=int(GRACE), reset_contextvars=True,
        backlog=_BATCH, proxy_headers=bool(settings.proxies), forwarded_allow_ips=list(settings.proxies),
    )  # fmt: skip
    config.load()
    config.ssl = context
    asyncio.constants.SSL_HANDSHAKE_TIMEOUT = _HANDSHAKE  # uvicorn has no option for it, and a minute is long
    fresh = [] if context is None else [asyncio.ensure_future(_keep_fresh(home, settings, context))]
    if second is not None:
        fresh.append(asyncio.ensure_future(_keep_fresh(home, second.settings, second.context)))
    try:
        await _start(server)
        await _Uvicorn(config, server, lambda: ready(server), second).serve(sockets=[listener])
    finally:
        listener.close()
        if second is not None:
            second.socket.close()
        for task in fresh:
            task.cancel()


@dataclass(frozen=True)
class _Second:
    """Another socket with the same application behind it, and TLS of its own. ``settings`` name its certificate."""

    socket: socket.socket
    context: ssl.SSLContext
    settings: ServeSettings


def _second(settings: ServeSettings, e2b: E2BSettings) -> _Second | None:
    if e2b.port is None:
        return None
    context = tls.make_context(e2b.certificate, None)
    own = replace(settings, certificate=e2b.certificate, private_key=None, authority=e2b.authority)
    return _Second(listen(settings, e2b.port, "--e2b-port"), context, own)


async def _start(server: ServerState) -> None:
    """Before uvicorn does it, which would tell of what fails by a traceback."""
    try:
        await server.start()
    except BaseException:
        await server.aclose()
        raise


async def _keep_fresh(home: Home, settings: ServeSettings, context: ssl.SSLContext) -> None:
    def renew() -> None:
        if settings.authority is not None:
            tls.make_own(home, tls.names_of(settings))

    await tls.keep_fresh(context, settings, renew, log.info)


def url_of(settings: ServeSettings, port: int) -> str:
    """What to call it by."""
    host = settings.host
    if settings.names and not settings.loopback:
        host = settings.names[0]
    elif settings.wildcard:
        own = [address for address in tls.own_addresses() if address not in ("127.0.0.1", "::1")]
        host = own[0] if own else "127.0.0.1"
    return f"{'https' if settings.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class _Uvicorn(uvicorn.Server):
    """Tells when it has started; ends well at the first signal, at once at the second."""

    def __init__(
        self, config: uvicorn.Config, server: ServerState, tell: Callable[[], None], second: _Second | None
    ) -> None:
        super().__init__(config)
        self._server = server
        self._tell = tell
        self._second = second

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            for each in sockets or ():
                each.listen(_BACKLOG)  # asyncio has made it the batch's size
            if self._second is not None:
                await self._open(self._second)
            log.info(f"serving at {self._server.url}")
            self._tell()

    async def _open(self, second: _Second) -> None:
        """uvicorn has one TLS setting for all of its sockets."""

        def protocol() -> asyncio.Protocol:
            made: Any = self.config.http_protocol_class
            found: asyncio.Protocol = made(
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return found

        loop = asyncio.get_running_loop()
        self.servers.append(await loop.create_server(protocol, sock=second.socket, ssl=second.context, backlog=_BATCH))
        second.socket.listen(_BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("stopping; sandboxes go on")
        self._server.stop()
        await super().shutdown(sockets)
        log.info("stopped")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The loop's own: being told to end is no failure, and no reason to die by that signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _told(self, number: int) -> None:
        if self.should_exit:
            log.warning("stopping at once")
            os._exit(128 + number)
        self.should_exit = True
        asyncio.get_running_loop().call_later(_PATIENCE, self._give_up)

    def _give_up(self) -> None:
        log.error("something does not come to its end; stopping without it")
        os._exit(1)
