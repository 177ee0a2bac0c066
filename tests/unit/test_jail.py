"""From a spec and machine facts to the launcher's plan: pure, so every machine is tested on every machine."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from sloplet.engines import jail, plan
from sloplet.engines.base import ResolvedImage
from sloplet.engines.cgroups import Hierarchy
from sloplet.engines.controls import decide
from sloplet.engines.machine import FIRST_RANGE, Machine
from sloplet.engines.plan import AllowFlag, Attr, Do, OverlayFlag, PlanFlag, Seccomp, Set, Step, TreeFlag
from sloplet.images.host import HostView
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

V1 = Hierarchy(1, {"memory": "/cg/memory", "pids": "/cg/pids", "cpu": "/cg/cpu"})
ROOT = Machine(kernel=(6, 8), uid=0, gid=0, user="root", root=True, drops=True, landlock_abi=6, loop=True,
               mkfs="/sbin/mkfs.ext4", proc_masked=("keys", "kcore"), proc_readonly=("sys",), cgroup=V1)  # fmt: skip
RANGE = Machine(uid=1001, gid=1002, user="ann", subuid=(100000, 65536), subgid=(200000, 65536), landlock_abi=6,
                newuidmap="/usr/bin/newuidmap", newgidmap="/usr/bin/newgidmap")  # fmt: skip
SINGLE = Machine(uid=1001, gid=1002, user="ann", landlock_abi=4)
VIEW = HostView(
    entries={"/usr": "dir", "/bin": "-> usr/bin", "/lib": "-> usr/lib", "/bin/bash": "file", "/etc/ld.so.cache": "file",
             "/etc/services": "file", "/etc/os-release": "-> ../usr/lib/os-release", "/etc/ssl/certs": "dir"},
    small={"/etc/services": b"http 80/tcp\n"},
    prefixes=("/home/ann/.pyenv/versions/3.12", "/home/ann/app/.venv"),
    private=("/home/ann", "/home", "/root"),
)  # fmt: skip


def build(
    machine: Machine, *, image: ResolvedImage | None = None, weaken: frozenset[str] = frozenset(), **spec: object
) -> tuple[Step, ...]:
    made = SandboxSpec.make(**spec)  # type: ignore[arg-type]
    decided = decide(made, machine, "abc", namespaces=True)
    request = jail.JailRequest(
        "abc", made, image or ResolvedImage("host"), "/place", holder=7, template="/t.img", id_range=3, weaken=weaken
    )
    return jail.container_plan(request, machine, VIEW, decided)


def only(steps: tuple[Step, ...], kind: Set | Do) -> list[tuple[int | str | bytes, ...]]:
    return [item.args for item in steps if item.kind is kind]


def test_root_inside_is_never_root_outside() -> None:
    steps = build(ROOT)
    expected = f"0 {FIRST_RANGE + 3 * 65536} 65536\n"
    assert only(steps, Set.UID_MAP) == [(expected,)]
    assert only(steps, Set.GID_MAP) == [(expected,)]


def test_a_user_with_subordinate_ids_maps_himself_and_them() -> None:
    steps = build(RANGE)
    assert only(steps, Set.UID_MAP) == [("0 1001 1\n1 100000 65535\n",)]
    assert only(steps, Set.GID_MAP) == [("0 1002 1\n1 200000 65535\n",)]
    assert only(steps, Set.MAP_HELPERS) == [("/usr/bin/newuidmap", "/usr/bin/newgidmap")]


def test_a_user_without_subordinate_ids_is_the_agent() -> None:
    steps = build(SINGLE)
    assert only(steps, Set.UID_MAP) == [("1000 1001 1\n",)]
    assert only(steps, Set.IDENTITY) == [(1000, 1000)]
    flags = PlanFlag(only(steps, Set.FLAGS)[0][0])
    assert PlanFlag.DENY_SETGROUPS in flags
    assert PlanFlag.HOST_MOUNTS not in flags


@pytest.mark.parametrize("machine", [ROOT, RANGE, SINGLE], ids=["root", "range", "single"])
def test_every_plan_ends_with_the_pivot_and_fits_the_launcher(machine: Machine) -> None:
    steps = build(machine)
    assert steps[-1].kind is Do.PIVOT
    slots = [args[0] for args in only(steps, Do.TREE)]
    assert len(set(slots)) == len(slots)
    assert max(slots) < plan.MAX_SLOTS  # type: ignore[type-var]
    assert only(steps, Set.SECCOMP)


@pytest.mark.parametrize("machine", [ROOT, RANGE, SINGLE], ids=["root", "range", "single"])
def test_nothing_private_is_mounted(machine: Machine) -> None:
    sources = [str(args[3]) for args in only(build(machine), Do.TREE)]
    for source in sources:
        assert source.startswith(("/usr", "/dev/", "/etc/", "/home/ann/.pyenv/", "/home/ann/app/.venv")), source
    assert not [source for source in sources if source in ("/", "/etc", "/home", "/home/ann", "/dev")]


@pytest.mark.parametrize("machine", [ROOT, RANGE, SINGLE], ids=["root", "range", "single"])
def test_every_mount_is_nosuid_and_all_but_devices_nodev(machine: Machine) -> None:
    for args in only(build(machine), Do.TREE):
        attributes = Attr(args[2])
        assert Attr.NOSUID in attributes
        assert Attr.NODEV in attributes or str(args[3]).startswith("/dev/")
        assert Attr.RDONLY in attributes or str(args[3]).startswith("/dev/")


def test_layers_with_true_owners_are_guarded() -> None:
    overlays = only(build(ROOT), Do.OVERLAY)
    shown = {"usr", "etc/ssl/certs", "home/ann/.pyenv/versions/3.12", "home/ann/app/.venv"}
    assert {args[2] for args in overlays} == shown
    assert all(OverlayFlag.GUARDED in OverlayFlag(args[0]) for args in overlays)
    assert not any(OverlayFlag(args[0]) for args in only(build(SINGLE), Do.OVERLAY))


def test_mounts_below_usr() -> None:
    view = replace(VIEW, mount_points=("/", "/usr/local"), prefixes=())
    made = SandboxSpec.make()
    for machine, expected in ((ROOT, "overlay"), (SINGLE, "bind")):
        request = jail.JailRequest("abc", made, ResolvedImage("host"), "/place", 7)
        steps = jail.container_plan(request, machine, view, decide(made, machine, "abc", namespaces=True))
        trees = {str(args[3]): TreeFlag(args[1]) for args in only(steps, Do.TREE)}
        if expected == "overlay":
            assert "/usr/local" in trees
        else:
            assert TreeFlag.RECURSIVE in trees["/usr"]
            assert "usr" not in {args[2] for args in only(steps, Do.OVERLAY)}


def test_masks_and_their_weakening() -> None:
    assert only(build(ROOT), Do.MASK) == [("proc/keys",), ("proc/kcore",)]
    assert only(build(ROOT), Do.READONLY) == [("proc/sys",)]
    weak = build(ROOT, weaken=frozenset({"masks", "seccomp", "landlock"}))
    assert not only(weak, Do.MASK)
    assert not only(weak, Set.SECCOMP)
    assert not only(weak, Set.LANDLOCK)


def test_a_rootfs_is_one_overlay_with_its_own_names() -> None:
    steps = build(ROOT, image=ResolvedImage("rootfs", Path("/images/x/rootfs")))
    assert [args[2] for args in only(steps, Do.OVERLAY)] == [""]
    assert {args[1] for args in only(steps, Do.FILE)} == {"etc/hosts", "etc/hostname", "etc/resolv.conf"}


def test_a_disk_is_a_disk_for_root_and_memory_for_others() -> None:
    assert only(build(ROOT, disk="2g"), Do.EXT4) == [(0, Attr.NOSUID | Attr.NODEV | Attr.NOATIME, "/t.img", "/place")]
    assert only(build(ROOT), Do.EXT4)
    assert "size=2147483648" in str(only(build(SINGLE, disk="2g"), Do.TMPFS)[0][2])


def test_cpus_without_a_cgroup_are_pinned_and_stay_so() -> None:
    steps = build(SINGLE)
    assert only(steps, Set.CPUS)
    assert Seccomp.NO_AFFINITY in Seccomp(only(steps, Set.SECCOMP)[0][0])
    assert not only(build(ROOT), Set.CPUS)


def test_the_hostname_is_bounded() -> None:
    spec = SandboxSpec.make("a" * 63)
    assert len(jail.hostname(spec, "id")) <= 63
    assert jail.hostname(SandboxSpec.make("my_box"), "id") == "my-box"
    assert jail.hostname(SandboxSpec.make("my.box"), "id") == "my-box"  # no domain to search names in


def test_encoding_is_what_the_launcher_reads() -> None:
    body = plan.encode_steps([plan.step(Set.FLAGS, 5), plan.step(Do.FILE, 0o644, "etc/x", b"a\0b")])
    framed = plan.frame(body)
    assert struct.unpack_from("<II", framed) == (plan.MAGIC, len(framed))
    kind, size = struct.unpack_from("<II", framed, 8)
    assert (kind, size) == (Set.FLAGS, 8)
    kind, size = struct.unpack_from("<II", framed, 24)
    assert kind == Do.FILE
    assert framed[32:].endswith(b"\x03\0\0\0a\0b\0")


def test_numbers_are_the_launchers() -> None:
    header = (Path(__file__).parents[2] / "agent" / "launch.h").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"\b([A-Z0-9_]+) = (\d+)\b", header)}
    for prefix, enum in (("SET_", Set), ("STEP_", Do), ("PLAN_", PlanFlag), ("TREE_", TreeFlag), ("SECCOMP_", Seccomp),
                         ("OVERLAY_", OverlayFlag), ("ALLOW_", AllowFlag), ("END_", plan.End)):  # fmt: skip
        for member in enum:
            assert numbers[prefix + str(member.name)] == member.value
        named = {name for name in numbers if name.startswith(prefix)}
        assert named == {prefix + str(member.name) for member in enum}
    assert f"MAX_SLOTS {plan.MAX_SLOTS}" in header
    assert f"{plan.MAGIC:#x}".upper()[2:] in header.upper()
