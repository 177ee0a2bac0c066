"""The facade of one server: who comes in by E2B's ways, and what all of it shares."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from ...errors import SlopletError
from ..caller import SCOPE_KEY, Caller
from ..names.parts import Place
from . import tokens
from .accounts import Accounts
from .answers import SPEAKING, Gone, refused, speak_api
from .api import Api
from .calls import Call
from .envd import Envd, speaker_of
from .networks import Networks
from .records import Record, Records
from .sandboxes import Sandboxes
from .settings import E2BSettings
from .templates import Templates
from .tokens import Tokens
from .volumes import Volumes

if TYPE_CHECKING:
    from ..state import ServerState

ENVD_PORT, CODE_PORT = 49983, 49999
_UNAUTHORIZED = "unauthorized access, please provide a valid access token or method signing if supported"
_LEAST_AWAKE = 300.0  # seconds for one that was woken by somebody who came by


class Facade:
    def __init__(self, server: ServerState, settings: E2BSettings) -> None:
        self.server = server
        self.settings = settings
        self.tokens = Tokens(server.home)
        self.records = Records(server.home)
        self.accounts = Accounts()
        self.networks = Networks(self)
        self.volumes = Volumes(self)
        self.templates = Templates(self)
        self.sandboxes = Sandboxes(self)
        self.envd = Envd()
        self.api = Api(self, (*self.sandboxes.routes, *self.templates.routes, *self.volumes.routes))

    def start(self) -> None:
        """Before the first request."""
        self.templates.start()

    async def aclose(self) -> None:
        await self.templates.aclose()
        self.envd.close()
        self.records.close()

    # -- the control plane -------------------------------------------------------------

    def owns(self, scope: Scope) -> bool:
        """Whether a request to the server's own name is for the control plane. Its errors are told E2B's way then."""
        if scope["type"] != "http" or not self.api.owns(scope["path"]):
            return False
        scope[SPEAKING] = speak_api
        return True

    def bearer(self, scope: Scope, request_id: str, address: str) -> Caller | None:
        """Who comes to the control plane with a token of ours in place of a key, to send a stream of bytes; None:
        whoever it is needs a key. refused (401)."""
        return self.templates.files.bearer(scope, request_id, address)

    def domain(self, host: str) -> str:
        """What the names of sandboxes end in, as clients know it: with the port that they came by."""
        name, _, port = host.partition(":")
        own = self.server.settings.domain
        if name.casefold().startswith("api."):
            return host[4:]
        at = port or self.server.url.rpartition(":")[2]
        return own if not at.isdecimal() or at in ("80", "443") else f"{own}:{at}"

    # -- the data plane ----------------------------------------------------------------

    def place(self, named: Place | None, scope: Scope, headers: dict[str, str]) -> Place | None:
        """Which service of which sandbox a request is for, by its host or its headers. None: it is for none of ours."""
        if scope["type"] != "http":
            return None
        if named is not None:
            found = named if named.port in (ENVD_PORT, CODE_PORT) and self.records.find(named.sandbox) else None
        elif (sandbox := headers.get("e2b-sandbox-id")) is not None:
            port = headers.get("e2b-sandbox-port", str(ENVD_PORT))
            found = Place(int(port) if port.isascii() and port.isdecimal() and len(port) < 6 else 0, sandbox)
        elif scope["path"] == "/files" and b"signature=" in scope["query_string"]:
            found = Place(ENVD_PORT, self._signed_for(scope))
        else:
            return None
        if found is not None:
            scope[SPEAKING] = speaker_of(scope["path"])
        return found

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
            raise Gone(place.sandbox)
        key = self.server.keys.current(record.key)
        if key is None:
            raise refused(401, "the key that made this sandbox is not valid any more")
        if record.secure and scope["path"] != "/health":
            self._check_token(record, scope, headers)
        return Caller(key, self.server.tenants.get(record.tenant), request_id, "", address)

    def _check_token(self, record: Record, scope: Scope, headers: dict[str, str]) -> None:
        shown = headers.get("x-access-token")
        if shown is None and scope["path"] == "/files":
            tokens.check_signed(_query(scope), _operation(scope), self.tokens.of("envd", record.sandbox))
        elif shown is None or not self.tokens.opens("envd", record.sandbox, shown):
            raise refused(401, _UNAUTHORIZED)

    async def serve(self, place: Place, scope: Scope, receive: Receive, send: Send, headers: dict[str, str]) -> None:
        """A request of somebody who was admitted."""
        record = self.records.find(place.sandbox)
        if record is None:
            raise Gone(place.sandbox)
        caller: Caller = scope[SCOPE_KEY]
        scope["path_params"] = {"box": record.sandbox}
        try:
            if record.auto_resume and scope["path"] != "/health":
                await self.visited(record, caller)
            box = await caller.tenant.box(record.sandbox)
            call = Call(self, record, caller.tenant, box, scope, receive, send, headers, _query(scope))
            if place.port == ENVD_PORT:
                await self.envd.serve(call)
            else:
                raise Gone(record.sandbox, "The sandbox is running but port is not open")
        except SlopletError as error:
            from .calls import is_gone

            raise (Gone(record.sandbox) if is_gone(error) else error) from None

    async def visited(self, record: Record, caller: Caller) -> None:
        """Somebody came by one that wakes for visitors."""
        info = await caller.tenant.controller.find(record.sandbox)
        if info.state == "paused":
            await self.wake(caller, record, max(record.timeout, _LEAST_AWAKE))

    async def wake(self, caller: Caller, record: Record, seconds: float, *, memory: bool = True) -> None:
        """``memory`` False: it starts anew with its files."""
        controller = caller.tenant.controller
        await controller.resume(record.sandbox)
        if not memory and not record.disk_only:
            await controller.pause(record.sandbox, memory=False)
            await controller.resume(record.sandbox)
        await controller.set_ttl(record.sandbox, seconds)
        if record.disk_only or not memory:
            self.records.change(record.sandbox, disk_only=False)
            await self.templates.restarted(caller, record)

    def environment(self, record: Record) -> dict[str, str]:
        """What E2B's programs find in the environment of every command."""
        return {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": record.sandbox, "E2B_TEMPLATE_ID": record.template}

    def forget(self, sandbox: str) -> None:
        self.records.drop([sandbox])


def _query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))


def _operation(scope: Scope) -> str:
    return "write" if scope["method"] == "POST" else "read"
