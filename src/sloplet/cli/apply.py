"""``sloplet apply``: chosen changes of a sandbox, brought to a folder of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import SpecError
from .diff import against_option, inside
from .options import Verb, json_option, name_argument
from .output import note, plain, print_json
from .working import finish, working

if TYPE_CHECKING:
    from ..changes.apply import Applied
    from ..changes.choose import Chosen


@click.command(
    "apply",
    cls=Verb,
    examples="""
    sloplet apply dev src --to ./src --dry-run
    sloplet apply dev README.md report.txt --to ~/project
    sloplet apply dev /workspace --to ./out --against base --delete
    sloplet apply dev
    """,
)
@name_argument()
@click.argument("paths", nargs=-1, metavar="[PATH...]")
@click.option("--to", "to", metavar="DIR", type=click.Path(),
              help="The folder of this machine. [default: where it was copied from]")  # fmt: skip
@click.option("--delete", is_flag=True, help="What was removed in the sandbox is removed there too.")
@against_option
@click.option("--dry-run", is_flag=True, help="Only say what would be done; links are judged when it is.")
@json_option
def apply(
    name: str, paths: tuple[str, ...], to: str | None, delete: bool, against: str | None, dry_run: bool, as_json: bool
) -> None:
    """Bring changes that `sloplet diff` lists at or below PATHs to a folder of this machine.

    Of a folder the content goes into DIR, a file goes there under its own name. Relative PATHs begin at the sandbox's
    working directory. Nothing is written outside of DIR, no link is followed, no setuid bit is kept. Without --to
    changes go back to the folders that were copied in (-v SRC:DST:copy), without PATHs all of them; what has changed
    there meanwhile is left alone.
    """
    if to is not None and not paths:
        raise SpecError("which changes?", hint="name paths as `sloplet diff` lists them, or / for everything")
    if dry_run:
        planned = finish(_plan(name, paths, against), _look)
        _show_plan(planned, delete, as_json)
        return
    done = finish(_apply(name, paths, to, delete, against), _look)
    if as_json:
        print_json({"written": done.written, "removed": done.removed, "skipped": _skipped(done.skipped)})
    else:
        _show(done)


async def _plan(name: str, paths: Sequence[str], against: str | None) -> list[Chosen]:
    from ..changes.choose import choose
    from ..sandbox import AsyncSandbox

    box = await AsyncSandbox.connect(name)
    found = await working(f"comparing the files of {name}", box.diff(against, text=False))
    wanted = [inside(path, box.workdir) for path in paths]
    if not wanted:
        wanted = [volume.path for volume in (await box.info()).spec.volumes if not volume.mounted]
    chosen, _ = choose(found.changes, wanted)
    return [item for item in chosen if item.place]


async def _apply(name: str, paths: Sequence[str], to: str | None, delete: bool, against: str | None) -> Applied:
    from ..sandbox import AsyncSandbox

    box = await AsyncSandbox.connect(name)
    wanted = [inside(path, box.workdir) for path in paths]
    return await working(
        f"bringing changes of {name} to {to or 'where they were copied from'}",
        box.apply(wanted or None, to=to, against=against, delete=delete),
    )


def _show_plan(planned: Sequence[Chosen], delete: bool, as_json: bool) -> None:
    write = [item.place for item in planned if item.change.kind != "removed"]
    remove = [item.place for item in planned if item.change.kind == "removed"]
    skip = [] if delete else [(path, "it was removed; --delete removes it") for path in remove]
    if as_json:
        print_json({"written": write, "removed": remove if delete else [], "skipped": _skipped(skip), "dry_run": True})
        return
    for path in write:
        click.echo(f"would write {plain(path)}")
    for path in remove if delete else ():
        click.echo(f"would remove {plain(path)}")
    for path, why in skip:
        click.echo(f"would skip {plain(path)}: {plain(why)}")
    if not planned:
        note("nothing to do: no changes there")


def _show(done: Applied) -> None:
    for path in done.written:
        click.echo(f"wrote {plain(path)}")
    for path in done.removed:
        click.echo(f"removed {plain(path)}")
    for path, why in done.skipped:
        click.echo(f"skipped {plain(path)}: {plain(why)}")
    if not (done.written or done.removed or done.skipped):
        note("nothing to do: no changes there")


def _skipped(items: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"path": path, "why": why} for path, why in items]


async def _look() -> str:
    return "Each file there is as it was, or whole; the same command again does the rest"
