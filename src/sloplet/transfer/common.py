"""What both directions share: counting, several files at once, links, the host's errors."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..errors import FileError, SpecError, file_error
from ..results import Progress

IN_FLIGHT = 8
DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_REPORT_EVERY = 2**20

OnProgress = Callable[[Progress], None]
T = TypeVar("T")


class Meter:
    """Counts, and tells the caller: after each file, and each MiB within one."""

    def __init__(
        self, tell: OnProgress | None, total_files: int, total_bytes: int, skipped: Iterable[str] = ()
    ) -> None:
        self.tell = tell
        self.files = self.bytes = self.told = 0
        self.totals = (total_files, total_bytes)
        self.skipped = list(skipped)

    def moved(self, name: str, count: int) -> None:
        self.bytes += count
        if self.bytes - self.told >= _REPORT_EVERY:
            self._tell(name)

    def skip(self, name: str) -> None:
        self.skipped.append(name)

    def done(self, name: str, *, last: bool = False, count: bool = True) -> Progress:
        self.files += count
        return self._tell(name) if count or not last else self._progress(name)

    def _progress(self, name: str) -> Progress:
        return Progress(name, self.files, self.bytes, *self.totals, skipped=tuple(self.skipped))

    def _tell(self, name: str) -> Progress:
        self.told = self.bytes
        progress = self._progress(name)
        if self.tell is not None:
            self.tell(progress)
        return progress


async def in_parallel(items: Iterable[T], work: Callable[[T], Awaitable[None]], at_once: int = IN_FLIGHT) -> None:
    """``work`` on every item, ``at_once`` at a time; the first error ends all and is raised as it is."""
    source = iter(items)

    async def worker() -> None:
        for item in source:
            await work(item)

    tasks = [asyncio.ensure_future(worker()) for _ in range(at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def stays_inside(name: str, text: str) -> bool:
    """Whether a link can be kept. ``..`` only at the start, and no more of them than folders above: after a name
    it could go up from where another link leads."""
    if not text or text.startswith("/") or "\0" in text or len(os.fsencode(text)) > 4095:
        return False
    parts = [part for part in text.split("/") if part not in ("", ".")]
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    return ups <= name.count("/") and ".." not in parts[ups:]


def host_path(path: str | os.PathLike[str], s3: object = None) -> str:
    """``s3``: what was said about S3, which then is not what is meant."""
    if s3 is not None:
        raise SpecError(f"s3= is given, and {str(path)[:80]!r} is a path of this machine", hint="s3://BUCKET/KEY")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise SpecError(f"{text!r} is not a path of this machine", hint="a non-empty string without NUL")
    return text


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def host_errors(path: str) -> Iterator[None]:
    """The host's own errors, in our tree and with the name of the place."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else path
        raise file_error(error.errno or errno.EIO, f"on this machine: {where}: {error.strerror}") from error
