"""``sloplet serve --e2b``: what E2B's clients are to be told, and what that needs."""

from __future__ import annotations

import _socket
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from ..errors import SpecError
from .output import note

if TYPE_CHECKING:
    from ..server.settings import ServeSettings
    from ..server.state import ServerState
    from ..state.home import Home

#: Node asks the system's resolver, which may not know that names below localhost are this machine (RFC 6761).
_SHIM = """\
"use strict";
const dns = require("node:dns");
const asked = dns.lookup;
function lookup(name, ...rest) {
  const own = typeof name === "string" && /(^|\\.)localhost\\.?$/i.test(name);
  return asked.call(this, own ? "127.0.0.1" : name, ...rest);
}
dns.lookup = Object.defineProperties(lookup, Object.getOwnPropertyDescriptors(asked));
"""
#: So does Python: E2B's client does not need it, but its users' httpx and urllib, for ``get_host()`` and signed URLs.
_PYTHON_SHIM = """\
# Names below localhost are this machine (RFC 6761). Written by `sloplet serve --e2b`.
import importlib.machinery
import importlib.util
import os
import socket
import sys

_asked = socket.getaddrinfo


def getaddrinfo(host, *rest, **more):
    name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    own = isinstance(name, str) and name.lower().rstrip(".").endswith(".localhost")
    return _asked("127.0.0.1" if own else host, *rest, **more)


socket.getaddrinfo = getaddrinfo
_here = os.path.dirname(os.path.abspath(__file__))
_others = [path for path in sys.path if os.path.abspath(path) != _here]
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _next is not None and _next.loader is not None:  # the one that there would have been
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
"""


def with_e2b(home: Home, settings: ServeSettings, options: dict[str, Any]) -> ServeSettings:
    """The settings, with what the ``--e2b`` options say. SpecError."""
    from ..server import tls
    from ..server.e2b.settings import DEFAULT_PORT, E2BSettings

    given = [
        flag for flag, name in (
            ("--e2b", "e2b"), ("--e2b-port", "e2b_port"), ("--e2b-engine", "e2b_engine"), ("--e2b-pool", "e2b_pool"),
            ("--e2b-prepare", "e2b_prepare"),
        ) if options[name] is not None and options[name] is not False
    ]  # fmt: skip
    if options["no_e2b"]:
        if given:
            raise SpecError(f"--no-e2b and {given[0]} exclude each other")
        return replace(settings, e2b=None)
    if options["e2b_port"] is not None and not options["e2b"]:
        raise SpecError("--e2b-port needs --e2b")
    e2b = E2BSettings(engine=options["e2b_engine"] or "", pool=options["e2b_pool"] or 0, prepare=options["e2b_prepare"])
    if options["e2b"]:
        e2b = replace(e2b, pages=True)
        if settings.tls and options["e2b_port"] is not None:
            raise SpecError("--e2b-port is for a server without TLS", hint="this one's own port speaks it already")
        if settings.authority:
            e2b = replace(e2b, authority=settings.authority, bundle=str(tls.make_bundle(home)))
        elif not settings.tls and not settings.url:
            port = DEFAULT_PORT if options["e2b_port"] is None else options["e2b_port"]
            authority, certificate = tls.make_own(home, tls.names_of(settings))
            e2b = replace(
                e2b, port=port, certificate=str(certificate), authority=str(authority),
                bundle=str(tls.make_bundle(home)),
            )  # fmt: skip
    return replace(settings, e2b=e2b)


def told(server: ServerState, key: str | None) -> dict[str, dict[str, str]]:
    """Two ways to set up E2B's clients, each by its variables: ``url`` and ``domain``."""
    from ..server.e2b.keys import to_e2b

    facade = server.e2b
    assert facade is not None
    own = {} if key is None else {"E2B_API_KEY": to_e2b(key)}
    url = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL"), server.url)
    domain = {"E2B_DOMAIN": facade.domain(urlsplit(server.url).netloc)}
    if facade.settings.bundle:
        domain |= {"SSL_CERT_FILE": facade.settings.bundle, "NODE_EXTRA_CA_CERTS": facade.settings.authority}
    if _unknown(domain["E2B_DOMAIN"]):
        domain["NODE_OPTIONS"] = f"--require={_written(server, 'localhost.cjs', _SHIM)}"
        domain["PYTHONPATH"] = str(_written(server, "python/sitecustomize.py", _PYTHON_SHIM).parent)
    if not (server.url.startswith("https:") or facade.tls_port):
        return {"url": {**url, **own}}
    # Hosts of servers inside (get_host) are the same both ways.
    url |= {name: value for name, value in domain.items() if name != "E2B_DOMAIN"}
    return {"url": {**url, **own}, "domain": {**domain, **own}}


def tell(server: ServerState, key: str | None) -> None:
    """For people: lines to copy."""
    ways = told(server, key)
    texts = {"url": "# E2B's clients, by URL:", "domain": "# E2B's clients, by name and over TLS (instead of by URL):"}
    for way, names in ways.items():
        click.echo(texts[way])
        for name, value in names.items():
            besides = '"${PYTHONPATH:+:$PYTHONPATH}"' if name == "PYTHONPATH" else ""
            click.echo(f"export {name}={shlex.quote(value)}{besides}")
        if key is None:
            click.echo('export E2B_API_KEY="$(sloplet key create --name NAME --e2b)"')


def advise(server: ServerState) -> None:
    """What the lines do not say."""
    if server.e2b is None:
        return
    domain = server.e2b.domain(urlsplit(server.url).netloc)
    if _unknown(domain):
        note(
            f"this system knows no *.{domain.partition(':')[0]}. E2B's clients do so themselves, in Node by this "
            "NODE_OPTIONS, and other Python by this PYTHONPATH; all programs do after `apt install libnss-myhostname`"
        )
    elif not domain.partition(":")[0].endswith("localhost"):
        note(f"E2B's clients need api.{domain} and *.{domain} to be names of this server")


def _unknown(domain: str) -> bool:
    """Whether names below localhost are unknown here: to the system, and not to a Python that was told."""
    name = domain.partition(":")[0]
    if not name.endswith("localhost"):
        return False
    try:
        _socket.getaddrinfo(f"api.{name}", None)
    except OSError:
        return True
    return False


def _written(server: ServerState, name: str, text: str) -> Path:
    from ..server.tls import folder_of

    path = folder_of(server.home) / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(text)
    return path
