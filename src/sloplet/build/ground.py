"""What a stage stands on: the layers that it has so far, and their files, unpacked when somebody needs to look."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engines.base import ResolvedImage
from ..errors import BuildFailed
from ..images.config import ImageConfig
from ..images.media import OCI_CONFIG, Descriptor, Platform, check_platform, host_platform, make_manifest
from ..images.progress import OnImageProgress, silent
from ..images.reference import Reference
from ..images.store import ImageStore, StoredImage
from ..images.trees import chain_id
from .context import Folder, Found
from .layertar import Item, Layer
from .placing import View
from .threads import made_in_thread
from .tree import tree_folder

#: In the config of what is between the steps of a build: no image that anybody asked for.
STEP_LABEL = "sloplet.build.step"


@dataclass
class Tree:
    """The unpacked files of some layers, leased until ``close``."""

    image: StoredImage
    resolved: ResolvedImage
    folder: Folder

    def close(self) -> None:
        self.folder.close()
        if self.resolved.lease is not None:
            self.resolved.lease.close()


@dataclass
class Ground:
    """The layers of a stage. ``known``: the entries of each layer, where they are known."""

    store: ImageStore
    platform: ImageConfig  #: architecture and the like, of what is between steps
    layers: list[Layer] = field(default_factory=list)
    known: list[list[Item] | None] = field(default_factory=list)
    progress: OnImageProgress = silent
    _unpacking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tree: Tree | None = None
    _tree_layers: int = 0

    def copy(self) -> Ground:
        """For a stage that builds on this one; it has a tree of its own."""
        return Ground(self.store, self.platform, list(self.layers), [None] * len(self.layers), self.progress)

    @property
    def chain(self) -> str:
        """What tells these files from all others."""
        return chain_id([layer.diff_id for layer in self.layers]) if self.layers else ""

    def check_platform(self) -> None:
        """ImagePlatform if nothing of it can be run here."""
        config = self.platform
        check_platform(Platform(config.os, config.architecture, config.variant), host_platform())

    def add(self, layer: Layer | None, items: list[Item] | None) -> None:
        if layer is not None:
            self.layers.append(layer)
            self.known.append(items)

    async def tree(self) -> Tree:
        """All layers, unpacked; an earlier tree, of fewer, is closed. BuildFailed if there are none."""
        async with self._unpacking:
            if self._tree is not None and self._tree_layers == len(self.layers):
                return self._tree
            made = await made_in_thread(self._unpack, Tree.close)
            self.close()
            self._tree, self._tree_layers = made, len(self.layers)
            return made

    def _unpack(self) -> Tree:
        if not self.layers:
            raise BuildFailed("there is nothing in scratch: no program to run and no file to copy")
        here = host_platform()  # it is looked at here, whatever it is made for
        bare = ImageConfig(
            architecture=here.architecture, os=here.os, variant=here.variant, labels=((STEP_LABEL, "1"),)
        )
        image = record(self.store, bare, self.layers)
        resolved = self.store.resolve(image, self.progress)
        return Tree(image, resolved, tree_folder(resolved))

    async def view(self) -> View:
        """The files as they are now, to look at. Unpacks only what cannot be known otherwise."""
        if any(items is None for items in self.known[self._tree_layers :]):
            await self.tree()
        view = View(_nothing if self._tree is None else self._tree.folder.lstat)
        for items in self.known[self._tree_layers :]:
            view.add(items or ())
        return view

    async def read(self, path: str, most: int = 2**20) -> bytes | None:
        """A small file of it."""
        if not self.layers:
            return None
        return (await self.tree()).folder.read(path, most)

    def close(self) -> None:
        tree, self._tree, self._tree_layers = self._tree, None, 0
        if tree is not None:
            tree.close()


def _nothing(path: str) -> Found | None:
    return None if path else Found("", "folder", 0o755)


def record(
    store: ImageStore, config: ImageConfig, layers: Sequence[Layer], reference: Reference | None = None
) -> StoredImage:
    """An image of these layers. Blocking."""
    whole = config.changed(diff_ids=tuple(layer.diff_id for layer in layers))
    raw = whole.to_json()
    described = Descriptor(OCI_CONFIG, store.blobs.add_bytes(raw), len(raw))
    manifest = make_manifest(described, tuple(layer.descriptor for layer in layers))
    return store.record(store.blobs.add_bytes(manifest.raw), reference=reference)
