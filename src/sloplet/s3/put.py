"""Out of a sandbox, which is hostile, into a bucket."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import mimetypes
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

from ..errors import FileError, FileIsDirectory, FileMissing, FileNotDirectory, StorageError
from ..files import AsyncFiles
from ..results import FileInfo, Progress
from ..transfer.common import Meter, OnProgress, in_parallel
from ..transfer.download import MAX_DOWNLOAD
from .client import Bucket, etag_of, in_thread, is_md5
from .settings import S3
from .url import S3Url, is_path, why_no_key

AT_ONCE = 4  # files, and parts of all of them: some ten parts are in memory at most
PART = 8 * 2**20
_MAX_PARTS = 10_000
_GRACE = 5.0


async def put(
    files: AsyncFiles,
    source: str,
    target: str,
    settings: S3 | None = None,
    on_progress: OnProgress | None = None,
    *,
    max_bytes: int = MAX_DOWNLOAD,
) -> Progress:
    """Copy a sandbox's file or directory into S3. A file becomes ``target``, or goes into it under its own name if that
    ends with a slash or is a bucket; of a directory the content goes below ``target``. More than ``max_bytes`` is an
    error."""
    url = S3Url.parse(target)
    info = await files.stat(source)
    if info.is_dir:
        job = _Put(source, url, await files.list(source, recursive=True), on_progress, max_bytes)
    elif info.is_file:
        name = source.rstrip("/").rpartition("/")[2]
        _check(name, url.below(name).key if url.is_folder else url.key)
        where = url.below(name) if url.is_folder else url
        single = FileInfo("", "file", info.size, info.mode, info.uid, info.gid, info.modified)
        job = _Put(source, where, [single], on_progress, max_bytes, whole=True)
    else:
        raise FileError(f"{source} is neither a file nor a directory", errno=errno.EINVAL)
    async with Bucket.open(url.bucket, settings) as bucket:
        return await job.run(files, bucket)


class _Put:
    """One copy of a tree (or of one file, which then is ``whole``)."""

    files: AsyncFiles
    bucket: Bucket

    def __init__(
        self,
        source: str,
        url: S3Url,
        found: list[FileInfo],
        on_progress: OnProgress | None,
        max_bytes: int,
        whole: bool = False,
    ) -> None:
        self.source = source if whole else source.rstrip("/") or "/"
        self.url = url
        self.whole = whole
        self.left = self.max_bytes = max_bytes
        self.regular = [item for item in found if item.is_file]
        self.empty = _empty_folders(found) if not whole else []
        if not whole:
            for item in found:
                if item.is_file or item.is_dir:
                    _check(item.name, url.below(item.name).key)
            if len({item.name for item in found}) != len(found):
                raise FileError("the sandbox lists one name twice", errno=errno.EINVAL)
        self.meter = Meter(on_progress, len(self.regular), sum(max(0, item.size) for item in self.regular))
        for item in found:
            if not item.is_file and not item.is_dir:
                self.meter.skip(item.name)

    async def run(self, files: AsyncFiles, bucket: Bucket) -> Progress:
        self.files, self.bucket = files, bucket
        self.slots = asyncio.Semaphore(AT_ONCE)
        await in_parallel(self.regular, self.one, AT_ONCE)
        await in_parallel(self.empty, self.mark, AT_ONCE)
        return self.meter.done(self.source, last=True, count=False)

    async def mark(self, name: str) -> None:
        """An empty folder: an object whose key ends with a slash."""
        key = f"{self.url.prefix}{name}/" if name else self.url.prefix
        if key:
            await self.bucket.call("put_object", Key=key, Body=b"")

    async def one(self, item: FileInfo) -> None:
        key = self.url.key if self.whole else self.url.below(item.name).key
        path = self.source if self.whole else f"{self.source}/{item.name}"
        # "./": else a name like data:x/y,z is a URL, which says its type itself.
        kept: dict[str, Any] = {"ContentType": mimetypes.guess_type("./" + key)[0] or "application/octet-stream"}
        if item.mode & 0o777 != 0o644:
            kept["Metadata"] = {"sloplet-mode": f"{item.mode & 0o777:03o}"}
        async with aclosing(self.counted(path, item.name or path)) as pieces:
            parts = _Parts(pieces)
            await self.slots.acquire()
            try:
                try:
                    first = [await parts.next()]  # handed on, not kept: it is large
                except (FileMissing, FileIsDirectory, FileNotDirectory):
                    if self.whole:
                        raise
                    self.meter.skip(item.name)  # the tree changed since it was listed
                    return
                if parts.ended:
                    await self.small(key, first.pop(), kept)
            finally:
                self.slots.release()
            if not parts.ended:
                await self.large(key, first, parts, kept)
        self.meter.done(item.name or path)

    async def counted(self, path: str, name: str) -> AsyncGenerator[bytes, None]:
        async for piece in self.files.stream(path):
            self.left -= len(piece)
            if self.left < 0:
                raise FileError(
                    f"the copy is larger than {self.max_bytes} bytes; it stopped in {name!r}",
                    hint="copy less at once", errno=errno.EFBIG,
                )  # fmt: skip
            yield piece
            self.meter.moved(name, len(piece))

    async def small(self, key: str, data: bytearray, kept: dict[str, Any]) -> None:
        digest = await in_thread(lambda: _md5(data))
        answer = await self.bucket.call("put_object", Key=key, Body=data, ContentMD5=_base64(digest), **kept)
        await self.verify(key, answer, digest.hex(), len(data))

    async def large(self, key: str, first: list[bytearray], parts: _Parts, kept: dict[str, Any]) -> None:
        """In parts, of which a few are under way at a time. What does not become whole is taken back."""
        upload = await self.begin(key, kept)
        tasks: list[asyncio.Task[tuple[bytes, str]]] = []
        size = 0
        try:
            while True:
                await self.slots.acquire()
                try:
                    data = first.pop() if first else await parts.next()
                except BaseException:
                    self.slots.release()
                    raise
                size += len(data)
                tasks.append(asyncio.ensure_future(self.part(key, upload, len(tasks) + 1, data)))
                for task in tasks[-2 * AT_ONCE :]:
                    if task.done():
                        task.result()  # no more is sent after one that failed
                if parts.ended:
                    break
                if len(tasks) == _MAX_PARTS:
                    raise StorageError(f"{key!r} is larger than {_MAX_PARTS * PART} bytes", hint="copy it in pieces")
            sent = await asyncio.gather(*tasks)
            done = [{"PartNumber": number, "ETag": etag} for number, (_, etag) in enumerate(sent, 1)]
            answer = await self.bucket.call(
                "complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": done}
            )
        except BaseException:
            await asyncio.shield(self.take_back(key, upload, tasks))
            raise
        whole = f"{_md5(b''.join(digest for digest, _ in sent)).hex()}-{len(sent)}"
        await self.verify(key, answer, whole, size)

    async def begin(self, key: str, kept: dict[str, Any]) -> str:
        """An upload in parts. Who is cancelled meanwhile waits for its id, to take it back: nobody else would."""
        begun = asyncio.ensure_future(self.bucket.call("create_multipart_upload", Key=key, **kept))
        try:
            return str((await asyncio.shield(begun))["UploadId"])
        except asyncio.CancelledError:
            await asyncio.wait([begun], timeout=_GRACE)
            if begun.done() and not begun.cancelled() and begun.exception() is None:
                await asyncio.shield(self.take_back(key, str(begun.result()["UploadId"]), []))
            else:
                begun.cancel()
            raise

    async def part(self, key: str, upload: str, number: int, data: bytearray) -> tuple[bytes, str]:
        """Send one part, whose slot this gives back; returns its MD5 and its ETag."""
        try:
            digest = await in_thread(lambda: _md5(data))
            answer = await self.bucket.call(
                "upload_part", Key=key, UploadId=upload, PartNumber=number, Body=data, ContentMD5=_base64(digest)
            )
            return digest, str(answer["ETag"])
        finally:
            self.slots.release()

    async def take_back(self, key: str, upload: str, tasks: list[asyncio.Task[tuple[bytes, str]]]) -> None:
        if tasks:
            await asyncio.wait(tasks, timeout=_GRACE)  # a part that arrives after the end would stay, and cost money
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(StorageError, TimeoutError):
            async with asyncio.timeout(_GRACE):
                await self.bucket.call("abort_multipart_upload", Key=key, UploadId=upload)

    async def verify(self, key: str, answer: dict[str, Any], expected: str, size: int) -> None:
        if is_md5(answer):
            good = etag_of(answer) == expected
        else:
            there = await self.bucket.head(key)
            good = there is not None and there.get("ContentLength") == size
        if not good:
            raise StorageError(f"s3://{self.bucket.name}/{key}: what is there is not what was sent", hint="try again")


class _Parts:
    """A stream cut into parts of one size; ``ended`` is known with the last one."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""
        self.ended = False

    async def next(self) -> bytearray:
        part = bytearray(self._rest)
        while len(part) <= PART and not self.ended:
            try:
                part += await anext(self._pieces)
            except StopAsyncIteration:
                self.ended = True
        self._rest = bytes(part[PART:])
        del part[PART:]  # in place: a copy of each part would be as much memory again
        if self._rest:
            self.ended = False
        return part


def _empty_folders(found: list[FileInfo]) -> list[str]:
    """Those that hold nothing that becomes a key; "" is the copied folder itself."""
    filled = {""} if any(item.is_file or item.is_dir for item in found) else set()
    for item in found:
        if item.is_file or item.is_dir:
            filled.add(item.name.rpartition("/")[0])
    return ([] if "" in filled else [""]) + [item.name for item in found if item.is_dir and item.name not in filled]


def _check(name: str, key: str) -> None:
    """A listed name is a relative path below what was listed, or the sandbox lies; and it can be a key."""
    if not is_path(name):
        raise FileError(f"the sandbox names a file {name[:200]!r}, which is not a name", errno=errno.EINVAL)
    why = why_no_key(key)
    if why:
        raise StorageError(f"{name[:200]!r} cannot be copied to S3: its key {why}", hint="rename it in the sandbox")


def _md5(data: bytes | bytearray) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
