"""``sloplet key``: who may use the server of this machine, and how much of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from .groups import VerbGroup
from .key_ssh import ssh_add, ssh_ls, ssh_rm
from .keyring import key_names, open_keys, tell
from .options import Verb, json_option
from .output import age, note, print_json, print_table, size, span

if TYPE_CHECKING:
    from ..server.keys import Key, KeyLimits


@click.group(
    "key",
    cls=VerbGroup,
    default="ls",
    examples="""
    sloplet key create --name ci --max-sandboxes 20 --max-memory 8g --expires 30d
    sloplet key create --name ana --engines gvisor --at-least gvisor
    sloplet key ls
    sloplet key rm ci
    sloplet key ssh-add ci ~/.ssh/id_ed25519.pub
    """,
)
def key() -> None:
    """Keys of the server of this machine. Without a verb of its own: `key ls`."""


for _verb in (ssh_add, ssh_ls, ssh_rm):
    key.add_command(_verb)


@key.command(
    "create",
    cls=Verb,
    examples="""
    sloplet key create --name ci --max-sandboxes 20 --max-memory 8g --max-cpus 4 --expires 30d
    sloplet key create --name ci-2 --tenant ci
    sloplet key create --name ops --admin
    """,
)
@click.option("--name", required=True, help="What the key is called.")
@click.option("--tenant", metavar="TENANT", help="Whose sandboxes it sees. [default: its own name's]")
@click.option("--admin", is_flag=True, help="Manages keys, sees all tenants.")
@click.option("--max-sandboxes", type=int, metavar="N", help="Running at a time.")
@click.option("--max-memory", metavar="SIZE", help="The memory limits of those, together.")
@click.option("--max-cpus", type=float, metavar="N", help="The same of CPUs.")
@click.option("--max-disk", metavar="SIZE", help="The same of disks.")
@click.option("--engines", metavar="NAME,...", help="Only these engines.")
@click.option("--at-least", metavar="RUNG", help="Nothing weaker than this rung.")
@click.option("--rate", type=float, metavar="N", help="Requests a second.")
@click.option("--concurrency", type=int, metavar="N", help="Requests at a time.")
@click.option("--max-ttl", metavar="TIME", help="No sandbox lives longer, for example 8h or 1d.")
@click.option("--expires", metavar="TIME", help="The key ends after that long, for example 30d.")
@click.option("--e2b", is_flag=True, help="Print it as E2B's clients need it: E2B_API_KEY.")
@json_option
def create(
    name: str,
    tenant: str | None,
    admin: bool,
    max_sandboxes: int | None,
    max_memory: str | None,
    max_cpus: float | None,
    max_disk: str | None,
    engines: str | None,
    at_least: str | None,
    rate: float | None,
    concurrency: int | None,
    max_ttl: str | None,
    expires: str | None,
    e2b: bool,
    as_json: bool,
) -> None:
    """Make a key, and print it this once. Limits count over all of its tenant; what is not named is not limited."""
    from ..quantities import parse_duration
    from ..server.e2b.keys import to_e2b
    from ..server.keys import KeyLimits

    limits = KeyLimits.make(
        max_sandboxes=max_sandboxes, max_memory=max_memory, max_cpus=max_cpus, max_disk=max_disk,
        engines=[word.strip() for word in engines.split(",")] if engines is not None else (), at_least=at_least,
        rate=rate, concurrency=concurrency, max_ttl=max_ttl,
    )  # fmt: skip
    keys = open_keys()
    try:
        made, text = keys.create(
            name, tenant=tenant, admin=admin, limits=limits,
            expires=None if expires is None else parse_duration(expires, "expires"),
        )  # fmt: skip
    finally:
        keys.close()
    tell("key.create", made)
    if as_json:
        print_json({"key": text, "e2b_key": to_e2b(text), **made.to_dict()})
        return
    click.echo(to_e2b(text) if e2b else text)
    variable = "E2B_API_KEY" if e2b else "SLOPLET_KEY"
    note(f"key {made.name} of the tenant {made.tenant}; it is shown this once: export {variable}=...")


@key.command("ls", cls=Verb, examples="sloplet key\nsloplet key ls -a\nsloplet key ls --json")
@click.option("-a", "--all", "everything", is_flag=True, help="Also revoked and expired ones.")
@json_option
def ls(everything: bool, as_json: bool) -> None:
    """List keys: never the keys themselves, which nobody has but their holders."""
    keys = open_keys()
    try:
        found = [key for key in keys.list() if everything or _state(key) == "valid"]
    finally:
        keys.close()
    if as_json:
        print_json([{**key.to_dict(), "state": _state(key)} for key in found])
    elif found:
        columns = ("NAME", "TENANT", "STATE", "AGE", "EXPIRES", "MAY")
        print_table(columns, [_row(key) for key in found])
    else:
        click.echo("no keys (`sloplet serve` makes an admin's, `sloplet key create --name NAME` others)", err=True)


@key.command("rm", cls=Verb, examples="sloplet key rm ci")
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=key_names)
@json_option
def rm(names: tuple[str, ...], as_json: bool) -> None:
    """Revoke keys, by name or id. What they made stays, and is their tenant's."""
    keys = open_keys()
    try:
        gone = []
        for name in names:
            gone.append(keys.revoke(name))
            tell("key.rm", gone[-1])
    finally:
        keys.close()
    if as_json:
        print_json({"removed": [key.name for key in gone]})
        return
    for each in gone:
        click.echo(each.name)


def _state(key: Key) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= time.time() else "valid"


def _row(key: Key) -> tuple[str, ...]:
    left = "never" if key.expires_at is None else span(key.expires_at - time.time())
    may = (["everything (admin)"] if key.admin else []) + may_words(key.limits)
    return key.name, key.tenant, _state(key), age(key.created_at), left, ", ".join(may) or "no limits"


def may_words(limits: KeyLimits) -> list[str]:
    """A key's limits for people."""
    words = {
        "max_sandboxes": f"{limits.max_sandboxes} sandboxes",
        "max_memory": f"{size(limits.max_memory)} memory",
        "max_cpus": f"{limits.max_cpus or 0:g} cpus",
        "max_disk": f"{size(limits.max_disk)} disk",
        "rate": f"{limits.rate or 0:g} requests/s",
        "concurrency": f"{limits.concurrency} requests at a time",
        "max_ttl": f"{span(limits.max_ttl or 0)} to live",
        "at_least": f"at least {limits.at_least}",
        "engines": "engines " + " ".join(limits.engines),
    }
    return [text for name, text in words.items() if getattr(limits, name) not in (None, ())]
