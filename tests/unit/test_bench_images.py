"""``sloplet bench --images`` without sandboxes: its layers, its options, and what it unpacks."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from sloplet.cli.bench import IMAGES_SUITES, bench
from sloplet.images.store import ImageStore
from sloplet.state.home import Home
from sloplet.testing.bench.bars import IMAGES_BARS, judge
from sloplet.testing.bench.images.plan import Bench, ImagesPlan, layer_of_host, quick_plan
from sloplet.testing.bench.images.suites import SUITES, tree, unpack
from sloplet.testing.bench.stats import IMAGES_METRICS, Report

pytestmark = pytest.mark.anyone


def test_bars_and_options_name_things_that_exist() -> None:
    assert {bar.metric for bar in IMAGES_BARS} <= set(IMAGES_METRICS)
    assert tuple(SUITES) == IMAGES_SUITES
    assert {metric.partition(".")[0] for metric in IMAGES_METRICS} == set(SUITES)


def test_quick_asks_for_less() -> None:
    less, full = quick_plan(), ImagesPlan()
    for name in ("rounds", "starts", "files", "bytes", "together", "shared"):
        assert getattr(less, name) < getattr(full, name)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--images", "--live"], "two runs"),
        (["--images", "--only", "start,download"], "one of unpack"),
        (["--layer", "/dev/null"], "--images"),
        (["--images", "--plot", "x"], "--live"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], complaint: str) -> None:
    result = CliRunner().invoke(bench, words)
    assert result.exit_code == 2
    assert complaint in result.output


def test_a_layer_of_this_machine() -> None:
    with tarfile.open(fileobj=io.BytesIO(layer_of_host(50, 2**20))) as archive:
        members = archive.getmembers()
    assert sum(1 for member in members if not member.isdir()) == 50
    assert sum(member.size for member in members) <= 2**20


def test_what_needs_no_sandbox_is_measured(tmp_path: Path) -> None:
    report = Report("images")
    store = ImageStore(Home(tmp_path / "home"))
    side = Bench(quick_plan(files=40, bytes=2**20, rounds=1, starts=2), report, store, tmp_path)
    for suite in (unpack, tree):
        suite(side, lambda text: None)
    assert {(series.metric, series.subject) for series in report} == {
        ("unpack.plain", "sloplet"), ("unpack.plain", "tar"), ("unpack.gzip", "sloplet"), ("unpack.gzip", "tar"),
        ("tree.first", "sloplet"), ("tree.again", "sloplet"),
    }  # fmt: skip
    assert store.list() == []
    store.close()
    judged = {verdict.bar.metric for verdict in judge(report) if verdict.passed is not None}
    assert judged == {"unpack.plain", "unpack.gzip"}
