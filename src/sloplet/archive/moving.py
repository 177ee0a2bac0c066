"""What a runtime does to bring a sandbox here out of an archive."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from ..controller import SandboxInfo
from ..engines import registry
from ..engines.base import Engine, ResolvedImage, format_of
from ..errors import (
    SandboxExists,
    SandboxNotFound,
    SlopletError,
    SnapshotDamaged,
    SnapshotIncompatible,
    SpecError,
    StartFailed,
    UnknownEngine,
)
from ..spec import SandboxSpec, check_name
from ..state.draft import Draft
from ..state.opened import Opened
from .images import Incoming
from .layout import Manifest
from .read import Archive, adopt, check_room
from .work import Work

if TYPE_CHECKING:
    from ..runtime import Runtime


def progress(runtime: Runtime, what: str, sandbox: str, **data: str) -> Work:
    """Work that tells whoever listens how far it is: events ``export.progress`` and ``import.progress``."""
    loop = asyncio.get_running_loop()

    def tell(done: int, total: int) -> None:
        if runtime.bus.wanted:
            loop.call_soon_threadsafe(
                lambda: runtime.bus.emit(sandbox, f"{what}.progress", bytes=done, total=total, **data)
            )

    return Work(what, tell)


def arrived(spec: SandboxSpec, name: str | None) -> SandboxSpec:
    """What a sandbox from elsewhere runs as: whom it may reach here, and on which ports, is for this machine's user to
    say and not for its author. (Of its volumes an archive has nothing.)"""
    ports = tuple(port._replace(outside=0) for port in spec.ports)  # others may have those here
    return replace(spec, name=name, ports=ports, links=(), network=spec.network.closed())


async def load(runtime: Runtime, path: str, name: str | None, work: Work) -> SandboxInfo:
    """Receive, check, start. Nothing is left behind on failure."""
    from ..timeline import Origin

    if name is not None:
        await _check_free(runtime, check_name(name))
    archive = await runtime.off_loop(lambda: Archive(path))
    try:
        manifest = archive.manifest
        if name is None and runtime.holder == "keeper" and manifest.spec.name is not None:
            name = manifest.spec.name  # what the keeper holds has a name; embedded it is one of many
            await _check_free(runtime, name)
        spec = arrived(manifest.spec, name)
        engine = _engine(manifest, spec)
        draft = await runtime.off_loop(runtime.saved.begin)
        try:
            opened, image = await runtime.off_loop(lambda: _receive(runtime, archive, draft, work))
            try:
                live = await runtime.make(spec, Origin(engine, image, spec, opened))
            except OSError as error:
                if isinstance(error, SlopletError):
                    raise
                hint = "is the machine, or this process, out of files, memory or disk space?"
                raise StartFailed(f"the sandbox of the archive did not start: {error}", hint=hint) from error
            finally:
                image.close()
                await asyncio.shield(runtime.off_loop(opened.close))
        finally:
            await asyncio.shield(runtime.off_loop(draft.abandon))
    finally:
        archive.close()
    if work.given_up:
        await runtime.kill(live.info.id)
        work.check()
    return live.info


def _receive(runtime: Runtime, archive: Archive, draft: Draft, work: Work) -> tuple[Opened, ResolvedImage]:
    with Incoming(runtime.home, archive.manifest) as incoming:
        check_room(runtime.home, archive.manifest, image=incoming.missing)
        archive.receive(draft, incoming, work)
        image = incoming.publish()
    return adopt(draft, archive.manifest, image), image


def _engine(manifest: Manifest, spec: SandboxSpec) -> Engine:
    """The engine that goes on from it, if it can here."""
    try:
        engine = registry.choose(replace(spec, engine=manifest.engine))
    except (UnknownEngine, SpecError) as error:
        raise SnapshotIncompatible(
            f"the archive needs the engine {manifest.engine[:40]!r}, which this sloplet does not know",
            hint="use the version of sloplet that wrote it",
        ) from error
    if engine.name != manifest.format.engine:
        raise SnapshotDamaged("the archive is damaged: it names two engines")
    if manifest.kind == "live" and not engine.probe().capabilities.live_snapshots:
        raise SnapshotIncompatible(f"the archive holds processes, and engine {engine.name!r} cannot go on with them")
    if reason := format_of(engine, manifest.kind).refuses(manifest.format):
        raise SnapshotIncompatible(
            f"the archive cannot be used here: {reason}",
            hint=f"it needs engine {manifest.format.engine!r}, {manifest.format.version}",
        )
    return engine


async def _check_free(runtime: Runtime, name: str) -> None:
    """SandboxExists now, rather than after gigabytes were read."""
    try:
        taken = await runtime.find(name)
    except SandboxNotFound:
        return
    raise SandboxExists(
        f"there already is a sandbox named {taken.name or taken.id!r} ({taken.state})",
        hint="give it another name (name=, `sloplet import --name`)",
    )
