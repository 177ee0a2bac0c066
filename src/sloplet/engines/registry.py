"""Engines by name, imported on use, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from ..errors import EngineError, EngineUnavailable, SlopletError, UnknownEngine
from ..spec import RUNGS, SandboxSpec
from .base import Engine

_ENGINES = {
    "gvisor": "sloplet.engines.gvisor:GvisorEngine",
    "container": "sloplet.engines.container:ContainerEngine",
    "process": "sloplet.engines.process:ProcessEngine",
    "fake": "sloplet.engines.fake:FakeEngine",
}
#: What ``engine="auto"`` tries, strongest first. The fake isolates nothing real and is never chosen.
_AUTO = ("gvisor", "container", "process")

_loaded: dict[str, Engine] = {}


def all_names() -> tuple[str, ...]:
    return tuple(_ENGINES)


def load(name: str) -> Engine:
    """The one engine of that name in this process. Raises UnknownEngine."""
    if name not in _loaded:
        if name not in _ENGINES:
            raise UnknownEngine(f"there is no engine {name!r}", hint=f"one of auto, {', '.join(_ENGINES)}")
        module, _, cls = _ENGINES[name].partition(":")
        _loaded[name] = cast(Callable[[], Engine], getattr(import_module(module), cls))()
    return _loaded[name]


def choose(spec: SandboxSpec) -> Engine:
    """The engine for a spec: the named one, or the strongest that can run here. Raises UnknownEngine, and
    EngineUnavailable with the reason of every rung that was passed over."""
    least = RUNGS.index(spec.at_least) if spec.at_least else 0
    if spec.engine != "auto":
        engine = load(spec.engine)
        if spec.at_least and (engine.rung not in RUNGS or RUNGS.index(engine.rung) < least):
            raise EngineUnavailable(
                f"engine {spec.engine!r} is on the rung {engine.rung!r}, weaker than at_least={spec.at_least!r}",
                hint="name a stronger engine, or leave engine out",
            )
        probe = engine.probe()
        if not probe.available:
            raise EngineUnavailable(f"engine {spec.engine!r} cannot run here: {probe.reason}", hint=probe.fix or None)
        return engine
    reasons: list[str] = []
    for name in _AUTO:
        engine = load(name)
        if RUNGS.index(engine.rung) < least:
            reasons.append(f"{name}: weaker than at_least={spec.at_least!r}")
            continue
        probe = engine.probe()
        if probe.available:
            return engine
        reasons.append(f"{name}: {probe.reason}" + (f" ({probe.fix})" if probe.fix else ""))
    raise EngineUnavailable(f"no engine can run this sandbox here: {'; '.join(reasons)}", hint="see `sloplet doctor`")


def reap(name: str, sandbox_id: str) -> None:
    """Remove what a crash left of a sandbox. ``name`` "": nobody knows which engine had it, so every one looks."""
    if name:
        load(name).reap(sandbox_id)
        return
    failed: EngineError | None = None
    for each in _AUTO:
        try:
            load(each).reap(sandbox_id)
        except SlopletError as error:
            failed = error if isinstance(error, EngineError) else EngineError(str(error))
    if failed is not None:
        raise failed
