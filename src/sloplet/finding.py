"""Who holds a sandbox, and the sandbox of a name: found, or made."""

from __future__ import annotations

import re
from dataclasses import replace

from .controller import Controller, SandboxInfo, Stream
from .errors import SandboxExists, SandboxMismatch, SandboxNotFound
from .netspec import NetworkSpec
from .spec import SandboxSpec
from .wire.fields import Fields

_NOT_COMPARED = ("pool", "authority", "network", "no_network")
_ANSWER_RE = re.compile(r"[^/@* ,]+:[0-9]+\Z")


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
    await _same_settings(controller, found, spec)
    if found.state == "paused" or (found.state == "dead" and found.saved is not None):
        return await controller.resume(found.id)
    return found


async def _same_settings(controller: Controller, found: SandboxInfo, spec: SandboxSpec) -> None:
    """A name must never give an old posture silently to someone who asked for another."""
    old, new = found.spec.recorded().to_dict(), spec.recorded().to_dict()
    for volume in (*old["volumes"], *new["volumes"]):
        volume["base"] = ""  # where a folder is kept as it was is nobody's setting
    changed = [key for key in new if new[key] != old[key] and key not in _NOT_COMPARED]
    hint = f"open it as it is with Sandbox.connect({spec.name!r}), or end it first with `sloplet rm {spec.name}`"
    if not await _same_network(controller, found, spec):
        changed.append("network")
        now = f"`sloplet net show {spec.name}` tells what it may reach, `sloplet net set {spec.name}` changes it"
        hint = f"{now}; or {hint}"
    if changed:
        raise SandboxMismatch(
            f"the sandbox {spec.name!r} exists with other settings: {', '.join(changed)}",
            hint=hint,
        )


async def _same_network(controller: Controller, found: SandboxInfo, spec: SandboxSpec) -> bool:
    """Who names a network means what is reached now, whatever it was once made with. Who names none means what a new
    one would have."""
    wanted = NetworkSpec("rules") if spec.no_network else spec.network
    if wanted.mode == "none":
        return found.spec.network == spec.network and not found.spec.no_network
    current = await controller.network(found.id)
    if spec.no_network and current.mode == "none":
        return True
    return wanted == (_without_answers(current, wanted) if wanted.asks else current)


def _without_answers(current: NetworkSpec, wanted: NetworkSpec) -> NetworkSpec:
    """Where questions are asked, their answers are no other settings: a rule for one host and port each."""

    def kept(rules: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(rule for rule in rules if rule in known or not _ANSWER_RE.match(rule))

    return replace(current, allow=kept(current.allow, wanted.allow), deny=kept(current.deny, wanted.deny))


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
