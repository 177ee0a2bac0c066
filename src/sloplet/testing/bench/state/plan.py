"""How much a run does, and what its suites share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..clock import no_gc, turns
from ..stats import CURVE_SIZES, Report
from .ours import Ours
from .raw import RawRunsc

OURS, RAW = "gvisor", "runsc"
DEFAULT = "gvisor, cpus=1"  #: with the limits that a sandbox has by default; the others may use all processors
Job = Callable[[], dict[str, float]]  #: one sample of each metric it names


@dataclass(frozen=True)
class LivePlan:
    """How much of everything. ``rounds`` is the number of restores; other things are done in proportion."""

    rounds: int = 10
    only: tuple[str, ...] = ()
    quick: bool = False
    warmup: int = 1
    copies: int = 10
    pool: int = 2
    held: int = 200  #: MiB of the process that is paused
    sizes: tuple[int, ...] = CURVE_SIZES  #: MiB

    @property
    def few(self) -> int:
        return max(1, self.rounds // 2)

    @property
    def many(self) -> int:
        return self.rounds * 2


def quick_plan(only: tuple[str, ...] = (), rounds: int = 2) -> LivePlan:
    """To see that it works: its numbers are not for quoting."""
    return LivePlan(rounds=rounds, only=only, quick=True, warmup=0, copies=2, pool=1, held=16, sizes=CURVE_SIZES[:1])


@dataclass(frozen=True)
class Bench:
    """What a suite works with."""

    plan: LivePlan
    report: Report
    ours: Ours
    raw: RawRunsc
    python: str | None  #: inside; None: there is none
    engines: tuple[str, ...]  #: whose pools are measured

    def in_turns(self, jobs: Mapping[str, Job], rounds: int, *, warm: bool = True) -> None:
        """Each job ``rounds`` times, in turns; a metric's subject is the job's name."""
        for job in jobs.values():
            for _ in range(self.plan.warmup if warm else 0):
                job()
        with no_gc():
            for name in turns(dict.fromkeys(jobs, rounds)):
                for metric, value in jobs[name]().items():
                    self.report.add(metric, name, value)
