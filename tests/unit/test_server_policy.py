"""What keys and the operator allow: tables. Pure, but for the links of the host's that one test makes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sloplet.errors import EngineUnavailable, NotAllowed, SpecError, UnknownEngine, VolumeError
from sloplet.netspec import Network
from sloplet.server.keys import KeyLimits
from sloplet.server.policy import (
    EngineFact,
    Ground,
    check_copy,
    check_engine,
    limited_ttl,
    permitted,
    permitted_of_template,
)
from sloplet.server.settings import AllowedPath
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home
from sloplet.volumes.opening import open_folder
from sloplet.volumespec import Volume, VolumeSpec

pytestmark = pytest.mark.anyone

ENGINES = (
    EngineFact("gvisor", "gvisor", True),
    EngineFact("container", "container", True),
    EngineFact("process", "process", True),
    EngineFact("fake", "process", True),
)
GROUND = Ground("/srv/sloplet", ENGINES, real=lambda path: path)
NO_GVISOR = replace(GROUND, engines=(EngineFact("gvisor", "gvisor", False, "runsc is missing"), *ENGINES[1:]))
MIB = 2**20


def made(limits: KeyLimits | None = None, ground: Ground = GROUND, admin: bool = False, **asked: Any) -> SandboxSpec:
    return permitted(SandboxSpec.make(**asked), limits or KeyLimits(), ground, admin=admin)


# -- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "limits", "ground", "engine", "at_least"),
    [
        ({}, {}, GROUND, "auto", None),
        ({"engine": "process"}, {}, GROUND, "process", None),
        ({}, {"at_least": "container"}, GROUND, "auto", "container"),
        ({"at_least": "gvisor"}, {"at_least": "container"}, GROUND, "auto", "gvisor"),
        ({"at_least": "process"}, {"at_least": "container"}, GROUND, "auto", "container"),
        # "auto" stays where that is what it gives
        ({}, {"engines": ("gvisor",)}, GROUND, "auto", None),
        ({}, {"engines": ("process", "gvisor")}, GROUND, "auto", None),
        ({}, {"engines": ("container",)}, GROUND, "container", None),
        ({}, {"engines": ("process", "container")}, GROUND, "container", None),
        ({}, {"engines": ("gvisor", "process")}, NO_GVISOR, "process", None),
        ({}, {"engines": ("gvisor", "container")}, NO_GVISOR, "auto", None),
        (
            {"engine": "container"},
            {"engines": ("container",), "at_least": "container"},
            GROUND,
            "container",
            "container",
        ),
    ],
)
def test_which_engine(asked: Any, limits: Any, ground: Ground, engine: str, at_least: str | None) -> None:
    spec = made(KeyLimits(**limits), ground, **asked)
    assert (spec.engine, spec.at_least) == (engine, at_least)
    assert permitted(spec, KeyLimits(**limits), ground) == spec, "permitted again it is the same"


@pytest.mark.parametrize(
    ("asked", "limits", "ground", "error"),
    [
        ({"engine": "container"}, {"engines": ("gvisor",)}, GROUND, NotAllowed),
        ({"engine": "container"}, {"at_least": "gvisor"}, GROUND, NotAllowed),
        ({"engine": "fake"}, {}, GROUND, NotAllowed),
        ({"engine": "fake"}, {"engines": ("fake",)}, GROUND, NotAllowed),
        ({"engine": "nonsense"}, {}, GROUND, UnknownEngine),
        ({}, {"engines": ("gvisor",)}, NO_GVISOR, EngineUnavailable),
        ({"at_least": "gvisor"}, {"engines": ("container",)}, GROUND, EngineUnavailable),
        ({}, {"engines": ("container",), "at_least": "gvisor"}, GROUND, EngineUnavailable),
        ({}, {"engines": ("fake",)}, GROUND, EngineUnavailable),
    ],
)
def test_engines_that_are_refused(asked: Any, limits: Any, ground: Ground, error: type[Exception]) -> None:
    with pytest.raises(error):
        made(KeyLimits(**limits), ground, **asked)


def test_the_fake_one_only_where_the_operator_says_so() -> None:
    assert made(ground=replace(GROUND, fake=True), engine="fake").engine == "fake"
    with pytest.raises(NotAllowed):
        made(KeyLimits(at_least="container"), replace(GROUND, fake=True), engine="fake")


def test_what_is_copied_obeys_too() -> None:
    check_engine("gvisor", KeyLimits(engines=("gvisor",), at_least="gvisor"), GROUND)
    for limits in (KeyLimits(engines=("gvisor",)), KeyLimits(at_least="gvisor")):
        with pytest.raises(NotAllowed):
            check_engine("container", limits, GROUND)
    check_copy(SandboxSpec.make(ttl=60), "container", KeyLimits(max_ttl=60), GROUND, what="it")
    for ttl in (None, 61):
        with pytest.raises(NotAllowed):
            check_copy(SandboxSpec.make(ttl=ttl), "container", KeyLimits(max_ttl=60), GROUND, what="it")
    with pytest.raises(NotAllowed):
        check_copy(SandboxSpec.make(allow_weaker=True), "container", KeyLimits(max_memory=MIB), GROUND, what="it")


# -- amounts ----------------------------------------------------------------------------------------------------------


def test_time_to_live() -> None:
    limits = KeyLimits(max_ttl=3600)
    assert made(limits).ttl == 3600
    assert made(limits, ttl=60).ttl == 60
    assert made(limits, ttl=7200).ttl == 3600
    assert made().ttl is None
    assert [limited_ttl(ttl, limits) for ttl in (None, 0.0, 60.0, 7200.0)] == [3600, 0, 60, 3600]
    assert limited_ttl(None, KeyLimits()) is None
    assert (made(limits, on_ttl="pause").longest, made(on_ttl="pause").longest) == (3600, None)


def test_copies_of_what_sleeps_at_its_time_s_end() -> None:
    """When such a one wakes it has what its key may have: one that has more, or no limit, is not for this key."""
    limits = KeyLimits(max_ttl=60)
    spec = SandboxSpec.make(ttl=30, on_ttl="pause")
    check_copy(replace(spec, longest=60), "gvisor", limits, GROUND, what="it")
    check_copy(spec, "gvisor", KeyLimits(), GROUND, what="it")
    for longest in (None, 61):
        with pytest.raises(NotAllowed, match="without end"):
            check_copy(replace(spec, longest=longest), "gvisor", limits, GROUND, what="it")


def test_what_counts_is_enforced_and_defaults_fit() -> None:
    spec = made(KeyLimits(max_memory=256 * MIB, max_cpus=8, max_disk=2**40))
    assert (spec.limits.memory, spec.limits.cpus, spec.limits.disk) == (256 * MIB, 1.0, 2**30)
    assert spec.limits.explicit == {"memory", "cpus", "disk"}
    # what was asked for is not made less behind anybody's back: a quota refuses it
    assert made(KeyLimits(max_memory=256 * MIB), memory="1g").limits.memory == 2**30
    assert made().limits.explicit == frozenset()
    with pytest.raises(NotAllowed):
        made(KeyLimits(max_cpus=2), allow_weaker=True)
    assert made(allow_weaker=True).allow_weaker


def test_what_nothing_here_can_enforce_is_counted_only() -> None:
    """An ordinary user's server without cgroups: quotas hold there as far as the machine does."""
    weak = tuple(
        replace(fact, controls=frozenset({"disk"}) if fact.name == "container" else frozenset()) for fact in ENGINES
    )
    ground = replace(GROUND, engines=weak)
    spec = made(KeyLimits(max_memory=256 * MIB, max_disk=2**40), ground)
    assert spec.limits.memory == 256 * MIB
    assert spec.limits.explicit == {"disk"}, "the container engine can: it, or none"
    assert made(KeyLimits(max_memory=256 * MIB), ground, allow_weaker=True).allow_weaker
    assert (
        made(
            KeyLimits(max_cpus=1), replace(GROUND, fake=True, engines=(*ENGINES[:3], weak[3])), engine="fake"
        ).limits.explicit
        == frozenset()
    )


def test_ports_of_the_machine() -> None:
    assert made(ports=[8000]).ports
    with pytest.raises(NotAllowed):
        made(ports={8000: 7667})
    assert made(ports={8000: 7667}, admin=True).ports


# -- the host's files -------------------------------------------------------------------------------------------------

PATHS = replace(
    GROUND, allow_paths=(AllowedPath("/data"), AllowedPath("/data/out", writable=True), AllowedPath("/images"))
)


@pytest.mark.parametrize(
    ("source", "mode", "fine"),
    [
        ("cache", "rw", True),
        ("/data", "ro", True),
        ("/data/in", "copy", True),
        ("/data/in", "rw", False),
        ("/data/out/x", "rw", True),
        ("/data/out", "ro", True),
        ("/database", "ro", False),
        ("/dat", "ro", False),
        ("/", "ro", False),
        ("/etc", "ro", False),
        ("/srv", "ro", False),
    ],
)
def test_folders(source: str, mode: str, fine: bool) -> None:
    def volumes() -> tuple[VolumeSpec, ...]:
        return made(ground=PATHS, volumes={"/v": Volume(source, mode=mode)}).volumes

    if fine:
        assert volumes() == (VolumeSpec("/v", source, mode, nofollow=source.startswith("/")),)
    else:
        with pytest.raises(NotAllowed) as caught:
            volumes()
        assert "srv/sloplet" not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    ["/", "/proc", "/proc/1/root", "/sys/fs", "/dev", "/dev/shm", "/run", "/run/docker.sock", "/var", "/var/run/x",
     "/var/lib/docker/volumes", "/srv", "/srv/sloplet", "/srv/sloplet/tenants/other/volumes", "/x/docker.sock"],
)  # fmt: skip
def test_what_no_operator_can_allow(path: str) -> None:
    everything = replace(GROUND, allow_paths=(AllowedPath("/", writable=True), AllowedPath(path)))
    with pytest.raises(NotAllowed):
        made(ground=everything, volumes={"/v": Volume(path, mode="ro")})
    with pytest.raises(NotAllowed):
        made(ground=replace(GROUND, allow_paths=(AllowedPath("/"), AllowedPath(path))), image=f"dir:{path}")


@pytest.mark.parametrize(
    ("image", "becomes"),
    [
        ("host", "host"),
        ("debian:12", "debian:12"),
        ("registry.example:5000/team/app@sha256:" + "0" * 64, "registry.example:5000/team/app@sha256:" + "0" * 64),
        ("dir:/images/a", "dir:/images/a"),
        ("/images/a", "/images/a"),
        ("/images/a.tar.gz", "/images/a.tar.gz"),
        ("/data/rootfs", "/data/rootfs"),
        ("/data/out/rootfs", None),
        ("dir:/data/out", None),
        ("/etc", None),
        ("dir:/", None),
        ("dir:etc", None),
        ("dir:~", None),
        ("./x", None),
        ("../x", None),
        ("~/x", None),
        ("~", None),
        (".", None),
        ("..", None),
        ("x.tar", None),
        ("images/x.TAR.ZST", None),
    ],
)
def test_images(image: str, becomes: str | None) -> None:
    if becomes is None:
        with pytest.raises(NotAllowed):
            made(ground=PATHS, image=image)
    else:
        assert made(ground=PATHS, image=image).image == becomes


def test_links_are_resolved_once_and_for_all(tmp_path: Path) -> None:
    allowed, secret, home = tmp_path / "allowed", tmp_path / "secret", tmp_path / "home"
    for folder in (allowed / "in", secret, home):
        folder.mkdir(parents=True)
    (allowed / "link").symlink_to("in")
    (allowed / "away").symlink_to(secret)
    ground = replace(
        GROUND, home=str(home), real=os.path.realpath, allow_paths=(AllowedPath(str(allowed), writable=True),)
    )
    with pytest.raises(NotAllowed):
        made(ground=ground, volumes={"/v": str(allowed / "away")})
    (volume,) = made(ground=ground, volumes={"/v": str(allowed / "link")}).volumes
    assert volume == VolumeSpec("/v", str(allowed / "in"), "ro", nofollow=True)
    os.close(open_folder(volume, Home(home).open()))
    # A sandbox that can write there puts a link in the place of what was checked.
    (allowed / "in").rmdir()
    (allowed / "in").symlink_to(secret)
    with pytest.raises(VolumeError):
        open_folder(volume, Home(home))
    (allowed / "in").unlink()
    (allowed / "in").mkdir()
    (allowed / "in" / "deep").mkdir()
    (volume,) = made(ground=ground, volumes={"/v": str(allowed / "in" / "deep")}).volumes
    (allowed / "in").rename(allowed / "was")
    (allowed / "in").symlink_to(secret)
    (secret / "deep").mkdir()
    with pytest.raises(VolumeError):
        open_folder(volume, Home(home))
    os.close(open_folder(replace(volume, nofollow=False), Home(home)))  # control: followed, it would be the other


# -- the host's network -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "fine"),
    [
        ("pypi.org", True),
        ("*", True),
        ("*:*", True),
        ("@github", True),
        ("0.0.0.0/0", True),
        ("[::]/0", True),
        ("1.1.1.1", True),
        ("GET https://api.github.com/x", True),
        ("host.sloplet:7667", False),
        ("127.0.0.1:80", False),
        ("10.0.0.0/8", False),
        ("10.1.2.3:5432", False),
        ("192.168.1.0/24", False),
        ("169.254.169.254", False),
        ("100.64.0.0/10", False),
        ("[::1]:80", False),
        ("[fd00:ec2::254]", False),
        ("[fe80::]/10", False),
        ("93.184.216.34", False),  # the machine's own, says the table
    ],
)
def test_rules(rule: str, fine: bool) -> None:
    ground = replace(GROUND, own=lambda address: address == "93.184.216.34")
    if fine:
        assert made(ground=ground, network=Network(allow=[rule])).network.allow
        return
    with pytest.raises(NotAllowed):
        made(ground=ground, network=Network(allow=[rule]))
    made(ground=ground, network=Network(deny=[rule]))
    allowed = ("host.sloplet",) if "sloplet" in rule else ("0.0.0.0/0", "::/0")
    made(ground=replace(ground, allow_private=allowed), network=Network(allow=[rule]))


def test_private_networks_that_are_allowed() -> None:
    ground = replace(GROUND, allow_private=("10.7.0.0/16",))
    made(ground=ground, network=Network(allow=["10.7.1.0/24:5432", "10.7.0.1"]))
    for rule in ("10.0.0.0/8", "10.8.0.1", "host.sloplet:80"):
        with pytest.raises(NotAllowed):
            made(ground=ground, network=Network(allow=[rule]))


# -- templates --------------------------------------------------------------------------------------------------------


def of_template(
    base: SandboxSpec, engine: str, limits: KeyLimits, ground: Ground = GROUND, **asked: Any
) -> SandboxSpec:
    spec = SandboxSpec.make(template="warm", **asked)
    effective = replace(
        spec, limits=base.limits, network=base.network, volumes=spec.volumes or base.volumes, engine=engine
    )
    return permitted_of_template(spec, effective, engine, limits, ground)


def test_templates_obey_the_key() -> None:
    base = SandboxSpec.make(memory="4g", disk="3g")
    spec = of_template(base, "gvisor", KeyLimits(at_least="container", max_ttl=60, max_memory=2**30))
    assert (spec.limits.memory, spec.limits.disk) == (4 * 2**30, 3 * 2**30), "quotas count what it really has"
    assert (spec.at_least, spec.ttl, spec.engine) == ("container", 60, "auto")
    for limits in (KeyLimits(engines=("gvisor",)), KeyLimits(at_least="gvisor")):
        with pytest.raises(NotAllowed):
            of_template(base, "container", limits)
    with pytest.raises(NotAllowed):
        of_template(base, "fake", KeyLimits())


def test_folders_of_templates() -> None:
    def base(**more: Any) -> SandboxSpec:
        return replace(SandboxSpec.make(), volumes=(VolumeSpec("/v", **more),))

    of_template(base(source="cache"), "gvisor", KeyLimits())
    of_template(base(source=""), "gvisor", KeyLimits())
    of_template(base(source="/data/in", mode="ro", nofollow=True), "gvisor", KeyLimits(), PATHS)
    for volume in (
        {"source": "/data/in", "mode": "ro"},  # made on the machine itself
        {"source": "/data/in", "mode": "rw", "nofollow": True},
        {"source": "/etc", "mode": "ro", "nofollow": True},  # allowed once, not now
    ):
        with pytest.raises(NotAllowed):
            of_template(base(**volume), "gvisor", KeyLimits(), PATHS)
    # another volume in its place is the caller's to name, as everywhere
    of_template(base(source="/etc", mode="rw"), "gvisor", KeyLimits(), volumes={"/v": "cache"})


def test_networks_of_templates() -> None:
    base = SandboxSpec.make(network=Network(allow=["10.0.0.1"]))
    with pytest.raises(NotAllowed):
        of_template(base, "gvisor", KeyLimits())


def test_nonsense_paths_are_no_crash() -> None:
    with pytest.raises((SpecError, NotAllowed)):
        made(ground=replace(GROUND, real=os.path.realpath), image="dir:/\ud800")
