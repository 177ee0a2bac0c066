"""``@package-indexes``: rules for exactly what this machine's own pip, npm and apt fetch from, mirrors included.

Only host and port of an address go into a rule, so that no user name and no token of a URL is ever shown. A mirror may
be at a private address, because the configuration of the host names it. One on the host's loopback is reached from
inside as ``host.sloplet``, since loopback inside is the sandbox's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from ..errors import SpecError
from . import configured
from .addresses import parse, special
from .configured import Machine
from .names import HOST, BadName, from_user, is_loopback
from .rules import Rule, parse_rule

SOURCE = "@package-indexes"

PIP_DEFAULT = ("https://pypi.org", "https://files.pythonhosted.org")
NPM_DEFAULT = ("https://registry.npmjs.org",)
#: Where the files are that an index speaks of, if elsewhere.
COMPANIONS = {"pypi.org": "https://files.pythonhosted.org", "test.pypi.org": "https://test-files.pythonhosted.org"}

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Indexes:
    """The rules, and what a user should know about them."""

    rules: tuple[Rule, ...]
    warnings: tuple[str, ...]

    def rules_for(self, *, deny: bool) -> list[Rule]:
        return [parse_rule(rule.text, deny=True, source=SOURCE) for rule in self.rules] if deny else list(self.rules)


def package_indexes(machine: Machine | None = None) -> Indexes:
    """As this machine, for this user, is configured now."""
    machine = machine or Machine()
    found = _Found()
    pip_urls, pip_default = configured.pip(machine)
    npm_urls, npm_default = configured.npm(machine)
    for tool, urls in (("pip", pip_urls), ("npm", npm_urls), ("apt", configured.apt(machine))):
        for url in urls:
            found.add(tool, url)
    for url in (*(PIP_DEFAULT if pip_default else ()), *(NPM_DEFAULT if npm_default else ())):
        found.put(url)  # the names are everybody's; where they lead is what this machine's resolver says
    for tool in configured.proxies(machine):
        found.warn(f"{tool} goes through a proxy on this machine; sandboxes connect to its servers directly")
    return Indexes(tuple(found.rules[text] for text in sorted(found.rules)), tuple(found.warnings))


class _Found:
    def __init__(self) -> None:
        self.rules: dict[str, Rule] = {}
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def put(self, text: str) -> None:
        """Wherever this machine is led to by it: closed networks have mirrors at private addresses."""
        rule = parse_rule(text, source=SOURCE, local=True)
        self.rules.setdefault(rule.text, rule)

    def add(self, tool: str, url: str) -> None:
        """An address out of a configuration; whatever is wrong with it is said without showing it."""
        try:
            parts = urlsplit(url)
            scheme, host, port = _scheme(parts.scheme), parts.hostname or "", parts.port
        except ValueError:
            self.warn(f"{tool} is configured with an address that cannot be read")
            return
        if not scheme:
            return  # a folder, a disc: nothing that is reached by network
        if scheme not in _PORTS:
            self.warn(f"{tool} uses {scheme[:20]}://, which this preset does not cover")
            return
        try:
            self._allow(tool, scheme, host, port or _PORTS[scheme])
        except (BadName, SpecError):
            self.warn(f"{tool} is configured with a host that cannot be allowed")
        if parts.scheme.startswith("mirror"):
            self.warn(f"{tool} asks {host[:80]} for a list of mirrors; they need rules of their own")

    def _allow(self, tool: str, scheme: str, host: str, port: int) -> None:
        address = parse(host)
        if address is not None:
            range_ = special(address)
            if range_ is not None and "loopback" in range_.what:
                self._loopback(tool, host, port)
            else:
                self.put(f"{f'[{address}]' if address.version == 6 else address}:{port}")
            return
        name = from_user(host)
        if is_loopback(name):
            self._loopback(tool, name, port)
            return
        self.put(f"{scheme}://{name}" if port == _PORTS[scheme] else f"{name}:{port}")
        if name in COMPANIONS:
            self.put(COMPANIONS[name])

    def _loopback(self, tool: str, host: str, port: int) -> None:
        self.put(f"{HOST}:{port}")
        self.warn(f"{tool} uses {host}:{port} of this machine: inside the sandbox that is {HOST}:{port}")


def _scheme(scheme: str) -> str:
    """ "" for what is no network at all; apt's ``mirror://`` and ``tor+http://`` by what they ride on."""
    scheme = scheme.lower()
    if scheme in ("", "file", "copy", "cdrom"):
        return ""
    if scheme == "mirror":
        return "http"
    return scheme.removeprefix("mirror+")
