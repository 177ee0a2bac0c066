"""Single samples, ours and by hand. What is timed is between ``Stopwatch()`` and its laps; cleaning up is not."""

from __future__ import annotations

import time
from collections.abc import Callable

from ....controller import Snapshot
from ....sync import Sandbox
from ..measures import must
from .ours import Ours, close_all, digest_now, first_result, first_results
from .plan import OURS, RAW, Bench, Job
from .raw import Image, RawBox


class Stopwatch:
    def __init__(self) -> None:
        self._began = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._began


def snapshots(bench: Bench, box: Sandbox, raw: RawBox, metric: str) -> dict[str, Job]:
    def by_hand() -> dict[str, float]:
        clock = Stopwatch()
        image = bench.raw.checkpoint(raw)
        took = clock()
        image.remove()
        return {metric: took}

    return {OURS: snapshotting(box, metric), RAW: by_hand}


def snapshotting(box: Sandbox, metric: str) -> Job:
    def job() -> dict[str, float]:
        clock = Stopwatch()
        made = box.snapshot()
        took = clock()
        must(made.kind == "live", f"a snapshot of kind {made.kind}")
        box.delete_snapshot(made, force=True)
        return {metric: took}

    return job


def restores(bench: Bench, template: str, image: Image, prefix: str) -> dict[str, Job]:
    """To the first answer, and to the first command's result."""

    def by_hand() -> dict[str, float]:
        clock = Stopwatch()
        box = bench.raw.restore(image)
        try:
            returned = clock()
            box.ask()
            answer = clock()
            box.ask("run")
            return {f"{prefix}.returned": returned, f"{prefix}.answer": answer, f"{prefix}.result": clock()}
        finally:
            bench.raw.end(box)

    return {OURS: restoring(bench, template, prefix), RAW: by_hand}


def restoring(bench: Bench, template: str, prefix: str) -> Job:
    def job() -> dict[str, float]:
        clock = Stopwatch()
        box = bench.ours.from_template(template)
        try:
            box.start()
            answer = clock()
            first_result(box)
            return {f"{prefix}.answer": answer, f"{prefix}.result": clock()}
        finally:
            box.close()

    return job


def checked_anew(bench: Bench, template: Snapshot, restore: Job, metric: str) -> Job:
    """The same restore, to its first result, as the first one of a process."""

    def job() -> dict[str, float]:
        bench.ours.forget_checks(template)
        return {metric: restore()["restore.result"]}

    return job


def forks(bench: Bench, box: Sandbox, image: Image, count: int, prefix: str) -> dict[str, Job]:
    """``fork(count)`` of a running sandbox, its snapshot included, and ``count`` times runsc restore, side by side, of
    a checkpoint that is there."""

    def ours() -> dict[str, float]:
        clock = Stopwatch()
        copies = box.fork(count)
        try:
            answer = clock()  # each has answered its HELLO
            first_results(copies)
            return {f"{prefix}.answer": answer, f"{prefix}.result": clock()}
        finally:
            close_all(copies)

    def by_hand() -> dict[str, float]:
        clock = Stopwatch()
        copies = bench.raw.restore_many(image, count)
        try:
            _ask_all(copies, "")
            answer = clock()
            _ask_all(copies, "run")
            return {f"{prefix}.answer": answer, f"{prefix}.result": clock()}
        finally:
            bench.raw.end(*copies)

    return {OURS: ours, RAW: by_hand}


def _ask_all(boxes: list[RawBox], word: str) -> None:
    for box in boxes:
        box.send(word)
    for box in boxes:
        box.hear()


def pausing(box: Sandbox, digest: str, prefix: str) -> Job:
    """Sleep and wake, and every byte that its process held is the same."""

    def job() -> dict[str, float]:
        clock = Stopwatch()
        box.pause()
        paused = clock()
        clock = Stopwatch()
        box.resume()
        answer = clock()
        first_result(box)
        resumed = clock()
        must(digest_now(box) == digest, "the memory of a resumed process is not what it was")
        return {f"{prefix}.pause": paused, f"{prefix}.answer": answer, f"{prefix}.resume": resumed}

    return job


def claims(ours: Ours, engine: str, pool: int) -> Job:
    """From the constructor to the first command's result, while the pool is filled up again behind it."""

    def job() -> dict[str, float]:
        clock = Stopwatch()
        box = ours.box(engine, pool=pool)
        try:
            first_result(box)
            took = clock()
        finally:
            box.close()
        ours.wait_for_pool(box)
        return {"pool.claim": took}

    return job


def only(job: Job, names: Callable[[str], str | None]) -> Job:
    """The same with other names for its metrics; those that get none are dropped."""

    def renamed() -> dict[str, float]:
        return {name: value for key, value in job().items() if (name := names(key)) is not None}

    return renamed
