"""One run of ``sloplet bench --live``: every suite, Sloplet and runsc by hand in turns. Fills a Report."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from ....setup import runsc
from ..environment import temporary_home
from ..machine import describe
from ..run import Say
from ..stats import Report
from .ours import holding_runtime, python_inside, works
from .plan import OURS, RAW, Bench, LivePlan
from .raw import RawRunsc
from .suites import SUITES


def run_live(plan: LivePlan, say: Say = lambda text: None) -> Report:
    """Measure. Everything lies in a temporary folder and is gone afterwards, also after Ctrl-C. Without a runsc that
    works, the report says so and how to get one."""
    report = Report("live")
    report.options = asdict(plan)
    report.machine = describe()
    found = runsc.find()
    report.machine["rivals"] = {RAW: found.version if found else "none"}
    if found is None:
        report.skipped[OURS] = "runsc is not here: `sloplet setup gvisor` gets it"
        return report
    with ExitStack() as stack:
        home = stack.enter_context(temporary_home())
        why = works(home, OURS)
        if why:
            report.skipped[OURS] = why
            return report
        raw = RawRunsc(found.path, home / "by-hand")
        stack.callback(raw.close)
        _measure(plan, report, raw, home, say)
    report.machine["load_after"] = list(os.getloadavg())
    return report


def _measure(plan: LivePlan, report: Report, raw: RawRunsc, home: Path, say: Say) -> None:
    without_container = works(home, "container")
    if without_container:
        report.skipped["container"] = without_container
    engines = (OURS,) if without_container else (OURS, "container")
    with holding_runtime(home) as ours, ours.box() as box:
        python = python_inside(box)
    for name, suite in SUITES.items():
        if plan.only and name not in plan.only:
            report.skipped[name] = "not asked for"
            continue
        say(name)
        with holding_runtime(home) as ours:
            suite(Bench(plan, report, ours, raw, python, engines), say)
