"""``sloplet info``: everything known about one sandbox."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import click

from ..errors import SlopletError
from .options import Verb, json_option, name_argument
from .output import age, plain, print_json, size, span


@click.command("info", cls=Verb, examples="sloplet info dev\nsloplet inspect dev --json")
@name_argument()
@json_option
def info(name: str, as_json: bool) -> None:
    """Everything known about a sandbox: settings, state, use, guarantees. Also called `inspect`."""
    document = asyncio.run(_collect(name))
    if as_json:
        print_json(document)
        return
    for key, value in _lines(document):
        click.echo(f"{key + ':':<12} {plain(value)}")


async def _collect(name: str) -> dict[str, Any]:
    from ..sandbox import AsyncSandbox

    box = await AsyncSandbox.connect(name)
    known = await box.info()
    document: dict[str, Any] = {**known.to_dict(), "metrics": None, "guarantees": None}
    if known.state == "running":
        try:
            document["metrics"] = (await box.metrics()).to_dict()
            document["guarantees"] = [item.to_dict() for item in await box.guarantees()]
        except SlopletError as error:  # it died under our eyes: what is known is still worth showing
            document["reason"] = document["reason"] or str(error)
    return document


def _lines(document: dict[str, Any]) -> list[tuple[str, str]]:
    spec, metrics = document["spec"], document["metrics"]
    lines = [
        ("name", document["name"] or "-"),
        ("id", document["id"]),
        ("state", document["state"] + (f": {document['reason']}" if document["reason"] else "")),
        ("engine", f"{document['engine']} (rung: {document['rung']}, asked for: {spec['engine']})"),
        ("image", spec["image"]),
        ("workdir", document["workdir"]),
        ("user", spec["user"]),
        ("age", age(document["created_at"])),
    ]
    if document["expires_at"] is not None:
        lines.append(("expires in", span(document["expires_at"] - time.time())))
    if metrics:
        lines += [
            ("cpu", f"{metrics['cpu_seconds']:.2f} s used, at most {spec['limits']['cpus']:g} CPUs"),
            ("memory", f"{size(metrics['memory'])} of {size(metrics['memory_limit'])}"),
            ("processes", f"{metrics['pids']} of {metrics['pids_limit']}"),
            ("disk", f"{size(metrics['disk_used'])} of {size(metrics['disk_limit'])}"),
        ]
    for item in document["guarantees"] or ():
        sign = "enforced" if item["enforced"] else "NOT ENFORCED"
        value = f" {item['value']}" if item["value"] else ""
        lines.append((item["control"], f"{sign}{value}: {item['how']}"))
    return lines
