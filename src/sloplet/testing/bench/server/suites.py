"""The suites of ``sloplet bench --server``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from ....sync import Sandbox
from ..clock import interleave, timed
from ..measures import must
from ..memory import MIB, rss
from ..run import Say
from .e2b import e2b
from .plan import HTTP, LOCAL, REMOTE, Bench

_CROWD_SECONDS = 600


def first(bench: Bench, say: Say) -> None:
    """A fresh sandbox and its first result, here and through the server, in turns."""
    plan, where = bench.plan, _where(bench)

    def job(subject: str) -> float:
        start = time.perf_counter()
        with Sandbox(engine=plan.engine, **where[subject]) as box:
            result = box.run(["true"])
            took = time.perf_counter() - start
            must(result.exit_code == 0, result.describe())
        return took

    _both(bench, "first", "result", job, plan.rounds)


def trip(bench: Bench, say: Say) -> None:
    """One command in a sandbox that is there: held here, through the library's own connection, as a plain POST."""
    plan, where = bench.plan, _where(bench)
    with ExitStack() as stack:
        boxes = {name: stack.enter_context(Sandbox(engine=plan.engine, **given)) for name, given in where.items()}

        def job(subject: str) -> float:
            return timed(lambda: must(boxes[subject].run(["true"]).exit_code == 0, "true failed"))

        _both(bench, "trip", "exec", job, plan.execs)
        client = stack.enter_context(_client(bench))
        path = f"/v1/sandboxes/{boxes[REMOTE].id}/exec"

        def post() -> float:
            return timed(lambda: must(client.post(path, json={"command": ["true"]}).json()["exit_code"] == 0, "true"))

        interleave({HTTP: post}, {HTTP: plan.execs}, 3, lambda name, value: bench.report.add("trip.http", name, value))


def transfer(bench: Bench, say: Say) -> None:
    """One large file in and out: by curl, by the library through the server, and by the library held here."""
    plan, where = bench.plan, _where(bench)
    mib = plan.bytes / MIB
    curl = shutil.which("curl")
    if curl is None:
        bench.report.skipped["transfer"] = "curl is not installed"
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sloplet-bench-", dir=_memory(bench))))
        source = folder / "source"
        source.write_bytes(os.urandom(plan.bytes))
        room: dict[str, Any] = {"engine": plan.engine, "disk": 2 * plan.bytes + (256 << 20), "memory": "4g"}
        boxes = {name: stack.enter_context(Sandbox(**room, **given)) for name, given in where.items()}
        address = f"{bench.server.url}/v1/sandboxes/{boxes[REMOTE].id}/files?path=/workspace/large"
        command = [curl, "-sS", "--fail", "-H", f"Authorization: Bearer {bench.server.key}"]

        def by_curl(*arguments: str) -> None:
            done = subprocess.run([*command, *arguments, address], capture_output=True, check=False)
            must(done.returncode == 0, done.stderr.decode("utf-8", "replace"))

        up: dict[str, Callable[[], object]] = {HTTP: lambda: by_curl("-T", str(source), "-o", os.devnull)}
        down: dict[str, Callable[[], object]] = {HTTP: lambda: by_curl("-o", os.devnull)}
        for name, box in boxes.items():
            up[name] = partial(box.upload, source, "/workspace/large")
            down[name] = partial(box.download, "/workspace/large", folder / "target")
        for what, jobs in (("upload", up), ("download", down)):
            speeds = {name: partial(_speed, mib, job) for name, job in jobs.items()}
            record = partial(bench.report.add, f"transfer.{what}")
            interleave(speeds, dict.fromkeys(jobs, plan.transfers), 1, record)
        must((folder / "target").stat().st_size == plan.bytes, "the download is not what was uploaded")


def crowd(bench: Bench, say: Say) -> None:
    """Many clients at once; what the server's memory was at most meanwhile."""
    plan, server = bench.plan, bench.server
    words = [server.url, server.key, plan.engine, str(plan.clients), str(plan.each)]
    before, most, ended = rss(server.pid), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.05):
            most = max(most, rss(server.pid))

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sloplet.testing.bench.server.crowd", *words],
            capture_output=True, timeout=_CROWD_SECONDS, check=False,
        )  # fmt: skip
    finally:
        ended.set()
        watching.join()
    must(done.returncode == 0, done.stderr.decode("utf-8", "replace")[-2000:])
    told = json.loads(done.stdout)
    note = "; ".join(told["failures"])
    bench.report.add("crowd.exec", REMOTE, *told["samples"])
    bench.report.add("crowd.rate", REMOTE, len(told["samples"]) / told["seconds"])
    bench.report.add("crowd.failed", REMOTE, told["failed"], note=note)
    bench.report.add("crowd.memory", REMOTE, most / MIB)
    bench.report.add("crowd.grown", REMOTE, max(0, most - before) / MIB / plan.clients)


def restart(bench: Bench, say: Say) -> None:
    """Sandboxes with something running in them. The server is killed, another started: each must answer."""
    plan, given = bench.plan, _where(bench)[REMOTE]
    names = [f"survivor-{number}" for number in range(plan.survivors)]
    for name in names:
        box = Sandbox(name, engine=plan.engine, memory="64m", **given)
        box.run(f"echo {name} > here; (sleep 1000 & echo $! > pid)", check=True)
    bench.server.kill()
    start = time.perf_counter()
    bench.server.start()
    kept = 0
    for number, name in enumerate(names):
        box = Sandbox.connect(name, **given)
        kept += box.run("cat here; kill -0 $(cat pid) && echo lives").stdout == f"{name}\nlives\n"
        if not number:
            bench.report.add("restart.back", REMOTE, time.perf_counter() - start)
        box.kill()
    bench.report.add("restart.survived", REMOTE, kept / len(names), note=f"{kept} of {len(names)}")


SUITES: dict[str, Callable[[Bench, Say], None]] = {
    "first": first,
    "trip": trip,
    "transfer": transfer,
    "crowd": crowd,
    "restart": restart,
    "e2b": e2b,
}


def _speed(mib: float, job: Callable[[], object]) -> float:
    return mib / timed(job)


def _where(bench: Bench) -> dict[str, dict[str, str]]:
    return {LOCAL: {"server": ""}, REMOTE: {"server": bench.server.url, "key": bench.server.key}}


def _client(bench: Bench) -> httpx.Client:
    headers = {"Authorization": f"Bearer {bench.server.key}"}
    return httpx.Client(base_url=bench.server.url, headers=headers, timeout=60, trust_env=False)


def _both(bench: Bench, suite: str, name: str, job: Callable[[str], float], rounds: int) -> None:
    """In turns, and what the server adds to the middle one."""
    taken: dict[str, list[float]] = {LOCAL: [], REMOTE: []}
    jobs = {subject: partial(job, subject) for subject in taken}
    interleave(jobs, dict.fromkeys(jobs, rounds), 3, lambda subject, value: taken[subject].append(value))
    for subject, samples in taken.items():
        bench.report.add(f"{suite}.{name}", subject, *samples)
    ours, base = bench.report.get(f"{suite}.{name}", REMOTE), bench.report.get(f"{suite}.{name}", LOCAL)
    assert ours is not None
    assert base is not None
    bench.report.add(f"{suite}.overhead", REMOTE, ours.p50 - base.p50)


def _memory(bench: Bench) -> str | None:
    """In memory, if there is room: a disk would be what is measured."""
    try:
        room = os.statvfs("/dev/shm")
        return "/dev/shm" if room.f_bavail * room.f_frsize > 4 * bench.plan.bytes else None
    except OSError:
        return None
