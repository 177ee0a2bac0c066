"""The images and volumes that verbs are about: this machine's, or a key's on a server (--server, SLOPLET_URL)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import ImageNotFound

if TYPE_CHECKING:
    from ..images.reference import Reference
    from ..images.removing import Pruned, Removed
    from ..images.store import ImageStore, StoredImage
    from ..remote.images import RemoteImages
    from ..remote.place import Place
    from ..volumes.records import VolumeInfo

T = TypeVar("T")
_Images = list["StoredImage"]
_Infos = list["VolumeInfo"]


@dataclass(frozen=True)
class Looked:
    """What is known of an image. ``layers``: bytes unpacked, by diff id, where that is known."""

    image: StoredImage
    unpacked: int
    layers: dict[str, int] = field(default_factory=dict)


class Images(Protocol):
    def list(self, *, all: bool) -> _Images: ...

    def look(self, ref: str) -> Looked: ...

    def remove(self, ref: str, *, force: bool) -> Removed: ...

    def tag(self, ref: str, reference: Reference) -> str:
        """The image's id."""

    def prune(self, *, older_than: float | None, keep_bytes: int | None, everything: bool) -> Pruned: ...


class Volumes(Protocol):
    def create(self, name: str, *, size: int | str | None = None) -> VolumeInfo: ...

    def list(self) -> _Infos: ...

    def inspect(self, name: str) -> VolumeInfo: ...

    def remove(self, name: str) -> None: ...

    def snapshot(self, name: str, snapshot: str) -> VolumeInfo: ...

    def remove_snapshot(self, name: str, snapshot: str) -> None: ...

    def clone(self, name: str, new: str, *, snapshot: str | None = None) -> VolumeInfo: ...


def place() -> Place | None:
    """The server that is meant; None: this machine."""
    from ..finding import place_of

    return place_of()


def ask(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def volumes() -> Volumes:
    there = place()
    if there is None:
        from ..volumes.store import Volumes as Here

        return Here()
    from ..remote.volumes import RemoteVolumes

    found: Any = _Waited(RemoteVolumes(there))
    return found  # type: ignore[no-any-return]


class _Waited:
    """An object whose methods are awaited, for who does not."""

    def __init__(self, remote: object) -> None:
        self._remote = remote

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._remote, name)
        return lambda *args, **options: ask(method(*args, **options))


@contextmanager
def images() -> Iterator[Images]:
    there = place()
    if there is not None:
        from ..remote.images import RemoteImages

        yield _There(RemoteImages(there))
        return
    from ..images.store import ImageStore
    from ..state.home import Home

    store = ImageStore(Home())
    try:
        yield _Here(store)
    finally:
        store.close()


class _Here:
    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._made = store.home.database.exists()  # a look must not make a home

    def list(self, *, all: bool) -> _Images:
        return [image for image in (self._store.list() if self._made else []) if all or image.references]

    def look(self, ref: str) -> Looked:
        from ..images.removing import disk_use

        image = self._store.find(ref)
        used = disk_use(self._store, self._store.row(image.id))
        layers = {diff: used[f"unpacked {diff}"] for diff in image.config.diff_ids}
        return Looked(image, sum(layers.values()), layers)

    def remove(self, ref: str, *, force: bool) -> Removed:
        if not self._made:
            raise ImageNotFound(f"there is no image {ref!r} here", hint="see `sloplet image ls`")
        return self._store.remove(ref, force=force)

    def tag(self, ref: str, reference: Reference) -> str:
        found = self._store.find(ref)
        self._store.tag(found, reference)
        return found.id

    def prune(self, *, older_than: float | None, keep_bytes: int | None, everything: bool) -> Pruned:
        from ..images.removing import Pruned

        if not self._made:
            return Pruned()
        return self._store.prune(older_than=older_than, keep_bytes=keep_bytes, everything=everything)


class _There:
    def __init__(self, remote: RemoteImages) -> None:
        self._remote = remote

    def list(self, *, all: bool) -> _Images:
        return ask(self._remote.list(all=all))

    def look(self, ref: str) -> Looked:
        image, told = ask(self._remote.find(ref))
        return Looked(image, int(told["disk"]["unpacked"]))

    def remove(self, ref: str, *, force: bool) -> Removed:
        return ask(self._remote.remove(ref, force=force))

    def tag(self, ref: str, reference: Reference) -> str:
        return str(ask(self._remote.tag(ref, str(reference)))["id"])

    def prune(self, *, older_than: float | None, keep_bytes: int | None, everything: bool) -> Pruned:
        return ask(self._remote.prune(older_than=older_than, keep_bytes=keep_bytes, everything=everything))
