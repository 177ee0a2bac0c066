"""Headers and proxies as they are asked for: what is on record, what is a value, and what is refused."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from sloplet.errors import SpecError
from sloplet.headerspec import header_key, read_proxy, with_values
from sloplet.netspec import Network, NetworkSpec, check_network, check_openable
from sloplet.network.channel import Refused
from sloplet.network.injected import Injected

pytestmark = pytest.mark.anyone

VALUE = "v4lue-of-a-header"


def test_names_are_on_record_and_values_are_not() -> None:
    network = Network(
        headers={"API.example.com": {"X-Token": VALUE, "a-b": "2"}, "*.example.org:443": {"X-Token": "w"}},
        proxy="socks5://me:p%40ss@proxy.example.com:1080",
    )
    spec = network.spec
    assert spec.headers == (("*.example.org:443", ("X-Token",)), ("api.example.com", ("a-b", "X-Token")))
    assert spec.proxy == "socks5://me:@proxy.example.com:1080"
    assert network.values == {
        "x-token@api.example.com": VALUE,
        "a-b@api.example.com": "2",
        "x-token@*.example.org:443": "w",
        "@proxy": "p@ss",
    }
    told = json.dumps(spec.to_dict()) + repr(network) + repr(spec)
    assert "X-Token" in told
    assert VALUE not in told
    assert "p@ss" not in told
    assert "p%40ss" not in told
    assert NetworkSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert check_network(spec) == spec
    again = Network(allow=[], **with_values(spec.headers, spec.proxy, network.values))
    assert (again.spec, again.values) == (spec, network.values)
    assert Network(**with_values(spec.headers, spec.proxy, {})).values == {}


def test_a_value_may_come_later() -> None:
    for headers in ({"a.org": ["X-A"]}, {"a.org": {"X-A": None}}):
        network = Network(headers=headers)  # type: ignore[arg-type]
        assert network.spec.headers == (("a.org", ("X-A",)),)
        assert network.values == {}


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        (["a.org"], "not a mapping"),
        ({"a.org": "X"}, "not a mapping"),
        ({"a.org": {}}, "0 headers"),
        ({"1.2.3.4": {"X": "1"}}, "does not name a host"),
        ({"*": {"X": "1"}}, "does not name a host"),
        ({"a.org": {"X": "1"}, "A.org": {"Y": "1"}}, "two sets"),
        ({"a.org": {"X-A": "1", "x-a": "2"}}, "twice"),
        ({"a.org": ["X-A", "x-a"]}, "twice"),
        ({"a.org": {"X A": "1"}}, "not the name of a header"),
        ({"a.org": {"": "1"}}, "not the name of a header"),
        ({"a.org": {"X\r\nY": "1"}}, "not the name of a header"),
        ({"a.org": {"X:": "1"}}, "not the name of a header"),
        ({"a.org": {"Host": "b.org"}}, "cannot be set"),
        ({"a.org": {"content-LENGTH": "0"}}, "cannot be set"),
        ({"a.org": {"Transfer-Encoding": "chunked"}}, "cannot be set"),
        ({"a.org": {"Connection": "close"}}, "cannot be set"),
        ({"a.org": {"Upgrade": "h2c"}}, "cannot be set"),
        ({"a.org": {"X": "s3cret\r\nHost: b.org"}}, "control characters"),
        ({"a.org": {"X": "s3cret\n"}}, "control characters"),
        ({"a.org": {"X": "s3cret\0"}}, "control characters"),
        ({"a.org": {"X": " s3cret"}}, "spaces around"),
        ({"a.org": {"X": "s3cret" * 2000}}, "longer than"),
        ({"a.org": {"X": 7}}, "not text"),
        ({"a.org": {"X": "s3cret\ud800"}}, "not text"),
        ({"a.org": {f"X-{n}": "1" for n in range(33)}}, "33 headers"),
        ({f"a{n}.org": {"X": "1"} for n in range(65)}, "65 hosts"),
    ],
)
def test_headers_that_are_refused(headers: Any, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        Network(headers=headers)
    assert says in str(caught.value)
    assert "s3cret" not in str(caught.value) + repr(caught.value.__context__)


@pytest.mark.parametrize(
    ("proxy", "says"),
    [
        ("http://s3cret:s3cret@a.org:80", "only SOCKS5"),
        ("socks5://a.org", "lacks its host or its port"),
        ("socks5://:1080", "lacks its host or its port"),
        ("socks5://a.org:99999", "not a proxy's address"),
        ("socks5://a.org:1080/s3cret", "only SOCKS5"),
        ("socks5://:s3cret@a.org:1080", "no user"),
        ("socks5://u:" + "s3cret" * 50 + "@a.org:1080", "longer than 255"),
        ("socks5://localhost:1080", "loopback"),
        ("socks5://a..org:1080", "not a host name"),
        (7, "of type int"),
    ],
)
def test_proxies_that_are_refused(proxy: Any, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        Network(proxy=proxy)
    assert says in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_proxies_in_one_spelling() -> None:
    assert Network(proxy="socks5h://A.org:1080/").spec.proxy == "socks5://a.org:1080"
    assert Network(proxy="socks5://u@[fd00::0:1]:1").spec.proxy == "socks5://u@[fd00::1]:1"
    spec = read_proxy(Network(proxy="socks5://a%3Ab:c@0x7f.1:1").spec.proxy)
    assert (spec.host, spec.port, spec.user, spec.password) == ("127.0.0.1", 1, "a:b", True)
    assert Network(proxy="").spec == Network(proxy=None).spec == Network().spec


def test_a_record_keeps_no_password() -> None:
    found = NetworkSpec.from_dict({"mode": "rules", "proxy": "socks5://user:s3cret@a.org:1"})
    assert found == Network(proxy="socks5://user:other@a.org:1").spec
    assert "s3cret" not in repr(found) + repr(found.to_dict())
    assert read_proxy(found.proxy).password, "it is known that there is one"
    assert NetworkSpec.from_dict(found.to_dict()) == found


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(SpecError, match="by_address"):
        Network(by_address=True, ask=True)
    with pytest.raises(SpecError, match="by_address"):
        Network(by_address=True, learn=True)
    with pytest.raises(SpecError, match="inspect='always'"):
        Network(inspect="always")
    spec = Network(headers={"*.a.org": {"X": "1"}}).spec
    check_openable(spec, (), ["db"])
    with pytest.raises(SpecError, match="link"):
        check_openable(Network(headers={"db": {"X": "1"}}).spec, (), ["db"])
    with pytest.raises(SpecError, match="passthrough"):
        check_openable(Network(headers={"b.a.org": {"X": "1"}}, passthrough=["*.a.org"]).spec, ())


def test_the_host_that_is_named_more_exactly_decides() -> None:
    network = Network(
        headers={
            "*.a.org": {"X-A": "wide", "X-B": "wide"},
            "*.b.a.org": {"X-A": "narrow"},
            "c.b.a.org": {"x-a": "exact"},
            "d.org:8443": {"X-A": "port"},
        }
    )
    table = Injected(network.spec)
    table.set({key: value for key, value in network.values.items() if not key.startswith("x-b")})
    with pytest.raises(Refused, match="X-B"):
        table.fields("z.a.org", 443)
    table.check(network.values)
    table.set(network.values)
    assert dict(table.fields("z.a.org", 443)) == {b"X-A": b"wide", b"X-B": b"wide"}
    assert dict(table.fields("z.b.a.org", 443)) == {b"X-A": b"narrow", b"X-B": b"wide"}
    assert dict(table.fields("c.b.a.org", 80)) == {b"x-a": b"exact", b"X-B": b"wide"}
    assert table.fields("a.org", 443) == table.fields("d.org", 443) == []
    assert table.fields("d.org", 8443) == [(b"X-A", b"port")]
    assert table.at("d.org", 8443)
    assert not table.at("d.org", 443)


def test_values_stay_with_what_they_are_for() -> None:
    network = Network(headers={"a.org": {"X-A": "1", "X-B": "2"}}, proxy="socks5://u:p@a.org:1")
    table = Injected(network.spec)
    table.set(network.values)
    other = table.under(Network(headers={"a.org": ["x-a"], "b.org": ["X-B"]}, proxy="socks5://u:@b.org:1").spec)
    assert other.values() == {header_key("a.org", "X-A"): "1"}, "a password is not for another proxy"
    assert table.under(network.spec).password() == "p"
    with pytest.raises(Refused, match="password"):
        other.password()
    with pytest.raises(SpecError, match="no such header"):
        other.check({"x-b@a.org": "1"})
    with pytest.raises(SpecError, match="no password"):
        Injected(Network().spec).check({"@proxy": "p"})
    with pytest.raises(SpecError, match="control"):
        other.check({"x-a@a.org": "1\r\n2"})
    with pytest.raises(SpecError, match="placeholder"):
        other.check({"x-a@a.org": "a sloplet-secret-1 b"}, ["sloplet-secret-1"])
    with pytest.raises(TypeError):
        pickle.dumps(table)
    assert "1" not in repr(other).replace("@", "")
    table.set({"x-a@a.org": None})
    with pytest.raises(Refused, match="X-A"):
        table.fields("a.org", 443)
    table.clear()
    assert table.values() == {}
