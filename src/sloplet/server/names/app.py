"""The ASGI application behind public names. The guard hands it what ``match`` says is for it; the API never answers
on those hosts, and these never on the API's.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from ...controller import SandboxInfo
from ...errors import SandboxNotFound, SlopletError
from .. import cors
from ..e2b.settings import domain_of
from ..problems import MEDIA_TYPE, title_of
from . import parts
from .http import Asked, Exchange
from .parts import Headers, Place, Unsafe
from .published import Published, PublishedPort
from .websocket import AskedSocket, Crossing
from .wires import Refusal, Way, Wires, unknown

if TYPE_CHECKING:
    from ..e2b.guests import Guest
    from ..state import ServerState

_SWEEP = 300.0  # seconds between looks for rows whose sandbox is gone
_REST = 60.0
_OUR_KEY = re.compile(rb"(?:bearer\s+)?slp_([a-z0-9]{12})_", re.IGNORECASE)
_E2B_KEY = re.compile(rb"(?:bearer\s+)?e2b_([0-9a-f]{34,400})\Z", re.IGNORECASE)
_BROWSER = re.compile(rb"mozilla/|chrome/|safari/|opera/", re.IGNORECASE)
#: Titles and texts are ours alone: nothing that a visitor or a sandbox said is in them.
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body><h1>{title}</h1><p>{text}</p></body></html>
"""


class PublicNames:
    """Those of one server. ``start`` and ``aclose`` in its loop."""

    def __init__(self, server: ServerState) -> None:
        self._server = server
        self.published = Published(server.home)
        self.wires = Wires(server)
        self._chores: asyncio.Task[None] | None = None
        self._visits: dict[tuple[str, int], set[asyncio.Future[None]]] = {}

    def match(self, host: str) -> Place | None:
        """What a Host header names. None: it is not for us."""
        domain = self._server.settings.domain
        found = parts.parse_host(host, domain)
        if found is None and self._server.e2b is not None:
            found = parts.parse_host(host, domain_of(domain))
        return found

    def url(self, place: Place) -> str:
        return parts.url_of(place, self._server.settings.domain, self._server.url)

    def start(self) -> None:
        self._server.gauges.append(("sloplet_visitors", "Requests to public names that go on.", self._visitors))
        self._chores = asyncio.ensure_future(self._tidy())

    async def aclose(self) -> None:
        if self._chores is not None:
            self._chores.cancel()
            await asyncio.gather(self._chores, return_exceptions=True)
        self.wires.close()
        self.published.close()

    # -- what has a name ---------------------------------------------------------------

    def publish(self, tenant: str, sandbox: str, port: int, *, public: bool) -> PublishedPort:
        """See ``Published``. Visitors who came when it was public do not stay when it is not."""
        before = self.published.find(sandbox, port)
        made = self.published.publish(tenant, sandbox, port, public=public)
        if before is not None and before.public and not public:
            self._cut(sandbox, port)
        return made

    def made(self, tenant: str, infos: Iterable[SandboxInfo]) -> None:
        """New sandboxes: what they were made with ``ports=`` for has names from the start, private ones."""
        for info in infos:
            for port in info.spec.ports:
                with suppress(SlopletError):  # a sandbox without its names is better than none
                    self.published.publish(tenant, info.id, port.inside, public=False)

    def unpublish(self, tenant: str, sandbox: str, port: int) -> None:
        """Nobody comes in any more, and who is in is cut off."""
        self.published.unpublish(tenant, sandbox, port)
        self._cut(sandbox, port)

    # -- requests ----------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send, place: Place | None = None) -> None:
        """``place``: what the request is for, where its host does not say: E2B's clients may."""
        guest = None
        try:
            headers: Headers = list(scope["headers"])
            host = parts.one(headers, b"host")
            found = place or self.match(host)
            if found is None:
                raise unknown()
            if self._server.e2b is not None:
                guest = self._server.e2b.guests.find(found, must=place is not None)
            await self._serve(found, guest, host, scope, receive, send)
        except Refusal as refusal:
            await _answer(scope, receive, send, refusal if guest is None else guest.told(refusal))
        except Unsafe as error:
            await _answer(scope, receive, send, Refusal(400, str(error), error="RequestInvalid"))

    async def _serve(
        self, place: Place, guest: Guest | None, host: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers: Headers = list(scope["headers"])
        raw_path = scope.get("raw_path") or scope["path"].encode("utf-8")
        if len(headers) > parts.MAX_FIELDS or sum(len(n) + len(v) + 4 for n, v in headers) > parts.MAX_HEAD:
            raise Refusal(431, "the request's headers are too long", error="RequestInvalid")
        if len(raw_path) + len(scope["query_string"]) > parts.MAX_HEAD:
            raise Refusal(414, "the request's URL is too long", error="RequestInvalid")
        scheme = "https" if scope["scheme"] in ("https", "wss") else "http"
        query, in_query = parts.split_query(scope["query_string"])
        port = self._admitted(place, guest, scope, headers, f"{scheme}://{host}")
        scope["query_string"] = query  # whoever logs this request logs no token
        method = scope.get("method", "GET")
        if in_query and not port.public and scope["type"] == "http" and method in ("GET", "HEAD"):
            await _redirect(send, parts.clean_target(raw_path, query), port.token, secure=scheme == "https")
            return
        if method in ("CONNECT", "TRACE"):
            raise Refusal(405, f"{method} is not passed on", error="RequestInvalid")
        inner = parts.inner_headers(
            headers, host=host, address=scope["client"][0] if scope.get("client") else "", scheme=scheme,
            hide=self._our_keys(headers) if guest is None else [*self._our_keys(headers), *guest.hidden(headers)],
            seen=host if guest is None else guest.host or host,
        )  # fmt: skip
        way = Way(port.tenant, place) if guest is None else guest.way
        visit: Crossing | Exchange
        if scope["type"] == "websocket":
            asked = AskedSocket(raw_path, query, inner, tuple(scope["subprotocols"]))
            visit = Crossing(self.wires, way, asked, receive, send)
        else:
            request = self._request(method, raw_path + (b"?" + query if query else b""), headers, inner)
            visit = Exchange(self.wires, way, request, receive, send)
        try:
            async with self.wires.slot(port.tenant, place.sandbox):
                await self._visit(port, visit)
        except SandboxNotFound:
            self.published.unpublish(port.tenant, place.sandbox)
            raise (unknown() if guest is None else guest.gone()) from None

    def _request(self, method: str, target: bytes, headers: Headers, inner: Headers) -> Asked:
        length = parts.body_length(headers)
        limit = self._server.settings.max_upload
        if length is not None and length > limit:
            raise Refusal(413, "the body is larger than this server takes", error="RequestInvalid")
        expects = length != 0 and any(v.lower() == b"100-continue" for v in parts.values(headers, b"expect"))
        return Asked(method, target, inner, length, expects, limit)

    async def _visit(self, port: PublishedPort, visit: Crossing | Exchange) -> None:
        """Until it is over, or its name was taken back."""
        work = asyncio.ensure_future(visit.run())
        there = self._visits.setdefault((port.sandbox, port.port), set())
        there.add(work)
        try:
            await asyncio.wait((work,))
            if work.cancelled() and not visit.begun:
                raise unknown()
            if not work.cancelled():
                work.result()
        finally:
            there.discard(work)
            if not there:
                self._visits.pop((port.sandbox, port.port), None)
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    def _visitors(self) -> int:
        return sum(len(there) for there in self._visits.values())

    def _cut(self, sandbox: str, port: int) -> None:
        for work in self._visits.get((sandbox, port), ()):
            work.cancel()

    def _admitted(
        self, place: Place, guest: Guest | None, scope: Scope, headers: Headers, origin: str
    ) -> PublishedPort:
        """The port, if this visitor may use it. One answer for all who may not."""
        port = self.published.find(place.sandbox, place.port)
        shown = parts.shown_tokens(headers, scope["query_string"], method=scope.get("method", "GET"), origin=origin)
        right = parts.is_right(shown, port.token if port is not None else "-" * 32)
        if port is not None and (port.public or right):
            return port
        if guest is None:
            raise unknown()
        guest.check(headers)
        return PublishedPort(guest.way.tenant, place.sandbox, place.port, True, "")

    def _our_keys(self, headers: Headers) -> list[bytes]:
        """Headers that hold a key of this server: somebody sent them to the wrong host."""
        found = []
        for name, value in headers:
            if (hidden := _E2B_KEY.match(value)) is not None and len(hidden[1]) % 2 == 0:
                value = bytes.fromhex(hidden[1].decode())
            match = _OUR_KEY.match(value)
            if match is not None and self._server.keys.current(match[1].decode()) is not None:
                found.append(name)
        return found

    # -- chores ------------------------------------------------------------------------

    async def _tidy(self) -> None:
        loop = asyncio.get_running_loop()
        swept = -1e9
        while True:
            self.wires.rest()
            if loop.time() - swept > _SWEEP:
                swept = loop.time()
                await self.sweep()
            await asyncio.sleep(_REST)

    async def sweep(self) -> None:
        """Forget the names of sandboxes that are gone."""
        rows = self.published.all()
        for tenant in {row.tenant for row in rows}:
            try:
                there = {info.id for info in await self._server.tenants.get(tenant).controller.list()}
            except SlopletError:
                continue  # nobody can tell just now
            for sandbox in {row.sandbox for row in rows if row.tenant == tenant} - there:
                self.published.unpublish(tenant, sandbox)


async def _redirect(send: Send, target: bytes, token: str, *, secure: bool) -> None:
    headers = [
        (b"location", target), (b"set-cookie", parts.token_cookie(token, secure=secure)), (b"content-length", b"0"),
        (b"cache-control", b"no-store"), (b"referrer-policy", b"no-referrer"),
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": 302, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _answer(scope: Scope, receive: Receive, send: Send, refusal: Refusal) -> None:
    """A small page; a problem document for who asks for JSON."""
    accept = b",".join(parts.values(scope["headers"], b"accept")).lower()
    asked = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    if refusal.document is not None and cors.is_preflight(scope.get("method", ""), asked):
        # E2B's pages are to learn why; what they ask for then is refused, and says so.
        allowed = [*cors.allowed(cors.ANYONE, asked), *cors.answered(cors.ANYONE)]
        await send({"type": "http.response.start", "status": 204, "headers": allowed})
        await send({"type": "http.response.body", "body": b""})
        return
    if refusal.document is not None and refusal.title and _wants_page(scope["headers"]):
        kind, body = b"text/html; charset=utf-8", _PAGE.format(title=refusal.title, text=refusal.message).encode()
    elif refusal.document is not None:
        kind, body = b"application/json", json.dumps(refusal.document).encode()
    elif b"json" in accept:
        document = {
            "type": f"urn:sloplet:error:{refusal.error}", "title": title_of(refusal.error), "status": refusal.status,
            "detail": refusal.message, "error": refusal.error, "hint": refusal.hint or None,
        }  # fmt: skip
        kind, body = MEDIA_TYPE.encode(), json.dumps(document).encode()
    else:
        kind = b"text/plain; charset=utf-8"
        body = f"{refusal.status}: {refusal.message}\n{refusal.hint}".rstrip().encode() + b"\n"
    headers = [
        (b"content-type", kind), (b"content-length", str(len(body)).encode()), (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"), (b"sloplet-proxy", b"refused"),
    ]  # fmt: skip
    if refusal.status == 503:
        headers.append((b"retry-after", b"2"))
    if refusal.document is not None:
        headers += cors.answered(cors.ANYONE)
    kind_of = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    await send({"type": f"{kind_of}.start", "status": refusal.status, "headers": headers})
    await send({"type": f"{kind_of}.body", "body": body})


def _wants_page(headers: Headers) -> bool:
    """Whether a person opens the address. A page's script has its browser's name, too: it is known by what browsers
    alone say of it (Node's fetch sends a Sec-Fetch-Mode, and nothing more), and wants a document."""
    accept = b",".join(parts.values(headers, b"accept")).lower()
    if b"application/json" in accept and b"text/html" not in accept:
        return False
    opened = b"navigate" in parts.values(headers, b"sec-fetch-mode") or not parts.values(headers, b"sec-fetch-site")
    if not opened or parts.values(headers, b"origin") or parts.values(headers, b"x-requested-with"):
        return False
    return any(_BROWSER.search(value) for value in parts.values(headers, b"user-agent"))
