"""What a sandbox may reach, and who may reach it, in E2B's words: ``network`` of a create, and ``PUT .../network``.

Rules are translated by ``netrules``. Values of headers and the proxy's password go to the sandbox's holder and to
nobody's record; what is told of them again is kept in memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import SpecError
from ...headerspec import check_header_value, header_key
from ...netspec import Network
from ...network.hosts import parse_host
from ..caller import Caller
from .answers import Answer, Refused, refused
from .api import Asked, Route, optional, texts
from .netrules import SANDBOX_ID, NetworkInvalid, network_of
from .records import Record
from .secrets import Secrets

if TYPE_CHECKING:
    from .door import Facade

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(:([0-9]{1,5}|\$\{PORT\}))?\Z")
_REFERENCE = re.compile(r"\$\{e2b\.secrets\.([^{}]{1,256})\}")
_REMEMBERED = 4096
#: What ``PUT`` replaces; the rest is about who comes in.
_INGRESS = ("allowPublicTraffic", "maskRequestHost", "httpsPorts")
_EGRESS = ("allowOut", "denyOut", "dnsServers", "egressProxy", "rules")


@dataclass(frozen=True)
class Wanted:
    """What a request says of the network."""

    policy: Network
    internet: bool | None = None  #: as it was said
    document: dict[str, Any] = field(default_factory=dict)  #: to be put on record: without what is confidential
    said: dict[str, Any] = field(default_factory=dict)  #: the same with values of headers: to be told again
    values: dict[str, str] = field(default_factory=dict)  #: for the holder
    mask_host: str = ""
    https_ports: list[int] = field(default_factory=list)
    public: bool = True
    named: bool = False  #: the sandbox's id is part of it: it is set again when that is known


class Networks:
    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self._said: dict[str, dict[str, Any]] = {}  # rules with their values, by sandbox
        facade.secrets.on_change.append(self._changed)
        self.routes = (Route("PUT", "/sandboxes/{sandbox}/network", self.update),)

    async def asked(self, caller: Caller, body: dict[str, Any], sandbox: str = "") -> Wanted:
        """Of a create's body. refused (400)."""
        given = optional(body, "network", dict, {})
        internet = optional(body, "allow_internet_access", bool)
        mask, ports = optional(given, "maskRequestHost", str, ""), optional(given, "httpsPorts", list, [])
        if mask:
            _check_mask(mask)
        if len(ports) > 64 or not all(_is_port(each) for each in ports):
            raise refused(400, "httpsPorts is a list of at most 64 ports")
        texts(given, "dnsServers", most=16)
        policy = self._policy(caller, given, internet, sandbox)
        document = {name: given[name] for name in (*_EGRESS, *_INGRESS) if given.get(name) is not None}
        return Wanted(
            policy, internet, _public(document), _told(document), dict(policy.values), mask, list(ports),
            optional(given, "allowPublicTraffic", bool, True), _is_named(given) and not sandbox,
        )  # fmt: skip

    def _policy(self, caller: Caller, given: dict[str, Any], internet: bool | None, sandbox: str) -> Network:
        rules = optional(given, "rules", dict, {})
        for domain, many in rules.items():
            if not isinstance(many, list) or not all(isinstance(each, dict) for each in many):
                raise refused(400, f"the rules of {str(domain)[:80]} are a list of objects")
        allowed = [text for text in self._facade.server.settings.allow_private if text != "host.sloplet"]

        def fill(value: str) -> str | None:
            """None: there is no such secret, and requests that need it are refused."""
            try:
                return self._facade.secrets.fill(caller.tenant.name, value)
            except Refused:
                return None

        try:
            arguments = network_of(
                texts(given, "allowOut"), texts(given, "denyOut"), internet, rules,
                optional(given, "egressProxy", dict), private=allowed, sandbox_id=sandbox, fill=fill,
            )  # fmt: skip
            return Network(**arguments)
        except (NetworkInvalid, SpecError) as error:
            raise refused(400, str(error)) from None
        except (TypeError, AttributeError, UnicodeError):
            raise refused(400, "network is not understood") from None

    def remember(self, sandbox: str, wanted: Wanted) -> None:
        if wanted.said != wanted.document:
            if len(self._said) >= _REMEMBERED:
                self._said.clear()
            self._said[sandbox] = wanted.said

    def forget(self, sandbox: str) -> None:
        self._said.pop(sandbox, None)

    def told(self, sandbox: str, document: dict[str, Any]) -> dict[str, Any]:
        """As a sandbox's network is told."""
        return self._said.get(sandbox, document)

    def _changed(self, tenant: str, name: str) -> None:
        """A secret has another value: those whose headers have it send that from now on."""
        for record in self._facade.records:
            if record.tenant == tenant and any(name in Secrets.names(text) for text in _values(record.network)):
                self._facade.server.background(self.refresh(record))

    async def refresh(self, record: Record) -> None:
        """Tell its holder the values of secrets that its headers have: they may be others by now, or it another."""
        controller = self._facade.server.tenants.get(record.tenant).controller
        values: dict[str, str | None] = {}
        for host, header, text in _headers(record.network):
            if Secrets.names(text):
                try:
                    values[header_key(parse_host(host).text, header)] = check_header_value(
                        header, self._facade.secrets.fill(record.tenant, text)
                    )
                except (Refused, SpecError):  # there is none that can be sent: what needs it is refused
                    values[header_key(parse_host(host).text, header)] = None
        if values:
            await controller.set_secrets(record.sandbox, values)

    async def update(self, asked: Asked) -> Answer:
        """All that goes out is as this says; who comes in stays as it was."""
        info, record = await self._facade.sandboxes.find(asked)
        internet = optional(asked.body, "allow_internet_access", bool)
        given = {name: asked.body[name] for name in _EGRESS if asked.body.get(name) is not None}
        policy = self._policy(asked.caller, given, internet, info.id)
        await asked.caller.tenant.controller.set_network(info.id, policy.spec, dict(policy.values))
        stays = {name: value for name, value in record.network.items() if name not in _EGRESS}
        wanted = Wanted(policy, internet, {**stays, **_public(given)}, {**stays, **_told(given)})
        await self._facade.records.change(info.id, network=wanted.document, internet=internet)
        self.forget(info.id)
        self.remember(info.id, wanted)
        return Answer(204)


def _headers(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Host, name and value of each header that rules set."""
    found = []
    for host, many in (document.get("rules") or {}).items():
        for rule in many:
            headers = (rule.get("transform") or {}).get("headers") or {}
            found += [(host.lower(), name, str(value)) for name, value in headers.items()]
    return found


def _values(document: dict[str, Any]) -> list[str]:
    return [value for _, _, value in _headers(document)]


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536


def _check_mask(mask: str) -> None:
    if not mask.isascii():
        raise refused(400, f"mask request host '{mask[:80]}' is not ASCII. Please use ASCII characters only.")
    if not _HOST.match(mask):
        raise refused(400, f"mask request host is not valid: {mask[:80]}")


def _is_named(given: dict[str, Any]) -> bool:
    proxy = given.get("egressProxy")
    return isinstance(proxy, dict) and any(SANDBOX_ID in str(value) for value in proxy.values())


def _told(document: dict[str, Any]) -> dict[str, Any]:
    """Without the proxy's password, which is never told."""
    proxy = document.get("egressProxy")
    if not isinstance(proxy, dict):
        return document
    kept = {name: value for name, value in proxy.items() if name in ("address", "username") and value is not None}
    return {**document, "egressProxy": kept}


def _public(document: dict[str, Any]) -> dict[str, Any]:
    """What may be on record: of headers those values only that name secrets, and are none."""
    found = _told(document)
    rules = found.get("rules")
    if not isinstance(rules, dict):
        return found
    return {**found, "rules": {domain: [_rule(each) for each in many] for domain, many in rules.items()}}


def _rule(rule: dict[str, Any]) -> dict[str, Any]:
    headers = (rule.get("transform") or {}).get("headers")
    if not isinstance(headers, dict):
        return rule
    kept = {name: value if _REFERENCE.search(str(value)) else "" for name, value in headers.items()}
    return {**rule, "transform": {"headers": kept}}
