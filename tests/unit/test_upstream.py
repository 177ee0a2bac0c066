"""This machine's resolver and network, as far as they can be tried without leaving it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sloplet.network import upstream
from sloplet.network.resolving import Resolver
from sloplet.network.tie import close_socket
from sloplet.network.upstream import System

pytestmark = pytest.mark.anyone


def can_unshare() -> bool:
    """Whether there is a way to a network of one's own, and ``ip`` to set it up."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        return False
    return subprocess.run(["unshare", "-rn", "true"], capture_output=True, timeout=60).returncode == 0


def test_exactly_that_address_is_connected_to() -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        made = await System().connect("127.0.0.1", port)
        assert made.getpeername() == ("127.0.0.1", port)
        assert not made.getblocking()
        assert not os.get_inheritable(made.fileno())
        made.close()
        server.close()
        await server.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            await System().connect("127.0.0.1", port)

    asyncio.run(main())


#: Dials, says something, and waits to be killed.
_HOLDER = """
import asyncio, socket, sys
from sloplet.network.tie import Tie
from sloplet.network.upstream import System

async def main():
    if sys.argv[1] == "dialled":
        made = await System().connect("127.0.0.1", int(sys.argv[2]))
    else:
        made = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
        tie = Tie(None, made, print)
    made.send(b"half of it")
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["dialled", "tied"])
def test_a_holder_that_is_killed_ends_nothing_in_order(kind: str) -> None:
    """What it was about to send is not all there is, and a server must not take it for that."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        words = [sys.executable, "-c", _HOLDER, kind, str(server.getsockname()[1])]
        with subprocess.Popen(words) as holder:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(30)
                assert connection.recv(100) == b"half of it"
                holder.kill()
                with pytest.raises(ConnectionResetError):
                    connection.recv(100)


def test_what_ends_in_order_loses_nothing() -> None:
    size = 4 << 20

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            made = await System().connect("127.0.0.1", server.getsockname()[1])
            connection, _ = server.accept()
        with connection:
            connection.setblocking(False)
            sent = 0
            while sent < size:  # as much as the kernels of both ends take while nobody reads
                try:
                    sent += made.send(bytes(65536))
                except BlockingIOError:
                    break
            made.shutdown(socket.SHUT_WR)
            close_socket(made, reset=False)
            got = 0
            while data := await loop.sock_recv(connection, 65536):
                got += len(data)
            assert got == sent > 65536

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("address", ["localhost", "127.1", "0x7f000001", ""])
def test_only_addresses_are_dialled(address: str) -> None:
    with pytest.raises(ValueError, match="does not appear"):
        asyncio.run(System().connect(address, 80))


def test_a_connection_that_gets_no_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async def silence(*_: Any) -> None:
            await asyncio.sleep(60)

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", silence)
        with pytest.raises(OSError, match="no answer") as caught:
            await System(patience=0.05).connect("127.0.0.1", 9)
        assert caught.value.errno == errno.ETIMEDOUT

    asyncio.run(main())


def test_names_are_looked_up_once_for_many_and_asked_anew_later(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def look_up(name: str, *_: Any, **__: Any) -> list[Any]:
        calls.append(name)
        if name == "missing.example.com.":
            raise socket.gaierror(socket.EAI_NONAME, "none")
        if name == "broken.example.com.":
            raise socket.gaierror(socket.EAI_AGAIN, "later")
        found = ["2606:2800::1", "93.184.216.34", "93.184.216.34", "fe80::1%eth0"]
        return [(0, 0, 0, "", (address, 0)) for address in found]

    async def main() -> None:
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        resolver = Resolver(System())
        answers = await asyncio.gather(*(resolver.resolve("a.example.com") for _ in range(10)))
        assert answers == [["93.184.216.34", "2606:2800::1", "fe80::1"]] * 10
        assert calls == ["a.example.com."]
        resolver.forget()
        await resolver.resolve("a.example.com")
        assert len(calls) == 2
        assert await resolver.resolve("missing.example.com") == []
        for _ in range(2):  # a failure is not kept
            with pytest.raises(OSError, match="the resolver failed") as caught:
                await resolver.resolve("broken.example.com")
            assert caught.value.errno == errno.EAGAIN
        assert calls.count("broken.example.com.") == 2

    asyncio.run(main())


def test_a_resolver_that_hangs_holds_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(*_: Any, **__: Any) -> list[Any]:
        released.wait(30)
        return []

    async def main() -> None:
        monkeypatch.setattr(upstream, "_RESOLVERS", 2)
        monkeypatch.setattr(socket, "getaddrinfo", hang)
        resolver = Resolver(System(), patience=0.05)
        try:
            for number in range(5):  # more than there are threads
                with pytest.raises(OSError, match="did not answer"):
                    await resolver.resolve(f"a{number}.example.com")
        finally:
            released.set()

    asyncio.run(main())


def test_one_whose_name_servers_are_silent_does_not_take_the_resolver_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also not after its questions have timed out: their threads go on waiting."""
    released = threading.Event()

    def look_up(name: str, *_: Any, **__: Any) -> list[Any]:
        if name.endswith(".silent.example."):
            released.wait(60)
        return [(0, 0, 0, "", ("93.184.216.34", 0))]

    async def main() -> None:
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        system = System()
        hostile, other = Resolver(system, patience=0.1), Resolver(system, patience=20)
        try:
            for wave in range(3):
                names = [f"{wave}-{number}.silent.example" for number in range(200)]
                found = await asyncio.gather(*(hostile.resolve(name) for name in names), return_exceptions=True)
                assert all(isinstance(item, OSError) for item in found)
            assert len(hostile._asked) <= 256  # what waits is bounded, too
            assert await other.resolve("good.example") == ["93.184.216.34"]
        finally:
            released.set()
            hostile.close()

    asyncio.run(main())


def test_names_are_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A search list would make another name of one that was judged. The machine's own file knows no dots."""
    hosts = tmp_path / "hosts"
    hosts.write_text("192.0.2.7 Printer.lan printer # not this\n#192.0.2.8 gone\n")
    asked: list[str] = []

    def look_up(name: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(name)
        return [(0, 0, 0, "", ("192.0.2.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for file in (str(hosts), str(tmp_path / "missing")):
        monkeypatch.setattr(upstream, "_HOSTS", file)
        for name in ("printer", "printer.lan", "gone", "this", "192.0.2.7", "vault"):
            assert asyncio.run(System().resolve(name)) == ["192.0.2.7"]
    assert asked == [
        "printer", "printer.lan", "gone.", "this.", "192.0.2.7.", "vault.",
        "printer.", "printer.lan.", "gone.", "this.", "192.0.2.7.", "vault.",
    ]  # fmt: skip


def test_what_is_this_machine_itself() -> None:
    assert System().is_own("127.0.0.1")
    assert not System().is_own("192.0.2.1")
    assert not System().is_own("2001:db8::1")


def test_a_public_address_of_this_machine_is_its_own() -> None:
    if not can_unshare():
        pytest.skip("capability: no network namespace of one's own here, or no ip to set it up")
    code = """
import subprocess
from sloplet.network.upstream import System
for words in ("link set lo up", "addr add 93.184.216.34/32 dev lo", "-6 addr add 2606:2800::1/128 dev lo"):
    subprocess.run(["ip", *words.split()], check=True)
print([System().is_own(address) for address in ("93.184.216.34", "2606:2800::1", "93.184.216.35")])
"""
    done = subprocess.run(["unshare", "-rn", sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[True, True, False]\n", done.stderr
