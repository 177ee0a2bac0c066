"""What a key and the operator allow of what is asked for. Pure: a spec, the key's limits and what there is to allow go
in; what will be made, or NotAllowed, comes out.

A key's limits are raised into the spec where they can be (a rung, a time to live), and refused where they contradict
it. Of the host's own, nothing can be had by asking: folders and rootfs only below paths that the operator named,
addresses that are private or the machine's own only inside of networks that he named.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..errors import EngineUnavailable, NotAllowed, SpecError, UnknownEngine
from ..images.resolve import is_tar
from ..netspec import NetworkSpec
from ..network.addresses import SPECIAL, Net
from ..network.names import HOST
from ..network.rules import Rule, parse_rule
from ..spec import RUNGS, SandboxSpec
from ..volumespec import VolumeSpec
from .keys import KeyLimits
from .settings import AllowedPath

#: What no operator can allow, with all that is below: the kernel's, and where services listen.
DENIED = ("/proc", "/sys", "/dev", "/run", "/var/run", "/var/lib/docker", "/var/lib/containerd")
_SOCKETS = frozenset({"docker.sock", "containerd.sock", "podman.sock", "crio.sock"})
_COUNTED = ("memory", "cpus", "disk")
_OPERATOR = "ask the server's operator"


@dataclass(frozen=True)
class EngineFact:
    """An engine as it is on this machine."""

    name: str
    rung: str
    available: bool
    reason: str = ""  #: why it is not
    controls: frozenset[str] = frozenset(("memory", "cpus", "disk"))  #: what it can enforce here


@dataclass(frozen=True)
class Ground:
    """What decisions are made on: what the operator allows, and what this machine has."""

    home: str  #: the server's own, links resolved
    engines: tuple[EngineFact, ...]  #: all, in the order in which ``engine="auto"`` tries them
    allow_paths: tuple[AllowedPath, ...] = ()
    allow_private: tuple[str, ...] = ()  #: networks, or "host.sloplet"
    fake: bool = False  #: whether the fake engine may be used: in tests
    real: Callable[[str], str] = os.path.realpath  #: a path without links
    own: Callable[[str], bool] = lambda address: False  #: whether an address is this machine's

    def counted(self, limits: KeyLimits, engine: str) -> frozenset[str]:
        """What a key is limited in, as far as this machine has an engine that can enforce it: that is what counts."""
        able = {control for fact in self.engines if fact.available and fact.name != "fake" for control in fact.controls}
        if engine == "fake":
            able = set(self.engine(engine).controls)
        return frozenset(name for name in _COUNTED if getattr(limits, f"max_{name}") is not None and name in able)

    def engine(self, name: str) -> EngineFact:
        found = next((fact for fact in self.engines if fact.name == name), None)
        if found is None:
            known = [fact.name for fact in self.engines if fact.name != "fake"]
            raise UnknownEngine(f"there is no engine {name!r}", hint=f"one of auto, {', '.join(known)}")
        return found


def parse_allowed_path(text: str) -> AllowedPath:
    """``PATH`` or ``PATH:rw``, of the operator's. SpecError."""
    path, writable = (text.removesuffix(":rw"), True) if text.endswith(":rw") else (text.removesuffix(":ro"), False)
    real = os.path.realpath(path)
    if not path.startswith("/") or not os.path.isdir(real):
        raise SpecError(f"--allow-path {text[:200]!r} is not a folder", hint="an absolute path, with ':rw' for writing")
    if real == "/" or any(below(real, tree) for tree in DENIED):
        raise SpecError(f"--allow-path {text[:200]!r} can never be allowed", hint="name the folder that is needed")
    return AllowedPath(real, writable)


def parse_private(text: str) -> str:
    """A network, or ``host.sloplet``, of the operator's. SpecError."""
    if text == HOST:
        return text
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise SpecError(
            f"--allow-private {text[:80]!r} is not a network", hint=f"for example 10.0.7.0/24, or {HOST}"
        ) from error


def permitted(spec: SandboxSpec, limits: KeyLimits, ground: Ground, *, admin: bool = False) -> SandboxSpec:
    """What is made where this was asked for, without a template. Permitted again it is the same."""
    spec = _of_key(_with_engine(spec, limits, ground), limits, ground)
    spec = replace(spec, image=_image(spec.image, ground), volumes=_volumes(spec.volumes, ground))
    check_network(spec.network, ground)
    _check_ports(spec, admin)
    return spec


def permitted_of_template(
    spec: SandboxSpec,
    effective: SandboxSpec,
    engine: str,
    limits: KeyLimits,
    ground: Ground,
    *,
    admin: bool = False,
) -> SandboxSpec:
    """The same of one that starts from a saved state: ``effective`` is what it would run as, on ``engine``. Its limits
    are said, so that the record has them and quotas count them."""
    check_engine(engine, limits, ground)
    for volume in effective.volumes:
        if volume not in spec.volumes and not volume.named and not volume.absent and not _still(volume, ground):
            raise NotAllowed(
                f"the template has a folder of the server's machine at {volume.path}, which is not for requests",
                hint="name another volume for that path",
            )
    check_network(effective.network, ground)
    _check_ports(spec, admin)
    spec = replace(spec, limits=effective.limits, at_least=_stronger(spec.at_least, limits.at_least))
    return replace(_of_key(spec, limits, ground, lower=False), volumes=_volumes(spec.volumes, ground))


def check_engine(engine: str, limits: KeyLimits, ground: Ground) -> None:
    """NotAllowed unless the key may use what runs on this engine: what is forked, woken, loaded, rolled back."""
    fact = ground.engine(engine)
    if engine == "fake" and not ground.fake:
        raise NotAllowed("the fake engine isolates nothing, and is not for requests", hint="leave engine out")
    if limits.engines and engine not in limits.engines:
        raise NotAllowed(f"this key may not use the engine {engine!r}", hint=f"it may use {', '.join(limits.engines)}")
    if limits.at_least is not None and _rank(fact.rung) < _rank(limits.at_least):
        raise NotAllowed(
            f"the engine {engine!r} is on the rung {fact.rung!r}, and this key needs {limits.at_least!r} at least",
            hint="name a stronger engine, or leave engine out",
        )


def check_copy(spec: SandboxSpec, engine: str, limits: KeyLimits, ground: Ground, *, what: str) -> None:
    """NotAllowed if a key may not have one more like this. What has to be enforced of it cannot be
    said when it is copied: its engine must be able to."""
    if limits.max_ttl is not None and (spec.ttl is None or spec.ttl > limits.max_ttl):
        lives = "for ever" if spec.ttl is None else f"for {spec.ttl:g} s"
        raise NotAllowed(
            f"{what} would live {lives}, and this key's may for {limits.max_ttl:g} s",
            hint=f"give it a ttl of at most {limits.max_ttl:g} s",
        )
    if limits.max_ttl is not None and spec.on_ttl != "end" and limited_ttl(spec.longest, limits) != spec.longest:
        raise NotAllowed(
            f"{what} would sleep when its time is over, and live without end when it wakes, which this key's may not",
            hint="make one with on_ttl='end', or by this key",
        )
    counted = ground.counted(limits, engine)
    _check_weaker(spec, counted)
    if missing := counted - spec.limits.explicit - ground.engine(engine).controls:
        raise NotAllowed(
            f"{what} would run on the engine {engine!r}, which does not enforce {', '.join(sorted(missing))} here, and "
            "this key is limited in that",
            hint="make it on another engine",
        )


def check_reference(reference: str, ground: Ground) -> None:
    """NotAllowed if the image of an archive that comes without it would be looked for at a path of this machine's: who
    wrote the archive wrote the path, and also learns what is there by how the looking fails."""
    if _image(reference, ground) != reference:
        raise _path_refused("image", reference)


# -- the key's ------------------------------------------------------------------------------------------------------


def _with_engine(spec: SandboxSpec, limits: KeyLimits, ground: Ground) -> SandboxSpec:
    least = _stronger(spec.at_least, limits.at_least)
    if spec.engine != "auto":
        check_engine(spec.engine, limits, ground)
        return replace(spec, at_least=least)
    spec = replace(spec, at_least=least)
    if not limits.engines:
        return spec
    fit = [
        fact for fact in ground.engines if fact.name != "fake" and (least is None or _rank(fact.rung) >= _rank(least))
    ]
    chosen = next((fact for fact in fit if fact.available and fact.name in limits.engines), None)
    if chosen is None:
        allowed = [fact for fact in ground.engines if fact.name in limits.engines]
        why = "; ".join(
            f"{fact.name}: {fact.reason if not fact.available else 'weaker than ' + repr(least)}" for fact in allowed
        )
        raise EngineUnavailable(f"no engine that this key may use can run this here ({why or 'none'})", hint=_OPERATOR)
    strongest = next((fact for fact in fit if fact.available), None)
    # Where it is what "auto" gives, that stays: a name that is opened again by another key is the same sandbox.
    return spec if chosen is strongest else replace(spec, engine=chosen.name)


def _of_key(spec: SandboxSpec, limits: KeyLimits, ground: Ground, *, lower: bool = True) -> SandboxSpec:
    """The amounts. What counts has to be enforced; a default that is more than the key may have is lowered."""
    counted = ground.counted(limits, spec.engine)
    _check_weaker(spec, counted)
    ttl = limited_ttl(spec.ttl, limits)
    lowered = {
        name: min(getattr(spec.limits, name), most)
        for name in _COUNTED
        if lower and name not in spec.limits.explicit and (most := getattr(limits, f"max_{name}")) is not None
    }
    limited = replace(spec.limits, **lowered, explicit=spec.limits.explicit | counted)
    return replace(spec, ttl=ttl, longest=limits.max_ttl, limits=limited)


def limited_ttl(ttl: float | None, limits: KeyLimits) -> float | None:
    """What asks for more than the key may have, or for no end, gets that."""
    if limits.max_ttl is None:
        return ttl
    return limits.max_ttl if ttl is None else min(ttl, limits.max_ttl)


def _check_weaker(spec: SandboxSpec, counted: frozenset[str]) -> None:
    if spec.allow_weaker and counted:
        raise NotAllowed(
            "allow_weaker is not for this key: what it is limited in has to be enforced", hint="leave allow_weaker out"
        )


def _stronger(one: str | None, other: str | None) -> str | None:
    return max((rung for rung in (one, other) if rung is not None), key=_rank, default=None)


def _rank(rung: str) -> int:
    return RUNGS.index(rung) if rung in RUNGS else -1


def _check_ports(spec: SandboxSpec, admin: bool) -> None:
    for port in spec.ports:
        if port.outside and not admin:
            raise NotAllowed(
                f"port {port.outside} of the server's machine is not this key's to take",
                hint=f"ask for the port alone ([{port.inside}]): it has a name of its own outside",
            )


# -- the host's files -----------------------------------------------------------------------------------------------


def _volumes(volumes: Iterable[VolumeSpec], ground: Ground) -> tuple[VolumeSpec, ...]:
    """Folders with their real paths, to be opened without following a link: what is mounted is what was checked, also
    when a sandbox that can write there changes links, and also when this one wakes in a year."""
    found = []
    for volume in volumes:
        if volume.named or volume.absent:
            found.append(volume)
            continue
        real = _real(volume.source, ground)
        allowed = _around(real, ground)
        if not allowed:
            raise _path_refused("folder", volume.source)
        if volume.mode == "rw" and not any(path.writable for path in allowed):
            raise NotAllowed(
                f"the folder {volume.source!r} may be read only", hint="mode 'ro' or 'copy', or " + _OPERATOR
            )
        found.append(replace(volume, source=real, nofollow=True))
    return tuple(found)


def _still(volume: VolumeSpec, ground: Ground) -> bool:
    """Whether a folder of a saved spec was permitted by a server, and would be now."""
    allowed = _around(volume.source, ground) if volume.nofollow else ()
    return bool(allowed) and (volume.mode != "rw" or any(path.writable for path in allowed))


def _image(image: str, ground: Ground) -> str:
    """A rootfs of the host's, by its real path. Such a path is followed whenever the sandbox wakes, so no sandbox may
    be able to write there: what is below a path that is allowed for writing is refused."""
    prefix, path = ("dir:", image.removeprefix("dir:")) if image.startswith("dir:") and image != "dir:" else ("", image)
    is_path = bool(prefix) or image.startswith(("/", "./", "../", "~/")) or image in (".", "..", "~")
    if not is_path and not is_tar(image):
        return image
    if not path.startswith("/"):
        raise NotAllowed(
            f"the image {image[:200]!r} is a path in a folder that is not yours",
            hint="images have names ('debian:12'); one of your machine can be brought by POST /v1/images/import",
        )
    real = _real(path, ground)
    allowed = _around(real, ground)
    if not allowed or any(path.writable for path in allowed):
        raise _path_refused("image", image)
    return prefix + real


def _real(path: str, ground: Ground) -> str:
    try:
        return ground.real(path)
    except (OSError, ValueError) as error:
        raise SpecError(f"{path[:200]!r} is not a path") from error


def _around(real: str, ground: Ground) -> tuple[AllowedPath, ...]:
    """The allowed paths that a real path is below; none where it may never be."""
    if real == "/" or below(real, ground.home) or below(ground.home, real):
        return ()
    if any(below(real, tree) or below(tree, real) for tree in DENIED) or _SOCKETS & set(real.split("/")):
        return ()
    return tuple(path for path in ground.allow_paths if below(real, path.path))


def below(path: str, folder: str) -> bool:
    """Whether a path is this folder or in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _path_refused(what: str, path: str) -> NotAllowed:
    # The same words whether there is such a path or not, and wherever its links lead.
    return NotAllowed(
        f"the {what} {path[:200]!r} is a path of the server's machine that its operator does not allow",
        hint="upload what is needed, or use a named volume; an operator allows paths by `sloplet serve --allow-path`",
    )


# -- the host's network ---------------------------------------------------------------------------------------------


def check_network(network: NetworkSpec, ground: Ground) -> None:
    """NotAllowed for a rule that opens what is not the internet: private networks, metadata services, this machine."""
    for text in network.allow:
        if not text.startswith("@"):  # presets are the operator's machine's own
            _check_rule(parse_rule(text), ground)


def check_target(name: str, address: str, ground: Ground) -> None:
    """The same of what would become a rule by an answer."""
    if not name and address:
        _check_rule(parse_rule(f"[{address}]:1" if ":" in address else f"{address}:1"), ground)


def _check_rule(rule: Rule, ground: Ground) -> None:
    if rule.host.name == HOST:
        if HOST not in ground.allow_private:
            raise _net_refused(rule, "the server's machine itself")
        return
    net = rule.host.net
    if net is None:
        return
    kind = next((special.what for special in SPECIAL if _inside(net, special.net)), None)
    if kind is None and net.num_addresses == 1 and ground.own(str(net.network_address)):
        kind = "an address of the server's machine"
    if kind is None:
        return
    if not any(_inside(net, ipaddress.ip_network(text)) for text in ground.allow_private if text != HOST):
        raise _net_refused(rule, kind)


def _inside(net: Net, around: Net) -> bool:
    return net.version == around.version and net.subnet_of(around)  # type: ignore[arg-type]


def _net_refused(rule: Rule, kind: str) -> NotAllowed:
    return NotAllowed(
        f"the rule {rule.text!r} would open {kind}, which the server's operator does not allow",
        hint="an operator allows networks by `sloplet serve --allow-private`",
    )
