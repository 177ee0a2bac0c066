"""The suites of ``sloplet bench --net``."""

from __future__ import annotations

from collections.abc import Callable

from ..clock import interleave
from ..measures import must
from ..memory import MIB, peak_resident, reset_peak, rss
from ..run import Say
from .plan import Bench, Subject


def download(bench: Bench, say: Say) -> None:
    count = bench.plan.download

    def job(subject: Subject) -> Callable[[], float]:
        def once() -> float:
            answer = subject.ask("download", "flood", count)
            must(answer["bytes"] == count, f"{subject.name}: {answer['bytes']} of {count} bytes arrived")
            return count / MIB / float(answer["seconds"])

        return once

    subjects = (bench.bare, bench.relay, *bench.boxes)
    jobs = {subject.name: job(subject) for subject in subjects}
    interleave(
        jobs, dict.fromkeys(jobs, bench.plan.rounds), 1, lambda name, value: _add(bench, "download.speed", name, value)
    )


def connect(bench: Bench, say: Say) -> None:
    """Rounds of many connects each, in turns; the overhead is the difference of the medians."""
    each = max(10, bench.plan.connects // bench.plan.rounds)
    for what, metric in (("connect", "connect.first_byte"), ("resolve", "connect.named")):
        subjects = (bench.bare, *bench.boxes) if what == "connect" else bench.boxes
        for _ in range(bench.plan.rounds):
            for subject in subjects:
                samples = subject.ask(what, "greet", each)["samples"]
                bench.report.add(metric, subject.name, *samples)
    bare = bench.report.get("connect.first_byte", bench.bare.name)
    for subject in bench.boxes:
        ours = bench.report.get("connect.first_byte", subject.name)
        if bare is not None and ours is not None:
            bench.report.add("connect.overhead", subject.name, ours.p50 - bare.p50)


def together(bench: Bench, say: Say) -> None:
    count = bench.plan.together
    for subject in (bench.bare, *bench.boxes):
        answer = subject.ask("together", "echo", count)
        note = "; ".join(answer["errors"])
        bench.report.add("together.failed", subject.name, count - int(answer["good"]), note=note)
        bench.report.add("together.time", subject.name, float(answer["seconds"]))


def slow(bench: Bench, say: Say) -> None:
    """Of floods of 16 GiB each, the clients read a few KiB; what this process, which holds the sandbox, grew by."""
    for subject in bench.boxes:
        reset_peak()
        before = rss()
        subject.ask("dawdle", "flood", bench.plan.dawdlers, bench.plan.dawdle_seconds)
        grown = max(0, peak_resident() - before) / MIB
        bench.report.add("slow.memory", subject.name, grown, note=f"{bench.plan.dawdlers} slow readers")


def _add(bench: Bench, metric: str, name: str, value: float) -> None:
    bench.report.add(metric, name, value)


SUITES: dict[str, Callable[[Bench, Say], None]] = {
    "download": download,
    "connect": connect,
    "together": together,
    "slow": slow,
}
