"""Servers of the fake internet that speak no HTTP: an echo, one that counts to the end, one that speaks first and one
that sends for ever."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress

from .dns import Record

ECHO, COUNT, FLOOD, MAIL = 7, 9, 19, 25


class Plain:
    def __init__(self, record: Record) -> None:
        self._record = record

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._came(writer)
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        _close(writer)

    async def count(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers only once the other side has said that it will send no more."""
        self._came(writer)
        size, digest = 0, hashlib.sha256()
        with suppress(OSError):
            while data := await reader.read(2**20):
                size += len(data)
                digest.update(data)
            writer.write(f"{size} {digest.hexdigest()}\n".encode())
            await writer.drain()
        _close(writer)

    async def flood(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._came(writer)
        block = bytes(range(256)) * 256
        with suppress(OSError):
            while True:
                writer.write(block)
                await writer.drain()
        _close(writer)

    async def mail(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._came(writer)
        with suppress(OSError):
            writer.write(b"220 mail.example ESMTP\r\n")
            while line := await reader.readline():
                self._record("mail", line=line.decode("latin-1"))
                over = line.upper().startswith(b"QUIT")
                writer.write(b"221 bye\r\n" if over else b"250 " + line)
                await writer.drain()
                if over:
                    break
        _close(writer)

    def _came(self, writer: asyncio.StreamWriter) -> None:
        address, port = writer.get_extra_info("sockname")[:2]
        self._record("tcp", address=address, port=port)


def _close(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.close()
