"""A report (as JSON) as the marked part of docs/live-costs.md. Pure."""

from __future__ import annotations

import re
from typing import Any

from ..show import quantity
from ..stats import CURVE_SIZES, CURVES, LIVE_METRICS
from .plan import OURS, RAW

BEGIN, END = "<!-- bench: begin (scripts/live_costs.py writes this part) -->", "<!-- bench: end -->"


def rewrite(text: str, data: dict[str, Any]) -> str:
    """The page with the report's numbers between its marks. ValueError if the marks are not there."""
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        raise ValueError(f"the page has no part between {BEGIN} and {END}")
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: section(data), text, flags=re.DOTALL)


def section(data: dict[str, Any]) -> str:
    return "\n".join([BEGIN, "", _machine(data), "", *_lines(data), "", *_curves(data), END])


def _machine(data: dict[str, Any]) -> str:
    machine = data["machine"]
    busy = machine["load"][0] > machine["cpus_usable"]
    return (
        f"Taken on {machine['cpus_usable']} cpus ({machine['cpu'] or machine['arch']}), {machine['memory_mib']} MiB, "
        f"Linux {machine['kernel']}, runsc {machine['rivals'][RAW]}, as {machine['user']}, load "
        f"{machine['load'][0]:.1f} before. {data['options']['rounds']} rounds."
        f"{' **The machine was busy: these figures are provisional.**' if busy else ''}"
    )


def _lines(data: dict[str, Any]) -> list[str]:
    found = {(one["metric"], one["subject"]): one for one in data["series"]}
    bars = {(bar["metric"], bar["subject"]): bar for bar in data["bars"]}
    rows = ["| what | engine | p50 | p95 | runsc p50 | ratio | target | |", "|---|---|--:|--:|--:|--:|--:|---|"]
    for metric, meaning in LIVE_METRICS.items():
        raw = found.get((metric, RAW))
        for (name, subject), one in found.items():
            if name != metric or name.startswith("curve.") or subject == RAW:
                continue
            bar = bars.get((metric, subject))
            cells = [
                meaning.title,
                subject,
                quantity(one["summary"]["p50"], meaning.unit),
                quantity(one["summary"]["p95"], meaning.unit),
                quantity(raw["summary"]["p50"], meaning.unit) if raw else "",
                f"{one['ratio']:.2f} x" if one["ratio"] else "",
                bar["wanted"] if bar else "",
                {True: "ok", False: "missed", None: "not judged"}[bar["passed"]] if bar else "",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def _curves(data: dict[str, Any]) -> list[str]:
    found = {(one["metric"], one["subject"]): one["summary"]["p50"] for one in data["series"]}
    sizes = [size for size in CURVE_SIZES if any(name.endswith(f"_{size}") for name, _ in found)]
    if not sizes:
        return []
    rows = [f"| p50, memory touched | {' | '.join(f'{size} MiB' for size in sizes)} |", f"|---{'|--:' * len(sizes)}|"]
    for name, title in CURVES.items():
        for subject in (OURS, RAW):
            cells = [found.get((f"curve.{name}_{size}", subject)) for size in sizes]
            if any(cell is not None for cell in cells):
                label = title if subject == OURS else f"... by hand, `runsc {_VERBS[name]}`"
                rows.append(
                    f"| {label} | {' | '.join('' if cell is None else quantity(cell, 's') for cell in cells)} |"
                )
    return [*rows, ""]


_VERBS = {"snapshot": "checkpoint", "restore": "restore"}
