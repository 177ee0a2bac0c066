"""``sloplet secret``: the values behind a sandbox's placeholders. Never printed, never an argument."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from ..errors import SpecError
from .groups import VerbGroup
from .netoptions import read_value
from .options import Verb, json_option, name_argument
from .output import print_json, print_table


@click.group(
    "secret",
    cls=VerbGroup,
    default="ls",
    takes_words=True,
    examples="""
    sloplet create dev --allow api.github.com --secret GITHUB_TOKEN@api.github.com
    sloplet secret ls dev
    sloplet secret set dev GITHUB_TOKEN --command 'pass show github'
    sloplet secret rm dev GITHUB_TOKEN
    """,
)
def secret() -> None:
    """Secrets of a sandbox: inside there is only a placeholder. Without a verb of its own: `secret ls`."""


@secret.command(
    "set",
    cls=Verb,
    examples="""
    sloplet secret set dev GITHUB_TOKEN --env GITHUB_TOKEN
    sloplet secret set dev GITHUB_TOKEN --command 'pass show github'
    pass show github | sloplet secret set dev GITHUB_TOKEN --file -
    """,
)
@name_argument()
@click.argument("secret", metavar="SECRET", shell_complete=lambda *args: secret_names(*args))
@click.option("--env", metavar="VARIABLE", help="The value of your variable.")
@click.option("--command", metavar="TEXT", help="What this command (of /bin/sh) prints.")
@click.option("--file", metavar="FILE", help="What is in this file; - is stdin.")
@json_option
def set_(name: str, secret: str, env: str | None, command: str | None, file: str | None, as_json: bool) -> None:
    """Give a secret its value, or another one (a rotation): at once, for commands that run too.

    The value is kept in the keeper's memory only, also while the sandbox sleeps. Give it again when the keeper was
    restarted.
    """
    if sum(source is not None for source in (env, command, file)) != 1:
        raise SpecError("where is the value?", hint="give one of --env VARIABLE, --command TEXT and --file FILE")
    source = {"env": env, "command": command} if file is None else {"value": read_value(file)}
    if source.get("value") == "":
        raise SpecError("the value is empty", hint=f"`sloplet secret rm {name} {secret}` forgets the one that is there")
    asyncio.run(_set(name, secret, source))
    if as_json:
        print_json({"sandbox": name, "secret": secret, "set": True})


@secret.command("rm", cls=Verb, examples="sloplet secret rm dev GITHUB_TOKEN")
@name_argument()
@click.argument("secret", metavar="SECRET", shell_complete=lambda *args: secret_names(*args))
@json_option
def rm(name: str, secret: str, as_json: bool) -> None:
    """Forget a value, at once: requests that need it are refused."""
    asyncio.run(_set(name, secret, None))
    if as_json:
        print_json({"sandbox": name, "secret": secret, "set": False})


async def _set(name: str, secret: str, source: dict[str, Any] | None) -> None:
    from ..netspec import Secret
    from ..network_api import read_secret
    from .holding import holder

    controller = await holder()
    info = await controller.find(name)
    known = {item.name: item for item in await controller.secrets(info.id)}
    if secret not in known:
        raise SpecError(
            f"the sandbox {name} has no secret {secret[:80]!r}",
            hint=f"it has {', '.join(known)}" if known else "make it with --secret NAME=env:VARIABLE@HOST",
        )
    value = None
    if source is not None:
        asked = known[secret]
        value = await read_secret(Secret(**source, hosts=asked.hosts, where=asked.where))
    await controller.set_secrets(info.id, {secret: value})


@secret.command("ls", cls=Verb, examples="sloplet secret ls dev\nsloplet secret ls dev --json")
@name_argument()
@json_option
def ls(name: str, as_json: bool) -> None:
    """List a sandbox's secrets: what they are called, where they may be sent, and what is seen of them inside."""
    found = asyncio.run(_list(name))
    if as_json:
        print_json(found)
    else:
        rows = [(i["name"], ", ".join(i["hosts"]), ", ".join(i["where"]), i["placeholder"]) for i in found]
        print_table(("SECRET", "HOSTS", "WHERE", "PLACEHOLDER"), rows)


async def _list(name: str) -> list[dict[str, Any]]:
    from .holding import holder

    controller = await holder()
    return [item.to_dict() for item in await controller.secrets((await controller.find(name)).id)]


def secret_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion: those of the sandbox that was named before."""
    from .completing import secrets

    return secrets(ctx.params.get("name"), incomplete)
