"""The report as tables for people (rich)."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .bars import judge
from .stats import METRICS, Report, summary

_DIGITS = 3


def show(report: Report, console: Console) -> None:
    console.print(machine_line(report.machine))
    console.print(numbers(report))
    console.print(bars(report))
    for subject, why in report.skipped.items():
        if why != "not asked for":
            console.print(f"[dim]not measured: {subject}: {why}[/dim]", highlight=False)


def machine_line(machine: dict[str, Any]) -> Text:
    rivals = "; ".join(f"{name}: {version}" for name, version in machine.get("rivals", {}).items())
    line = (
        f"sloplet {machine['sloplet']}, python {machine['python']}, linux {machine['kernel']} {machine['arch']}, "
        f"{machine['cpus_usable']} cpus ({machine['cpu'] or 'unknown'}), {machine['memory_mib']} MiB, {machine['user']}"
    )
    return Text(f"{line}\n{rivals}", style="dim")


def numbers(report: Report) -> Table:
    title = {"bench": "sloplet bench"}.get(report.kind, f"sloplet bench --{report.kind}")
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("metric", "subject"):
        table.add_column(name, no_wrap=name == "subject")
    for name in ("n", "min", "p50", "p95", "p99", "mean"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("p50 against", justify="right", no_wrap=True)
    last = ""
    for series in report:
        if not series.samples:
            continue
        metric = METRICS[series.metric]
        if last and series.metric != last:
            table.add_section()
        values = summary(series.samples)
        ratio = report.ratio_of(series)
        table.add_row(
            metric.title if series.metric != last else "",
            series.subject,
            str(len(series.samples)),
            *(quantity(values[name], metric.unit) for name in ("min", "p50", "p95", "p99", "mean")),
            _ratio(ratio, metric.baseline),
        )
        last = series.metric
    return table


def bars(report: Report) -> Table:
    table = Table(title="what we promise", title_justify="left", header_style="bold")
    for name in ("bar", "engine", "wanted", "measured", ""):
        table.add_column(name, no_wrap=name != "bar", justify="right" if name in ("wanted", "measured") else "left")
    for verdict in judge(report):
        measured: RenderableType = "" if verdict.value is None else f"{verdict.value:.3g}{verdict.bar.suffix}"
        table.add_row(
            verdict.bar.name, verdict.bar.subject, verdict.wanted, measured, _mark(verdict.passed, verdict.why)
        )
    return table


def _mark(passed: bool | None, why: str) -> Text:
    if passed is None:
        return Text(f"not judged: {why}", style="yellow")
    return Text("pass", style="green") if passed else Text("FAIL", style="bold red")


def _ratio(ratio: float | None, baseline: str | None) -> Text:
    if ratio is None:
        return Text("")
    style = "green" if ratio <= 1 else ""
    return Text(f"{ratio:.2f} x {baseline}", style=style)


def quantity(value: float, unit: str) -> str:
    """A number people can read: seconds as ms or µs, the rest with three digits."""
    if unit != "s":
        shown = f"{value:.0f}" if abs(value) >= 100 else f"{value:.{_DIGITS}g}"
        return shown if unit == "1" else f"{shown} {unit}"
    for factor, name in ((1, "s"), (1e3, "ms")):
        if abs(value) * factor >= 0.9995:  # what three digits would round to 1
            return f"{value * factor:.{_DIGITS}g} {name}"
    return f"{value * 1e6:.{_DIGITS}g} µs"
