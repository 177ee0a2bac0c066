"""E2B's network settings in a real sandbox, changed while it runs: who is reached, and how fast the others are not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from netkit import Internet
from sloplet import Network, Sandbox
from sloplet.engines import registry
from sloplet.portal import portal
from sloplet.runtime import embedded_runtime
from sloplet.server.e2b.netrules import network_of

ALL = "0.0.0.0/0"
NAMES = {"web.e2b.example": "93.184.216.34", "dns.e2b.example": "8.8.8.8", "in.e2b.example": "10.1.2.3"}
#: How long a refusal may take, on a machine that does other things too.
SOON = 2.0

FETCH = """
import sys, time, urllib.request
for host in sys.argv[1:]:
    began = time.monotonic()
    try:
        urllib.request.urlopen(f"http://{host}/", timeout=20).read()
        print(host, "yes", time.monotonic() - began)
    except OSError:
        print(host, "no", time.monotonic() - began)
"""


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with Internet() as net:
        for name, address in NAMES.items():
            net.name(name, address)
        with net.serves(portal().call(embedded_runtime())):
            yield net


@pytest.fixture(scope="module", params=["container", pytest.param("gvisor", marks=pytest.mark.anyone)])
def box(request: pytest.FixtureRequest, internet: Internet) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gvisor" and "SLOPLET_TEST_RUNSC" in os.environ:
            patch.setenv("SLOPLET_RUNSC", os.environ["SLOPLET_TEST_RUNSC"])
        probe = registry.load(request.param).probe()
        if not probe.available or not probe.capabilities.egress:
            pytest.skip(f"capability: {request.param} has no egress here: {probe.reason}")
        network = Network(**network_of(internet=False))
        with Sandbox(engine=request.param, network=network, allow_weaker=True) as made:
            yield made


def reached(box: Sandbox, *hosts: str) -> set[str]:
    """Those of them that answer; the others fail soon."""
    result = box.run(["python3", "-c", FETCH, *hosts], timeout=100)
    assert result.ok, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line for line in lines if line[1] == "no" and float(line[2]) > SOON] == []
    return {host for host, answer, _ in lines if answer == "yes"}


HOSTS = ("1.1.1.1", "8.8.8.8", "10.1.2.3", "169.254.169.254", *NAMES)
WEB, DNS, INNER = NAMES


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        ({}, {"1.1.1.1", "8.8.8.8", WEB, DNS}),
        ({"internet": False}, set()),
        ({"deny_out": [ALL]}, set()),
        ({"deny_out": ["8.8.8.8"]}, {"1.1.1.1", WEB}),
        ({"deny_out": ["8.0.0.0/8"], "allow_out": ["8.8.8.8"]}, {"1.1.1.1", "8.8.8.8", WEB, DNS}),
        ({"deny_out": [ALL], "allow_out": ["1.1.1.1", "8.8.8.0/24"]}, {"1.1.1.1", "8.8.8.8", DNS}),
        ({"deny_out": [ALL], "allow_out": ["web.e2b.example"]}, {WEB}),
        ({"deny_out": [ALL], "allow_out": ["*.e2b.example"]}, {WEB, DNS}),
        ({"allow_out": ["10.0.0.0/8", "169.254.169.254"]}, {"1.1.1.1", "8.8.8.8", WEB, DNS}),
        ({"allow_out": ["10.0.0.0/8"], "private": ["10.1.0.0/16"]}, {"1.1.1.1", "8.8.8.8", "10.1.2.3", *NAMES}),
    ],
)
def test_settings(box: Sandbox, settings: dict[str, Any], there: set[str]) -> None:
    box.network.set(Network(**network_of(**settings)))
    assert reached(box, *HOSTS) == there


def test_questions_are_answered_soon(box: Sandbox) -> None:
    """Of names that are denied, of IPv6 addresses, and of whose an address is."""
    box.network.set(Network(**network_of(deny_out=[ALL], allow_out=["web.e2b.example"])))
    program = """
import socket
for question in (
    lambda: socket.getaddrinfo("denied.example", 80),
    lambda: socket.getaddrinfo("denied.example", 80, socket.AF_INET6),
    lambda: socket.getaddrinfo("web.e2b.example", 80, socket.AF_INET6),
    lambda: socket.gethostbyaddr("8.8.8.8"),
    lambda: socket.gethostbyaddr("10.0.0.1"),
    lambda: socket.create_connection(("2606:4700::1111", 80), 20),
):
    try:
        question()
    except OSError:
        pass
"""
    began = time.monotonic()
    assert box.run(["python3", "-c", program], timeout=100).ok
    assert time.monotonic() - began < SOON
