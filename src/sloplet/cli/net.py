"""``sloplet net``: what sandboxes may reach, and what they have reached."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import click

from ..errors import SpecError
from .groups import VerbGroup
from .netlearn import learn
from .netoptions import limits_options, policy, rule_options, rule_words
from .options import Verb, json_option, name_argument
from .output import note, plain, print_json, print_table, size

if TYPE_CHECKING:
    from ..netspec import NetworkSpec
    from ..network.log import Decision

_COLUMNS = ("TIME", "VERDICT", "TARGET", "ADDRESS", "OUT", "IN", "TOOK", "WHY")
_ALL = 1_000_000


@click.group(
    "net",
    cls=VerbGroup,
    default="show",
    takes_words=True,
    examples="""
    sloplet net dev
    sloplet net log dev --follow
    sloplet net allow dev api.github.com
    sloplet net learn --output policy.toml -- pip install requests
    sloplet run --network policy.toml -- pip install requests
    sloplet net presets
    """,
)
def net() -> None:
    """What a sandbox may reach, and what it has reached. Without a verb of its own: `net show`."""


@net.command("show", cls=Verb, examples="sloplet net show dev\nsloplet net show dev --json")
@name_argument()
@json_option
def show(name: str, as_json: bool) -> None:
    """The policy of a sandbox as it is now, with its secrets (never their values), ports and links."""
    document = asyncio.run(_collect(name))
    if as_json:
        print_json(document)
        return
    from .netfile import to_toml

    if document["mode"] == "none":
        click.echo("network: none, there is no way out")
    else:
        click.echo(to_toml(document["policy"]), nl=False)
    for item in document["secrets"]:
        where = "" if item["where"] == ["headers"] else f" ({', '.join(item['where'])})"
        click.echo(f"# secret {item['name']} for {', '.join(item['hosts'])}{where}")
    for item in document["ports"]:
        where = f" at {item['url']}" if item["url"] else f": {plain(item['problem'])}"
        click.echo(f"# port {item['inside']}{where}")
    for item in document["links"]:
        click.echo(f"# link {item['name']} to {item['sandbox']}" + (f":{item['port']}" if item["port"] else ""))


async def _collect(name: str) -> dict[str, Any]:
    from .holding import holder
    from .netfile import policy_settings

    controller = await holder()
    info = await controller.find(name)
    spec = await controller.network(info.id)  # as it is now; also what it has of its template
    ports = await controller.ports(info.id)
    return {
        "name": info.name, "id": info.id, "mode": spec.mode,
        "policy": None if spec.mode == "none" else policy_settings(spec),
        "secrets": [secret.to_dict() for secret in await controller.secrets(info.id)],
        "ports": [port.to_dict() for port in ports],
        "links": [{"name": link.name, "sandbox": link.ref, "port": link.port} for link in info.spec.links],
    }  # fmt: skip


@net.command(
    "log",
    cls=Verb,
    examples="sloplet net log dev\nsloplet net log dev --denied\nsloplet net log dev --follow --json",
)
@name_argument()
@click.option("-f", "--follow", is_flag=True, help="Go on as they come, until Ctrl-C.")
@click.option("--denied", is_flag=True, help="Only what was refused or cut.")
@click.option("-n", "--tail", type=click.IntRange(0), metavar="N", help="Only the last N. [default: all that is kept]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; with --follow one a line.")
def log(name: str, follow: bool, denied: bool, tail: int | None, as_json: bool) -> int:
    """What was decided about each connection: when, where to, the verdict, why, how much and how long."""
    try:
        asyncio.run(_log(name, follow, denied, tail, as_json))
    except KeyboardInterrupt:
        return 0 if follow else 130
    return 0


async def _log(name: str, follow: bool, denied: bool, tail: int | None, as_json: bool) -> None:
    from ..sandbox import AsyncSandbox

    box = await AsyncSandbox.connect(name)
    found = await box.network.log(limit=_ALL)
    after = found[-1].seq if found else 0
    rows = [row for row in found if _wanted(row, denied)]
    rows = rows if tail is None else rows[len(rows) - min(tail, len(rows)) :]
    if not follow:
        if as_json:
            print_json([row.to_dict() for row in rows])
        else:
            print_table(_COLUMNS, [_cells(row) for row in rows])
        return
    for row in rows:
        _line(row, as_json)
    async for row in box.network.follow(after=after):
        if _wanted(row, denied):
            _line(row, as_json)


def _wanted(row: Decision, denied: bool) -> bool:
    return not denied or row.verdict in ("deny", "cut")


def _line(row: Decision, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(row.to_dict()))
        return
    when, verdict, target, address, out, into, took, why = _cells(row)
    click.echo(f"{when}  {verdict:<6}  {target}  {address}  {out} out, {into} in, {took}  {why}")


def _cells(row: Decision) -> tuple[str, ...]:
    host = row.name or (f"[{row.address}]" if ":" in row.address else row.address)
    why = row.reason if row.verdict != "allow" else f"{row.rule} {row.request}".strip()
    took = "open" if row.state == "open" else f"{row.duration:.2f}s"
    when = time.strftime("%H:%M:%S", time.localtime(row.time))
    cells = (when, row.verdict, f"{host}:{row.port}", (row.address or "-") if row.name else "-", size(row.bytes_out),
             size(row.bytes_in), took, why)  # fmt: skip
    return tuple(plain(cell, 300) for cell in cells)


@net.command(
    "set",
    cls=Verb,
    examples="""
    sloplet net set dev --policy locked.toml
    sloplet net set dev --allow pypi.org --allow files.pythonhosted.org
    """,
)
@name_argument()
@click.option("--policy", "network", metavar="FILE", help="TOML or JSON with the keys of Network().")
@rule_options
@click.option("--ask", is_flag=True, help="What no rule decides is asked: `sloplet net ask NAME`.")
@limits_options
@json_option
def set_(name: str, as_json: bool, **options: Any) -> None:
    """Give a sandbox another policy, at once. What is not named is as in a new one: nothing is allowed.

    Open connections that are not allowed any more are cut.
    """
    if not any(value for value in options.values()):
        raise SpecError(
            "there is no policy",
            hint=f"--policy FILE, or --allow RULE; `sloplet net deny {name} '*'` denies everything",
        )
    if options["network"] == "learn":
        raise SpecError("learn is no file", hint="make the sandbox with --network learn")
    made = policy(options, ask=True)
    _told(asyncio.run(_change(name, "set", made)), as_json)


@net.command("allow", cls=Verb, examples="sloplet net allow dev api.github.com\nsloplet net allow dev @github")
@name_argument()
@click.argument("rules", nargs=-1, required=True, metavar="RULE...", shell_complete=rule_words)
@json_option
def allow(name: str, rules: tuple[str, ...], as_json: bool) -> None:
    """Allow more, at once."""
    _told(asyncio.run(_change(name, "allow", *rules)), as_json)


@net.command("deny", cls=Verb, examples="sloplet net deny dev api.github.com\nsloplet net deny dev 10.0.0.0/8:*")
@name_argument()
@click.argument("rules", nargs=-1, required=True, metavar="RULE...", shell_complete=rule_words)
@json_option
def deny(name: str, rules: tuple[str, ...], as_json: bool) -> None:
    """Deny something, at once; open connections there are cut."""
    _told(asyncio.run(_change(name, "deny", *rules)), as_json)


@net.command("remove", cls=Verb, examples="sloplet net remove dev api.github.com")
@name_argument()
@click.argument("rules", nargs=-1, required=True, metavar="RULE...")
@json_option
def remove(name: str, rules: tuple[str, ...], as_json: bool) -> None:
    """Take rules away, allowed or denied ones, as `net show` writes them; at once."""
    _told(asyncio.run(_change(name, "remove", *rules)), as_json)


async def _change(name: str, method: str, *words: Any) -> NetworkSpec:
    from ..sandbox import AsyncSandbox

    box = await AsyncSandbox.connect(name)
    changed: NetworkSpec = await getattr(box.network, method)(*words)
    return changed


def _told(spec: NetworkSpec, as_json: bool) -> None:
    from .netfile import policy_settings, to_toml

    if as_json:
        print_json(policy_settings(spec))
    else:
        click.echo(to_toml(policy_settings(spec)), nl=False)


@net.command("ask", cls=Verb, examples="sloplet create dev --ask\nsloplet net ask dev")
@name_argument()
def ask(name: str) -> int:
    """Answer, here, what a sandbox wants to connect to and no rule decides; until Ctrl-C. Nobody there: refused."""
    from .asking import asker, terminal

    fd = terminal()
    if fd is None:
        raise SpecError("there is no terminal to ask at", hint="run it in one")
    try:
        asyncio.run(_ask(name, asker(fd)))
    except KeyboardInterrupt:
        pass
    return 0


async def _ask(name: str, ask: Any) -> None:
    from ..sandbox import AsyncSandbox

    box = await AsyncSandbox.connect(name)
    note(f"questions of {name} come here; Ctrl-C ends it")
    async for question in box.network.asks():
        await box.network.answer(question, await ask(question))


@net.command(
    "presets", cls=Verb, examples="sloplet net presets\nsloplet net presets github\nsloplet net presets --json"
)
@click.argument("name", required=False, metavar="[PRESET]", shell_complete=lambda *args: preset_names(*args))
@json_option
def presets(name: str | None, as_json: bool) -> None:
    """Sets of rules that have a name: @github in a rule's place. package-indexes is what this machine itself uses."""
    found = _presets(name.removeprefix("@") if name is not None else None)
    if as_json:
        print_json(found)
    elif name is None:
        print_table(
            ("PRESET", "RULES", "WHAT"), [(f"@{k}", str(len(v["rules"])), v["about"]) for k, v in found.items()]
        )
    else:
        for item in found.values():
            click.echo(f"# {plain(item['about'])}")
            for warning in item.get("warnings", ()):
                click.echo(f"# {plain(warning)}")
            for rule in item["rules"]:
                click.echo(plain(rule))


def _presets(name: str | None) -> dict[str, Any]:
    from ..network.presets import PACKAGE_INDEXES, check_rule, expand, warnings
    from ..network.presets import presets as known

    if name is not None:
        name = check_rule(f"@{name}").removeprefix("@")
    found: dict[str, Any] = {}
    for preset in known().values():
        if name in (None, preset.name):
            found[preset.name] = {"about": preset.about, "rules": list(preset.rules)}
    if name in (None, PACKAGE_INDEXES):
        texts = [f"@{PACKAGE_INDEXES}"]
        found[PACKAGE_INDEXES] = {
            "about": "where this machine's own pip, npm and apt get packages from",
            "rules": [rule.text for rule in expand(texts)],
            "warnings": list(warnings(texts)),
        }
    return found


def preset_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [word[1:] for word in rule_words(ctx, param, "@" + incomplete)]


net.add_command(learn)
