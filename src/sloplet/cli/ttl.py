"""``sloplet ttl``: how long a sandbox has to live from now on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from .options import Verb, json_option, name_argument
from .output import print_json, span
from .working import finish, working

if TYPE_CHECKING:
    from ..controller import SandboxInfo

_NEVER = "never"


@click.command("ttl", cls=Verb, examples="sloplet ttl dev 10m\nsloplet ttl dev never\nsloplet ttl dev 0")
@name_argument()
@click.argument("duration", metavar="TIME")
@json_option
def ttl(name: str, duration: str, as_json: bool) -> None:
    """Let a sandbox live that long from now on (90s, 10m, 8h), or "never" end.

    Then it ends, or sleeps if it was made with --on-ttl. With 0 that is now. One that sleeps is not woken.
    """
    from ..spec import check_ttl
    from .saved import look_at

    seconds = None if duration == _NEVER else check_ttl(duration)
    info = finish(_set(name, seconds), lambda: look_at(name))
    if as_json:
        print_json(info.to_dict())
    else:
        click.echo(f"{name}: {_said(info)}")


async def _set(name: str, seconds: float | None) -> SandboxInfo:
    from .holding import holder

    controller = await holder()
    found = await controller.find(name)
    return await working(f"setting the time of {name}", controller.set_ttl(found.id, seconds))


def _said(info: SandboxInfo) -> str:
    if info.state == "ended" or info.expires_at is None:
        return "ended" if info.state == "ended" else f"{info.state}, without end"
    then = "ends" if info.spec.on_ttl == "end" else "sleeps"
    return f"{info.state}, {then} in {span(info.expires_at - time.time())}"
