"""What Sloplet promises in numbers, and whether a report keeps it. Pure.

A bar whose two sides were not both measured is neither passed nor failed: its verdict says what was missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .stats import Report, percentile

MIB = 2**20


@dataclass(frozen=True)
class Bar:
    """``metric`` of ``subject``, by p50, is at most (or at least) ``limit``: a number of its own unit, or, with
    ``against``, a multiple of that rival's p50 in ``against_metric``."""

    name: str
    metric: str
    subject: str
    limit: float
    at_least: bool = False
    against: str | None = None
    inverse: bool = False  #: the ratio is rival / ours: "20 times faster than"
    suffix: str = ""
    full: bool = False  #: a run with --quick does less than what is promised


BARS = (
    Bar("create to first result against bwrap", "start.first_result", "container", 3, against="bwrap", suffix="x"),
    Bar("create to first result, faster than docker run", "start.first_result", "container", 20, at_least=True,
        against="docker", inverse=True, suffix="x"),
    Bar("exec round trip against subprocess.run", "exec.round_trip", "container", 3, against="subprocess", suffix="x"),
    Bar("sandboxes made, used, destroyed", "rate.sandboxes", "container", 40, at_least=True, suffix="/s"),
    Bar("live sandboxes at once", "live.count", "container", 500, at_least=True, full=True),
    Bar("memory of a live sandbox", "live.pss", "container", 3, suffix=" MiB"),
    Bar("import sloplet", "import.sloplet", "sloplet", 0.030, suffix=" s"),
    Bar("sloplet run -- true", "cli.run", "container", 0.250, suffix=" s"),
)  # fmt: skip

LIVE_BARS = (
    Bar("live snapshot against `runsc checkpoint`", "snapshot.time", "gvisor", 1.5, against="runsc", suffix="x"),
    Bar("restore to first result against `runsc restore`", "restore.result", "gvisor", 1.4, against="runsc",
        suffix="x"),
    Bar("fork(10) against ten `runsc restore` in parallel", "fork.answer", "gvisor", 1.4, against="runsc", suffix="x",
        full=True),
    Bar("claim from a warm pool to first result", "pool.claim", "gvisor", 0.015, suffix=" s"),
    Bar("claim from a warm pool to first result", "pool.claim", "container", 0.015, suffix=" s"),
    Bar("a resumed 200 MiB process has all its memory", "pause.intact", "gvisor", 1, at_least=True, full=True),
    Bar("memory of a paused sandbox", "weight.paused", "gvisor", 0, suffix=" MiB"),
)  # fmt: skip
NET_BARS = (
    Bar("download through the wire (200 MB/s)", "download.speed", "container", 200e6 / MIB, at_least=True,
        suffix=" MiB/s", full=True),
    Bar("connect to first byte, beyond a bare socket's", "connect.overhead", "container", 0.003, suffix=" s"),
    Bar("connect to first byte, beyond a bare socket's", "connect.overhead", "gvisor", 0.003, suffix=" s"),
    Bar("200 connections at once without error", "together.failed", "container", 0),
    Bar("200 connections at once without error", "together.failed", "gvisor", 0),
    Bar("host memory while clients read slowly", "slow.memory", "container", 16, suffix=" MiB", full=True),
    Bar("host memory while clients read slowly", "slow.memory", "gvisor", 16, suffix=" MiB", full=True),
)  # fmt: skip
IMAGES_BARS = (
    Bar("unpack a layer against `tar -x`", "unpack.plain", "sloplet", 0.5, at_least=True, against="tar", suffix="x",
        full=True),
    Bar("unpack a gzip layer against `tar -x`", "unpack.gzip", "sloplet", 0.5, at_least=True, against="tar",
        suffix="x", full=True),
    Bar("an image that is here, beyond image=host", "start.overhead", "image", 0.005, suffix=" s"),
    Bar("100 sandboxes of one image read one file", "share.inodes", "sloplet", 1, full=True),
    Bar("and have it once in the page cache", "share.cache", "sloplet", 1.5, suffix="x", full=True),
    Bar("disk that one more of them takes", "share.disk", "sloplet", 1, suffix=" MiB", full=True),
)  # fmt: skip
SERVER_BARS = (
    Bar("create to first result, beyond local", "first.overhead", "remote", 0.005, suffix=" s"),
    Bar("exec round trip, beyond local", "trip.overhead", "remote", 0.003, suffix=" s"),
    Bar("200 clients at once without error", "crowd.failed", "remote", 0, full=True),
    Bar("memory of the server with 200 clients", "crowd.memory", "remote", 512, suffix=" MiB", full=True),
    Bar("upload through the server (200 MB/s)", "transfer.upload", "http", 200e6 / MIB, at_least=True,
        suffix=" MiB/s", full=True),
    Bar("download through the server (200 MB/s)", "transfer.download", "http", 200e6 / MIB, at_least=True,
        suffix=" MiB/s", full=True),
    Bar("sandboxes that go on after kill -9 of the server", "restart.survived", "remote", 1, at_least=True),
    Bar("E2B's client: create and a command", "e2b.first", "e2b", 0.060, suffix=" s"),
    Bar("E2B's client: the same from a warm pool", "e2b.first", "e2b, pool", 0.025, suffix=" s"),
)  # fmt: skip
PROMISES = {"bench": BARS, "live": LIVE_BARS, "net": NET_BARS, "images": IMAGES_BARS, "server": SERVER_BARS}


@dataclass(frozen=True)
class Verdict:
    bar: Bar
    value: float | None
    passed: bool | None  #: None: not measured
    why: str = ""

    @property
    def wanted(self) -> str:
        sign = ">=" if self.bar.at_least else "<="
        return f"{sign} {self.bar.limit:g}{self.bar.suffix}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.bar.name, "metric": self.bar.metric, "subject": self.bar.subject, "against": self.bar.against,
            "wanted": self.wanted, "limit": self.bar.limit, "at_least": self.bar.at_least, "value": self.value,
            "passed": self.passed, "why": self.why,
        }  # fmt: skip


def judge(report: Report) -> list[Verdict]:
    return [_judge(report, bar) for bar in PROMISES[report.kind]]


def _judge(report: Report, bar: Bar) -> Verdict:
    ours = report.get(bar.metric, bar.subject)
    if ours is None:
        return Verdict(bar, None, None, _missing(report, bar.subject, bar.metric))
    value = percentile(ours.samples, 50)
    if bar.against is not None:
        theirs = report.get(bar.metric, bar.against)
        if theirs is None:
            return Verdict(bar, None, None, _missing(report, bar.against, bar.metric))
        value = theirs.p50 / value if bar.inverse else value / theirs.p50
    if bar.full and report.options.get("quick"):
        return Verdict(bar, value, None, "--quick does less")
    return Verdict(bar, value, value >= bar.limit if bar.at_least else value <= bar.limit)


def _missing(report: Report, subject: str, metric: str) -> str:
    suite = metric.partition(".")[0]
    return report.skipped.get(subject) or report.skipped.get(suite) or f"{subject} was not measured"
