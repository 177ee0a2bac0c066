"""The way out in plans: only where it was asked for, at the right place, and refused where it cannot be had. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_jail import RANGE, ROOT, SINGLE, VIEW, only

from sloplet.engines import container, jail, oci, process, shell, verbs
from sloplet.engines.base import ResolvedImage, StartRequest, wants_egress
from sloplet.engines.container import ContainerEngine
from sloplet.engines.controls import decide, decide_for_own_kernel
from sloplet.engines.fake import FakeEngine
from sloplet.engines.machine import Machine
from sloplet.engines.plan import Do, Set, Step, encode_steps, step
from sloplet.engines.process import ProcessEngine
from sloplet.errors import ControlUnavailable
from sloplet.netspec import Network
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

MACHINES = pytest.mark.parametrize("machine", [ROOT, RANGE, SINGLE], ids=["root", "range", "single"])
NETWORKED = SandboxSpec.make(network=Network())


def asked(*, egress: bool) -> jail.JailRequest:
    return jail.JailRequest("abc", SandboxSpec(), ResolvedImage("host"), "/place", 7, template="/t.img", egress=egress)


def container_plan(machine: Machine, *, egress: bool) -> tuple[Step, ...]:
    decided = decide(SandboxSpec(), machine, "abc", namespaces=True)
    return jail.container_plan(asked(egress=egress), machine, VIEW, decided)


def gvisor_plan(machine: Machine, *, egress: bool) -> tuple[Step, ...]:
    request, decided = asked(egress=egress), decide_for_own_kernel(SandboxSpec(), machine, "abc")
    return (*shell.first_steps(request, machine, decided), *shell.last_steps(request, decided))


@MACHINES
def test_a_container_gets_one_more_step(machine: Machine) -> None:
    without, steps = container_plan(machine, egress=False), container_plan(machine, egress=True)
    assert Do.EGRESS not in {item.kind for item in without}
    at = steps.index(step(Do.EGRESS))
    assert steps[:at] + steps[at + 1 :] == without, "and nothing else is another"
    assert step(Do.LOOPBACK) in steps[:at]
    assert step(Do.PIVOT) in steps[at:]


@MACHINES
def test_gvisors_jail_has_the_addresses_before_runsc_runs(machine: Machine) -> None:
    without, steps = gvisor_plan(machine, egress=False), gvisor_plan(machine, egress=True)
    kinds = [item.kind for item in steps]
    assert not {Do.ADDRESSES, Do.LOOPBACK, Do.EGRESS} & {item.kind for item in without}
    assert kinds.index(Do.LOOPBACK) < kinds.index(Do.ADDRESSES) < kinds.index(Do.PIVOT)
    assert Do.EGRESS not in kinds, "gVisor's network is not the jail's"
    assert ("proc/sys/net",) in only(steps, Do.MASK)
    [[before]], [[now]] = only(without, Set.CAPS), only(steps, Set.CAPS)
    assert int(now) & ~int(before) == 1 << 13, "NET_RAW, to hand on"


def configuration(*, egress: bool) -> dict[str, Any]:
    return oci.config(open_files=64, shared_memory=2**20, pids=40, agents_own=16, egress=egress)


def test_only_gvisors_agent_may_make_a_raw_socket() -> None:
    without, found = configuration(egress=False), configuration(egress=True)
    assert "NET" not in json.dumps(without["process"])
    assert without["process"]["args"][1:] == ["guest", "40", "16"]
    assert found["process"]["args"][1:] == ["guest", "40", "16", "egress"]
    for name in ("bounding", "effective", "permitted"):
        more = {*found["process"]["capabilities"][name]} - {*without["process"]["capabilities"][name]}
        assert more == {"CAP_NET_RAW"}
    assert found["process"]["capabilities"]["ambient"] == found["process"]["capabilities"]["inheritable"] == []
    assert [each["type"] for each in found["linux"]["namespaces"]] == [
        each["type"] for each in without["linux"]["namespaces"]
    ]
    assert not any("path" in each for each in without["linux"]["namespaces"])


@pytest.mark.parametrize("words", [verbs.run_words, verbs.restore_words, verbs.checkpoint_words])
def test_runscs_flags(words: Callable[..., list[str]]) -> None:
    """A sandbox without a network is started as ever; one with it in the same way by every verb."""
    without, found = words(), words(egress=True)
    assert "--network=none" in without
    assert not {"--net-raw", "--network=sandbox"} & {*without}
    assert {*found} - {*without} == {"--network=sandbox", "--net-raw"}
    assert words(egress=False) == without


def test_asking_for_a_network() -> None:
    assert not wants_egress(SandboxSpec())
    assert wants_egress(NETWORKED), "an empty one too: it may be opened later"
    assert jail.hello(asked(egress=True), ROOT, VIEW).egress
    assert not jail.hello(asked(egress=False), ROOT, VIEW).egress
    assert shell.hello(asked(egress=True), ROOT, VIEW, 2**20).egress


def request() -> StartRequest:
    return StartRequest("abc", NETWORKED, ResolvedImage("host"), Path("/nowhere"))


NO_TPROXY = "egress: nft's tproxy: No such file or directory: nf_tables with nft_tproxy is needed"


def kernel_without(monkeypatch: pytest.MonkeyPatch, *words: tuple[bytes, str]) -> list[bytes]:
    """Plans that were tried. Each pair: a part of a plan, and what the launcher says to plans with it."""
    tried = list[bytes]()

    def try_plan(plan: bytes, **_: object) -> str:
        tried.append(plan)
        return next((said for part, said in words if part in plan), "")

    monkeypatch.setattr(container, "try_plan", try_plan)
    return tried


STEP = encode_steps([step(Do.EGRESS)])


def test_a_kernel_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = kernel_without(monkeypatch)
    probe = ContainerEngine(facts=replace(ROOT, seccomp=True)).probe()
    assert probe.available
    assert (probe.capabilities.egress, probe.capabilities.ports, probe.capabilities.no_egress) == (True, True, "")
    assert [STEP in plan for plan in tried] == [True], "one jail is enough to know"


def test_a_kernel_without_tproxy_runs_sandboxes_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = kernel_without(monkeypatch, (STEP, NO_TPROXY))
    engine = ContainerEngine(facts=replace(ROOT, seccomp=True))
    probe = engine.probe()
    assert [STEP in plan for plan in tried] == [True, False]
    assert probe.available
    assert not probe.capabilities.egress
    assert any(NO_TPROXY in line for line in probe.details), "doctor says why"
    with pytest.raises(ControlUnavailable, match="tproxy") as refused:
        engine.check(request())
    assert "gvisor" in str(refused.value.hint)
    assert engine.check(replace(request(), spec=SandboxSpec()))


def test_a_machine_that_can_do_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_without(monkeypatch, (b"", "namespaces: clone: Operation not permitted"))
    probe = ContainerEngine(facts=replace(ROOT, seccomp=True)).probe()
    assert not probe.available
    assert "clone" in probe.reason


def test_engines_without_a_network_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "try_plan", lambda *_: "")
    engine = ProcessEngine(facts=replace(ROOT, seccomp=True))
    assert engine.probe().available
    for each in (engine, FakeEngine()):
        able = each.probe().capabilities
        assert (able.egress, able.ports) == (False, False)
        with pytest.raises(ControlUnavailable) as refused:
            each.check(request())
        assert "container" in str(refused.value.hint)
