"""DNS of the fake internet: messages, a server with answers that tests script, and a resolver that asks it by UDP."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

A, TXT, AAAA, HTTPS, ANY = 1, 16, 28, 65, 255
TYPES = {A: "A", TXT: "TXT", AAAA: "AAAA", HTTPS: "HTTPS", 2: "NS", 5: "CNAME", 6: "SOA", 15: "MX", 33: "SRV"}
NXDOMAIN, SERVFAIL = 3, 2

Record = Callable[..., None]


def encode_name(name: str) -> bytes:
    labels = [label.encode() for label in name.rstrip(".").split(".") if label]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def decode_name(message: bytes, at: int) -> tuple[str, int]:
    """The name at that place, and where it ends; compression is followed a bounded number of times."""
    labels: list[str] = []
    end = 0
    for _ in range(128):
        size = message[at]
        if size & 0xC0 == 0xC0:
            end = end or at + 2
            at = (size & 0x3F) << 8 | message[at + 1]
            continue
        at += 1
        if size == 0:
            break
        labels.append(message[at : at + size].decode("latin-1"))
        at += size
    return ".".join(labels), end or at


def query(number: int, name: str, kind: int) -> bytes:
    return struct.pack("!HHHHHH", number, 0x0100, 1, 0, 0, 0) + encode_name(name) + struct.pack("!HH", kind, 1)


def reply(message: bytes, code: int, records: Sequence[tuple[int, int, bytes]]) -> bytes:
    """An authoritative answer to a message: records are (type, ttl, data), all of the name asked for."""
    number, flags = struct.unpack_from("!HH", message)
    _, end = decode_name(message, 12)
    head = struct.pack("!HHHHHH", number, 0x8480 | (flags & 0x0100) | code, 1, len(records), 0, 0)
    body = b"".join(b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, ttl, len(data)) + data for kind, ttl, data in records)
    return head + message[12 : end + 4] + body


def addresses(message: bytes) -> tuple[int, list[str]]:
    """The code of an answer and its addresses."""
    _, flags, questions, answers = struct.unpack_from("!HHHH", message)
    at = 12
    for _ in range(questions):
        at = decode_name(message, at)[1] + 4
    found = []
    for _ in range(answers):
        at = decode_name(message, at)[1]
        kind, _, _, size = struct.unpack_from("!HHIH", message, at)
        data = message[at + 10 : at + 10 + size]
        at += 10 + size
        if kind in (A, AAAA):
            found.append(socket.inet_ntop(socket.AF_INET if kind == A else socket.AF_INET6, data))
    return flags & 15, found


class Zone:
    """Which names there are. Each name has a list of answers, each a list of addresses: the n-th question for its A
    records gets the n-th of them, then always the last. ``*.x`` is any name below x that has no entry of its own."""

    def __init__(self) -> None:
        self._answers: dict[str, list[list[str]]] = {}
        self._codes: dict[str, int] = {}
        self._asked: dict[str, int] = {}

    def put(self, name: str, answers: list[list[str]], code: int = 0) -> None:
        self._answers[name.lower()] = answers
        self._codes[name.lower()] = code
        self._asked[name.lower()] = 0

    def answer(self, message: bytes) -> bytes:
        name, end = decode_name(message, 12)
        kind: int = struct.unpack_from("!H", message, end)[0]
        entry = self._entry(name.lower())
        if entry is None:
            return reply(message, NXDOMAIN, [])
        if self._codes[entry]:
            return reply(message, self._codes[entry], [])
        answers = self._answers[entry]
        turn = min(self._asked[entry], len(answers) - 1)
        if kind == A:
            self._asked[entry] += 1
        elif self._asked[entry]:
            turn = min(self._asked[entry] - 1, len(answers) - 1)  # the same answer's other half
        records = []
        for address in answers[turn]:
            mine = AAAA if ":" in address else A
            if mine == kind:
                packed = socket.inet_pton(socket.AF_INET6 if mine == AAAA else socket.AF_INET, address)
                records.append((mine, 0, packed))
        return reply(message, 0, records)

    def _entry(self, name: str) -> str | None:
        if name in self._answers:
            return name
        parts = name.split(".")
        wild = ("*." + ".".join(parts[at:]) for at in range(1, len(parts)))
        return next((each for each in wild if each in self._answers), None)


class Server(asyncio.DatagramProtocol):
    """Port 53 of every address, by UDP; ``serve_tcp`` for the other way."""

    def __init__(self, zone: Zone, record: Record) -> None:
        self._zone = zone
        self._record = record

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, source: Any) -> None:
        with suppress(IndexError, struct.error):
            self._note(data, "udp")
            self._transport.sendto(self._zone.answer(data), source)

    async def serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, IndexError, struct.error, OSError):
            while True:
                size = struct.unpack("!H", await reader.readexactly(2))[0]
                message = await reader.readexactly(size)
                self._note(message, "tcp")
                answer = self._zone.answer(message)
                writer.write(struct.pack("!H", len(answer)) + answer)
        writer.close()

    def _note(self, message: bytes, how: str) -> None:
        name, end = decode_name(message, 12)
        kind = struct.unpack_from("!H", message, end)[0]
        self._record("dns", name=name, type=TYPES.get(kind, str(kind)), how=how)


class Resolver(asyncio.DatagramProtocol):
    """Asks a server for both kinds of addresses, as a resolver of the host would: with a packet for each."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, source: Any) -> None:
        waiting = self._waiting.get(struct.unpack_from("!H", data)[0])
        if waiting is not None and not waiting.done():
            waiting.set_result(data)

    async def resolve(self, name: str) -> list[str]:
        found: list[str] = []
        for kind in (A, AAAA):
            code, some = addresses(await self._ask(query(next(self._numbers) & 0xFFFF, name, kind)))
            if code:
                raise socket.gaierror(socket.EAI_NONAME if code == NXDOMAIN else socket.EAI_AGAIN, f"{name}: {code}")
            found += some
        return found

    async def _ask(self, message: bytes) -> bytes:
        number = struct.unpack_from("!H", message)[0]
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._transport.sendto(message)
            return await asyncio.wait_for(future, 5)
        finally:
            del self._waiting[number]
