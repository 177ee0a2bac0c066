"""Specs: every bad value is a typed error, good ones mean what they say, JSON loses nothing."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloplet.errors import InvalidLimit, InvalidName, SpecError
from sloplet.spec import Limits, SandboxSpec, check_env, check_name, parse_duration, parse_size

pytestmark = pytest.mark.anyone

BIG = 10**9 * 2**30

GOOD_SIZES = {
    512: 512,
    "512": 512,
    "8m": 8 * 2**20,
    "1.5g": 3 * 2**29,
    "2 GiB": 2 * 2**30,
    "1K": 1024,
    "1kb": 1024,
    " 3t ": 3 * 2**40,
    10.9: 10,
}
BAD_SIZES = [
    0,
    -1,
    0.0,
    -0.5,
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    None,
    [],
    {},
    b"1m",
    "",
    " ",
    "m",
    "-1m",
    "1e999",
    "1e3",
    "0",
    "0m",
    "nan",
    "inf",
    "1,5g",
    "1.g",
    "1..5g",
    "0x10",
    "1 m b",
    "1p",
    "9" * 400,
    "9" * 400 + "t",
    BIG,
    f"{10**9}g",
    10**400,
    "1m\n1m",
    "\0",
    "½g",
    complex(1),
    object(),
]


@pytest.mark.parametrize(("given_", "bytes_"), GOOD_SIZES.items())
def test_sizes(given_: Any, bytes_: int) -> None:
    assert parse_size(given_) == bytes_


@pytest.mark.parametrize("value", BAD_SIZES, ids=lambda value: repr(value)[:30])
@pytest.mark.parametrize("limit", ["memory", "disk"])
def test_bad_sizes(limit: str, value: Any) -> None:
    if value is None:
        assert Limits.make(**{limit: None}).explicit == frozenset(), "None is: not asked for"
        return
    with pytest.raises(InvalidLimit) as caught:
        Limits.make(**{limit: value})
    assert limit in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("digits", ["١", "５m"])
def test_only_ascii_digits(digits: str) -> None:
    with pytest.raises(InvalidLimit):
        parse_size(digits)
    with pytest.raises(InvalidLimit):
        parse_duration(digits)


@pytest.mark.parametrize(
    "value", [0, -1, 7, 1.5, "64", True, False, [], math.nan, 10**9, 10**400, b"9"], ids=lambda v: repr(v)[:20]
)
def test_bad_counts(value: Any) -> None:
    with pytest.raises(InvalidLimit):
        Limits.make(pids=value)
    with pytest.raises(InvalidLimit):
        Limits.make(open_files=value)


@pytest.mark.parametrize(
    "value",
    [0, -1, 0.001, math.nan, math.inf, True, "many", "", "1e999", [], 5000, 10**400, b"1"],
    ids=lambda v: repr(v)[:20],
)
def test_bad_cpus(value: Any) -> None:
    with pytest.raises(InvalidLimit):
        Limits.make(cpus=value)


def test_good_limits() -> None:
    limits = Limits.make(cpus=0.5, memory="64m", pids=100)
    assert (limits.cpus, limits.memory, limits.pids) == (0.5, 64 * 2**20, 100)
    assert limits.explicit == {"cpus", "memory", "pids"}
    assert Limits.make(cpus="2").cpus == 2.0
    assert (limits.disk, limits.open_files) == (Limits().disk, Limits().open_files)


@pytest.mark.parametrize("value", ["7m", 100, "8388607"])
def test_too_little_memory(value: Any) -> None:
    with pytest.raises(InvalidLimit, match="8m"):
        Limits.make(memory=value)


@pytest.mark.parametrize(
    ("given_", "seconds"), [(30, 30), ("90s", 90), ("5m", 300), ("1.5h", 5400), ("250ms", 0.25), ("1d", 86400)]
)
def test_durations(given_: Any, seconds: float) -> None:
    assert parse_duration(given_) == seconds


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        math.nan,
        math.inf,
        True,
        "",
        "s",
        "-5s",
        "1w",
        "1e9",
        "1 5",
        [],
        None,
        10**400,
        -(10**400),
        "9" * 400,
        10**12,
    ],
    ids=lambda v: repr(v)[:20],
)
def test_bad_durations(value: Any) -> None:
    with pytest.raises(InvalidLimit):
        parse_duration(value)


@pytest.mark.parametrize("name", ["a", "dev", "A.b_c-9", "0", "x" * 63])
def test_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "-a",
        "_a",
        ".a",
        "a/b",
        "/",
        "a b",
        "a\n",
        "\na",
        "a\0",
        "a\x1b[0m",
        "ünï",
        "x" * 64,
        "x" * 300,
        "a\\b",
        "a:b",
        "٣",
        7,
        None,
        b"a",
        ["a"],
        "a\u202e",
    ],
    ids=lambda v: ascii(v)[:20],
)
def test_bad_names(name: Any) -> None:
    with pytest.raises(InvalidName) as caught:
        check_name(name)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "options",
    [
        {"engine": ""},
        {"engine": "UPPER"},
        {"engine": "a/b"},
        {"engine": 7},
        {"engine": None},
        {"engine": "x" * 100},
        {"at_least": "nothing"},
        {"at_least": ""},
        {"at_least": 7},
        {"at_least": []},
        {"network": "all"},
        {"network": None},
        {"image": ""},
        {"image": "a\nb"},
        {"image": "x" * 5000},
        {"image": None},
        {"image": 7},
        {"workdir": ""},
        {"workdir": "relative"},
        {"workdir": "/a/../b"},
        {"workdir": "/a\0"},
        {"workdir": "/" + "x" * 5000},
        {"user": ""},
        {"user": "a\nb"},
        {"user": 0},
        {"user": "x" * 300},
        {"env": {"": "x"}},
        {"env": {"A=B": "x"}},
        {"env": {"A\0": "x"}},
        {"env": {"A": "\0"}},
        {"env": {"A": 1}},
        {"env": {1: "a"}},
        {"env": {"A": None}},
        {"env": "A=b"},
        {"env": ["A=b"]},
    ],
    ids=lambda v: ascii(v)[:30],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        SandboxSpec.make(**options)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 700


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError):
        SandboxSpec.make(memroy="1g")  # type: ignore[call-arg]


def test_json_loses_nothing() -> None:
    spec = SandboxSpec.make(
        "dev",
        memory="64m",
        cpus=1.5,
        ttl="2h",
        env={"A": "ü\udcff", "B": ""},
        workdir="/w",
        user="1000:1000",
        at_least="container",
    )
    assert SandboxSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert SandboxSpec.from_dict(json.loads(json.dumps(SandboxSpec.make().to_dict()))) == SandboxSpec.make()


def test_order_of_variables_does_not_matter() -> None:
    one, two = (SandboxSpec.make(env=env) for env in ({"A": "1", "B": "2"}, {"B": "2", "A": "1"}))
    assert one == two


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.integers())


@given(
    values,
    st.sampled_from(
        ["cpus", "memory", "disk", "pids", "open_files", "ttl", "engine", "image", "user", "workdir", "at_least"]
    ),
)
def test_anything_is_a_spec_or_a_spec_error(value: Any, option: str) -> None:
    try:
        spec = SandboxSpec.make(**{option: value})
    except SpecError:
        pass
    else:
        assert 0 < spec.limits.memory <= 2**50
        assert 0 < spec.limits.cpus <= 4096


@given(st.dictionaries(st.text(), st.text()))
def test_any_environment(env: dict[str, str]) -> None:
    try:
        assert dict(check_env(env)) == env
    except SpecError:
        pass


def test_settings_that_both_sides_know_are_left_out() -> None:
    import json

    from sloplet.cloudspec import CloudInitSpec
    from sloplet.controller import SandboxInfo

    asked = SandboxSpec.make(None, memory="64m", cloud_init=CloudInitSpec.of("#cloud-config\npassword: hunter2\n"))
    info = SandboxInfo("abcdefghijkl", None, "running", "fake", "process", "keeper", 0.0, None, "/", asked.recorded())
    sent = json.loads(json.dumps(info.to_dict(known=asked)))
    assert sent["spec"] is None
    assert SandboxInfo.from_dict(sent, known=asked.recorded()) == info
    assert "hunter2" not in repr(SandboxInfo.from_dict(sent, known=asked.recorded()).to_dict())
    other = SandboxSpec.make(None, memory="65m")
    assert SandboxInfo.from_dict(json.loads(json.dumps(info.to_dict(known=other))), known=other).spec == info.spec
