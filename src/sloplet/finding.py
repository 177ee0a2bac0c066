"""Who holds a sandbox, and the sandbox of a name: found, or made."""

from __future__ import annotations

from .controller import Controller, SandboxInfo, Stream
from .errors import SandboxExists, SandboxMismatch, SandboxNotFound
from .spec import SandboxSpec
from .wire.fields import Fields


async def create_or_find(controller: Controller, spec: SandboxSpec) -> SandboxInfo:
    """A fresh one, or the one of that name, awake. SandboxMismatch if that was made with other settings."""
    if spec.name is None:
        return await controller.create(spec)
    try:
        found = await controller.find(spec.name)
    except SandboxNotFound:
        try:
            return await controller.create(spec)
        except SandboxExists:  # someone else was quicker
            found = await controller.find(spec.name)
    _same_settings(found, spec)
    if found.state == "paused" or (found.state == "dead" and found.saved is not None):
        return await controller.resume(found.id)
    return found


def _same_settings(found: SandboxInfo, spec: SandboxSpec) -> None:
    """A name must never give an old posture silently to someone who asked for another."""
    old, new = found.spec.to_dict(), spec.to_dict()
    changed = [key for key in new if new[key] != old[key] and key not in ("pool", "authority")]
    if not changed:
        return
    raise SandboxMismatch(
        f"the sandbox {spec.name!r} exists with other settings: {', '.join(changed)}",
        hint=f"open it as it is with Sandbox.connect({spec.name!r}), or end it first with `sloplet rm {spec.name}`",
    )


async def lives(controller: Controller, sandbox_id: str) -> bool:
    """Whether there is, or may be again, somebody to ask: it runs, sleeps, or can go on from a checkpoint."""
    try:
        info = await controller.find(sandbox_id)
    except SandboxNotFound:
        return False
    return info.state not in ("dead", "ended") or info.saved is not None


async def default_controller(*, named: bool) -> Controller:
    """The keeper for what has a name, this process for the rest."""
    if named:
        from .keeper.client import keeper_controller

        return await keeper_controller()
    from .runtime import embedded_runtime

    runtime = await embedded_runtime()
    runtime.elsewhere = _keeper
    return runtime


class _Keeper:
    """The keeper's sandboxes, for links of ours to them: found when the first is used."""

    async def open(self, sandbox_id: str, request: Fields) -> Stream:
        return await (await default_controller(named=True)).open(sandbox_id, request)


_keeper = _Keeper()
