"""Presets: the file is readable, sorted into good rules, and names of presets are checked."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest

from sloplet.errors import SpecError
from sloplet.netspec import Network, NetworkSpec
from sloplet.network import presets as module
from sloplet.network.indexes import Indexes
from sloplet.network.presets import PACKAGE_INDEXES, check_rule, expand, policy_of, presets
from sloplet.network.rules import parse_rule

pytestmark = pytest.mark.anyone

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policy.md"


@pytest.mark.parametrize("name", sorted(presets()))
def test_each(name: str) -> None:
    preset = presets()[name]
    assert preset.about
    assert preset.rules
    rules = [parse_rule(text) for text in preset.rules]
    assert [rule.text for rule in rules] == list(preset.rules), "canonical"
    assert len(set(preset.rules)) == len(rules)
    for rule in rules:
        assert not rule.of_requests, "a preset opens no TLS"
        assert rule.host.net is None
        assert rule.host.name.count(".") >= 1, "no wildcard over a whole top-level domain"
        assert all(span in ((80, 80), (443, 443)) for span in rule.host.ports.spans)
    assert f"`@{name}`" in PAGE.read_text()


def test_the_file_has_nothing_else() -> None:
    tables = tomllib.loads(resources.files("sloplet.network").joinpath("presets.toml").read_text())
    assert all(set(table) == {"about", "rules"} for table in tables.values())
    assert {"github", "llm-apis", "python", "node"} <= set(tables)
    assert PACKAGE_INDEXES not in tables


def test_what_they_allow() -> None:
    policy = policy_of(Network(["@github", "@llm-apis", "@python"], ["gist.githubusercontent.com", "@debian"]).spec)
    for name in ("github.com", "api.github.com", "raw.githubusercontent.com", "api.anthropic.com", "pypi.org"):
        assert policy.judge(name, 443).allow is True
        assert policy.judge(name, 22).allow is False
    for name in ("gist.githubusercontent.com", "githubusercontent.com", "evilgithub.com", "registry.npmjs.org"):
        assert policy.judge(name, 443).allow is False
    assert policy.judge("api.github.com", 443).rule == "https://api.github.com (@github)"
    assert "'https://api.github.com (@github)'" in policy.judge("api.github.com", 443).reason
    assert policy.judge("deb.debian.org", 22).rule == "deb.debian.org (@debian)"


@pytest.mark.parametrize(("text", "canonical"), [("@github", "@github"), ("@GitHub ", "@github"), ("X.org", "x.org")])
def test_canonical(text: str, canonical: str) -> None:
    assert check_rule(text) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [("@", "known are"), ("@gitub", "'@github'"), ("@github:22", "'@github'"), ("@github @python", "'@python'"),
     ("@../x", "known are")],
)  # fmt: skip
def test_unknown(text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_rule(text)
    assert says in str(caught.value)
    with pytest.raises(SpecError):
        policy_of(NetworkSpec(mode="rules", allow=(text,)))


def test_package_indexes_are_asked_for_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def here() -> Indexes:
        asked.append(1)
        return Indexes((parse_rule("mirror.corp:8080", source="@package-indexes", local=True),), ())

    monkeypatch.setattr("sloplet.network.indexes.package_indexes", here)
    assert module.check_rule("@package-indexes") == "@package-indexes"
    expand(["@github"])
    assert not asked
    policy = policy_of(Network(["@package-indexes"]).spec)
    assert asked
    assert policy.judge("mirror.corp", 8080).rule == "mirror.corp:8080 (@package-indexes)"
    assert policy.check_addresses("mirror.corp", 8080, ["10.0.0.1"])[0] == ["10.0.0.1"]
    denied = policy_of(Network(["*:*"], ["@package-indexes"]).spec)
    assert denied.judge("mirror.corp", 8080).allow is False
    assert denied.judge("mirror.corp", 8081).allow is True
