"""N-01: with the network off there is no way out, by any protocol, and whoever tries learns it at once."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hostile_kit import Target, ask, ask_host, install, parse

from sloplet import Sandbox

FAST_MS = 500


@pytest.fixture
def service() -> Iterator[int]:
    """A TCP and UDP server of the host on all its addresses."""
    with (
        socket.create_server(("0.0.0.0", 0)) as listener,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        port = listener.getsockname()[1]
        datagrams.bind(("0.0.0.0", port))
        datagrams.settimeout(0.05)
        listener.settimeout(0.05)
        heard: list[str] = []
        done = threading.Event()

        def listen() -> None:
            while not done.is_set():
                for take in (listener.accept, lambda: datagrams.recvfrom(10)):
                    try:
                        got = take()
                        heard.append(repr(got[1]))
                        if isinstance(got[0], socket.socket):
                            got[0].close()
                    except TimeoutError:
                        continue

        thread = threading.Thread(target=listen)
        thread.start()
        service.heard = heard  # type: ignore[attr-defined]
        yield port
        done.set()
        thread.join()


def _own_addresses() -> list[str]:
    """Addresses of this host, so far as it has any."""
    found = ["127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            found.append(probe.getsockname()[0])
        except OSError:
            pass
    return found


def test_n01_no_way_out(target: Target, box: Sandbox, service: int) -> None:
    result = box.run([install(box, "network"), str(service), *_own_addresses()], timeout=60)
    assert result.ok, result.stderr
    said = parse(result.stdout)
    for way, value in said.lines.items():
        code, milliseconds = (int(word) for word in value.split())
        if way.startswith("interface/"):
            assert way == "interface/lo" or not target.can.private_processes
            continue
        if way == "udp/127.0.0.1":
            continue  # a datagram into the sandbox's own loopback: sent, and heard by nobody
        assert code != 0, f"{way} left the sandbox"
        assert milliseconds < FAST_MS, f"{way} kept the caller waiting for {milliseconds} ms"
    assert service_heard() == []


def service_heard() -> list[str]:
    return list(service.heard)  # type: ignore[attr-defined]


def test_n01_positive_control(target: Target, service: int) -> None:
    said = ask_host("network", str(service), *_own_addresses())
    assert said["tcp/127.0.0.1"].split()[0] == "0", "on the host itself the server can be reached"


def test_n01_names(target: Target, box: Sandbox) -> None:
    """No resolver: names fail at once."""
    script = (
        "import socket, time\nstart = time.time()\ntry:\n  socket.getaddrinfo('example.com', 80)\n"
        "except OSError:\n  print('NO', time.time() - start < 1)"
    )
    result = box.run(["python3", "-c", script], timeout=20)
    assert result.stdout.strip() == "NO True", result.stderr
    for command in ("getent hosts example.com", "getent ahosts one.one.one.one"):
        assert not box.run(command, timeout=20).ok


def test_n01_vsock_and_the_hosts_sockets(target: Target, box: Sandbox) -> None:
    found = ask(box, "sockets")
    for name in ("vsock", "vsock-dgram", "packet", "raw", "xdp"):
        assert found[f"native:{name}"] != "0"
    weak = ask_host("sockets")
    assert os.geteuid() != 0 or weak["native:packet"] == "0"


def test_n01_nothing_can_be_configured(target: Target, box: Sandbox) -> None:
    """No device can be made, no route added, whoever one is inside."""
    users = ("agent", "root") if target.can.users else ("agent",)
    for user in users:
        for command in (
            "ip link add dummy0 type dummy",
            "ip route add default dev lo",
            "ip tuntap add tap0 mode tap",
            "ip addr add 10.9.9.9/8 dev lo",
        ):
            assert not box.run(command, user=user).ok, command
    if target.can.private_processes:
        devices = box.run("cat /proc/net/dev").stdout.splitlines()[2:]
        assert [line.split(":")[0].strip() for line in devices] in (["lo"], [])
