"""Where the files of a COPY go in a tree, and who owns them there: items for a layer. Pure but for looking."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ..errors import BuildFailed
from .context import Found, resolve
from .layertar import Item

Look = Callable[[str], Found | None]
_MAX_ID = 2**32 - 2


@dataclass(frozen=True)
class Picked:
    """A source of a COPY: a file, or a folder with all below (``below`` with paths relative to it). ``item`` makes an
    entry of one of them."""

    name: str  #: what a file is called in a folder
    top: Found
    below: tuple[Found, ...] = ()
    item: Callable[[Found], Item] = field(default=lambda found: Item(found.path, found.kind), compare=False)


class View:
    """A tree as it is so far: an image's, and layers above it that are not in it yet."""

    def __init__(self, base: Look) -> None:
        self._base = base
        self._layers: list[dict[str, Item]] = []

    def add(self, items: Iterable[Item]) -> None:
        self._layers.append({item.path: item for item in items})

    def lstat(self, path: str) -> Found | None:
        path = path.strip("/")
        for layer in reversed(self._layers):
            item = layer.get(path)
            if item is not None:
                return _found(item)
            if _hidden(layer, path):
                return None
        return self._base(path)


def _found(item: Item) -> Found | None:
    if item.kind == "whiteout":
        return None
    kind = "file" if item.kind == "hardlink" else item.kind
    return Found(item.path, kind, item.mode, item.uid, item.gid, item.size, item.link if kind == "symlink" else "")


def _hidden(layer: dict[str, Item], path: str) -> bool:
    """Whether a folder above a path is removed or replaced in a layer."""
    above = path.rpartition("/")[0]
    while above:
        item = layer.get(above)
        if item is not None and item.kind != "folder":
            return True
        above = above.rpartition("/")[0]
    return False


class Placing:
    """Collects the entries of one layer."""

    def __init__(self, look: Look, *, owner: tuple[int, int] | None = None, mode: int | None = None) -> None:
        self._look = look
        self._owner = owner
        self._mode = mode
        self.items: dict[str, Item] = {}

    def folder(self, path: str, owner: tuple[int, int] = (0, 0)) -> str:
        """Make a folder with all above it, where they are missing; returns where it really is."""
        real = resolve(self.lstat, path)
        parts = real.split("/") if real else []
        for count in range(1, len(parts) + 1):
            each = "/".join(parts[:count])
            found = self.lstat(each)
            if found is None:
                self.items[each] = Item(each, "folder", 0o755, *(self._owner or owner))
            elif found.kind != "folder":
                raise BuildFailed(f"/{each} is a {found.kind}, and should be a folder")
        return real

    def lstat(self, path: str) -> Found | None:
        item = self.items.get(path.strip("/"))
        return _found(item) if item is not None else self._look(path)

    def put(self, picked: Picked, target: str, *, inside: bool = False) -> None:
        """``target`` as a CopyWork has it. ``inside``: a folder goes into it by its name, not only what is in it."""
        wants_folder = target.endswith("/") or target == "/"
        if picked.top.kind == "folder":
            path = f"{target.rstrip('/')}/{picked.name}" if inside else target
            self._tree(picked, self.folder(path))
            return
        real = resolve(self.lstat, target)
        there = self.lstat(real) if real else Found("", "folder", 0o755)
        if wants_folder or inside or (there is not None and there.kind == "folder"):
            above, _, name = picked.name.rpartition("/")
            real = self.folder(f"{target.rstrip('/')}/{above}")
            real = f"{real}/{name}".lstrip("/")
        else:
            self.folder(real.rpartition("/")[0])
        self._one(picked.item(picked.top), real)

    def _tree(self, picked: Picked, real: str) -> None:
        """What is in a folder, merged into another."""
        places = {"": real}
        for found in picked.below:
            above, _, name = found.path.rpartition("/")
            path = f"{places[above]}/{name}".lstrip("/")
            if found.kind == "folder":
                there = self.lstat(path)
                if there is not None and there.kind == "symlink":
                    led = resolve(self.lstat, path)
                    led_to = self.lstat(led)
                    if led_to is not None and led_to.kind == "folder":
                        places[found.path] = led  # /bin that is a link to /usr/bin stays one
                        continue
                places[found.path] = path
            self._one(picked.item(found), path)

    def merge(self, items: list[Item], real: str) -> None:
        """An archive's entries, unpacked into a folder: links of the tree above them are followed, as tar does."""
        for item in items:
            above, _, name = item.path.rpartition("/")
            path = f"{self.folder(f'{real}/{above}')}/{name}".lstrip("/")
            there = self.lstat(path)
            if item.kind == "folder" and there is not None and there.kind == "symlink":
                led = self.lstat(resolve(self.lstat, path))
                if led is not None and led.kind == "folder":
                    continue
            if item.kind == "hardlink":
                item = replace(item, link=resolve(self.lstat, f"{real}/{item.link}"))
            self._one(item, path)

    def _one(self, item: Item, path: str) -> None:
        if not path:
            return
        uid, gid = self._owner or (item.uid, item.gid)
        mode = self._mode if self._mode is not None and item.kind != "symlink" else item.mode
        self.items[path] = replace(item, path=path, uid=uid, gid=gid, mode=mode)


def owner_of(text: str, read: Callable[[str], bytes | None]) -> tuple[int, int]:
    """``user[:group]``, names or numbers, by the passwd and group of the tree. BuildFailed."""
    user, colon, group = text.partition(":")
    if user.isdecimal():
        uid, gid = int(user), int(user)
    else:
        fields = _entry(read("etc/passwd"), user)
        if fields is None or len(fields) < 4 or not fields[2].isdecimal() or not fields[3].isdecimal():
            raise BuildFailed(
                f"there is no user {user[:80]!r} in the image", hint="make it before, or write its number"
            )
        uid, gid = int(fields[2]), int(fields[3])
    if colon and group:
        if group.isdecimal():
            gid = int(group)
        else:
            fields = _entry(read("etc/group"), group)
            if fields is None or len(fields) < 3 or not fields[2].isdecimal():
                raise BuildFailed(
                    f"there is no group {group[:80]!r} in the image", hint="make it before, or write its number"
                )
            gid = int(fields[2])
    if max(uid, gid) > _MAX_ID:
        raise BuildFailed(f"{text[:80]!r} is no owner: the number is too large")
    return uid, gid


def _entry(table: bytes | None, name: str) -> list[str] | None:
    for line in (table or b"").decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if fields[0] == name:
            return fields
    return None
