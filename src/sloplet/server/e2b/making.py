"""What a sandbox is made of: E2B's request and its template, as settings of ours."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...controller import SandboxInfo
from ...errors import SandboxNotFound, SnapshotIncompatible, SpecError
from ...labels import KEY_RE, MOST, MOST_VALUE
from ...spec import Limits, SandboxSpec
from ..caller import Caller
from .answers import refused
from .api import Asked, mapping, optional, text
from .networks import Wanted
from .records import Record

if TYPE_CHECKING:
    from .door import Facade

_METADATA, _ENVIRONMENT = 64 << 10, 512 << 10  # characters in all
#: Best first: what E2B's programs expect of a sandbox (memory that can be saved) is what gvisor has.
_RUNGS = ("gvisor", "container")


@dataclass(frozen=True)
class Plan:
    """A template, as far as sandboxes of it are concerned."""

    template: str  #: its id
    alias: str = ""
    build: str = ""
    image: str = ""  #: what it starts from,
    snapshot: str = ""  #: or from this saved state
    cpus: float = 2.0
    memory: int = 1024 << 20
    disk: int = 10 << 30
    explicit: frozenset[str] = frozenset()  #: which of these were asked for
    user: str = "user"
    home: str = ""
    workdir: str = ""
    env: dict[str, str] = field(default_factory=dict)
    start: str = ""  #: what runs in it from the beginning, where it was not saved running
    ready: str = ""  #: what tells that this is ready
    engine: str = ""


@dataclass(frozen=True)
class Made:
    spec: SandboxSpec
    record: Record  #: without what is known when it is there
    network: Wanted

    async def furnish(self, facade: Facade, caller: Caller, info: SandboxInfo, body: dict[str, Any]) -> None:
        """What its holder is to know before anything runs in it."""
        controller, network = caller.tenant.controller, self.network
        if network.named:
            again = await facade.networks.asked(caller, body, info.id)
            await controller.set_network(info.id, again.policy.spec, dict(again.policy.values))
        elif network.values:
            await controller.set_secrets(info.id, dict(network.values))
        facade.networks.remember(info.id, network)


async def spec_of(facade: Facade, caller: Caller, plan: Plan, body: dict[str, Any], ttl: float) -> Made:
    """refused (400) for what makes no sense."""
    pauses = optional(body, "autoPause", bool, False)
    memory = optional(body, "autoPauseMemory", bool, True)
    metadata = mapping(body, "metadata", most=_METADATA)
    network = await facade.networks.asked(caller, body)
    mounts, volumes = await facade.volumes.mounts(caller, body)
    record = Record(
        "", "", "", plan.template, alias=plan.alias, build=plan.build, metadata=metadata,
        auto_resume=bool(optional(optional(body, "autoResume", dict, {}), "enabled", bool, False)), pauses=pauses,
        internet=network.internet, network=network.document, volumes=mounts, mask_host=network.mask_host,
        https_ports=network.https_ports, public=network.public, user=plan.user, home=plan.home, workdir=plan.workdir,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "ttl": max(ttl, 1.0), "network": network.policy,
        "env": {**plan.env, **mapping(body, "envVars", most=_ENVIRONMENT)},
        "labels": labels_of(metadata), "volumes": volumes or None,
    }  # fmt: skip
    if pauses:
        settings["on_ttl"] = "pause" if memory else "pause-disk"
    if plan.snapshot:
        settings |= {"template": plan.snapshot, "allow_weaker": not plan.explicit}
    else:
        settings |= {"image": plan.image, "engine": plan.engine or await engine_of(facade, caller)}
        settings |= {"user": plan.user, "workdir": plan.workdir or plan.home or None}
    if not volumes and not network.values and not body.get("envVars"):
        settings["pool"] = facade.settings.pool
    try:
        spec = SandboxSpec.make(None, **settings)
    except SpecError as error:
        raise refused(400, str(error)) from None
    if not plan.snapshot:
        limits = Limits(cpus=plan.cpus, memory=plan.memory, disk=plan.disk, explicit=plan.explicit)
        spec = replace(spec, limits=limits)
    return Made(spec, record, network)


async def engine_of(facade: Facade, caller: Caller) -> str:
    """The strongest that is here and that the key may use; refused where there is none."""
    if facade.settings.engine:
        return facade.settings.engine
    ground = await facade.server.permits.ground()
    there = {fact.name for fact in ground.engines if fact.available}
    allowed = caller.key.limits.engines
    for name in _RUNGS:
        if name in there and (not allowed or name in allowed):
            return name
    return "auto"


def labels_of(metadata: dict[str, str]) -> dict[str, str]:
    """What of E2B's metadata can be a label, too, for `sloplet ls`. The rest is on record here."""
    fitting = {
        key: value for key, value in metadata.items()
        if KEY_RE.match(key) and len(value) <= MOST_VALUE and value.isprintable()
    }  # fmt: skip
    return dict(list(fitting.items())[:MOST])


class Making:
    """One request to make a sandbox. ``seconds``: its time to live."""

    def __init__(self, facade: Facade, asked: Asked, seconds: float, secure: bool) -> None:
        self._facade, self._caller, self._body = facade, asked.caller, asked.body
        self._seconds, self._secure = seconds, secure

    async def _plan(self) -> tuple[Plan, Made]:
        plan = await self._facade.templates.plan(self._caller, text(self._body, "templateID", most=256), self._body)
        return plan, await self._made(plan)

    async def _made(self, plan: Plan) -> Made:
        made = await spec_of(self._facade, self._caller, plan, self._body, self._seconds)
        if not self._secure and not made.record.public:
            raise refused(
                400, "You cannot create a sandbox without public access unless you enable secure envd access via "
                "'secure' flag.",
            )  # fmt: skip
        return made

    async def make(self) -> Record:
        plan, made = await self._plan()
        controller = self._caller.tenant.controller
        try:
            info = await controller.create(made.spec)
        except SnapshotIncompatible:
            instead = await self._facade.templates.instead(self._caller, plan)
            if instead is None:
                raise
            plan, made = instead, await self._made(instead)
            info = await controller.create(made.spec)
        return await self._finish(plan, made, info)

    async def find(self, sandbox: str) -> Record | None:
        """What such a request has made, before somebody ended the server in the middle of it."""
        controller = self._caller.tenant.controller
        try:
            info = await controller.find(sandbox)
        except SandboxNotFound:
            return None
        if info.state in ("dead", "ended"):
            await controller.kill(info.id)
            return None
        return self._facade.records.find(info.id) or await self._finish(*await self._plan(), info)

    async def _finish(self, plan: Plan, made: Made, info: SandboxInfo) -> Record:
        facade, caller = self._facade, self._caller
        record = replace(
            made.record, sandbox=info.id, tenant=caller.tenant.name, key=caller.key.id, secure=self._secure,
            timeout=self._seconds,
        )  # fmt: skip
        try:
            await facade.records.put(record)
            facade.mark(record)
            await made.furnish(facade, caller, info, self._body)
            await facade.templates.begun(caller, plan, info, record)
        except BaseException:
            facade.forget(info.id)
            await asyncio.shield(caller.tenant.controller.kill(info.id))
            raise
        return record
