"""N-04, N-05: metadata, the host, its neighbours: refused however they are written. N-06: the address that was
checked is the one that is dialled. N-11: IPv6 is no way round."""

from __future__ import annotations

import pytest
from net_kit import GOOD, GOOD_AT, HELLO, INNER, Rung, attempt, decisions, http, https, set_network, tcp

import sloplet.network.resolving
from netkit import Internet
from netkit.internet import METADATA, PRIVATE, PUBLIC, PUBLIC_TOO, PUBLIC_V6
from netkit.web import METADATA_SECRET
from sloplet import Network, Sandbox

EVERYTHING_PUBLIC = Network(allow=["*:*", "0.0.0.0/0:*"])

#: The metadata services, in every notation that some program understands.
METADATA_FORMS = [
    METADATA, "2852039166", "0xA9FEA9FE", "0xa9.0xfe.0xa9.0xfe", "0251.0376.0251.0376", "025177524776", "169.254.43518",
    "169.16689662", "::ffff:169.254.169.254", "::ffff:a9fe:a9fe", "::169.254.169.254", "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::", "fd00:ec2::254", "100.100.100.200", "0.0.0.0", "::", "[169.254.169.254]", "metadata.example",
    "metadata4in6.example", "metadata6.example", "169.254.169.254.nip.example",
]  # fmt: skip

#: This host and what is around it.
NEIGHBOURS = [
    "10.0.0.1", "10.1.2.3", "172.16.0.1", "172.31.255.254", "192.168.0.1", "192.168.1.1", "100.64.0.1",
    "169.254.1.1", "192.0.0.8", "192.0.2.1", "198.51.100.7", "203.0.113.9", "198.18.255.255", "198.19.77.77",
    "0.1.2.3", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "fe80::1", "fc00::1", "fd12::1", "::1",
    "ff02::1", "100.127.255.254", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2001:db8::1",
]  # fmt: skip

TO_MANY = ("224.0.0.1", "239.255.255.250", "255.255.255.255", "ff02::1")


@pytest.fixture(autouse=True)
def names(net: Internet) -> None:
    net.name("metadata.example", METADATA)
    net.name("metadata6.example", "fd00:ec2::254")
    net.name("metadata4in6.example", "::ffff:169.254.169.254")
    net.name("169.254.169.254.nip.example", METADATA)


def test_n04_metadata(shared: Sandbox, net: Internet) -> None:
    set_network(shared, EVERYTHING_PUBLIC)
    tried = attempt(shared, *(http(form, wait=5) for form in METADATA_FORMS), *(https(form) for form in METADATA_FORMS))
    for outcome in tried.outcomes:
        assert outcome.refused, outcome
    assert net.dialled() == set()
    assert tried.denied


def test_n04_a_redirect_to_it(shared: Sandbox, net: Internet) -> None:
    set_network(shared, EVERYTHING_PUBLIC)
    for form in (METADATA, "2852039166", "[::ffff:a9fe:a9fe]", "metadata.example"):
        result = shared.run(["curl", "-sSLg", "-m", "10", f"http://{GOOD}/redirect?to=http://{form}/"])
        assert not result.ok, result.stdout
        assert METADATA_SECRET not in result.stdout
    assert net.dialled() == {GOOD_AT}


def test_n04_positive_control(shared: Sandbox, net: Internet) -> None:
    """A rule that names the address opens it, and then the service answers: what is refused above is there."""
    set_network(shared, Network(allow=[f"{METADATA}:80", "metadata.example"]))
    for outcome in attempt(shared, http(METADATA), http("metadata.example")).outcomes:
        assert METADATA_SECRET in outcome.data, outcome
    assert net.dialled() == {METADATA}


def test_n05_the_host_and_its_neighbours(shared: Sandbox, net: Internet) -> None:
    set_network(shared, EVERYTHING_PUBLIC)
    for number, address in enumerate(NEIGHBOURS):
        net.name(f"n{number}.example", address)
    literal = [http(address, wait=0.5 if address in TO_MANY else 5) for address in NEIGHBOURS]
    named = [http(f"n{number}.example") for number in range(len(NEIGHBOURS))]
    for outcome in attempt(shared, *literal, *named, http("host.sloplet"), http("127.0.0.2", 80)).outcomes:
        nobody = outcome.asked["to"] in TO_MANY and outcome.error == "TIMEOUT"  # gVisor: not sent, and not said
        assert outcome.refused or nobody, outcome
    assert net.dialled() == set()


def test_n05_positive_control(shared: Sandbox, net: Internet) -> None:
    set_network(shared, Network(allow=["10.0.0.0/8:80", INNER, "host.sloplet:80"]))
    literal, named, host = attempt(shared, http(PRIVATE), http(INNER), http("host.sloplet")).outcomes
    assert f"hello from {PRIVATE}" in literal.data
    assert f"hello from {INNER}" in named.data
    assert "hello from host.sloplet" in host.data
    assert net.dialled() == {PRIVATE, "127.0.0.1"}


def test_n05_the_libraries_own_listeners(shared: Sandbox, net: Internet) -> None:
    """The agent's own sockets inside are no way past the policy."""
    set_network(shared, Network(allow=[GOOD]))
    listing = shared.run("cat /proc/net/tcp /proc/net/tcp6 2>/dev/null").stdout.splitlines()
    ports = {int(line.split()[1].split(":")[1], 16) for line in listing if line.split()[3:4] == ["0A"]}
    tried = attempt(shared, *(http("127.0.0.1", port, host=GOOD, wait=3) for port in sorted(ports - {53})))
    for outcome in tried.outcomes:
        assert not outcome.data, outcome
    assert net.packets() == []


# -- N-06 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0.0, 30.0], ids=["asked-each-time", "kept"])
def test_n06_rebinding(shared: Sandbox, net: Internet, monkeypatch: pytest.MonkeyPatch, kept: float) -> None:
    """Public when it is checked, private when it is dialled: whichever question gets which answer."""
    monkeypatch.setattr(sloplet.network.resolving, "KEPT", kept)
    set_network(shared, EVERYTHING_PUBLIC)
    flips = [PUBLIC, PRIVATE, METADATA, PUBLIC, "127.0.0.1"] * 4
    for number in range(5):
        net.name(f"r{number}-{int(kept)}.example", *flips[number:])
    tries = [http(f"r{number}-{int(kept)}.example") for number in range(5) for _ in range(3)]
    for outcome in attempt(shared, *tries).outcomes:
        assert outcome.refused or "hello from r" in outcome.data, outcome
    assert net.dialled() <= {PUBLIC}
    assert {event["address"] for event in net.seen("http")} <= {PUBLIC}


def test_n06_positive_control(net: Internet) -> None:
    """The name does change its address, and what it changes to does answer."""
    net.name("flip.example", PUBLIC, PRIVATE)
    assert [net.ask("resolve", name="flip.example") for _ in range(2)] == [[PUBLIC], [PRIVATE]]
    net.connect(PRIVATE, 80).close()


def test_n06_among_many_addresses(shared: Sandbox, net: Internet) -> None:
    """Only the public ones are tried, also where none of them answers."""
    set_network(shared, EVERYTHING_PUBLIC)
    net.name("mixed.example", ["127.0.0.1", PRIVATE, PUBLIC, METADATA, "::1"])
    works, refused = attempt(shared, http("mixed.example"), http("mixed.example", 81)).outcomes
    assert "hello from mixed.example" in works.data
    assert refused.refused
    assert net.dialled() == {PUBLIC}
    net.forget()
    net.name("loop.example", "127.0.0.1")
    set_network(shared, Network(allow=["loop.example:*"]))
    tried = attempt(shared, http("loop.example"), tcp("loop.example", 7, ("x", None)))
    tried.all_refused()
    assert net.dialled() == set()
    assert any("127.0.0.1" in text or "loopback" in text for text in tried.denied), tried.denied


# -- N-11 ----------------------------------------------------------------------------------------------------


def test_n11_a_server_with_ipv6_only(shared: Sandbox, net: Internet) -> None:
    """By name it works, under the same rules; by its address there is no way at all."""
    net.name("six.example", PUBLIC_V6)
    net.name("inner6.example", "fd00::7")
    set_network(shared, Network(allow=["six.example", "inner6.example", "[::]/0"]))
    works, inner, literal, plain = attempt(
        shared, http("six.example"), http("inner6.example"), http(PUBLIC_V6), tcp("2a00::5", 7)
    ).outcomes
    assert "hello from six.example" in works.data
    assert inner.refused
    assert literal.refused
    assert plain.refused
    assert net.dialled() == {PUBLIC_V6}
    net.forget()
    set_network(shared, Network(allow=[GOOD]))
    attempt(shared, http("six.example")).all_refused()
    assert net.packets() == []


def test_n11_ipv6_enabled_late(rung: Rung, net: Internet) -> None:
    """Whatever root inside does to IPv6, nothing goes out by it."""
    users = ("agent", "root") if rung.can.users else ("agent",)
    with rung.box(network=Network(allow=[GOOD])) as box:
        for user in users:
            for command in (
                "echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6",
                "echo 2 > /proc/sys/net/ipv6/conf/all/accept_ra",
                "ip -6 addr add 2a00::9/64 dev lo",
                "ip -6 route add local default dev lo",
                "ip -6 route add default dev lo",
            ):
                box.run(command, user=user)
            tries = [http(PUBLIC_V6), tcp(PUBLIC_V6, 443), {"way": "icmp", "to": PUBLIC_V6, "wait": 2}]
            udp = {"way": "udp", "to": PUBLIC_V6, "port": 443, "wait": 2}
            for outcome in attempt(box, *tries, udp, user=user).outcomes:
                assert outcome.error, outcome
                assert not outcome.data
        assert net.packets() == []
        assert HELLO in attempt(box, http(GOOD)).one.data
    assert net.dialled() == {GOOD_AT}


def test_n04_log_tells_why(shared: Sandbox, net: Internet) -> None:
    set_network(shared, EVERYTHING_PUBLIC)
    before = len(decisions(shared))
    attempt(shared, http(METADATA), http("metadata.example"), http(f"{PUBLIC_TOO}"))
    lines = decisions(shared)[before:]
    refused = [line for line in lines if line.verdict == "deny"]
    assert [line.address for line in refused] == [METADATA, METADATA]
    assert all(line.reason for line in refused)
    assert [line.address for line in lines if line.verdict == "allow"] == [PUBLIC_TOO]
