"""``sloplet create``: a named sandbox that the keeper holds."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from .options import Verb, json_option, sandbox_arguments, spec_options
from .output import print_json


@click.command(
    "create",
    cls=Verb,
    examples="""
    sloplet create dev
    sloplet create dev --memory 2g --cpus 2 --ttl 8h
    sloplet create ci --image ./rootfs.tar --at-least container --json
    sloplet create dev --reuse && sloplet exec dev -- make
    """,
)
@click.argument("name")
@spec_options
@click.option("--ttl", metavar="TIME", help="End it after that long, for example 90s, 5m or 8h.")
@click.option("--reuse", is_flag=True, help="Fine if it is there already with the same settings.")
@json_option
def create(name: str, ttl: str | None, reuse: bool, as_json: bool, **options: Any) -> None:
    """Make a named sandbox that stays until `sloplet rm` or its TTL ends it."""
    info = asyncio.run(_create(name, {**sandbox_arguments(options), "ttl": ttl}, reuse))
    if as_json:
        print_json(info.to_dict())
    else:
        click.echo(info.name)


async def _create(name: str, arguments: dict[str, Any], reuse: bool) -> Any:
    from ..keeper.client import keeper_controller
    from ..sandbox import AsyncSandbox

    box = AsyncSandbox(name, **arguments)  # refuses nonsense before a keeper is started
    if reuse:
        return await box.start()
    controller = await keeper_controller()
    return await controller.create(box.spec)
