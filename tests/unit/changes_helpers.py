"""Trees as plain values, and the records that a sandbox would tell of them."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from sloplet.changes.read import Collector, Listing
from sloplet.errors import FileMissing, UserNotFound
from sloplet.files import AsyncFiles
from sloplet.results import FileInfo
from sloplet.wire.fields import Fields, RecordDecoder, encode_record
from sloplet.wire.schema import ChangeFlag, FileType, Tag

Tree = dict[str, Any]  # name -> bytes (a file), (bytes, mode), Tree (a folder), Link


class Link(str):
    """A symlink's text."""


def decode_listing(data: Iterable[bytes], complete: bool) -> Listing:
    """What ``read_listing`` makes of it, out of bytes."""
    decoder, collector = RecordDecoder(), Collector(complete)
    for piece in data:
        for record in decoder.feed(piece):
            collector.add(record)
    decoder.finish()
    return collector.listing


def content(node: Any) -> bytes:
    return node[0] if isinstance(node, tuple) else node


def mode(node: Any) -> int:
    return 0o755 if isinstance(node, dict) else node[1] if isinstance(node, tuple) else 0o644


def build(folder: Path, tree: Tree) -> None:
    for name, node in tree.items():
        path = folder / name
        if isinstance(node, dict):
            path.mkdir()
            build(path, node)
            path.chmod(0o755)
        elif isinstance(node, Link):
            path.symlink_to(node)
        else:
            path.write_bytes(content(node))
            path.chmod(mode(node))


def find(tree: Tree, path: str) -> Any:
    node: Any = tree
    for part in path.strip("/").split("/"):
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return node


def raw(name: str | bytes) -> bytes:
    return name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")


def record(name: str | bytes, node: Any, *, opaque: bool = False, entries: bool = False, **more: Any) -> Fields:
    """A record for a node; None: removed."""
    fields = Fields((Tag.NAME, raw(name)))
    if node is None:
        return fields.add(Tag.TYPE, FileType.REMOVED)
    kind = FileType.DIR if isinstance(node, dict) else FileType.SYMLINK if isinstance(node, Link) else FileType.FILE
    size = len(content(node)) if kind is FileType.FILE else 0
    fields.add(Tag.TYPE, more.get("type", kind)).add(Tag.MODE, more.get("mode", mode(node)))
    fields.add(Tag.UID, more.get("uid", 0)).add(Tag.GID, more.get("gid", 0)).add(Tag.MTIME_NS, 1)
    fields.add(Tag.SIZE, more.get("size", size))
    if isinstance(node, Link):
        fields.add(Tag.LINK, raw(node))
    if opaque:
        fields.add(Tag.FLAGS, int(ChangeFlag.OPAQUE))
    if entries:
        for entry in node:
            fields.add(Tag.ENTRY, raw(entry))
    return fields


def told(old: Tree, new: Tree, choice: Callable[[], bool], above: str = "") -> list[Fields]:
    """What an overlay's upper layer would tell: ``choice`` decides where more than one layer means the same."""
    records = []
    for name in sorted(old.keys() | new.keys()):
        path = f"{above}/{name}" if above else name
        was, now = old.get(name), new.get(name)
        if now is None:
            records.append(record(path, None))
        elif isinstance(now, dict):
            hides = not isinstance(was, dict) or choice()
            below = told({} if hides else was, now, choice, path)
            if below or hides or choice():
                records.append(record(path, now, opaque=hides and was is not None))
                records += below
        elif was != now or choice():
            records.append(record(path, now))
    return records


def listed(old: Tree, new: Tree, choice: Callable[[], bool], above: str = "") -> list[Fields]:
    """What a listing would tell: every folder, and files that are not the image's."""
    records = [record(above or ".", new, entries=True)]
    for name, now in new.items():
        path = f"{above}/{name}" if above else name
        was = old.get(name)
        if isinstance(now, dict):
            records += listed(was if isinstance(was, dict) else {}, now, choice, path)
        elif was != now or choice():
            records.append(record(path, now))
    return records


def differences(old: Tree, new: Tree, above: str = "") -> list[tuple[str, str, tuple[str, ...]]]:
    """By definition: path, kind, what."""
    found: list[tuple[str, str, tuple[str, ...]]] = []
    for name in sorted(old.keys() | new.keys()):
        path = f"{above}/{name}"
        was, now = old.get(name), new.get(name)
        if now is None:
            found.append((path, "removed", ()))
        elif was is None:
            found.append((path, "added", ()))
        elif isinstance(was, dict) != isinstance(now, dict) or isinstance(was, Link) != isinstance(now, Link):
            found.append((path, "changed", ("type",)))
        elif isinstance(now, Link):
            if was != now:
                found.append((path, "changed", ("target",)))
        elif not isinstance(now, dict):
            differs = (("content",) if content(was) != content(now) else ()) + (
                ("mode",) if mode(was) != mode(now) else ()
            )
            if differs:
                found.append((path, "changed", differs))
        if isinstance(now, dict):
            found += differences(was if isinstance(was, dict) else {}, now, path)
    return found


def grown(dice: random.Random, depth: int = 3) -> Tree:
    """Any small tree."""
    return {name: _node(dice, depth) for name in ("a", "b", "c", "é", "with space") if dice.random() < 0.6}


def _node(dice: random.Random, depth: int) -> Any:
    if depth and dice.random() < 0.5:
        return grown(dice, depth - 1)
    if dice.random() < 0.2:
        return Link(dice.choice(["a", "../b"]))
    data = dice.choice([b"", b"one\n", b"two\n", b"one\ntwo\n", b"\0bin"])
    return (data, dice.choice([0o600, 0o755])) if dice.random() < 0.3 else data


def edited(dice: random.Random, tree: Tree, depth: int = 3) -> Tree:
    """The tree after somebody's work: most of it stays, some goes, comes, turns into something else."""
    new: Tree = {}
    for name, node in tree.items():
        fate = dice.random()
        if fate < 0.15:
            continue
        if fate < 0.3:
            new[name] = _node(dice, depth)
        else:
            new[name] = edited(dice, node, depth - 1) if isinstance(node, dict) else node
    if dice.random() < 0.3:
        new.setdefault("new", _node(dice, depth))
    return new


def encoded(records: list[Fields]) -> list[bytes]:
    return [encode_record(fields) for fields in records]


class TreeFiles(AsyncFiles):
    """The files of a tree, and a place to lie."""

    def __init__(self, tree: Tree | None = None) -> None:
        self.tree = tree or {}
        self.reads: list[str] = []
        self.answers: dict[str, Callable[[], AsyncIterator[bytes]]] = {}

    async def stream(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncIterator[bytes]:
        self.reads.append(path)
        if user is not None:
            raise UserNotFound(f"no user {user}")
        if path in self.answers:
            async for piece in self.answers[path]():
                yield piece
            return
        node = find(self.tree, path)
        if node is None or isinstance(node, (dict, Link)):
            raise FileMissing(f"{path}: no such file", errno=2)
        data = content(node)[offset:][:length]
        piece = 7 if len(data) < 1000 else 65536
        for at in range(0, len(data), piece):
            yield data[at : at + piece]

    async def stat(self, path: str, *, follow: bool = True, user: str | None = None) -> FileInfo:
        node = find(self.tree, path)
        if node is None:
            raise FileMissing(f"{path}: no such file", errno=2)
        kind = "dir" if isinstance(node, dict) else "symlink" if isinstance(node, Link) else "file"
        return FileInfo(path, kind, 0, 0o644, 0, 0, 0.0, str(node) if kind == "symlink" else None)


def tree_of(folder: Path) -> Tree:
    """What is in a folder of the host's."""
    found: Tree = {}
    for name in os.listdir(folder):
        path = folder / name
        if path.is_symlink():
            found[name] = Link(os.readlink(path))
        elif path.is_dir():
            found[name] = tree_of(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found
