"""One rule, from its text: ``[METHODS ][scheme://]host[:ports][/path]``. docs/policy.md is the long form."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..errors import SpecError
from . import paths
from .addresses import parse
from .hosts import ALLOWED, EVERY, Host, Ports, read_host
from .names import HOST, BadName, normal, shown

MAX_TEXT = 2048
_RULE_RE = re.compile(
    r"(?:(?P<methods>[^/:]+?) +)?(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?(?P<rest>\S+)\Z", re.DOTALL
)
#: Those of RFC 9110 and WebDAV. Others are fine, if they are no slip of one of these.
_METHODS = (
    "GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY", "SEARCH", "PROPFIND",
    "PROPPATCH", "MKCOL", "COPY", "MOVE", "LOCK", "UNLOCK", "REPORT", "MERGE", "ACL", "BIND", "UNBIND", "REBIND",
    "LINK", "UNLINK", "CHECKIN", "CHECKOUT", "UNCHECKOUT", "LABEL", "UPDATE", "MKACTIVITY", "MKCALENDAR",
    "MKWORKSPACE", "ORDERPATCH", "NOTIFY", "SUBSCRIBE", "UNSUBSCRIBE", "PURGE", "BAN", "SOURCE",
)  # fmt: skip
_METHODS_RE = re.compile(r"[A-Z]{1,20}(?:,[A-Z]{1,20}){0,19}\Z")
_SCHEMES = {"http": Ports("", ((80, 80),)), "https": Ports("", ((443, 443),))}  # meant, not named
_EXAMPLES = (
    "for example 'pypi.org', '*.example.com:443', '10.0.0.0/8:5432', 'GET https://api.github.com/repos/*', '@github'"
)


@dataclass(frozen=True)
class Rule:
    """A rule that was read. ``methods`` and ``path`` are None where it does not look at requests."""

    text: str  #: canonical
    host: Host
    deny: bool = False
    methods: frozenset[str] | None = None
    path: str | None = None
    source: str = ""  #: the preset that it came from
    local: bool = False  #: the host's own configuration names it: it may be at a private address
    of_requests: bool = field(init=False)  #: does it look at more than host and port?

    def __post_init__(self) -> None:
        object.__setattr__(self, "of_requests", self.methods is not None or self.path is not None)

    @property
    def label(self) -> str:
        """What logs and verdicts call it."""
        return f"{self.text} ({self.source})" if self.source else self.text

    def takes(self, method: str, path: str) -> bool:
        """Is a request one of those that it speaks of? What is denied is recognized in any case of letters."""
        if self.methods is not None and (method.upper() if self.deny else method) not in self.methods:
            return False
        return self.path is None or paths.matches(self.path, path, loosely=self.deny)

    def port(self, port: int) -> int:
        return self.host.ports.match(port)


def parse_rule(text: object, *, deny: bool = False, source: str = "", local: bool = False) -> Rule:
    """SpecError, with what to write instead, if the text is no rule. Presets are not rules: see presets.py."""
    match = _RULE_RE.match(_checked(text))
    if match is None:
        raise SpecError(f"{shown(str(text))} is not a rule", hint=_EXAMPLES)
    methods = None if match["methods"] is None else _methods(str(text), match["methods"])
    scheme = match["scheme"].lower() if match["scheme"] else ""
    if scheme and scheme not in _SCHEMES:
        raise SpecError(
            f"{shown(str(text))} begins with {scheme}://", hint="only http:// and https://; else 'host:port'"
        )
    where, path = _split(match["rest"])
    if path is not None and where.lower().rstrip(":") in _SCHEMES:
        good = f"{where.lower().rstrip(':')}://{path.lstrip('/')}"
        raise SpecError(f"{shown(str(text))} is an address of the web with a slip", hint=f"write '{good}'")
    host = read_host(where, _SCHEMES.get(scheme) or (EVERY if deny else ALLOWED))
    if host.net is not None and path is not None and not scheme:
        raise SpecError(
            f"{shown(str(text))} is not a network", hint=f"write '{host.net.network_address}' or '10.0.0.0/8'"
        )
    path = None if path is None else paths.check_pattern(path, str(text))
    if path in ("/", "/*"):  # everything there is
        path = None
    if (methods is not None or path is not None) and host.net is not None:
        raise SpecError(
            f"{shown(str(text))} looks at requests to an address", hint="methods and paths need a host name"
        )
    if deny and local:
        local = False
    return Rule(_canonical(methods, scheme, host, path), host, deny, methods, path, source, local)


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise SpecError(f"a rule of type {type(text).__name__} is none", hint=f"rules are text, {_EXAMPLES}")
    if not text.strip():
        raise SpecError(
            "an empty text is not a rule", hint=f"leave it out; an empty list is: nothing. A rule is {_EXAMPLES}"
        )
    if len(text) > MAX_TEXT or not text.isprintable():
        raise SpecError(
            f"{shown(text)} is not a rule", hint=f"printable text of at most {MAX_TEXT} characters, {_EXAMPLES}"
        )
    if text.startswith("@"):
        raise SpecError(f"{shown(text)} is a preset where a rule is needed", hint=_EXAMPLES)
    return text.strip()


def _methods(text: str, given: str) -> frozenset[str]:
    if not _METHODS_RE.match(given):
        raise SpecError(
            f"{shown(text)}: {shown(given)} are not methods", hint="write for example 'GET,HEAD https://api.github.com'"
        )
    import difflib

    for method in given.split(","):
        near = () if method in _METHODS else difflib.get_close_matches(method, _METHODS, n=1, cutoff=0.7)
        if near:  # a rule of a method that nobody uses denies, or allows, nothing
            raise SpecError(f"{shown(text)}: {method} is no method that is known", hint=f"did you mean {near[0]}?")
    return frozenset(given.split(","))


def _split(rest: str) -> tuple[str, str | None]:
    """(host and ports, path). The slash of ``10.0.0.0/8`` is not a path's."""
    head, slash, tail = rest.partition("/")
    if not slash:
        return rest, None
    bare = head.strip("[]")
    if parse(bare) is not None and head[-1:] != "/":
        length, again, more = tail.partition("/")
        if re.match(r"[0-9]{1,3}\]?(?::[^/]*)?\Z", length):
            return f"{head}/{length}", f"/{more}" if again else None
    return head, f"/{tail}"


def _canonical(methods: frozenset[str] | None, scheme: str, host: Host, path: str | None) -> str:
    front = f"{','.join(sorted(methods))} " if methods else ""
    return front + (f"{scheme}://" if scheme else "") + host.text + (path or "")


def rule_text(host: str, port: int) -> str:
    """The shortest rule that allows this name or address on this port: what a refused program would have to ask for."""
    address = parse(host)
    if address is not None:
        shape = f"[{address}]" if address.version == 6 else str(address)
    else:
        try:
            shape = normal(host)
        except BadName as error:
            raise SpecError(str(error)) from None
    return shape if port in (80, 443) and shape != HOST else f"{shape}:{port}"
