"""How a registry is shown who asks: basic credentials, or bearer tokens that its token server gives for them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from ..errors import RegistryDenied, RegistryError, RegistryUnavailable
from .challenge import BEARER_RE, Challenge, origin, parse_challenges
from .credentials import ANONYMOUS, Credentials
from .patience import Transient
from .registries import Endpoint, is_loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_TOKEN = 256 * 1024
_MOST_SCOPES = 16


class Tokens:
    """What goes into ``Authorization`` for one registry; one at a time asks for a new one."""

    def __init__(
        self, endpoint: Endpoint, credentials: Credentials, http: httpx.AsyncClient, scopes: Sequence[str]
    ) -> None:
        self._endpoint, self._http, self._scopes = endpoint, http, list(scopes)
        self._withheld = bool(credentials) and endpoint.plain and not endpoint.loopback
        self._credentials = ANONYMOUS if self._withheld else credentials
        self._asking = asyncio.Lock()
        self.authorization: str | None = None

    async def renew(self, challenges: list[str], used: str | None) -> bool:
        """After a 401 to who showed ``used``: whether there is something else to show now. RegistryError,
        RegistryUnavailable, RegistryDenied."""
        async with self._asking:
            if self.authorization != used:
                return True  # by another task, meanwhile
            found = parse_challenges(challenges)
            bearer = next((each for each in found if each.scheme == "bearer" and each.parameters.get("realm")), None)
            if bearer is not None:
                self.authorization = "Bearer " + await self._token(bearer)
            elif any(each.scheme == "basic" for each in found) and self._credentials.username:
                self.authorization = self._credentials.basic
            else:
                return False
            return self.authorization != used

    def denied(self) -> RegistryDenied:
        host = self._endpoint.host
        if self._credentials:
            text = f"{host} does not accept the credentials of {self._credentials.source or 'the caller'}"
        else:
            text = f"{host} wants credentials for {self._endpoint.repository}, or has no such image"
        return RegistryDenied(text, hint=self.hint())

    def hint(self) -> str:
        host = self._endpoint.host
        if self._withheld:
            return f"the credentials that there are for {host} are not sent without TLS"
        if self._credentials:
            return f"log in again: docker login {host}, or podman login {host}; and look at the image's name"
        return f"look at the image's name; for a private one: docker login {host}, or podman login {host}"

    async def _token(self, challenge: Challenge) -> str:
        """Ask the token server that the registry names. It gets the credentials, over TLS or on this machine only."""
        realm = challenge.parameters["realm"]
        host = self._endpoint.host
        try:
            scheme, server, _ = origin(realm)
        except ValueError as error:
            raise RegistryError(f"{host} names a token server that is none: {realm[:100]!r}") from error
        if scheme == "http" and not self._endpoint.plain:
            raise RegistryError(f"{host} names a token server without TLS ({server[:100]!r}), which is not asked")
        credentials = self._credentials if scheme == "https" or is_loopback(server) else ANONYMOUS
        scopes = challenge.parameters.get("scope", "").split()[:_MOST_SCOPES]
        if not scopes and not self._scopes:
            scopes = [f"repository:{self._endpoint.repository}:pull"]
        scopes = list(dict.fromkeys([*scopes, *self._scopes]))
        service = challenge.parameters.get("service", "")
        return await self._fetch(realm, service, scopes, credentials)

    async def _fetch(self, realm: str, service: str, scopes: list[str], credentials: Credentials) -> str:
        server = repr(urlsplit(realm).hostname)
        if credentials.identity_token:
            form = {"grant_type": "refresh_token", "service": service, "client_id": "sloplet",
                    "scope": " ".join(scopes), "refresh_token": credentials.identity_token}  # fmt: skip
            request = self._http.build_request("POST", realm, data=form)
        else:
            pairs: list[tuple[str, str | int | float | bool | None]] = [("service", service)] if service else []
            pairs += [("scope", text) for text in scopes]
            headers = {}
            if credentials.username:
                pairs.append(("account", credentials.username))
                headers["Authorization"] = credentials.basic
            url = httpx.URL(realm)
            if url.params:  # of the realm's own
                pairs = [*url.params.multi_items(), *pairs]
            request = self._http.build_request("GET", url.copy_with(params=pairs), headers=headers)
        answer = await self._http.send(request, stream=True)
        try:
            if answer.status_code in (400, 401, 403):
                raise self.denied()
            if answer.status_code != 200:
                problem = RegistryUnavailable(
                    f"the token server {server} of {self._endpoint.host} answered {answer.status_code}"
                )
                if answer.status_code in (408, 429) or answer.status_code >= 500:
                    raise Transient(problem)
                raise problem
            return await self._read(answer, server)
        finally:
            await answer.aclose()

    async def _read(self, answer: httpx.Response, server: str) -> str:
        wrong = RegistryError(f"the token server {server} of {self._endpoint.host} did not answer with a token")
        data = b""
        async for piece in answer.aiter_raw():
            data += piece
            if len(data) > _MAX_TOKEN:
                raise wrong
        try:
            document: Any = json.loads(data)
            token = document.get("token") or document.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            raise wrong from None
        if not isinstance(token, str) or not BEARER_RE.match(token):
            raise wrong
        return token
