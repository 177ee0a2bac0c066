"""TLS that is opened: real clients, verified servers, secrets that are swapped in and do not come back."""

from __future__ import annotations

import asyncio
import base64
import gzip
import http.client
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from inspect_helpers import (
    NAME,
    PLACE,
    VALUE,
    Pipe,
    Spec,
    Verdict,
    World,
    drain,
    echo,
    internet,
    program_context,
    read_head,
    run,
    sandbox_ca,
    world,
)

from sloplet.network import exchange
from sloplet.network.channel import Refused
from sloplet.network.secrets import SecretTable
from sloplet.network.sniff import Tls, sniff

pytestmark = pytest.mark.anyone

HOST = b"Host: " + NAME.encode() + b"\r\n"
CLOSE = b"Connection: close\r\n"
GET = b"GET /one HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n"
P, V = PLACE.encode(), VALUE.encode()


def table(*where: str, value: str | None = VALUE) -> SecretTable:
    return SecretTable([Spec(where=where or ("headers",))], {"TOKEN": value})


async def curl(here: World, *arguments: str, path: str = "/") -> tuple[int, bytes, str]:
    command = [
        "curl",
        "-sS",
        "--noproxy",
        "*",
        "--cacert",
        sandbox_ca()[1],
        "--connect-to",
        f"{NAME}:443:127.0.0.1:{here.port}",
    ]
    child = await asyncio.create_subprocess_exec(
        *command, *arguments, f"https://{NAME}{path}", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out, err.decode()


# -- real clients -----------------------------------------------------------------------


def test_curl_with_a_token() -> None:
    async def main() -> None:
        log: list[bytes] = []
        async with world(echo(log), tls=True, secrets=table()) as here:
            code, out, err = await curl(here, "-H", f"Authorization: Bearer {PLACE}", path="/me")
            assert (code, err) == (0, "")
            assert b"Authorization: Bearer " + V + b"\r\n" in log[0]
            assert V not in out
            code, _, _ = await curl(here, "-u", f"me:{PLACE}", "-b", f"session={PLACE}")
            assert b"Basic " + base64.b64encode(b"me:" + V) in log[1]
            assert b"Cookie: session=" + V in log[1]
            assert here.seen == [("GET", "/me"), ("GET", "/")]

    run(main())


@pytest.mark.parametrize(
    "arguments", [["-T", "{file}"], ["--data-binary", "@{file}"], ["-T", "{file}", "-H", "Transfer-Encoding: chunked"]]
)
@pytest.mark.parametrize("size", [10, 900_000, 3_000_000])
def test_curl_sends_bodies_with_a_secret(arguments: list[str], size: int, tmp_path: Path) -> None:
    """With Expect: 100-continue, with a length, and in chunks; short, and too long to be held."""
    text = b"<" + P + b">" + b"x" * size + b"<" + P + b">"
    (tmp_path / "file").write_bytes(text)
    got: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await read_head(reader)).lower()
        if b"expect: 100-continue" in head:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if b"content-length: " in head:
            got.append(await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0])))
        else:
            body = b""
            while count := int(await reader.readline(), 16):
                body += (await reader.readexactly(count + 2))[:-2]
            got.append(body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async def main() -> None:
        async with world(handler, tls=True, secrets=table("body")) as here:
            filled = [argument.format(file=tmp_path / "file") for argument in arguments]
            assert await curl(here, *filled, "-H", "Content-Type: text/plain") == (0, b"ok", "")
            assert got == [text.replace(P, V)]

    run(main())


def test_python_keeps_its_connection() -> None:
    async def main() -> None:
        async with world(echo(), tls=True, secrets=table()) as here:

            def talk() -> list[bytes]:
                connection = http.client.HTTPSConnection(NAME, context=program_context())
                raw = socket.create_connection(("127.0.0.1", here.port))
                connection.sock = program_context().wrap_socket(raw, server_hostname=NAME)
                answers = []
                for number in range(5):
                    connection.request("POST", f"/{number}", body=b"x" * number, headers={"X-Token": PLACE})
                    answers.append(connection.getresponse().read())
                connection.close()
                return answers

            answers = await asyncio.to_thread(talk)
            assert [answer.split(b" ")[1] for answer in answers] == [b"/0", b"/1", b"/2", b"/3", b"/4"]
            assert len(here.seen) == 5

    run(main())


def test_websocket_inside_tls() -> None:
    switched = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"Sec-WebSocket-Protocol: token, " + V in await read_head(reader)
        writer.write(switched)
        while data := await reader.read(100):
            writer.write(data)

    async def main() -> None:
        async with world(handler, tls=True, secrets=table()) as here:
            pipe = await here.open(program_context())
            head = b"GET /ws HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
            await pipe.write(head + b"Sec-WebSocket-Protocol: token, " + P + b"\r\n\r\n")
            assert await pipe.reader.readexactly(len(switched)) == switched
            for message in (b"\x81\x81\0\0\0\0s", b"\x89\x00"):
                await pipe.write(message)
                assert await pipe.reader.readexactly(len(message)) == message
            pipe.abort()

    run(main())


# -- who may speak ----------------------------------------------------------------------


def test_a_program_may_offer_http2_beside_http1_but_not_alone() -> None:
    async def main() -> None:
        async with world(echo(), tls=True) as here:
            pipe = await here.open(program_context(alpn=["h2", "http/1.1"]))
            assert pipe.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
            pipe.abort()
            with pytest.raises(OSError):  # noqa: PT011
                await here.open(program_context(alpn=["h2"]))
            assert "HTTP/2" in here.refused[0]
            assert "passthrough" in here.refused[0]

    run(main())


def test_another_server_name_is_refused_before_anything_is_sent() -> None:
    async def main() -> None:
        async def no_dial() -> Pipe:
            raise AssertionError

        async with world(echo(), tls=True, dial=no_dial) as here:
            with pytest.raises(OSError):  # noqa: PT011
                await here.open(program_context(), name="evil.test")
            bare = program_context()
            bare.check_hostname = False
            with pytest.raises(OSError):  # noqa: PT011
                await here.open(bare, name="")
            pipe = await here.open()
            await pipe.write(b"GET / HTTP/1.1\r\n\r\n")
            with pytest.raises(ConnectionError):
                await drain(pipe)
            assert len(here.refused) == 3
            assert "evil.test" in here.refused[0]
            assert "no server name" in here.refused[1]

    run(main())


def test_another_host_inside_tls_is_refused() -> None:
    async def main() -> None:
        log: list[bytes] = []
        async with world(echo(log), tls=True) as here:
            got = await here.say(GET.replace(NAME.encode(), b"evil.test"), program_context())
            assert got.startswith(b"HTTP/1.1 403 Forbidden")
            assert b"evil.test" in got
            got = await here.say(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", program_context())
            assert b"HTTP/2" in got
            assert log == []

    run(main())


def test_an_address_needs_no_server_name() -> None:
    async def main() -> None:
        async with world(echo(), tls=True, name="127.0.0.1") as here:
            pipe = await here.open(program_context(), name="127.0.0.1")
            await pipe.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert (await drain(pipe)).startswith(b"HTTP/1.1 200")
            pipe.abort()

    run(main())


def test_a_program_that_does_not_trust_the_ca_is_named() -> None:
    async def main() -> None:
        async with world(echo(), tls=True) as here:
            with pytest.raises(ssl.SSLCertVerificationError):
                await here.open(ssl.create_default_context())
            await here.idle.wait()
            assert "gave up when it saw the sandbox's certificate" in here.refused[0]
            child = await asyncio.create_subprocess_exec(
                "curl", "-s", "--noproxy", "*", "--connect-to", f"{NAME}:443:127.0.0.1:{here.port}", f"https://{NAME}"
            )
            assert await child.wait() == 60
            here.idle.clear()
            while len(here.ends) < 2:
                await here.idle.wait()
            assert "unknown ca" in here.refused[1]

    run(main())


# -- who is spoken to -------------------------------------------------------------------


@pytest.mark.parametrize("case", ["name", "authority", "closed", "refused", "plain"])
def test_a_server_that_cannot_be_verified_gets_nothing_and_the_program_words(case: str) -> None:
    async def main() -> None:
        log: list[bytes] = []
        more: dict[str, object] = {}
        if case == "name":
            more["server_name"] = "other.test"
        elif case == "authority":
            more["trust"] = ssl.create_default_context()
        elif case in ("closed", "refused"):

            async def dial() -> Pipe:
                raise (
                    Refused("nobody may go there")
                    if case == "refused"
                    else ConnectionRefusedError(111, "Connection refused")
                )

            more["dial"] = dial
        else:
            plain = await asyncio.start_server(
                lambda _, writer: writer.write(b"220 hello\r\n") or writer.close(), "127.0.0.1", 0
            )

            async def dial_plain() -> Pipe:
                return Pipe(*await asyncio.open_connection(*plain.sockets[0].getsockname()))

            more["dial"] = dial_plain
        async with world(echo(log), tls=True, secrets=table(), **more) as here:  # type: ignore[arg-type]
            got = await here.say(GET.replace(CLOSE, CLOSE + b"X: " + P + b"\r\n"), program_context())
            assert got.startswith(b"HTTP/1.1 502 Bad Gateway")
            assert here.refused[0].encode() in got
            assert log == []
            words = {
                "name": "cannot be verified",
                "authority": "cannot be verified",
                "closed": "Connection refused",
                "refused": "nobody may go",
            }
            assert words.get(case, "TLS failed") in here.refused[0]
        if case == "plain":
            plain.close()

    run(main())


def test_the_server_is_offered_http1_only() -> None:
    async def main() -> None:
        hellos = bytearray()

        async def dial() -> Pipe:
            a, b = socket.socketpair()
            far = Pipe(*await asyncio.open_connection(sock=b))

            async def listen() -> None:
                hellos.extend(await far.read())
                far.abort()

            asyncio.get_running_loop().create_task(listen())
            return Pipe(*await asyncio.open_connection(sock=a))

        async with world(echo(), tls=True, dial=dial) as here:
            await here.say(GET, program_context())
            assert sniff(bytes(hellos)) == Tls(NAME, ("http/1.1",))

    run(main())


# -- secrets ----------------------------------------------------------------------------


def test_in_query_and_body_if_asked_for() -> None:
    async def main() -> None:
        log: list[bytes] = []
        async with world(echo(log), tls=True, secrets=table("query", "body", value='quo"te and/or')) as here:
            body = json.dumps({"key": PLACE}).encode()
            head = b"POST /?k=" + P + b" HTTP/1.1\r\n" + HOST + CLOSE + b"Content-Type: application/json\r\n"
            await here.say(head + b"Content-Length: %d\r\n\r\n" % len(body) + body, program_context())
            assert log[0].startswith(b"POST /?k=" + quote('quo"te and/or', safe="").encode() + b" HTTP/1.1\r\n")
            assert json.loads(log[0].partition(b"\r\n\r\n")[2]) == {"key": 'quo"te and/or'}
            form = b"key=" + P
            head = b"POST / HTTP/1.1\r\n" + HOST + CLOSE + b"Content-Type: application/x-www-form-urlencoded\r\n"
            await here.say(head + b"Content-Length: %d\r\n\r\n" % len(form) + form, program_context())
            assert log[1].endswith(b"\r\n\r\nkey=" + quote('quo"te and/or', safe="").encode())

    run(main())


def test_what_is_held_of_bodies_is_bounded_for_all_connections_together() -> None:
    """A body that finds no room is sent on in chunks, as a long one is."""

    async def main() -> None:
        log: list[bytes] = []
        secrets = table("body")
        size = 1024 * 1024
        head = b"POST / HTTP/1.1\r\n" + HOST + CLOSE + b"Content-Length: "
        async with world(echo(log), tls=True, secrets=secrets) as here:
            stalled = [await here.open(program_context()) for _ in range(16)]
            for pipe in stalled:
                await pipe.write(head + b"%d\r\n\r\nx" % size)
            while secrets._held < 16 * size:
                await asyncio.sleep(0.01)
            await here.say(head + b"%d\r\n\r\n" % len(P) + P, program_context())
            assert b"Transfer-Encoding: chunked" in log[0]
            assert VALUE.encode() in log[0]
            for pipe in stalled:
                pipe.abort()
            while secrets._held:
                await asyncio.sleep(0.01)
            await here.say(head + b"%d\r\n\r\n" % len(P) + P, program_context())
            assert b"Content-Length: %d" % len(VALUE) in log[-1]

    run(main())


def test_elsewhere_the_placeholder_is_refused() -> None:
    async def main() -> None:
        log: list[bytes] = []
        secrets = SecretTable([Spec(hosts=("other.test",))], {"TOKEN": VALUE})
        async with world(echo(log), tls=True, secrets=secrets) as here:
            got = await here.say(GET.replace(CLOSE, CLOSE + b"Authorization: Bearer " + P + b"\r\n"), program_context())
            assert got.startswith(b"HTTP/1.1 403")
            assert "it is only for other.test" in here.refused[0]
            post = b"POST / HTTP/1.1\r\n" + HOST + CLOSE + b"Content-Length: %d\r\n\r\n" % len(P) + P
            assert (await here.say(post, program_context())).startswith(b"HTTP/1.1 403")
            assert log == []

    run(main())


def test_values_are_rotated_and_taken_away_on_an_open_connection() -> None:
    async def main() -> None:
        log: list[bytes] = []
        secrets = table()
        async with world(echo(log), tls=True, secrets=secrets) as here:
            pipe = await here.open(program_context())
            ask = b"GET / HTTP/1.1\r\n" + HOST + b"X: " + P + b"\r\n\r\n"
            for value in (VALUE, "another value"):
                secrets.set({"TOKEN": value})
                await pipe.write(ask)
                while len(log) < 1 or value.encode() not in log[-1]:
                    assert await pipe.read()
            secrets.set({"TOKEN": None})
            await pipe.write(ask)
            assert b"give it again" in await drain(pipe)
            assert len(log) == 2
            pipe.abort()

    run(main())


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_what_a_server_sends_back_is_hidden(framing: str) -> None:
    text = b"a" * 70_000 + b"<" + V + b">" + b"b" * 70_000 + b"<" + base64.b64encode(b"me:" + V) + b">"

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await read_head(reader)
        assert b"Accept-Encoding: identity\r\n" in head
        kind = {
            "length": b"Content-Length: %d\r\n" % len(text),
            "chunked": b"Transfer-Encoding: chunked\r\n",
            "close": b"",
        }[framing]
        writer.write(b"HTTP/1.1 200 OK\r\nX-Echo: " + V + b"\r\n" + kind + b"\r\n")
        step = 7777  # the borders of pieces are anywhere
        for at in range(0, len(text), step):
            piece = text[at : at + step]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if framing == "chunked" else piece)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if framing == "chunked" else b"")

    async def main() -> None:
        async with world(handler, tls=True, secrets=table()) as here:
            code, out, err = await curl(
                here, "-i", "-H", f"X: {PLACE}", "-u", f"me:{PLACE}", "-H", "Accept-Encoding: gzip"
            )
            assert (code, err) == (0, "")
            head, _, body = out.partition(b"\r\n\r\n")
            assert b"X-Echo: " + P in head
            assert V not in out
            assert base64.b64encode(b"me:" + V) not in out
            if framing == "length":
                assert len(body) == len(text)
            else:
                assert body == text.replace(V, P).replace(base64.b64encode(b"me:" + V), base64.b64encode(b"me:" + P))

    run(main())


def test_compressed_bodies_pass_as_they_are() -> None:
    body = gzip.compress(b"hello " + P)

    async def main() -> None:
        log: list[bytes] = []
        async with world(echo(log), tls=True, secrets=table("body")) as here:
            head = (
                b"POST / HTTP/1.1\r\n"
                + HOST
                + CLOSE
                + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            await here.say(head + body, program_context())
            assert log[0].endswith(body)

    run(main())


def test_rules_about_paths() -> None:
    async def main() -> None:
        log: list[bytes] = []
        async with world(echo(log), tls=True, judge=lambda method, path: Verdict(path == "/ok", "only /ok")) as here:
            code, out, _ = await curl(here, "-i", path="/no")
            assert code == 0
            assert out.startswith(b"HTTP/1.1 403")
            assert out.endswith(b"sloplet: only /ok\n")
            code, out, _ = await curl(here, path="/ok")
            assert out.startswith(b"GET /ok ")
            code, out, _ = await curl(here, "-I", path="/no")  # HEAD: no body, and curl does not complain
            assert (code, out.startswith(b"HTTP/1.1 403")) == (0, True)
            assert len(log) == 1

    run(main())


# -- endings ----------------------------------------------------------------------------


def cut_below(answer: bytes) -> Callable[[], Awaitable[Pipe]]:
    """A server whose connection ends below TLS, without TLS saying so."""

    async def dial() -> Pipe:
        a, b = socket.socketpair()
        a.setblocking(True)

        def serve() -> None:
            b.settimeout(20)
            with internet()[0].leaf(NAME).wrap_socket(b, server_side=True) as tls:
                tls.recv(4096)
                tls.sendall(answer)
                socket.socket.shutdown(tls, socket.SHUT_WR)
                try:
                    tls.recv(4096)
                except OSError:
                    pass

        asyncio.get_running_loop().run_in_executor(None, serve)
        a.setblocking(False)
        return Pipe(*await asyncio.open_connection(sock=a))

    return dial


@pytest.mark.parametrize(
    ("answer", "whole"),
    [(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfull", True), (b"HTTP/1.1 200 OK\r\n\r\nwho knows", False),
     (b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\nhalf", False)],
)  # fmt: skip
def test_an_end_that_tls_did_not_announce(answer: bytes, whole: bool) -> None:
    async def main() -> None:
        async with world(echo(), tls=True, dial=cut_below(answer)) as here:
            code, out, _ = await curl(here)
            if whole:
                assert (code, out) == (0, b"full")
            else:
                assert code != 0
            await here.idle.wait()
            assert (here.ends == [""]) == whole

    run(main())


def test_a_large_transfer_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        size = 24 * 2**20
        got = 0

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal got
            await read_head(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            while got < size:
                piece = await reader.read(65536)
                got += len(piece)
                writer.write(piece)
                await writer.drain()

        async with world(handler, tls=True, secrets=table()) as here:
            pipe = await here.open(program_context())
            await pipe.write(b"PUT / HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % size)

            async def send() -> None:
                for _ in range(size // 65536):
                    await pipe.write(b"y" * 65536)

            sending = asyncio.create_task(send())
            await pipe.reader.readuntil(b"\r\n\r\n")
            back = 0
            while back < size:
                back += len(await pipe.read())
            await sending
            assert got == back == size
            pipe.abort()

    assert exchange._BUFFERED_BODY < 24 * 2**20
    run(main())
