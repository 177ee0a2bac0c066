"""``sloplet export`` and ``sloplet import``: a whole sandbox as one file."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from ..errors import FileMissing
from .options import Verb, json_option, name_argument
from .output import print_json, size
from .working import finish, working

if TYPE_CHECKING:
    from ..controller import SandboxInfo, Snapshot


@click.command(
    "export", cls=Verb, examples="sloplet export dev dev.sloplet\nsloplet export dev dev.sloplet --no-image --json"
)
@name_argument()
@click.argument("file", metavar="FILE", type=click.Path())
@click.option("--no-image", is_flag=True, help="Without the image: the other machine must have the same one.")
@json_option
def export(name: str, file: str, no_image: bool, as_json: bool) -> None:
    """Write a sandbox, running or paused, to one archive that `sloplet import` starts elsewhere.

    It holds everything that was in the sandbox's memory and files: keep it as you would keep those.
    """
    made, seconds = finish(_export(name, file, not no_image), lambda: _look(file))
    length = os.path.getsize(file)
    if as_json:
        print_json(
            {**made.to_dict(), "file": os.path.abspath(file), "file_bytes": length, "seconds": round(seconds, 3)}
        )
        return
    from .saved import kind_text

    click.echo(f"{file}: {kind_text(made)}, {size(length)} in {seconds:.2f} s")


async def _export(name: str, file: str, image: bool) -> tuple[Snapshot, float]:
    from ..sandbox import AsyncSandbox

    box = await AsyncSandbox.connect(name)
    began = time.monotonic()
    made = await working(f"writing {file}", box.export(file, image=image), lambda: _written(file))
    return made, time.monotonic() - began


def _written(file: str) -> tuple[int, int | None]:
    """How much of the archive is there, under its own name or a temporary one beside it."""
    folder, base = os.path.split(os.path.abspath(file))
    try:
        with os.scandir(folder) as entries:
            return max((e.stat().st_size for e in entries if base in e.name), default=0), None
    except OSError:
        return 0, None


async def _look(file: str) -> str:
    return f"{file} is whole" if os.path.exists(file) else f"{file} was not written"


@click.command("import", cls=Verb, examples="sloplet import dev.sloplet\nsloplet import dev.sloplet --name dev2")
@click.argument("file", metavar="FILE", type=click.Path())
@click.option("--name", metavar="NAME", help="What to call it. [default: as it was called]")
@json_option
def import_(file: str, name: str | None, as_json: bool) -> None:
    """Start the sandbox that an archive of `sloplet export` holds, and print its name.

    Every byte of the archive is checked before anything starts.
    """
    from ..spec import check_name

    if name is not None:
        check_name(name)
    if not os.path.exists(file):
        raise FileMissing(f"there is no {file!r} on this machine", hint="name a file that `sloplet export` wrote")
    info = finish(_import(file, name), _look_import)
    if as_json:
        print_json(info.to_dict())
    else:
        click.echo(info.name or info.id)


async def _import(file: str, name: str | None) -> SandboxInfo:
    from ..keeper.client import keeper_controller

    controller = await keeper_controller()  # also without a name: it is to outlive this command
    what = f"checking and starting {file} ({size(os.path.getsize(file))})"
    return await working(what, controller.load(os.path.abspath(file), name=name))


async def _look_import() -> str:
    return "it was started, or nothing of it is left: `sloplet ls` shows which"
