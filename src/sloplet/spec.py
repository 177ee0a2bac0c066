"""What was asked for: frozen, validated values. Imports nothing of ours but errors and its parts.

``SandboxSpec.make`` is the one place where user input becomes a spec; everything after it may
trust the types and ranges here. Specs go to JSON and back (state.db, the keeper) without loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .cloudspec import CloudInitSpec, cloud_init_from
from .errors import InvalidLimit, InvalidName, SpecError
from .labels import Labels, check_labels
from .netspec import (
    UNSAID,
    LinkSpec,
    NetworkSpec,
    PortSpec,
    SecretSpec,
    check_links,
    check_network,
    check_openable,
    check_ports,
    check_secrets,
)
from .quantities import parse_duration as parse_duration
from .quantities import parse_size as parse_size
from .volumespec import VolumeSpec, check_volumes, volumes_from

#: The rungs of the isolation ladder, weakest first.
RUNGS = ("process", "container", "gvisor", "microvm", "vm")
#: What may happen when the time to live is over: it ends, or sleeps with its processes, or with its files only.
ON_TTL = ("end", "pause", "pause-disk")

NAME_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")

DEFAULT_USER = "agent"
DEFAULT_WORKDIR = "/workspace"
MIN_MEMORY = 8 * 2**20
MIN_DISK = 2**20
MAX_PIDS = 4_000_000
MAX_UNDO = 100
MAX_POOL = 64
MAX_FORK = 1000


def check_name(name: object) -> str:
    """A sandbox name: 1 to 63 of ``A-Za-z0-9_.-``, beginning with a letter or digit."""
    if not isinstance(name, str) or not NAME_RE.match(name):
        shown = repr(name) if len(repr(name)) <= 80 else repr(name)[:77] + "..."
        raise InvalidName(
            f"{shown} is not a sandbox name",
            hint="use 1 to 63 letters, digits, '_', '.' or '-', beginning with a letter or digit",
        )
    return name


def check_snapshot_name(name: object, what: str = "snapshot") -> str:
    """The name of a snapshot or a template: as a sandbox's."""
    if not isinstance(name, str) or not NAME_RE.match(name):
        raise InvalidName(
            f"{str(name)[:80]!r} is not a name for a {what}",
            hint="use 1 to 63 letters, digits, '_', '.' or '-', beginning with a letter or digit",
        )
    return name


def check_fork(count: object) -> int:
    """How many copies a fork makes."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_FORK:
        raise InvalidLimit(f"fork({str(count)[:80]}) is out of range", hint=f"1 to {MAX_FORK} copies at a time")
    return count


@dataclass(frozen=True)
class Limits:
    """What a sandbox may use at most. ``explicit`` names those the caller asked for himself:
    these are enforced or the sandbox does not start; the others as far as the machine allows."""

    cpus: float = 1.0
    memory: int = 512 * 2**20
    disk: int = 2**30
    pids: int = 512
    open_files: int = 1024
    explicit: frozenset[str] = frozenset()

    @staticmethod
    def make(
        cpus: object = None,
        memory: object = None,
        disk: object = None,
        pids: object = None,
        open_files: object = None,
    ) -> Limits:
        asked = {"cpus": cpus, "memory": memory, "disk": disk, "pids": pids, "open_files": open_files}
        values: dict[str, Any] = {}
        for name, value in asked.items():
            if value is None:
                continue
            if name == "cpus":
                values[name] = _cpus(value)
            elif name in ("pids", "open_files"):
                values[name] = _count(name, value)
            else:
                values[name] = parse_size(value, name)
        if values.get("memory", MIN_MEMORY) < MIN_MEMORY:
            raise InvalidLimit(f"memory={memory!r} is too small", hint="the least is 8m")
        if values.get("disk", MIN_DISK) < MIN_DISK:
            raise InvalidLimit(f"disk={disk!r} is too small", hint="the least is 1m")
        return Limits(**values, explicit=frozenset(values))


def _cpus(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidLimit(f"cpus={value!r} is not a number", hint="write for example 0.5 or 2")
    try:
        cpus = float(value)
    except (ValueError, OverflowError):
        raise InvalidLimit(f"cpus={str(value)[:80]!r} is not a number", hint="write for example 0.5 or 2") from None
    if not math.isfinite(cpus) or not 0.01 <= cpus <= 4096:
        raise InvalidLimit(f"cpus={value!r} is out of range", hint="it must be between 0.01 and 4096")
    return cpus


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidLimit(f"{name}={str(value)[:80]!r} is not a whole number")
    low = 8 if name == "pids" else 16
    if not low <= value <= MAX_PIDS:
        raise InvalidLimit(f"{name}={value} is out of range", hint=f"it must be between {low} and {MAX_PIDS}")
    return value


@dataclass(frozen=True)
class SandboxSpec:
    """Everything that decides what a sandbox is. Equal specs make equal sandboxes."""

    name: str | None = None
    image: str = "host"
    engine: str = "auto"
    at_least: str | None = None
    limits: Limits = field(default_factory=Limits)
    ttl: float | None = None
    on_ttl: str = "end"  #: one of ON_TTL
    network: NetworkSpec = field(default_factory=NetworkSpec)
    no_network: bool = False  #: none was asked for, of a template that may have one: nothing is reached
    env: tuple[tuple[str, str], ...] = ()
    workdir: str | None = None  #: None: the image's own, or /workspace
    user: str | None = None  #: None: the image's own, or agent
    sudo: bool | None = (
        None  #: root inside has root's powers over what is the sandbox's; None: where an image expects it
    )
    hostname: str | None = None
    allow_weaker: bool = False
    template: str | None = None  #: start from this saved state: a template's name, or a snapshot's id
    idle: float | None = None  #: pause after so many seconds of doing nothing
    undo: int = 0  #: keep that many checkpoints, one before each command
    checkpoint_every: float | None = None  #: seconds between checkpoints to recover from
    pool: int = 0  #: keep that many ready for the next one with these settings
    secrets: tuple[SecretSpec, ...] = ()  #: never their values
    ports: tuple[PortSpec, ...] = ()
    links: tuple[LinkSpec, ...] = ()
    volumes: tuple[VolumeSpec, ...] = ()
    cloud_init: CloudInitSpec | None = None  #: applied once, when it is made
    labels: Labels = ()  #: to find it by; they decide nothing
    longest: float | None = None  #: what it has to live if it wakes without a time: a key's limit, not to be asked for
    authority: str = ""  #: the id of its certificate authority; the runtime's, not to be asked for

    @staticmethod
    def make(
        name: str | None = None,
        *,
        image: object = "host",
        engine: object = "auto",
        at_least: object = None,
        cpus: object = None,
        memory: object = None,
        disk: object = None,
        pids: object = None,
        open_files: object = None,
        ttl: object = None,
        on_ttl: object = "end",
        network: object = UNSAID,
        env: Mapping[str, str] | None = None,
        workdir: object = None,
        user: object = None,
        sudo: object = None,
        allow_weaker: bool = False,
        template: object = None,
        idle: object = None,
        undo: object = 0,
        checkpoint_every: object = None,
        pool: object = 0,
        secrets: object = None,
        ports: object = None,
        links: object = None,
        volumes: object = None,
        cloud_init: CloudInitSpec | None = None,
        hostname: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> SandboxSpec:
        if name is not None:
            check_name(name)
        if not isinstance(engine, str) or not re.match(r"[a-z][a-z0-9_-]{0,30}\Z", engine):
            raise SpecError(f"engine={str(engine)[:80]!r} is not an engine name", hint="see `sloplet doctor`")
        if at_least is not None and at_least not in RUNGS:
            raise SpecError(f"at_least={str(at_least)[:80]!r} is not a rung", hint=f"one of {', '.join(RUNGS)}")
        asked = check_network(network)
        spec = SandboxSpec(
            name=name,
            image=_text("image", image, 4096),
            engine=engine,
            at_least=at_least if at_least is None else str(at_least),
            limits=Limits.make(cpus, memory, disk, pids, open_files),
            ttl=None if ttl is None else parse_duration(ttl, "ttl"),
            on_ttl=_on_ttl(on_ttl),
            env=check_env(env or {}),
            workdir=None if workdir is None else _absolute("workdir", workdir),
            user=None if user is None else _text("user", user, 256),
            sudo=_sudo(sudo, cloud_init),
            cloud_init=cloud_init,
            hostname=hostname,
            allow_weaker=bool(allow_weaker),
            template=None if template is None else check_snapshot_name(template, "template"),
            idle=None if idle is None else parse_duration(idle, "idle"),
            undo=_bounded("undo", undo, MAX_UNDO),
            checkpoint_every=None if checkpoint_every is None else _interval(checkpoint_every),
            pool=_bounded("pool", pool, MAX_POOL),
            network=asked,
            no_network=template is not None and network is not UNSAID and asked.mode == "none",
            secrets=() if secrets is None else check_secrets(secrets),
            ports=() if ports is None else check_ports(ports),
            links=() if links is None else check_links(links),
            volumes=() if volumes is None else check_volumes(volumes),
            labels=() if labels is None else check_labels(labels),
        )
        if spec.pool and spec.cloud_init:
            raise SpecError(
                "pool= and cloud_init= exclude each other",
                hint="set one up, make a template of it, and keep a pool of that",
            )
        if spec.pool and spec.volumes:
            raise SpecError("pool= and volumes= exclude each other", hint="one that waits would hold the volumes")
        return spec if spec.template else check_network_needs(spec)  # with a template: when it is known

    @property
    def run_user(self) -> str:
        """Who runs its commands, where the image has no say."""
        return self.user or DEFAULT_USER

    @property
    def run_workdir(self) -> str:
        """Where its commands begin, where the image has no say."""
        return self.workdir or DEFAULT_WORKDIR

    @property
    def stays(self) -> bool:
        """Whether it is meant to be there when whoever made it has gone: it has a name, or sleeps at its time's end."""
        return self.name is not None or self.on_ttl != "end"

    def recorded(self) -> SandboxSpec:
        """What is kept of it: all but what is used once."""
        return self if self.cloud_init is None else replace(self, cloud_init=self.cloud_init.recorded())

    def to_dict(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in _FIELDS}
        data["limits"] = {name: getattr(self.limits, name) for name in _LIMITS}
        data["cloud_init"] = None if self.cloud_init is None else self.cloud_init.to_dict()
        data["limits"]["explicit"] = sorted(self.limits.explicit)
        data["env"] = [list(pair) for pair in self.env]
        data["network"] = self.network.to_dict()
        data["secrets"] = [secret.to_dict() for secret in self.secrets]
        data["ports"] = [list(port) for port in self.ports]
        data["links"] = [list(link) for link in self.links]
        data["volumes"] = [volume.to_dict() for volume in self.volumes]
        data["labels"] = dict(self.labels)
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SandboxSpec:
        values = dict(data)
        limits = dict(values.pop("limits"))
        limits["explicit"] = frozenset(limits["explicit"])
        values["env"] = tuple((str(k), str(v)) for k, v in values["env"])
        values["network"] = NetworkSpec.from_dict(values.get("network", "none"))
        values["secrets"] = tuple(SecretSpec.from_dict(secret) for secret in values.get("secrets", ()))
        values["ports"] = check_ports([tuple(port) for port in values.get("ports", ())])
        values["links"] = check_links(values.get("links", ()))
        values["cloud_init"] = cloud_init_from(values.get("cloud_init"))
        values["volumes"] = volumes_from(values.get("volumes", ()))
        values["labels"] = check_labels(values.get("labels", {}))
        return SandboxSpec(**values, limits=Limits(**limits))


_FIELDS = tuple(each.name for each in fields(SandboxSpec))
_LIMITS = tuple(each.name for each in fields(Limits))


def check_network_needs(spec: SandboxSpec) -> SandboxSpec:
    """What needs a network has one, and one that fits it."""
    if spec.network.mode == "none":
        for what in ("secrets", "links"):
            if getattr(spec, what):
                raise SpecError(f"{what} need a network", hint="add network=Network(allow=[...])")
    both = {secret.name for secret in spec.secrets} & {name for name, _ in spec.env}
    if both:
        raise SpecError(f"{min(both)} is both a secret and a variable of env", hint="leave it out of env")
    check_openable(spec.network, spec.secrets, (link.name for link in spec.links))
    return spec


def check_ttl(ttl: object) -> float | None:
    """A time to live that is set anew: None for ever, 0 no longer. Seconds, or as people write them."""
    if ttl is None:
        return None
    if not isinstance(ttl, bool) and ttl in (0, "0", "0s"):
        return 0.0
    return parse_duration(ttl, "ttl")


def _on_ttl(value: object) -> str:
    if not isinstance(value, str) or value not in ON_TTL:
        raise SpecError(f"on_ttl={str(value)[:80]!r} is not what can happen then", hint=f"one of {', '.join(ON_TTL)}")
    return value


def _bounded(what: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise SpecError(f"{what}={str(value)[:80]!r} is out of range", hint=f"a whole number from 0 to {most}")
    return value


def _choice(what: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise SpecError(f"{what}={str(value)[:80]!r} is not valid", hint="True, False, or nothing")
    return value


def _sudo(value: object, cloud_init: CloudInitSpec | None) -> bool | None:
    asked = _choice("sudo", value)
    if cloud_init is None:
        return asked
    if asked is False:
        raise SpecError("cloud_init needs root inside to have its powers", hint="leave sudo=False out")
    return True


def _interval(value: object) -> float:
    seconds = parse_duration(value, "checkpoint_every")
    if seconds < 1:
        raise InvalidLimit(f"checkpoint_every={value!r} is too often", hint="at least 1 s")
    return seconds


def check_env(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    if not isinstance(env, Mapping):
        raise SpecError(f"env={str(env)[:80]!r} is not a mapping", hint="for example {'LANG': 'C.UTF-8'}")
    pairs: Iterable[tuple[object, object]] = env.items()
    checked = []
    for key, value in pairs:
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise SpecError(f"{key!r} is not a name of an environment variable")
        if not isinstance(value, str) or "\0" in value:
            raise SpecError(f"the value of the environment variable {key} must be a string without NUL")
        checked.append((key, value))
    return tuple(sorted(checked))  # their order has no meaning: equal settings are equal specs


def _text(what: str, value: object, most: int) -> str:
    if not isinstance(value, str) or not value or len(value) > most or any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise SpecError(
            f"{what}={str(value)[:80]!r} is not valid", hint="a non-empty string without control characters"
        )
    return value


def _absolute(what: str, value: object) -> str:
    text = _text(what, value, 4095)
    if not text.startswith("/") or ".." in text.split("/"):
        raise SpecError(f"{what}={text[:80]!r} is not valid", hint="an absolute path inside the sandbox, without '..'")
    return text
