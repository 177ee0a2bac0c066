"""Where a copy ends up (cp's rules), and doing it with progress. Behind `cp`, `run --copy` and `run --out`.

As with cp -r: onto a folder that exists, or with a trailing slash, it goes into it under its own name; else it becomes
the target. ``FOLDER/.`` means its content. A single ``-`` is our stdin or stdout, one file's bytes.
"""

from __future__ import annotations

import os
import posixpath
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import FileMissing, SlopletError, SpecError
from ..s3.url import S3Url, is_s3
from .options import split_pair
from .output import complain, note, plain, size

if TYPE_CHECKING:
    from ..results import Progress
    from ..s3.settings import S3
    from ..sandbox import AsyncSandbox


_NAMED = 5


async def copy_in(box: AsyncSandbox, pair: str) -> None:
    """``SRC[:DST]`` into the sandbox; without DST under its own name into the working directory."""
    source, target = split_pair(pair)
    await into(box, source, target or "./")


async def check_outs(pairs: Sequence[str]) -> None:
    """Before hours of work whose results could then not be put where they belong: is there such a bucket at all?"""
    split = [split_pair(pair) for pair in pairs]
    for source, _ in split:
        if is_s3(source):
            raise SpecError(f"--out {source}: what is to be copied out is in the sandbox", hint="write PATH:s3://...")
    for name in {S3Url.parse(target).bucket for _, target in split if is_s3(target)}:
        from ..s3.client import Bucket

        async with Bucket.open(name, None) as bucket:
            await bucket.check()


async def copy_outs(box: AsyncSandbox, pairs: Sequence[str]) -> None:
    """All of them, whatever becomes of one: afterwards there is no sandbox to try again with."""
    failed: list[SlopletError] = []
    for pair in pairs:
        try:
            await copy_out(box, pair)
        except SlopletError as error:
            failed.append(error)
    for other in failed[1:]:
        note(plain(other.message, 1000))
    if failed:
        raise failed[0]


async def copy_out(box: AsyncSandbox, pair: str) -> None:
    """``SRC[:DST]`` out of the sandbox; without DST under its own name into the current directory."""
    source, target = split_pair(pair)
    await out_of(box, source, target or "./")


async def into(
    box: AsyncSandbox,
    source: str,
    target: str,
    on_progress: Callable[[Progress], None] | None = None,
    s3: S3 | None = None,
) -> None:
    if source == "-":
        from .streams import read_chunks

        if target.endswith("/") or await _is_folder(box, target):
            raise SpecError(f"{target} is a folder, and stdin has no name", hint="name the file to write")
        await box.files.write(target, read_chunks(0))
        return
    if is_s3(source):
        name, source = s3_name(source)
    elif not os.path.exists(source):
        raise FileMissing(f"there is no {source!r} on this machine", hint="check the path")
    else:
        name = own_name(source, os.path.abspath(source))
    if name and (target.endswith("/") or await _is_folder(box, target)):
        target = posixpath.join(target, name)
    tell_skipped(await box.upload(source, target, on_progress=on_progress, s3=s3))


async def out_of(
    box: AsyncSandbox,
    source: str,
    target: str,
    on_progress: Callable[[Progress], None] | None = None,
    s3: S3 | None = None,
) -> None:
    if target == "-":
        await _to_stdout(box.files.stream(source))
        return
    await box.files.stat(source)
    name = own_name(source, posixpath.normpath(posixpath.join(box.workdir, source)))
    if is_s3(target):
        url = S3Url.parse(target)
        target = str(url.below(name)) if name and url.is_folder else target
    elif name and (target.endswith("/") or os.path.isdir(target)):
        if not os.path.isdir(target):
            os.makedirs(target, exist_ok=True)
        target = os.path.join(target, name)
    tell_skipped(await box.download(source, target, on_progress=on_progress, s3=s3))


def own_name(path: str, absolute: str) -> str:
    """What it is called at the other end; empty where only its content is meant (``.``, ``folder/.``)."""
    if path in (".", "./") or path.endswith("/."):
        return ""
    return os.path.basename(absolute.rstrip("/"))


def s3_name(source: str) -> tuple[str, str]:
    """What a URL's object or folder is called at the other end (empty for ``FOLDER/.``), and the URL to read."""
    if source.endswith("/."):
        return "", source[:-1]
    url = S3Url.parse(source)
    return url.key.rstrip("/").rpartition("/")[2] or url.bucket, source


def tell_skipped(progress: Progress) -> None:
    """Say what was left out: a copy that lacks something is not silent about it."""
    if names := progress.skipped:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        shown = ", ".join(plain(name, 60) for name in names[:_NAMED])
        note(f"left out (links, special files, names that cannot be kept): {shown}{more}")


async def _is_folder(box: AsyncSandbox, path: str) -> bool:
    try:
        return (await box.files.stat(path)).is_dir
    except (FileNotFoundError, NotADirectoryError):
        return False


async def _to_stdout(chunks: AsyncIterator[bytes]) -> None:
    from .streams import Output

    out = Output(1)
    async for chunk in chunks:
        await out.write(chunk)


class Bar:
    """Progress on a terminal: one line, a few times a second, gone at the end."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._last = 0.0
        self._began = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if not self._live or now - self._last < 0.1:
            return
        self._last = now
        columns = os.get_terminal_size(2).columns
        complain("\r\x1b[K" + plain(bar_text(progress, now - self._began), max(20, columns - 1)))

    def finish(self) -> None:
        if self._live:
            complain("\r\x1b[K")


def bar_text(progress: Progress, seconds: float) -> str:
    """42% [########----] 12M of 30M, 4 of 9 files, 8.1M/s src/app.py."""
    rate = f"{size(int(progress.bytes / seconds))}/s" if seconds > 0.2 else ""
    files = f"{progress.files} of {progress.total_files} files" if progress.total_files else f"{progress.files} files"
    if not progress.total_bytes:
        return f"{size(progress.bytes)}, {files} {rate} {progress.path}"
    part = min(1.0, progress.bytes / progress.total_bytes)
    filled = round(part * 20)
    bar = "#" * filled + "-" * (20 - filled)
    return f"{part:4.0%} [{bar}] {size(progress.bytes)} of {size(progress.total_bytes)}, {files} {rate} {progress.path}"
