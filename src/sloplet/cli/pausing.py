"""``sloplet pause`` and ``sloplet resume``: a sandbox sleeps on disk, and goes on where it was."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ..errors import SlopletError
from .options import Verb, disk_option, json_option, name_argument
from .output import EXIT_OURS, age, print_json, report_error, size
from .working import finish, working

if TYPE_CHECKING:
    from ..controller import SandboxInfo


@dataclass(frozen=True)
class _Done:
    name: str
    info: SandboxInfo | None
    seconds: float
    bytes: int | None = None
    error: SlopletError | None = None
    before: str = ""


@click.command("pause", cls=Verb, examples="sloplet pause dev\nsloplet pause dev ci\nsloplet pause dev --disk")
@name_argument(multiple=True)
@disk_option
@json_option
def pause(names: tuple[str, ...], files_only: bool, as_json: bool) -> int:
    """Write memory and disk of sandboxes and free all they use. They wake when they are used, also days later.

    With --disk their processes end: what wakes has the files, and nothing runs in it.
    """
    return _each(names, "pause", as_json, memory=not files_only)


@click.command("resume", cls=Verb, examples="sloplet resume dev\nsloplet resume dev ci\nsloplet resume dev --json")
@name_argument(multiple=True)
@json_option
def resume(names: tuple[str, ...], as_json: bool) -> int:
    """Let paused sandboxes go on where they were, and dead ones from their last checkpoint."""
    return _each(names, "resume", as_json)


def _each(names: tuple[str, ...], method: str, as_json: bool, *, memory: bool = True) -> int:
    from .saved import look_at

    names = tuple(dict.fromkeys(names))
    done = finish(_all(names, method, memory), lambda: look_at(*names))
    failed = [item.error for item in done if item.error is not None]
    if as_json:
        found = [item.info.to_dict() for item in done if item.info is not None]
        print_json({"sandboxes": found, "failed": [error.to_dict() for error in failed]})
    for item in done:
        if item.info is not None and not as_json:
            click.echo(f"{item.name}: {_said(item, item.info)}")
        elif item.error is not None and not as_json:
            report_error(item.error, False)
    return EXIT_OURS if failed else 0


async def _all(names: tuple[str, ...], method: str, memory: bool) -> list[_Done]:
    what = ("saving " if method == "pause" else "waking ") + ", ".join(names)
    return await working(what, asyncio.gather(*(_one(name, method, memory) for name in names)))


async def _one(name: str, method: str, memory: bool) -> _Done:
    from .holding import holder
    from .saved import saved_size

    began = time.monotonic()
    try:
        controller = await holder()
        before = await controller.find(name)
        if method == "pause":
            info = await controller.pause(before.id, memory=memory)
        else:
            info = await controller.resume(before.id)
        seconds = time.monotonic() - began
        count = await saved_size(controller, info) if method == "pause" else None
        return _Done(name, info, seconds, count, before=before.state)
    except SlopletError as error:
        return _Done(name, None, time.monotonic() - began, error=error)


def _said(done: _Done, info: SandboxInfo) -> str:
    if done.before == info.state:
        return f"{info.state} already"
    took = f"{done.seconds:.2f} s"
    if info.state == "paused":
        return f"paused, {size(done.bytes)} saved in {took}" if done.bytes is not None else f"paused in {took}"
    if done.before == "dead" and info.recovered_from is not None:
        return f"{info.state}, recovered in {took} from its checkpoint of {age(info.recovered_from)} ago"
    return f"{info.state}, woken in {took}"
