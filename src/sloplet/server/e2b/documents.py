"""Sandboxes as E2B's documents have them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ...controller import SandboxInfo
from .records import Record

CLIENT = "sloplet"
ENVD = "0.6.13"  #: what envd would call itself that does what this one does: clients ask for features by it
_FOREVER = 10 * 365 * 86400.0  # a sandbox without an end has one here: clients need a time


def time_of(seconds: float) -> str:
    """RFC 3339, in microseconds at the most: what is compared must survive being sent back."""
    return datetime.fromtimestamp(round(seconds, 6), UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def record_of(info: SandboxInfo, tenant: str) -> Record:
    """Of a sandbox that was made by other ways than E2B's."""
    template = info.spec.template or info.spec.image
    metadata = dict(info.spec.labels)
    return Record(info.id, tenant, "", template, metadata=metadata, user=info.spec.run_user, public=False)


def sandbox(record: Record, *, token: str, traffic: str, domain: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sandboxID": record.sandbox, "templateID": record.template, "clientID": CLIENT, "envdVersion": ENVD,
        "trafficAccessToken": None if record.public else traffic, "domain": domain,
    }  # fmt: skip
    if record.secure:
        found["envdAccessToken"] = token
    if record.alias:
        found["alias"] = record.alias
    return found


def listed(info: SandboxInfo, record: Record) -> dict[str, Any]:
    limits = info.spec.limits
    found: dict[str, Any] = {
        "sandboxID": info.id, "templateID": record.template, "clientID": CLIENT, "envdVersion": ENVD,
        "startedAt": time_of(info.created_at), "endAt": time_of(ends_at(info)), "state": state_of(info),
        "cpuCount": max(1, round(limits.cpus)), "memoryMB": limits.memory >> 20, "diskSizeMB": limits.disk >> 20,
        "metadata": record.metadata,
    }  # fmt: skip
    if record.alias:
        found["alias"] = record.alias
    if record.volumes:
        found["volumeMounts"] = record.volumes
    return found


def detail(info: SandboxInfo, record: Record, *, token: str, domain: str, disk_only: bool) -> dict[str, Any]:
    found = listed(info, record)
    found["domain"] = domain
    if record.secure:
        found["envdAccessToken"] = token
    found["lifecycle"] = {"autoResume": record.auto_resume, "onTimeout": "pause" if record.pauses else "kill"}
    if record.network:
        found["network"] = record.network
    if record.internet is not None:
        found["allowInternetAccess"] = record.internet
    if info.state == "paused":
        found["pauseMode"] = "filesystem" if disk_only else "full"
    return found


def state_of(info: SandboxInfo) -> str:
    return "paused" if info.state == "paused" else "running"


def ends_at(info: SandboxInfo) -> float:
    if info.expires_at is not None:
        return info.expires_at
    if info.state == "paused" and info.saved_at is not None:
        return info.saved_at
    return info.created_at + _FOREVER
