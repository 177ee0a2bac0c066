"""One run of ``sloplet bench --server``. Fills a Report."""

from __future__ import annotations

import os
from dataclasses import asdict

from ....errors import SlopletError
from ....state.home import default_path
from ..environment import temporary_home
from ..machine import describe
from ..run import Say
from ..stats import Report
from .plan import Bench, ServerPlan, serving
from .suites import SUITES


def run_server(plan: ServerPlan, say: Say = lambda text: None) -> Report:
    """Measure. The server and its sandboxes have a SLOPLET_HOME of their own that is gone afterwards."""
    report = Report("server")
    report.options = asdict(plan)
    report.machine = describe()
    users = os.environ.get("SLOPLET_HOME") or str(default_path())
    with temporary_home() as home, serving(home) as server:
        bench = Bench(plan, report, server, home, users)
        for name, suite in SUITES.items():
            if plan.only and name not in plan.only:
                report.skipped[name] = "not asked for"
                continue
            say(name)
            try:
                suite(bench, say)
            except SlopletError as error:
                report.skipped[name] = str(error)
                say(f"{name}: {error}")
    report.machine["load_after"] = list(os.getloadavg())
    return report
