"""The child: ``unshare -Urn python -m netkit.world FOLDER``. All servers, the judge, and a Unix socket for questions.

A question is one JSON object on a connection of its own, the answer another, with a descriptor if one was asked for. It
ends when its standard input does: with the process that started it.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import resource
import socket
import ssl
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import namespace
from .authority import Authority
from .dns import Resolver, Server, Zone
from .packets import Sink
from .plain import COUNT, ECHO, FLOOD, MAIL, Plain
from .web import Site, Web

HTTP_PORTS, TLS_PORTS = (80, 8000, 8080), (443, 8443)
NAME_SERVER = "9.9.9.9"
_MOST_EVENTS = 100_000
_CONNECT_SECONDS = 5


class World:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events: list[dict[str, Any]] = []
        self._sink = Sink()
        self._zone = Zone()
        self._authority = Authority(folder)
        self._web = Web(self._record)
        self._plain = Plain(self._record)
        self._resolver = Resolver()
        self._kept: list[Any] = []  # servers and transports live as long as somebody holds them

    def _record(self, kind: str, **facts: Any) -> None:
        if len(self._events) < _MOST_EVENTS:
            self._events.append({"kind": kind, **facts})

    async def begin(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sink.fileno(), self._sink.drain)
        names = Server(self._zone, self._record)
        place = (NAME_SERVER, 53)
        self._kept.append(await loop.create_datagram_endpoint(lambda: names, local_addr=place))
        self._kept.append(await loop.create_datagram_endpoint(lambda: self._resolver, remote_addr=place))
        await self._listen(53, names.serve_tcp)
        for port in HTTP_PORTS:
            await self._listen(port, self._web.serve)
        for port in TLS_PORTS:
            await self._listen(port, self._web.serve, tls=self._tls())
        for port, serve in ((ECHO, self._plain.echo), (COUNT, self._plain.count), (FLOOD, self._plain.flood)):
            await self._listen(port, serve)
        await self._listen(MAIL, self._plain.mail)
        self._kept.append(await asyncio.start_unix_server(self._question, self._folder / "control", backlog=512))

    async def _listen(self, port: int, serve: Any, tls: ssl.SSLContext | None = None) -> None:
        hosts = ["0.0.0.0", "::"] if namespace.has_ipv6() else ["0.0.0.0"]
        self._kept.append(await asyncio.start_server(serve, hosts, port, ssl=tls, backlog=1024, limit=2**20))

    def _tls(self) -> ssl.SSLContext:
        context = self._authority.context("nobody.example")
        context.sni_callback = self._named  # type: ignore[assignment]
        return context

    def _named(self, connection: Any, name: str | None, _context: ssl.SSLContext) -> None:
        connection.sni = name
        self._record("tls", sni=name)
        if name is not None:
            connection.context = self._authority.context(name)

    # -- questions -----------------------------------------------------------------------

    async def _question(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made: socket.socket | None = None
        with suppress(OSError, asyncio.IncompleteReadError):
            question = json.loads(await reader.readline())
            try:
                answer = await getattr(self, "do_" + question.pop("do"))(**question)
                if isinstance(answer, socket.socket):
                    answer, made = None, answer
                told = {"answer": answer}
            except socket.gaierror as error:
                told = {"name_error": error.errno, "text": str(error)}
            except OSError as error:
                told = {"errno": error.errno, "text": str(error)}
            await self._tell(writer, json.dumps(told).encode() + b"\n", made)
        if made is not None:
            made.close()
        writer.close()

    async def _tell(self, writer: asyncio.StreamWriter, text: bytes, made: socket.socket | None) -> None:
        if made is None:
            writer.write(text)
            await writer.drain()
            return
        rights = array.array("i", [made.fileno()])
        raw = writer.get_extra_info("socket")
        # asyncio's own socket object has no sendmsg; a copy of its descriptor has
        with socket.socket(fileno=os.dup(raw.fileno())) as copy:
            copy.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    async def do_resolve(self, name: str) -> list[str]:
        return await self._resolver.resolve(name)

    async def do_connect(self, address: str, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connecting = asyncio.get_running_loop().sock_connect(made, (address, port))
            await asyncio.wait_for(connecting, _CONNECT_SECONDS)
        except BaseException:
            made.close()
            raise
        return made

    async def do_name(self, name: str, answers: list[list[str]], code: int) -> None:
        self._zone.put(name, answers, code)

    async def do_site(self, host: str, folder: str, git: bool) -> None:
        self._web.sites[host] = Site(Path(folder), git)

    async def do_leaf(self, name: str) -> str:
        return str(self._authority.leaf(name))

    async def do_seen(self) -> list[dict[str, Any]]:
        return self._events

    async def do_forget(self) -> None:
        self._events.clear()
        self._sink.clear()

    async def do_packets(self) -> list[dict[str, Any]]:
        return [packet.to_dict() for packet in self._sink.all()]

    async def do_find(self, text: str) -> dict[str, Any]:
        found = [packet.to_dict() for packet in self._sink.with_text(text.encode())]
        events = [event for event in self._events if text.lower() in json.dumps(event).lower()]
        return {"packets": found, "events": events, "lost": self._sink.lost}


async def main() -> None:
    namespace.loopback_up()
    namespace.everything_is_local()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    world = World(Path(sys.argv[1]))
    await world.begin()
    print("ready", flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    os._exit(0)  # connections that still run are of no interest to anybody


if __name__ == "__main__":
    asyncio.run(main())
