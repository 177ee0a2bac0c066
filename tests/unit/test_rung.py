"""What the engines of the launcher share: ranges of ids, refusals, the kept part of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from test_jail import ROOT

from sloplet.engines.base import Capabilities, Probe, ResolvedImage, StartRequest
from sloplet.engines.cgroups import GroupPlan
from sloplet.engines.controls import decide
from sloplet.engines.machine import RANGES
from sloplet.engines.plan import Do, Step, step
from sloplet.engines.rung import IdRanges, JailRung
from sloplet.errors import EngineUnavailable, UnsupportedOperation
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone


class Toy(JailRung):
    name = "toy"
    weakenable = frozenset({"cgroup"})
    reason = ""

    def probe(self) -> Probe:
        able = Capabilities(images=frozenset({"host"}))
        return Probe(self.name, "toy", not self.reason, self.reason, "a fix", (), able)


def request(image: str = "host") -> StartRequest:
    return StartRequest("abc", SandboxSpec(), ResolvedImage(image), Path("/nowhere"))  # type: ignore[arg-type]


def test_no_two_sandboxes_have_a_range() -> None:
    ranges = IdRanges()
    first, second = ranges.take("abc"), ranges.take("abc")
    assert second == (first + 1) % RANGES
    ranges.give_back(first)
    assert ranges.take("abc") == first, "what was given back is free"
    assert IdRanges().take("abd") != first, "other sandboxes begin elsewhere"


def test_the_kept_part_is_worked_out_once_for_a_key() -> None:
    engine, asked = Toy(facts=ROOT), list[str]()

    def steps(name: str) -> Sequence[Step]:
        asked.append(name)
        return [step(Do.MKDIR, 0o755, name)]

    kept = {name: engine._kept(name, lambda name=name: steps(name)) for name in "abab"}
    assert asked == ["a", "b"]
    assert kept["a"] != kept["b"]
    for number in range(100):
        engine._kept(number, lambda: steps("many"))
    assert len(engine._parts) < 50, "not for ever"


def test_ids_are_given_back_by_a_sandbox_that_is_never_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloplet.engines.scratch.template", lambda *_: "/t.img")
    engine, wanted = Toy(facts=ROOT), request()
    decided = decide(wanted.spec, ROOT, wanted.id, namespaces=True)
    with pytest.raises(ZeroDivisionError), engine._jail(wanted, decided, GroupPlan()) as jailed:
        raise ZeroDivisionError
    with engine._jail(wanted, decided, GroupPlan()) as again:
        assert again.id_range == jailed.id_range
    with engine._jail(wanted, decided, GroupPlan()) as other:
        assert other.id_range != again.id_range, "one that is launched keeps them"


def test_ids_are_given_back_where_there_is_no_template(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, wanted = Toy(facts=ROOT), request()
    decided = decide(wanted.spec, ROOT, wanted.id, namespaces=True)
    assert decided.scratch.kind == "ext4", "the case in question"

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sloplet.engines.scratch.template", full)
    with pytest.raises(OSError, match="No space"), engine._jail(wanted, decided, GroupPlan()):
        pass
    assert engine._ranges.take(wanted.id) == IdRanges().take(wanted.id)


def test_refusals_name_the_engine() -> None:
    engine = Toy(facts=ROOT)
    engine._require(request())
    with pytest.raises(UnsupportedOperation, match="engine 'toy' cannot use an image of kind 'rootfs'"):
        engine._require(request("rootfs"))
    engine.reason = "no luck"
    with pytest.raises(EngineUnavailable, match="engine 'toy' cannot run here: no luck"):
        engine._require(request())
    with pytest.raises(ValueError, match="no such controls: \\['caps'\\]"):
        Toy(weaken=["caps"])
