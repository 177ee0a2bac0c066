"""From what a sandbox tells to the changes of a ``Diff``: names and stat first, then bytes where only they tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from pathlib import Path

from ..controller import Change, Stream
from ..engines.base import ResolvedImage
from ..errors import FileError
from ..files import AsyncFiles
from ..transfer.common import in_parallel
from . import made
from .base import Base, NoBase, Node, Unreadable, base_of, closing_base
from .copied import CopiedBase, all_told, with_before
from .read import Listing, read_listing
from .reading import OldState, Reader, base_pieces, same, sandbox_reader, whole
from .state import State
from .text import MAX_TEXT, MAX_TOTAL, Effort, as_text, unified
from .walk import Found, walk

_LEAST = 64  # what the text of a file counts at least: a million empty files are not free
_QUICK = 512  # texts that are compared at once: a thread would cost more


async def diff_of(
    stream: Stream,
    files: AsyncFiles,
    image: ResolvedImage | None,
    old: OldState | None = None,
    *,
    text: bool = True,
    folders: Iterable[str] = (),
    prefix: str = "/",
    copies: Mapping[str, Path] | None = None,
    applied: Mapping[str, str] | None = None,
) -> tuple[Change, ...]:
    """What a sandbox's files have become since its image, or since ``old``, by path.

    ``stream``: CHANGES without contents, just opened on it; ``files``: its files. ``folders``: what its runtime made
    (the working directory, the home). ``image`` None: it has no root of its own, and everything below ``prefix``, the
    PATH of the request, is an addition. ``copies``: folders of this machine, as they were when they were copied to
    these paths; ``applied``: what was brought back to them since. Raises what the stream and the sandbox raise, and
    FileError when there is more than can be compared.
    """
    listing = await read_listing(stream, prefix)
    base = await asyncio.to_thread(base_of, image) if image is not None else NoBase()
    if not copies:
        with closing_base(base):
            return await compare(listing, base, sandbox_reader(files), old, text=text, folders=folders)
    copied = CopiedBase(base, copies)
    with closing_base(copied):
        if old is not None:
            old = OldState(all_told(old.listing, copies), old.read)
        listing = all_told(listing, copies)
        found = await compare(listing, copied, sandbox_reader(files), old, text=text, folders=(*folders, *copies))
        return await asyncio.to_thread(with_before, found, copied, copies, applied or {}) if old is None else found


async def state_of(stream: Stream, files: AsyncFiles, prefix: str = "/") -> OldState:
    """The state of a sandbox, for comparing another with it; it must be there until that is done."""
    return OldState(await read_listing(stream, prefix), sandbox_reader(files))


async def compare(
    listing: Listing,
    base: Base,
    read: Reader,
    old: OldState | None = None,
    *,
    text: bool = True,
    folders: Iterable[str] = (),
) -> tuple[Change, ...]:
    """The changes from ``old``, or from the base itself, to ``listing`` over the base. ``read`` reads the new files."""

    def survey() -> list[Found]:
        return walk(State(base, old.listing if old is not None else None), State(base, listing), made.never)

    found = await asyncio.to_thread(survey)
    return await _Comparison(base, old.read if old is not None else None, read, folders).run(found, text)


class _Comparison:
    """One ``compare``, after the walk."""

    def __init__(self, base: Base, read_old: Reader | None, read_new: Reader, folders: Iterable[str]) -> None:
        self.base = base
        self.read_old, self.read_new = read_old, read_new
        self.folders = made.folders(folders)
        self.effort = Effort()
        self.settled: dict[str, tuple[bytes | None, bytes]] = {}  # of special files: what it was, what it is
        self.texts: dict[str, str] = {}

    async def run(self, found: list[Found], text: bool) -> tuple[Change, ...]:
        found = [one for one in found if not self.makes_folder(one)]
        await in_parallel([one for one in found if one.path in made.SPECIAL], self.settle)
        await in_parallel([one for one in found if one.unread], self.read_both)
        found = sorted((one for one in found if one.kind != "changed" or one.what), key=lambda one: one.path)
        found = [one for one in found if not self.is_settled(one)]
        if text:
            await in_parallel(self.to_show(found), self.show)
        return tuple(self.change(one, text) for one in found)

    def makes_folder(self, one: Found) -> bool:
        return one.old is None and one.new is not None and one.new.type == "dir" and one.path in self.folders

    # -- contents --------------------------------------------------------------------

    async def read_both(self, one: Found) -> None:
        """Two files of one size: are they the same?"""
        assert one.old is not None
        assert one.new is not None
        one.unread = False
        size = one.new.size
        try:
            equal = size == 0 or await same(self.old(one, size + 1), self.new(one, size + 1))
        except (FileError, Unreadable):
            equal = False  # one of them cannot be read: it was written, so it is told
        if not equal:
            one.what = ("content", *one.what)

    def old(self, one: Found, most: int) -> AsyncGenerator[bytes, None]:
        assert one.old is not None
        return self.pieces(one.path, one.old, self.read_old, most)

    def new(self, one: Found, most: int) -> AsyncGenerator[bytes, None]:
        assert one.new is not None
        return self.pieces(one.path, one.new, self.read_new, most)

    def pieces(self, path: str, node: Node, read: Reader | None, most: int) -> AsyncGenerator[bytes, None]:
        if node.image or read is None:
            return base_pieces(self.base, path, most)
        return read(path, most)

    # -- the runtime's own files -------------------------------------------------------

    async def settle(self, one: Found) -> None:
        if not _is_file(one.new) or not (one.old is None or _is_file(one.old)):
            return
        try:
            new = await whole(self.new(one, MAX_TEXT + 1))
            old = await whole(self.old(one, MAX_TEXT + 1)) if one.old is not None else None
        except (FileError, Unreadable):
            return
        if max(len(new), len(old or b"")) > MAX_TEXT:
            return
        one.unread = False
        was = made.settled(one.path, old, new)
        self.settled[one.path] = (was, new)
        rest = tuple(item for item in one.what if item != "content")
        one.what = rest if was == new else ("content", *rest)

    def is_settled(self, one: Found) -> bool:
        if one.path not in self.settled:
            return False
        was, new = self.settled[one.path]
        return was == new and (one.old is None or made.names_it(one.path))

    # -- text --------------------------------------------------------------------------

    def to_show(self, found: list[Found]) -> list[Found]:
        """Those whose text fits into what is left for it, in the order of their paths."""
        chosen, left = [], MAX_TOTAL
        for one in found:
            if not _has_content(one):
                continue
            sizes = [node.size for node in (one.old, one.new) if node is not None and node.type == "file"]
            cost = sum(max(size, _LEAST) for size in sizes)
            if max(sizes) <= MAX_TEXT and cost <= left:
                chosen.append(one)
                left -= cost
        return chosen

    async def show(self, one: Found) -> None:
        old: bytes | None
        new: bytes | None
        try:
            if one.path in self.settled:
                old, new = self.settled[one.path]
            else:
                old = await whole(self.old(one, one.old.size + 1)) if one.old is not None else None
                new = await whole(self.new(one, one.new.size + 1)) if one.new is not None else None
        except (FileError, Unreadable):
            return
        before = as_text(old) if old is not None else None
        after = as_text(new) if new is not None else None
        if (before is None) == (old is None) and (after is None) == (new is None):
            if not before or not after or max(len(before), len(after)) < _QUICK:
                self.texts[one.path] = unified(one.path, before, after, self.effort)
            else:
                self.texts[one.path] = await asyncio.to_thread(unified, one.path, before, after, self.effort)

    def change(self, one: Found, text: bool) -> Change:
        node = one.new or one.old
        assert node is not None
        shown = self.texts.get(one.path)
        return Change(
            path=one.path,
            kind=one.kind,
            type=node.type,
            size=one.new.size if one.new is not None else 0,
            mode=node.mode,
            what=one.what if one.old is not None and one.new is not None else (),
            below=one.below if one.new is None else (),
            text=shown,
            binary=text and shown is None and _has_content(one),
        )


def _is_file(node: Node | None) -> bool:
    return node is not None and node.type == "file"


def _has_content(one: Found) -> bool:
    """Whether a file came, went, or has other bytes than before."""
    if one.kind == "changed":
        return "content" in one.what and _is_file(one.old) and _is_file(one.new)
    return _is_file(one.new or one.old)
