"""E2B's network settings -> the arguments of ``Network``. Pure: nothing is resolved here.

E2B: what ``allowOut`` names is reached, then what ``denyOut`` names is not, then everything is. Names stand in
``allowOut`` only. Private networks, the host's own and metadata services are never reached, whatever is asked for,
but where the operator allows them.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ...errors import SpecError
from ...headerspec import FIXED
from ...network.addresses import SPECIAL, Net
from ...network.hosts import ALLOWED, parse_host, read_host

ALL_TRAFFIC = "0.0.0.0/0"
SANDBOX_ID = "{{sandboxID}}"  #: in a proxy's user and password
MAX_DOMAINS = 10
MAX_TRANSFORMS = 1
MAX_DOMAIN = 128
MAX_HEADERS = 20
MAX_NAME = 64
MAX_VALUE = 2048

_EVERYTHING = ("*:*", "0.0.0.0/0:*", "[::]/0:*")
_PREFIX_RE = re.compile(r"[0-9]{1,3}\Z", re.ASCII)
_DNS_RE = re.compile(
    r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(?:\.[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*\.?\Z"
)
_TOKEN_RE = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+\Z")
_BLOCK_ALL = (
    "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all other "
    "traffic."
)
#: What a value of a header becomes when it is told to the core; None: it has none, and requests are refused.
Fill = Callable[[str], "str | None"]
Rules = Mapping[str, Sequence[Mapping[str, Any]]]


class NetworkInvalid(ValueError):
    """A setting that E2B answers with 400; the text is its own."""


def network_of(
    allow_out: Sequence[str] = (),
    deny_out: Sequence[str] = (),
    internet: bool | None = None,
    rules: Rules | None = None,
    proxy: Mapping[str, Any] | None = None,
    *,
    private: Iterable[str] = (),
    sandbox_id: str = "",
    fill: Fill | None = None,
) -> dict[str, Any]:
    """The arguments of ``Network`` that do what these settings say. NetworkInvalid.

    ``private``: what the operator opens: special networks, which ``allowOut`` and the proxy may name, and public
    addresses of this machine, which are reached wherever everything is. ``fill``: makes the value of a header of what
    stands in the rule.
    """
    allowed, domains, denied = _read(allow_out, deny_out)
    opened = [ipaddress.ip_network(text) for text in private]
    block_all = internet is False or any(net.version == 4 and net.prefixlen == 0 for net in denied)
    everything = not block_all or any(net.version == 4 and net.prefixlen == 0 for net in allowed)
    places = sorted({place for net in allowed for place in _places(net, opened)}, key=str)
    # where everything is reached: what is special, what else would be denied, this machine's own
    allow = [f"{_text(net)}:*" for net in places if not everything or denied or _special(net) or _in(net, opened)]
    headers = headers_of(rules, fill)
    found: dict[str, Any] = {"inspect": "on-demand"}
    if everything:
        own = [net for net in opened if net.num_addresses == 1 and not _special(net) and not _in(net, denied)]
        allow += [*_EVERYTHING, *(f"{_text(net)}:*" for net in own)]
        left = [net for net in denied if not _in(net, allowed)]
        found["deny"] = sorted({f"{_text(net)}:*" for net in left}) if internet is not False else []
    else:
        allow += [text for text in map(_domain, domains) if text]
        found["by_address"] = bool(places)
    if headers:
        found["headers"] = headers
    if proxy is not None:
        found["proxy"], rule = _proxy(proxy, opened, sandbox_id)
        allow += [rule] if rule else []
    return {**found, "allow": sorted(set(allow))}


# -- addresses and names ---------------------------------------------------------------------------


def _read(allow_out: Sequence[str], deny_out: Sequence[str]) -> tuple[list[Net], list[str], list[Net]]:
    """What is allowed by address and by name, and what is denied."""
    denied = []
    for text in deny_out:
        net = _net(text)
        if net is None or not _specified(text):
            raise NetworkInvalid(f"invalid denied CIDR {text}")
        denied.append(net)
    allowed, domains = [], []
    for text in allow_out:
        net = _net(text)
        if net is None:
            domains.append(text)
        elif not _specified(text):
            raise NetworkInvalid(f"invalid allowed address {text}")
        else:
            allowed.append(net)
    if domains and ALL_TRAFFIC not in deny_out:
        raise NetworkInvalid(_BLOCK_ALL)
    return allowed, domains, denied


def _net(text: str) -> Net | None:
    """Of an address, or a network in whose address other bits may be set; None: it is neither."""
    address, slash, prefix = text.partition("/")
    if "%" in text or (slash and not _PREFIX_RE.match(prefix)):
        return None
    try:
        found = ipaddress.ip_address(address)
        mapped = found.ipv4_mapped if found.version == 6 else None
        if mapped is not None and not slash:
            return ipaddress.ip_network(mapped)
        return ipaddress.ip_network(f"{found}/{prefix}" if slash else str(found), strict=False)
    except ValueError:
        return None


def _specified(text: str) -> bool:
    return text == ALL_TRAFFIC or not ipaddress.ip_address(text.partition("/")[0]).is_unspecified


def _within(net: Net, other: Net) -> bool:
    return net.version == other.version and net.subnet_of(other)  # type: ignore[arg-type]


def _in(net: Net, others: list[Net]) -> bool:
    return any(_within(net, other) for other in others)


def _special(net: Net) -> bool:
    return any(_within(net, item.net) for item in SPECIAL)


def _places(net: Net, opened: list[Net]) -> list[Net]:
    """What of it may be reached: all, if it is public; of a special one what the operator opens."""
    if not _special(net):
        return [net]
    return [net if _within(net, other) else other for other in opened if _within(net, other) or _within(other, net)]


def _text(net: Net) -> str:
    shape = f"[{net.network_address}]" if net.version == 6 else str(net.network_address)
    return shape if net.prefixlen == net.max_prefixlen else f"{shape}/{net.prefixlen}"


def _domain(text: str) -> str:
    """As a rule, for the ports at which E2B sees names; "" for what is no name: nothing can match it."""
    try:
        host = read_host(text, ALLOWED)
    except SpecError:
        return ""
    return "" if host.net is not None or host.ports.text else host.text


# -- transforms ------------------------------------------------------------------------------------


def headers_of(rules: Rules | None, fill: Fill | None = None) -> dict[str, dict[str, str | None]]:
    """``Network(headers=)`` of ``rules``. NetworkInvalid."""
    if not rules:
        return {}
    if len(rules) > MAX_DOMAINS:
        raise NetworkInvalid(f"Network rules can have at most {MAX_DOMAINS} domains.")
    found: dict[str, dict[str, str | None]] = {}
    for domain, transforms in rules.items():
        host = _rule_host(domain)
        if len(transforms) > MAX_TRANSFORMS:
            raise NetworkInvalid(f"Domain {_q(domain)} can have at most {MAX_TRANSFORMS} transform rule.")
        for rule in transforms:
            given = (rule.get("transform") or {}).get("headers") or {}
            headers = _headers(domain, given)
            if headers:
                found[host] = {name: value if fill is None else fill(value) for name, value in headers.items()}
    return found


def _rule_host(domain: str) -> str:
    if not domain:
        raise NetworkInvalid("Rule domain must not be empty.")
    if len(domain) > MAX_DOMAIN:
        raise NetworkInvalid(f"Rule domain {_q(domain)} exceeds maximum length of {MAX_DOMAIN} characters.")
    name, colon, port = domain.partition(":")
    wrong = NetworkInvalid(f"Rule domain {_q(domain)} is not a valid domain name.")
    if not _DNS_RE.match(name) or (colon and not port.isdecimal()):
        raise wrong
    if name.lower().rstrip(".").endswith(".localhost"):
        raise NetworkInvalid(
            f"Rule domain {_q(domain)} is the sandbox's own loopback, inside: serve E2B by another `--domain`."
        )
    try:
        return parse_host(domain).text
    except SpecError:
        raise wrong from None


def _headers(domain: str, given: Mapping[str, str]) -> dict[str, str]:
    if len(given) > MAX_HEADERS:
        raise NetworkInvalid(f"Domain {_q(domain)} can have at most {MAX_HEADERS} headers per rule.")
    found: dict[str, str] = {}
    known: dict[str, str] = {}
    for name, value in given.items():
        where = f"in rule for domain {_q(domain)}"
        if not name:
            raise NetworkInvalid(f"Header name {where} must not be empty.")
        if not _TOKEN_RE.match(name):
            raise NetworkInvalid(f"Header name {_q(name)} {where} must contain only valid HTTP token characters.")
        if len(name) > MAX_NAME:
            raise NetworkInvalid(f"Header name {_q(name)} {where} exceeds maximum length of {MAX_NAME} characters.")
        if name.lower() in FIXED:
            raise NetworkInvalid(f"Header name {_q(name)} {where} cannot be set.")
        if not isinstance(value, str) or any((ord(c) < 32 and c != "\t") or ord(c) == 127 for c in value):
            raise NetworkInvalid(f"Value for header {_q(name)} {where} contains invalid characters.")
        if len(value) > MAX_VALUE:
            raise NetworkInvalid(
                f"Value for header {_q(name)} {where} exceeds maximum length of {MAX_VALUE} characters."
            )
        found.pop(known.get(name.lower(), ""), None)  # of two spellings the last counts
        known[name.lower()] = name
        found[name] = value.strip()
    return found


def _q(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# -- the proxy -------------------------------------------------------------------------------------


def _proxy(given: Mapping[str, Any], opened: list[Net], sandbox_id: str) -> tuple[str, str]:
    """``Network(proxy=)``, and the rule that opens its address if that is special and the operator allows it."""
    address = str(given.get("address") or "").strip()
    if not address:
        raise NetworkInvalid("egress proxy address must not be empty")
    host, colon, port = address.rpartition(":")
    host = host.strip().lower()
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or (":" in bare and bare == host):
        what = "too many colons in address" if address.count(":") > 1 else "missing port in address"
        raise NetworkInvalid(f"egress proxy address must be in host:port form: address {address}: {what}")
    if not bare:
        raise NetworkInvalid("egress proxy host must not be empty")
    if not (port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= 65535):
        raise NetworkInvalid(f"egress proxy port {_q(port)} is not a valid 1-65535 value")
    user, password = str(given.get("username") or ""), str(given.get("password") or "")
    if password and not user:
        raise NetworkInvalid("egress proxy password must be empty when username is empty")
    if (given.get("tls") or {}).get("enabled"):
        raise NetworkInvalid("egress proxy TLS is not supported")
    user, password = (text.replace(SANDBOX_ID, sandbox_id) if sandbox_id else text for text in (user, password))
    if max(len(user.encode()), len(password.encode())) > 255:
        raise NetworkInvalid("egress proxy username and password must be at most 255 bytes")
    net = _net(bare)
    if net is not None and _special(net) and not _in(net, opened):
        raise NetworkInvalid(
            f"egress proxy endpoint resolves to an internal / denied IP range: {bare} resolves to {bare}"
        )
    front = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "") + "@" if user else ""
    shape = f"[{bare}]" if ":" in bare else bare
    rule = f"{_text(net)}:{int(port)}" if net is not None and _special(net) else ""
    return f"socks5://{front}{shape}:{int(port)}", rule
