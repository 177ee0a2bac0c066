"""Engines by name: loaded when first used, probed, chosen by what a spec asks for."""

from __future__ import annotations

import importlib

from ..errors import ControlUnavailable, EngineUnavailable, UnknownEngine
from ..spec import RUNGS, SandboxSpec
from .base import Engine, Probe

#: name -> "module:Class". ``fake`` is for tests: only by its name, never by "auto".
_ENGINES = {
    "process": "sloplet.engines.process:ProcessEngine",
    "container": "sloplet.engines.container:ContainerEngine",
    "fake": "sloplet.engines.fake:FakeEngine",
}
#: What "auto" tries, strongest first.
_AUTO = ("container", "process")
_loaded: dict[str, Engine] = {}


def all_names() -> tuple[str, ...]:
    return tuple(_ENGINES)


def load(name: str) -> Engine:
    """The engine of that name; one object per process. UnknownEngine lists the names there are."""
    if name not in _ENGINES:
        raise UnknownEngine(f"there is no engine {name!r}", hint=f"one of auto, {', '.join(_ENGINES)}")
    if name not in _loaded:
        module, _, attribute = _ENGINES[name].partition(":")
        engine: Engine = getattr(importlib.import_module(module), attribute)()
        _loaded[name] = engine
    return _loaded[name]


def probe_all() -> list[Probe]:
    """What every engine says about this machine."""
    return [load(name).probe() for name in _ENGINES]


def choose(spec: SandboxSpec) -> Engine:
    """The engine for a spec: the one named, or the strongest that is available here."""
    if spec.engine != "auto":
        engine = load(spec.engine)
        if spec.at_least is not None and RUNGS.index(engine.rung) < RUNGS.index(spec.at_least):
            raise ControlUnavailable(
                f"engine={spec.engine!r} is on the rung {engine.rung!r}, weaker than at_least={spec.at_least!r}",
                hint="leave engine= out, or ask for less",
            )
        _require(engine.probe())
        return engine
    least = RUNGS.index(spec.at_least) if spec.at_least is not None else 0
    problems: list[str] = []
    for name in _AUTO:
        engine = load(name)
        if RUNGS.index(engine.rung) < least:
            continue
        probe = engine.probe()
        if probe.available:
            return engine
        problems.append(f"{name}: {probe.reason}" + (f" (to fix: {probe.fix})" if probe.fix else ""))
    wanted = f" at least as strong as {spec.at_least!r}" if spec.at_least is not None else ""
    detail = "; ".join(problems) or "no engine of that rung is part of this version"
    raise EngineUnavailable(f"no engine{wanted} can run here: {detail}", hint="`sloplet doctor` tells more")


def _require(probe: Probe) -> None:
    if not probe.available:
        raise EngineUnavailable(f"the engine {probe.engine!r} cannot run here: {probe.reason}", hint=probe.fix or None)
