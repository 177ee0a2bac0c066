"""What one running server has: its settings and the parts that routes use. Made once, in the server's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ..errors import EngineUnavailable, SlopletError
from ..images.access import publish as publish_access
from ..state.home import Home
from .accounts import keep_accounts
from .audit import Audit
from .e2b.door import Facade
from .exchange import Exchange
from .idempotency import Done, Once
from .imaging import ImageWork
from .keys import Keys
from .leases import Leases
from .limits import RequestLimits
from .metrics import Metrics
from .names import PublicNames
from .outputs import Outputs
from .permits import Permits
from .quotas import Quotas
from .settings import ServeSettings
from .ssh.keys import SshKeys
from .tenants import Tenants
from .tunnels import Tunnels
from .uses import Uses

if TYPE_CHECKING:
    from .guard import Passing
    from .ssh.service import SshService


_LAST = 5.0  # seconds for what is being undone when the server ends


class ServerState:
    def __init__(self, home: Home, settings: ServeSettings) -> None:
        self.home = home.open()
        (home.path / "server").mkdir(mode=0o700, exist_ok=True)
        self.settings = settings
        self.keys = Keys(home)
        self.tenants = Tenants(home, self)
        self.exchange = Exchange(home, settings.max_upload)
        self.once = Once(Done(home))
        self.permits = Permits(home, settings)
        self.quotas = Quotas(self.keys.of_tenant)
        self.limits = RequestLimits(settings.max_creating, settings.max_waiting)
        self.outputs = Outputs()
        self.images = ImageWork(settings)
        publish_access(self.home, settings.registries, settings.registry_logins)
        self.names = PublicNames(self)
        self.ssh_keys = SshKeys(home)
        self.ssh: SshService | None = None  #: if it is served
        self.e2b = None if settings.e2b is None else Facade(self, settings.e2b)
        self.uses = Uses(settings.grace)
        self.leases = Leases(home, self.uses, self._end_leased, self._ids_of)
        self.tunnels = Tunnels(self, settings.grace)
        self.metrics = Metrics()
        self.audit = Audit(home)
        self.gauges: list[tuple[str, str, Callable[[], float]]] = [  #: more for /metrics: name, help, value
            ("sloplet_tunnels", "Tunnels of the library's own client.", lambda: len(self.tunnels)),
        ]
        self.sessions: dict[
            Passing, asyncio.Task[Any]
        ] = {}  #: streams and WebSockets, which go on until they are ended
        self.stopping = False
        self.started_at = time.time()
        self.url = ""  #: where it listens, once it does
        self._chores: asyncio.Task[None] | None = None
        self._begun: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Before the first request. Idempotent."""
        if self._chores is not None:
            return
        self.exchange.start()
        self.leases.start()
        self.tunnels.start()
        self.names.start()
        if self.e2b is not None:
            self.e2b.start()
        self._chores = asyncio.ensure_future(keep_accounts(self))
        if self.settings.ssh_port is not None:
            try:
                from .ssh.service import SshService
            except ImportError as error:
                raise EngineUnavailable(
                    f"--ssh-port needs a package that is not here: {error.name}", hint="pip install 'sloplet[server]'"
                ) from None
            self.ssh = SshService(self)
            await self.ssh.start()

    def stop(self) -> None:
        """No more is taken on. What streams ends now; the rest has a while to come to its end."""
        self.stopping = True
        for passing, task in self.sessions.items():
            if passing.scope["type"] == "http":  # uvicorn closes WebSockets
                task.cancel()

    def end_revoked(self) -> None:
        """What goes on with a key that is none any more ends."""
        for passing, task in list(self.sessions.items()):
            if passing.caller is not None and self.keys.current(passing.caller.key.id) is None:
                passing.cut = True
                task.cancel()

    async def aclose(self) -> None:
        """After the last one. Sandboxes are the keepers', and go on."""
        self.stopping = True
        if self._chores is not None:
            self._chores.cancel()
            await asyncio.gather(self._chores, return_exceptions=True)
        if self.ssh is not None:
            await self.ssh.aclose()
        await self.names.aclose()
        if self.e2b is not None:
            await self.e2b.aclose()
        await self.tunnels.aclose()
        if self._begun:
            await asyncio.wait(set(self._begun), timeout=_LAST)
        await self.leases.aclose()
        await self.tenants.aclose()
        await self.once.aclose()
        self.audit.close()
        self.ssh_keys.close()
        self.keys.close()

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """To be done even if nobody waits for it: undoing what was given up."""
        task = asyncio.ensure_future(work)
        self._begun.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._begun.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, SlopletError):
            asyncio.get_running_loop().call_exception_handler({"message": "undoing failed", "exception": error})

    async def _end_leased(self, tenant: str, sandbox: str) -> None:
        if tenant in self.tenants.names():
            await self.tenants.get(tenant).controller.kill(sandbox)

    async def _ids_of(self, tenant: str) -> set[str]:
        there = tenant in self.tenants.names()
        return {info.id for info in await self.tenants.get(tenant).controller.list()} if there else set()
