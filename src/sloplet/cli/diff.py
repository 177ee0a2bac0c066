"""``sloplet diff``: what a sandbox has made of its files."""

from __future__ import annotations

import os
import posixpath
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from ..errors import SpecError
from .options import Verb, json_option, name_argument, snapshot_names
from .output import plain, print_json, print_table, size
from .working import finish, working

if TYPE_CHECKING:
    from ..controller import Change, Diff

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}
_KIND_COLOURS = {"added": "green", "changed": "yellow", "removed": "red"}

against_option = click.option(
    "--against", metavar="SNAPSHOT", shell_complete=snapshot_names, help="Since that snapshot. [default: its image]"
)


@click.command(
    "diff",
    cls=Verb,
    examples="""
    sloplet diff dev
    sloplet diff dev --stat
    sloplet diff dev src --against base
    sloplet diff dev /workspace > work.patch
    sloplet diff dev --name-only -z | grep -z '[.]py$' | xargs -0 sloplet apply dev --to ./new
    """,
)
@name_argument()
@click.argument("paths", nargs=-1, metavar="[PATH...]")
@against_option
@click.option("--stat", is_flag=True, help="One line a file.")
@click.option("--name-only", is_flag=True, help="Only the paths.")
@click.option("-z", "--null", is_flag=True, help="A NUL byte after each path, not a newline: for `xargs -0`.")
@json_option
def diff(
    name: str, paths: tuple[str, ...], against: str | None, stat: bool, name_only: bool, null: bool, as_json: bool
) -> None:
    """Files added, changed and removed in a sandbox since its image, or since a snapshot, with unified text diffs.

    With PATHs only what is at or below them; relative ones begin at the sandbox's working directory.
    """
    if stat + name_only + as_json > 1:
        raise SpecError("--stat, --name-only and --json exclude each other", hint="leave all but one")
    if null and not name_only:
        raise SpecError("--null is for paths", hint="add --name-only")
    found = finish(_diff(name, paths, against, text=not name_only), _look)
    if as_json:
        print_json({**found.to_dict(), "summary": _count(found.changes)})
    elif name_only:
        _print_names([change.path for change in found.changes], null)
    else:
        show(found, stat, f"snapshot {against}" if against else "image")


def _print_names(paths: Iterable[str], null: bool) -> None:
    """In a terminal harmless, in a pipe the bytes of the name, which need not be text."""
    if sys.stdout.isatty() and not null:
        for path in paths:
            click.echo(plain(path))
        return
    end = b"\0" if null else b"\n"
    click.echo(b"".join(os.fsencode(path) + end for path in paths), nl=False)


async def _diff(name: str, paths: Sequence[str], against: str | None, *, text: bool) -> Diff:
    from ..controller import Diff
    from ..sandbox import AsyncSandbox

    box = await AsyncSandbox.connect(name)
    wanted = [inside(path, box.workdir) for path in paths]
    found = await working(f"comparing the files of {name}", box.diff(against, text=text))
    return Diff(found.against, tuple(select(found.changes, wanted)))


async def _look() -> str:
    return "Nothing was changed by it"


def inside(path: str, workdir: str) -> str:
    """The absolute path in the sandbox."""
    return posixpath.normpath(posixpath.join(workdir, path))


def select(changes: Iterable[Change], wanted: Sequence[str]) -> list[Change]:
    """Those at or below one of the paths; all without paths."""
    return [item for item in changes if not wanted or any(_below(item.path, path) for path in wanted)]


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def show(found: Diff, stat: bool, since: str) -> None:
    if not found.changes:
        click.echo(f"no changes since the {since}", err=True)
        return
    if stat:
        print_table(("CHANGE", "PATH", "SIZE", "LINES", ""), [_row(change) for change in found.changes])
    else:
        for change in found.changes:
            _print_change(change)
    click.echo(summary(found.changes))


def _row(change: Change) -> tuple[str, ...]:
    what = ", ".join(change.what) if change.kind == "changed" else ""
    kind = change.type if change.type != "file" else ("binary" if change.binary else "")
    return (change.kind, change.path, size(change.size), _lines(change), ", ".join(filter(None, (kind, what))))


def _lines(change: Change) -> str:
    if change.text is None:
        return "-"
    body = [line for line in change.text.splitlines() if not line.startswith(("+++", "---"))]
    return f"+{sum(line[:1] == '+' for line in body)} -{sum(line[:1] == '-' for line in body)}"


def _count(changes: Iterable[Change]) -> dict[str, int]:
    counted = Counter(change.kind for change in changes)
    return {kind: counted[kind] for kind in _KIND_COLOURS}


def summary(changes: Iterable[Change]) -> str:
    """3 added, 1 changed, 1 removed."""
    return ", ".join(f"{count} {kind}" for kind, count in _count(changes).items() if count)


def _print_change(change: Change) -> None:
    """A headline that `patch` passes over, then the text. In a pipe the text is exact, in a terminal harmless."""
    facts = [change.type] if change.type != "file" else []
    facts += [size(change.size)] if change.kind != "removed" and change.type == "file" else []
    facts += ["binary"] if change.binary else []
    facts += change.what if change.kind == "changed" and change.what != ("content",) else ()
    headline = f"{change.kind} {plain(change.path)}" + (f" ({', '.join(facts)})" if facts else "")
    click.secho(headline, fg=_KIND_COLOURS.get(change.kind), bold=True)
    if change.text:
        _print_text(change.text)


def _print_text(text: str) -> None:
    if not sys.stdout.isatty():
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    for line in text.split("\n")[: -1 if text.endswith("\n") else None]:
        shown = "\t".join(plain(part) for part in line.split("\t"))
        headed = line.startswith(("+++ ", "--- "))
        click.secho(shown, fg=None if headed else _COLOURS.get(line[:1]), bold=headed or None)
