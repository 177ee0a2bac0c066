"""Entries over a base: what is at each path, now or at a snapshot. Blocking where the base is: for threads."""

from __future__ import annotations

from .base import Base, Node
from .read import REMOVED, Entry, Listing


class State:
    """Without a listing it is the image itself. Go down from ``root`` by ``child``: what a folder shows depends on
    all above it."""

    def __init__(self, base: Base, listing: Listing | None = None) -> None:
        self.base = base
        self.listing = listing or Listing(complete=True)
        self._told: dict[str, set[str]] = {}  # folder -> names at or below which something is told
        for path in self.listing.entries:
            self._index(path)

    def _index(self, path: str) -> None:
        while path != "/":
            above, _, name = path.rpartition("/")
            names = self._told.setdefault(above or "/", set())
            if name in names:
                return
            names.add(name)
            path = above or "/"

    def root(self) -> Node:
        entry = self.listing.entries.get("/")
        return Node("dir", ours=True, image=True, through=entry is None or not entry.opaque)

    def names(self, path: str, node: Node) -> set[str]:
        """All that may be in a folder; ``child`` decides."""
        listed = self.listing.names.get(path)
        if listed is not None:
            return listed
        told = self._told.get(path, set())
        return told | set(self.base.listdir(path)) if node.through else told

    def touched(self, path: str, node: Node) -> set[str]:
        """Those names in a folder that may differ from the image's, or have something below them that does."""
        told = self._told.get(path, set())
        listed = self.listing.names.get(path)
        if listed is None or not node.through:
            return told
        return told | {name for name in self.base.listdir(path) if name not in listed}

    def child(self, parent: Node, above: str, name: str) -> Node | None:
        """What ``name`` in the folder ``above`` is."""
        path = join(above, name)
        entry = self.listing.entries.get(path)
        if entry is None:
            return self._untold(parent, above, name, path)
        if entry.type == REMOVED:
            return None
        through = False
        if entry.type == "dir" and parent.through and not entry.opaque:
            below = self.base.lstat(path)
            through = below is not None and below.type == "dir"
            if below is not None and below.ours and through:
                return Node("dir", below.mode, ours=True, through=True)
        return _node(entry, through)

    def _untold(self, parent: Node, above: str, name: str, path: str) -> Node | None:
        listed = self.listing.names.get(above)
        node = None
        if parent.through and (listed is None or name in listed):
            node = self.base.lstat(path)
        if path in self._told and (node is None or node.type != "dir"):
            return Node("dir", ours=True)  # only what lies below it was told
        return node


def join(above: str, name: str) -> str:
    return f"/{name}" if above == "/" else f"{above}/{name}"


def _node(entry: Entry, through: bool) -> Node:
    return Node(entry.type, entry.mode, entry.size, entry.target, (entry.uid, entry.gid), through=through)
