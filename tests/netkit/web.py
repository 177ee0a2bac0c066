"""The web of the fake internet: HTTP/1.1 on any address, with and without TLS; it records every request as it came.

    /echo       what was asked, as JSON          /bytes?n=N      that many bytes
    /redirect?to=URL    302                      /hold           begins an answer and never ends it
    /ws         WebSocket, echoes                /chunks         a body in chunks, of several sizes
    /digest     size and SHA-256 of what was sent

A host given a folder with ``site`` serves its files (and its git repositories, if asked for). 169.254.169.254 is a
metadata service on every path. Everything else says hello.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from .dns import Record

METADATA = "169.254.169.254"
METADATA_SECRET = "metadata-of-the-host"
_WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TYPES = {".json": "application/json", ".html": "text/html", ".whl": "application/zip", ".tgz": "application/gzip"}


@dataclass
class Request:
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    facts: dict[str, Any] = field(default_factory=dict)

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path)

    def argument(self, name: str) -> str:
        return parse_qs(urlsplit(self.target).query).get(name, [""])[0]

    @property
    def host(self) -> str:
        return self.header("host").rpartition(":")[0] or self.header("host")


@dataclass(frozen=True)
class Site:
    folder: Path
    git: bool = False


class Web:
    def __init__(self, record: Record) -> None:
        self._record = record
        self.sites: dict[str, Site] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, ValueError):
            while await self._one(reader, writer):
                pass
        with suppress(OSError):
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await _read(reader, writer)
        address, port = writer.get_extra_info("sockname")[:2]
        tls = writer.get_extra_info("ssl_object")
        request.facts = {"address": address, "port": port, "sni": getattr(tls, "sni", None), "tls": tls is not None}
        self._record(
            "http", **request.facts, method=request.method, target=request.target, host=request.header("host"),
            headers=request.headers, body=request.body[:65536].decode("latin-1"),
        )  # fmt: skip
        if request.header("upgrade").lower() == "websocket":
            await _websocket(request, reader, writer)
            return False
        if request.path == "/hold":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nbegun")
            await reader.read()
            return False
        await self._answer(request, writer)
        await writer.drain()
        return request.header("connection").lower() != "close"

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        site = self.sites.get(request.host)
        if request.facts["address"] == METADATA:
            _send(writer, 200, METADATA_SECRET.encode())
        elif site is not None and site.git:
            await _git(site, request, writer)
        elif site is not None:
            _file(site, request, writer)
        elif request.path == "/redirect":
            _send(writer, 302, b"", location=request.argument("to"))
        elif request.path == "/bytes":
            _send(writer, 200, bytes(int(request.argument("n"))))
        elif request.path == "/chunks":
            pieces = [bytes([65 + number]) * size for number, size in enumerate((1, 10, 1000, 70_000))]
            body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n")
        elif request.path == "/echo":
            told = {
                "method": request.method, "target": request.target, "headers": request.headers,
                "body": request.body.decode("latin-1"), **request.facts,
            }  # fmt: skip
            _send(writer, 200, json.dumps(told).encode(), kind="application/json")
        elif request.path == "/digest":
            _send(writer, 200, f"{len(request.body)} {hashlib.sha256(request.body).hexdigest()}\n".encode())
        else:
            _send(writer, 200, f"hello from {request.host}\n".encode(), head=request.method == "HEAD")


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head[:-4].split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    request = Request(method, target, headers)
    if request.header("expect").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "chunked" in request.header("transfer-encoding").lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            request.body += (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    else:
        request.body = await reader.readexactly(int(request.header("content-length") or 0))
    return request


def _send(
    writer: asyncio.StreamWriter, status: int, body: bytes, *, kind: str = "text/plain", location: str = "",
    head: bool = False,
) -> None:  # fmt: skip
    words = {200: "OK", 302: "Found", 404: "Not Found"}
    lines = [f"HTTP/1.1 {status} {words[status]}", f"Content-Length: {len(body)}", f"Content-Type: {kind}"]
    if location:
        lines.append(f"Location: {location}")
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if head else body))


def _file(site: Site, request: Request, writer: asyncio.StreamWriter) -> None:
    path = (site.folder / request.path.lstrip("/")).resolve()
    if path.is_dir():
        path = next((path / name for name in ("index.html", "index.json") if (path / name).exists()), path)
    if not path.is_relative_to(site.folder) or not path.is_file():
        _send(writer, 404, b"no such file\n", head=request.method == "HEAD")
        return
    kind = _TYPES.get(path.suffix, "application/octet-stream")
    _send(writer, 200, path.read_bytes(), kind=kind, head=request.method == "HEAD")


async def _git(site: Site, request: Request, writer: asyncio.StreamWriter) -> None:
    """git's own CGI program, so that clients meet the protocol that hosting services speak."""
    environment = {
        "PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": str(site.folder), "GIT_HTTP_EXPORT_ALL": "1",
        "REQUEST_METHOD": request.method, "PATH_INFO": request.path, "QUERY_STRING": urlsplit(request.target).query,
        "CONTENT_TYPE": request.header("content-type"), "CONTENT_LENGTH": str(len(request.body)),
        "HTTP_CONTENT_ENCODING": request.header("content-encoding"), "GIT_PROTOCOL": request.header("git-protocol"),
        "REMOTE_USER": "", "REMOTE_ADDR": "192.0.2.1", "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }  # fmt: skip
    pipe = asyncio.subprocess.PIPE
    backend = await asyncio.create_subprocess_exec("git", "http-backend", stdin=pipe, stdout=pipe, env=environment)
    out, _ = await backend.communicate(request.body)
    head, _, body = out.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"status:")]
    status = next((line[7:].strip() for line in head.split(b"\r\n") if line.lower().startswith(b"status:")), b"200 OK")
    lines.append(b"Content-Length: %d" % len(body))
    writer.write(b"HTTP/1.1 " + status + b"\r\n" + b"\r\n".join(lines) + b"\r\n\r\n" + body)


async def _websocket(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    key = base64.b64encode(hashlib.sha1(request.header("sec-websocket-key").encode() + _WEBSOCKET).digest())
    head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    writer.write(head + b"Sec-WebSocket-Accept: " + key + b"\r\n\r\n")
    while True:
        first, size = await reader.readexactly(2)
        size &= 0x7F
        if size == 126:
            size = struct.unpack("!H", await reader.readexactly(2))[0]
        mask = await reader.readexactly(4)
        data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(await reader.readexactly(size)))
        head = bytes([first]) + (bytes([size]) if size < 126 else b"\x7e" + struct.pack("!H", size))
        writer.write(head + data)
        if first & 15 == 8:
            return
