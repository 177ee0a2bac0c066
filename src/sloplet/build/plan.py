"""Which stages of a Dockerfile are needed for a target, what each builds on, and in what order they can go. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import RecipeInvalid
from ..images.media import Platform
from .dockerfile import Dockerfile, Stage
from .instructions import Arg, Copy, Run
from .lines import Line, near
from .words import Lookup, Malformed, expand

SCRATCH = "scratch"
#: May be given without being declared, and are no part of what is built.
PROXIES = frozenset(
    name
    for word in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (word, word.lower())
)


@dataclass(frozen=True)
class Origin:
    """Where files or a root come from: another stage, an image, or nothing (scratch)."""

    stage: int | None = None
    image: str | None = None


@dataclass(frozen=True)
class PlannedStage:
    stage: Stage
    base: Origin
    platform: str | None
    origins: dict[str, Origin] = field(default_factory=dict, hash=False)  #: what each --from of it means

    @property
    def needs(self) -> frozenset[int]:
        """Stages that must be there first."""
        found = {origin.stage for origin in (self.base, *self.origins.values())}
        return frozenset(index for index in found if index is not None)


@dataclass(frozen=True)
class Plan:
    stages: tuple[PlannedStage, ...]  #: the needed ones, each after those that it needs
    target: int
    arguments: Mapping[str, str] = field(default_factory=dict, hash=False)  #: those before the first FROM, with values


def platform_arguments(platform: Platform, host: Platform) -> dict[str, str]:
    """What Docker defines by itself."""
    found: dict[str, str] = {}
    for prefix, each in (("TARGET", platform), ("BUILD", host)):
        found |= {f"{prefix}PLATFORM": str(each), f"{prefix}OS": each.os, f"{prefix}ARCH": each.architecture,
                  f"{prefix}VARIANT": each.variant}  # fmt: skip
    return found


def make_plan(
    dockerfile: Dockerfile, *, target: str | None = None, build_args: Mapping[str, str], defined: Mapping[str, str]
) -> Plan:
    """``build_args``: what the caller gave; ``defined``: the platform's. Raises RecipeInvalid."""
    values = _leading(dockerfile, build_args, defined)
    planned = [_planned(dockerfile, stage, values) for stage in dockerfile.stages]
    chosen = target_of(dockerfile, target)
    needed, waiting = set[int](), [chosen]
    while waiting:
        index = waiting.pop()
        if index not in needed:
            needed.add(index)
            waiting += planned[index].needs
    _check_arguments(dockerfile, build_args, defined)
    return Plan(tuple(planned[index] for index in sorted(needed)), chosen, values)


def _leading(dockerfile: Dockerfile, build_args: Mapping[str, str], defined: Mapping[str, str]) -> dict[str, str]:
    values: dict[str, str] = dict(defined)
    for instruction in dockerfile.arguments:
        for name, default in instruction.pairs:
            if name in build_args:
                values[name] = build_args[name]
            elif default is not None:
                values[name] = expanded(instruction.line, default, values.get)
    return values


def expanded(line: Line, text: str, lookup: Lookup) -> str:
    try:
        return expand(text, lookup, line.escape)
    except Malformed as error:
        raise line.wrong(str(error), error.hint) from None


def _planned(dockerfile: Dockerfile, stage: Stage, values: Mapping[str, str]) -> PlannedStage:
    line = stage.base.line
    image = expanded(line, stage.base.image, values.get)
    if not image:
        hint = "give it one with --build-arg, or a default by ARG before the first FROM"
        raise line.wrong(f"FROM {stage.base.image}: the variable has no value", hint)
    platform = expanded(line, stage.base.platform, values.get) if stage.base.platform else None
    base = Origin() if image == SCRATCH else _origin(dockerfile, stage, image, numbers=False)
    origins = {}
    for step in stage.steps:
        names = [step.origin] if isinstance(step, Copy) else []
        names += [mount.get("from") for mount in step.mounts] if isinstance(step, Run) else []
        for name in filter(None, names):
            if "$" in name:
                raise step.line.wrong(
                    f"--from={name} holds a variable, which is not possible", "write FROM IMAGE AS NAME, --from=NAME"
                )
            if name == SCRATCH:
                raise step.line.wrong("--from=scratch: there is nothing in it to copy")
            origins[name] = _origin(dockerfile, stage, name, step.line)
    return PlannedStage(stage, base, platform, origins)


def _origin(
    dockerfile: Dockerfile, stage: Stage, name: str, line: Line | None = None, *, numbers: bool = True
) -> Origin:
    """A stage before this one, by name or number; else an image."""
    for earlier in dockerfile.stages[: stage.index]:
        if earlier.base.alias == name.lower():
            return Origin(stage=earlier.index)
    if numbers and name.isdecimal():
        assert line is not None
        if int(name) >= stage.index:
            raise line.wrong(f"--from={name}: there are only {stage.index} stages before this one")
        return Origin(stage=int(name))
    later = [other.base.alias for other in dockerfile.stages[stage.index :]]
    if line is not None and name.lower() in later:
        raise line.wrong(f"--from={name}: that stage does not come before this one", "put it first")
    return Origin(image=name)


def target_of(dockerfile: Dockerfile, target: str | None) -> int:
    """The stage of that name or number; the last one by default. RecipeInvalid."""
    if target is None:
        return len(dockerfile.stages) - 1
    for stage in dockerfile.stages:
        if target.lower() == stage.base.alias or target == str(stage.index):
            return stage.index
    names = [stage.base.alias for stage in dockerfile.stages if stage.base.alias]
    raise RecipeInvalid(f"{dockerfile.name} has no stage {target[:80]!r}", hint=near(target, names))


def _check_arguments(dockerfile: Dockerfile, given: Mapping[str, str], defined: Mapping[str, str]) -> None:
    """A build argument that nothing declares is a slip."""
    known = {name for instruction in dockerfile.arguments for name, _ in instruction.pairs}
    for stage in dockerfile.stages:
        known |= {name for step in stage.steps if isinstance(step, Arg) for name, _ in step.pairs}
    for name in given:
        if name not in known and name not in PROXIES and name not in defined:
            hint = near(name, sorted(known)) or f"declare it: ARG {name}"
            raise RecipeInvalid(f"{dockerfile.name} declares no build argument {name[:80]}", hint=hint)
