"""The suites of ``sloplet bench --live``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ....sync import Sandbox
from ..measures import must
from ..memory import MIB, descendants, machine_available, weigh
from ..run import Say
from . import guests, jobs
from .ours import close_all, digest_now, first_result, first_results
from .plan import DEFAULT, OURS, RAW, Bench
from .raw import Image

_NO_PYTHON = "there is no python3 inside that both sides could run"
_MEMORY_TIMES, _DISK_TIMES = 4, 5  # what a size needs at once: the sandbox, its copies, states of both sides


def snapshot(bench: Bench, say: Say) -> None:
    raw = bench.raw.start(guests.answerer())
    with bench.ours.free_box() as box, bench.ours.box() as default:
        first_results([box, default])
        both = jobs.snapshots(bench, box, raw, "snapshot.time")
        bench.in_turns(both | {DEFAULT: jobs.snapshotting(default, "snapshot.time")}, bench.plan.many)
        image = bench.raw.checkpoint(raw)
        bench.report.add("snapshot.disk", RAW, _size(image.folder))
        image.remove()
        bench.report.add("snapshot.disk", OURS, box.snapshot().bytes / MIB)
    bench.raw.end(raw)


@contextmanager
def _saved(bench: Bench, box: Sandbox) -> Iterator[Image]:
    """A small sandbox's checkpoint made by hand; ``box`` is the same on our side, and is warm."""
    first_result(box)
    raw = bench.raw.start(guests.answerer())
    image = bench.raw.checkpoint(raw)
    bench.raw.end(raw)
    try:
        yield image
    finally:
        image.remove()


def restore(bench: Bench, say: Say) -> None:
    with bench.ours.free_box() as box, bench.ours.box() as default, _saved(bench, box) as image:
        first_result(default)
        templates = [(box, box.template("bench")), (default, default.template("bench-default"))]
        both = jobs.restores(bench, "bench", image, "restore")
        bench.in_turns(both | {DEFAULT: jobs.restoring(bench, "bench-default", "restore")}, bench.plan.rounds)
        for owner, template in templates:
            owner.delete_snapshot(template, force=True)


def fork(bench: Bench, say: Say) -> None:
    with bench.ours.free_box() as box, _saved(bench, box) as image:
        bench.in_turns(jobs.forks(bench, box, image, bench.plan.copies, "fork"), bench.plan.few)


def pool(bench: Bench, say: Say) -> None:
    claiming = {engine: jobs.claims(bench.ours, engine, bench.plan.pool) for engine in bench.engines}
    for job in claiming.values():
        job()  # the first starts the pool
    bench.in_turns(claiming, bench.plan.many)


def pause(bench: Bench, say: Say) -> None:
    if bench.python is None:
        bench.report.skipped["pause"] = _NO_PYTHON
        return
    box, digest = bench.ours.holding(bench.python, bench.plan.held)
    if bench.plan.quick:
        for metric in ("pause.pause", "pause.answer", "pause.resume", "pause.disk", "pause.intact"):
            bench.report.add(metric, OURS, note=f"{bench.plan.held} MiB")
    with box:
        bench.in_turns({OURS: jobs.pausing(box, digest, "pause")}, bench.plan.few)
        intact = digest_now(box) == digest  # each sample has seen to it, too
        bench.report.add("pause.intact", OURS, float(intact))
        bench.report.add("pause.disk", OURS, box.snapshot().bytes / MIB)


def weight(bench: Bench, say: Say) -> None:
    """PSS of all processes of one: running, as a copy, asleep."""
    others = descendants()
    with bench.ours.box() as box:
        first_result(box)
        running, guessed = weigh(descendants() - others)
        note = f"{guessed} processes by RSS" if guessed else ""
        bench.report.add("weight.running", OURS, running / MIB, note=note)
        before = descendants()
        copies = box.fork(bench.plan.copies)
        first_results(copies)
        forked, guessed = weigh(descendants() - before)
        note = f"{guessed} processes by RSS" if guessed else ""
        bench.report.add("weight.forked", OURS, forked / MIB / len(copies), note=note)
        close_all(copies)
        box.pause()
        left = descendants() - others
        bench.report.add("weight.paused", OURS, weigh(left)[0] / MIB, note=f"{len(left)} processes")
        box.resume()
        first_result(box)


def curve(bench: Bench, say: Say) -> None:
    if bench.python is None:
        bench.report.skipped["curve"] = _NO_PYTHON
        return
    for size in bench.plan.sizes:
        why = _no_room(bench, size)
        if why:
            bench.report.skipped[f"curve at {size} MiB"] = why
            continue
        say(f"curve: {size} MiB")
        _curve_at(bench, bench.python, size)


def _no_room(bench: Bench, size: int) -> str:
    disk = os.statvfs(bench.raw.scratch)
    if machine_available() < _MEMORY_TIMES * size * MIB:
        return f"less than {_MEMORY_TIMES * size} MiB of memory are free"
    if disk.f_bavail * disk.f_frsize < _DISK_TIMES * size * MIB:
        return f"less than {_DISK_TIMES * size} MiB are free in {bench.raw.scratch.parent}: set TMPDIR"
    return ""


def _curve_at(bench: Bench, python: str, size: int) -> None:
    rounds = max(1, bench.plan.rounds // (3 if size < 512 else 5))
    names = {"restore.result": "restore", "fork.answer": "fork", "pause.pause": "pause", "pause.resume": "resume"}

    def named(metric: str) -> str | None:
        return f"curve.{names[metric]}_{size}" if metric in names else None

    raw = bench.raw.start(guests.answerer(python, size), holds=True)
    box, digest = bench.ours.holding(python, size)
    with box:
        bench.in_turns(jobs.snapshots(bench, box, raw, f"curve.snapshot_{size}"), rounds, warm=False)
        image = bench.raw.checkpoint(raw)
        bench.raw.end(raw)
        template = box.template(f"bench-{size}")
        restores = jobs.restores(bench, f"bench-{size}", image, "restore")
        bench.in_turns({name: jobs.only(job, named) for name, job in restores.items()}, rounds, warm=False)
        checked = jobs.checked_anew(bench, template, restores[OURS], f"curve.checked_{size}")
        bench.in_turns({OURS: checked}, rounds, warm=False)
        box.delete_snapshot(template, force=True)
        image.remove()
        copying = jobs.forks(bench, box, image, 1, "fork")[OURS]
        bench.in_turns({OURS: jobs.only(copying, named)}, rounds, warm=False)
        bench.in_turns({OURS: jobs.only(jobs.pausing(box, digest, "pause"), named)}, rounds, warm=False)
        must(digest_now(box) == digest, "the memory that was saved so often is not what it was")


def _size(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / MIB


SUITES: dict[str, Callable[[Bench, Say], None]] = {
    "snapshot": snapshot,
    "restore": restore,
    "fork": fork,
    "pool": pool,
    "pause": pause,
    "weight": weight,
    "curve": curve,
}
