"""``policy`` with what it decides on: engines are probed, templates and archives are looked into. One per server.

Every way to make a sandbox passes here, in the tenant's controller (``served.py``); routes that compare what is asked
for with what is there ask first.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ..controller import Controller, SandboxInfo
from ..engines import registry
from ..errors import SandboxNotFound, SlopletError
from ..netspec import NetworkSpec
from ..network.upstream import System
from ..spec import SandboxSpec
from . import policy
from .keys import Key, KeyLimits
from .policy import EngineFact, Ground
from .settings import ServeSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..state.home import Home

T = TypeVar("T")
_FRESH = 10.0  # seconds: an engine may be installed while the server runs
_UNLIMITED = KeyLimits()


class Permits:
    def __init__(self, home: Home, settings: ServeSettings) -> None:
        self._home = os.path.realpath(home.path)
        self._settings = settings
        self._ground: Ground | None = None
        self._read_at = -1e9

    async def ground(self) -> Ground:
        """What decisions are made on now."""
        if self._ground is None or time.monotonic() - self._read_at > _FRESH:
            engines, settings = await _in_thread(_engines), self._settings
            self._read_at = time.monotonic()
            self._ground = Ground(
                self._home, engines, settings.allow_paths, settings.allow_private, settings.fake, own=System().is_own
            )
        return self._ground

    async def create(self, key: Key | None, controller: Controller, spec: SandboxSpec) -> SandboxSpec:
        """What is made where this is asked for. NotAllowed, and what templates raise."""
        ground, limits = await self.ground(), _limits(key)
        admin = key is not None and key.admin
        if spec.template is None:
            if spec.image == "host" and all(volume.named for volume in spec.volumes):
                return policy.permitted(spec, limits, ground, admin=admin)  # no file is looked at
            return await _in_thread(lambda: policy.permitted(spec, limits, ground, admin=admin))
        from ..timeline.origins import merged

        template = await controller.find_snapshot(spec.template)
        least = replace(spec, at_least=None)  # what the key needs is told first, and as what it is: not allowed

        def decide() -> SandboxSpec:
            policy.check_engine(template.engine, limits, ground)
            effective = merged(template.spec, least, template)
            return policy.permitted_of_template(spec, effective, template.engine, limits, ground, admin=admin)

        return await _in_thread(decide)

    async def reuse(self, key: Key | None, controller: Controller, spec: SandboxSpec) -> SandboxSpec:
        """The same where one of that name may be there, which is then compared with this. Its template may be gone, or
        another one by now: what it was made with is on its record."""
        if spec.name is None or spec.template is None:
            return await self.create(key, controller, spec)
        try:
            found = await controller.find(spec.name)
        except SandboxNotFound:
            return await self.create(key, controller, spec)
        asked = {name: getattr(spec.limits, name) for name in spec.limits.explicit}
        explicit = found.spec.limits.explicit | spec.limits.explicit
        effective = replace(found.spec, limits=replace(found.spec.limits, **asked, explicit=explicit))
        ground, admin = await self.ground(), key is not None and key.admin
        return await _in_thread(
            lambda: policy.permitted_of_template(spec, effective, found.engine, _limits(key), ground, admin=admin)
        )

    async def made(self, key: Key | None, controller: Controller, info: SandboxInfo) -> None:
        """After the fact: a template may have been replaced meanwhile. What is not allowed is ended again."""
        limits = _limits(key)
        if not (limits.engines or limits.at_least or info.engine == "fake"):
            return
        try:
            policy.check_engine(info.engine, limits, await self.ground())
        except SlopletError:
            await asyncio.shield(controller.kill(info.id))
            raise

    async def fork(self, key: Key | None, info: SandboxInfo, ttl: float | None = None) -> None:
        """NotAllowed if copies of it, with so long to live, are not for this key."""
        spec = info.spec if ttl is None else replace(info.spec, ttl=ttl)
        policy.check_engine(info.engine, _limits(key), await self.ground())
        policy.check_copy(spec, info.engine, _limits(key), await self.ground(), what="the copy")

    def ttl(self, key: Key | None, ttl: float | None) -> float | None:
        """What it gets where a sandbox is given that long to live, from then on."""
        return policy.limited_ttl(ttl, _limits(key))

    async def wake(self, key: Key | None, info: SandboxInfo) -> None:
        """NotAllowed if this key may not run it: woken, rolled back."""
        policy.check_engine(info.engine, _limits(key), await self.ground())

    async def network(self, network: NetworkSpec) -> None:
        """NotAllowed for what opens more than the internet."""
        policy.check_network(network, await self.ground())

    async def target(self, name: str, address: str) -> None:
        """The same of what an answer would make a rule of."""
        policy.check_target(name, address, await self.ground())

    async def load(self, key: Key | None, path: str) -> SandboxSpec:
        """What the archive in this file would become. NotAllowed; SnapshotDamaged and its like."""
        from ..archive.read import Archive

        def read() -> tuple[str, SandboxSpec, str | None]:
            with Archive(path) as archive:
                found = archive.manifest
                looked_up = found.image.kind == "rootfs" and found.packed is None
                return found.engine, found.spec, found.image.reference if looked_up else None

        engine, spec, reference = await _in_thread(read)
        ground = await self.ground()
        policy.check_engine(engine, _limits(key), ground)
        policy.check_copy(spec, engine, _limits(key), ground, what="the sandbox of the archive")
        if reference is not None:
            await _in_thread(lambda: policy.check_reference(reference, ground))
        return spec


def _limits(key: Key | None) -> KeyLimits:
    return _UNLIMITED if key is None else key.limits


def _engines() -> tuple[EngineFact, ...]:
    found = []
    for name in registry.all_names():
        engine = registry.load(name)
        probe = engine.probe()
        controls = frozenset(probe.capabilities.controls)
        found.append(EngineFact(name, engine.rung, probe.available, probe.reason, controls))
    return tuple(found)


async def _in_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work)
