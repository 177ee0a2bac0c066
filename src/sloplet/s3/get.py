"""Out of a bucket, whose keys anybody may have chosen, into a sandbox."""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ..errors import FileError, StorageError
from ..files import AsyncFiles
from ..results import Progress
from ..transfer.common import Meter, OnProgress, in_parallel
from ..transfer.download import MAX_DOWNLOAD
from ..transfer.upload import inside
from .client import Bucket, abandon, etag_of, in_thread, is_md5
from .settings import S3
from .url import S3Url, is_path

AT_ONCE = 4
_MODE_RE = re.compile(r"[0-7]{3}\Z")


async def get(
    files: AsyncFiles,
    source: str,
    target: str,
    settings: S3 | None = None,
    on_progress: OnProgress | None = None,
    *,
    max_bytes: int = MAX_DOWNLOAD,
) -> Progress:
    """Copy an object, or all whose keys are below one, into a sandbox. An object goes to ``target``, or into it if that
    is a directory; what is below a key goes into ``target``, which is made if missing. Where there are both, the object
    is meant, unless a slash follows. More than ``max_bytes`` is an error, and nothing is written then."""
    url = S3Url.parse(source)
    async with Bucket.open(url.bucket, settings) as bucket:
        base, plan = await _survey(files, bucket, url, target)
        if plan.size > max_bytes:
            raise FileError(
                f"{url} holds {plan.size} bytes, more than {max_bytes}", hint="copy less at once", errno=errno.EFBIG
            )
        return await _Get(files, bucket, base, plan, on_progress).run()


async def _survey(files: AsyncFiles, bucket: Bucket, url: S3Url, target: str) -> tuple[str, Plan]:
    """Where it goes, and what there is."""
    if not url.is_folder and (head := await bucket.head(url.key)) is not None:
        plan = Plan(files=[Object("", url.key, int(head["ContentLength"]), head.get("ETag"))])
        base = await inside(files, target, url.key.rpartition("/")[2])
        if not is_path(base.rpartition("/")[2]):
            raise StorageError(f"{url} has no name that a file can have", hint="name the file to write")
        return base, plan
    listed = await bucket.list(url.prefix)
    if not listed and url.key:
        raise StorageError(f"there is nothing at {url}", hint="check the key, and the bucket's name")
    return target.rstrip("/") or "/", await in_thread(lambda: plan_folder(url.prefix, listed))  # of a million keys


@dataclass(frozen=True)
class Object:
    name: str  #: its path below the target; empty for a single one
    key: str
    size: int
    etag: str | None


@dataclass
class Plan:
    """What to make. Folders that only stand in the middle of a key are made with their files."""

    files: list[Object] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    whole_folder: bool = False

    @property
    def size(self) -> int:
        return sum(item.size for item in self.files)


def plan_folder(prefix: str, listed: Iterable[Mapping[str, Any]]) -> Plan:
    """Which path each key becomes. Pure. A key that is no path below a folder is left out; two that one file system
    cannot hold (``a`` and ``a/b``) are an error."""
    plan = Plan(whole_folder=True)
    for item in listed:
        key, size = str(item["Key"]), int(item["Size"])
        name = key.removeprefix(prefix)
        marker = name.endswith("/") or not name
        if not key.startswith(prefix) or not (is_path(name.rstrip("/") if marker else name) or name == ""):
            plan.skipped.append(key)
        elif marker and (size or name.endswith("//")):
            plan.skipped.append(key)  # bytes in what stands for a folder: there is no file to put them into
        elif marker:
            plan.folders.append(name.rstrip("/"))
        else:
            plan.files.append(Object(name, key, size, item.get("ETag")))
    names = {item.name for item in plan.files}
    seen = {""}  # a million keys may stand in the same hundred folders
    for above in [item.name.rpartition("/")[0] for item in plan.files] + plan.folders:
        while above not in seen:
            if above in names:
                raise StorageError(
                    f"{prefix + above!r} is an object, and there are others below it: no folder can hold both",
                    hint="copy them one by one",
                )
            seen.add(above)
            above = above.rpartition("/")[0]
    return plan


class _Get:
    def __init__(
        self, files: AsyncFiles, bucket: Bucket, base: str, plan: Plan, on_progress: OnProgress | None
    ) -> None:
        self.files = files
        self.bucket = bucket
        self.base = base
        self.plan = plan
        self.meter = Meter(on_progress, len(plan.files), plan.size, plan.skipped)

    async def run(self) -> Progress:
        if self.plan.whole_folder:
            await self.files.mkdir(self.base)
        for name in sorted(self.plan.folders):
            if name:
                await self.files.mkdir(f"{self.base}/{name}")
        await in_parallel(self.plan.files, self.one, AT_ONCE)
        return self.meter.done(self.base, last=True, count=False)

    async def one(self, item: Object) -> None:
        same = {"IfMatch": item.etag} if item.etag else {}
        answer = await self.bucket.call("get_object", Key=item.key, **same)
        if int(answer["ContentLength"]) != item.size:
            abandon(answer)
            raise StorageError(
                f"s3://{self.bucket.name}/{item.key}: the object was replaced while it was being copied",
                hint="try again",
            )
        path = f"{self.base}/{item.name}" if item.name else self.base
        async with aclosing(self.checked(item, answer)) as content:
            await self.files.write(path, content, mode=_mode(answer.get("Metadata", {})))
        self.meter.done(item.name or path)

    async def checked(self, item: Object, answer: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """Its bytes; an error at their end, before the file gets its name, if they are not what their ETag says."""
        digest = hashlib.md5(usedforsecurity=False)
        async with aclosing(self.bucket.pieces(item.key, answer)) as pieces:
            async for piece in pieces:
                digest.update(piece)
                yield piece
                self.meter.moved(item.name or self.base, len(piece))
        etag = etag_of(answer)
        if is_md5(answer) and "-" not in etag and digest.hexdigest() != etag:
            raise StorageError(
                f"s3://{self.bucket.name}/{item.key}: the content was damaged on its way", hint="try again"
            )


def _mode(metadata: Mapping[str, Any]) -> int:
    text = str(metadata.get("sloplet-mode", ""))
    return int(text, 8) if _MODE_RE.match(text) else 0o644
