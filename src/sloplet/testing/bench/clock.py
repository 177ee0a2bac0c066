"""Timing: one sample, and several subjects taken in turns so that no one has the quiet minute for itself."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """As timeit does: no garbage collection inside a sample; one between series."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def timed(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def turns(rounds: Mapping[str, int]) -> Iterator[str]:
    """Who goes next. Each subject comes up as often as asked; the slow ones with few rounds are spread evenly over the
    whole run, and the order within a round rotates, so nobody always follows the same neighbour."""
    most = max(rounds.values(), default=0)
    names = list(rounds)
    done = dict.fromkeys(names, 0)
    for number in range(most):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            due = ((number + 1) * rounds[name]) // most
            if done[name] < due:
                done[name] += 1
                yield name


def interleave(
    jobs: Mapping[str, Callable[[], float]],
    rounds: Mapping[str, int],
    warmup: int,
    record: Callable[[str, float], None],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Run every job its number of rounds, in turns; ``job`` returns its own sample. Warm-up runs are thrown away."""
    for name, job in jobs.items():
        for _ in range(min(warmup, rounds[name])):
            job()
    with no_gc():
        for name in turns({name: rounds[name] for name in jobs}):
            record(name, jobs[name]())
            tick()
