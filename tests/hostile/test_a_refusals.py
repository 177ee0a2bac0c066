"""A-04 and A-08: names that are more than names, and controls that this machine cannot give."""

from __future__ import annotations

import os

import pytest
from hostile_kit import Target, runtime
from hypothesis import given
from hypothesis import strategies as st

from sloplet import Sandbox
from sloplet.engines.cgroups import Hierarchy
from sloplet.errors import (
    ControlUnavailable,
    EngineUnavailable,
    InvalidName,
    SlopletError,
    SpecError,
    UnknownEngine,
    UserNotFound,
)
from sloplet.spec import check_name

NAMES = (
    "../x",
    "a/b",
    ".",
    "..",
    "",
    " ",
    "a" * 64,
    "a" * 300,
    "🙂",
    "a\nb",
    "a\0b",
    "-rf",
    "--help",
    "$(id)",
    "`id`",
    "a;b",
    "a b",
    "a\x1b[31m",
    "é",
    "a%2e%2e",
    "\u202eevil",
    "a\\b",
    "'",
    '"',
    "*",
    "~",
    ".hidden",
    "a\t",
    "a\r",
    "ａ",
    "1" * 64,
)


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a04_names(name: str) -> None:
    with pytest.raises(InvalidName):
        Sandbox(name)
    home = runtime().home.path  # images hold files of anybody's names
    assert not [path for path in home.glob("**/*evil*") if path.relative_to(home).parts[0] != "images"]


@given(st.text(max_size=80))
def test_a04_any_text(name: str) -> None:
    """Whatever is accepted is harmless as a file name, an argument and a host name."""
    try:
        check_name(name)
    except InvalidName:
        return
    assert name.isascii()
    assert "/" not in name
    assert name[0] not in "-."
    assert 0 < len(name) < 64
    assert all(c.isalnum() or c in "_.-" for c in name)


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "x" * 63, "0"])
def test_a04_positive_control(name: str) -> None:
    check_name(name)


def test_a04_other_texts(target: Target, box: Sandbox) -> None:
    """Users, commands and variables: never a shell's business, always a typed error."""
    for user in ("../root", "no such", "root\n", "0;id", "99999999999", "-1", "agent:nobody:x"):
        if not target.can.users:
            continue
        with pytest.raises((UserNotFound, SpecError, SlopletError)):
            box.run("id", user=user)
    with pytest.raises(SlopletError):
        box.run(["no-such-command; id"])
    with pytest.raises(SlopletError):
        box.run(["true", "nul\0byte"])
    with pytest.raises(SlopletError):
        box.run("true", env={"A=B": "x"})
    assert box.run(["echo", "$(id) `id` ; id | id"]).stdout == "$(id) `id` ; id | id\n"


def test_a04_unknown_engine_and_image() -> None:
    with pytest.raises(UnknownEngine):
        Sandbox(engine="no-such").start()
    for engine in ("../x", "", "container; id", "Container", None):
        with pytest.raises((SpecError, UnknownEngine)):
            Sandbox(engine=engine).start()  # type: ignore[arg-type]
    for image in ("/", "/nonexistent", "/etc/passwd", "/proc", str(runtime().home.path), ""):
        with pytest.raises(SlopletError):
            Sandbox(image=image).start()


def _start(target: Target, **settings: object) -> None:
    with target.in_use():
        box = Sandbox(engine=target.name, **settings)  # type: ignore[arg-type]
        try:
            box.start()
        finally:
            box.kill()


NO_CGROUP = Hierarchy(0, reason="the test took it away")


@pytest.mark.parametrize(("control", "value"), [("memory", "64m"), ("cpus", 0.5)])
def test_a08_no_cgroup(target: Target, control: str, value: object) -> None:
    """What was asked for by name is enforced or refused, naming the control and the reason."""
    without = target.with_facts(cgroup=NO_CGROUP)
    with pytest.raises(ControlUnavailable) as caught:
        _start(without, **{control: value})
    assert control in caught.value.message
    assert caught.value.hint
    # with leave, it starts and tells the truth
    with without.box(allow_weaker=True, **{control: value}) as box:
        told = {item.control: item for item in box.guarantees()}
        assert not told[control].enforced
        assert told[control].how
        assert box.run("true").ok
    # unnamed, it is a default: as far as the machine allows, and reported
    with without.box() as box:
        assert not {item.control: item for item in box.guarantees()}["memory"].enforced


def test_a08_positive_control(target: Target) -> None:
    if not target.enforces("memory"):
        pytest.skip("no cgroup here")
    with target.box(memory="64m") as box:
        assert {item.control: item for item in box.guarantees()}["memory"].enforced


@pytest.mark.parametrize(
    "facts", [{"seccomp": False}, {"kernel": (4, 19), "landlock_abi": 0}, {"arch": "riscv64"}], ids=str
)
def test_a08_a_kernel_that_lacks_it(target: Target, facts: dict[str, object]) -> None:
    without = target.with_facts(**facts)
    assert not without.engine.probe().available
    with pytest.raises(EngineUnavailable) as caught:
        _start(without)
    assert caught.value.message
    with pytest.raises(EngineUnavailable):
        _start(without, allow_weaker=True)  # a weaker limit may be had for the asking, a missing boundary not


def test_a08_landlock_that_is_not_there(target: Target) -> None:
    """The only fence of the process rung: without it there is none. A second one elsewhere: it is left out."""
    without = target.with_facts(landlock_abi=0)
    if target.can.private_filesystem:
        with without.box() as box:
            assert box.run("true").ok
    else:
        with pytest.raises(EngineUnavailable, match="Landlock"):
            _start(without)


def test_a08_rungs_are_not_weakened_in_silence(target: Target) -> None:
    for least in ("gvisor", "microvm", "vm"):
        with pytest.raises(EngineUnavailable, match=least):
            _start(target, at_least=least)
        with pytest.raises(EngineUnavailable):
            Sandbox(at_least=least).start()


def test_a08_guarantees_match_what_is_enforced(target: Target, box: Sandbox) -> None:
    """guarantees() is checked against the kernel's own word."""
    told = {item.control: item for item in box.guarantees()}
    limits = box.run("ulimit -n").stdout.strip()
    assert told["open_files"].value == limits
    assert told["network"].enforced
    if told["memory"].enforced and os.geteuid() == 0:
        assert box.metrics().source["memory"] == "cgroup"
