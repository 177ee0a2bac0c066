"""Helpers for tests of archives: whole ones as the code writes them, and crafted ones as an enemy would."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import zstandard
from snapshot_helpers import FILES, World

from sloplet.archive import layout, tarwrite
from sloplet.archive.images import Incoming
from sloplet.archive.read import Archive, adopt, check_room
from sloplet.archive.work import Work
from sloplet.archive.write import Target, write
from sloplet.engines.base import ResolvedImage
from sloplet.state.opened import image_facts

HOST = ResolvedImage("host")


def export(
    world: World, path: Path, *, image: ResolvedImage = HOST, include: bool = True, **more: Any
) -> dict[str, Any]:
    """What a runtime does; returns the manifest of what was saved."""
    spec = more.pop("settings", {})
    sandbox = world.sandbox(more.pop("name", "dev"), **spec)
    saved = world.save(sandbox, role="export", image=image_facts(image), **more)
    with Target(str(path), world.home) as target, world.snapshots.open(saved.id, verify=False) as opened:
        write(target, opened, image, world.home, Work("export"), include=include)
        manifest = opened.manifest
    world.snapshots.delete(saved.id, force=True)
    return manifest


def receive(world: World, path: Path, work: Work | None = None) -> tuple[dict[str, bytes], ResolvedImage]:
    """What a runtime does up to the start; returns the state's files and the image."""
    with Archive(str(path)) as archive, world.snapshots.begin() as draft:
        with Incoming(world.home, archive.manifest) as incoming:
            check_room(world.home, archive.manifest, image=incoming.missing)
            archive.receive(draft, incoming, work or Work("import"))
            image = incoming.publish()
        with adopt(draft, archive.manifest, image) as opened:
            files = {name: (opened.path / name).read_bytes() for name in opened.manifest["files"]}
            assert set(os.listdir(opened.fd)) == set(files)
            opened.verify()
            return files, image


class Crafted:
    """An archive in parts that can be changed before it is put together. All digests are then right again: what is
    wrong with it is only what the test made wrong."""

    def __init__(self, files: dict[str, bytes] | None = None, image: bytes | None = None) -> None:
        files = FILES if files is None else files
        self.version = layout.VERSION
        self.manifest: dict[str, Any] = {}
        self.members = [(layout.STATE_PREFIX + name, data) for name, data in sorted(files.items())]
        self.state = [layout.Member(name, len(data), _sha(data)).to_dict() for name, data in sorted(files.items())]
        self.packed: dict[str, Any] | None = None
        if image is not None:
            self.packed = layout.Member(layout.IMAGE_MEMBER, len(image), _sha(image)).to_dict()
            self.members.append((layout.IMAGE_MEMBER, image))
        self.kinds: dict[str, str] = {}
        self.tail = tarwrite.END
        self.after = b""

    def like(self, whole: Path) -> Crafted:
        """Everything else as in a real archive."""
        with Archive(str(whole)) as archive:
            self.manifest = json.loads(archive.manifest.to_bytes())
        self.manifest["state"], self.manifest["packed"] = self.state, self.packed
        return self

    def with_image(self, image: bytes, key: str = "") -> Crafted:
        self.manifest["image"] = layout.ImageFacts("rootfs", "dir:/x", content=_sha(image), key=key).to_dict()
        return self

    def tar(self) -> bytes:
        text = json.dumps(self.manifest).encode()
        parts = []
        for name, data in [(layout.MANIFEST_MEMBER, text), *self.members]:
            kind = self.kinds.get(name, "file")
            parts.append(tarwrite.header(name.encode(), kind=kind, size=len(data)) + data + tarwrite.padding(len(data)))
        return b"".join(parts) + self.tail

    def write(self, path: Path) -> Path:
        body = layout.mark(self.version) + zstandard.ZstdCompressor().compress(self.tar()) + self.after
        path.write_bytes(body + layout.trailer(hashlib.sha256(body).digest()))
        return path


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
