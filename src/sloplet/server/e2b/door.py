"""The facade of one server: who comes in by E2B's ways, and what all of it shares."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl
from weakref import WeakValueDictionary

from starlette.types import ASGIApp, Receive, Scope, Send

from ...controller import SandboxInfo, Stream
from ...errors import SlopletError, SnapshotNotFound
from ...files import AsyncFiles
from ...wire.fields import Fields
from ..caller import SCOPE_KEY, Caller
from ..logs import log
from ..names.parts import Place
from . import tokens
from .accounts import Accounts
from .answers import SPEAKING, STRANGER, gone, refused, speak_api
from .api import Api
from .calls import Call
from .codeserver import CodeServer
from .envd import Envd, speaker_of
from .filesystem import ROOT
from .guests import CODE_PORT, ENVD_PORT, OWN_PORTS, TOKEN_HEADER, Guests
from .metrics import Metrics
from .networks import Networks
from .records import Record, Records
from .sandboxes import Pausing, Sandboxes
from .secrets import Secrets
from .settings import E2BSettings, domain_of
from .teams import Teams
from .templates import STANDARD, Files, Templates
from .tokens import Tokens
from .volumecontent import VolumeContent
from .volumes import Volumes
from .young import Young

if TYPE_CHECKING:
    from ..state import ServerState

TRAFFIC = TOKEN_HEADER.decode()  #: the header that opens ports that are not public
_UNAUTHORIZED = "unauthorized access, please provide a valid access token or method signing if supported"
_MARKS = "/run/e2b"
_SWEEP = 60.0  # seconds
_LEAST_AWAKE = 300.0  # seconds for one that was woken by somebody who came by
_LATE = 0.3  # seconds: what its end is on record as may be that early


class Facade:
    def __init__(self, server: ServerState, settings: E2BSettings) -> None:
        self.server = server
        self.settings = settings
        self._preparing: asyncio.Task[None] | None = None
        self._waking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.pausing: dict[str, Pausing] = {}  #: who is being put to sleep just now, by a call
        self._sweeping: asyncio.Task[None] | None = None
        self.tls_port: int | None = None  #: beside the server's own, once it listens
        self.tokens = Tokens(server.home)
        self.records = Records(server.home)
        self.accounts = Accounts()
        self.young = Young()
        self.secrets = Secrets(self)
        self.networks = Networks(self)
        self.volumes = Volumes(self)
        self.templates = Templates(self)
        self.sandboxes = Sandboxes(self)
        self.metrics = Metrics(self)
        self.teams = Teams(self)
        self.envd = Envd()
        self.guests = Guests(self)
        self.code = CodeServer()
        parts = (
            self.sandboxes, self.networks, self.templates, self.volumes, self.secrets, self.metrics, self.teams,
        )  # fmt: skip
        self.api = Api(self, [route for part in parts for route in part.routes])

    def start(self) -> None:
        """In the server's loop. Idempotent."""
        self.metrics.start()
        self.templates.start()
        if self._sweeping is None:
            self._sweeping = asyncio.ensure_future(self._sweep())
        if self.settings.prepare and self._preparing is None:
            self._preparing = asyncio.ensure_future(self._prepare())

    async def _prepare(self) -> None:
        for name in STANDARD:
            log.info(f"making the image of E2B's template {name}, where it is not made")
            try:
                await self.templates.prepare([name])
            except SlopletError as error:
                log.error(f"the image of E2B's template {name} was not made: {error}")
            else:
                log.info(f"E2B's template {name} is ready")

    async def _sweep(self) -> None:
        """Now and then forget what is known of sandboxes that have ended by themselves."""
        while True:
            await asyncio.sleep(_SWEEP)
            await self.sweep()

    async def sweep(self) -> None:
        known = [(record.tenant, record.sandbox) for record in self.records]
        for tenant in {each[0] for each in known}:
            try:
                there = {info.id for info in await self.server.tenants.get(tenant).controller.list()}
            except SlopletError:
                continue  # nobody can tell just now
            for sandbox in [each[1] for each in known if each[0] == tenant and each[1] not in there]:
                self.forget(sandbox)

    async def aclose(self) -> None:
        tasks = [task for task in (self._preparing, self._sweeping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.templates.aclose()
        self.envd.close()
        await self.metrics.aclose()
        await self.volumes.aclose()
        self.secrets.close()
        await self.records.aclose()

    def welcomes(self, place: Place | None, scope: Scope, headers: dict[str, str]) -> bool:
        """Whether this is for E2B's API or a sandbox's data plane, and web pages of any origin may ask for it: they
        need a key or a token as everybody. A browser that asks beforehand names the headers that a request will have;
        what has none of them when it comes is not for us, and refused."""
        if not self.settings.pages:
            return False
        if place is not None or self.owns(scope):
            return True
        named = headers.get("access-control-request-headers", "").casefold()
        return "e2b-sandbox-id" in (name.strip() for name in named.split(","))

    # -- the control plane -------------------------------------------------------------

    def owns(self, scope: Scope) -> bool:
        """Whether a request to the server's own name is for the control plane. Its errors are told E2B's way then."""
        if scope["type"] != "http" or not self.api.owns(scope["path"]):
            return False
        scope[SPEAKING] = speak_api
        return True

    def door_of(self, scope: Scope) -> VolumeContent | Files | None:
        """Which part of the control plane this is for that has tokens of its own; None: it takes a key."""
        return next((each for each in (self.volumes.content, self.templates.files) if each.is_for(scope)), None)

    def domain(self, host: str) -> str:
        """What the names of sandboxes end in, as clients know it: with the port that they came by."""
        if host.casefold().startswith("api."):
            return host[4:]
        own = domain_of(self.server.settings.domain)
        if self.tls_port is not None:  # programs put https:// before what they are told
            return f"{own}:{self.tls_port}"
        port = host.rpartition(":")[2]
        at = port if port.isdecimal() else self.server.url.rpartition(":")[2]
        return own if not at.isdecimal() or at in ("80", "443") else f"{own}:{at}"

    # -- the data plane ----------------------------------------------------------------

    def place(self, named: Place | None, scope: Scope, headers: dict[str, str]) -> Place | None:
        """Which port of which sandbox a request is for, by its host or its headers: one of ``OWN_PORTS``, or, by
        headers only, a server inside. None: it is for none of ours."""
        sandbox = headers.get("e2b-sandbox-id")
        if named is not None:
            if named.port not in OWN_PORTS or not self._serves(named):
                return None
            found = named
        elif sandbox is not None:
            found = Place(_port(headers.get("e2b-sandbox-port", str(ENVD_PORT))), sandbox)
        elif scope["type"] == "http" and scope["path"] == "/files" and b"signature=" in scope["query_string"]:
            found = Place(ENVD_PORT, self._signed_for(scope))
        else:
            return None
        if found.port not in OWN_PORTS:
            return found
        scope[SPEAKING] = speaker_of(scope["path"])
        if sandbox not in (None, found.sandbox):
            raise refused(400, "the host and the headers name different sandboxes")
        if scope["type"] != "http":
            raise refused(404, "there are no WebSockets here")
        return found

    def _serves(self, place: Place) -> bool:
        """Whether a host's name is ours: also of a sandbox that is not there any more, but of none that has published
        this port itself."""
        if self.records.find(place.sandbox) is not None:
            return True
        return self.server.names.published.find(place.sandbox, place.port) is None

    def _signed_for(self, scope: Scope) -> str:
        """Of a signed URL that names no sandbox: the one whose token makes this signature."""
        query = _query(scope)
        for record in self.records:
            if tokens.is_signed(query, _operation(scope), self.tokens.of("envd", record.sandbox)):
                return record.sandbox
        return ""

    def admit(self, place: Place, scope: Scope, headers: dict[str, str], request_id: str, address: str) -> Caller:
        """Who asks: whoever has the sandbox's token acts for the key that made it."""
        record = self.records.find(place.sandbox)
        if record is None:
            if scope["path"] == "/files" and not place.sandbox:
                raise refused(401, "invalid signature")
            raise gone(place.sandbox)
        key = self.server.keys.current(record.key)
        if key is None:
            raise refused(401, "the key that made this sandbox is not valid any more")
        if record.secure and not self._is_known(place, record, scope, headers):
            scope[STRANGER] = record.sandbox
        return Caller(key, self.server.tenants.get(record.tenant), request_id, "", address)

    def _is_known(self, place: Place, record: Record, scope: Scope, headers: dict[str, str]) -> bool:
        """Whether who asks has shown a token, or signed; False: he has not, and need not for this. refused (401,
        403)."""
        shown, path = headers.get("x-access-token"), scope["path"]
        if shown is not None and self.tokens.opens("envd", record.sandbox, shown):
            return True
        if path == "/health":
            return False
        if place.port == CODE_PORT and path.startswith("/contexts"):  # clients show it for cells only
            if record.public:
                return False
            if not self.tokens.opens("traffic", record.sandbox, headers.get(TRAFFIC, "")):
                raise refused(403, "this sandbox is not public: send its traffic access token")
            return True
        if shown is None and path == "/files":
            tokens.check_signed(_query(scope), _operation(scope), self.tokens.of("envd", record.sandbox))
            return True
        raise refused(401, _UNAUTHORIZED)

    def serving(self, place: Place, headers: dict[str, str]) -> ASGIApp:
        """The data plane of one sandbox, for one request."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self.serve(place, scope, receive, send, headers)

        return app

    async def serve(self, place: Place, scope: Scope, receive: Receive, send: Send, headers: dict[str, str]) -> None:
        """A request of somebody who was admitted."""
        record = self.records.find(place.sandbox)
        if record is None:
            raise gone(place.sandbox)
        caller: Caller = scope[SCOPE_KEY]
        scope["path_params"] = {"box": record.sandbox}
        try:
            if record.auto_resume and scope["path"] != "/health":  # who asks whether it runs does not want it to
                await self.visited(record, caller)
            call = Call(self, record, caller.tenant, scope, receive, send, headers, _query(scope))
            if place.port == ENVD_PORT:
                await self.envd.serve(call)
            else:
                await self.code.serve(call)
        except SlopletError as error:
            from .calls import is_gone

            raise (gone(record.sandbox) if is_gone(error) else error) from None
        finally:
            if record.auto_resume:
                self.server.background(self._limit(record, caller))

    async def visited(self, record: Record, caller: Caller) -> None:
        """Somebody came by one that wakes for visitors."""
        info = self.told(await caller.tenant.controller.find(record.sandbox))
        if info.state == "paused":
            await self.wake(caller, record, max(record.timeout, _LEAST_AWAKE))

    async def _limit(self, record: Record, caller: Caller) -> None:
        """Somebody was here. If it fell asleep between two looks at it, his call has woken it, and gave it no time."""
        controller = caller.tenant.controller
        async with self._waking.setdefault(record.sandbox, asyncio.Lock()):
            info = await controller.find(record.sandbox)
            if info.state == "running" and info.expires_at is None:
                await controller.set_ttl(record.sandbox, max(record.timeout, _LEAST_AWAKE))

    def told(self, info: SandboxInfo) -> SandboxInfo:
        """As E2B's clients are told of it: who is being put to sleep sleeps, whose time is up has ended (or sleeps)."""
        if info.state != "running":
            return info
        if info.id in self.pausing:
            return replace(info, state="paused")
        if info.expires_at is None or time.time() < info.expires_at + _LATE:
            return info
        return replace(info, state="ended" if info.spec.on_ttl == "end" else "paused")

    async def wake(self, caller: Caller, record: Record, seconds: float, *, memory: bool = True) -> None:
        """``memory`` False: it starts anew with its files. Several who come at a time wake it once."""
        controller = caller.tenant.controller
        async with self._waking.setdefault(record.sandbox, asyncio.Lock()):
            while (pausing := self.pausing.get(record.sandbox)) is not None:
                await pausing.done.wait()
            info = await controller.find(record.sandbox)
            if info.state != "paused":
                if info.expires_at is not None and info.expires_at < time.time() + seconds:
                    await controller.set_ttl(record.sandbox, seconds)
                return
            fresh = await self.is_disk_only(caller, info)
            await controller.resume(record.sandbox)
            if not memory and not fresh:
                await controller.pause(record.sandbox, memory=False)
                await controller.resume(record.sandbox)
            await controller.set_ttl(record.sandbox, seconds)
            await self.networks.refresh(record)
            if fresh or not memory:
                self.mark(record)
                await self.templates.restarted(caller, record)

    async def is_disk_only(self, caller: Caller, info: SandboxInfo) -> bool:
        """Whether one that sleeps has no memory to wake with, however it fell asleep."""
        if info.state != "paused":
            pausing = self.pausing.get(info.id)
            return info.spec.on_ttl == "pause-disk" if pausing is None else not pausing.memory
        if info.saved is None:
            return False
        try:
            return (await caller.tenant.controller.find_snapshot(info.saved)).kind == "disk"
        except SnapshotNotFound:  # it wakes just now
            return False

    def mark(self, record: Record) -> None:
        """Write into a new sandbox who it is, where E2B's programs look. Nobody waits for it: what is asked of the
        sandbox later comes later."""
        self.server.background(self._mark(record))

    async def _mark(self, record: Record) -> None:
        controller = self.server.tenants.get(record.tenant).controller

        async def opener(fields: Fields) -> Stream:
            return await controller.open(record.sandbox, fields, wake=False)

        files = AsyncFiles(opener)
        with suppress(SlopletError):  # it has ended again, or has a folder of which nobody may be the owner
            await asyncio.gather(*(
                files.write(f"{_MARKS}/.{name}", value, in_place=True, user=ROOT)
                for name, value in self.environment(record).items()
            ))  # fmt: skip

    def environment(self, record: Record) -> dict[str, str]:
        """What E2B's programs find in the environment of every command."""
        return {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": record.sandbox, "E2B_TEMPLATE_ID": record.template}

    def forget(self, sandbox: str) -> None:
        self.records.drop([sandbox])
        self.networks.forget(sandbox)
        self.code.forget(sandbox)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < len(text) < 6 or not 0 < int(text) < 65536:
        raise refused(400, "E2b-Sandbox-Port is no port")
    return int(text)


def _query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))


def _operation(scope: Scope) -> str:
    return "write" if scope["method"] == "POST" else "read"
