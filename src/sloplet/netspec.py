"""What was asked for of the network: frozen, validated values that go to JSON and back without loss.

``Network`` is what users write; ``NetworkSpec`` is what is stored, sent and compared. The order of rules has no
meaning, so they are kept sorted: equal settings are equal specs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

from .errors import InvalidLimit, SpecError
from .headerspec import HeaderSpec, check_headers, check_proxy
from .quantities import parse_size
from .secretspec import Secret, SecretSpec, check_secrets

__all__ = [
    "LinkSpec", "Network", "NetworkSpec", "PortSpec", "Secret", "SecretSpec", "check_arguments", "check_links",
    "check_network", "check_openable", "check_ports", "check_secrets",
]  # fmt: skip

MODES = ("none", "rules", "learn")
ON_BUDGET = ("refuse", "pause", "kill")
ON_DEMAND = "on-demand"
MAX_RULES = 1000
#: The agent never opens more streams than that (docs/wire.md).
MAX_CONNECTIONS = 1000
MAX_PORTS = 64
MAX_LINKS = 64
MIN_BANDWIDTH = 1024


class _Unsaid(str):
    """The "none" of who says nothing about the network: a template's own is then fine."""


UNSAID = _Unsaid("none")


class PortSpec(NamedTuple):
    """A port inside that is reachable outside; ``outside`` 0: any that is free."""

    inside: int
    outside: int = 0


class LinkSpec(NamedTuple):
    """``name`` inside is the sandbox ``ref`` (a name or an id); ``port`` 0: whichever is connected to."""

    name: str
    ref: str
    port: int = 0


class _Bound(Protocol):
    """A secret, as far as it matters here."""

    @property
    def name(self) -> str: ...

    @property
    def hosts(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class NetworkSpec:
    """What a sandbox may reach. ``mode`` "none": there is no network at all; "rules": what the rules allow;
    "learn": every public name and address, recorded."""

    mode: str = "none"
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    passthrough: tuple[str, ...] = ()  #: names whose TLS is never opened
    asks: bool = False  #: what no rule decides is asked
    #: TLS is opened also where no secret and no rule needs it; "on-demand": it can be, where one comes to need it
    inspect: bool | str = False
    connections: int = 512
    bandwidth: int | None = None  #: bytes a second, both directions together
    budget: int | None = None  #: bytes in all, both directions together
    on_budget: str = "refuse"
    by_address: bool = False  #: a name that no rule decides about is judged by the addresses that it leads to
    headers: HeaderSpec = ()  #: which headers requests to a host are given; their values are not here
    proxy: str = ""  #: what connections go through; its password is not here

    def to_dict(self) -> dict[str, Any]:
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data |= {name: list(data[name]) for name in ("allow", "deny", "passthrough")}
        return {**data, "headers": {host: list(names) for host, names in self.headers}}

    def closed(self) -> NetworkSpec:
        """The same with nothing allowed, and nobody asked: for a sandbox that comes from elsewhere."""
        return self if self.mode == "none" else replace(self, mode="rules", allow=(), asks=False)

    @staticmethod
    def from_dict(data: Mapping[str, Any] | str) -> NetworkSpec:
        """What ``to_dict`` gave; "none" is how it was written before there were networks. Rules are taken as they
        are: what cannot be read any more is refused when a policy is made of it, and nothing is reached."""
        if data == "none":
            return NetworkSpec()
        if not isinstance(data, Mapping):
            raise SpecError(f"network={str(data)[:80]!r} is not known", hint="'none', or Network(allow=[...])")
        _known(data, _SPEC_KEYS)
        values = dict(data)
        for name in ("allow", "deny", "passthrough"):
            texts = values.get(name, ())
            if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
                raise SpecError(f"network: {name} is not a list of rules")
            values[name] = tuple(texts)
        values["headers"] = check_headers(values.get("headers", {}))[0]
        values["proxy"] = check_proxy(values.get("proxy"))[0]  # a password that somebody wrote there is not kept
        return _checked(NetworkSpec(**values))


_SPEC_KEYS = tuple(field.name for field in fields(NetworkSpec))


class Network:
    """What a sandbox may reach, as users write it; docs/policy.md has the rules.

    Nothing is reached that no rule allows: ``Network()`` reaches nothing. ``ask`` is called for what no rule decides,
    ``learn=True`` allows whatever is public and records it.
    """

    __slots__ = ("ask", "spec", "values")

    KEYS = (
        "allow", "deny", "ask", "learn", "inspect", "passthrough", "connections", "bandwidth", "budget", "on_budget",
        "by_address", "headers", "proxy",
    )  # fmt: skip

    def __init__(
        self,
        allow: Iterable[str] = (),
        deny: Iterable[str] = (),
        *,
        ask: Callable[..., Any] | bool | None = None,
        learn: bool = False,
        inspect: bool | str = False,
        passthrough: Iterable[str] = (),
        connections: int = 512,
        bandwidth: int | str | None = None,
        budget: int | str | None = None,
        on_budget: str = "refuse",
        by_address: bool = False,
        headers: Mapping[str, Mapping[str, str | None] | Sequence[str]] | None = None,
        proxy: str | None = None,
        **unknown: Any,
    ) -> None:
        _known(unknown, self.KEYS)
        if not (ask is None or isinstance(ask, bool) or callable(ask)):
            raise SpecError("ask is not a function", hint="a function of one question that answers with a verdict")
        if ask and learn:
            raise SpecError("learn=True asks nothing", hint="leave out ask, or learn")
        if _flag("by_address", by_address) and (ask or learn):
            raise SpecError("by_address=True asks and learns nothing", hint="leave out ask and learn, or by_address")
        self.ask = ask if callable(ask) else None
        names, values = check_headers({} if headers is None else headers)
        through, password = check_proxy(proxy)
        #: Of headers, and the proxy's password: for the sandbox's holder only.
        self.values = {**values, **password}
        self.spec = NetworkSpec(
            mode="learn" if _flag("learn", learn) else "rules",
            allow=_rules("allow", allow),
            deny=_rules("deny", deny),
            passthrough=_names("passthrough", passthrough),
            asks=bool(ask),
            inspect=_inspect(inspect),
            connections=connections,
            bandwidth=None if bandwidth is None else parse_size(bandwidth, "bandwidth"),
            budget=None if budget is None else parse_size(budget, "budget"),
            on_budget=on_budget,
            by_address=by_address,
            headers=names,
            proxy=through,
        )
        _checked(self.spec)
        check_passthrough(self.spec)

    def __repr__(self) -> str:
        default = NetworkSpec(mode="rules")
        shown = {name: getattr(self.spec, name) for name in _SPEC_KEYS}
        parts = [f"{name}={value!r}" for name, value in shown.items() if value != getattr(default, name)]
        return f"Network({', '.join(parts)})"


def check_network(network: object) -> NetworkSpec:
    """From "none", a Network, a mapping of its arguments, or a spec that was made before."""
    if isinstance(network, Network):
        return network.spec
    if isinstance(network, NetworkSpec):
        if network.mode == "none":
            if network != NetworkSpec():
                raise SpecError("network='none' has no rules and no limits")
            return network
        values = _checked(network).to_dict()
        mode, asks = values.pop("mode"), values.pop("asks")
        return Network(**values, learn=mode == "learn", ask=asks or None).spec
    if network == "none":
        return NetworkSpec()
    if isinstance(network, Mapping):
        return check_arguments(network).spec
    shown = str(network)[:80]
    hint = "'none' is no way out at all; Network(allow=['pypi.org']) is a way to there"
    raise SpecError(f"network={shown!r} is not known", hint=hint)


def check_arguments(given: Mapping[str, Any]) -> Network:
    """Of a mapping of a Network's arguments."""
    _known(given, Network.KEYS)
    return Network(**given)


def check_ports(ports: object) -> tuple[PortSpec, ...]:
    """From ``{inside: outside}`` or ``[inside, ...]``."""
    hint = "write ports=[8000], or ports={8000: 8080} for port 8080 of this machine"
    if isinstance(ports, Mapping):
        pairs = [PortSpec(inside, outside) for inside, outside in ports.items()]
    elif isinstance(ports, (list, tuple, set, frozenset)):
        pairs = [PortSpec(*item) if isinstance(item, tuple) and len(item) == 2 else PortSpec(item) for item in ports]
    else:
        raise SpecError(f"ports={str(ports)[:80]!r} is not a list of ports", hint=hint)
    for inside, outside in pairs:
        for what, port, least in (("inside", inside, 1), ("outside", outside, 0)):
            if isinstance(port, bool) or not isinstance(port, int) or not least <= port <= 65535:
                raise SpecError(f"{str(port)[:80]!r} is not a port ({what})", hint=hint)
    if len({pair.inside for pair in pairs}) < len(pairs) or len(pairs) > MAX_PORTS:
        raise SpecError(f"a port twice, or more than {MAX_PORTS}", hint="name each port inside once")
    taken = [pair.outside for pair in pairs if pair.outside]
    if len(set(taken)) < len(taken):
        raise SpecError("two ports inside cannot be the same port outside", hint=hint)
    return tuple(sorted(pairs))


def check_links(links: object) -> tuple[LinkSpec, ...]:
    """From ``{"db": other}``: another sandbox, its name or id, or ``"name:5432"``."""
    if not isinstance(links, Mapping):
        if isinstance(links, (list, tuple)) and all(
            isinstance(item, (list, tuple)) and len(item) == 3 for item in links
        ):
            return check_links({name: f"{ref}:{port}" if port else ref for name, ref, port in links})
        raise SpecError(f"links={str(links)[:80]!r} is not a mapping", hint="write links={'db': other}")
    if len(links) > MAX_LINKS:
        raise SpecError(f"{len(links)} links are too many", hint=f"at most {MAX_LINKS}")
    return tuple(sorted(_link(name, target) for name, target in links.items()))


def _link(name: object, target: object) -> LinkSpec:
    from .network.names import check_link
    from .spec import check_name

    label = check_link(name)
    ref = target if isinstance(target, str) else getattr(target, "name", None) or getattr(target, "id", None)
    if not isinstance(ref, str):
        raise SpecError(
            f"the link {label!r} leads to {str(target)[:80]!r}",
            hint="give a sandbox (started, if it has no name), its name, or 'name:port'",
        )
    ref, _, port = ref.partition(":")
    if port and not (port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= 65535):
        raise SpecError(
            f"the link {label!r} leads to the port {port[:20]!r}", hint="for example links={'db': 'pg:5432'}"
        )
    return LinkSpec(label, check_name(ref), int(port or 0))


def _checked(spec: NetworkSpec) -> NetworkSpec:
    """The types and ranges of everything but the rules."""
    if spec.mode not in MODES:
        raise SpecError(f"network mode {str(spec.mode)[:40]!r} is not known", hint=f"one of {', '.join(MODES)}")
    if spec.on_budget not in ON_BUDGET:
        raise SpecError(f"on_budget={str(spec.on_budget)[:40]!r} is not known", hint=f"one of {', '.join(ON_BUDGET)}")
    _flag("asks", spec.asks)
    _flag("by_address", spec.by_address)
    _inspect(spec.inspect)
    check_proxy(spec.proxy)
    count = spec.connections
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_CONNECTIONS:
        raise InvalidLimit(f"connections={str(count)[:40]!r} is out of range", hint=f"1 to {MAX_CONNECTIONS}")
    for what, value in (("bandwidth", spec.bandwidth), ("budget", spec.budget)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or parse_size(value) < 1):
            raise InvalidLimit(f"{what}={str(value)[:40]!r} is not a whole number of bytes")
    if spec.bandwidth is not None and spec.bandwidth < MIN_BANDWIDTH:
        raise InvalidLimit(f"bandwidth={spec.bandwidth} is too little", hint="bytes a second, at least 1k")
    if max(len(spec.allow), len(spec.deny), len(spec.passthrough)) > MAX_RULES:
        raise SpecError("that are too many rules", hint=f"at most {MAX_RULES} in a list")
    return spec


def check_passthrough(spec: NetworkSpec) -> None:
    """What is not opened cannot be looked into."""
    if not spec.passthrough:
        return
    from .network.hosts import overlap, parse_host
    from .network.presets import expand

    rules = [rule for rule in (*expand(spec.allow), *expand(spec.deny, deny=True)) if rule.of_requests]
    for text in spec.passthrough:
        for rule in rules:
            if overlap(parse_host(text), rule.host):
                raise SpecError(
                    f"the rule {rule.text!r} looks at requests that passthrough={text!r} keeps closed",
                    hint="take the host out of one of them",
                )


def check_openable(network: NetworkSpec, secrets: Iterable[_Bound], links: Iterable[str] = ()) -> None:
    """Each host of a secret, or of headers, is one whose TLS can be opened: elsewhere neither would be sent."""
    from .network.hosts import covers, parse_host

    closed = [(text, parse_host(text)) for text in network.passthrough]
    linked = set(links)
    hint = "take the host out of one of them"
    bound = [(f"the secret {secret.name} is", text) for secret in secrets for text in secret.hosts]
    for what, text in (*bound, *(("headers are", text) for text, _ in network.headers)):
        host = parse_host(text)
        if not host.wild and host.name in linked:
            raise SpecError(f"{what} for {text!r}, which is a link to a sandbox", hint=hint)
        for why, one in closed:
            if covers(one, host):
                raise SpecError(f"{what} for {text!r}, which passthrough={why!r} keeps closed", hint=hint)


def _known(given: Iterable[object], known: Iterable[str]) -> None:
    keys = list(known)
    for key in given:
        if key not in keys:
            import difflib

            near = difflib.get_close_matches(str(key)[:80].lower(), keys, n=1, cutoff=0.55)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(keys)}"
            raise SpecError(f"a network has no {str(key)[:80]!r}", hint=hint)


def _flag(what: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SpecError(f"{what}={str(value)[:80]!r} is neither True nor False")
    return value


def _inspect(value: object) -> bool | str:
    if value != ON_DEMAND and not isinstance(value, bool):
        raise SpecError(f"inspect={str(value)[:80]!r} is neither True nor False", hint=f"nor {ON_DEMAND!r}")
    return ON_DEMAND if value == ON_DEMAND else bool(value)


def _texts(what: str, given: object) -> list[Any]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise SpecError(
            f"{what}={str(given)[:80]!r} is not a list of rules",
            hint=f"write {what}=['pypi.org', 'db.example.com:5432']; an empty list is: none",
        )
    return list(given)


def _rules(what: str, given: object) -> tuple[str, ...]:
    from .network.presets import check_rule

    return tuple(sorted({check_rule(text, what) for text in _texts(what, given)}))


def _names(what: str, given: object) -> tuple[str, ...]:
    from .network.hosts import parse_host

    return tuple(sorted({parse_host(text).text for text in _texts(what, given)}))
