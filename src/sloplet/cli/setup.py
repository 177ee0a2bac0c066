"""``sloplet setup``: install what stronger isolation needs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from ..errors import SpecError
from .options import Verb, json_option
from .output import EXIT_OURS, complain, plain, print_json

if TYPE_CHECKING:
    from ..setup.perform import Outcome


@click.command(
    "setup",
    cls=Verb,
    examples="""
    sloplet setup gvisor
    sloplet setup all --dry-run
    sloplet setup microvm --yes
    sloplet setup gvisor --json --yes
    """,
)
@click.argument("target", type=click.Choice(["container", "gvisor", "microvm", "all"]), default="all")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@json_option
def setup_(target: str, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Install what stronger isolation needs: runsc, QEMU and a guest kernel, newuidmap.

    Shows first what it will do. Safe to run again. Never upgrades or removes packages; what the system has too old
    goes into SLOPLET_HOME instead. What only an administrator can do is shown as a command.
    """
    from ..setup.facts import gather
    from ..setup.perform import perform
    from ..setup.plan import plan

    facts = gather()
    steps = plan(target, facts)
    work = [step for step in steps if step.kind in ("package", "fetch")]
    if not as_json:
        for step in steps:
            complain(f"  {_LABELS[step.kind]:<8} {step.title}\n")
            if step.command and step.kind != "done":
                complain(f"           {step.command}\n")
    if dry_run:
        if as_json:
            print_json({"steps": [step.to_dict() for step in steps]})
        return 0
    if work and not yes and not _agreed():
        return EXIT_OURS
    say = _quiet if as_json else _Progress()
    outcomes = []
    for step in steps:
        outcomes.append(perform(step, facts, say))
        if isinstance(say, _Progress):
            say.finish()
            _show(outcomes[-1])
    if as_json:
        print_json({"steps": [outcome.to_dict() for outcome in outcomes]})
    return EXIT_OURS if any(outcome.state == "failed" for outcome in outcomes) else 0


_LABELS = {"done": "here", "package": "install", "fetch": "fetch", "manual": "by hand"}


def _agreed() -> bool:
    if not os.isatty(0):
        raise SpecError("there is nobody to ask whether to go on", hint="add --yes")
    return click.confirm("Go on?", default=True, err=True)


def _quiet(text: str) -> None:
    pass


class _Progress:
    """The newest line of what goes on: overwritten on a terminal, one after the other elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __call__(self, text: str) -> None:
        if self._live:
            complain("\r\x1b[K" + plain(f"    {text}", min(100, os.get_terminal_size(2).columns - 1)))
        else:
            complain(plain(f"    {text}") + "\n")

    def finish(self) -> None:
        if self._live:
            complain("\r\x1b[K")


def _show(outcome: Outcome) -> None:
    if outcome.state == "installed":
        complain(f"  ok       {plain(outcome.message)}\n")
    elif outcome.state == "failed":
        complain(f"  FAILED   {plain(outcome.step.title)}: {plain(outcome.message)}\n")
    elif outcome.state == "manual":
        complain(f"  left     {plain(outcome.message)}\n")
        if outcome.step.command:
            complain(f"           run: {outcome.step.command}\n")
