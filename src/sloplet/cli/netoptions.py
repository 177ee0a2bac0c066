"""The network's options of ``run``, ``create``, ``shell`` and ``net learn``, and how they become arguments of the
library. No value of a secret is ever an option: others can read a command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import SpecError
from .options import stacked, whole_number

if TYPE_CHECKING:
    from ..netspec import Secret

K = TypeVar("K")
V = TypeVar("V")

limits_options = stacked(
    click.option("--inspect", is_flag=True, help="Open TLS, so that the log has methods and paths."),
    click.option("--passthrough", multiple=True, metavar="HOST", help="Never open TLS to this host."),
    click.option("--max-connections", "max_connections", metavar="N", help="Connections at once. [default: 512]"),
    click.option("--bandwidth", metavar="SIZE", help="Bytes a second, both directions together, for example 10m."),
    click.option("--budget", metavar="SIZE", help="Bytes in all, both directions together."),
    click.option("--on-budget", "on_budget", metavar="WHAT", help="refuse, pause or kill. [default: refuse]"),
)

reach_options = stacked(
    click.option("--port", "ports", multiple=True, metavar="N[:HERE]",
                 help="Listen on 127.0.0.1 for its port N, at port HERE or any that is free."),
    click.option("--link", "links", multiple=True, metavar="HOST=NAME[:PORT]",
                 help="HOST inside is another sandbox; needs a network."),
)  # fmt: skip

secret_option = click.option(
    "--secret", "secrets", multiple=True, metavar="SECRET",
    help="NAME=env:VARIABLE@HOST,..., or =cmd:COMMAND@..., or =file:PATH@...; NAME@HOST takes your variable NAME.",
)  # fmt: skip

rule_options = stacked(
    click.option(
        "--allow",
        multiple=True,
        metavar="RULE",
        shell_complete=lambda *args: rule_words(*args),
        help="A host it may reach; @github and the like are sets.",
    ),
    click.option(
        "--deny",
        multiple=True,
        metavar="RULE",
        shell_complete=lambda *args: rule_words(*args),
        help="A host it may not reach, whatever is allowed.",
    ),
)

network_options = stacked(
    click.option("--network", metavar="POLICY", help="none, learn, or a policy's FILE. [default: none]"),
    rule_options,
    click.option("--ask", is_flag=True, help="Ask in your terminal about what no rule decides."),
    limits_options,
    secret_option,
    reach_options,
)


def rule_words(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion: what is known of rules are the presets."""
    from ..network.presets import PACKAGE_INDEXES, presets

    return [f"@{name}" for name in (*presets(), PACKAGE_INDEXES) if f"@{name}".startswith(incomplete)]


#: Their names, as click calls them.
NETWORK_KEYS = ("network", "allow", "deny", "ask", "inspect", "passthrough", "max_connections", "bandwidth", "budget",
                "on_budget", "secrets", "ports", "links")  # fmt: skip
_POLICY_KEYS = NETWORK_KEYS[1:10]


def network_arguments(options: dict[str, Any], ask: Any = True) -> dict[str, Any]:
    """The keyword arguments of ``AsyncSandbox``; ``ask`` is whom to ask where --ask is given (True: nobody yet)."""
    arguments: dict[str, Any] = {}
    network = _network(options, ask)
    if network is not None:
        arguments["network"] = network
        _warn(() if network == "none" else network.spec.allow)
    if options.get("secrets"):
        arguments["secrets"] = parse_secrets(options["secrets"])
    if options.get("ports"):
        arguments["ports"] = _each_once("--port", (parse_port(text) for text in options["ports"]))
    if options.get("links"):
        arguments["links"] = _each_once("--link", (_link(text) for text in options["links"]))
    return arguments


def _each_once(flag: str, pairs: Iterable[tuple[K, V]]) -> dict[K, V]:
    """Two that speak of the same are a slip: which of them was meant?"""
    found: dict[K, V] = {}
    for key, value in pairs:
        if key in found:
            raise SpecError(f"{flag} {key} is there twice", hint="leave one of them")
        found[key] = value
    return found


def _warn(rules: Iterable[str]) -> None:
    from ..network.presets import warnings
    from .output import note, plain

    for text in warnings(rules):
        note(plain(text))


def _network(options: dict[str, Any], ask: Any) -> Any:
    named, given = options.get("network"), [key for key in _POLICY_KEYS if options.get(key)]
    if named == "none":
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise SpecError(f"{flag} and --network none", hint="leave one of them")
        return "none"  # said, to a template that may have one
    if named is None and not given:
        for key in ("secrets", "links"):
            if options.get(key) and not options.get("template"):  # a template may have one: who starts it knows
                raise SpecError(f"--{key[:-1]} needs a network", hint="add --allow HOST, or --network FILE")
        return None
    return policy({**options, "network": named}, ask)


def policy(options: dict[str, Any], ask: Any = None) -> Any:
    """A Network of --network (a file, or learn), and of the other options, which add to its rules and replace the
    rest."""
    from ..netspec import Network

    settings: dict[str, Any] = {}
    if options.get("network") == "learn":
        settings["learn"] = True
    elif options.get("network") is not None:
        from .netfile import read_policy

        settings = read_policy(options["network"])
    for key in ("allow", "deny", "passthrough"):
        if options.get(key):
            before = settings.get(key, [])
            settings[key] = [*before, *options[key]] if isinstance(before, list) else before
    if options.get("inspect"):
        settings["inspect"] = True
    if options.get("max_connections") is not None:
        settings["connections"] = whole_number("max-connections", options["max_connections"])
    for key in ("bandwidth", "budget", "on_budget"):
        if options.get(key) is not None:
            settings[key] = options[key]
    if options.get("on_budget") is not None and settings.get("budget") is None:
        raise SpecError("--on-budget without a budget", hint="add --budget SIZE")
    if options.get("ask") or settings.get("ask"):
        settings["ask"] = ask
    return Network(**settings)


def parse_port(text: str) -> tuple[int, int]:
    """``8000`` or ``8000:8080``: inside, and outside (0: any)."""
    inside, separator, outside = text.partition(":")
    try:
        found = int(inside), int(outside) if separator else 0
    except ValueError:
        raise SpecError(f"{text[:80]!r} is not a port", hint="write 8000, or 8000:8080 for port 8080 here") from None
    if not 1 <= found[0] <= 65535 or not 0 <= found[1] <= 65535:
        raise SpecError(f"{text[:80]!r} is not a port", hint="from 1 to 65535")
    return found


def _link(text: str) -> tuple[str, str]:
    name, separator, target = text.partition("=")
    if not separator or not name or not target:
        raise SpecError(f"--link {text[:80]!r} is not a link", hint="write --link db=SANDBOX, or db=SANDBOX:5432")
    return name, target


_SECRET_HINT = "write NAME=env:VARIABLE@host.example.com (or cmd:, or file:); never the value itself"


def parse_secrets(texts: Iterable[str]) -> dict[str, Secret]:
    """``NAME=SOURCE@HOST[,HOST...][/WHERE[,WHERE...]]``. What is wrong is not repeated: it may be a value."""
    from ..netspec import Secret

    found: dict[str, Secret] = {}
    for text in texts:
        source, at, rest = text.rpartition("@")
        if not at or not rest:
            raise SpecError("--secret names no host", hint=_SECRET_HINT)
        hosts, _, where = rest.partition("/")
        name, separator, place = source.partition("=")
        if name in found:
            raise SpecError("two --secret have the same name", hint="leave one of them")
        found[name] = Secret(
            **secret_source(place if separator else f"env:{name}"),
            hosts=hosts.split(","),
            where=where.split(",") if where else ("headers",),
        )
    return found


def secret_source(text: str) -> dict[str, Any]:
    """Where a value is, as arguments of ``Secret``."""
    kind, _, rest = text.partition(":")
    if kind == "env" and rest:
        return {"env": rest}
    if kind == "cmd" and rest:
        return {"command": rest}
    if kind == "file" and rest:
        return {"value": read_value(rest)}
    raise SpecError("--secret does not say where its value is", hint=_SECRET_HINT)


def read_value(path: str) -> str:
    """A secret's value from a file, or from stdin (``-``); the line break at its end is not part of it."""
    from ..secretsource import read_file
    from ..secretspec import MAX_VALUE

    return read_file(path, MAX_VALUE)
