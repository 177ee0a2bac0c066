"""Secrets as they are asked for: every slip is an error, and no value is ever shown or stored."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import traceback
from typing import Any

import pytest

from sloplet import Network, Secret
from sloplet.errors import SecretUnavailable, SpecError
from sloplet.secretspec import default_placeholder
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

CANARY = "canary-7f3a91c2"


@pytest.mark.parametrize(
    "options",
    [
        {}, {"value": "a",
        "env": "B"}, {"env": ""}, {"env": "A=B"}, {"command": ""}, {"command": []}, {"command": [""]}, {"command": 5},
        {"value": ""}, {"value": 5}, {"value": "a\nb"}, {"value": "a\r"}, {"value": "a\0"}, {"value": "x" * 70000},
        {"value": "a", "hosts": []}, {"value": "a", "hosts": "x.org"}, {"value": "a", "hosts": None}, {"value": "a",
        "hosts": ["*"]},
        {"value": "a", "hosts": ["10.0.0.1"]}, {"value": "a", "hosts": ["https://x.org"]}, {"value": "a",
        "where": []},
        {"value": "a", "where": ["cookies"]}, {"value": "a", "where": "all"}, {"value": "a", "placeholder": "short"},
        {"value": "a", "placeholder": "has a space in it"}, {"value": "a", "placeholder": "quo\"te-quo\"te"},
    ],
    ids=lambda value: ascii(value)[:40],
)  # fmt: skip
def test_no_secrets(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        Secret(**{"hosts": ["x.org"], **options})
    assert "xxxx" not in str(caught.value)


@pytest.mark.parametrize(
    "secrets",
    ["TOKEN", ["TOKEN"], {"TOKEN": CANARY}, {"TOKEN": None}, {"": Secret("a", hosts=["x.org"])},
     {"A-B": Secret("a", hosts=["x.org"])},
     {"1A": Secret("a", hosts=["x.org"])}, {5: Secret("a", hosts=["x.org"])},
     {f"A{i}": Secret("a", hosts=["x.org"]) for i in range(65)},
     {name: Secret("a", hosts=["x.org"], placeholder="the-same-placeholder") for name in "AB"},
     {"A": Secret("a", hosts=["x.org"], placeholder="abcdefghijklmnop"),
     "B": Secret("a", hosts=["x.org"], placeholder="defghijklmnop")}],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_no_mapping_of_secrets(secrets: Any) -> None:
    with pytest.raises(SpecError) as caught:
        SandboxSpec.make(network=Network(), secrets=secrets)
    assert CANARY not in str(caught.value)


def test_secrets_and_links_need_a_network() -> None:
    for options in ({"secrets": {"A": Secret("a", hosts=["x.org"])}}, {"links": {"db": "pg"}}):
        with pytest.raises(SpecError, match="need a network"):
            SandboxSpec.make(**options)  # type: ignore[arg-type]
        SandboxSpec.make(**options, network=Network())  # type: ignore[arg-type]
        SandboxSpec.make(**options, template="t")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="both a secret and a variable"):
        SandboxSpec.make(network=Network(), secrets={"A": Secret("a", hosts=["x.org"])}, env={"A": "b"})


def test_a_value_is_nowhere() -> None:
    secret = Secret(CANARY, hosts=["x.org"])
    spec = SandboxSpec.make(network=Network(), secrets={"TOKEN": secret})
    shown = [
        repr(secret),
        str(secret),
        repr({"a": secret}),
        repr(secret.spec("TOKEN")),
        repr(spec),
        json.dumps(spec.to_dict()),
    ]
    assert not [text for text in shown if CANARY in text]
    assert secret.read() == CANARY, "the control"
    assert "_value" not in dir(secret.spec("TOKEN"))
    assert CANARY.encode() not in pickle.dumps(spec)
    with pytest.raises(TypeError):
        vars(secret)
    assert copy.copy(secret).read() == CANARY


def test_placeholders_are_stable() -> None:
    one = Secret("a", hosts=["x.org"]).spec("GITHUB_TOKEN")
    assert one == Secret(env="OTHER", hosts=("X.org.",)).spec("GITHUB_TOKEN"), "where the value is does not matter"
    assert (
        one.placeholder == default_placeholder("GITHUB_TOKEN") == "sloplet-secret-github_token-" + one.placeholder[-16:]
    )
    assert default_placeholder("A") != default_placeholder("a"), "names differ by case too"
    assert Secret("a", hosts=["x.org"], placeholder="ghp_000000000000").spec("T").placeholder == "ghp_000000000000"


def test_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", CANARY)
    assert Secret(env="SECRET_OF_TEST", hosts=["x.org"]).read() == CANARY
    assert Secret(command=[sys.executable, "-c", f"print('{CANARY}')"], hosts=["x.org"]).read() == CANARY
    assert Secret(command=f"echo {CANARY}", hosts=["x.org"]).read() == CANARY
    monkeypatch.delenv("SECRET_OF_TEST")
    with pytest.raises(SecretUnavailable, match="SECRET_OF_TEST is not set"):
        Secret(env="SECRET_OF_TEST", hosts=["x.org"]).read()


@pytest.mark.parametrize(
    "command",
    [f"echo {CANARY}; echo {CANARY} >&2; exit 3", f"echo {CANARY}; echo {CANARY}", "true", "/nonexistent/program",
     f"printf '{CANARY}\\0x'", f"printf '{CANARY}\\377'", ["/nonexistent/program", CANARY]],
)  # fmt: skip
def test_what_cannot_be_read_is_not_shown(command: str | list[str]) -> None:
    secret = Secret(command=command, hosts=["x.org"])
    with pytest.raises(SecretUnavailable) as caught:
        secret.read()
    assert CANARY not in "".join(traceback.format_exception_only(caught.value))
    assert CANARY not in str(caught.value.__cause__)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert CANARY not in repr(secret)


def test_a_command_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloplet.secretspec.READ_SECONDS", 0.2)
    with pytest.raises(SecretUnavailable, match="too long") as caught:
        Secret(command=f"echo {CANARY}; exec sleep 60", hosts=["x.org"]).read()
    assert CANARY not in "".join(traceback.format_exception(caught.value, chain=True)).rpartition("raise ")[2]
    assert caught.value.__cause__ is None, "it would show the command, and what it had printed"
    assert caught.value.__suppress_context__
