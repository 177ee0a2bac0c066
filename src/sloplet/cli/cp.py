"""``sloplet cp``: files and folders between this machine and a sandbox."""

from __future__ import annotations

import asyncio

import click

from ..errors import SpecError
from ..spec import NAME_RE
from .options import Verb, sandbox_names


@click.command(
    "cp",
    cls=Verb,
    examples="""
    sloplet cp app.py dev:
    sloplet cp ./project dev:/workspace/
    sloplet cp dev:/workspace/result.json .
    sloplet cp dev:build/. ./out
    echo hello | sloplet cp - dev:greeting.txt
    sloplet cp dev:greeting.txt - | wc -c
    """,
)
@click.argument("source", metavar="SRC", shell_complete=sandbox_names)
@click.argument("target", metavar="DST", shell_complete=sandbox_names)
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
def cp(source: str, target: str, quiet: bool) -> int:
    """Copy files or folders into or out of a sandbox. One side is NAME:PATH, the other a path here, or - for stdin or
    stdout.

    As with `cp -r`: into a folder that exists (or ends with /) under its own name, else it becomes DST. FOLDER/. means
    its content. Relative paths in the sandbox begin at its working directory.
    """
    from_box, to_box = in_sandbox(source), in_sandbox(target)
    if (from_box is None) == (to_box is None):
        raise SpecError(
            "one of SRC and DST must be in a sandbox, the other on this machine",
            hint="write NAME:PATH for the sandbox; ./a:b for a file here with a colon",
        )
    return asyncio.run(_copy(source, target, quiet))


def in_sandbox(text: str) -> tuple[str, str] | None:
    """(name, path) of NAME:PATH; None for a path of this machine."""
    name, colon, path = text.partition(":")
    return (name, path or "./") if colon and NAME_RE.match(name) else None


async def _copy(source: str, target: str, quiet: bool) -> int:
    from .session import Signals, guarded

    with Signals() as signals:
        return await guarded(_connected(source, target, quiet), signals)


async def _connected(source: str, target: str, quiet: bool) -> int:
    from .copying import Bar, into, out_of
    from .opening import open_box

    bar = None if quiet else Bar()
    try:
        if (there := in_sandbox(target)) is not None:
            await into(await open_box(there[0]), source, there[1], bar)
        elif (there := in_sandbox(source)) is not None:
            await out_of(await open_box(there[0]), there[1], target, bar)
    finally:
        if bar is not None:
            bar.finish()
    return 0
