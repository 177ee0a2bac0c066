"""``sloplet audit``: who has asked the server of this machine for what, and what came of it."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from .options import Verb, json_option
from .output import plain, print_json, print_table

_COLUMNS = ("TIME", "KEY", "TENANT", "ADDRESS", "ACTION", "SANDBOX", "VERDICT", "STATUS", "ERROR")


@click.command(
    "audit",
    cls=Verb,
    examples="""
    sloplet audit
    sloplet audit --since 1h --verdict refused
    sloplet audit --key ci --action sandboxes.create --json
    sloplet audit --follow
    """,
)
@click.option("--since", metavar="TIME", help="Only what is younger, for example 1h or 7d.")
@click.option("--key", metavar="NAME", help="Only of this key, by name or id.")
@click.option("--action", metavar="ACTION", help="Only this, for example sandboxes.create; or all of `sandboxes`.")
@click.option("--sandbox", metavar="ID", help="Only about this sandbox, as it was named.")
@click.option("--tenant", metavar="TENANT", help="Only in this tenant.")
@click.option("--verdict", type=click.Choice(["allowed", "refused"]), help="Only what was, or was not, done.")
@click.option("-n", "--limit", type=click.IntRange(1, 1_000_000), default=100, show_default=True, metavar="N",
              help="The last N.")  # fmt: skip
@click.option("-f", "--follow", "following", is_flag=True, help="Show what comes, until Ctrl-C.")
@json_option
def audit(
    since: str | None, key: str | None, action: str | None, sandbox: str | None, tenant: str | None,
    verdict: str | None, limit: int, following: bool, as_json: bool,
) -> None:  # fmt: skip
    """The audit log of this machine's server, oldest first. With --follow and --json: one object a line."""
    from ..quantities import parse_duration
    from ..server.audit import AuditQuery, follow, read
    from ..state.home import Home

    home = Home()
    query = AuditQuery(
        since=None if since is None else time.time() - parse_duration(since, "since"), key=key or "",
        action=action or "", sandbox=sandbox or "", tenant=tenant or "", verdict=verdict or "",
    )  # fmt: skip
    if following:
        for line in follow(home, query):
            sys.stdout.write((json.dumps(line) if as_json else "  ".join(_row(line))) + "\n")
            sys.stdout.flush()
        return
    found: list[dict[str, Any]] = []
    cursor = None
    while len(found) < limit:
        page = read(home, query, limit=limit - len(found), cursor=cursor)
        found += page.items
        cursor = page.next
        if cursor is None:
            break
    found.reverse()
    if as_json:
        print_json(found)
    elif found:
        print_table(_COLUMNS, [_row(line) for line in found])
    elif read(home, AuditQuery(), limit=1).items:
        click.echo("no such lines", err=True)
    else:
        click.echo(f"no server has written an audit log in {home.path} (`sloplet serve` does)", err=True)


def _row(line: dict[str, Any]) -> tuple[str, ...]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(line["time"])))
    what = f"{line['action']} {line['detail']}".strip()
    words = (
        when, line["name"], line["tenant"], line["address"], what, line["sandbox"], line["verdict"],
        str(line["status"] or ""), line["error"],
    )  # fmt: skip
    return tuple(plain(word) or "-" for word in words)
