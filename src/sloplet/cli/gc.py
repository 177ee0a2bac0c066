"""``sloplet gc``: clean up after programs that died. Every start does it too; this says what was done."""

from __future__ import annotations

import click

from .options import Verb, json_option
from .output import EXIT_OURS, note, print_json


@click.command("gc", cls=Verb, examples="sloplet gc\nsloplet gc --json")
@json_option
def gc(as_json: bool) -> int:
    """Clean up after programs that died: their sandboxes' processes, cgroups, folders, records and saved states."""
    from .local import clean_up

    report = clean_up(thorough=True)
    if as_json:
        print_json(
            {
                "removed": report.removed, "dead": report.dead, "orphans": report.orphans,
                "expired": report.expired, "snapshots": report.snapshots, "files": report.files,
                "errors": report.errors,
            }
        )  # fmt: skip
    elif not report:
        click.echo("nothing to clean up")
    else:
        for text, ids in (
            ("removed", report.removed),
            ("now on record as dead", report.dead),
            ("removed, without a record", report.orphans),
            ("removed, its time was up", report.expired),
            ("a saved state that nobody needs, removed", report.snapshots),
        ):
            for sandbox_id in ids:
                click.echo(f"{sandbox_id}: {text}")
        if report.files:
            click.echo(f"{report.files} stale files removed")
        for error in report.errors:
            note(error)
    return EXIT_OURS if report.errors else 0
