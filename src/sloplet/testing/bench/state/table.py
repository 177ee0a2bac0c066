"""The report of a live run as one table for people (rich): a line for each thing measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..bars import Verdict, judge
from ..show import machine_line, quantity
from ..stats import LIVE_METRICS, Report, percentile
from .plan import RAW


@dataclass(frozen=True)
class Line:
    """One metric of one engine, in words."""

    what: str
    engine: str
    n: int
    p50: str
    p95: str
    raw: str
    ratio: str
    target: str
    verdict: str  #: ok, MISS, "" for what nothing is promised of, or why it is not judged
    passed: bool | None = None


def lines(report: Report) -> Iterator[Line]:
    verdicts = {(verdict.bar.metric, verdict.bar.subject): verdict for verdict in judge(report)}
    for metric, meaning in LIVE_METRICS.items():
        raw = report.get(metric, RAW)
        theirs = quantity(raw.p50, meaning.unit) if raw is not None else ""
        ours = [series for series in report if series.metric == metric and series.subject != RAW and series.samples]
        if raw is not None and not ours:
            yield Line(meaning.title, RAW, len(raw.samples), "", "", theirs, "", "", "")
        for series in ours:
            ratio = report.ratio_of(series)
            verdict = verdicts.get((metric, series.subject))
            title = f"{meaning.title} [{series.note}]" if series.note else meaning.title
            yield Line(
                title,
                series.subject,
                len(series.samples),
                quantity(series.p50, meaning.unit),
                quantity(percentile(series.samples, 95), meaning.unit),
                theirs,
                "" if ratio is None else f"{ratio:.2f} x",
                "" if verdict is None else _target(verdict),
                "" if verdict is None else _word(verdict),
                None if verdict is None else verdict.passed,
            )


def _target(verdict: Verdict) -> str:
    if verdict.bar.suffix == " s":
        return f"<= {quantity(verdict.bar.limit, 's')}"
    return verdict.wanted.replace("x", " x")


def _word(verdict: Verdict) -> str:
    if verdict.passed is None:
        return f"not judged: {verdict.why}"
    return "ok" if verdict.passed else "MISS"


_BUSY = (
    "The machine had other things to do (its load was above its processors): neither times nor ratios are to be quoted."
)


def busy(machine: dict[str, Any]) -> bool:
    """Whether others wanted the processors when it began."""
    return bool(machine["load"][0] > machine["cpus_usable"])


def show_live(report: Report, console: Console) -> None:
    console.print(machine_line(report.machine))
    table = Table(title="sloplet bench --live", title_justify="left", header_style="bold")
    table.add_column("what")
    table.add_column("engine", no_wrap=True)
    for name in ("n", "p50", "p95", "runsc p50", "ratio", "target"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    found = list(lines(report))
    for line in found:
        table.add_row(
            Text(line.what), line.engine, str(line.n), line.p50, line.p95, line.raw, line.ratio, line.target,
            Text(line.verdict, style={True: "green", False: "bold red", None: "yellow"}[line.passed]),
        )  # fmt: skip
    if found:
        console.print(table)
    if busy(report.machine):
        console.print(_BUSY, style="yellow", highlight=False)
    for subject, why in report.skipped.items():
        if why != "not asked for":
            console.print(f"not measured: {subject}: {why}", highlight=False, markup=False)
