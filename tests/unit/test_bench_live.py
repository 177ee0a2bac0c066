"""The arithmetic, tables and pictures of ``sloplet bench --live``, and runsc by hand against a program that only looks
like it. Nothing is measured here."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sloplet.cli.bench import LIVE_SUITES, bench
from sloplet.testing.bench.bars import LIVE_BARS, judge
from sloplet.testing.bench.machine import describe
from sloplet.testing.bench.measures import BrokenRun
from sloplet.testing.bench.state import guests
from sloplet.testing.bench.state.page import BEGIN, END, rewrite, section
from sloplet.testing.bench.state.plan import LivePlan, quick_plan
from sloplet.testing.bench.state.plot import curves, draw, spread
from sloplet.testing.bench.state.raw import RawRunsc
from sloplet.testing.bench.state.suites import SUITES
from sloplet.testing.bench.state.table import lines, show_live
from sloplet.testing.bench.stats import CURVE_SIZES, CURVES, LIVE_METRICS, Report

pytestmark = pytest.mark.anyone
ROOT = Path(__file__).resolve().parents[2]


def filled(changes: dict[tuple[str, str], float] | None = None, *, quick: bool = False) -> Report:
    """A report in which every bar is kept, but for ``changes``."""
    values: dict[tuple[str, str], float] = {
        ("snapshot.time", "gvisor"): 0.06, ("snapshot.time", "runsc"): 0.05, ("restore.returned", "runsc"): 0.2,
        ("restore.result", "gvisor"): 0.26, ("restore.result", "runsc"): 0.2, ("fork.answer", "gvisor"): 1.1,
        ("fork.answer", "runsc"): 1.0, ("pool.claim", "gvisor"): 0.008, ("pool.claim", "container"): 0.004,
        ("pause.intact", "gvisor"): 1, ("weight.paused", "gvisor"): 0,
    }  # fmt: skip
    for size in CURVE_SIZES:
        for name in CURVES:
            values[f"curve.{name}_{size}", "gvisor"] = size / 1000
        for name in ("snapshot", "restore"):
            values[f"curve.{name}_{size}", "runsc"] = size / 2000
    report = Report("live")
    for (metric, subject), value in (values | (changes or {})).items():
        report.add(metric, subject, value)
    report.machine = {**describe(), "rivals": {"runsc": "release-20240729.0"}}
    report.options = {"rounds": 10, "quick": quick}
    return report


def test_all_bars_pass() -> None:
    verdicts = judge(filled())
    assert [verdict.passed for verdict in verdicts] == [True] * len(LIVE_BARS)


@pytest.mark.parametrize(
    ("metric", "subject", "value"),
    [("snapshot.time", "gvisor", 0.076), ("restore.result", "gvisor", 0.281), ("fork.answer", "gvisor", 1.41),
     ("pool.claim", "gvisor", 0.0151), ("pool.claim", "container", 0.0151), ("pause.intact", "gvisor", 0),
     ("weight.paused", "gvisor", 0.1)],
)  # fmt: skip
def test_each_bar_can_be_missed(metric: str, subject: str, value: float) -> None:
    report = filled()
    report.get(metric, subject).samples[:] = [value]  # type: ignore[union-attr]
    missed = [(verdict.bar.metric, verdict.bar.subject) for verdict in judge(report) if verdict.passed is False]
    assert missed == [(metric, subject)]
    assert [line.verdict for line in lines(report) if line.passed is False] == ["MISS"]


def test_a_quick_run_is_not_judged_by_what_it_does_less_of() -> None:
    verdicts = {verdict.bar.metric: verdict for verdict in judge(filled(quick=True))}
    assert verdicts["fork.answer"].passed is None
    assert verdicts["pause.intact"].passed is None
    assert verdicts["snapshot.time"].passed is True


def test_every_line_says_ours_theirs_ratio_target_and_verdict() -> None:
    found = {(line.what, line.engine): line for line in lines(filled())}
    line = found["live snapshot", "gvisor"]
    assert (line.p50, line.raw, line.ratio, line.target, line.verdict) == ("60 ms", "50 ms", "1.20 x", "<= 1.5 x", "ok")
    assert found["warm pool, to first result", "container"].target == "<= 15 ms"
    assert found["`runsc restore` returns", "runsc"].raw == "200 ms"


def test_the_table_shows_all_lines_and_what_was_left_out() -> None:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    report = filled()
    report.skipped["container"] = "no user namespaces [here]"
    show_live(report, console)
    console.file.close()
    text = console.export_text()
    assert "not measured: container: no user namespaces [here]" in text
    for line in lines(report):
        assert line.what in text


@pytest.mark.parametrize(("load", "said"), [(0.5, False), (40.0, True)])
def test_a_busy_machine_is_told_of(load: float, said: bool) -> None:
    console = Console(width=300, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    report = filled()
    report.machine |= {"load": [load, 0.0, 0.0], "cpus_usable": 2}
    show_live(report, console)
    console.file.close()
    assert ("other things to do" in console.export_text()) is said


def test_the_json_says_which_run_it_was() -> None:
    data = json.loads(json.dumps(filled().to_dict()))
    assert data["kind"] == "live"
    assert Report().to_dict()["kind"] == "bench"
    assert len(data["bars"]) == len(LIVE_BARS)


def test_names_agree() -> None:
    assert tuple(SUITES) == LIVE_SUITES
    assert {metric.partition(".")[0] for metric in LIVE_METRICS} == set(LIVE_SUITES)
    assert {bar.metric for bar in LIVE_BARS} <= set(LIVE_METRICS)


def test_quick_does_less_of_everything() -> None:
    less, full = quick_plan(), LivePlan()
    for name in ("rounds", "copies", "pool", "held", "few", "many"):
        assert getattr(less, name) < getattr(full, name)
    assert less.sizes == (16,)


# -- the picture and the page ----------------------------------------------------------


def test_the_picture_is_svg_and_its_axes_are_logarithmic() -> None:
    tree = xml.fromstring(draw(filled().to_dict()))
    space = "{http://www.w3.org/2000/svg}"
    drawn = tree.findall(f"{space}polyline")
    assert len(drawn) == len(CURVES) + 2
    assert sum(line.get("stroke-dasharray") is not None for line in drawn) == 2
    places = [tuple(map(float, point.split(","))) for point in drawn[0].get("points", "").split()]
    steps = [right[0] - left[0] for left, right in itertools.pairwise(places)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.2), "four times as much is the same step everywhere"
    slopes = [(right[1] - left[1]) for left, right in itertools.pairwise(places)]
    assert slopes == pytest.approx([slopes[0]] * 3, abs=0.2)
    assert slopes[0] < 0, "more time is higher up"
    words = {text.text for text in tree.findall(f"{space}text")}
    assert {"16 MiB", "1024 MiB"} <= words
    assert any("runsc checkpoint" in (word or "") for word in words)
    _inside_the_picture(tree)


def _inside_the_picture(tree: xml.Element) -> None:
    width, height = float(tree.get("width", "0")), float(tree.get("height", "0"))
    for element in tree.iter():
        for name, most in (("x", width), ("y", height), ("cx", width), ("cy", height), ("x2", width), ("y2", height)):
            assert 0 <= float(element.get(name, "0")) <= most


@pytest.mark.parametrize("seconds", [1e-5, 0.001, 0.02, 1, 10, 3000])
def test_any_values_fit(seconds: float) -> None:
    report = Report("live")
    report.add("curve.snapshot_16", "gvisor", seconds)
    report.add("curve.snapshot_64", "gvisor", seconds)
    tree = xml.fromstring(draw(report.to_dict()))
    _inside_the_picture(tree)


@given(st.lists(st.floats(0, 400), max_size=8))
def test_labels_do_not_cover_each_other(places: list[float]) -> None:
    moved = spread(sorted(places), 15, 0, 400)
    assert all(right - left >= 15 - 1e-6 for left, right in itertools.pairwise(moved))
    assert all(-1e-6 <= place <= 400 for place in moved)
    assert spread([100, 200], 15, 0, 400) == [100, 200]


def test_a_picture_of_nothing_says_so() -> None:
    assert curves(Report("live").to_dict()) == []
    assert "nothing was measured" in draw(Report("live").to_dict())


def test_only_the_marked_part_of_the_page_is_rewritten() -> None:
    page = f"before \\1\n{BEGIN}\nold\n{END}\nafter\n"
    once = rewrite(page, filled().to_dict())
    assert once.startswith("before \\1\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    assert "| live snapshot | gvisor | 60 ms | 60 ms | 50 ms | 1.20 x | <= 1.5x | ok |" in once
    assert "| live snapshot | 16 ms | 64 ms | 256 ms | 1.02 s |" in once
    assert rewrite(once, filled().to_dict()) == once
    with pytest.raises(ValueError, match="no part between"):
        rewrite("no marks", filled().to_dict())


def test_tables_of_the_page_have_as_many_cells_as_heads() -> None:
    rows = [line for line in section(filled().to_dict()).splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {9, 6}


def test_the_script_fills_our_own_page(tmp_path: Path) -> None:
    """The real page has the marks, and the script finds them."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "docs").mkdir()
    for name in ("scripts/live_costs.py", "docs/live-costs.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "numbers.json").write_text(json.dumps(filled().to_dict()))
    (tmp_path / "other.json").write_text(json.dumps(Report().to_dict()))
    command = [sys.executable, "scripts/live_costs.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([*command, "numbers.json"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "1.20 x" in (tmp_path / "docs/live-costs.md").read_text()
    xml.fromstring((tmp_path / "docs/live-costs.svg").read_text())
    other = subprocess.run([*command, "other.json"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert other.returncode == 1
    assert "not a report" in other.stderr


# -- the command line --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--live", "--only", "start"], "one of"), (["--only", "snapshot"], "one of"),
     (["--live", "--rounds", "0"], "range"), (["--rounds", "3"], "goes with --live"),
     (["--plot", "x.svg"], "goes with --live")],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(bench, words)
    assert result.exit_code == 2
    assert said in result.output


def test_without_runsc_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sloplet.setup import runsc

    monkeypatch.setattr(runsc, "find", lambda home=None: None)
    result = CliRunner().invoke(bench, ["--live", "--check"])
    assert result.exit_code == 0, result.output
    assert "sloplet setup gvisor" in result.output


# -- runsc by hand, with a program in its place -------------------------------------------

_TOY = """#!/bin/sh
# Takes runsc's words; "run" and "restore" leave a process behind that answers, as a detached sandbox does.
for word; do
    case $word in
        --pid-file=*) pid=${word#*=} ;;
        --root=*) root=${word#*=} ;;
        --image-path=*) image=${word#*=} ;;
        run|restore|checkpoint) verb=$word ;;
    esac
    name=$word
done
case $verb in
    checkpoint) mkdir -p "$image"; echo state > "$image/checkpoint.img"; exit ;;
    restore) test -e "$image/checkpoint.img" || exit 1 ;;
esac
touch "$root/${name}_sandbox:$name.state"
exec 3<&0
sh -c 'while read word; do echo ok; done' <&3 3<&- &
echo $! > "$pid"
"""


@pytest.fixture
def toy(tmp_path: Path) -> Any:
    program = tmp_path / "runsc"
    program.write_text(_TOY)
    program.chmod(0o755)
    raw = RawRunsc(program, tmp_path / "scratch")
    yield raw
    raw.close()
    assert not raw.scratch.exists()


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_by_hand_starts_saves_restores_and_ends(toy: RawRunsc) -> None:
    box = toy.start(guests.answerer())
    image = toy.checkpoint(box)
    copies = toy.restore_many(image, 3)
    for copy in copies:
        copy.ask("run")
    pids = [int(one.pid_file.read_text()) for one in (box, *copies)]
    assert all(map(_alive, pids))
    toy.end(*copies)
    assert [_alive(pid) for pid in pids] == [True, False, False, False]
    assert len(list((toy.scratch / "state").iterdir())) == 1
    toy.close()
    assert not _alive(pids[0])


def test_by_hand_a_verb_that_fails_is_no_number(toy: RawRunsc) -> None:
    image = toy.checkpoint(toy.start(guests.answerer()))
    image.remove()
    with pytest.raises(BrokenRun, match="restore"):
        toy.restore(image)


def test_by_hand_one_that_has_ended_is_no_number(toy: RawRunsc) -> None:
    box = toy.start(guests.answerer())
    os.kill(int(box.pid_file.read_text()), 9)
    with pytest.raises(BrokenRun, match="has ended"):
        box.ask()


def test_the_guests_do_what_both_sides_rely_on(tmp_path: Path) -> None:
    """On this machine, without any sandbox: the answerer answers, the holder holds and knows its bytes."""
    code = guests.HOLDER.replace("/dev/shm", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code, "3"], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        word, digest = holder.stdout.readline().split()
        assert word == "ready"
        assert re.fullmatch("[0-9a-f]{64}", digest)
        for _ in range(2):
            asked = subprocess.run(guests.ASK.replace("/dev/shm", str(tmp_path)), shell=True, capture_output=True)
            assert asked.stdout.decode() == digest
        status = Path(f"/proc/{holder.pid}/status").read_text()
        assert int(re.search(r"VmRSS:\s+(\d+)", status)[1]) > 3 * 1024  # type: ignore[index]
        holder.kill()
    words = b"\nrun\n"
    answered = subprocess.run(guests.answerer(), input=words, capture_output=True)
    assert answered.stdout == b"ok\nok\n"
