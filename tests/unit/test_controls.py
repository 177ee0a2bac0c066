"""What is enforced, by what, and what is refused."""

from __future__ import annotations

import resource

import pytest

from sloplet.engines.cgroups import Hierarchy
from sloplet.engines.controls import Scratch, decide
from sloplet.engines.machine import Machine
from sloplet.errors import ControlUnavailable, InvalidLimit
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

ALL = Hierarchy(2, {"memory": "/cg", "pids": "/cg", "cpu": "/cg"})
NONE = Hierarchy(0, reason="no cgroup is writable")


def enforced(machine: Machine, *, namespaces: bool = True, **spec: object) -> dict[str, bool]:
    made = SandboxSpec.make(**spec)  # type: ignore[arg-type]
    return {item.control: item.enforced for item in decide(made, machine, "id", namespaces=namespaces).guarantees}


def test_with_cgroups_everything_is_enforced() -> None:
    assert all(enforced(Machine(cgroup=ALL, open_files=4096)).values())


def test_without_cgroups_the_substitutes_are_honest() -> None:
    honest = {"cpus": True, "memory": False, "disk": True, "pids": True, "open_files": True}
    assert enforced(Machine(cgroup=NONE)) == honest
    decided = decide(SandboxSpec.make(), Machine(cgroup=NONE), "id", namespaces=True)
    limits = dict(decided.rlimits)
    assert limits[resource.RLIMIT_DATA] == 512 * 2**20
    assert limits[resource.RLIMIT_NPROC] > 512
    assert len(decided.pinned) == 1
    assert decided.watched == 512 * 2**20
    how = next(item.how for item in decided.guarantees if item.control == "memory")
    assert "RLIMIT_DATA" in how
    assert "watchdog" in how
    assert "no cgroup is writable" in how


def test_a_memory_cgroup_needs_no_watchdog() -> None:
    assert decide(SandboxSpec.make(), Machine(cgroup=ALL), "id", namespaces=True).watched is None


@pytest.mark.parametrize(
    ("machine", "namespaces", "spec"),
    [
        (Machine(cgroup=NONE), True, {"memory": "64m"}),
        (Machine(cgroup=NONE), True, {"cpus": 0.5}),
        (Machine(cgroup=NONE, kernel=(5, 13)), True, {"pids": 64}),
        (Machine(cgroup=NONE), False, {"pids": 64}),
        (Machine(cgroup=ALL), False, {"disk": "1g"}),
        (Machine(cgroup=ALL, open_files=64), True, {"open_files": 128}),
    ],
)
def test_what_was_named_is_enforced_or_refused(machine: Machine, namespaces: bool, spec: dict[str, object]) -> None:
    with pytest.raises(ControlUnavailable) as caught:
        enforced(machine, namespaces=namespaces, **spec)
    assert next(iter(spec)) in str(caught.value)
    assert caught.value.hint
    assert enforced(machine, namespaces=namespaces, allow_weaker=True, **spec)[next(iter(spec))] is False


def test_limits_above_the_host() -> None:
    machine = Machine(cgroup=ALL, memory=2**30, cpus=(0, 1))
    with pytest.raises(InvalidLimit, match="memory"):
        enforced(machine, memory="2g")
    with pytest.raises(InvalidLimit, match="cpus"):
        enforced(machine, cpus=3)
    small = Machine(cgroup=ALL, memory=2**28, cpus=(0,))
    assert decide(SandboxSpec.make(), small, "id", namespaces=True).limits.memory == 2**28


def test_a_default_disk_in_memory_leaves_room_for_programs() -> None:
    decided = decide(SandboxSpec.make(memory="64m"), Machine(cgroup=ALL), "id", namespaces=True)
    assert (decided.scratch.kind, decided.scratch.size) == ("tmpfs", 32 * 2**20)


def test_a_named_disk_is_given_in_full() -> None:
    root = Machine(cgroup=ALL, root=True, drops=True, loop=True, mkfs="/sbin/mkfs.ext4", kernel=(6, 1))
    for machine, kind in ((root, "ext4"), (Machine(cgroup=ALL), "tmpfs")):
        decided = decide(SandboxSpec.make(disk="3g"), machine, "id", namespaces=True)
        assert (decided.scratch.kind, decided.scratch.size) == (kind, 3 * 2**30)
    assert decide(SandboxSpec.make(), root, "id", namespaces=True).scratch == Scratch("ext4", 2**30)
    # too small for an ext4 filesystem with its tables
    assert decide(SandboxSpec.make(disk="4m"), root, "id", namespaces=True).scratch.kind == "tmpfs"
