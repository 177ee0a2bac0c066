"""One run: every suite, ours and the rivals in turns. Fills a Report."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ...sync import Sandbox
from . import measures
from .clock import interleave, no_gc, timed
from .environment import temporary_home
from .machine import describe
from .memory import MIB
from .rivals import RIVALS, Bwrap, Rival, Rivals, Unavailable
from .stats import Report, percentile

SLOW = ("docker", "runsc")  # a run takes them a tenth of a second and more
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How much of everything. ``QUICK`` is for looking, ``FULL`` for numbers to quote."""

    engines: tuple[str, ...] = ("container", "process")
    against: tuple[str, ...] = tuple(RIVALS)
    only: tuple[str, ...] = ()
    with_dockerd: bool = False
    quick: bool = False
    starts: int = 100
    slow_starts: int = 20
    execs: int = 500
    processes: int = 20
    sandboxes: int = 200
    at_once: int = 8
    live: int = 500
    small_files: int = 50
    large_files: int = 5
    outputs: int = 3
    output_bytes: int = 2**30
    warmup: int = 3


_QUICK = {
    "starts": 20, "slow_starts": 4, "execs": 100, "processes": 5, "sandboxes": 40, "live": 50,
    "small_files": 10, "large_files": 1, "outputs": 1, "output_bytes": 2**28, "warmup": 1, "quick": True,
}  # fmt: skip


def quick(**changes: object) -> Plan:
    return Plan(**{**_QUICK, **changes})  # type: ignore[arg-type]


def run(plan: Plan, say: Say = lambda text: None) -> Report:
    """Measure. State goes to a SLOPLET_HOME of its own that is gone afterwards."""
    report = Report()
    report.options = asdict(plan)
    report.machine = describe()
    with contextlib.ExitStack() as stack:
        stack.enter_context(temporary_home())
        docker_host = _dockerd(plan, report, stack, say)
        rivals = Rivals([name for name in plan.against if name not in report.skipped], docker_host)
        stack.callback(rivals.close)
        report.skipped.update(rivals.skipped)
        report.machine["rivals"] = {rival.name: rival.version() for rival in rivals}
        engines = _engines(plan, report, say)
        for name, suite in SUITES.items():
            if plan.only and name not in plan.only:
                report.skipped[name] = "not asked for"
                continue
            say(name)
            suite(plan, report, list(rivals), engines)
    report.machine["load_after"] = list(os.getloadavg())
    return report


def _dockerd(plan: Plan, report: Report, stack: contextlib.ExitStack, say: Say) -> str | None:
    if not plan.with_dockerd or "docker" not in plan.against:
        return None
    from .dockerd import PrivateDockerd

    say("starting a private dockerd")
    try:
        return stack.enter_context(PrivateDockerd())
    except Unavailable as error:
        report.skipped["docker"] = str(error)
        return None


def _engines(plan: Plan, report: Report, say: Say) -> list[str]:
    """Those that really run here: each has started one sandbox."""
    from ...errors import SlopletError

    working = []
    for engine in plan.engines:
        try:
            measures.start_once(engine)
        except SlopletError as error:
            report.skipped[engine] = str(error)
            say(f"{engine}: {error}")
        else:
            working.append(engine)
    return working


def _rounds(plan: Plan, name: str, normal: int) -> int:
    return min(normal, plan.slow_starts) if name in SLOW else normal


def start(plan: Plan, report: Report, rivals: list[Rival], engines: list[str]) -> None:
    def ours(engine: str) -> Callable[[], float]:
        def job() -> float:
            first, whole = measures.start_once(engine)
            lives.append((engine, whole))
            return first

        return job

    lives: list[tuple[str, float]] = []
    jobs: dict[str, Callable[[], float]] = {rival.name: _timed_once(rival) for rival in rivals}
    jobs |= {engine: ours(engine) for engine in engines}
    rounds = {name: _rounds(plan, name, plan.starts) for name in jobs}
    for job in jobs.values():
        job()
    lives.clear()
    interleave(jobs, rounds, 0, lambda name, value: report.add("start.first_result", name, value))
    for engine, whole in lives:
        report.add("start.whole_life", engine, whole)
    for rival in rivals:  # a rival's run *is* its whole life
        series = report.get("start.first_result", rival.name)
        if series is not None:
            report.add("start.whole_life", rival.name, *series.samples)


def _timed_once(rival: Rival) -> Callable[[], float]:
    return lambda: timed(rival.once)


def exec_(plan: Plan, report: Report, rivals: list[Rival], engines: list[str]) -> None:
    jobs: dict[str, Callable[[], float]] = {}
    if any(rival.name == "subprocess" for rival in rivals):
        jobs["subprocess"] = lambda: timed(lambda: subprocess.run(["true"], check=True))
        jobs["subprocess, captured"] = lambda: timed(lambda: subprocess.run(["true"], check=True, capture_output=True))
    with contextlib.ExitStack() as stack:
        for engine in engines:
            box = stack.enter_context(Sandbox(engine=engine))
            jobs[engine] = _bind(measures.exec_once, box)
        rounds = dict.fromkeys(jobs, plan.execs)
        interleave(jobs, rounds, plan.warmup, lambda name, value: report.add("exec.round_trip", name, value))


def _bind(measure: Callable[[Sandbox], float], box: Sandbox) -> Callable[[], float]:
    return lambda: measure(box)


def code(plan: Plan, report: Report, rivals: list[Rival], engines: list[str]) -> None:
    """A warm cell, and beside it the plainest question over the same wire: the difference is what cells cost."""
    with contextlib.ExitStack() as stack:
        cells: dict[str, Callable[[], float]] = {}
        questions: dict[str, Callable[[], float]] = {}
        for engine in engines:
            box = stack.enter_context(Sandbox(engine=engine))
            cells[engine] = _bind(measures.code_once, box)
            questions[engine] = _bind(measures.stat_once, box)
        for metric, jobs in (("code.round_trip", cells), ("code.wire", questions)):
            interleave(jobs, dict.fromkeys(jobs, plan.execs), plan.warmup, _recorder(report, metric))


def cli(plan: Plan, report: Report, rivals: list[Rival], engines: list[str]) -> None:
    jobs: dict[str, Callable[[], float]] = {"python": lambda: measures.python_process("-c", "pass")}
    jobs |= {engine: _cli(engine) for engine in engines}
    rounds = dict.fromkeys(jobs, plan.processes)
    interleave(jobs, rounds, 1, lambda name, value: report.add("cli.run", name, value))


def _cli(engine: str) -> Callable[[], float]:
    return lambda: measures.cli_once(engine)


def imports(plan: Plan, report: Report, rivals: list[Rival], engines: list[str]) -> None:
    """Each sample is a fresh Python with the import, less the median of fresh Pythons without it."""
    taken: dict[str, list[float]] = {"bare": [], "sloplet": [], "sandbox": []}
    code = {"bare": "pass", "sloplet": "import sloplet", "sandbox": "from sloplet import Sandbox"}
    jobs = {name: _python(text) for name, text in code.items()}
    rounds = dict.fromkeys(jobs, plan.processes)
    interleave(jobs, rounds, 1, lambda name, value: taken[name].append(value))
    bare = percentile(taken["bare"], 50)
    note = f"bare python: {bare * 1000:.1f} ms"
    report.add("import.sloplet", "sloplet", *(value - bare for value in taken["sloplet"]), note=note)
    report.add("import.sandbox", "sloplet", *(value - bare for value in taken["sandbox"]), note=note)


def _python(code: str) -> Callable[[], float]:
    return lambda: measures.python_process("-c", code)


def rate(plan: Plan, report: Report, rivals: list[Rival], engines: list[str]) -> None:
    repeats = 1 if plan.quick else 3
    for _ in range(repeats):
        for rival in rivals:
            if isinstance(rival, Bwrap):
                with no_gc():
                    report.add("rate.sandboxes", rival.name, _one_by_one(rival, plan.sandboxes), note="one at a time")
        for engine in engines:
            with no_gc():
                value = measures.rate(engine, plan.sandboxes, plan.at_once)
            report.add("rate.sandboxes", engine, value, note=f"{plan.at_once} at a time")


def _one_by_one(rival: Rival, count: int) -> float:
    def all_of_them() -> None:
        for _ in range(count):
            rival.once()

    return count / timed(all_of_them)


def files(plan: Plan, report: Report, rivals: list[Rival], engines: list[str]) -> None:
    bare = any(rival.name == "subprocess" for rival in rivals)
    with contextlib.ExitStack() as stack:
        boxes = {engine: stack.enter_context(Sandbox(engine=engine)) for engine in engines}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sloplet-bench-")))
        for label, size, rounds in (("1m", MIB, plan.small_files), ("100m", 100 * MIB, plan.large_files)):
            data = os.urandom(size)
            writes = {engine: _writer(box, data) for engine, box in boxes.items()}
            reads = {engine: _reader(box, size) for engine, box in boxes.items()}
            if bare:
                writes["subprocess"] = _bare_writer(folder, data)
                reads["subprocess"] = _bare_reader(folder, size)
            for metric, jobs in ((f"files.write_{label}", writes), (f"files.read_{label}", reads)):
                record = _recorder(report, metric)
                interleave(jobs, dict.fromkeys(jobs, rounds), 1, record)


def _recorder(report: Report, metric: str) -> Callable[[str, float], None]:
    return lambda name, value: report.add(metric, name, value)


def _writer(box: Sandbox, data: bytes) -> Callable[[], float]:
    return lambda: measures.file_write(box, data)


def _reader(box: Sandbox, size: int) -> Callable[[], float]:
    return lambda: measures.file_read(box, size)


def _bare_writer(folder: Path, data: bytes) -> Callable[[], float]:
    return lambda: measures.bare_file_write(folder, data)


def _bare_reader(folder: Path, size: int) -> Callable[[], float]:
    return lambda: measures.bare_file_read(folder, size)


def output(plan: Plan, report: Report, rivals: list[Rival], engines: list[str]) -> None:
    prefixes = {rival.name: rival.command() for rival in rivals if rival.name in ("subprocess", "bwrap")}
    with contextlib.ExitStack() as stack:
        boxes = {engine: stack.enter_context(Sandbox(engine=engine)) for engine in engines}
        for _ in range(plan.outputs):
            for name, prefix in prefixes.items():
                report.add("output.stdout", name, measures.bare_output(plan.output_bytes, prefix))
            for engine, box in boxes.items():
                with no_gc():
                    speed, grown = measures.output(box, plan.output_bytes)
                report.add("output.stdout", engine, speed)
                report.add("output.host_memory", engine, grown)


def live(plan: Plan, report: Report, rivals: list[Rival], engines: list[str]) -> None:
    for engine in engines:
        number, by_pss, by_machine, guessed = measures.live_in_a_fresh_process(engine, plan.live, plan.at_once)
        report.add("live.count", engine, number)
        report.add(
            "live.pss", engine, by_pss, note=f"{number} live" + (f"; {guessed} processes by RSS" if guessed else "")
        )
        report.add("live.machine", engine, by_machine, note="MemAvailable, with the kernel's own share")


SUITES: dict[str, Callable[[Plan, Report, list[Rival], list[str]], None]] = {
    "start": start,
    "exec": exec_,
    "code": code,
    "cli": cli,
    "import": imports,
    "rate": rate,
    "files": files,
    "output": output,
    "live": live,
}
