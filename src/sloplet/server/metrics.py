"""What the server counts about itself, as Prometheus' text format. A few dictionaries: it is on every request's way."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .state import ServerState

#: Seconds until an answer begins.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGE = os.sysconf("SC_PAGE_SIZE")

Labels = tuple[tuple[str, str], ...]


class Metrics:
    def __init__(self) -> None:
        self.answers: dict[tuple[str, str, int], int] = {}  #: by method, route and status
        self.seconds: dict[str, list[float]] = {}  #: by route: counts of BUCKETS, of more, and the sum
        self.refused: dict[str, int] = {}  #: by class of error
        self.sockets: dict[str, int] = {}  #: WebSockets that were opened, by route
        self.received = 0  #: bytes of bodies
        self.sent = 0
        self.connections = 0  #: that came
        self.crowded = 0  #: that came when there were too many
        self.timed_out = 0  #: that were closed because they asked nothing

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        key = (method, route, status)
        self.answers[key] = self.answers.get(key, 0) + 1
        counts = self.seconds.get(route)
        if counts is None:
            counts = self.seconds[route] = [0.0] * (len(BUCKETS) + 2)
        counts[bisect_left(BUCKETS, seconds)] += 1
        counts[-1] += seconds

    def refuse(self, error: str) -> None:
        self.refused[error] = self.refused.get(error, 0) + 1


class Text:
    """Prometheus' text, put together."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, kind: str, help: str, values: Iterable[tuple[Mapping[str, object], float]]) -> None:
        self._lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
        self._lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in values]

    def one(self, name: str, kind: str, help: str, value: float) -> None:
        self.add(name, kind, help, [({}, value)])

    def histogram(self, name: str, help: str, counts: Mapping[str, list[float]]) -> None:
        self._lines += [f"# HELP {name} {help}", f"# TYPE {name} histogram"]
        for route, each in sorted(counts.items()):
            total = 0.0
            for edge, count in zip((*map(str, BUCKETS), "+Inf"), each, strict=False):
                total += count
                self._lines.append(f"{name}_bucket{_labels({'route': route, 'le': edge})} {_number(total)}")
            self._lines.append(f"{name}_sum{_labels({'route': route})} {_number(each[-1])}")
            self._lines.append(f"{name}_count{_labels({'route': route})} {_number(total)}")

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"


def _labels(labels: Mapping[str, object]) -> str:
    if not labels:
        return ""
    escaped = (
        (name, str(value).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\""))
        for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def render(server: ServerState, tenant: str | None = None) -> str:
    """All of it, or what concerns one tenant. What sandboxes there are is as old as the last look (quotas.py)."""
    text = Text()
    _of_tenants(server, text, tenant)
    if tenant is None:
        _of_server(server, text)
    return str(text)


def _of_tenants(server: ServerState, text: Text, only: str | None) -> None:
    def of(counts: Mapping[str, int]) -> list[tuple[Mapping[str, object], float]]:
        return [({"tenant": name}, count) for name, count in sorted(counts.items()) if only in (None, name)]

    limits = server.limits
    text.add("sloplet_requests", "gauge", "Requests that are under way.", of(limits.requests))
    text.add("sloplet_streams", "gauge", "Streams and WebSockets that are open.", of(limits.streams))
    accounts = [(name, each) for name, each in sorted(server.quotas.accounts().items()) if only in (None, name)]
    text.add("sloplet_sandboxes", "gauge", "Sandboxes by state.", [
        ({"tenant": name, "state": state}, count)
        for name, account in accounts for state, count in sorted(account.states.items())
    ])  # fmt: skip
    for what in ("memory", "cpus", "disk"):
        text.add(f"sloplet_sandboxes_{what}", "gauge", f"The limits of those that run, added up: {what}.",
                 [({"tenant": name}, getattr(account.used(), what)) for name, account in accounts])  # fmt: skip


def _of_server(server: ServerState, text: Text) -> None:
    metrics, turns = server.metrics, server.limits.turns
    text.add("sloplet_http_requests_total", "counter", "Answers that have begun.", [
        ({"method": method, "route": route, "status": status}, count)
        for (method, route, status), count in sorted(metrics.answers.items())
    ])  # fmt: skip
    text.histogram("sloplet_http_request_seconds", "Time until an answer begins.", metrics.seconds)
    text.add("sloplet_websockets_total", "counter", "WebSockets that were opened.",
             [({"route": route}, count) for route, count in sorted(metrics.sockets.items())])  # fmt: skip
    text.add("sloplet_refused_total", "counter", "Requests that were refused, by the error's class.",
             [({"error": error}, count) for error, count in sorted(metrics.refused.items())])  # fmt: skip
    for name, help, value in (
        ("http_received_bytes", "Bytes of requests' bodies.", metrics.received),
        ("http_sent_bytes", "Bytes of answers' bodies.", metrics.sent),
        ("connections", "Connections that came.", metrics.connections),
        ("connections_crowded", "Connections that came when there were too many.", metrics.crowded),
        ("connections_timed_out", "Connections closed because they asked nothing.", metrics.timed_out),
        ("audit_failures", "Lines of the audit log that were lost.", server.audit.failures),
    ):
        text.one(f"sloplet_{name}_total", "counter", help, value)
    text.one("sloplet_creating", "gauge", "Sandboxes that are being made.", turns.active)
    text.one("sloplet_creating_waiting", "gauge", "Requests that wait for their turn to make one.", turns.waiting)
    text.one("sloplet_keepers", "gauge", "Keepers that the server is connected to.", len(server.tenants.connected))
    for name, help, read in server.gauges:
        text.one(name, "gauge", help, read())
    text.one("sloplet_start_time_seconds", "gauge", "When the server was started.", server.started_at)
    text.one("process_resident_memory_bytes", "gauge", "Resident memory of the server.", resident())
    text.one("process_open_fds", "gauge", "Open files of the server.", open_files())
    text.one("process_cpu_seconds_total", "counter", "CPU time of the server.", time.process_time())


def resident() -> int:
    """Bytes; 0 if /proc is not there."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
