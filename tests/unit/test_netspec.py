"""What may be asked for of the network: every slip is an error that says what to write (N-02); JSON loses nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloplet import Network, Secret
from sloplet.errors import InvalidLimit, SpecError
from sloplet.netspec import LinkSpec, NetworkSpec, PortSpec, check_links, check_network, check_ports
from sloplet.network.presets import policy_of
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

CANARY = "canary-7f3a91c2"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"allow": None}, "not a list"), ({"allow": ""}, "not a list"), ({"allow": "pypi.org"}, "allow=['pypi.org'"),
        ({"allow": b"x"}, "not a list"), ({"allow": {"x.org": True}}, "not a list"), ({"allow": 5}, "not a list"),
        ({"deny": None}, "not a list"), ({"deny": "x.org"}, "deny=["), ({"allow": [None]}, "NoneType"),
        ({"allow": [""]}, "empty"), ({"allow": [" "]}, "empty"), ({"allow": [["x.org"]]}, "type list"),
        ({"allow": ["@githib"]}, "'@github'"), ({"allow": ["@"]}, "@package-indexes"),
        ({"allow": ["@package-index"]}, "'@package-indexes'"),
        ({"allow": ["http//x"]}, "'http://x'"),
        ({"allow": ["x.org"] * 2000 + [f"a{i}.org" for i in range(1001)]}, "1000"),
        ({"allowed": ["x.org"]}, "did you mean allow?"), ({"allow_hosts": ["x.org"]}, "did you mean allow?"),
        ({"denied": []}, "did you mean deny?"), ({"Allow": []}, "did you mean allow?"),
        ({"bandwith": 1}, "did you mean bandwidth?"),
        ({"passthru": []}, "did you mean passthrough?"), ({"qqq": 1}, "known are allow, deny"),
        ({"mode": "rules"}, "known are"),
        ({"passthrough": ["*"]}, "does not name a host"), ({"passthrough": "x.org"}, "passthrough=["),
        ({"passthrough": ["1.2.3.4"]}, "does not name a host"), ({"ask": 5}, "not a function"),
        ({"ask": "yes"}, "not a function"),
        ({"learn": "yes"}, "neither True nor False"), ({"learn": None}, "neither True nor False"),
        ({"learn": True, "ask": print}, "learn"),
        ({"inspect": 1}, "neither True nor False"), ({"connections": 0}, "1 to 1000"),
        ({"connections": 1001}, "1 to 1000"),
        ({"connections": True}, "1 to 1000"), ({"connections": "9"}, "1 to 1000"),
        ({"connections": None}, "1 to 1000"),
        ({"bandwidth": 0}, "above 0"), ({"bandwidth": "fast"}, "512m"), ({"bandwidth": 1}, "at least 1k"),
        ({"budget": -1}, "above 0"),
        ({"budget": True}, "536870912"), ({"on_budget": "stop"}, "refuse, pause, kill"),
        ({"on_budget": None}, "refuse, pause, kill"),
        ({"allow": ["GET https://x.org/a"], "passthrough": ["*.org"]}, "passthrough"),
        ({"allow": ["*"], "deny": ["POST *"], "passthrough": ["x.org"]}, "passthrough"),
    ],
    ids=lambda value: ascii(value)[:40],
)  # fmt: skip
def test_slips(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        Network(**options)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "network",
    [None, "", "all", "None", "none ", "host", True, 0, [], ["pypi.org"],
     ("none",), {"allowed": []}, {"mode": "learn"},
     NetworkSpec(mode="none", allow=("x.org",)), NetworkSpec(mode="all"),
     NetworkSpec(mode="rules", allow=("http//x",)), b"none"],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_no_networks(network: Any) -> None:
    with pytest.raises(SpecError):
        SandboxSpec.make(network=network)


def test_an_empty_list_reaches_nothing_and_a_star_every_public_name() -> None:
    for nothing in (Network(), Network([]), Network(allow=()), Network(allow=[], deny=[])):
        assert nothing.spec.mode == "rules"
        policy = policy_of(nothing.spec)
        assert policy.judge("pypi.org", 443).allow is False
        assert not policy.may_resolve("pypi.org")
    everything = policy_of(Network(["*"]).spec)
    assert everything.judge("pypi.org", 443).allow is True
    assert everything.judge("10.0.0.1", 443).allow is False
    assert everything.check_addresses("pypi.org", 443, ["10.0.0.1"])[0] == []


def test_none_is_none() -> None:
    assert SandboxSpec.make().network == NetworkSpec() == check_network("none")
    assert SandboxSpec.make().network.mode == "none"
    assert SandboxSpec.make(network=Network()).network != NetworkSpec()


def test_what_was_asked_for() -> None:
    def ask(_: object) -> bool:
        return True

    network = Network(
        ["X.org", "@GitHub", "x.org", "HEAD,GET https://b.org/a/*"], ["y.org"], ask=ask, inspect=True,
        passthrough=["*.bank.org"], connections=9, bandwidth="1m", budget="2g", on_budget="pause",
    )  # fmt: skip
    assert network.ask is ask
    assert network.spec == NetworkSpec(
        mode="rules", allow=("@github", "GET,HEAD https://b.org/a/*", "x.org"), deny=("y.org",),
        passthrough=("*.bank.org",),
        asks=True, inspect=True, connections=9, bandwidth=2**20, budget=2**31, on_budget="pause",
    )  # fmt: skip
    assert Network(learn=True).spec.mode == "learn"
    assert Network(ask=True).spec.asks
    assert Network(ask=True).ask is None
    assert repr(Network(["x.org"])) == "Network(allow=('x.org',))"


def test_order_and_spelling_do_not_matter() -> None:
    one = SandboxSpec.make(network=Network(["b.org", "A.org"], ["d.org", "c.org"]))
    assert one == SandboxSpec.make(network=Network(("a.org.", "b.org", "b.org"), {"c.org", "d.org"}))
    assert one == SandboxSpec.make(network={"allow": ["a.org", "b.org"], "deny": ["c.org", "d.org"]})
    assert one == SandboxSpec.make(network=one.network)


FULL = SandboxSpec.make(
    "dev",
    network=Network(["x.org", "@github"], ["y.org"], ask=True, inspect=True, bandwidth="1m", budget="1g"),
    secrets={"TOKEN": Secret(CANARY, hosts=["*.x.org", "x.org:8443"], where=("body", "headers")),
    "B": Secret(env="B", hosts=["b.org"])},
    ports={8000: 8080, 22: 0},
    links={"db": "pg:5432", "cache": "redis"},
)  # fmt: skip


@pytest.mark.parametrize("spec", [FULL, SandboxSpec.make(), SandboxSpec.make(network=Network(learn=True), ports=[80])])
def test_json_loses_nothing(spec: SandboxSpec) -> None:
    again = SandboxSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert [type(port) for port in again.ports] == [PortSpec] * len(spec.ports)
    assert [type(link) for link in again.links] == [LinkSpec] * len(spec.links)
    assert NetworkSpec.from_dict(json.loads(json.dumps(spec.network.to_dict()))) == spec.network


def test_specs_from_before_there_were_networks() -> None:
    data = SandboxSpec.make("old").to_dict()
    for later in ("secrets", "ports", "links", "authority"):
        del data[later]
    assert SandboxSpec.from_dict({**data, "network": "none"}) == SandboxSpec.make("old")


@pytest.mark.parametrize(
    "change",
    [
        {"network": "host"}, {"network": None}, {"network": {"allowed": []}}, {"network": {"mode": "all"}},
        {"network": []},
        {"network": {"mode": "rules", "allow": "x.org"}}, {"network": {"mode": "rules", "allow": [5]}},
        {"network": {"mode": "rules", "connections": "many"}}, {"network": {"mode": "rules", "asks": "yes"}},
        {"network": {"mode": "rules", "budget": 1.5}}, {"network": {"mode": "rules", "on_budget": "x"}},
        {"secrets": [{"name": "A"}]}, {"secrets": ["A"]}, {"secrets": [{**FULL.secrets[0].to_dict(), "value": "x"}]},
        {"ports": [[0, 1]]}, {"ports": [["80", 1]]}, {"ports": [[80, 70000]]}, {"links": [["db",
        "a b", 0]]}, {"links": [["", "a", 0]]},
    ],
    ids=lambda value: ascii(value)[:50],
)  # fmt: skip
def test_stored_nonsense(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        SandboxSpec.from_dict({**FULL.to_dict(), **change})


def test_a_stored_preset_that_is_gone_reaches_nothing() -> None:
    """A later version may not know it: the record can be read, no policy can be made of it."""
    spec = NetworkSpec.from_dict({**FULL.network.to_dict(), "allow": ["@gone", "x.org"]})
    with pytest.raises(SpecError, match="no preset '@gone'"):
        policy_of(spec)


def test_what_is_kept_closed_cannot_be_looked_into() -> None:
    """Also where a spec comes from elsewhere: no policy is made of a contradiction."""
    spec = NetworkSpec.from_dict({"mode": "rules", "allow": ["GET https://x.org/a"], "passthrough": ["x.org"]})
    with pytest.raises(SpecError, match="passthrough"):
        policy_of(spec)


# -- ports and links -----------------------------------------------------------------------------------


def test_ports() -> None:
    assert check_ports([8000, 22]) == ((22, 0), (8000, 0))
    assert check_ports({8000: 8080, 22: 0}) == ((22, 0), (8000, 8080))
    assert check_ports([(1, 2)]) == ((1, 2),)
    assert check_ports([]) == check_ports({}) == ()


@pytest.mark.parametrize(
    "ports",
    [8000,
     "8000", [0], [65536], [-1], ["80"], [True], [80, 80], {80: 70000}, {80: "x"}, {80: None}, {0: 80},
     {80: 90, 81: 90}, None,
     list(range(1, 100)), [(1, 2, 3)], [None]],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_no_ports(ports: Any) -> None:
    with pytest.raises(SpecError):
        check_ports(ports)


class Box:
    def __init__(self, name: str | None, id_: str | None) -> None:
        self.name, self.id = name, id_


def test_links() -> None:
    links = check_links({"DB": "pg:5432", "cache": Box("redis", "x"), "other": Box(None, "ab12"), "a.b": "c"})
    assert links == (("a.b", "c", 0), ("cache", "redis", 0), ("db", "pg", 5432), ("other", "ab12", 0))


@pytest.mark.parametrize(
    "links",
    ["db", ["db"], {"": "pg"}, {"a b": "pg"}, {"localhost": "pg"}, {"host.sloplet": "pg"}, {"1.2.3.4": "pg"},
     {"7": "pg"}, {5: "pg"},
     {"db": ""}, {"db": "a b"}, {"db": "pg:0"}, {"db": "pg:x"}, {"db": "pg:70000"}, {"db": "pg:1:2"}, {"db": None},
     {"db": Box(None, None)},
     {"db": 5}, {"*": "pg"}, {f"a{i}": "pg" for i in range(65)}],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_no_links(links: Any) -> None:
    with pytest.raises(SpecError):
        check_links(links)


values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.lists(st.text(max_size=5), max_size=3)
)


@given(values, st.sampled_from(["network", "secrets", "ports", "links"]))
def test_anything_is_a_spec_or_a_spec_error(value: Any, option: str) -> None:
    options = {"network": Network(), option: value}
    try:
        spec = SandboxSpec.make(**options)
    except SpecError:
        return
    assert SandboxSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@given(values, st.sampled_from(Network.KEYS))
def test_anything_is_a_network_or_a_spec_error(value: Any, option: str) -> None:
    try:
        network = Network(**{option: value})
    except (SpecError, InvalidLimit):
        return
    assert NetworkSpec.from_dict(json.loads(json.dumps(network.spec.to_dict()))) == network.spec
    policy_of(network.spec)
