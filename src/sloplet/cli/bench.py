"""``sloplet bench``: Sloplet and its rivals, side by side."""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Callable
from typing import Any

import click

SUITES = ("start", "exec", "cli", "import", "rate", "files", "output", "live")
RIVALS = ("subprocess", "bwrap", "docker", "runsc")


Names = Callable[[click.Context, click.Parameter, str], tuple[str, ...]]


def names(*known: str) -> Names:
    """Comma-separated names; if ``known`` are given, only those."""

    def parse(context: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
        for name in found:
            if known and name not in known:
                raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}", context, option)
        return found

    return parse


@click.command()
@click.option("--quick", is_flag=True, help="Fewer rounds: for a look, not for quoting.")
@click.option(
    "--only", default="", callback=names(*SUITES), metavar="SUITES", help=f"Only these suites: {', '.join(SUITES)}."
)
@click.option(
    "--engine",
    "engines",
    default="container,process",
    show_default=True,
    callback=names(),
    metavar="ENGINES",
    help="The engines to measure.",
)
@click.option(
    "--against",
    default=",".join(RIVALS),
    show_default=True,
    callback=names(*RIVALS, "none"),
    metavar="RIVALS",
    help="The rivals to measure alongside; those that are not installed are left out.",
)
@click.option("--with-dockerd", is_flag=True, help="Start a private Docker daemon for the run (root).")
@click.option("--live", "live", type=click.IntRange(1, 100_000), default=None, help="How many live sandboxes.")
@click.option("--check", is_flag=True, help="End with exit code 1 if a bar is missed.")
@click.option("--json", "as_json", is_flag=True, help="All numbers, raw, as JSON.")
def bench(
    quick: bool, only: tuple[str, ...], engines: tuple[str, ...], against: tuple[str, ...], with_dockerd: bool,
    live: int | None, check: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measure Sloplet beside a bare subprocess, bwrap, docker and runsc, in one run. See docs/bench.md."""
    from rich.console import Console

    from ..testing.bench.bars import judge
    from ..testing.bench.run import Plan, run
    from ..testing.bench.run import quick as quick_plan
    from ..testing.bench.show import show

    changes: dict[str, Any] = {
        "engines": engines, "against": tuple(name for name in against if name != "none"), "only": only,
        "with_dockerd": with_dockerd,
    }  # fmt: skip
    if live is not None:
        changes["live"] = live
    plan = quick_plan(**changes) if quick else Plan(**changes)
    progress = Console(stderr=True)
    with progress.status("starting"):
        report = run(plan, say=lambda text: progress.log(text, highlight=False) if progress.is_terminal else None)
    if as_json:
        click.echo(json_.dumps(report.to_dict(), indent=1))
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 140))
    if check and any(verdict.passed is False for verdict in judge(report)):
        raise click.exceptions.Exit(1)
