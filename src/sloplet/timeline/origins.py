"""What a sandbox starts from: an image, or a state that was saved."""

from __future__ import annotations

import posixpath
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from .. import disk
from ..controller import Snapshot
from ..engines import registry
from ..engines.base import Engine, ResolvedImage, cannot_save
from ..errors import (
    SnapshotIncompatible,
    SpecError,
    UnsupportedOperation,
)
from ..images.config import parse_config
from ..images.trees import leased
from ..live import Live
from ..netspec import NetworkSpec, SecretSpec
from ..spec import DEFAULT_USER, DEFAULT_WORKDIR, SandboxSpec, check_network_needs
from ..state.home import Home
from ..state.opened import Opened, tree_of
from ..volumespec import VolumeSpec, check_volumes


@dataclass(frozen=True)
class Origin:
    """What a sandbox starts from: an image, or a state that was saved."""

    engine: Engine
    image: ResolvedImage
    spec: SandboxSpec  #: what it runs as
    opened: Opened | None = None
    head: str | None = None

    @property
    def restore(self) -> int | None:
        """The folder that the engine goes on from; None where it starts afresh."""
        return self.opened.fd if self.opened is not None and self.opened.snapshot.kind == "live" else None

    async def lay_out(self, live: Live) -> None:
        """Bring the files of a disk snapshot into a computer that has just started."""
        if self.opened is not None and self.opened.snapshot.kind == "disk":
            await disk.unpack(live, self.opened)


def saves(engine: Engine) -> bool:
    return engine.probe().capabilities.live_snapshots


def check_saves(engine: Engine, *, memory: bool) -> None:
    """UnsupportedOperation where it cannot save processes; without ``memory``, where it cannot save files."""
    if memory and not saves(engine):
        raise cannot_save(engine.name)
    if not memory and not engine.probe().capabilities.disk_snapshots:
        raise UnsupportedOperation(f"engine {engine.name!r} cannot save the files of a sandbox")


def can_live(engine: Engine, spec: SandboxSpec) -> None:
    """UnsupportedOperation for what is to be done with it later and cannot be."""
    if spec.on_ttl == "pause" and not saves(engine):
        raise UnsupportedOperation(
            f"on_ttl='pause' needs an engine that can save processes, and {engine.name!r} cannot",
            hint="on_ttl='pause-disk' keeps the files; engine='gvisor' can do more: `sloplet setup gvisor` installs it",
        )
    if spec.on_ttl == "pause-disk":
        check_saves(engine, memory=False)
    if spec.idle is not None and not saves(engine):
        raise UnsupportedOperation(
            f"idle={spec.idle:g} s needs an engine that can save processes, and {engine.name!r} cannot",
            hint="engine='gvisor' can; `sloplet setup gvisor` installs it",
        )
    if spec.network.on_budget == "pause" and not saves(engine):
        raise UnsupportedOperation(
            f"on_budget='pause' needs an engine that can save processes, and {engine.name!r} cannot",
            hint="on_budget='kill' ends the sandbox instead; engine='gvisor' can pause it",
        )


def merged(base: SandboxSpec, asked: SandboxSpec, template: Snapshot) -> SandboxSpec:
    """What a sandbox of a template runs as. What is fixed in the template cannot be asked for differently."""
    default = SandboxSpec()
    for what in ("image", "workdir", "user", "sudo"):
        wanted = getattr(asked, what)
        if wanted not in (getattr(default, what), getattr(base, what)):
            raise SpecError(
                f"{what}={wanted!r} is not what the template {template.name or template.id} was made with: "
                f"{getattr(base, what)!r}",
                hint=f"leave {what} out, or make another template",
            )
    if asked.network.mode != "none" and base.network.mode == "none" and template.kind == "live":
        raise SpecError(
            f"the template {template.name or template.id} was saved running without a network, and cannot have one",
            hint="leave network out, or make the template of a sandbox with network=Network()",
        )
    if asked.engine not in ("auto", template.engine):
        raise SpecError(
            f"engine={asked.engine!r} cannot start the template {template.name or template.id}: "
            f"it was made by {template.engine!r}",
            hint="leave engine out",
        )
    registry.choose(replace(asked, engine=template.engine))  # at_least
    limits = {name: getattr(asked.limits, name) for name in asked.limits.explicit}
    if limits.get("disk", base.limits.disk) != base.limits.disk:
        raise SpecError(
            f"disk={limits['disk']} is not the size of the template's disk", hint=f"it has {base.limits.disk} bytes"
        )
    found = replace(
        asked,
        image=base.image,
        engine=template.engine,
        workdir=base.workdir,
        user=base.user,
        sudo=base.sudo,
        env=tuple(sorted({**dict(base.env), **dict(asked.env)}.items())),
        network=_network(base.network, asked),
        secrets=_secrets(base, asked),
        volumes=_volumes(base, asked, template),
        authority=base.authority,
        limits=replace(base.limits, **limits, explicit=base.limits.explicit | asked.limits.explicit),
    )
    return check_network_needs(found)


def settled(spec: SandboxSpec, image: ResolvedImage, engine: Engine) -> SandboxSpec:
    """What a sandbox of these settings and that image runs as: where nothing was said, the image's own. An image with a
    config expects root where it names no user, with the powers that installing software takes."""
    config = image.config
    if config is None:
        return replace(spec, user=spec.run_user, workdir=spec.run_workdir, sudo=bool(spec.sudo))
    several = engine.probe().capabilities.users
    user = spec.user or ((config.user or "root") if several else DEFAULT_USER)
    workdir = posixpath.normpath(posixpath.join("/", config.workdir))
    return replace(
        spec,
        user=user,
        workdir=spec.workdir or (workdir if workdir != "/" else DEFAULT_WORKDIR),
        sudo=several if spec.sudo is None else spec.sudo,
        env=tuple(sorted({**dict(config.env), **dict(spec.env)}.items())),
    )


def _network(base: NetworkSpec, asked: SandboxSpec) -> NetworkSpec:
    """What was asked for; where nothing was said, the template's. What was saved with a redirect keeps it: to have no
    network is to reach nothing by it."""
    if asked.network.mode != "none":
        return asked.network
    return NetworkSpec("rules") if asked.no_network and base.mode != "none" else base


def _volumes(base: SandboxSpec, asked: SandboxSpec, template: Snapshot) -> tuple[VolumeSpec, ...]:
    """What was asked for, else the template's. What was saved running has its mounts where they were; what is in them
    may be another's. A copy that came with it is part of its files by now."""
    name = template.name or template.id
    if base.volumes and asked.pool:
        raise SpecError(f"pool= is not possible with the template {name}: it has volumes", hint="leave pool out")
    mounted = {volume.path: volume for volume in base.volumes if volume.mounted}
    wanted = {volume.path: volume for volume in asked.volumes}
    copies = tuple(volume for volume in base.volumes if not volume.mounted and volume.path not in wanted)
    if not asked.volumes:
        return base.volumes
    if template.kind == "live":
        there = {path for path, volume in wanted.items() if volume.mounted}
        if there != mounted.keys():
            raise SpecError(
                f"the template {name} was saved running with volumes at {', '.join(sorted(mounted)) or 'no path'}",
                hint="volumes= must have just these paths; what is mounted there may be another volume",
            )
        for path, volume in mounted.items():
            if wanted[path].mode != volume.mode:
                raise SpecError(
                    f"the template {name} was saved running with {path} {volume.mode}", hint=f"mode={volume.mode!r}"
                )
    return check_volumes({volume.path: volume for volume in (*copies, *asked.volumes)})


def _secrets(base: SandboxSpec, asked: SandboxSpec) -> tuple[SecretSpec, ...]:
    merged = {secret.name: secret for secret in base.secrets}
    for secret in asked.secrets:  # what runs in the template knows the placeholder that it had there
        known = merged.get(secret.name, secret)
        merged[secret.name] = replace(secret, placeholder=secret.placeholder or known.placeholder)
    return tuple(merged[name] for name in sorted(merged))


def image_of(opened: Opened, home: Home) -> ResolvedImage:
    """The image that a saved state needs, which the caller closes. SnapshotIncompatible if it is gone."""
    facts = opened.image
    if facts["path"] is None:
        return ResolvedImage(facts["kind"])
    config = None if facts.get("config") is None else parse_config(facts["config"].encode())
    path, tree = Path(facts["path"]), tree_of(home, facts)
    found = None
    with suppress(FileNotFoundError):
        if tree is not None:
            found = leased(home, tree, config)
        elif path.is_dir():
            found = ResolvedImage(facts["kind"], path, facts["owners"], config)
    if found is None:
        raise SnapshotIncompatible(
            f"the image that this state was made with is gone: {path}", hint="bring it back, or use an export"
        )
    return found
