"""``sloplet serve``: this machine as a sandbox server."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from ..errors import EngineUnavailable, SpecError
from . import serve_e2b
from .options import Verb, json_option
from .output import note, print_json

if TYPE_CHECKING:
    from ..server.settings import ServeSettings
    from ..server.state import ServerState
    from ..state.home import Home


@click.command(
    "serve",
    cls=Verb,
    examples="""
    sloplet serve
    sloplet serve --port 8080
    sloplet serve --e2b
    sloplet serve --host 0.0.0.0 --tls --name sandbox.example.org --domain sandbox.example.org
    sloplet serve --host 0.0.0.0 --tls-cert fullchain.pem --tls-key privkey.pem
    """,
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=7667, show_default=True, help="0: any that is free.")
@click.option("--domain", default="localhost", show_default=True, metavar="DOMAIN",
              help="PORT-ID.DOMAIN are servers inside sandboxes.")  # fmt: skip
@click.option("--name", "names", multiple=True, metavar="HOST",
              help="A further name or address that the server is called by; repeatable.")  # fmt: skip
@click.option("--url", metavar="URL", help="What clients call it by, if a proxy is in front.")
@click.option("--origin", "origins", multiple=True, metavar="ORIGIN",
              help="An origin whose web pages may call it: https://ui.example.org; repeatable.")  # fmt: skip
@click.option("--tls", "own_tls", is_flag=True, help="TLS by a certificate authority of its own, made when needed.")
@click.option("--tls-cert", metavar="FILE", help="TLS by this certificate: PEM, with its chain.")
@click.option("--tls-key", metavar="FILE", help="Its key.")
@click.option("--insecure", is_flag=True, help="Plain HTTP although others can reach it: keys can be read on the way.")
@click.option("--trust-proxy", "proxies", multiple=True, metavar="ADDRESS",
              help="Believe X-Forwarded-For and -Proto of this proxy; repeatable.")  # fmt: skip
@click.option("--allow-path", "allow_paths", multiple=True, metavar="PATH[:rw]",
              help="A folder of this machine that requests may use as a volume or an image; repeatable.")  # fmt: skip
@click.option("--allow-private", "allow_private", multiple=True, metavar="NETWORK",
              help="A private network that sandboxes' rules may open, or host.sloplet; repeatable.")  # fmt: skip
@click.option("--allow-registry", "registries", multiple=True, metavar="HOST[:PORT]",
              help="A registry at a private address that keys may pull from; repeatable.")  # fmt: skip
@click.option("--registry-login", "registry_logins", multiple=True, metavar="HOST[:PORT]",
              help="Pulls of all keys from there use this machine's own docker login; repeatable.")  # fmt: skip
@click.option("--grace", type=click.FloatRange(1, 86400), default=60.0, show_default=True, metavar="SECONDS",
              help="How long a client whose connection broke may take to come back.")  # fmt: skip
@click.option("--ssh-port", type=click.IntRange(0, 65535), metavar="PORT", help="SSH into sandboxes, on this port.")
@click.option("--no-mcp", is_flag=True, help="Without /mcp.")
@click.option("--e2b", is_flag=True, help="Say what to export for E2B's own clients; TLS for them on --e2b-port.")
@click.option("--no-e2b", is_flag=True, help="Without E2B's API.")
@click.option("--e2b-port", type=click.IntRange(0, 65535), metavar="PORT", help="With --e2b. [default: 7668]")
@click.option("--e2b-engine", metavar="ENGINE", help="What their sandboxes run on. [default: gvisor, else container]")
@click.option("--e2b-pool", type=click.IntRange(0, 100), metavar="N",
              help="Sandboxes of each of their templates that are kept ready.")  # fmt: skip
@click.option("--e2b-prepare", is_flag=True, help="Make the images of E2B's own templates at the start.")
@click.option("--max-creating", type=click.IntRange(1, 10_000), default=16, show_default=True, metavar="N",
              help="Sandboxes that are made at a time; others wait.")  # fmt: skip
@click.option("--max-upload", default="64g", show_default=True, metavar="SIZE", help="The longest streamed body.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="[default: text on a terminal, else json]")
@click.option("--allow-fake", "fake", is_flag=True, hidden=True, help="Let requests use the fake engine: for tests.")
@json_option
def serve(as_json: bool, **options: Any) -> None:
    """Serve sandboxes of this machine over HTTP, until Ctrl-C.

    Everything needs a key. The first start makes an admin's and prints it; `sloplet key create` makes others.
    """
    try:
        from ..server.run import serve as run
    except ImportError as error:
        raise EngineUnavailable(
            f"the server needs packages that are not here: {error.name}", hint="pip install 'sloplet[server]'"
        ) from None
    from ..server.logs import Logs
    from ..state.home import Home

    home = Home().open()
    settings = settings_of(home, options)
    logs = Logs(settings.log_format)
    try:
        asyncio.run(run(home, settings, lambda server: _ready(server, as_json, e2b=options["e2b"])))
    finally:
        logs.close()


def settings_of(home: Home, options: dict[str, Any]) -> ServeSettings:
    """What the options say, checked."""
    from urllib.parse import urlsplit

    from ..images.access import parse_registry
    from ..quantities import parse_size
    from ..server import tls
    from ..server.policy import parse_allowed_path, parse_private
    from ..server.settings import ServeSettings

    names = [tls.check_host_name(name) for name in options["names"]]
    if options["url"]:
        parts = urlsplit(options["url"])
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise SpecError(f"--url {options['url'][:80]} is not one", hint="for example https://sandbox.example.org")
        names.append(tls.check_host_name(parts.hostname))
    if bool(options["tls_cert"]) and options["own_tls"]:
        raise SpecError("--tls and --tls-cert exclude each other")
    if options["tls_key"] and not options["tls_cert"]:
        raise SpecError("--tls-key needs --tls-cert")
    settings = ServeSettings(
        host=address_of(options["host"]),
        port=options["port"],
        domain=tls.check_host_name(options["domain"]),
        names=tuple(names),
        origins=tuple(origin_of(text) for text in options["origins"]),
        certificate=_absolute(options["tls_cert"]),
        private_key=_absolute(options["tls_key"]),
        url=(options["url"] or "").rstrip("/"),
        proxies=tuple(address_of(text) for text in options["proxies"]),
        allow_paths=tuple(parse_allowed_path(text) for text in options["allow_paths"]),
        allow_private=tuple(parse_private(text) for text in options["allow_private"]),
        registries=tuple(parse_registry(text) for text in options["registries"]),
        registry_logins=tuple(parse_registry(text) for text in options["registry_logins"]),
        ssh_port=options["ssh_port"],
        mcp=not options["no_mcp"],
        max_creating=options["max_creating"],
        grace=options["grace"],
        max_upload=parse_size(options["max_upload"], "max-upload"),
        log_format=options["log_format"] or ("text" if sys.stderr.isatty() else "json"),
        fake=options["fake"],
    )
    if options["own_tls"]:
        from dataclasses import replace

        authority, certificate = tls.make_own(home, tls.names_of(settings))
        settings = replace(settings, authority=str(authority), certificate=str(certificate))
    if not (settings.tls or settings.loopback or options["insecure"]):
        raise SpecError(
            f"others could reach {settings.host}, and read keys on the way",
            hint="--tls (or --tls-cert and --tls-key) encrypts; --insecure if something in front does, or it is meant",
        )
    return serve_e2b.with_e2b(home, settings, options)


def address_of(text: str) -> str:
    """The address of a host. SpecError."""
    import ipaddress
    import socket

    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise SpecError(f"{text[:80]!r} is not an address of this machine", hint="for example 127.0.0.1") from None
    return str(found[0][4][0])


def origin_of(text: str) -> str:
    """As a browser sends it. SpecError."""
    from urllib.parse import urlsplit

    parts = urlsplit(text.rstrip("/"))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path or parts.query or parts.username:
        raise SpecError(f"--origin {text[:80]} is no origin", hint="for example https://ui.example.org; never '*'")
    return f"{parts.scheme}://{parts.netloc.casefold()}"


def _absolute(path: str | None) -> str | None:
    return None if not path else os.path.abspath(path)


def _ready(server: ServerState, as_json: bool, *, e2b: bool = False) -> None:
    """It answers. The first time there is no key: one is made now, when nothing can go wrong any more."""
    settings = server.settings
    fresh = None if server.keys.list() else server.keys.create("admin", admin=True)[1]
    if as_json:
        told = {
            "url": server.url, "key": fresh, "ca": settings.authority, "ssh": server.ssh and server.ssh.to_dict(),
            "e2b": serve_e2b.told(server, fresh) if e2b else None,
        }  # fmt: skip
        print_json({**{name: value for name, value in told.items() if value is not None}, "pid": os.getpid()})
        return
    click.echo(f"export SLOPLET_URL={server.url}")
    if settings.authority:
        click.echo(f"export SLOPLET_CA={settings.authority}")
    if fresh:
        click.echo(f"export SLOPLET_KEY={fresh}")
    if e2b:
        serve_e2b.tell(server, fresh)
    sys.stdout.flush()
    note(f"serving {server.home.path} at {server.url}")
    if fresh:
        note("this admin's key is shown this once; for everybody else: `sloplet key create --name NAME`")
    else:
        note("keys: `sloplet key ls`, `sloplet key create --name NAME`")
    if settings.authority:
        note(f"clients elsewhere need {settings.authority} as their SLOPLET_CA")
    if server.ssh is not None:
        note(f"SSH: `ssh -p {server.ssh.port} NAME@HOST`; its host key is {server.ssh.fingerprint}; see docs/ssh.md")
    if e2b:
        serve_e2b.advise(server)
    trust = f"--cacert {settings.authority} " if settings.authority else ""
    note(f'try: curl {trust}-H "Authorization: Bearer $SLOPLET_KEY" {server.url}/v1/sandboxes; see docs/server.md')
