"""The gvisor engine's pure parts: its plan, how runsc is found and called, what is said of failures, formats."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from test_jail import RANGE, ROOT, SINGLE, VIEW, only

from sloplet.engines import jail, oci, plan, shell, verbs
from sloplet.engines.base import ResolvedImage, StateFormat
from sloplet.engines.controls import decide_for_own_kernel, own_kernel_memory
from sloplet.engines.gvisor import GvisorEngine, cpu_features
from sloplet.engines.machine import Machine
from sloplet.engines.minder import describe
from sloplet.engines.plan import Attr, Do, OverlayFlag, PlanFlag, Set, Step
from sloplet.errors import ControlUnavailable
from sloplet.setup import runsc
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone


def build(machine: Machine, *, image: ResolvedImage | None = None, **spec: object) -> tuple[Step, ...]:
    made = SandboxSpec.make(**spec)  # type: ignore[arg-type]
    decided = decide_for_own_kernel(made, machine, "abc")
    chosen = image or ResolvedImage("host")
    request = jail.JailRequest("abc", made, chosen, "/place", holder=7, template="/t.img", id_range=3)
    return (
        *shell.first_steps(request, machine, decided),
        *shell.fixed_steps(chosen, machine, VIEW, "/opt/runsc", b"ELF"),
        *shell.last_steps(request, decided),
    )


class TestPlan:
    @pytest.mark.parametrize("machine", [ROOT, RANGE, SINGLE])
    def test_is_one_that_the_launcher_takes(self, machine: Machine) -> None:
        steps = build(machine)
        kinds = [int(item.kind) for item in steps]
        first = next(index for index, kind in enumerate(kinds) if kind >= 64)
        assert all(kind >= 64 for kind in kinds[first:]), "settings come first"
        assert plan.frame(plan.encode_steps(steps))
        assert int(only(steps, Set.FLAGS)[0][0]) & PlanFlag.MINDER
        slots = [int(args[0]) for args in only(steps, Do.TREE)]
        assert len(set(slots)) == len(slots)
        assert max(slots) < plan.MAX_SLOTS

    def test_nothing_is_written_on_the_hosts_folders(self) -> None:
        for machine in (ROOT, RANGE):
            for bits, *_ in only(build(machine), Do.OVERLAY):
                assert int(bits) & OverlayFlag.SHOWN
        for bits, *_ in only(build(ROOT), Do.OVERLAY):
            assert int(bits) & OverlayFlag.GUARDED, "root inside is nobody to the host's files"

    def test_the_image_is_closed_before_the_shell_is_made(self) -> None:
        steps = build(ROOT)
        kinds = [item.kind for item in steps]
        wrap = kinds.index(Do.WRAP)
        assert int(steps[wrap].args[0]) & Attr.RDONLY
        assert kinds[-1] is Do.PIVOT
        after = [item.args[-1] for item in steps[wrap:] if item.kind is Do.MOUNT]
        assert after == [*("dev/" + name for name in jail.DEVICES), "runsc"]
        assert Do.OVERLAY not in kinds[wrap:]

    def test_a_rootfs_is_an_overlay_of_its_own(self) -> None:
        steps = build(ROOT, image=ResolvedImage("rootfs", Path("/images/x"), owners_kept=True))
        assert [(args[0], args[2]) for args in only(steps, Do.OVERLAY)] == [(0, "")]

    def test_root_of_one_id(self) -> None:
        steps = build(SINGLE)
        assert only(steps, Set.UID_MAP) == [("0 1001 1\n",)]
        assert only(steps, Set.IDENTITY) == [(0, 0)]
        assert only(build(RANGE), Set.UID_MAP) == [("0 1001 1\n1 100000 65535\n",)]

    def test_the_hosts_limits_are_not_the_sandboxes(self) -> None:
        """What gVisor needs of the host is its own affair: only files and cores are said."""
        resources = {args[0] for args in only(build(RANGE, allow_weaker=True, pids=9, open_files=64), Set.RLIMIT)}
        assert resources == {7, 4}


class TestConfiguration:
    def test_shape_depends_on_limits_only(self) -> None:
        one, two = (oci.config(open_files=64, shared_memory=2**20, pids=40, agents_own=16) for _ in range(2))
        assert oci.encode(one) == oci.encode(two)
        assert one["process"]["args"] == [verbs.AGENT, "guest", "40", "16"]
        assert one["process"]["rlimits"] == [{"type": "RLIMIT_NOFILE", "soft": 64, "hard": 64}]
        assert one["root"]["readonly"] is False  # gVisor's own overlay takes the writes
        assert "CAP_NET_ADMIN" not in json.dumps(one)

    @pytest.mark.parametrize("words", [verbs.run_words(), verbs.restore_words(), verbs.checkpoint_words()])
    def test_words(self, words: list[str]) -> None:
        command = words[next(index for index, word in enumerate(words) if "=" not in word) :]
        assert command[0] == verbs.PROGRAM
        assert command[-1] == verbs.CONTAINER
        assert "--network=none" in command
        assert f"--overlay2=root:dir={verbs.FILESTORE}" in command

    def test_no_checkpoint_ends_the_sandbox(self) -> None:
        assert "--leave-running" in verbs.checkpoint_words()


class TestControls:
    def test_processes_are_counted_by_gvisor_everywhere(self) -> None:
        for machine in (ROOT, RANGE, SINGLE):
            pids = next(item for item in decide_for_own_kernel(SandboxSpec.make(pids=9), machine, "x").guarantees
                        if item.control == "pids")  # fmt: skip
            assert (pids.enforced, pids.value) == (True, "9")

    def test_memory_is_enforced_where_a_cgroup_stands_behind(self) -> None:
        made = SandboxSpec.make(memory="64m")
        decided = decide_for_own_kernel(made, ROOT, "x")
        assert decided.watched == 64 * 2**20
        memory = next(item for item in decided.guarantees if item.control == "memory")
        assert memory.enforced
        assert f"{own_kernel_memory(made.limits) >> 20} MiB" in memory.how
        with pytest.raises(ControlUnavailable):
            decide_for_own_kernel(made, RANGE, "x")
        weaker = decide_for_own_kernel(replace(made, allow_weaker=True), RANGE, "x")
        assert not next(item for item in weaker.guarantees if item.control == "memory").enforced
        assert weaker.watched == 64 * 2**20


class TestWords:
    @pytest.mark.parametrize(
        ("status", "words", "said"),
        [
            (0, "noise", ""),
            (256, '{"msg":"restore failed: no \\"x\\"\\ngoroutine 1","level":"error"}', 'restore failed: no "x"'),
            (256, '{"msg":"cut off in the mid', "cut off in the mid"),
            (256, "plain text\nmore", "plain text"),
            (256, "", "runsc failed without a word (exit code 1)"),
            (9, "", "runsc was killed by signal 9"),
            (-11, "", f"runsc was not run: {os.strerror(11)}"),
        ],
    )
    def test_describe(self, status: int, words: str, said: str) -> None:
        assert describe(status, words) == said

    def test_hostile_words_are_bounded(self) -> None:
        assert len(describe(256, "x" * 100_000)) <= 600
        assert describe(256, '{"msg":"\\ud800 \\u12"}')


class TestFinding:
    @pytest.fixture
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
        monkeypatch.delenv("SLOPLET_RUNSC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path / "none"))
        monkeypatch.setattr("sloplet.setup.tools._SYSTEM_PATH", "")
        monkeypatch.setattr(runsc, "_known", {})
        return Home(tmp_path / "home").open()

    def program(self, path: Path, version: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho run >> {path}.runs\necho 'runsc version {version}'\n")
        path.chmod(0o755)
        return path

    def test_order(self, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert runsc.find(home) is None
        own = self.program(home.path / "bin" / "runsc", "release-20240729.0")
        assert runsc.find(home) == runsc.Runsc(own, "release-20240729.0", 20240729)
        named = self.program(tmp_path / "named", "release-20250101.0")
        monkeypatch.setenv("SLOPLET_RUNSC", str(named))
        found = runsc.find(home)
        assert found is not None
        assert found.path == named

    def test_is_asked_once_and_again_when_it_changed(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        path = self.program(home.path / "bin" / "runsc", "0.0~20240729.0")
        runs = Path(f"{path}.runs")
        assert runsc.find(home) == runsc.find(home)
        monkeypatch.setattr(runsc, "_known", {})  # as another process
        found = runsc.find(home)
        assert found is not None
        assert found.good
        assert runs.read_text() == "run\n"
        self.program(path, "release-20221219.0 ")
        found = runsc.find(home)
        assert found is not None
        assert not found.good
        assert runs.read_text() == "run\nrun\n"

    def test_a_program_that_is_none(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLOPLET_RUNSC", "/nonexistent/runsc")
        found = runsc.find(home)
        assert found is not None
        assert not found.good

    def test_an_engine_without_it_says_so(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLOPLET_HOME", str(home.path))
        engine = GvisorEngine(facts=RANGE)
        probe = engine.probe()
        assert (probe.available, probe.fix) == (False, "sloplet setup gvisor")
        monkeypatch.setenv("SLOPLET_RUNSC", str(self.program(home.path / "old", "release-20221219.0")))
        assert "too old" in engine.probe().reason


def test_a_foreign_control_cannot_be_weakened() -> None:
    with pytest.raises(ValueError, match="seccomp"):
        GvisorEngine(weaken={"seccomp"})


class TestFormat:
    def test_features(self) -> None:
        text = "processor: 0\nflags\t\t: fpu avx2 vmx hypervisor sse4_2 avx rdrand ibrs\nflags : other\n"
        assert cpu_features(text) == ("avx", "avx2", "fpu", "rdrand", "sse4_2")
        assert cpu_features("") == ()

    def test_a_lesser_processor_is_refused(self) -> None:
        made = StateFormat("gvisor", "runsc release-1", "systrap", "x86_64", ("avx", "avx512f"))
        here = replace(made, cpu=("avx",))
        assert "avx512f" in here.refuses(made)
        assert made.refuses(here) == ""
        assert "version" in here.refuses(replace(here, version="runsc release-2"))
