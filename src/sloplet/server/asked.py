"""What a request asks for, and the spec that it becomes. ``SandboxSpec.make`` checks all of it, as it does for the
library's own callers; here is only what HTTP adds: no source of a secret's value, and no file, is the server's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ..errors import SpecError
from ..headerspec import MAX_HOSTS as MAX_HEADER_HOSTS
from ..headerspec import MAX_NAME
from ..headerspec import MAX_VALUE as MAX_HEADER_VALUE
from ..labels import MOST as MAX_LABELS
from ..labels import MOST_VALUE as MAX_LABEL
from ..netspec import MAX_LINKS, MAX_PORTS, MAX_RULES, UNSAID, Network, check_arguments
from ..secretspec import MAX_HOSTS, MAX_SECRETS, Secret, SecretSpec, check_value
from ..spec import MAX_POOL, MAX_UNDO, SandboxSpec
from ..volumespec import MOST as MAX_VOLUMES
from ..volumespec import NAME_RE, Volume
from .documents import Request

Name = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Size = Annotated[int, Field(gt=0, le=2**50)] | Annotated[str, Field(max_length=40, examples=["512m"])]
Duration = Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | Annotated[str, Field(max_length=40, examples=["5m"])]
PortNumber = Annotated[int, Field(ge=1, le=65535)]
Rules = Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=MAX_RULES)]
HeaderHost = Annotated[str, Field(min_length=1, max_length=300)]
HeaderName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Headers = dict[HeaderName, Annotated[str, Field(max_length=MAX_HEADER_VALUE)] | None]
EnvMap = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=4096)], Annotated[str, Field(max_length=1 << 20)]],
    Field(max_length=4096),
]
LabelMap = Annotated[
    dict[
        Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]*$")],
        Annotated[str, Field(max_length=MAX_LABEL)],
    ],
    Field(max_length=MAX_LABELS),
]


class NetworkAsked(Request):
    """What may be reached: the arguments of ``Network`` (docs/policy.md), or what ``GET .../network`` gave."""

    mode: Literal["none", "rules", "learn"] | None = None
    allow: Rules = Field(default=[])
    deny: Rules = Field(default=[])
    passthrough: Rules = Field(default=[])
    ask: bool = Field(default=False, description="What no rule decides is put to whoever listens at .../network/asks.")
    asks: bool = Field(default=False, description="The same as `ask`.")
    learn: bool = False
    inspect: bool | Literal["on-demand"] = Field(
        default=False, description="on-demand: TLS is not opened, but can be where something comes to need it."
    )
    connections: int = Field(default=512, ge=1, le=1000)
    bandwidth: Size | None = None
    budget: Size | None = None
    on_budget: Literal["refuse", "pause", "kill"] = "refuse"
    by_address: bool = Field(
        default=False, description="A name that no rule decides about is judged by the addresses that it leads to."
    )
    headers: dict[HeaderHost, Headers | list[HeaderName]] = Field(
        default={},
        max_length=MAX_HEADER_HOSTS,
        repr=False,
        description="By host: what requests to it are given. Values are kept in memory only, and never shown; null "
        "where one is known already, or comes later.",
    )
    proxy: str = Field(
        default="", max_length=2048, repr=False, description="socks5://[user[:password]@]host:port; empty: none"
    )

    def network(self) -> Network | None:
        """What it says, with the values of headers and the proxy; None: there is none."""
        found = self.given()
        return None if found == "none" else check_arguments(found)

    def given(self) -> Any:
        """For ``check_network``."""
        if self.mode == "none":
            if self.model_fields_set - {"mode"} and self != NetworkAsked(mode="none"):
                raise SpecError("a network of mode 'none' has no rules and no limits")
            return "none"
        if self.mode == "rules" and self.learn:
            raise SpecError("learn and mode 'rules' contradict each other", hint="leave one of them out")
        values = self.model_dump(exclude={"mode", "ask", "asks", "learn"})
        return {**values, "learn": self.learn or self.mode == "learn", "ask": self.ask or self.asks or None}


class SecretAsked(Request):
    """Where a secret may be sent. Without a value it is sent nowhere until ``PUT .../secrets`` gives one."""

    hosts: list[Annotated[str, Field(min_length=1, max_length=300)]] = Field(min_length=1, max_length=MAX_HOSTS)
    where: list[Literal["headers", "query", "body"]] = Field(default=["headers"], min_length=1, max_length=3)
    placeholder: str | None = Field(default=None, max_length=256, pattern=r"^([A-Za-z0-9_.~-]{12,})?$")
    value: str | None = Field(default=None, min_length=1, max_length=16384, repr=False)

    def spec(self, name: str) -> SecretSpec:
        # The value is the controller's to check: no error of ours may come near it.
        return Secret("-", hosts=self.hosts, where=self.where, placeholder=self.placeholder or None).spec(name)


class VolumeAsked(Request):
    source: str = Field(min_length=1, max_length=4000)
    mode: Literal["ro", "rw", "copy"] | None = None
    shared: bool = False

    def volume(self) -> Volume:
        if not NAME_RE.match(self.source) and not self.source.startswith("/"):  # "~" and "." would be the server's
            raise SpecError(
                f"{self.source[:80]!r} is not what a volume can be of",
                hint="a volume's name, or the absolute path of a folder of the server's machine",
            )
        return Volume(self.source, mode=self.mode, shared=self.shared)


class SandboxCreate(Request):
    """A sandbox to make: the arguments of ``Sandbox(...)``, docs/api.md."""

    name: Name | None = None
    image: str = Field(default="host", min_length=1, max_length=4096)
    engine: str = Field(default="auto", max_length=31, pattern=r"^[a-z][a-z0-9_-]*$")
    at_least: Literal["process", "container", "gvisor", "microvm", "vm"] | None = None
    cpus: float | None = Field(default=None, ge=0.01, le=4096)
    memory: Size | None = None
    disk: Size | None = None
    pids: int | None = Field(default=None, ge=8, le=4_000_000)
    open_files: int | None = Field(default=None, ge=16, le=4_000_000)
    ttl: Duration | None = None
    on_ttl: Literal["end", "pause", "pause-disk"] = "end"
    network: Literal["none"] | NetworkAsked | None = None
    secrets: dict[str, SecretAsked] = Field(default={}, max_length=MAX_SECRETS)
    ports: list[PortNumber] | dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}$")], int] = Field(
        default=[], max_length=MAX_PORTS
    )
    links: dict[str, Annotated[str, Field(min_length=1, max_length=80)]] = Field(default={}, max_length=MAX_LINKS)
    volumes: dict[str, Annotated[str, Field(min_length=1, max_length=4000)] | VolumeAsked] = Field(
        default={}, max_length=MAX_VOLUMES
    )
    env: EnvMap = Field(default={})
    workdir: str | None = Field(default=None, min_length=1, max_length=4095)
    user: str | None = Field(default=None, min_length=1, max_length=256)
    sudo: bool | None = None
    cloud_init: str | None = Field(default=None, max_length=256 * 1024, description="The text of a #cloud-config file")
    hostname: str | None = Field(default=None, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?$")
    allow_weaker: bool = False
    template: Name | None = None
    idle: Duration | None = None
    undo: int = Field(default=0, ge=0, le=MAX_UNDO)
    checkpoint_every: Duration | None = None
    pool: int = Field(default=0, ge=0, le=MAX_POOL)
    labels: LabelMap = Field(default={})
    reuse: bool = Field(
        default=False, description="If there is one of that name with these settings, wake it and answer with it"
    )

    def spec(self) -> SandboxSpec:
        """SpecError and its like. Nothing of the machine is looked at."""
        env, cloud, hostname = self.env, None, self.hostname
        if self.cloud_init is not None:
            if not self.cloud_init.lstrip("\ufeff \t\r\n").startswith("#cloud-config"):
                raise SpecError("cloud_init is not the text of a #cloud-config file")  # nor is it a path to read here
            from ..cloudinit.asked import asked

            found = asked(self.cloud_init)
            env, cloud, hostname = {**found.env, **env}, found.spec, hostname or found.hostname
        network: Any = UNSAID if self.network is None else "none" if self.network == "none" else self.network.given()
        ports: Any = self.ports
        if isinstance(ports, dict):
            ports = {int(inside): outside for inside, outside in ports.items()}
        return SandboxSpec.make(
            self.name, image=self.image, engine=self.engine, at_least=self.at_least, cpus=self.cpus,
            memory=self.memory, disk=self.disk, pids=self.pids, open_files=self.open_files, ttl=self.ttl,
            on_ttl=self.on_ttl, network=network, env=env, workdir=self.workdir, user=self.user, sudo=self.sudo,
            allow_weaker=self.allow_weaker, template=self.template, idle=self.idle, undo=self.undo,
            checkpoint_every=self.checkpoint_every, pool=self.pool,
            secrets=[secret.spec(name) for name, secret in self.secrets.items()], ports=ports, links=self.links,
            volumes={path: _volume(one) for path, one in self.volumes.items()},
            cloud_init=cloud, hostname=hostname, labels=self.labels,
        )  # fmt: skip

    def check_values(self) -> None:
        """SpecError that shows nothing of a value, before anything is made."""
        for name, secret in self.secrets.items():
            if secret.value is not None:
                check_value(f"the secret {name}", secret.value, secret.where)

    def values(self) -> dict[str, str | None]:
        """The values that came with it, by the secrets' names, and those of its network."""
        found = {name: secret.value for name, secret in self.secrets.items() if secret.value is not None}
        network = self.network.network() if isinstance(self.network, NetworkAsked) else None
        return {**found, **({} if network is None else network.values)}


def prepared(asked: SandboxCreate) -> SandboxSpec:
    """All that can be said of a request without looking at anything. SpecError and its like."""
    spec = asked.spec()
    asked.check_values()
    return spec


def _volume(asked: str | VolumeAsked) -> Volume:
    return (VolumeAsked(source=asked) if isinstance(asked, str) else asked).volume()
