"""A client of the registry protocol (v2) for one repository on one server, over httpx.

Credentials go to the server that they are for and to the token server that it names, never after a redirect to
another. What is cut, slow or busy is tried again, from where it was cut; what is wrong is not. Nothing that a server
says decides how much is read or for how long.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any
from urllib.parse import urljoin
from urllib.request import getproxies

import httpx

from .. import __version__
from ..errors import ImageInvalid, ImageNotFound, RegistryDenied, RegistryError, RegistryUnavailable
from .blobs import BlobWriter
from .challenge import content_range, origin, retry_after
from .credentials import ANONYMOUS, Credentials
from .media import ACCEPTED, MAX_MANIFEST, Descriptor, digest_of, verify
from .patience import Patience, Transient, Tries
from .reach import Reach, confine
from .reference import DIGEST_RE
from .registries import Endpoint
from .threads import whole
from .tokens import Tokens

MOST_REDIRECTS = 5
_MOST_COMPLAINT = 16 * 1024
_BATCH = 1 << 20
_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (408, 425, 429, 500, 502, 503, 504)

#: What a request sends, made anew for each try, and closed after it.
Body = Callable[[], AsyncGenerator[bytes, None]]


class RegistryClient:
    """An asynchronous context manager. Raises RegistryDenied, RegistryUnavailable, RegistryError, ImageNotFound; with
    ``reach`` also NotAllowed, for where it may not go."""

    def __init__(
        self, endpoint: Endpoint, credentials: Credentials = ANONYMOUS, *, push: bool = False,
        mount_from: str | None = None, patience: Patience | None = None, reach: Reach | None = None,
    ) -> None:  # fmt: skip
        self.endpoint = endpoint
        self.patience = patience or Patience()
        self._origin = origin(endpoint.url)
        self._heard = False  # somebody has answered
        timeout = httpx.Timeout(self.patience.silence, connect=self.patience.connect, pool=None)
        try:
            self.http = httpx.AsyncClient(
                verify=_context(endpoint), timeout=timeout, follow_redirects=False, trust_env=not endpoint.loopback,
                limits=httpx.Limits(max_connections=16, max_keepalive_connections=8),
                headers={"User-Agent": f"sloplet/{__version__}", "Accept-Encoding": "identity", "Accept": "*/*"},
            )  # fmt: skip
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            # what is wrong with an address may be a part of the password in it
            why = "it is no address" if isinstance(error, httpx.InvalidURL) else str(error)[:200]
            raise RegistryUnavailable(
                f"the proxy that the environment names cannot be used: {why}",
                hint="see HTTPS_PROXY and NO_PROXY; special characters in a password are written as %XX",
            ) from None
        if reach is not None:
            confine(self.http, reach)
        scopes = [f"repository:{endpoint.repository}:pull,push"] if push else []
        scopes += [f"repository:{mount_from}:pull"] if mount_from else []
        self._tokens = Tokens(endpoint, credentials, self.http, scopes)

    async def __aenter__(self) -> RegistryClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()

    async def manifest(self, asked: str) -> tuple[bytes, str]:
        """A manifest or an index by tag or digest, checked against the digest, and the media type it was served as.
        ImageNotFound; ImageInvalid: another one came, or too much."""
        url = f"{self.endpoint.url}/manifests/{asked}"
        what = f"the manifest {asked[:80]} of {self.endpoint}"

        async def once() -> tuple[bytes, str]:
            async with self.open("GET", url, headers={"Accept": ", ".join(ACCEPTED)}) as answer:
                if answer.status_code == 404:
                    raise ImageNotFound(
                        f"{self.endpoint.host} has no {self.endpoint.repository} {asked[:80]}",
                        hint="look at its name and tag; a private one may need credentials (docker login)",
                    )
                await self.expect(answer, what, 200)
                data = await self.small(answer, MAX_MANIFEST, what)
                told = answer.headers.get("Docker-Content-Digest", "")
                if not DIGEST_RE.match(asked) and told.startswith("sha256:") and told != digest_of(data):
                    raise ImageInvalid(f"{what} is not what the registry says it is: {told[:80]!r}", hint="try again")
                return data, answer.headers.get("Content-Type", "")

        data, kind = await self.again(once)
        if DIGEST_RE.match(asked):
            verify(data, asked, what)
        return data, kind

    async def blob(self, blob: Descriptor, writer: BlobWriter, told: Callable[[int], None]) -> None:
        """All that is missing of a blob, into ``writer``, which the caller commits. Goes on where it was cut."""
        tries = Tries(self.patience)
        mark = writer.offset
        while not writer.done and writer.offset < blob.size:
            try:
                await self._part(blob, writer, told)
            except Transient as problem:
                if writer.offset - mark >= _BATCH:  # less than that is no progress: it would never end
                    mark = writer.offset
                    tries.progressed()
                await tries.wait(problem)
        told(blob.size)

    async def _part(self, blob: Descriptor, writer: BlobWriter, told: Callable[[int], None]) -> None:
        what = f"the blob {blob.digest[:19]} of {self.endpoint}"
        headers = {"Range": f"bytes={writer.offset}-"} if writer.offset else {}
        async with self.open("GET", f"{self.endpoint.url}/blobs/{blob.digest}", headers=headers) as answer:
            if answer.status_code == 404:
                raise BlobMissing(f"{self.endpoint.host} has no longer {what}, which the image needs")
            if answer.status_code == 416 and writer.offset:
                writer.restart()
                raise Transient(RegistryError(f"{what} is shorter at the registry than it was"))
            await self.expect(answer, what, 200, 206)
            if answer.status_code == 200 or content_range(answer.headers.get("Content-Range")) != writer.offset:
                if answer.status_code == 206:
                    writer.restart()
                    raise Transient(RegistryError(f"{what} came from another place than was asked for"))
                writer.restart()
            length = answer.headers.get("Content-Length", "")
            if length.isdigit() and int(length) != blob.size - writer.offset:
                raise ImageInvalid(
                    f"{what} has {int(length) + writer.offset} bytes at the registry; its manifest says {blob.size}"
                )
            await self._store(answer, writer, told, what)
        if writer.offset < blob.size:
            raise Transient(RegistryUnavailable(f"{what} ended after {writer.offset} of {blob.size} bytes"))

    async def _store(self, answer: httpx.Response, writer: BlobWriter, told: Callable[[int], None], what: str) -> None:
        """In pieces of a megabyte, hashed and written in a thread; what came before a cut is kept."""
        pieces: list[bytes] = []
        length = 0
        try:
            async for piece in self._pieces(answer, what):
                pieces.append(piece)
                length += len(piece)
                if length >= _BATCH:
                    data, pieces, length = b"".join(pieces), [], 0
                    await whole(writer.write, data)
                    told(writer.offset)
        finally:
            if pieces:
                writer.write(b"".join(pieces))
                told(writer.offset)

    async def _pieces(self, answer: httpx.Response, what: str) -> AsyncIterator[bytes]:
        """The body as it comes. A server that sends a byte now and then is stalled, too."""
        began, count = time.monotonic(), 0
        async for piece in answer.aiter_raw():
            yield piece
            count += len(piece)
            if (spent := time.monotonic() - began) > self.patience.window:
                if count < self.patience.slowest * spent:
                    raise Transient(RegistryUnavailable(f"{what} comes too slowly: {count} bytes in {spent:.0f} s"))
                began, count = time.monotonic(), 0

    async def again(self, once: Callable[[], Any]) -> Any:
        """Something small, tried as often as it makes sense, each time within a bounded time."""
        tries = Tries(self.patience)
        while True:
            try:
                async with asyncio.timeout(self.patience.small):
                    return await once()
            except TimeoutError:
                await tries.wait(Transient(self._slow()))
            except Transient as problem:
                await tries.wait(problem)

    @asynccontextmanager
    async def open(
        self, method: str, url: str, *, headers: dict[str, str] | None = None, body: Body | None = None
    ) -> AsyncIterator[httpx.Response]:
        """One request, authorized if that is asked for, redirects followed. The body of the answer is still to be read.
        Nothing before that takes longer than something small may, after what is sent. Transient, RegistryDenied,
        RegistryError."""
        try:
            try:
                async with asyncio.timeout(self.patience.small) as limit:
                    sent = self._watched(body, limit) if body else None
                    answer = await self._authorized(method, url, dict(headers or {}), sent)
            except TimeoutError:
                raise Transient(self._slow()) from None
            try:
                yield answer
            finally:
                await answer.aclose()
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, UnicodeError) as error:
            raise self._failed(error) from error

    def _watched(self, body: Body, limit: asyncio.Timeout) -> Body:
        """Each piece that goes begins the wait anew."""

        async def pieces() -> AsyncGenerator[bytes, None]:
            async with aclosing(body()) as whole_body:
                async for piece in whole_body:
                    limit.reschedule(asyncio.get_running_loop().time() + self.patience.small)
                    yield piece

        return pieces

    def _slow(self) -> RegistryUnavailable:
        return RegistryUnavailable(f"{self.endpoint.host} did not answer within {self.patience.small:.0f} s")

    async def _authorized(self, method: str, url: str, headers: dict[str, str], body: Body | None) -> httpx.Response:
        for _ in range(2):
            used = self._tokens.authorization
            answer = await self._redirected(method, url, headers, body, used)
            if answer.status_code != 401 or origin(str(answer.url)) != self._origin:
                return answer
            challenges = answer.headers.get_list("WWW-Authenticate")
            await answer.aclose()
            if not await self._tokens.renew(challenges, used):
                break
        raise self._tokens.denied()

    async def _redirected(
        self, method: str, url: str, headers: dict[str, str], body: Body | None, authorization: str | None
    ) -> httpx.Response:
        for _ in range(MOST_REDIRECTS + 1):
            sent = dict(headers)
            if authorization and origin(url) == self._origin:
                sent["Authorization"] = authorization
            content = body() if body else None
            try:
                request = self.http.build_request(method, url, headers=sent, content=content)
                answer = await self.http.send(request, stream=True)
                self._heard = True
            finally:
                if content is not None:
                    await content.aclose()  # httpx leaves one that it did not read to its end
            target = answer.headers.get("Location")
            if answer.status_code not in _REDIRECTS or not target:
                return answer
            await answer.aclose()
            url = self.target(url, target)
        raise RegistryError(f"{self.endpoint.host} redirected more than {MOST_REDIRECTS} times", hint="is it a loop?")

    def target(self, url: str, location: str) -> str:
        """Where a ``Location`` leads. RegistryError: from TLS to plain HTTP, or nowhere."""
        try:
            found = urljoin(url, location)
            scheme = origin(found)[0]
        except ValueError as error:
            raise RegistryError(
                f"{self.endpoint.host} redirected to {location[:100]!r}, which is no address"
            ) from error
        if scheme == "http" and not self.endpoint.plain:
            raise RegistryError(f"{self.endpoint.host} redirected from TLS to plain HTTP, which is not followed")
        return found

    async def small(self, answer: httpx.Response, most: int, what: str) -> bytes:
        """All of an answer that has to be small. ImageInvalid if it is not."""
        parts: list[bytes] = []
        length = 0
        async for piece in answer.aiter_raw():
            parts.append(piece)
            length += len(piece)
            if length > most:
                raise ImageInvalid(f"{what} has more than {most} bytes, the limit")
        return b"".join(parts)

    async def expect(self, answer: httpx.Response, what: str, *wanted: int) -> None:
        """Raises unless the status is one of those, and the body is as it is."""
        status = answer.status_code
        if status in wanted:
            if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise RegistryError(f"{what} came packed a second time, which was not asked for")
            return
        host = self.endpoint.host
        if origin(str(answer.url)) != self._origin:
            host = f"{origin(str(answer.url))[1]}, where {host} redirected to,"
            said = ""
        else:
            said = await self._complaint(answer)
        if status in _BUSY:
            text = "is asked too often (429)" if status == 429 else f"fails ({status})"
            final = RegistryUnavailable(f"{host} {text}{said}; it was asked for {what}", hint="try again later")
            raise Transient(final, retry_after(answer.headers.get("Retry-After"), time.time()))
        if status in (401, 403):
            raise RegistryDenied(f"{host} refuses {what} ({status}){said}", hint=self._tokens.hint())
        raise RegistryError(f"{host} answered {status} to the question for {what}{said}")

    async def _complaint(self, answer: httpx.Response) -> str:
        """What the registry says is wrong, fit for a message."""
        try:
            async with asyncio.timeout(self.patience.small):
                data = await self.small(answer, _MOST_COMPLAINT, "a complaint")
            errors = json.loads(data)["errors"]
            text = "; ".join(str(item.get("message") or item.get("code")) for item in errors[:3])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, TimeoutError, ImageInvalid):
            return ""
        except httpx.HTTPError:
            return ""
        return f": {_clean(text)}" if text else ""

    def _failed(self, error: Exception) -> Exception:
        """What an exception of httpx's means, and of which server: it may be the token server, or a blob host."""
        host = self.endpoint.host
        request = error.request if isinstance(error, httpx.RequestError) and error._request else None
        if request is not None and origin(str(request.url)) != self._origin:
            host = f"{request.url.host}, where {host} sent us,"
        text = _clean(str(error)) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return RegistryUnavailable(
                f"{host} cannot show who it is: {text[:200]}", hint="name its authority in registries.toml (ca = FILE)"
            )
        if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
            return RegistryUnavailable(
                f"{host} does not speak TLS",
                hint="`sloplet image pull --insecure` (or push) talks plain HTTP to a registry on this machine"
                if self.endpoint.loopback
                else "registries.toml says which may be talked to without it (insecure = true)",
            )
        if isinstance(error, (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError, UnicodeError)):
            return RegistryError(f"{host}, or where it sent us, is nothing that can be asked: {text[:200]}")
        hint = "is the name right, and the network up?"
        if not self.endpoint.loopback and getproxies():
            hint = "is the name right, the network up, and the proxy that the environment names (HTTPS_PROXY)?"
        if isinstance(error, httpx.ProxyError):
            return Transient(RegistryUnavailable(f"the proxy does not let us through to {host}: {text}", hint=hint))
        if isinstance(error, httpx.ConnectTimeout):
            late = RegistryUnavailable(f"{host} did not answer within {self.patience.connect:.0f} s", hint=hint)
            return Transient(late, unheard=not self._heard)
        if isinstance(error, httpx.TimeoutException):
            why = f"stalls: nothing came for {self.patience.silence:.0f} s"
        elif isinstance(error, httpx.ConnectError):
            cause = _cause(error)
            final = RegistryUnavailable(f"{host} cannot be reached: {cause.strerror or text[:200]}", hint=hint)
            refused = isinstance(cause, ConnectionRefusedError) and self.endpoint.loopback
            unknown = isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME
            if refused or unknown:
                return final  # waiting does not help those
            return Transient(final, unheard=isinstance(cause, socket.gaierror) and not self._heard)
        else:
            why = f"cut the connection: {text[:200]}"
        return Transient(RegistryUnavailable(f"{host} {why}", hint=hint))


def _clean(text: str) -> str:
    """What others wrote, fit for a message."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:300]


def _cause(error: BaseException) -> OSError:
    """The system's own word for it, below those of three libraries."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, socket.gaierror):
            return below
        if isinstance(below, OSError) and below.errno:
            return OSError(below.errno, os.strerror(below.errno))
        several = below.exceptions if isinstance(below, BaseExceptionGroup) else ()  # one for each address tried
        below = several[0] if several else below.__cause__ or below.__context__
    return OSError()


class BlobMissing(RegistryError):
    """The registry has a manifest and not what it names: deleted meanwhile, or never there."""


@functools.cache
def _system_context() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading all of the system's authorities takes a while


def _context(endpoint: Endpoint) -> ssl.SSLContext:
    if not endpoint.ca:
        return _system_context()
    context = ssl.create_default_context()
    for path in endpoint.ca:
        try:
            context.load_verify_locations(cafile=path)
        except (OSError, ssl.SSLError) as error:
            raise RegistryUnavailable(
                f"the authority {path!r} of {endpoint.host} cannot be read: {error}", hint="a file of PEM certificates"
            ) from error
    return context
