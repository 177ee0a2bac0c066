"""doctor and setup: pure functions over facts."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sloplet.doctor import LADDER, Proof, make_report
from sloplet.engines.base import Probe
from sloplet.setup import apt, release
from sloplet.setup.facts import Facts, cpu_virtualises, gather
from sloplet.setup.perform import perform
from sloplet.setup.plan import Step, plan
from sloplet.setup.tools import runsc_date

BARE = Facts(
    manager="apt-get", user="ann", kernel="6.1.0", landlock_abi=2, seccomp=True, agent="/x/agent",
    home="/h", home_free=2**34, cgroup_reason="nothing is delegated",
)  # fmt: skip
FULL = replace(
    BARE, subids=65536, uidmap_helpers=True, cgroup_version=2, cgroup_controllers=("cpu", "memory", "pids"),
    kvm_cpu=True, kvm_device=True, kvm_usable=True, runsc="/h/bin/runsc", runsc_date=20240729,
    qemu="/usr/bin/qemu-system-x86_64", qemu_version="QEMU emulator version 7.2", vm_kernel="/h/kernel/vmlinuz",
)  # fmt: skip
CONTAINER = Probe("container", "container", True, details=("a detail",))
PROCESS = Probe("process", "process", False, "no Landlock", "use a newer kernel")


def test_every_rung_is_told_and_unbuilt_engines_say_so() -> None:
    report = make_report(
        BARE, {"container": CONTAINER, "process": PROCESS}, {"container": Proof(10, 2, 3)}, "container"
    )
    assert tuple(rung.engine for rung in report.rungs) == LADDER
    states = {rung.engine: rung.state for rung in report.rungs}
    assert states == {
        "process": "missing", "container": "works", "gvisor": "later",
        "microvm": "later", "docker": "later", "vm": "later",
    }  # fmt: skip
    gvisor = next(rung for rung in report.rungs if rung.engine == "gvisor")
    assert "later release" in gvisor.reason
    assert gvisor.fix == "sloplet setup gvisor"
    assert report.ok
    assert report.to_dict()["rungs"][1]["proof"]["ok"]


def test_an_engine_that_fails_its_proof_does_not_count() -> None:
    report = make_report(BARE, {"container": CONTAINER}, {"container": Proof(error="it broke")})
    assert not report.ok
    assert next(rung for rung in report.rungs if rung.engine == "container").reason == "it broke"


def test_a_tool_that_is_here_is_said_to_be_here() -> None:
    report = make_report(FULL, {}, {})
    reasons = {rung.engine: rung.reason for rung in report.rungs}
    assert "runsc of 20240729 is here" in reasons["gvisor"]
    assert "QEMU emulator" in reasons["microvm"]
    assert all(check.state == "ok" for check in report.checks)


@pytest.mark.parametrize(
    ("change", "check", "state", "fix"),
    [
        (
            {"user_namespaces": "unshare: no", "userns_clone_off": True},
            "user namespaces",
            "failed",
            "unprivileged_userns_clone=1",
        ),
        ({"user_namespaces": "unshare: no", "userns_apparmor": True}, "user namespaces", "failed", "apparmor_restrict"),
        ({"user_namespaces": "unshare: no", "userns_limit": 0}, "user namespaces", "failed", "max_user_namespaces"),
        ({"uidmap_helpers": False}, "subordinate ids", "missing", "sudo apt-get install"),
        ({"subids": 0}, "subordinate ids", "missing", "usermod --add-subuids"),
        ({"overlay": "mount: no"}, "overlayfs", "missing", "5.11"),
        ({"cgroup_controllers": ()}, "cgroups", "missing", "Delegate=yes"),
        ({"cgroup_controllers": ("memory",)}, "cgroups", "missing", "Delegate=yes"),
        ({"landlock_abi": 0}, "landlock", "missing", "lsm=landlock"),
        ({"seccomp": False}, "seccomp", "failed", "CONFIG_SECCOMP_FILTER"),
        ({"kvm_cpu": False}, "kvm", "missing", "firmware"),
        ({"kvm_device": False}, "kvm", "missing", "modprobe"),
        ({"kvm_usable": False}, "kvm", "missing", "usermod -aG kvm ann"),
        ({"home_problem": "it is read-only"}, "home", "failed", "SLOPLET_HOME"),
        ({"home_free": 2**20}, "home", "missing", "free some space"),
        ({"agent_problem": "it is gone"}, "agent", "failed", "pip install"),
    ],
)
def test_what_is_missing_comes_with_the_command_that_fixes_it(
    change: dict[str, object], check: str, state: str, fix: str
) -> None:
    report = make_report(replace(FULL, **change), {}, {})  # type: ignore[arg-type]
    found = next(item for item in report.checks if item.name == check)
    assert found.state == state
    assert fix in found.fix
    assert found.why


def test_kvm_is_judged_by_the_cpu_and_not_by_the_device() -> None:
    assert cpu_virtualises("flags\t\t: fpu vmx sse\n", "x86_64")
    assert cpu_virtualises("flags : fpu svm\n", "x86_64")
    assert not cpu_virtualises("flags : fpu hypervisor vmxish\n", "x86_64")
    assert not cpu_virtualises("", "x86_64")
    report = make_report(replace(FULL, kvm_cpu=False), {}, {})
    assert "/dev/kvm is there, but cannot run guests" in next(c.found for c in report.checks if c.name == "kvm")


def test_gathering_facts_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOPLET_HOME", str(tmp_path / "home"))
    facts = gather()
    assert facts.kernel
    assert facts.home == str(tmp_path / "home")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("runsc version release-20240729.0\nspec: 1.1.0\n", 20240729),
        ("runsc version 0.0~20221219.0", 20221219),
        ("0.0~20240729.0-4+b7", 20240729),
        ("runsc version VERSION_MISSING", None),
        ("", None),
    ],
)
def test_dates_of_runsc(text: str, date: int | None) -> None:
    assert runsc_date(text) == date


def kinds(steps: list[Step]) -> dict[str, str]:
    return {step.name: step.kind for step in steps}


def test_plans() -> None:
    assert kinds(plan("gvisor", BARE)) == {"runsc": "fetch"}
    assert kinds(plan("gvisor", FULL)) == {"runsc": "done"}
    old = replace(BARE, runsc="/usr/bin/runsc", runsc_date=20221219)
    assert kinds(plan("gvisor", old)) == {"runsc": "fetch"}
    assert "too old" in plan("gvisor", old)[0].title
    assert kinds(plan("gvisor", replace(BARE, arch="riscv64"))) == {"runsc": "manual"}
    assert kinds(plan("container", BARE)) == {"uidmap": "manual", "subids": "manual"}
    assert kinds(plan("container", replace(BARE, root=True))) == {"root": "done"}
    assert kinds(plan("microvm", replace(BARE, root=True))) == {"qemu": "package", "kernel": "fetch"}
    assert kinds(plan("microvm", FULL)) == {"qemu": "done", "kernel": "done"}
    assert {step.target for step in plan("all", BARE)} == {"container", "gvisor", "microvm"}


@pytest.mark.parametrize(
    ("manager", "command"),
    [
        ("apt-get", "sudo apt-get install -y --no-install-recommends --no-remove qemu-system-x86"),
        ("dnf", "sudo dnf install -y qemu-system-x86-core"),
        ("pacman", "sudo pacman -S --noconfirm qemu-system-x86"),
        ("zypper", "sudo zypper install -y qemu-x86"),
        ("apk", "sudo apk add qemu-system-x86_64"),
        ("", ""),
    ],
)
def test_packages_by_distribution(manager: str, command: str) -> None:
    assert plan("microvm", replace(BARE, manager=manager))[0].command == command


def test_mirrors_are_read_from_both_formats_without_comments_and_security() -> None:
    sources = """
    # deb https://old.example/debian stable main
    deb [signed-by=/k.gpg arch=amd64] https://mirror.example/debian/ bookworm main
    deb https://mirror.example/debian-security bookworm-security main
    Types: deb
    URIs: http://second.example/pub/debian
    Suites: bookworm
    """
    assert apt.debian_mirrors(sources) == ["https://mirror.example/debian", "http://second.example/pub/debian"]


def test_private_apt_keeps_to_its_folder(tmp_path: Path) -> None:
    text = apt.configuration(tmp_path, "amd64")
    for setting in ("Dir::State ", "Dir::Cache ", "Dir::Etc::sourcelist", "Dir::State::status"):
        assert f'{setting.strip()} "{tmp_path}' in text
    assert "#clear APT::Update::Post-Invoke;" in text
    assert 'AllowInsecureRepositories "false"' in text


def test_a_step_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    step = Step("microvm", "qemu", "package", "QEMU", "sh -c 'echo E: no such package; exit 100'")
    outcome = perform(step, BARE, said.append)
    assert (outcome.state, outcome.message) == ("failed", "E: no such package")
    assert perform(Step("x", "y", "manual", "by hand"), BARE, said.append).state == "manual"


def test_a_release_that_does_not_match_its_checksum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "https://r.example/x86_64/runsc": b"evil",
        "https://r.example/x86_64/runsc.sha512": b"0" * 128 + b"  runsc\n",
    }
    monkeypatch.setattr(release, "_get", lambda url, most: answers[url])
    with pytest.raises(release.DownloadFailed, match="SHA-512"):
        release.fetch_runsc("x86_64", tmp_path / "runsc", lambda text: None, base="https://r.example")
    assert list(tmp_path.iterdir()) == []


def test_a_release_that_matches_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    program = b"#!/bin/sh\necho runsc version release-20250101.0\n"
    digest = hashlib.sha512(program).hexdigest().encode()
    answers = {
        "https://r.example/x86_64/runsc": program,
        "https://r.example/x86_64/runsc.sha512": digest + b"  runsc\n",
    }
    monkeypatch.setattr(release, "_get", lambda url, most: answers[url])
    release.fetch_runsc("x86_64", tmp_path / "runsc", lambda text: None, base="https://r.example")
    said = subprocess.run([tmp_path / "runsc"], capture_output=True, text=True, check=True).stdout
    assert runsc_date(said) == 20250101
