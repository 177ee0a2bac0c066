"""What leaves a sandbox: judged by name, dialled where it was judged, cut when it is allowed no more; nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from typing import Any

import pytest
from net_inside import Inside, World, echo, greet, with_world

from sloplet.errors import SpecError, WireClosed
from sloplet.netspec import Network, Secret, check_secrets
from sloplet.network.secrets import SecretTable
from sloplet.network.upstream import System
from sloplet.wire.fields import Fields
from sloplet.wire.mux import request
from sloplet.wire.schema import Op, ResolveFlag, Tag

pytestmark = pytest.mark.anyone

PUBLIC = "93.184.216.34"
OTHER = "93.184.216.35"


def test_a_name_that_is_allowed_is_reached_and_logged() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "api.example.com")
        inside = await Inside(Network(allow=["api.example.com:7000"]), world).hello()
        program = await inside.connect("api.example.com", 7000)
        assert program.replied.is_set()
        row = inside.last()
        assert (row.state, row.verdict, row.name, row.address) == ("open", "allow", "api.example.com", PUBLIC)
        await program.send(b"\x00hello")
        assert await program.recv(6) == b"\x00hello"
        assert inside.last().bytes_out == 6
        await program.end()
        assert await program.over() == 0
        row = inside.last()
        assert (row.state, row.verdict, row.bytes_out, row.bytes_in) == ("done", "allow", 6, 6)
        assert row.rule == "api.example.com:7000"
        assert row.protocol == "tcp"
        assert world.dialled == [(PUBLIC, 7000)]
        assert inside.egress.open == inside.egress.meter.connections == 0
        await inside.close()

    with_world(scenario)


@pytest.mark.parametrize(
    ("allow", "host", "port"),
    [
        ([], "api.example.com", 7000),
        (["api.example.com:7001"], "api.example.com", 7000),
        (["*.api.example.com:7000"], "api.example.com", 7000),
        (["api.example.com:7000"], "evilapi.example.com", 7000),
        (["*:7000"], PUBLIC, 7000),
        (["api.example.com:7000"], PUBLIC, 7000),
        (["0.0.0.0/0:7000"], "127.0.0.1", 7000),
        (["0.0.0.0/0:7000"], "169.254.169.254", 7000),
        (["0.0.0.0/0:7000"], "198.18.0.9", 7000),
    ],
)
def test_what_no_rule_allows_is_refused_and_nobody_is_asked_or_dialled(allow: list[str], host: str, port: int) -> None:
    async def scenario(world: World) -> None:
        for address in (PUBLIC, "127.0.0.1", "169.254.169.254", "198.18.0.9"):
            await world.serve(address, 7000, echo)
        world.names.update({"api.example.com": [PUBLIC], "evilapi.example.com": [PUBLIC]})
        inside = await Inside(Network(allow=allow), world).hello()
        program = await inside.connect(host, port)
        assert program.errno == errno.EACCES
        assert not program.replied.is_set()
        assert world.dialled == []
        assert world.asked == []
        row = inside.last()
        assert (row.verdict, row.state, row.port) == ("deny", "done", port)
        assert row.reason
        assert inside.log.denied_since(0) == [row.reason]
        await inside.close()

    with_world(scenario)


def test_a_name_that_leads_to_a_private_address_is_refused() -> None:
    async def scenario(world: World) -> None:
        await world.serve("10.0.0.5", 7000, echo, "db.example.com")
        inside = await Inside(Network(allow=["*:7000"]), world).hello()
        program = await inside.connect("db.example.com", 7000)
        assert program.errno == errno.EACCES
        assert world.dialled == []
        assert inside.last().address == "10.0.0.5"
        inside.egress.set(Network(allow=["*:7000", "10.0.0.0/8:7000"]).spec)
        program = await inside.connect("db.example.com", 7000)
        assert program.replied.is_set()
        assert world.dialled == [("10.0.0.5", 7000)]
        await inside.close()

    with_world(scenario)


@pytest.mark.parametrize("host", ["api.example.com", PUBLIC])
@pytest.mark.parametrize(
    ("network", "opens"),
    [
        (Network(allow=["*:*", "0.0.0.0/0:*"]), False),
        (Network(learn=True), False),
        (Network(allow=["*:*", f"{PUBLIC}:7000"]), True),
    ],
)
def test_the_machines_own_public_address_is_opened_by_itself_only(host: str, network: Network, opens: bool) -> None:
    """Whatever listens on all of its addresses would be reached, a server of ours for example."""

    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "api.example.com")
        await world.serve(OTHER, 7000, echo)
        world.own.add(PUBLIC)
        inside = await Inside(network, world).hello()
        program = await inside.connect(host, 7000)
        assert program.replied.is_set() is opens
        assert world.dialled == ([(PUBLIC, 7000)] if opens else [])
        if not opens:
            assert program.errno == errno.EACCES
            assert f"this machine's own, which only a rule for that very address opens; ask for '{PUBLIC}:7000'" in (
                inside.last().reason
            )
            world.names["api.example.com"] = [PUBLIC, OTHER]  # of several the others are tried
            inside.egress.resolver.forget()
            again = await inside.connect("api.example.com", 7000)
            assert again.replied.is_set()
            assert world.dialled == [(OTHER, 7000)]
        else:
            inside.egress.set(Network(allow=["*:*", "0.0.0.0/0:*"]).spec)
            assert inside.last().verdict == "cut"
        await inside.close()

    with_world(scenario)


def test_only_the_addresses_that_were_judged_are_dialled() -> None:
    """A resolver that changes its answer between the check and the connection changes nothing."""

    async def scenario(world: World) -> None:
        await world.serve(OTHER, 7000, greet(b"other"))
        world.names["flip.example.com"] = ["10.0.0.5", PUBLIC, OTHER]
        inside = await Inside(Network(allow=["flip.example.com:7000"]), world).hello()
        assert await inside.resolve("flip.example.com") == 0
        world.names["flip.example.com"] = ["10.0.0.6"]
        program = await inside.connect("flip.example.com", 7000)
        assert await program.recv(5) == b"other"
        assert world.dialled == [(PUBLIC, 7000), (OTHER, 7000)]
        assert world.asked == ["flip.example.com"]
        await inside.close()

    with_world(scenario)


def test_names_that_may_not_be_reached_never_leave_the_host() -> None:
    async def scenario(world: World) -> None:
        world.names["good.example.com"] = [PUBLIC]
        inside = await Inside(Network(allow=["*.example.com"]), world).hello()
        assert await inside.resolve("canary-0123456789.evil.org") == 0  # it gets an address that leads nowhere
        assert world.asked == []
        assert await inside.resolve("good.example.com") == 0
        assert await inside.resolve("missing.example.com") == errno.ENOENT
        assert world.asked == ["good.example.com", "missing.example.com"]
        await inside.close()

    with_world(scenario)


def test_what_is_only_asked_for_is_not_resolved_before_it_is_answered() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "maybe.example.com")
        inside = await Inside(Network(ask=True), world).hello()
        assert await inside.resolve("maybe.example.com") == 0
        assert world.asked == []
        await inside.close()

    with_world(scenario)


def test_a_resolver_that_fails_is_no_missing_name() -> None:
    class Broken(World):
        async def resolve(self, name: str) -> list[str]:
            raise OSError(errno.ETIMEDOUT, "no answer")

    async def main() -> None:
        inside = await Inside(Network(allow=["x.example.com"]), Broken()).hello()
        assert await inside.resolve("x.example.com") == errno.EAGAIN
        program = await inside.connect("x.example.com", 443)
        assert program.errno == errno.ETIMEDOUT
        assert inside.last().verdict == "fail"
        await inside.close()

    asyncio.run(main())


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ECONNREFUSED, errno.EHOSTUNREACH])
def test_a_connection_that_cannot_be_made_says_why_and_breaks_nothing_else(code: int) -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "api.example.com")
        inside = await Inside(Network(allow=["api.example.com:7000"]), world).hello()
        first = await inside.connect("api.example.com", 7000)
        world.failure = OSError(code, "cannot")
        assert (await inside.connect("api.example.com", 7000)).errno == code
        assert inside.last().verdict == "fail"
        assert inside.log.denied_since(0) == []
        world.failure = None
        assert (await inside.connect("api.example.com", 7000)).replied.is_set()
        await first.send(b"\x00still")
        assert await first.recv(6) == b"\x00still"
        await inside.close()

    with_world(scenario)


def test_without_descriptors_nothing_is_dialled_and_what_is_open_goes_on() -> None:
    async def main() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        inside = await Inside(Network(allow=[f"host.sloplet:{port}"]), System()).hello()
        first = await inside.connect("host.sloplet", port)
        await first.send(b"\x00a")
        assert await first.recv(2) == b"\x00a"
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)  # the lowest number that is free
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            refused = await inside.connect("host.sloplet", port)
            assert refused.errno == errno.EMFILE
            assert inside.last().verdict == "fail"
            await first.send(b"\x00b")
            assert await first.recv(2) == b"\x00b"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await inside.connect("host.sloplet", port)).replied.is_set()
        assert not inside.egress.failed
        await inside.close()
        server.close()

    asyncio.run(main())


def test_servers_that_speak_first_are_heard_at_once() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 25, greet(b"220 ready\r\n"), "mail.example.com")
        inside = await Inside(Network(allow=["mail.example.com:25"]), world).hello()
        program = await inside.connect("mail.example.com", 25)
        assert await program.recv(11) == b"220 ready\r\n"
        await program.send(b"EHLO me\r\n")
        assert await program.recv(9) == b"EHLO me\r\n"
        await inside.close()

    with_world(scenario)


def client_hello(name: str | None) -> bytes:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    out = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return out.read()


def test_tls_must_name_the_server_that_was_judged() -> None:
    async def scenario(world: World) -> None:
        received: list[bytes] = []

        async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            received.append(await reader.read(65536))
            writer.close()

        await world.serve(PUBLIC, 443, keep, "good.example.com")
        inside = await Inside(Network(allow=["good.example.com"]), world).hello()
        for name in ("evil.example.org", None):
            program = await inside.connect("good.example.com", 443)
            await program.send(client_hello(name))
            assert await program.over() == errno.EACCES
            row = inside.last()
            assert (row.verdict, row.protocol, row.bytes_out) == ("deny", "tls", 0)
        hello = client_hello("good.example.com")
        program = await inside.connect("good.example.com", 443)
        for at in range(0, len(hello), 50):
            await program.send(hello[at : at + 50])
        assert await program.recv(1) == b""
        assert program.ended
        assert inside.last().protocol == "tls"
        assert [piece for piece in received if piece] == [hello]
        await inside.close()

    with_world(scenario)


def test_plain_http_must_name_the_host_on_every_request() -> None:
    async def scenario(world: World) -> None:
        heads: list[bytes] = []

        async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    heads.append(await reader.readuntil(b"\r\n\r\n"))
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                    await writer.drain()
            except (asyncio.IncompleteReadError, OSError):
                writer.close()

        await world.serve(PUBLIC, 80, web, "good.example.com")
        inside = await Inside(Network(allow=["good.example.com"]), world).hello()
        program = await inside.connect("good.example.com", 80)
        await program.send(b"GET /a HTTP/1.1\r\nHost: good.example.com\r\n\r\n")
        await program.until(lambda: program.got.endswith(b"ok"))
        await program.send(b"GET /b HTTP/1.1\r\nHost: evil.example.org\r\n\r\n")
        await program.until(lambda: program.ended or program.closed is not None)
        assert len(heads) == 1
        assert b"/a" in heads[0]
        await program.end()
        await program.over()
        row = inside.last()
        assert (row.verdict, row.protocol, row.request) == ("deny", "http", "GET /a")
        assert inside.log.denied_since(0)
        await inside.close()

    with_world(scenario)


@pytest.mark.parametrize("how", ["reset", "death", "policy"])
def test_a_request_that_nobody_answers_ends_with_its_program(how: str) -> None:
    async def scenario(world: World) -> None:
        asked, gone = asyncio.Event(), asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            try:
                await reader.read()
            except OSError:
                pass
            gone.set()
            writer.close()

        await world.serve(PUBLIC, 80, silent, "good.example.com")
        inside = await Inside(Network(allow=["good.example.com"]), world).hello()
        program = await inside.connect("good.example.com", 80)
        await program.send(b"GET / HTTP/1.1\r\nHost: good.example.com\r\n\r\n")
        await asked.wait()
        if how == "reset":
            await program.reset()
        elif how == "death":
            inside.mux.fail(WireClosed("it has ended"))
        else:
            inside.egress.set(Network().spec)
        await gone.wait()
        while inside.egress.open:
            await asyncio.sleep(0)
        assert inside.last().state == "done"
        assert inside.last().verdict == ("cut" if how == "policy" else "allow")
        await inside.close()

    with_world(scenario)


def test_another_policy_counts_at_once_and_cuts_what_it_does_not_allow() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "a.example.com")
        await world.serve(OTHER, 7000, echo, "b.example.com")
        inside = await Inside(Network(allow=["*.example.com:7000"]), world).hello()
        a, b = await inside.connect("a.example.com", 7000), await inside.connect("b.example.com", 7000)
        inside.egress.set(Network(allow=["b.example.com:7000"]).spec)
        assert await a.over() == errno.ECONNRESET
        assert inside.last().verdict == "cut"
        assert inside.last().name == "a.example.com"
        await b.send(b"\x00on")
        assert await b.recv(3) == b"\x00on"
        assert (await inside.connect("a.example.com", 7000)).errno == errno.EACCES
        inside.egress.set(Network(allow=["b.example.com:7000"], deny=[f"{OTHER}/32"]).spec)
        assert await b.over() == errno.ECONNRESET
        await inside.close()

    with_world(scenario)


def test_a_policy_that_changes_while_somebody_is_dialled_counts_too() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "a.example.com")
        world.held = asyncio.Event()
        inside = await Inside(Network(allow=["a.example.com:7000"]), world).hello()
        program = await inside.connect("a.example.com", 7000, wait=False)
        while not world.dialled:
            await asyncio.sleep(0)
        inside.egress.set(Network().spec)
        world.held.set()
        assert await program.over() in (errno.EACCES, errno.ECONNABORTED)
        assert not program.replied.is_set()
        assert inside.last().verdict == "cut"
        await inside.close()

    with_world(scenario)


def test_a_program_that_gives_up_while_it_is_dialled_leaves_nothing() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "a.example.com")
        world.held = asyncio.Event()
        inside = await Inside(Network(allow=["a.example.com:7000"]), world).hello()
        program = await inside.connect("a.example.com", 7000, wait=False)
        while not world.dialled:
            await asyncio.sleep(0)
        await program.reset()
        await program.over()
        assert inside.egress.open == inside.egress.meter.connections == 0
        await inside.close()

    with_world(scenario)


def test_one_that_is_cut_before_it_has_begun_leaves_nothing() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "a.example.com")
        inside = await Inside(Network(allow=["a.example.com:7000"]), world).hello()
        accept = inside.egress.accept

        def accept_and_cut(stream: Any) -> None:
            accept(stream)
            inside.egress.set(Network().spec)

        inside.mux.set_accept(accept_and_cut)
        program = await inside.connect("a.example.com", 7000)
        assert program.errno == errno.ECONNABORTED
        assert world.dialled == []
        assert inside.last().verdict == "cut"
        assert inside.egress.open == inside.egress.meter.connections == 0
        await inside.close()

    with_world(scenario)


def test_connections_are_limited() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "a.example.com")
        inside = await Inside(Network(allow=["a.example.com:7000"], connections=2), world).hello()
        first = await inside.connect("a.example.com", 7000)
        await inside.connect("a.example.com", 7000)
        third = await inside.connect("a.example.com", 7000)
        assert third.errno == errno.EACCES
        assert "2 connections" in inside.last().reason
        await first.end()
        await first.over()
        assert (await inside.connect("a.example.com", 7000)).replied.is_set()
        await inside.close()

    with_world(scenario)


def test_one_too_many_waits_for_an_end_that_is_on_its_way() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "a.example.com")
        inside = await Inside(Network(allow=["a.example.com:7000"], connections=1), world).hello()
        first = await inside.connect("a.example.com", 7000)
        second = await inside.connect("a.example.com", 7000, wait=False)
        gone = await inside.connect("a.example.com", 7000, wait=False)
        third = await inside.connect("a.example.com", 7000, wait=False)
        await gone.reset()
        assert await gone.over() == errno.ECONNRESET  # at once, and takes nobody's place
        assert second.closed is third.closed is None
        await first.end()
        assert (await second.answered()).replied.is_set()
        await second.reset()
        assert (await third.answered()).replied.is_set()
        assert [row.verdict for row in inside.log.read(limit=100)] == ["allow"] * 3
        await inside.close()

    with_world(scenario)


def test_who_waits_is_refused_when_nothing_passes_any_more() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "a.example.com")
        inside = await Inside(Network(allow=["a.example.com:7000"], connections=1), world).hello()
        await inside.connect("a.example.com", 7000)
        waits = await inside.connect("a.example.com", 7000, wait=False)
        assert await inside.resolve("localhost.example") == 0  # by now it is known that it waits
        inside.egress.fail("a test")
        assert await waits.over() == errno.EACCES
        assert inside.egress.open == 0
        await inside.close()

    with_world(scenario)


def test_names_beyond_all_addresses_are_told() -> None:
    async def scenario(world: World) -> None:
        world.names["a.example.com"] = [PUBLIC]
        inside = await Inside(Network(allow=["a.example.com"]), world).hello()
        question = request(Op.RESOLVE, (Tag.NAME, "a.example.com"), (Tag.FLAGS, int(ResolveFlag.FULL)))
        assert await (await inside.open(question)).over() == errno.EAGAIN
        row = inside.last()
        assert (row.verdict, row.name, row.protocol, row.rule) == ("deny", "a.example.com", "dns", "limits")
        assert "16384 different names" in row.reason
        assert not world.asked
        await inside.close()

    with_world(scenario)


@pytest.mark.parametrize("action", ["refuse", "pause", "kill"])
def test_a_budget_ends_everything_when_it_is_used_up(action: str) -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "a.example.com")
        network = Network(allow=["a.example.com:7000"], budget=10_000, on_budget=action)
        inside = await Inside(network, world).hello()
        told: list[str] = []
        inside.egress.on_budget = told.append
        program = await inside.connect("a.example.com", 7000)
        await program.send(b"\x00" * 20_000)
        assert await program.over() == errno.ECONNRESET
        row = inside.last()
        assert row.verdict == "cut"
        assert row.bytes_out + row.bytes_in == 10_000
        assert (await inside.connect("a.example.com", 7000)).errno == errno.EACCES
        assert told == ([] if action == "refuse" else [action])
        inside.egress.set(Network(allow=["a.example.com:7000"], budget=20_000).spec)
        assert (await inside.connect("a.example.com", 7000)).replied.is_set()
        await inside.close()

    with_world(scenario)


def test_bandwidth_is_held() -> None:
    async def scenario(world: World) -> None:
        async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\x00" * 150_000)
            await writer.drain()
            writer.close()

        await world.serve(PUBLIC, 7000, flood, "a.example.com")
        inside = await Inside(Network(allow=["a.example.com:7000"], bandwidth=200_000), world).hello()
        began = asyncio.get_running_loop().time()
        program = await inside.connect("a.example.com", 7000)
        assert len(await program.recv(150_000)) == 150_000
        took = asyncio.get_running_loop().time() - began
        assert took > 0.5  # 150 kB at 200 kB/s, less the burst
        await inside.close()

    with_world(scenario)


def test_a_link_is_another_sandbox() -> None:
    async def scenario(world: World) -> None:
        dialled: list[tuple[str, int]] = []
        await world.serve("127.0.0.9", 5432, greet(b"pg"))

        async def dial(ref: str, port: int) -> Any:
            dialled.append((ref, port))
            return await world.connect("127.0.0.9", 5432)

        links = {"db": ("postgres", 5432), "any": ("other", 0)}
        inside = await Inside(Network(deny=["any:22"]), world, links=links, dial_link=dial).hello()
        assert await inside.resolve("db") == 0
        assert world.asked == []
        program = await inside.connect("db", 5432)
        assert await program.recv(2) == b"pg"
        assert (await inside.connect("db", 5433)).errno == errno.EACCES
        assert (await inside.connect("any", 22)).errno == errno.EACCES
        assert (await inside.connect("any", 8080)).replied.is_set()
        assert dialled == [("postgres", 5432), ("other", 8080)]
        assert inside.last().protocol == "link"
        assert inside.egress.learned.allow() == ()
        inside.egress.set(Network(deny=["db"]).spec)
        assert await program.over() == errno.ECONNRESET
        await inside.close()

    with_world(scenario)


def test_no_policy_closes_what_a_secret_needs_open() -> None:
    async def scenario(world: World) -> None:
        secrets = check_secrets(
            {"TOKEN": Secret("it", hosts=["api.example.com", "*.example.org"], placeholder="p" * 12)}
        )
        inside = await Inside(Network(), world, links={"db": ("pg", 0)}, secrets=SecretTable(secrets)).hello()
        before = inside.egress.spec
        for closed in ("api.example.com", "*.example.com", "*.example.org"):
            with pytest.raises(SpecError, match="TOKEN is for"):
                inside.egress.set(Network(allow=["x.org"], passthrough=[closed]).spec)
        assert inside.egress.spec is before
        inside.egress.set(Network(passthrough=["pinned.example.org", "other.example.com"]).spec)
        await inside.close()

    with_world(scenario)


def test_a_fault_of_the_proxy_lets_nothing_pass() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "a.example.com")
        inside = await Inside(Network(allow=["a.example.com:7000"]), world).hello()
        told: list[str] = []
        faults: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context["exception"]))
        inside.egress.on_failed = told.append
        before = await inside.connect("a.example.com", 7000)

        class Wrong:
            def __getattr__(self, name: str) -> Any:
                raise RuntimeError("broken")

            def close(self) -> None:
                pass

        good, inside.egress.policy = inside.egress.policy, Wrong()  # type: ignore[assignment]
        program = await inside.connect("a.example.com", 7000)  # one connection's own fault
        assert program.errno == errno.EIO
        assert inside.last().verdict == "fail"
        assert len(faults) == 1
        assert world.dialled == [(PUBLIC, 7000)]
        assert not told
        inside.egress.policy = good
        inside.egress.meter = Wrong()  # type: ignore[assignment]
        assert (await inside.connect("a.example.com", 7000)).errno == errno.EIO  # the whole is broken
        assert told
        assert inside.egress.failed
        assert await before.over() == errno.ECONNRESET
        assert (await inside.connect("a.example.com", 7000)).errno == errno.EIO
        assert await inside.resolve("a.example.com") == errno.EIO
        inside.mux.check()
        await inside.close()

    with_world(scenario)


@pytest.mark.parametrize(
    "fields",
    [
        Fields((Tag.OP, 50)),
        Fields((Tag.OP, 50), (Tag.ADDRESS, "1.2.3.4"), (Tag.PORT, 0)),
        Fields((Tag.OP, 50), (Tag.ADDRESS, "nonsense"), (Tag.PORT, 80)),
        Fields((Tag.OP, 50), (Tag.ADDRESS, b"\xff"), (Tag.PORT, 80)),
        Fields((Tag.OP, 50), (Tag.ADDRESS, "1.2.3.4"), (Tag.NAME, b"a b\x1b[2J"), (Tag.PORT, 80)),
        Fields((Tag.OP, 50), (Tag.ADDRESS, "1.2.3.4"), (Tag.NAME, "a" * 2000), (Tag.PORT, 80)),
        Fields((Tag.OP, 51), (Tag.NAME, "..")),
        Fields((Tag.OP, 52)),
    ],
)
def test_nonsense_from_inside_is_refused_and_harms_nobody(fields: Fields) -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 7000, echo, "a.example.com")
        inside = await Inside(Network(allow=["*:1-65535"]), world).hello()
        assert await (await inside.open(fields)).over() != 0
        assert world.dialled == []
        assert world.asked == []
        assert not inside.egress.failed
        assert (await inside.connect("a.example.com", 7000)).replied.is_set()
        await inside.close()

    with_world(scenario)


def test_learning_allows_the_public_and_writes_the_smallest_policy() -> None:
    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 443, echo, "a.example.com")
        await world.serve(PUBLIC, 7000, echo)
        await world.serve("10.0.0.5", 7000, echo, "private.example.com")
        inside = await Inside(Network(learn=True), world).hello()
        for host, port in (("a.example.com", 443), ("a.example.com", 7000), (PUBLIC, 7000)):
            assert (await inside.connect(host, port)).replied.is_set()
        for host, port in (("private.example.com", 7000), ("10.0.0.5", 7000), ("a.example.com", 7001)):
            assert not (await inside.connect(host, port)).replied.is_set()
        assert inside.egress.learned.allow() == (f"{PUBLIC}:7000", "a.example.com:443,7000")
        await inside.close()

    with_world(scenario)


def test_what_came_of_a_request_that_is_allowed_no_more_is_cut() -> None:
    """A WebSocket has no further request that could be judged."""

    async def upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async def scenario(world: World) -> None:
        await world.serve(PUBLIC, 80, upgrade, "ws.example.com")
        inside = await Inside(Network(allow=["http://ws.example.com/a/*"]), world).hello()
        program = await inside.connect("ws.example.com", 80)
        await program.send(
            b"GET /a/x HTTP/1.1\r\nHost: ws.example.com\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
        )
        await program.until(lambda: program.got.endswith(b"\r\n\r\n"))
        inside.egress.set(Network(allow=["http://ws.example.com/a/*", "http://ws.example.com/b/*"]).spec)
        program.got.clear()
        await program.send(b"still there")
        assert await program.recv(11) == b"still there"
        inside.egress.set(Network(allow=["http://ws.example.com/b/*"]).spec)
        assert await program.over() != 0
        assert inside.last().verdict == "cut"
        await inside.close()

    with_world(scenario)
