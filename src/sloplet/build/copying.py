"""COPY, ADD and WORKDIR: what is taken, what it depends on, and the entries that it makes."""

from __future__ import annotations

import hashlib
import posixpath
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import BuildFailed
from .commit import Spool
from .context import Folder, Found, digest_of, resolve
from .fromtar import is_tar, tar_items
from .ground import Ground
from .ignore import Ignore, is_pattern
from .layertar import Item, text_data
from .placing import Picked, Placing, owner_of
from .scope import CopyWork, FolderWork
from .threads import in_thread


@dataclass
class Selection:
    """What a COPY takes of its origin. ``digests``: of the files in it."""

    folder: Folder | None
    picked: list[Picked] = field(default_factory=list)
    archives: list[Found] = field(default_factory=list)  #: to be unpacked (ADD)
    digests: dict[str, str] = field(default_factory=dict)
    facts: list[Any] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """What tells it from another."""
        return hashlib.sha256(repr(self.facts).encode("utf-8", "surrogateescape")).hexdigest()


def select(work: CopyWork, folder: Folder | None, where: str) -> Selection:
    """Find and read what a COPY names. ``where``: what the origin is called. BuildFailed; blocking."""
    selection = Selection(folder)
    for name, text in work.files:
        content = text.encode("utf-8", "surrogateescape")
        found = Found(name, "file", 0o644, size=len(content))
        selection.picked.append(Picked(name, found, item=_text_item(content)))
        selection.facts.append((name, "text", hashlib.sha256(content).hexdigest()))
    for source in work.sources:
        assert folder is not None
        for path in _paths(work, folder, source, where):
            _take(work, folder, path, source, selection, where)
    return selection


def _paths(work: CopyWork, folder: Folder, source: str, where: str) -> list[str]:
    clean = posixpath.normpath("/" + source).strip("/")
    if not is_pattern(source):
        return [clean]
    try:
        found = folder.match(clean)
    except ValueError as error:
        raise work.line.wrong(str(error)) from None
    if not found:
        raise _missing(work, source, where)
    return found


def _missing(work: CopyWork, source: str, where: str) -> BuildFailed:
    return BuildFailed(
        f"{work.line.name} line {work.line.number}: there is no {source[:200]} in {where}",
        hint="paths are relative to the context; does .dockerignore name it?" if work.origin is None else None,
    )


def _take(work: CopyWork, folder: Folder, path: str, source: str, selection: Selection, where: str) -> None:
    top = folder.lstat(resolve(folder.lstat, path))
    if top is None:
        if folder.lstat(path) is not None:
            raise BuildFailed(
                f"{work.line.name} line {work.line.number}: {path[:200]} is a link to what is not in {where}",
                hint="links are followed inside of it only; name what they lead to",
            )
        raise _missing(work, source, where)
    top = folder.whole(top)
    if top.kind == "other":
        raise BuildFailed(f"{work.line.name} line {work.line.number}: {source[:200]} is a device, a pipe or a socket")
    if work.unpack and top.kind == "file" and is_tar(folder, top):
        selection.archives.append(top)
        digest_of(folder, [top], selection.digests)
        selection.facts.append((path, "archive", selection.digests[top.path]))
        return
    exclude = Ignore(work.exclude) if work.exclude else None
    below = list(folder.walk(top.path, exclude)) if top.kind == "folder" else []
    digest = digest_of(folder, [top, *below] if top.kind == "file" else below, selection.digests)
    selection.facts.append((_name(work, path, source), top.kind, digest))
    start = len(top.path) + 1 if top.path else 0

    def item(found: Found) -> Item:
        real = found if found is top else replace(found, path=f"{top.path}/{found.path}".lstrip("/"))
        data = folder.data(real, selection.digests.get(real.path)) if real.kind == "file" else None
        return Item(found.path, found.kind, found.mode, found.uid, found.gid, found.size, found.link, data)

    relative = tuple(replace(found, path=found.path[start:]) for found in below)
    selection.picked.append(Picked(_name(work, path, source), top, relative, item))


def _name(work: CopyWork, path: str, source: str) -> str:
    """What it is called at the target; with --parents, with the folders above it (from ``/./`` on)."""
    if not work.parents:
        return posixpath.basename(path)
    before, pivot, _ = source.partition("/./")
    skipped = posixpath.normpath("/" + before).strip("/") if pivot else ""
    return path[len(skipped) :].strip("/") if skipped and path.startswith(skipped) else path


def _text_item(content: bytes) -> Any:
    return lambda found: Item(found.path, "file", found.mode, size=len(content), data=text_data(content))


async def copy_items(work: CopyWork, selection: Selection, ground: Ground, spool: Spool) -> list[Item]:
    """The entries of the layer that a COPY makes. ``spool`` gets what archives hold. BuildFailed, ImageInvalid."""
    owner = await _owner(work.chown, ground)
    view = await ground.view()

    def place() -> list[Item]:
        mode = int(work.chmod, 8) if work.chmod else None
        placing = Placing(view.lstat, owner=owner, mode=mode)
        for picked in selection.picked:
            placing.put(picked, work.target, inside=work.parents)
        for archive in selection.archives:
            assert selection.folder is not None
            items = tar_items(selection.folder, archive, spool)
            placing.merge(items, placing.folder(work.target))
        return list(placing.items.values())

    return await in_thread(place)


async def folder_items(work: FolderWork, ground: Ground) -> list[Item]:
    """WORKDIR: nothing if it is there."""
    view = await ground.view()
    there = view.lstat(resolve(view.lstat, work.path))
    if there is not None and there.kind == "folder":
        return []
    owner = await _owner(work.owner, ground)
    view = await ground.view()  # the first may be of a tree that has been replaced since
    placing = Placing(view.lstat)
    placing.folder(work.path, owner or (0, 0))
    return list(placing.items.values())


async def _owner(text: str | None, ground: Ground) -> tuple[int, int] | None:
    if text is None:
        return None
    tables = {"etc/passwd": None, "etc/group": None} if _numeric(text) else {
        path: await ground.read(path) for path in ("etc/passwd", "etc/group")
    }  # fmt: skip
    return owner_of(text, lambda path: tables[path])


def _numeric(text: str) -> bool:
    user, _, group = text.partition(":")
    return user.isdecimal() and (not group or group.isdecimal())
