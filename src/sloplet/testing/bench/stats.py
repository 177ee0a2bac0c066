"""Numbers: samples, percentiles, ratios, the report and its JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA = "sloplet-bench/1"


def percentile(samples: Sequence[float], p: float) -> float:
    """The p-th percentile, 0 to 100, between neighbours by linear interpolation (as numpy's default)."""
    if not samples:
        raise ValueError("no samples")
    if not 0 <= p <= 100:
        raise ValueError(f"{p} is not a percentile")
    ordered = sorted(samples)
    place = (len(ordered) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(samples: Sequence[float]) -> dict[str, float]:
    return {
        "n": len(samples),
        "min": min(samples),
        "mean": math.fsum(samples) / len(samples),
        "p50": percentile(samples, 50),
        "p95": percentile(samples, 95),
        "p99": percentile(samples, 99),
        "max": max(samples),
    }


@dataclass
class Series:
    """What one subject (an engine of ours, or a rival) scored in one metric."""

    metric: str  #: "start.first_result", see METRICS
    subject: str  #: "container", "bwrap"
    samples: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def p50(self) -> float:
        return percentile(self.samples, 50)

    def to_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric, "subject": self.subject, "unit": METRICS[self.metric].unit, "note": self.note,
            "summary": summary(self.samples), "samples": self.samples,
        }  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """What a number means. ``baseline``: the subject that ratios are taken against."""

    title: str
    unit: str  #: s, 1/s, MiB/s, MiB
    baseline: str | None = None

    @property
    def lower_is_better(self) -> bool:
        return self.unit in ("s", "MiB")


METRICS = {
    "start.first_result": Metric("create to first result", "s", "bwrap"),
    "start.whole_life": Metric("create, use, destroy", "s", "bwrap"),
    "exec.round_trip": Metric("exec round trip", "s", "subprocess"),
    "code.round_trip": Metric("code cell, warm", "s"),
    "code.wire": Metric("a question over the wire", "s"),
    "cli.run": Metric("`sloplet run -- true`, whole process", "s", "python"),
    "import.sloplet": Metric("import sloplet, beyond bare python", "s"),
    "import.sandbox": Metric("from sloplet import Sandbox, beyond bare python", "s"),
    "rate.sandboxes": Metric("made, used, destroyed per second", "1/s", "bwrap"),
    "files.write_1m": Metric("write 1 MiB", "MiB/s", "subprocess"),
    "files.read_1m": Metric("read 1 MiB", "MiB/s", "subprocess"),
    "files.write_100m": Metric("write 100 MiB", "MiB/s", "subprocess"),
    "files.read_100m": Metric("read 100 MiB", "MiB/s", "subprocess"),
    "output.stdout": Metric("stdout to a counting reader", "MiB/s", "subprocess"),
    "output.host_memory": Metric("host memory grown by that output", "MiB"),
    "live.count": Metric("live at once", "1"),
    "live.pss": Metric("memory of one live sandbox (PSS, with the host's share)", "MiB"),
    "live.machine": Metric("memory the machine lost per live sandbox", "MiB"),
}

CURVE_SIZES = (16, 64, 256, 1024)  # MiB of memory touched
CURVES = {
    "snapshot": "live snapshot",
    "restore": "restore to first result",
    "checked": "restore, checked anew",
    "pause": "pause",
    "resume": "resume, to first result",
    "fork": "fork(1)",
}
_BOTH = ("snapshot", "restore")  # what runsc by hand does too

#: Those of ``sloplet bench --live``. The baseline is runsc used by hand.
LIVE_METRICS = {
    "snapshot.time": Metric("live snapshot", "s", "runsc"),
    "snapshot.disk": Metric("a small snapshot on disk", "MiB", "runsc"),
    "restore.returned": Metric("`runsc restore` returns", "s"),
    "restore.answer": Metric("restore to first answer", "s", "runsc"),
    "restore.result": Metric("restore to first result", "s", "runsc"),
    "fork.answer": Metric("fork(10), all ten answer", "s", "runsc"),
    "fork.result": Metric("fork(10), all ten ran a command", "s", "runsc"),
    "pool.claim": Metric("warm pool, to first result", "s"),
    "pause.pause": Metric("pause a 200 MiB Python process", "s"),
    "pause.answer": Metric("resume it, to first answer", "s"),
    "pause.resume": Metric("resume it, to first result", "s"),
    "pause.disk": Metric("its state on disk", "MiB"),
    "pause.intact": Metric("its memory is all there (1: yes)", "1"),
    "weight.running": Metric("memory, running (PSS)", "MiB"),
    "weight.forked": Metric("memory, each copy (PSS)", "MiB"),
    "weight.paused": Metric("memory, paused (PSS)", "MiB"),
    **{
        f"curve.{name}_{size}": Metric(
            f"{title}, {size} MiB", "s", "runsc" if name in ("snapshot", "restore") else None
        )
        for size in CURVE_SIZES
        for name, title in CURVES.items()
    },
}
METRICS |= LIVE_METRICS

#: Those of ``sloplet bench --net``.
NET_METRICS = {
    "download.speed": Metric("download, one connection", "MiB/s", "loopback"),
    "connect.first_byte": Metric("connect to first byte", "s", "loopback"),
    "connect.named": Metric("the same, with the name looked up each time", "s"),
    "connect.overhead": Metric("connect to first byte, beyond a bare socket's", "s"),
    "together.time": Metric("200 connections at once, opened, echoed, closed", "s", "loopback"),
    "together.failed": Metric("of them failed", "1"),
    "slow.memory": Metric("host memory grown by slow readers", "MiB"),
}
METRICS |= NET_METRICS

#: Those of ``sloplet bench --images``.
IMAGES_METRICS = {
    "unpack.plain": Metric("unpack a layer, plain", "MiB/s", "tar"),
    "unpack.gzip": Metric("unpack a layer, gzip", "MiB/s", "tar"),
    "tree.first": Metric("an image of it made ready, for the first time", "s"),
    "tree.again": Metric("and found again", "s"),
    "start.image": Metric("create to first result, image here", "s", "host"),
    "start.overhead": Metric("create to first result, beyond image=host", "s"),
    "share.inodes": Metric("files that sandboxes of one image see as one file", "1"),
    "share.cache": Metric("page cache grown by their reading it, times the file", "1"),
    "share.disk": Metric("disk that one more of them takes", "MiB"),
}
METRICS |= IMAGES_METRICS

#: Those of ``sloplet bench --server``. "local": the same held by this process.
SERVER_METRICS = {
    "first.result": Metric("create to first result", "s", "local"),
    "first.overhead": Metric("create to first result, beyond local", "s"),
    "trip.exec": Metric("exec round trip", "s", "local"),
    "trip.overhead": Metric("exec round trip, beyond local", "s"),
    "trip.http": Metric("exec as one POST, its own connection kept", "s"),
    "transfer.upload": Metric("upload of one large file", "MiB/s", "local"),
    "transfer.download": Metric("download of it", "MiB/s", "local"),
    "crowd.exec": Metric("exec, every client in a sandbox of its own, all at once", "s"),
    "crowd.rate": Metric("their commands a second", "1/s"),
    "crowd.failed": Metric("of their commands failed", "1"),
    "crowd.memory": Metric("memory of the server by then (RSS)", "MiB"),
    "crowd.grown": Metric("memory the server grew by, a client", "MiB"),
    "e2b.first": Metric("E2B's client: create and a command", "s"),
    "restart.survived": Metric("sandboxes that go on after kill -9 of the server (1: all)", "1"),
    "restart.back": Metric("server killed to first result through the next one", "s"),
}
METRICS |= SERVER_METRICS


def ratio(ours: float, theirs: float, *, lower_is_better: bool) -> float:
    """How many times the baseline's cost ours is: 1.0 is equal, below 1 is better than it, above 1 worse."""
    if ours <= 0 or theirs <= 0:
        return math.nan
    return ours / theirs if lower_is_better else theirs / ours


class Report:
    """All series of one run, by metric and subject. ``kind``: what was run, "bench", "live", "net", "images" or
    "server"."""

    def __init__(self, kind: str = "bench") -> None:
        self.kind = kind
        self._series: dict[tuple[str, str], Series] = {}
        self.skipped: dict[str, str] = {}  #: subject or suite -> why it was not measured
        self.machine: dict[str, Any] = {}
        self.options: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Series]:
        order = list(METRICS)
        return iter(sorted(self._series.values(), key=lambda series: order.index(series.metric)))

    def add(self, metric: str, subject: str, *values: float, note: str = "") -> None:
        if metric not in METRICS:
            raise KeyError(metric)
        series = self._series.setdefault((metric, subject), Series(metric, subject))
        series.samples.extend(values)
        series.note = note or series.note

    def get(self, metric: str, subject: str) -> Series | None:
        series = self._series.get((metric, subject))
        return series if series is not None and series.samples else None

    def ratio_of(self, series: Series) -> float | None:
        """Against the metric's baseline, by p50; None where that was not measured or is the subject itself."""
        metric = METRICS[series.metric]
        base = self.get(series.metric, metric.baseline) if metric.baseline else None
        if base is None or base is series or not series.samples:
            return None
        return ratio(series.p50, base.p50, lower_is_better=metric.lower_is_better)

    def to_dict(self) -> dict[str, Any]:
        from .bars import judge

        series = []
        for one in self:
            data = one.to_dict()
            data["baseline"] = METRICS[one.metric].baseline
            data["ratio"] = self.ratio_of(one)
            series.append(data)
        return {
            "schema": SCHEMA, "kind": self.kind, "machine": self.machine, "options": self.options,
            "skipped": self.skipped, "series": series, "bars": [verdict.to_dict() for verdict in judge(self)],
        }  # fmt: skip
