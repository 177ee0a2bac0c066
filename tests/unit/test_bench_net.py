"""``sloplet bench --net`` without sandboxes: its servers, its client, its options."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from sloplet.cli.bench import NET_SUITES, bench
from sloplet.testing.bench.bars import NET_BARS, judge
from sloplet.testing.bench.net.plan import Bench, NetPlan, Subject, far, quick_plan
from sloplet.testing.bench.net.suites import SUITES, connect, download, together
from sloplet.testing.bench.stats import NET_METRICS, Report

pytestmark = pytest.mark.anyone


def test_bars_and_options_name_things_that_exist() -> None:
    assert {bar.metric for bar in NET_BARS} <= set(NET_METRICS)
    assert tuple(SUITES) == NET_SUITES
    assert {metric.partition(".")[0] for metric in NET_METRICS} == set(SUITES)


def test_quick_asks_for_less() -> None:
    less, full = quick_plan(), NetPlan()
    for name in ("rounds", "download", "connects", "dawdlers"):
        assert getattr(less, name) < getattr(full, name)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--net", "--live"], "two runs"),
        (["--net", "--only", "start"], "one of download"),
        (["--net", "--plot", "x"], "--live"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], complaint: str) -> None:
    result = CliRunner().invoke(bench, words)
    assert result.exit_code == 2
    assert complaint in result.output


def test_the_bare_sides_are_measured_and_nothing_else_is_judged() -> None:
    report = Report("net")
    plan = quick_plan(download=2**22, connects=10)
    with far() as ports, far("relay", str(ports["flood"])) as relay:
        bare = Subject("loopback", None, "127.0.0.1", ports)
        side = Bench(plan, report, bare, Subject("python relay", None, "127.0.0.1", {"flood": relay["relay"]}), ())
        for suite in (download, connect, together):
            suite(side, lambda text: None)
    measured = {(series.metric, series.subject) for series in report}
    assert measured == {
        ("download.speed", "loopback"), ("download.speed", "python relay"), ("connect.first_byte", "loopback"),
        ("together.time", "loopback"), ("together.failed", "loopback"),
    }  # fmt: skip
    failed = report.get("together.failed", "loopback")
    assert failed is not None
    assert failed.samples == [0]
    assert all(verdict.passed is None for verdict in judge(report))
