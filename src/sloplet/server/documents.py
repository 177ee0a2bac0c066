"""What the HTTP API answers with, as models: the OpenAPI document is made of these. They mirror the library's
``to_dict``; what is nobody's business over HTTP (folders of the host's) is left out here, in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from .. import controller
from ..engines import base
from ..netspec import NetworkSpec
from ..spec import SandboxSpec
from .problems import MEDIA_TYPE, without_paths
from .settings import MAX_JSON

Item = TypeVar("Item")


class Request(BaseModel):
    """Base of what is sent to the server: a field that is not known is an error, not silence, and nothing is taken
    for something else. With a longest length pydantic looks into every string: what is no Unicode is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, str_max_length=MAX_JSON)


class Document(BaseModel):
    """Base of what the server sends."""


class Problem(Document):
    """What went wrong (RFC 9457). ``error`` is a class of docs/api.md's tree of errors."""

    type: str = Field(examples=["urn:sloplet:error:SandboxNotFound"])
    title: str
    status: int
    detail: str
    error: str = Field(examples=["SandboxNotFound"])
    hint: str | None = None
    errno: int | None = None
    request_id: str | None = None


_WHY = {
    400: "The request makes no sense.",
    401: "No key, or one that is unknown, expired or revoked.",
    403: "This key may not do that, or the operator does not allow it.",
    404: "There is no such thing, in the key's tenant.",
    409: "It is not in a state for that, or a name is taken.",
    413: "The body is larger than it may be.",
    415: "The body is of another kind than is understood here.",
    422: "What was asked for cannot be; nothing was made.",
    429: "A quota or a rate is used up. `Retry-After` says when to ask again.",
    502: "A registry or another service that was needed did not answer well.",
    503: "Too busy, or the tenant's keeper cannot be reached. `Retry-After` says when to ask again.",
    507: "A disk is full.",
}

#: For ``responses=`` of routers and routes: what may be answered apart from success.
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": why} for status, why in _WHY.items()
}


def with_problem_media(openapi: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document with the media type that problems really have. FastAPI gives them the route's own."""
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    for path in openapi.get("paths", {}).values():
        for operation in path.values():
            for status, response in operation.get("responses", {}).items() if isinstance(operation, dict) else ():
                if status.startswith(("4", "5")) and schema in response.get("content", {}).values():
                    response["content"] = {MEDIA_TYPE: schema}
    return openapi


def with_keys(openapi: dict[str, Any], open_paths: frozenset[str]) -> dict[str, Any]:
    """The OpenAPI document, which says where a key is needed. The guard asks for it, no route does."""
    schemes = openapi.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes["key"] = {"type": "http", "scheme": "bearer", "description": "A key of `sloplet key create`: slp_..."}
    openapi["security"] = [{"key": []}]
    for path in open_paths & openapi.get("paths", {}).keys():
        for operation in openapi["paths"][path].values():
            operation["security"] = []
    return openapi


class Items(Document, Generic[Item]):
    """All there are."""

    items: list[Item]


class Page(Document, Generic[Item]):
    """Some of what there is. ``next`` is the ``cursor`` to ask for more with; null: that was all."""

    items: list[Item]
    next: str | None = None


# -- specs ---------------------------------------------------------------------------------------------------------


class LimitsDocument(Document):
    cpus: float
    memory: int
    disk: int
    pids: int
    open_files: int
    explicit: list[str] = Field(description="Those that were asked for: enforced, or the sandbox does not start.")


class NetworkDocument(Document):
    """What a sandbox may reach: docs/policy.md."""

    mode: str = Field(description="none, rules or learn")
    allow: list[str]
    deny: list[str]
    passthrough: list[str]
    asks: bool
    inspect: bool | str = Field(description="true, false or on-demand")
    connections: int
    bandwidth: int | None
    budget: int | None
    on_budget: str
    by_address: bool
    headers: dict[str, list[str]] = Field(description="Names only, by host")
    proxy: str = Field(description="Without its password; empty: none")

    @classmethod
    def of(cls, network: NetworkSpec) -> NetworkDocument:
        return cls.model_validate(network.to_dict())


class Decision(Document):
    """A connection, as it is now: what was decided, and what became of it."""

    seq: int = Field(description="Grows with every change; ask for what came after the last you saw")
    connection: int
    time: float
    sandbox: str
    name: str
    address: str
    port: int
    verdict: str = Field(description="allow, deny, cut or fail")
    rule: str
    reason: str
    bytes_out: int
    bytes_in: int
    duration: float
    protocol: str
    request: str
    state: str


class SecretDocument(Document):
    """A secret without its value."""

    name: str
    hosts: list[str]
    where: list[str]
    placeholder: str


class VolumeUse(Document):
    """A volume as a sandbox has it."""

    path: str
    source: str
    mode: str
    shared: bool
    base: str = ""
    nofollow: bool = False


class CloudInitDocument(Document):
    digest: str


class SpecDocument(Document):
    """What was asked for, as ``SandboxSpec.to_dict`` has it."""

    name: str | None
    image: str
    engine: str
    at_least: str | None
    limits: LimitsDocument
    ttl: float | None
    on_ttl: str
    longest: float | None = None
    network: NetworkDocument
    no_network: bool
    env: list[tuple[str, str]]
    workdir: str | None
    user: str | None
    sudo: bool | None
    hostname: str | None
    allow_weaker: bool
    template: str | None
    idle: float | None
    undo: int
    checkpoint_every: float | None
    pool: int
    secrets: list[SecretDocument]
    ports: list[tuple[int, int]]
    links: list[tuple[str, str, int]]
    volumes: list[VolumeUse]
    cloud_init: CloudInitDocument | None
    authority: str
    labels: dict[str, str] = Field(default_factory=dict)


def _spec(spec: SandboxSpec) -> SpecDocument:
    """The same sandboxes are asked for again and again, and a spec never changes: small ones are remembered."""
    network = spec.network
    texts = (
        *network.allow,
        *network.deny,
        *network.passthrough,
        *(text for pair in (*spec.env, *spec.labels) for text in pair),
    )
    plain = not (spec.secrets or spec.volumes or spec.links)
    return _known(spec) if plain and sum(map(len, texts)) < _SMALL else _made(spec)


def _made(spec: SandboxSpec) -> SpecDocument:
    """Without what is used once, and without where the server keeps things."""
    data = spec.recorded().to_dict()
    for volume in data["volumes"]:
        volume["base"] = ""
    return SpecDocument.model_validate(whole(data))


_known = lru_cache(maxsize=1024)(_made)
_SMALL = 2048  # characters of what a caller can make long


def _fields(item: controller.SandboxInfo | controller.Snapshot) -> dict[str, Any]:
    found = {field.name: whole(getattr(item, field.name)) for field in fields(item) if field.name != "spec"}
    return {**found, "spec": _spec(item.spec)}


# -- sandboxes and what they were ----------------------------------------------------------------------------------


class SandboxInfo(Document):
    """What is known about a sandbox without asking it."""

    id: str
    name: str | None
    state: str = Field(description="starting, running, paused, dead or ended")
    engine: str
    rung: str
    holder: str
    created_at: float = Field(description="Seconds since the epoch")
    expires_at: float | None
    workdir: str
    spec: SpecDocument
    reason: str = Field(default="", description="Why it is dead")
    saved: str | None = None
    saved_at: float | None = None
    head: str | None = None
    recovered_from: float | None = None
    #: Left out where it is not told: what is left is what ``SandboxInfo.from_dict`` takes.
    tenant: str | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="Only where an admin asked for those of other tenants",
    )

    @classmethod
    def of(cls, info: controller.SandboxInfo, tenant: str | None = None) -> SandboxInfo:
        return cls.model_validate({**_fields(info), "reason": without_paths(whole(info.reason)), "tenant": tenant})


class Snapshot(Document):
    """A saved state of a sandbox."""

    id: str
    name: str | None
    role: str = Field(description="snapshot, template, pause, checkpoint, undo, fork or export")
    kind: str = Field(description="live (memory, processes and disk) or disk (files only)")
    sandbox: str
    sandbox_name: str | None
    parent: str | None
    engine: str
    created_at: float
    bytes: int
    spec: SpecDocument
    note: str = ""

    @classmethod
    def of(cls, snapshot: controller.Snapshot) -> Snapshot:
        return cls.model_validate(_fields(snapshot))


class Change(Document):
    """One file that is not what it was."""

    path: str
    kind: str = Field(description="added, changed or removed")
    type: str
    size: int
    mode: int
    what: list[str]
    text: str | None
    binary: bool
    below: list[str]
    before: str
    below_before: list[str]


class Diff(Document):
    """All changes, by path."""

    against: str
    changes: list[Change]


class Guarantee(Document):
    """One control: whether it is enforced, at which value, by what."""

    control: str
    enforced: bool
    how: str
    value: str

    @classmethod
    def of(cls, item: base.Guarantee) -> Guarantee:
        return cls.model_validate({**item.to_dict(), "how": without_paths(item.how)})


class Health(Document):
    """How a sandbox does by its image's own check."""

    status: str = Field(description="healthy, unhealthy, or none: the image has no check")
    exit_code: int | None
    output: str


class Metrics(Document):
    """What a sandbox uses now; ``source`` says where each value was read."""

    cpu_seconds: float
    memory: int
    memory_limit: int
    memory_peak: int | None
    pids: int
    pids_limit: int
    disk_used: int
    disk_limit: int
    uptime: float
    oom_kills: int | None
    source: dict[str, str]


class HostStats(Document):
    """Counters read on the host's side; null where there is no source."""

    cpu_us: int | None
    memory: int | None
    memory_peak: int | None
    pids: int | None
    oom_kills: int | None

    @classmethod
    def of(cls, stats: base.HostStats) -> HostStats:
        return cls.model_validate(asdict(stats))


class Event(Document):
    """Something that happened to a sandbox."""

    time: float
    sandbox: str
    type: str
    data: dict[str, Any]

    @classmethod
    def of(cls, event: controller.Event) -> Event:
        mine = event.type.startswith("command.")  # those paths are inside
        return cls.model_validate(
            whole({**event.to_dict(), "data": event.data if mine else _without_paths(event.data)})
        )


class Pool(Document):
    """Sandboxes that wait for who asks for just these settings."""

    spec: SpecDocument
    wanted: int
    ready: int

    @classmethod
    def of(cls, pool: dict[str, Any]) -> Pool:
        return cls.model_validate({**pool, "spec": _spec(SandboxSpec.from_dict(pool["spec"]))})


def sandboxes(infos: Sequence[controller.SandboxInfo]) -> list[SandboxInfo]:
    return [SandboxInfo.of(info) for info in infos]


def whole(value: Any) -> Any:
    """The same with every character one that JSON can hold: what was made on this machine itself may have others."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {whole(key): whole(each) for key, each in value.items()}
    return [whole(each) for each in value] if isinstance(value, (list, tuple)) else value


def _without_paths(value: Any) -> Any:
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, dict):
        return {key: _without_paths(each) for key, each in value.items()}
    return [_without_paths(each) for each in value] if isinstance(value, (list, tuple)) else value
