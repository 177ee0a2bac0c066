"""Finding and planning cgroups over made-up hierarchies, both versions."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

import pytest

from sloplet.engines import cgroups
from sloplet.engines.machine import parse_kernel
from sloplet.spec import Limits

pytestmark = pytest.mark.anyone

V1_MOUNTS = """\
30 20 0:25 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
31 20 0:26 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
32 20 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 20 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
V2_MOUNTS = "30 20 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
USER = "/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service"


class FakeFiles:
    """A tree of texts; ``ours`` are the paths (with all below) that may be written."""

    def __init__(self, texts: Mapping[str, str], ours: tuple[str, ...]) -> None:
        self.texts = dict(texts)
        self.ours = ours

    def read(self, path: str) -> str | None:
        return self.texts.get(path)

    def exists(self, path: str) -> bool:
        return path in self.texts or any(other.startswith(path + "/") for other in self.texts)

    def writable(self, path: str) -> bool:
        return any(path == own or path.startswith(own + "/") for own in self.ours) and (
            self.exists(path) or self.exists(posixpath.dirname(path))
        )


def v1(own: str = "/", ours: tuple[str, ...] = ("/sys/fs/cgroup",)) -> FakeFiles:
    lines = [f"4:memory:{own}", "3:pids:/", "2:cpu,cpuacct:/", "0::/"]
    texts = {"/proc/self/mountinfo": V1_MOUNTS, "/proc/self/cgroup": "\n".join(lines) + "\n"}
    for folder in (f"/sys/fs/cgroup/memory{own}".rstrip("/"), "/sys/fs/cgroup/pids", "/sys/fs/cgroup/cpu,cpuacct"):
        texts[folder + "/tasks"] = ""
    texts["/sys/fs/cgroup/unified/cgroup.controllers"] = ""
    return FakeFiles(texts, ours)


def v2(groups: Mapping[str, Mapping[str, str]], own: str, ours: tuple[str, ...]) -> FakeFiles:
    texts = {"/proc/self/mountinfo": V2_MOUNTS, "/proc/self/cgroup": f"0::{own}\n"}
    for folder, files in groups.items():
        for name, text in {"cgroup.procs": "", "cgroup.subtree_control": "", "cgroup.type": "domain", **files}.items():
            texts[f"{folder}/{name}"] = text
    return FakeFiles(texts, ours)


def test_hybrid_hosts_use_version_1_below_our_own_group() -> None:
    found = cgroups.find(v1("/jobs/7"), root=True, kernel=(6, 12))
    assert found.version == 1
    assert found.bases["memory"] == "/sys/fs/cgroup/memory/jobs/7"
    assert set(found.bases) == {"memory", "pids", "cpu", "cpuacct"}


def test_version_1_plan() -> None:
    plan = cgroups.plan(cgroups.find(v1(), root=True, kernel=(6, 12)), "abc", Limits(cpus=0.5, memory=2**26, pids=64))
    writes = dict(plan.writes)
    assert writes["/sys/fs/cgroup/memory/sloplet-abc/memory.limit_in_bytes"] == str(2**26)
    assert writes["/sys/fs/cgroup/cpu,cpuacct/sloplet-abc/cpu.cfs_quota_us"] == "50000"
    assert int(writes["/sys/fs/cgroup/pids/sloplet-abc/pids.max"]) == 64 + cgroups.PIDS_EXTRA
    assert len(plan.folders) == 3  # cpu and cpuacct are one folder here
    assert plan.oom == (("/sys/fs/cgroup/memory/sloplet-abc/memory.oom_control", "oom_kill"),)
    assert not plan.work


def test_version_1_plan_with_a_group_for_commands() -> None:
    found = cgroups.find(v1(), root=True, kernel=(6, 18))
    plan = cgroups.plan(found, "abc", Limits(cpus=0.5, memory=2**26, pids=64))
    writes, memory = dict(plan.writes), "/sys/fs/cgroup/memory/sloplet-abc"
    assert writes[memory + "/work/memory.limit_in_bytes"] == str(2**26)
    assert writes[memory + "/memory.limit_in_bytes"] == str(2**26 + cgroups.MEMORY_EXTRA)
    assert int(writes["/sys/fs/cgroup/pids/sloplet-abc/work/pids.max"]) == 64 + cgroups.PIDS_EXTRA
    assert int(writes["/sys/fs/cgroup/pids/sloplet-abc/pids.max"]) == 64 + 2 * cgroups.PIDS_EXTRA
    cpu = "/sys/fs/cgroup/cpu,cpuacct/sloplet-abc"
    assert writes[cpu + "/work/cpu.cfs_quota_us"] == "50000"
    assert writes[cpu + "/agent/cpu.cfs_quota_us"] == "100000"
    assert cpu + "/cpu.cfs_quota_us" not in writes  # what commands overdraw the agent would pay for
    assert set(plan.folders[3:]) == {cpu + "/agent", *(folder + "/work" for folder in plan.folders[:3])}  # outer first
    assert plan.nesting == memory + "/memory.use_hierarchy"
    assert set(plan.join) == {memory + "/tasks", "/sys/fs/cgroup/pids/sloplet-abc/tasks", cpu + "/agent/tasks"}
    assert memory + "/work/tasks" in plan.work
    assert {path for path, _ in plan.oom} == {memory + "/memory.oom_control", memory + "/work/memory.oom_control"}


@pytest.mark.parametrize(
    ("release", "options", "cheap"),
    [("5.15.0-91-generic", "rw", True), ("6.1.0-18-amd64", "rw", False), ("6.12.0", "rw,nsdelegate,favordynmods", True),
     ("6.18.2", "rw", True), ("7.0", "rw", True), ("", "rw", False), ("odd", "rw", False)],
)  # fmt: skip
def test_where_moving_a_process_is_cheap(release: str, options: str, cheap: bool) -> None:
    mounts = f"1 0 0:1 / / rw - ext4 /dev/a rw\n30 20 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 {options}\n"
    assert cgroups._moves_cheaply(parse_kernel(release), mounts) is cheap


def test_an_ordinary_user_of_version_1_has_none() -> None:
    found = cgroups.find(v1(ours=()), root=False, kernel=(6, 12))
    assert found.version == 0
    assert found.reason


def test_version_2_as_root_without_systemd() -> None:
    top = "/sys/fs/cgroup"
    files = v2({top: {"cgroup.controllers": "cpu memory pids", "cgroup.procs": "1\n2\n"}}, "/", (top,))
    del files.texts[top + "/cgroup.type"]  # only the very root lacks it
    found = cgroups.find(files, root=True, kernel=(6, 12))
    assert (found.version, found.enable) == (2, top + "/cgroup.subtree_control")


def test_version_2_delegated_takes_the_nearest_ancestor_that_passes_controllers_on() -> None:
    groups = {
        USER: {"cgroup.controllers": "memory pids", "cgroup.subtree_control": "memory pids"},
        USER + "/app.slice": {"cgroup.controllers": "memory pids", "cgroup.subtree_control": "memory pids"},
        USER + "/app.slice/run-1.scope": {"cgroup.controllers": "memory pids", "cgroup.procs": "77\n"},
    }
    own = USER.removeprefix("/sys/fs/cgroup") + "/app.slice/run-1.scope"
    found = cgroups.find(v2(groups, own, (USER,)), root=False, kernel=(6, 12))
    assert found.bases == {"memory": USER + "/app.slice", "pids": USER + "/app.slice"}
    assert not found.enforces("cpus")
    plan = cgroups.plan(found, "abc", Limits())
    assert plan.into == USER + "/app.slice/sloplet-abc"
    assert dict(plan.optional)[plan.into + "/memory.swap.max"] == "0"


def test_version_2_plan_with_a_group_for_commands() -> None:
    found = cgroups.Hierarchy(2, dict.fromkeys(("memory", "pids", "cpu"), "/cg"), split=True)
    plan = cgroups.plan(found, "abc", Limits(memory=2**26, pids=64, cpus=2))
    assert plan.folders == ("/cg/sloplet-abc", "/cg/sloplet-abc/agent", "/cg/sloplet-abc/work")
    assert plan.writes[0] == ("/cg/sloplet-abc/cgroup.subtree_control", "+memory +pids +cpu")
    writes = dict(plan.writes)
    assert writes["/cg/sloplet-abc/work/memory.max"] == str(2**26)
    assert writes["/cg/sloplet-abc/memory.max"] == str(2**26 + cgroups.MEMORY_EXTRA)
    assert writes["/cg/sloplet-abc/work/cpu.max"] == "200000 100000"
    assert writes["/cg/sloplet-abc/agent/cpu.max"] == "100000 100000"
    assert (plan.into, plan.work) == ("/cg/sloplet-abc/agent", ("/cg/sloplet-abc/work/cgroup.procs",))


def test_a_login_session_is_not_delegated() -> None:
    session = "/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope"
    groups = {session: {"cgroup.controllers": "memory pids", "cgroup.procs": "9\n"}}
    found = cgroups.find(v2(groups, session.removeprefix("/sys/fs/cgroup"), ()), root=False, kernel=(6, 12))
    assert found.version == 0
    assert "Delegate=yes" in found.reason


def test_a_container_whose_own_group_is_the_namespace_root_cannot_pass_controllers_on() -> None:
    top = "/sys/fs/cgroup"
    files = v2({top: {"cgroup.controllers": "cpu memory pids", "cgroup.procs": "1\n"}}, "/", (top,))
    assert cgroups.find(files, root=True, kernel=(6, 12)).version == 0


@pytest.mark.parametrize(
    ("root", "own", "expected"),
    [("/", "/a/b", "/m/a/b"), ("/docker/x", "/docker/x", "/m"), ("/docker/x", "/docker/x/y", "/m/y"), ("/", "/", "/m"),
     ("/", "/../..", "/m"), ("/docker/x", "/other", "/m")],
)  # fmt: skip
def test_our_own_folder_as_the_mount_shows_it(root: str, own: str, expected: str) -> None:
    assert cgroups._place((root, "/m"), own) == expected


def test_no_hierarchy_no_plan() -> None:
    plan = cgroups.plan(cgroups.Hierarchy(0), "abc", Limits())
    assert plan == cgroups.GroupPlan()
    assert cgroups.stats(plan).memory is None
