"""One run of ``sloplet bench --net``: sandboxes, a bare socket and a bare relay in turns. Fills a Report."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict

from ....errors import SlopletError
from ....sync import Sandbox
from ..environment import temporary_home
from ..machine import describe
from ..run import Say
from ..stats import Report
from .plan import HOST, LOOPBACK, RELAY, Bench, NetPlan, Subject, far, network
from .suites import SUITES


def run_net(plan: NetPlan, say: Say = lambda text: None) -> Report:
    """Measure. State goes to a SLOPLET_HOME of its own that is gone afterwards."""
    report = Report("net")
    report.options = asdict(plan)
    report.machine = describe()
    with ExitStack() as stack:
        stack.enter_context(temporary_home())
        ports = stack.enter_context(far())
        relayed = {"flood": stack.enter_context(far("relay", str(ports["flood"])))["relay"]}
        bench = Bench(
            plan,
            report,
            Subject(LOOPBACK, None, "127.0.0.1", ports),
            Subject(RELAY, None, "127.0.0.1", relayed),
            tuple(_boxes(plan, report, stack, ports, say)),
        )
        for name, suite in SUITES.items():
            if plan.only and name not in plan.only:
                report.skipped[name] = "not asked for"
                continue
            say(name)
            suite(bench, say)
    report.machine["load_after"] = list(os.getloadavg())
    return report


def _boxes(plan: NetPlan, report: Report, stack: ExitStack, ports: dict[str, int], say: Say) -> list[Subject]:
    """A sandbox of each engine that really has a way out here, with all processors: the bare client has them too."""
    found = []
    for engine in plan.engines:
        try:
            box = stack.enter_context(
                Sandbox(engine=engine, network=network(ports), cpus=os.cpu_count(), memory="1g", open_files=4096)
            )
            box.run(["python3", "-c", ""], check=True)
        except SlopletError as error:
            report.skipped[engine] = str(error)
            say(f"{engine}: {error}")
        else:
            found.append(Subject(engine, box, HOST, ports))
    return found
