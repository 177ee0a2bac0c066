"""The benchmark's arithmetic: percentiles, turns, ratios, bars, the JSON. Nothing is measured here."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sloplet.cli.bench import RIVALS as CLI_RIVALS
from sloplet.cli.bench import SUITES as CLI_SUITES
from sloplet.cli.bench import bench
from sloplet.testing.bench import memory
from sloplet.testing.bench.bars import BARS, judge
from sloplet.testing.bench.clock import interleave, turns
from sloplet.testing.bench.machine import describe
from sloplet.testing.bench.rivals import RIVALS
from sloplet.testing.bench.rootfs import make_rootfs
from sloplet.testing.bench.run import SUITES, Plan, quick
from sloplet.testing.bench.show import quantity, show
from sloplet.testing.bench.stats import (
    IMAGES_METRICS,
    LIVE_METRICS,
    METRICS,
    NET_METRICS,
    SCHEMA,
    SERVER_METRICS,
    Report,
    percentile,
    ratio,
    summary,
)

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize(
    ("samples", "p", "expected"),
    [([7], 50, 7), ([7], 99, 7), ([1, 2], 50, 1.5), ([3, 1, 2], 50, 2), ([1, 2, 3, 4], 0, 1), ([1, 2, 3, 4], 100, 4),
     (list(range(101)), 95, 95), (list(range(101)), 99, 99), ([10, 20, 30, 40], 25, 17.5)],
)  # fmt: skip
def test_percentile(samples: list[float], p: float, expected: float) -> None:
    assert percentile(samples, p) == pytest.approx(expected)


@pytest.mark.parametrize(("samples", "p"), [([], 50), ([1], -1), ([1], 101)])
def test_percentile_refuses(samples: list[float], p: float) -> None:
    with pytest.raises(ValueError, match=r"no samples|not a percentile"):
        percentile(samples, p)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=200))
def test_summary_is_ordered(samples: list[float]) -> None:
    s = summary(samples)
    assert s["min"] <= s["p50"] * 1.0000001
    assert s["p50"] <= s["p95"] * 1.0000001
    assert s["p95"] <= s["p99"] * 1.0000001
    assert s["p99"] <= s["max"] * 1.0000001
    assert s["min"] <= s["mean"] * 1.0000001 <= s["max"] * 1.000001


def test_ratio_reads_the_same_way_for_times_and_speeds() -> None:
    assert ratio(6, 2, lower_is_better=True) == 3  # three times as slow
    assert ratio(100, 300, lower_is_better=False) == 3  # a third of the speed
    assert math.isnan(ratio(0, 1, lower_is_better=True))


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 60), min_size=1))
def test_turns_give_everybody_his_number_and_spread_them(rounds: dict[str, int]) -> None:
    order = list(turns(rounds))
    assert Counter(order) == Counter(rounds)
    half = order[: len(order) // 2]
    for name, count in rounds.items():
        if count >= 10:
            assert abs(half.count(name) - count / 2) <= count / 4, "nobody runs only at the beginning or the end"


def test_interleave_throws_warm_up_away() -> None:
    calls: Counter[str] = Counter()
    seen: list[tuple[str, float]] = []

    def job(name: str) -> float:
        calls[name] += 1
        return float(calls[name])

    interleave(
        {"a": lambda: job("a"), "b": lambda: job("b")},
        {"a": 4, "b": 2},
        2,
        lambda name, value: seen.append((name, value)),
    )
    assert [value for name, value in seen if name == "a"] == [3, 4, 5, 6]
    assert [value for name, value in seen if name == "b"] == [3, 4]


def filled(**changes: float) -> Report:
    """A report in which every bar is kept, but for what ``changes`` names (as metric__subject)."""
    values = {
        "start.first_result container": 0.010, "start.first_result bwrap": 0.004, "start.first_result docker": 0.3,
        "exec.round_trip container": 0.002, "exec.round_trip subprocess": 0.001, "rate.sandboxes container": 80,
        "live.count container": 500, "live.pss container": 1.5, "import.sloplet sloplet": 0.01,
        "cli.run container": 0.2,
    }  # fmt: skip
    values |= {key.replace("__", " ").replace("_DOT_", "."): value for key, value in changes.items()}
    report = Report()
    for key, value in values.items():
        metric, subject = key.split(" ")
        report.add(metric, subject, value)
    report.machine = {**describe(), "rivals": {}}
    return report


def test_all_bars_pass() -> None:
    assert [verdict.bar.name for verdict in judge(filled()) if verdict.passed is not True] == []


@pytest.mark.parametrize(
    ("metric", "subject", "value", "missed"),
    [
        ("start.first_result", "container", 0.0121, {"create to first result against bwrap"}),
        ("start.first_result", "docker", 0.19, {"create to first result, faster than docker run"}),
        ("exec.round_trip", "container", 0.0031, {"exec round trip against subprocess.run"}),
        ("rate.sandboxes", "container", 39, {"sandboxes made, used, destroyed"}),
        ("live.count", "container", 499, {"live sandboxes at once"}),
        ("live.pss", "container", 3.1, {"memory of a live sandbox"}),
        ("import.sloplet", "sloplet", 0.031, {"import sloplet"}),
        ("cli.run", "container", 0.26, {"sloplet run -- true"}),
    ],
)
def test_each_bar_can_be_missed(metric: str, subject: str, value: float, missed: set[str]) -> None:
    report = filled(**{f"{metric.replace('.', '_DOT_')}__{subject}": value})
    assert {verdict.bar.name for verdict in judge(report) if verdict.passed is False} == missed


def test_what_was_not_measured_is_not_judged() -> None:
    report = Report()
    report.skipped["docker"] = "docker is not installed"
    report.add("start.first_result", "container", 0.01)
    verdicts = {verdict.bar.name: verdict for verdict in judge(report)}
    assert all(verdict.passed is None for verdict in verdicts.values())
    assert verdicts["create to first result, faster than docker run"].why == "docker is not installed"


def test_json_schema() -> None:
    data = json.loads(json.dumps(filled().to_dict()))
    assert data["schema"] == SCHEMA
    assert set(data) == {"schema", "kind", "machine", "options", "skipped", "series", "bars"}
    assert {"kernel", "python", "cpus", "memory_mib", "user", "load"} <= set(data["machine"])
    for series in data["series"]:
        assert set(series) == {"metric", "subject", "unit", "note", "summary", "samples", "baseline", "ratio"}
        assert set(series["summary"]) == {"n", "min", "mean", "p50", "p95", "p99", "max"}
    by_name = {(series["metric"], series["subject"]): series for series in data["series"]}
    assert by_name["start.first_result", "container"]["ratio"] == pytest.approx(2.5)
    assert by_name["start.first_result", "bwrap"]["ratio"] is None
    assert len(data["bars"]) == len(BARS)
    assert {"name", "wanted", "value", "passed", "why"} <= set(data["bars"][0])


def test_table_shows_every_subject_and_verdict() -> None:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show(filled(rate_DOT_sandboxes__container=5), console)
    console.file.close()
    text = console.export_text()
    for word in ("bwrap", "docker", "2.50 x bwrap", "10 ms", "FAIL", "pass", ">= 40/s"):
        assert word in text, word


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.0123, "s", "12.3 ms"), (1.5, "s", "1.5 s"), (0.00025, "s", "250 µs"), (0.9996, "s", "1 s"),
     (0.9994, "s", "999 ms"), (812.3, "MiB/s", "812 MiB/s"), (500, "1", "500")],
)  # fmt: skip
def test_quantity(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_bars_and_options_name_things_that_exist() -> None:
    assert {bar.metric for bar in BARS} <= set(METRICS)
    assert tuple(SUITES) == CLI_SUITES
    assert tuple(RIVALS) == CLI_RIVALS
    own = set(METRICS) - set(LIVE_METRICS) - set(NET_METRICS) - set(IMAGES_METRICS) - set(SERVER_METRICS)
    assert {metric.partition(".")[0] for metric in own} == set(SUITES)


def test_quick_asks_for_less_of_everything() -> None:
    less, full = quick(), Plan()
    for name in ("starts", "slow_starts", "execs", "processes", "sandboxes", "live", "output_bytes"):
        assert getattr(less, name) < getattr(full, name)


@pytest.mark.parametrize("words", [["--only", "speed"], ["--against", "podman"], ["--hold", "0"]])
def test_unknown_names_are_refused(words: list[str]) -> None:
    result = CliRunner().invoke(bench, words)
    assert result.exit_code == 2
    assert "one of" in result.output or "range" in result.output


def test_pss_of_this_process() -> None:
    assert memory.parse_pss("Rss:  10 kB\nPss:    42 kB\nPss_Anon: 1 kB\n") == 42 * 1024
    assert memory.pss() > 2**20
    assert memory.pss(2**22 + 1) == 0
    assert os.getpid() in memory.descendants(os.getppid())


def test_rootfs_has_a_true(tmp_path: Path) -> None:
    assert os.access(make_rootfs(tmp_path / "root") / "bin" / "true", os.X_OK)
