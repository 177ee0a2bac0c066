"""``sloplet bench --server`` without a server: its metrics, its bars, its options."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from sloplet.cli.bench import SERVER_SUITES, bench
from sloplet.testing.bench.bars import SERVER_BARS, judge
from sloplet.testing.bench.server.plan import ServerPlan, quick_plan
from sloplet.testing.bench.server.suites import SUITES
from sloplet.testing.bench.stats import SERVER_METRICS, Report

pytestmark = pytest.mark.anyone


def test_bars_and_options_name_things_that_exist() -> None:
    assert {bar.metric for bar in SERVER_BARS} <= set(SERVER_METRICS)
    assert tuple(SUITES) == SERVER_SUITES
    assert {metric.partition(".")[0] for metric in SERVER_METRICS} == set(SUITES)


def test_quick_asks_for_less() -> None:
    less, full = quick_plan(), ServerPlan()
    for name in ("rounds", "execs", "clients", "each", "bytes", "transfers", "survivors"):
        assert getattr(less, name) < getattr(full, name)


def test_the_promise_is_what_the_issue_says() -> None:
    full = ServerPlan()
    assert (full.clients, full.survivors) == (200, 20)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--server", "--net"], "two runs"),
        (["--server", "--only", "first,unpack"], "one of first"),
        (["--server", "--layer", "/dev/null"], "--images"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], complaint: str) -> None:
    result = CliRunner().invoke(bench, words)
    assert result.exit_code == 2
    assert complaint in result.output


def test_bars_judge() -> None:
    report = Report("server")
    report.add("first.overhead", "remote", 0.004)
    report.add("trip.overhead", "remote", 0.0031)
    report.add("crowd.failed", "remote", 1)
    told = {verdict.bar.metric: verdict.passed for verdict in judge(report)}
    assert told["first.overhead"] is True
    assert told["trip.overhead"] is False
    assert told["crowd.failed"] is False
    assert told["restart.survived"] is None  # not measured is not passed
