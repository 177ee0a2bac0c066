"""Builds for requests: in the tenant's own home, by sandboxes that end with this process, within what the key may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..build.events import BuildEvent
from ..build.executor import Builder, BuildOptions
from ..build.image import with_trust
from ..build.running import RunSettings
from ..controller import SandboxInfo
from ..errors import BuildFailed, RequestInvalid
from ..images.store import StoredImage
from ..images.threads import kept, whole
from ..netspec import NetworkSpec, check_network
from ..runtime import Runtime
from ..spec import RUNGS, SandboxSpec
from ..state.home import Home
from .asked import NetworkAsked
from .bodies import spooled
from .contexts import Sent, private_folder, unpacked
from .imaging import Told
from .quotas import Share
from .served import ACTING
from .sse import event

if TYPE_CHECKING:
    from .caller import Caller
    from .keys import KeyLimits
    from .state import ServerState
    from .tenants import Tenant

#: Seconds that a build may take, all in all.
LONGEST = 2 * 3600.0


class BuildRuntime(Runtime):
    """Steps of builds: what makes them passes the key's policy and quota, as what makes any other sandbox does.
    ``tenant`` and ``server`` are set by who makes it."""

    tenant: Tenant
    server: ServerState

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        key = ACTING.get()
        spec = await self.server.permits.create(key, self, spec)
        async with self.server.quotas.room(self.tenant, key, Share.of(spec.limits)) as room:
            async with self.server.limits.creating(self.tenant.name):
                info = await super().create(spec)
            room.made.append(info)
        return info

    async def kill(self, sandbox_id: str) -> None:
        await super().kill(sandbox_id)
        self.server.quotas.account(self.tenant).gone(sandbox_id)


def settings_for(asked: RunSettings, limits: KeyLimits) -> RunSettings:
    """Steps run in containers by default; a key that may not have those gets what it may."""
    ranks = [rung for rung in (asked.at_least, limits.at_least) if rung is not None]
    least = max(ranks, key=RUNGS.index, default=None)
    if asked.engine == "auto" and least is None and limits.engines and "container" not in limits.engines:
        least = "container"  # then it is not a container by default, but whatever the policy chooses
    return replace(asked, at_least=least)


def network_of(sent: Any, allow: list[str], deny: list[str], mode: str | None) -> NetworkSpec | str:
    """What steps may reach, by the request's query or by its document. SpecError, RequestInvalid."""
    if sent is not None and sent != "none":
        try:
            found: NetworkSpec = check_network(NetworkAsked.model_validate(sent).given())
            return found
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise RequestInvalid(f"network: {first['msg']}"[:300]) from None
    if mode == "learn":
        return check_network({"learn": True, "deny": deny})
    if not allow and not deny:
        return "none"
    return check_network({"allow": allow, "deny": deny})


@asynccontextmanager
async def arrived(body: AsyncIterator[bytes], dockerfile: str, home: Home) -> AsyncIterator[Sent]:
    """What a body asks to be built, on the disk for as long as the block lasts."""
    opening = private_folder(home)
    folder = await kept(lambda _: opening.__exit__(None, None, None), opening.__enter__)
    try:
        async with spooled(body, home) as file:
            sent = await whole(unpacked, file, folder, dockerfile)
        try:
            yield sent
        finally:
            sent.close()  # what the build has closed already, is
    finally:
        await asyncio.shield(asyncio.to_thread(opening.__exit__, None, None, None))


async def build(caller: Caller, sent: Sent, options: BuildOptions, told: Told) -> StoredImage:
    """Build what came. Cancelled, it ends whatever runs."""
    steps = [step for stage in sent.recipe.stages for step in stage.steps]
    options = replace(
        options,
        settings=settings_for(options.settings, caller.key.limits),
        build_args={**sent.build_args, **options.build_args},
        labels={**sent.labels, **options.labels},
        secrets=with_trust(sent.secrets, steps),
    )
    builder = Builder(
        sent.recipe, options, home=caller.tenant.home, context=sent.context, folders=sent.folders,
        on_event=lambda each: _tell(told, each), controller=caller.tenant.embedded,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LONGEST):
            return await builder.build()
    except TimeoutError:
        raise BuildFailed(
            f"the build took longer than {LONGEST / 3600:g} hours, the limit", hint="steps that were done are kept"
        ) from None


def _tell(told: Told, each: BuildEvent) -> None:
    if each.kind == "done":
        return  # the image is told instead
    piece = event(each.kind, each.to_dict())
    if each.kind == "log":
        told.line(piece)
    else:
        told.always(piece)


def left_out(count: int) -> bytes:
    """In place of lines that nobody could read as fast as they came."""
    return event("log", BuildEvent("log", text=f"... {count} lines left out ...").to_dict())
