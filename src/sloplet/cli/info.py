"""``sloplet info``: everything known about one sandbox."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import click

from ..errors import SlopletError
from .options import Verb, json_option, name_argument
from .output import age, plain, print_json, size, span

if TYPE_CHECKING:
    from ..controller import Port, SandboxInfo


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
    from .holding import elsewhere

    box = await AsyncSandbox.connect(name)
    known = await box.info()
    document: dict[str, Any] = {**known.to_dict(), "metrics": None, "guarantees": None}
    document["saved_bytes"], document["head_name"] = await _states(known)
    document["ports"] = [port.to_dict() for port in await _ports(known)]
    document["server"] = elsewhere()
    here = known.holder == "keeper" and document["server"] is None
    document["keeper_pid"] = await _keeper_pid() if here else None
    if known.state == "running":
        try:
            document["metrics"] = (await box.metrics()).to_dict()
            document["guarantees"] = [item.to_dict() for item in await box.guarantees()]
        except SlopletError as error:  # it died under our eyes: what is known is still worth showing
            document["reason"] = document["reason"] or str(error)
    return document


async def _ports(known: SandboxInfo) -> list[Port]:
    from .holding import holder

    return await (await holder()).ports(known.id) if known.holder == "keeper" else []


async def _keeper_pid() -> int | None:
    from ..keeper.client import keeper_controller

    status = await (await keeper_controller()).status()
    return None if status is None else int(status["pid"])


async def _states(known: SandboxInfo) -> tuple[int | None, str | None]:
    """The size of the state it would go on from, and the name of the snapshot it is at."""
    if known.saved is None and known.head is None:
        return None, None
    from ..errors import SnapshotError
    from .holding import holder
    from .saved import saved_size

    controller = await holder()
    try:
        head = None if known.head is None else (await controller.find_snapshot(known.head, known.id)).name
    except SnapshotError:
        head = None
    return await saved_size(controller, known), head


def _lines(document: dict[str, Any]) -> list[tuple[str, str]]:
    spec, metrics = document["spec"], document["metrics"]
    lines = [
        ("name", document["name"] or "-"),
        ("id", document["id"]),
        ("state", _state(document)),
        ("engine", f"{document['engine']} (rung: {document['rung']}, asked for: {spec['engine']})"),
        ("held by", _holder(document)),
        ("image", spec["image"]),
        ("workdir", document["workdir"]),
        ("user", spec["user"] or ("agent" if spec["image"] == "host" else "the image's, or agent")),
        ("age", age(document["created_at"])),
    ]
    lines += [("label", f"{key}={value}") for key, value in spec["labels"].items()]
    if document["expires_at"] is not None:
        lines.append(("expires in", span(document["expires_at"] - time.time())))
    lines += [("port", f"{port['inside']} at {port['url']}") for port in document["ports"]]
    for volume in spec["volumes"]:  # what is mounted in a running one is among its guarantees
        if volume["mode"] == "copy" or not document["guarantees"]:
            lines.append(("volume", f"{volume['path']}: {volume['source'] or 'nothing'} ({volume['mode']})"))
    lines += _saved_lines(document)
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


def _holder(document: dict[str, Any]) -> str:
    if document["server"] is not None:
        return f"the server {document['server']}"
    if document["holder"] != "keeper":
        return "a running program"
    pid = document["keeper_pid"]
    return "the keeper" + (f" (pid {pid})" if pid is not None else ", which does not run now")


def _state(document: dict[str, Any]) -> str:
    from ..controller import SandboxInfo
    from .saved import state_text

    fields = {key: value for key, value in document.items() if key in SandboxInfo.__dataclass_fields__}
    return state_text(SandboxInfo.from_dict(fields))


def _saved_lines(document: dict[str, Any]) -> list[tuple[str, str]]:
    """How it sleeps, what it can go back to, and where it is in the tree of its snapshots."""
    spec, found = document["spec"], []
    if document["saved"] is not None:
        what = "saved" if document["state"] == "paused" else "checkpoint"
        when = "" if document["saved_at"] is None else f"{age(document['saved_at'])} ago, "
        found.append((what, f"{when}{size(document['saved_bytes'])}"))
    if document["head"] is not None:
        found.append(("snapshot", document["head_name"] or document["head"]))
    for key, text in (("template", "{}"), ("undo", "of the last {} commands at most")):
        if spec[key]:
            found.append((key, text.format(spec[key])))
    for key, label, text in (("idle", "idle", "pauses after {}"), ("checkpoint_every", "checkpoints", "every {}")):
        if spec[key] is not None:
            found.append((label, text.format(span(spec[key]))))
    return found
