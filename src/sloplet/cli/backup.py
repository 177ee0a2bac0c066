"""``sloplet backup``: the records of a server, copied while it runs."""

from __future__ import annotations

from pathlib import Path

import click

from .options import Verb, json_option
from .output import print_json, size


@click.command(
    "backup",
    cls=Verb,
    examples="""
    sloplet backup /var/backups/sloplet-$(date +%F)
    sloplet backup --check /var/backups/sloplet-2026-11-17
    """,
)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Only see whether the backup in DIR is whole.")
@json_option
def backup(folder: Path, check: bool, as_json: bool) -> None:
    """Copy the records of this SLOPLET_HOME and of its server's tenants to a new folder, while all of them run.

    Keys, names, what sandboxes and snapshots there are, the audit log, certificates. Not what is large: images,
    snapshots, volumes. It holds private keys of certificates: keep it as you keep SLOPLET_HOME.
    """
    from ..errors import StateCorrupt
    from ..server.backup import check_backup, make_backup
    from ..state.home import Home

    path = Path(folder).absolute()
    if check:
        if wrong := check_backup(path):
            raise StateCorrupt(f"the backup in {path} is not whole: {'; '.join(wrong[:5])}", hint="use another one")
        if as_json:
            print_json({"path": str(path), "whole": True})
        else:
            click.echo("whole")
        return
    manifest = make_backup(Home(), path)
    if as_json:
        print_json({"path": str(path), **manifest})
        return
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    click.echo(f"{path}: {len(manifest['files'])} files, {size(total)}")
