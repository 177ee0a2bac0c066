"""The network of a sandbox that starts from a template: the template's own, or another where it can have one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sloplet import Network, Secret
from sloplet.controller import Snapshot
from sloplet.errors import SpecError
from sloplet.spec import SandboxSpec
from sloplet.timeline.origins import merged

pytestmark = pytest.mark.anyone


def _merged(base: dict[str, Any], asked: dict[str, Any], kind: str = "live", authority: str = "") -> SandboxSpec:
    made = replace(SandboxSpec.make(engine="fake", **base), authority=authority)
    template = Snapshot(
        id="s1", name="tmpl", role="template", kind=kind, sandbox="b1", sandbox_name=None, parent=None, engine="fake",
        created_at=0.0, bytes=0, spec=made,
    )  # fmt: skip
    return merged(made, SandboxSpec.make(template="tmpl", **asked), template)


def _secret(host: str = "x.org") -> Secret:
    return Secret("a", hosts=[host])


def test_the_templates_own() -> None:
    found = _merged({"network": Network(["x.org"]), "secrets": {"A": _secret()}}, {}, authority="ca1")
    assert found.network == Network(["x.org"]).spec
    assert [secret.name for secret in found.secrets] == ["A"]
    assert found.authority == "ca1", "programs of its memory trust that one"


def test_another_than_the_templates() -> None:
    found = _merged({"network": Network(["x.org"])}, {"network": Network(["y.org"])})
    assert found.network == Network(["y.org"]).spec


def test_none_is_something_to_ask_for() -> None:
    base: dict[str, Any] = {"network": Network(["x.org"], inspect=True), "secrets": {"A": _secret()}}
    for none in ("none", SandboxSpec().network):
        found = _merged(base, {"network": none}, authority="ca1")
        assert found.network == Network().spec, "nothing is reached"
        assert found.authority == "ca1"
    assert _merged({}, {"network": "none"}).network.mode == "none"
    assert _merged(base, {}).network.allow == ("x.org",)
    assert SandboxSpec.make(network="none") == SandboxSpec.make(), "without a template there is nothing else to have"
    spec = SandboxSpec.make(template="tmpl", network="none")
    assert SandboxSpec.from_dict(spec.to_dict()) == spec != SandboxSpec.make(template="tmpl")


def test_what_was_saved_running_without_one_cannot_have_one() -> None:
    with pytest.raises(SpecError, match="without a network"):
        _merged({}, {"network": Network(["y.org"])})
    found = _merged({}, {"network": Network(["y.org"])}, kind="disk")
    assert found.network == Network(["y.org"]).spec, "files alone start anew"


def test_secrets_are_merged_by_name() -> None:
    base = {"network": Network(), "secrets": {"A": _secret("a.org"), "B": _secret("b.org")}}
    found = _merged(base, {"secrets": {"B": _secret("new.org"), "C": _secret("c.org")}})
    assert {secret.name: secret.hosts for secret in found.secrets} == {
        "A": ("a.org",), "B": ("new.org",), "C": ("c.org",),
    }  # fmt: skip


@pytest.mark.parametrize("asked", [{"secrets": {"A": _secret()}}, {"links": {"db": "pg"}}])
def test_what_needs_a_network_is_checked_when_the_template_is_known(asked: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="need a network"):
        _merged({}, asked)
    assert _merged({"network": Network()}, asked).network == Network().spec


def test_what_leads_out_is_asked_for_each_time() -> None:
    found = _merged({"network": Network(), "ports": {80: 8080}, "links": {"db": "pg"}}, {"ports": [22]})
    assert found.ports == ((22, 0),)
    assert found.links == ()
