"""A registry that misbehaves on demand: it serves images from memory, and for each path what a test scripts instead.

Everything runs on the test's own event loop. What it was asked is kept in ``requests``.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from sloplet.images.media import OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST, host_platform


@dataclass
class Reply:
    """``length`` may lie; ``cut``: close after so many bytes of the body; ``stall``: then send nothing more; ``drip``:
    a little ("headers" or "body") now and then, without end."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    cut: int | None = None
    stall: bool = False
    chunked: bool = False
    drip: str = ""


@dataclass
class Request:
    method: str
    path: str  #: with its query
    headers: dict[str, str]
    body: bytes


Answer = Reply | Callable[[Request], "Reply | None"]


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def layer_tar(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


@dataclass
class Made:
    """An image in memory."""

    manifest: bytes
    blobs: dict[str, bytes]
    config: str  #: digest
    layers: list[str]

    @property
    def digest(self) -> str:
        return digest(self.manifest)


def make_image(*layers: bytes, config: dict[str, Any] | None = None, manifest: dict[str, Any] | None = None) -> Made:
    """An OCI image of these tars, packed with gzip; ``config`` and ``manifest`` change what is said of it."""
    tars = layers or (layer_tar({"bin/sh": b"#!" + b"x" * 100}),)
    packed = [gzip.compress(tar, mtime=0) for tar in tars]
    settings = {
        "architecture": host_platform().architecture, "os": "linux", "config": {"Env": ["A=1"]},
        "rootfs": {"type": "layers", "diff_ids": [digest(tar) for tar in tars]}, **(config or {}),
    }  # fmt: skip
    raw = json.dumps(settings).encode()
    document = {
        "schemaVersion": 2, "mediaType": OCI_MANIFEST,
        "config": {"mediaType": OCI_CONFIG, "digest": digest(raw), "size": len(raw)},
        "layers": [{"mediaType": f"{OCI_LAYER}+gzip", "digest": digest(data), "size": len(data)} for data in packed],
        **(manifest or {}),
    }  # fmt: skip
    blobs = {digest(data): data for data in (raw, *packed)}
    return Made(json.dumps(document).encode(), blobs, digest(raw), [digest(data) for data in packed])


class RudeRegistry:
    """An asynchronous context manager; ``host`` is as in references."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[bytes, str]] = {}  #: by tag or digest
        self.script: dict[str, list[Answer]] = {}  #: path (or its end) -> what to answer, one after the other
        self.before: Callable[[Request], Reply | None] | None = None  #: asked first, every time
        self.ranges = True
        self.swallow = 0  #: of the next large body keep so many bytes, and hang up
        self.lends = True  #: blobs of other repositories are mounted
        self.uploads: dict[str, bytes] = {}
        self._held: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.host = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._held:
            writer.transport.abort()
        await self._server.wait_closed()
        await asyncio.sleep(0)

    def add(self, image: Made, *names: str) -> Made:
        self.blobs.update(image.blobs)
        for name in (*names, image.digest):
            self.manifests[name] = (image.manifest, OCI_MANIFEST)
        return image

    def add_index(self, *entries: tuple[bytes, dict[str, str] | None], name: str, kind: str = OCI_MANIFEST) -> bytes:
        listed = []
        for data, platform in entries:
            item = {"mediaType": kind, "digest": digest(data), "size": len(data)}
            listed.append({**item, "platform": platform} if platform else item)
        raw = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": listed}).encode()
        self.manifests[name] = self.manifests[digest(raw)] = (raw, OCI_INDEX)
        return raw

    def will(self, path: str, *answers: Answer) -> None:
        """For paths that end so (a digest, a tag), the next answers."""
        self.script.setdefault(path, []).extend(answers)

    def asked(self, end: str) -> list[Request]:
        return [request for request in self.requests if request.path.partition("?")[0].endswith(end)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._held.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._held.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:]) if name}
        request = Request(method, path, headers, b"")
        self.requests.append(request)
        length = int(headers.get("content-length", "0"))
        if self.swallow and length > self.swallow:  # take a part of it, and hang up
            partly = await reader.readexactly(self.swallow)
            name = path.partition("?")[0].rpartition("/")[2]
            self.uploads[name] = self.uploads.get(name, b"") + partly
            self.swallow = 0
            return False
        request.body = await reader.readexactly(length)
        reply = self._reply(request)
        return await self._send(reply, request, reader, writer)

    async def _send(
        self, reply: Reply, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        lines = [f"HTTP/1.1 {reply.status} X"]
        headers = dict(reply.headers)
        if reply.chunked:
            headers["Transfer-Encoding"] = "chunked"
        else:
            headers.setdefault("Content-Length", str(len(reply.body) if reply.length is None else reply.length))
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if reply.drip:
            writer.write(("\r\n".join(lines) + "\r\n" * (2 if reply.drip == "body" else 1)).encode())
            while not reader.at_eof():
                writer.write(b"x" if reply.drip == "body" else b"X-Slow: x\r\n")
                await writer.drain()
                await asyncio.sleep(0.05)
            return False
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        body = b"" if request.method == "HEAD" else reply.body[: reply.cut]
        if reply.chunked:
            body = (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
        writer.write(body)
        await writer.drain()
        if reply.stall:
            await reader.read()  # until the client gives up
            return False
        return reply.cut is None

    def _reply(self, request: Request) -> Reply:
        if self.before and (early := self.before(request)):
            return early
        path = request.path.partition("?")[0]
        for end, answers in self.script.items():
            if answers and path.endswith(end):
                answer = answers.pop(0)
                found = answer if isinstance(answer, Reply) else answer(request)
                if found is not None:
                    return found
                break
        name = path.rpartition("/")[2]
        if request.method in ("POST", "PATCH", "PUT") or "/uploads/" in path:
            return self._upload(request, path, name)
        if "/manifests/" in path and name in self.manifests:
            data, kind = self.manifests[name]
            return Reply(200, data, {"Content-Type": kind, "Docker-Content-Digest": digest(data)})
        if "/blobs/" in path and name in self.blobs:
            return self._blob(request, self.blobs[name])
        return Reply(404, b'{"errors":[{"code":"UNKNOWN","message":"not here"}]}')

    def _upload(self, request: Request, path: str, name: str) -> Reply:
        query = parse_qs(urlsplit(request.path).query)
        if path.endswith("/manifests/" + name):
            self.manifests[name] = (request.body, request.headers["content-type"])
            return Reply(201, headers={"Docker-Content-Digest": digest(request.body)})
        if request.method == "POST":
            if query.get("mount", [""])[0] in self.blobs and self.lends:
                return Reply(201)
            self.uploads[f"u{len(self.uploads)}"] = b""
            return Reply(202, headers={"Location": f"{path}u{len(self.uploads) - 1}?state=0"})
        have = self.uploads[name]
        start = request.headers.get("content-range", f"{len(have)}-").partition("-")[0]
        if request.method != "GET" and int(start) != len(have):
            return Reply(416)
        have = self.uploads[name] = have + request.body
        if request.method == "PUT":
            if query["digest"] != [digest(have)]:
                return Reply(400, b'{"errors":[{"message":"digest invalid"}]}')
            self.blobs[digest(have)] = have
            return Reply(201, headers={"Docker-Content-Digest": digest(have)})
        headers = {"Location": f"{path}?state={len(have)}", "Range": f"0-{max(0, len(have) - 1)}"}
        return Reply(202 if request.method == "PATCH" else 204, headers=headers)

    def _blob(self, request: Request, data: bytes) -> Reply:
        wanted = request.headers.get("range", "")
        if self.ranges and wanted.startswith("bytes="):
            start = int(wanted[6:].rstrip("-"))
            return Reply(206, data[start:], {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"})
        return Reply(200, data)
