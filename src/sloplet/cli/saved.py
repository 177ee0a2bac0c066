"""Saved states in words: snapshots, templates, and sandboxes that sleep or could be woken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .output import age, plain, print_json, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..controller import Controller, SandboxInfo, Snapshot


def called(snapshot: Snapshot) -> str:
    """Its name, else its id: what other verbs take."""
    return snapshot.name or snapshot.id


def kind_text(snapshot: Snapshot) -> str:
    """live, or what "disk" means."""
    if snapshot.kind != "disk":
        return snapshot.kind
    return f"disk (files only: the {snapshot.engine} engine cannot save processes)"


def state_text(info: SandboxInfo) -> str:
    """One line on a sandbox's state, with what to do about it."""
    more = remark(info)
    if info.state == "dead":
        why = f": {info.reason}" if info.reason else ""
        return f"dead{why}" if info.saved is None else f"dead, {more} (it died{why})"
    if info.state == "paused":
        return f"paused {more}".rstrip()
    return f"{info.state}, {more}" if more else info.state


def remark(info: SandboxInfo, saved_bytes: int | None = None) -> str:
    """What there is to say beside its state."""
    if info.state == "paused":
        parts = [f"for {age(info.saved_at)}"] if info.saved_at is not None else []
        return ", ".join(parts + ([size(saved_bytes)] if saved_bytes is not None else []))
    if info.state == "dead":
        if info.saved is None:
            return info.reason
        return f"checkpoint of {_ago(info.saved_at)}: `sloplet resume {info.name or info.id}`"
    if info.recovered_from is not None:
        return f"recovered from its checkpoint of {_ago(info.recovered_from)}"
    return ""


def _ago(when: float | None) -> str:
    return "some time ago" if when is None else f"{age(when)} ago"


async def look_at(*refs: str) -> str:
    """What sandboxes are now, for someone who has interrupted a verb. The keeper does not do things by halves."""
    from .holding import holder

    controller = await holder()
    now = [f"{ref} is {state_text(await controller.find(ref))}" for ref in refs]
    return f"{', '.join(now)}; what was begun is finished or undone as a whole (`sloplet ls`)"


async def saved_size(controller: Controller, info: SandboxInfo) -> int | None:
    """How large the state is that it would go on from; None if nobody knows."""
    from ..errors import SnapshotError

    if info.saved is None:
        return None
    try:
        return (await controller.find_snapshot(info.saved, info.id)).bytes
    except SnapshotError:
        return None


async def parent_of(controller: Controller, snapshot: Snapshot) -> Snapshot | None:
    """What it descends from, if that is still there."""
    from ..errors import SnapshotError

    try:
        return None if snapshot.parent is None else await controller.find_snapshot(snapshot.parent)
    except SnapshotError:
        return None


def show(snapshot: Snapshot, parent: Snapshot | None, *, as_json: bool) -> None:
    """Everything known about it, printed."""
    if as_json:
        print_json(snapshot.to_dict())
        return
    for key, value in _lines(snapshot, parent):
        click.echo(f"{key + ':':<8} {plain(value)}")


def _lines(snapshot: Snapshot, parent: Snapshot | None) -> list[tuple[str, str]]:
    """For ``inspect``: what is known, line by line."""
    spec = snapshot.spec
    found = [
        ("name", snapshot.name or "-"),
        ("id", snapshot.id),
        ("role", snapshot.role),
        ("kind", kind_text(snapshot)),
        ("of", f"{snapshot.sandbox_name or '-'} ({snapshot.sandbox})"),
        ("parent", "-" if snapshot.parent is None else (called(parent) if parent else snapshot.parent)),
        ("engine", snapshot.engine),
        ("image", spec.image),
        ("age", age(snapshot.created_at)),
        ("size", size(snapshot.bytes)),
        ("limits", f"{spec.limits.cpus:g} CPUs, {size(spec.limits.memory)} memory, {size(spec.limits.disk)} disk"),
    ]
    if snapshot.note:
        found.append(("before", snapshot.note))
    return found


def document(snapshots: Sequence[Snapshot], infos: Sequence[SandboxInfo]) -> list[dict[str, Any]]:
    """For --json: flat, each with its parent, and ``head`` where its sandbox is now."""
    heads = {info.id: info.head for info in infos}
    return [{**item.to_dict(), "head": heads.get(item.sandbox) == item.id} for item in snapshots]
