"""Who holds a sandbox, and the sandbox of a name: found, or made."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from .controller import Controller, Finder, SandboxInfo, Stream
from .errors import SandboxExists, SandboxMismatch, SandboxNotFound, UnsupportedOperation
from .netspec import NetworkSpec
from .spec import SandboxSpec
from .wire.fields import Fields

if TYPE_CHECKING:
    from .remote.place import Place

_NOT_COMPARED = ("pool", "authority", "longest", "network", "no_network", "labels")
_ANSWER_RE = re.compile(r"[^/@* ,]+:[0-9]+\Z")


async def create_or_find(controller: Controller, spec: SandboxSpec) -> SandboxInfo:
    """A fresh one, or the one of that name, awake. SandboxMismatch if that was made with other settings."""
    if isinstance(controller, Finder):
        return await controller.create_or_find(spec)
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
        volume["nofollow"] = False  # nor is who asked for it
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


def place_of(
    server: str | None = None, key: str | None = None, ca: str | os.PathLike[str] | None = None
) -> Place | None:
    """The server that is meant: the one given, else that of SLOPLET_URL; None: this machine. ``server=""`` is always
    this machine."""
    if server == "" or (server is None and key is None and not os.environ.get("SLOPLET_URL")):
        return None
    from .remote.place import find

    return find(server, key, ca)


async def holder_at(place: Place | None, *, named: bool, leasing: bool = True) -> Controller:
    """Who holds sandboxes there; None: the keeper for what has a name, this process for the rest. ``leasing``: what is
    made on a server without a name goes with this program."""
    if place is None:
        return await local_controller(named=named)
    try:
        from .remote.controller import RemoteController
    except ImportError as error:
        raise UnsupportedOperation(
            f"sandboxes on a server need the package {error.name}", hint="pip install 'sloplet[remote]'"
        ) from None
    return RemoteController(place, leasing=leasing)


async def default_controller(*, named: bool) -> Controller:
    """The server of SLOPLET_URL; without one the keeper for what has a name, this process for the rest."""
    return await holder_at(place_of(), named=named)


async def local_controller(*, named: bool) -> Controller:
    """The same on this machine, whatever the environment says."""
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
        return await (await local_controller(named=True)).open(sandbox_id, request)


_keeper = _Keeper()
