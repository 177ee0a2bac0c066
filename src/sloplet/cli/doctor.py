"""``sloplet doctor``: what works here, proven by doing it; what is missing, and the fix."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from .options import Verb, json_option
from .output import EXIT_OURS, console, plain, print_json

if TYPE_CHECKING:
    from ..doctor import Report
    from ..engines.base import Probe

_SIGNS = {
    "works": ("✓", "green"), "available": ("✓", "green"), "ok": ("✓", "green"), "broken": ("✗", "red"),
    "failed": ("✗", "red"), "missing": ("–", "yellow"), "later": ("·", "dim"),
}  # fmt: skip


@click.command("doctor", cls=Verb, examples="sloplet doctor\nsloplet doctor --json\nsloplet doctor --no-proof")
@click.option("--proof/--no-proof", default=True, help="Start a sandbox on each engine to prove that it works.")
@json_option
def doctor(proof: bool, as_json: bool) -> int:
    """What this machine can do, what is missing, why, and the command that fixes it.

    Exit code 0 if at least one engine works here.
    """
    report = examine(proof)
    if as_json:
        print_json(report.to_dict())
    else:
        _show(report)
    return 0 if report.ok else EXIT_OURS


def examine(proof: bool) -> Report:
    """Gather, probe, prove, judge."""
    from ..doctor import make_report, prove
    from ..engines import registry
    from ..errors import SlopletError
    from ..setup.facts import gather
    from ..spec import SandboxSpec

    facts = gather()
    probes = {name: _probe(name) for name in registry.all_names() if name != "fake"}
    proofs = {}
    if proof:
        for name, probe in probes.items():
            if probe.available:
                proofs[name] = asyncio.run(prove(name, saves=probe.capabilities.live_snapshots))
    try:
        auto = registry.choose(SandboxSpec.make()).name
    except SlopletError:
        auto = ""
    return make_report(facts, probes, proofs, auto)


def _probe(name: str) -> Probe:
    """One engine that cannot even be asked must not hide what the others say."""
    from ..engines import registry
    from ..engines.base import Probe

    try:
        return registry.load(name).probe()
    except Exception as error:
        return Probe(name, name, False, f"it cannot be asked: {type(error).__name__}: {error}")


def _show(report: Report) -> None:
    from rich.text import Text

    out = console()

    def line(state: str, name: str, text: str) -> None:
        sign, style = _SIGNS[state]
        out.print(Text.assemble((f" {sign} ", style), (f"{name:<16}", "bold"), plain(text)), soft_wrap=True)

    def below(label: str, text: str, style: str = "") -> None:
        out.print(Text.assemble(f"{'':19}", (f"{label}: ", "dim"), (plain(text), style)), soft_wrap=True)

    out.print(Text("Isolation, weakest first", style="bold underline"))
    for rung in report.rungs:
        state = {"works": "works", "available": "available", "broken": "does not work", "missing": "not available"}
        line(rung.state, rung.engine, state.get(rung.state, rung.reason))
        if rung.proof is not None and not rung.proof.error:
            below("proof", rung.proof.describe())
        if rung.state in ("broken", "missing"):
            below("why", rung.reason or "unknown")
        if rung.state != "works":
            below("needs", rung.needs)
        if rung.fix:
            below("fix", rung.fix, "cyan")
        for detail in rung.details:
            below("has", detail)
    out.print()
    out.print(Text("This machine", style="bold underline"))
    for check in report.checks:
        line(check.state, check.name, check.found)
        if check.state != "ok":
            below("for", check.why)
            if check.fix:
                below("fix", check.fix, "cyan")
    out.print()
    if report.auto:
        out.print(f'engine="auto" takes [bold]{report.auto}[/bold] here.')
    else:
        out.print("[red]No engine works here:[/red] see the fixes above.")
