"""Where two states differ, told from names and stat alone; which files must be read to know more. Blocking."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import FileError
from .base import Node
from .read import MAX_ENTRIES
from .state import State, join

NOBODY = 65534  # what a file shows whose owner has no number inside
_MAX_BELOW = 10_000
_MAX_BELOW_TEXT = 2**20


@dataclass(slots=True)
class Found:
    """A path that differs, or may."""

    path: str
    old: Node | None
    new: Node | None
    what: tuple[str, ...] = ()
    unread: bool = False  #: two files of one size: only their bytes tell
    below: tuple[str, ...] = ()  #: of a removed folder: what was in it, relative to it

    @property
    def kind(self) -> str:
        if self.old is None:
            return "added"
        return "removed" if self.new is None else "changed"


def walk(old: State, new: State, skip: Callable[[str], bool] = lambda path: False) -> list[Found]:
    """All differences but those at or below paths that ``skip`` names."""
    found: list[Found] = []
    todo: list[tuple[str, Node | None, Node]] = [("/", old.root(), new.root())]
    while todo:
        above, was, now = todo.pop()
        for name in _names(old, new, above, was, now):
            path = join(above, name)
            if skip(path):
                continue
            before = old.child(was, above, name) if was is not None else None
            after = new.child(now, above, name)
            one = _compare(path, before, after)
            if one is not None:
                if before is not None and before.type == "dir" and after is None:
                    one.below = _below(old, path, before)
                found.append(one)
                if len(found) > MAX_ENTRIES:
                    raise FileError(
                        "more files differ than can be told", hint="compare with a later snapshot", errno=errno.E2BIG
                    )
            if after is not None and after.type == "dir":
                todo.append((path, before if before is not None and before.type == "dir" else None, after))
    return found


def _names(old: State, new: State, above: str, was: Node | None, now: Node) -> set[str]:
    if was is None:
        return new.names(above, now)
    if was.through and now.through:
        return old.touched(above, was) | new.touched(above, now)
    return old.names(above, was) | new.names(above, now)


def _compare(path: str, old: Node | None, new: Node | None) -> Found | None:
    if old is None or new is None:
        return None if old is new else Found(path, old, new)
    if old.image and new.image:
        return None
    if old.type != new.type:
        return Found(path, old, new, ("type",))
    what = []
    if old.type == "symlink":
        if old.target != new.target:
            what.append("target")
    elif old.mode != new.mode and not (old.ours or new.ours):
        what.append("mode")
    if _owners_differ(old, new):
        what.append("owner")
    unread = old.type == "file" and old.size == new.size
    if old.type == "file" and not unread:
        what.insert(0, "content")
    return Found(path, old, new, tuple(what), unread) if what or unread else None


def _owners_differ(old: Node, new: Node) -> bool:
    if old.owner is None or new.owner is None or old.ours or new.ours:
        return False
    return any(a != b and NOBODY not in (a, b) for a, b in zip(old.owner, new.owner, strict=True))


def _below(state: State, top: str, node: Node) -> tuple[str, ...]:
    """What a folder held; nothing if that is too much to tell."""
    names: list[str] = []
    size = 0
    todo = [(top, node)]
    while todo:
        above, folder = todo.pop()
        for name in state.names(above, folder):
            child = state.child(folder, above, name)
            if child is None:
                continue
            path = join(above, name)
            names.append(path[len(top) + 1 :])
            size += len(path)
            if len(names) > _MAX_BELOW or size > _MAX_BELOW_TEXT:
                return ()
            if child.type == "dir":
                todo.append((path, child))
    return tuple(sorted(names))
