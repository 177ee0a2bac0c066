"""RUN --mount: what a command sees that is no part of its layer.

``cache`` is a named volume, mounted; ``bind``, ``tmpfs`` and ``secret`` are put into the sandbox before the command and
left out of what is kept of it, which needs a target that is empty or not there.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..controller import Controller
from ..errors import BuildFailed, VolumeInUse
from ..files import AsyncFiles
from ..state.home import Home
from ..volumes.store import Volumes
from ..volumespec import Volume
from .context import Folder, resolve
from .copying import select
from .ground import Tree
from .instructions import Mount
from .layertar import Item, text_data
from .placing import Placing
from .scope import CopyWork, RunWork
from .threads import in_thread
from .unpacking import unpack_items

FolderOf = Callable[[str | None], Awaitable[Folder]]
_NAME_RE = re.compile(r"[^A-Za-z0-9_-]+")
_BUSY_PAUSE = 0.5


@dataclass
class _Put:
    """What is put into a sandbox at ``target``: entries with paths relative to it ("": it is a file)."""

    target: str
    items: tuple[Item, ...] = ()


@dataclass
class Mounted:
    """The mounts of one RUN."""

    facts: list[Any] = field(default_factory=list)  #: what the outcome depends on
    volumes: dict[str, Volume] = field(default_factory=dict)
    puts: list[_Put] = field(default_factory=list)
    given: list[tuple[str, int, int, int]] = field(default_factory=list)  #: caches: where, whose (uid, gid), mode
    _covered: set[str] = field(default_factory=set)
    _made: set[str] = field(default_factory=set)

    async def enter(self, controller: Controller, sandbox_id: str, files: AsyncFiles, tree: Tree) -> None:
        """Put in what has to be there. BuildFailed, FileError."""
        for target, uid, gid, mode in self.given:
            await files.chown(target, f"{uid}:{gid}", user="0:0")
            await files.chmod(target, mode, user="0:0")
        items: list[Item] = []
        for put in self.puts:
            items += await in_thread(self._placed, put, tree)
        if items:
            await unpack_items(controller, sandbox_id, items)

    def _placed(self, put: _Put, tree: Tree) -> list[Item]:
        look = tree.folder.lstat
        real = resolve(look, put.target)
        there = look(real)
        is_file = len(put.items) == 1 and not put.items[0].path
        if there is not None and (there.kind != "folder" or is_file or tree.folder.names(real)):
            raise BuildFailed(
                f"--mount at {put.target}: there is something in the image already, which is not supported",
                hint="name a target that is empty or missing; type=cache may hide what is there",
            )
        self._covered.add(real)
        placing = Placing(look)
        above = real if not is_file else real.rpartition("/")[0]
        if above:
            placing.folder(above)
        self._made |= set(placing.items)
        return [*placing.items.values(), *(replace(item, path=f"{real}/{item.path}".strip("/")) for item in put.items)]

    def covers(self, path: str) -> bool:
        """Whether a path is no part of the layer."""
        while path:
            if path in self._covered:
                return True
            path = path.rpartition("/")[0]
        return False

    def without_own(self, items: list[Item]) -> list[Item]:
        """Folders that were only made to hold a mount are no part of it either."""
        kept = {item.path: item for item in items}
        for path in sorted(self._made, reverse=True):
            if path in kept and not any(other.startswith(f"{path}/") for other in kept):
                del kept[path]
        return list(kept.values())


class Mounts:
    """Of a build."""

    def __init__(self, home: Home, secrets: Mapping[str, bytes]) -> None:
        self._home = home
        self._secrets = secrets

    async def prepare(self, work: RunWork, folder_of: FolderOf) -> Mounted:
        """RecipeInvalid, BuildFailed."""
        mounted = Mounted()
        for mount in work.mounts:
            target = posixpath.normpath(posixpath.join(work.workdir, mount.get("target", "dst", "destination") or ""))
            if mount.type != "secret" and target == "/":
                raise work.line.wrong("--mount cannot take the place of the whole root", "name a folder below it")
            if mount.type == "cache":
                await self._cache(work, mount, target, mounted)
            elif mount.type == "bind":
                await self._bind(work, mount, target, mounted, folder_of)
            elif mount.type == "secret":
                self._secret(work, mount, mounted)
            else:
                mounted.puts.append(_Put(target))
                mounted.facts.append(("tmpfs", target))
        return mounted

    async def _cache(self, work: RunWork, mount: Mount, target: str, mounted: Mounted) -> None:
        if mount.get("from") or mount.get("source"):
            raise work.line.wrong("--mount=type=cache with from= is not supported", "fill it in an earlier RUN")
        sharing = mount.get("sharing") or "shared"
        if sharing not in ("shared", "private", "locked"):
            raise work.line.wrong(f"sharing={sharing[:40]} is not known", "shared, private or locked")
        mode, uid, gid = (_number(work, mount, key) for key in ("mode", "uid", "gid"))
        if uid is not None or gid is not None or mode is not None:
            mounted.given.append((target, uid or 0, gid or 0, 0o755 if mode is None else mode))
        name = cache_name(mount.get("id") or target)
        await in_thread(Volumes(self._home).ensure, name)
        mounted.volumes[target] = Volume(name, shared=sharing == "shared")
        mounted.facts.append(("cache", target, name, uid, gid, mode))

    async def _bind(self, work: RunWork, mount: Mount, target: str, mounted: Mounted, folder_of: FolderOf) -> None:
        source = mount.get("source", "src") or "."
        folder = await folder_of(mount.get("from"))
        copy = CopyWork(
            work.line, work.shown, (source,), (), "/x/", mount.get("from"), None, None, False, False, (), None
        )
        selection = await in_thread(select, copy, folder, mount.get("from") or "the context")
        (picked,) = selection.picked
        if picked.top.kind == "folder":
            items = tuple(picked.item(found) for found in picked.below)
        else:
            items = (replace(picked.item(picked.top), path=""),)
        mounted.puts.append(_Put(target, items))
        mounted.facts.append(("bind", target, selection.digest))

    def _secret(self, work: RunWork, mount: Mount, mounted: Mounted) -> None:
        name = mount.get("id") or posixpath.basename(mount.get("target", "dst", "destination") or "")
        if not name:
            raise work.line.wrong("--mount=type=secret needs an id", "write --mount=type=secret,id=NAME")
        if mount.get("env"):
            raise work.line.wrong("a secret as a variable is not supported", "read the file /run/secrets/ID")
        mounted.facts.append(("secret", name, mount.options))  # never its value
        value = self._secrets.get(name)
        if value is None:
            if (mount.get("required") or "").lower() in ("1", "true"):
                raise BuildFailed(
                    f"the secret {name} is needed, and was not given", hint=f"--secret id={name},src=FILE"
                )
            return
        target = posixpath.join("/", mount.get("target", "dst", "destination") or f"/run/secrets/{name}")
        numbers = {key: _number(work, mount, key) for key in ("mode", "uid", "gid")}
        item = Item(
            "", "file", 0o400 if numbers["mode"] is None else numbers["mode"], numbers["uid"] or 0, numbers["gid"] or 0,
            len(value), data=text_data(value),
        )  # fmt: skip
        mounted.puts.append(_Put(posixpath.normpath(target), (item,)))


def _number(work: RunWork, mount: Mount, key: str) -> int | None:
    text = mount.get(key)
    if text is None:
        return None
    with suppress(ValueError):
        found = int(text, 8 if key == "mode" else 10)
        if 0 <= found < 2**31:
            return found
    raise work.line.wrong(f"{key}={text[:40]} is no number")


def cache_name(text: str) -> str:
    """The name of the volume that a cache is, by its id or target."""
    short = _NAME_RE.sub("-", text)[-24:].strip("-") or "root"
    return f"build-cache-{short}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


async def patiently(start: Callable[[], Awaitable[Any]], mounted: Mounted, tell: Callable[[str], None]) -> Any:
    """Start a sandbox; while a cache of its own is in use elsewhere, wait for it."""
    waited = False
    while True:
        try:
            return await start()
        except VolumeInUse as error:
            if not mounted.volumes:
                raise
            if not waited:
                tell(f"waiting: {error.message}")
            waited = True
            await asyncio.sleep(_BUSY_PAUSE)
