"""``sloplet guarantees``: what is enforced, truthfully."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from .options import Verb, json_option, name_argument, sandbox_arguments, spec_options
from .output import print_json, print_table


@click.command(
    "guarantees",
    cls=Verb,
    examples="""
    sloplet guarantees
    sloplet guarantees dev
    sloplet guarantees --engine process --memory 1g --json
    """,
)
@name_argument(required=False)
@spec_options
@json_option
def guarantees(name: str | None, as_json: bool, **options: Any) -> None:
    """What is enforced in a named sandbox, or would be in a fresh one with these options (one is started to ask it)."""
    engine, found = asyncio.run(_ask(name, options))
    if as_json:
        print_json({"sandbox": name, "engine": engine, "guarantees": [item.to_dict() for item in found]})
        return
    click.echo(f"engine: {engine}")
    rows = [(i.control, "enforced" if i.enforced else "not enforced", i.value or "-", i.how) for i in found]
    print_table(("CONTROL", "STATE", "VALUE", "BY"), rows)


async def _ask(name: str | None, options: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    from ..sandbox import AsyncSandbox

    if name is not None:
        box = await AsyncSandbox.connect(name)
        return box.engine, await box.guarantees()
    async with AsyncSandbox(**sandbox_arguments(options)) as box:
        return box.engine, await box.guarantees()
