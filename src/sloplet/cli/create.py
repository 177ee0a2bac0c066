"""``sloplet create``: a named sandbox that the keeper holds."""

from __future__ import annotations

from typing import Any

import click

from .netoptions import network_options
from .options import (
    Verb,
    json_option,
    label_option,
    life_options,
    sandbox_arguments,
    spec_options,
    template_option,
    volume_option,
)
from .output import print_json
from .working import finish, working


@click.command(
    "create",
    cls=Verb,
    examples="""
    sloplet create dev
    sloplet create dev --memory 2g --cpus 2 --ttl 8h
    sloplet create ci --image ./rootfs.tar --at-least container --json
    sloplet create dev --reuse && sloplet exec dev -- make
    sloplet create web --template warm --idle 5m --checkpoint-every 60s
    sloplet create careful --undo 10
    sloplet create ci-7 --label team=search --label job=7
    sloplet create work -v cache:/cache -v ./repo:/workspace:copy
    sloplet create web --port 8000 --allow pypi.org --allow files.pythonhosted.org
    """,
)
@click.argument("name")
@spec_options
@volume_option
@template_option
@label_option
@network_options
@life_options
@click.option("--reuse", is_flag=True, help="Fine if it is there already with the same settings.")
@json_option
def create(name: str, reuse: bool, as_json: bool, **options: Any) -> None:
    """Make a named sandbox that stays until `sloplet rm` or its TTL ends it."""
    info = finish(_create(name, sandbox_arguments(options), reuse, as_json), lambda: _look(name))
    if as_json:
        print_json(info.to_dict())
    else:
        click.echo(info.name)


async def _create(name: str, arguments: dict[str, Any], reuse: bool, quiet: bool) -> Any:
    from ..network_api import read_secrets
    from ..sandbox import AsyncSandbox
    from .holding import holder
    from .imaging import bring_image

    box = AsyncSandbox(name, **arguments)  # refuses nonsense before a keeper is started
    await bring_image({**arguments, "as_json": quiet})
    if reuse:
        return await working(f"starting {name}", box.start())
    controller = await holder()
    values = await read_secrets(arguments.get("secrets", {})) | getattr(arguments.get("network"), "values", {})
    info = await working(f"starting {name}", controller.create(box.spec))
    if values:
        await controller.set_secrets(info.id, values)
    return info


async def _look(name: str) -> str:
    from ..errors import SandboxNotFound
    from .saved import look_at

    try:
        return await look_at(name)
    except SandboxNotFound:
        return f"{name} was not made"
