"""``sloplet export`` and ``sloplet import``: a whole sandbox as one file."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Self

import click

from ..errors import FileMissing, SlopletError
from .options import Verb, json_option, name_argument
from .output import note, print_json, size
from .working import finish, shown, working

if TYPE_CHECKING:
    from ..controller import Controller, SandboxInfo, Snapshot

_AGAIN = 0.2


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
    if left := [volume.path for volume in made.spec.volumes if volume.mounted]:
        note(f"what is in its volumes is not in the archive: {', '.join(left)}")


async def _export(name: str, file: str, image: bool) -> tuple[Snapshot, float]:
    from .holding import holder

    controller = await holder()
    found = await controller.find(name)
    began = time.monotonic()
    path = os.path.abspath(file)
    async with _Progress(controller, "export", found.id) as progress:
        made = await working(f"writing {file}", controller.export(found.id, path, image=image), progress)
    return made, time.monotonic() - began


class _Progress:
    """How far the keeper is, by its events; asked only where somebody sees it."""

    def __init__(self, controller: Controller, what: str, sandbox: str = "", path: str | None = None) -> None:
        self._controller, self._wanted = controller, (f"{what}.progress", sandbox, path)
        self._now: tuple[int, int | None] = (0, None)
        self._listening: asyncio.Task[None] | None = None

    def __call__(self) -> tuple[int, int | None]:
        return self._now

    async def __aenter__(self) -> Self:
        if shown():
            self._listening = asyncio.ensure_future(self._listen())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        while True:
            try:
                async for event in self._controller.events():  # a paused sandbox has none of its own
                    if (event.type, event.sandbox, event.data.get("path")) == self._wanted:
                        self._now = (event.data["bytes"], event.data["total"])
            except SlopletError:
                pass  # no keeper runs yet
            await asyncio.sleep(_AGAIN)


async def _look(file: str) -> str:
    return f"{file} is whole" if os.path.exists(file) else f"{file} will be whole, or not there"


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
    from .holding import holder

    controller = await holder()  # also without a name: it is to outlive this command
    path = os.path.abspath(file)
    async with _Progress(controller, "import", path=path) as progress:
        return await working(f"checking and starting {file}", controller.load(path, name=name), progress)


async def _look_import() -> str:
    return "It was started, or nothing of it is left (`sloplet ls`)"
