"""Connections through a SOCKS5 proxy: a small one, which writes down what it is told."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
from typing import Any

import pytest
from net_inside import Inside, World, echo, with_world

from sloplet.netspec import Network

pytestmark = pytest.mark.anyone

PROXY, PUBLIC = "93.184.216.40", "93.184.216.34"
NAME = "db.example.com"


class Socks:
    """``asked``: (user, password, host, port) of each connection."""

    def __init__(self, world: World, *, user: str = "", password: str = "", code: int = 0, whole: bool = True) -> None:
        self.asked: list[tuple[str, str, str, int]] = []
        self._world, self._login, self._code, self._whole = world, (user, password), code, whole

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        version, count = await reader.readexactly(2)
        methods = await reader.readexactly(count)
        assert version == 5
        user = password = ""
        if self._login[0]:
            if 2 not in methods:
                writer.write(b"\x05\xff")
                return
            writer.write(b"\x05\x02")
            _, size = await reader.readexactly(2)
            user = (await reader.readexactly(size)).decode()
            password = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
            good = (user, password) == self._login
            writer.write(b"\x01\x00" if good else b"\x01\x01")
            if not good:
                return
        else:
            writer.write(b"\x05\x00")
        _, _, _, kind = await reader.readexactly(4)
        if kind == 3:
            host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
        else:
            host = str(ipaddress.ip_address(await reader.readexactly(4 if kind == 1 else 16)))
        port = int.from_bytes(await reader.readexactly(2), "big")
        self.asked.append((user, password, host, port))
        answer = b"\x05" + bytes([self._code]) + b"\x00\x03\x05a.org\x00\x50"
        if not self._whole:
            writer.write(answer[:6])
            return
        for at in range(len(answer)):  # in the smallest pieces
            writer.write(answer[at : at + 1])
            await writer.drain()
        if not self._code:
            writer.write(f"{host}|".encode())
            await echo(reader, writer)


async def furnished(world: World, **settings: Any) -> Socks:
    made = Socks(world, **settings)
    await world.serve(PROXY, 1080, made.serve, "proxy.example.com")
    return made


async def inside(world: World, network: Network) -> Inside:
    made = Inside(network, world)
    made.egress.injected.set(dict(network.values))
    return await made.hello()


def test_names_are_resolved_by_the_proxy_and_addresses_are_told() -> None:
    async def scenario(world: World) -> None:
        socks = await furnished(world, user="me", password="p@ss")
        network = Network(allow=[f"{NAME}:*", "8.8.8.8:*"], proxy="socks5://me:p%40ss@proxy.example.com:1080")
        box = await inside(world, network)
        assert await box.resolve(NAME) == 0
        program = await box.connect(NAME, 5432)
        await program.send(b"\x00hi")
        assert await program.recv(len(NAME) + 4) == f"{NAME}|".encode() + b"\x00hi"
        assert (await box.connect("8.8.8.8", 53)).replied.is_set()
        assert socks.asked == [("me", "p@ss", NAME, 5432), ("me", "p@ss", "8.8.8.8", 53)]
        assert world.dialled == [(PROXY, 1080)] * 2
        assert set(world.asked) == {"proxy.example.com"}, "no other name was looked up here"
        assert "p@ss" not in repr([row.to_dict() for row in box.log.read(limit=10)])
        for host, port in (("other.example.com", 443), ("9.9.9.9", 53), ("10.0.0.1", 80), ("169.254.169.254", 80)):
            assert (await box.connect(host, port)).errno == errno.EACCES
        assert len(socks.asked) == 2
        await box.close()

    with_world(scenario)


def test_where_addresses_are_judged_the_proxy_is_told_the_address() -> None:
    async def scenario(world: World) -> None:
        socks = await furnished(world)
        world.names |= {NAME: [PUBLIC], "evil.example.com": ["8.8.8.8"]}
        box = await inside(world, Network(allow=["*:*"], deny=["8.8.8.0/24"], proxy="socks5://proxy.example.com:1080"))
        assert (await box.connect(NAME, 443)).replied.is_set()
        assert (await box.connect("evil.example.com", 443)).errno == errno.EACCES
        assert socks.asked == [("", "", PUBLIC, 443)]
        await box.close()

    with_world(scenario)


@pytest.mark.parametrize(
    ("settings", "proxy", "code", "says"),
    [
        ({"user": "me", "password": "other"}, "me:pass@", errno.EACCES, "does not take its user and password"),
        ({"user": "me", "password": "x"}, "", errno.EACCES, "wants a user"),
        ({"code": 5}, "", errno.ECONNREFUSED, "the connection was refused"),
        ({"code": 2}, "", errno.EACCES, "its rules do not allow it"),
        ({"code": 99}, "", errno.EIO, "answer 99"),
        ({"whole": False}, "", errno.ECONNRESET, "reset"),
    ],
)
def test_what_the_proxy_refuses_is_told(settings: dict[str, Any], proxy: str, code: int, says: str) -> None:
    async def scenario(world: World) -> None:
        await furnished(world, **settings)
        box = await inside(world, Network(allow=["*:*"], proxy=f"socks5://{proxy}{PROXY}:1080"))
        program = await box.connect(NAME, 443)
        assert program.errno == code
        row = box.last()
        assert row.verdict == "fail"
        assert says in row.reason
        assert "pass@" not in row.reason
        await box.close()

    with_world(scenario)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "198.18.0.1"])
def test_a_private_proxy_needs_a_rule_by_address(address: str) -> None:
    async def scenario(world: World) -> None:
        socks = Socks(world)
        await world.serve(address, 1080, socks.serve, "sly.example.com")
        for host in (address, "sly.example.com"):
            box = await inside(world, Network(allow=["*:*", "0.0.0.0/0:*"], proxy=f"socks5://{host}:1080"))
            assert (await box.connect(NAME, 443)).errno == errno.EACCES
            assert f"the proxy is at {address}" in box.last().reason
            assert world.dialled == []
            opened = Network(allow=["*:*", f"{address}:1080"], proxy=f"socks5://{host}:1080")
            box.egress.set(opened.spec)
            assert (await box.connect(NAME, 443)).replied.is_set()
            world.dialled.clear()
            await box.close()

    with_world(scenario)


def test_the_machines_own_address_and_a_proxy_that_is_not_there() -> None:
    async def scenario(world: World) -> None:
        await furnished(world)
        world.own.add(PROXY)
        box = await inside(world, Network(allow=["*:*"], proxy=f"socks5://{PROXY}:1080"))
        assert (await box.connect(NAME, 443)).errno == errno.EACCES
        assert "this machine's own" in box.last().reason
        box.egress.set(Network(allow=["*:*"], proxy="socks5://nobody.example.com:1080").spec)
        assert (await box.connect(NAME, 443)).errno == errno.EHOSTUNREACH
        box.egress.set(Network(allow=["*:*"], proxy="socks5://8.8.8.8:1080").spec)
        assert (await box.connect(NAME, 443)).errno == errno.ECONNREFUSED
        assert "the proxy 8.8.8.8" in box.last().reason
        await box.close()

    with_world(scenario)


def test_the_proxy_is_not_asked_for_the_machines_own_addresses() -> None:
    """By address, and by a name where addresses are judged; a rule for that very address opens it."""

    async def scenario(world: World) -> None:
        socks = await furnished(world)
        world.own.add(PUBLIC)
        world.names |= {NAME: [PUBLIC], "both.example.com": [PUBLIC, "8.8.8.8"]}
        everything: dict[str, Any] = {"allow": ["*:*", "0.0.0.0/0:*"], "deny": ["9.9.9.0/24"]}
        box = await inside(world, Network(**everything, proxy=f"socks5://{PROXY}:1080"))
        for host in (PUBLIC, NAME):
            assert (await box.connect(host, 443)).errno == errno.EACCES
            row = box.last()
            assert (row.verdict, row.address) == ("deny", PUBLIC)
            assert "this machine's own" in row.reason
        assert socks.asked == []
        through = await box.connect("both.example.com", 443)
        assert through.replied.is_set()
        assert (await box.connect("8.8.4.4", 443)).replied.is_set()
        assert [host for _, _, host, _ in socks.asked] == ["8.8.8.8", "8.8.4.4"]
        opened = [*everything["allow"], f"{PUBLIC}:443"]
        box.egress.set(Network(allow=opened, deny=everything["deny"], proxy=f"socks5://{PROXY}:1080").spec)
        meant = await box.connect(PUBLIC, 443)
        assert meant.replied.is_set()
        box.egress.set(Network(**everything, proxy=f"socks5://{PROXY}:1080").spec)
        assert await meant.over() != 0, "what the rule had opened is cut"
        await box.close()

    with_world(scenario)


def test_without_its_password_nothing_passes() -> None:
    async def scenario(world: World) -> None:
        socks = await furnished(world, user="me", password="pass")
        box = await inside(world, Network(allow=["*:*"], proxy=f"socks5://me:pass@{PROXY}:1080"))
        box.egress.forget_values()
        assert (await box.connect(NAME, 443)).errno == errno.EACCES
        assert "password of the proxy" in box.last().reason
        assert world.dialled == []
        box.egress.set_values({"@proxy": "pass"})
        assert (await box.connect(NAME, 443)).replied.is_set()
        assert socks.asked == [("me", "pass", NAME, 443)]
        await box.close()

    with_world(scenario)


def test_another_proxy_cuts_what_went_through_the_first() -> None:
    async def scenario(world: World) -> None:
        await furnished(world)
        await world.serve(PUBLIC, 443, echo, NAME)
        network = Network(allow=["*:*"], proxy=f"socks5://{PROXY}:1080")
        box = await inside(world, network)
        by_proxy = await box.connect(NAME, 443)
        box.egress.set(Network(allow=["*:*", "8.8.8.8"], proxy=f"socks5://{PROXY}:1080").spec)
        assert by_proxy.closed is None, "the same proxy: it stays"
        box.egress.set(Network(allow=["*:*"]).spec)
        assert await by_proxy.over() == errno.ECONNRESET
        direct = await box.connect(NAME, 443)
        assert direct.replied.is_set()
        assert world.dialled[-1] == (PUBLIC, 443)
        box.egress.set(network.spec)
        assert await direct.over() == errno.ECONNRESET
        await box.close()

    with_world(scenario)
