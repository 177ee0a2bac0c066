"""What ``crash_kit`` does with images of the store, and what must be true of the store after a crash and one gc."""

from __future__ import annotations

import hashlib
import io
import os
import random
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
import image_kit
from sloplet.build.dockerfile import parse as parse_dockerfile
from sloplet.build.executor import Builder, BuildOptions, parse_tags
from sloplet.build.running import RunSettings
from sloplet.errors import SlopletError
from sloplet.images import cleaning, jobs, media, removing, trees, userns
from sloplet.images.config import ImageConfig
from sloplet.images.reference import parse
from sloplet.images.store import ImageStore, StoredImage
from sloplet.portal import portal
from sloplet.state.home import Home

__all__ = ["add", "base", "broken", "build", "built", "prune", "remove", "resolve", "settle"]
_WARM = (cleaning, jobs, removing, trees, userns)  # imported once for all programs
NAME = "crash:test"
_FILES = 12


def _layer(number: int) -> bytes:
    made, chance = io.BytesIO(), random.Random(number)
    with tarfile.open(fileobj=made, mode="w") as archive:
        for index in range(_FILES):
            info = tarfile.TarInfo(f"part{number}/deep/file{index}")
            data = chance.randbytes(index * 700)
            info.size, info.uid, info.gid = len(data), index * 100, index * 100
            archive.addfile(info, io.BytesIO(data))
    return made.getvalue()


LAYERS = [_layer(number) for number in range(2)]
_EXPECTED = sorted(f"part{number}/deep/file{index}" for number in range(2) for index in range(_FILES))


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def add() -> StoredImage:
    store = ImageStore(Home())
    with store.adding():
        for layer in LAYERS:
            with store.blobs.writer(_digest(layer), len(layer)) as writer:
                while writer.offset < len(layer):
                    writer.write(layer[writer.offset : writer.offset + 20_000])
                writer.commit()
        raw = ImageConfig(
            architecture=media.host_platform().architecture, diff_ids=tuple(map(_digest, LAYERS))
        ).to_json()
        config = media.Descriptor(media.OCI_CONFIG, store.blobs.add_bytes(raw), len(raw))
        layers = tuple(media.Descriptor(media.OCI_LAYER, _digest(layer), len(layer)) for layer in LAYERS)
        manifest = store.blobs.add_bytes(media.make_manifest(config, layers).raw)
        return store.record(manifest, reference=parse(NAME))


def resolve(image: StoredImage) -> StoredImage:
    ImageStore(Home()).resolve(image).close()
    return image


def settle() -> None:
    """Wait for the thread that has the disk take what was unpacked: what is traced begins alone."""
    for thread in threading.enumerate():
        if thread.name == "sloplet-sync":
            thread.join()
    while len(os.listdir("/proc/self/task")) > 1:  # the kernel takes a moment longer
        time.sleep(0.001)


def remove(image: StoredImage) -> None:
    ImageStore(Home()).remove(NAME)


def prune() -> None:
    ImageStore(Home()).prune(everything=True)


_RECIPE = """
FROM crash:base AS one
COPY <<text /made/
hello
text
RUN cat /made/text > /made/again && rm /etc/group
FROM crash:base
COPY --from=one /made /made
"""
_BUILT = ["etc/group", "etc/passwd", "made/again", "made/text"]


def base() -> None:
    """What is built on. The modules are imported here, before anything is counted."""
    image_kit.busybox_image(Home(), "crash:base")


def build() -> StoredImage:
    """By a program of its own: steps in sandboxes, layers, records, the cache."""
    options = BuildOptions(tags=parse_tags([NAME]), settings=RunSettings(engine="container"))
    return portal().call(Builder(parse_dockerfile(_RECIPE), options, home=Home()).build())


def built() -> list[str]:
    """After a crash and a gc: each image that is there is whole, the build can be done (again), and all of it goes."""
    home = Home()
    store = ImageStore(home)
    found = []
    for image in store.list():
        try:
            store.resolve(image).close()
        except SlopletError as error:
            found.append(f"the image {image.references} is on record, but: {error}")
    base()
    root = store.resolve(build())
    assert root.path is not None
    names = [name for name in _names(root.path) if not name.startswith("usr/bin/")]
    if names != _BUILT:
        found.append(f"what was built has other files: {names}")
    root.close()
    store.prune(everything=True)
    found += [f"left over: {name}" for name in _left(home)]
    store.close()
    return found


def broken() -> list[str]:
    """What a crash and a gc left must be whole images or none; and all of it can be removed."""
    home = Home()
    store = ImageStore(home)
    found: list[str] = []
    for image in store.list():
        root = store.resolve(image)
        assert root.path is not None
        names = _names(root.path)
        if names != _EXPECTED:
            found.append(f"the image has {len(names)} of {len(_EXPECTED)} files")
        root.close()
    for text in (NAME,):
        try:
            store.find(text)
        except LookupError:
            image = add()  # it can be brought again, over whatever is left
            resolve(image)
    store.prune(everything=True)
    found += [f"left over: {name}" for name in _left(home)]
    found += [f"lock left: {name}" for name in os.listdir(home.run) if name.startswith("image-")]
    store.close()
    return found


def _names(root: Path) -> list[str]:
    return sorted(os.path.relpath(os.path.join(base, name), root) for base, _, files in os.walk(root) for name in files)


def _left(home: Home) -> list[str]:
    found: list[Any] = [name for name in os.listdir(home.images) if name not in ("blobs", "layers")]
    for folder in ("layers", "blobs/sha256", "blobs/partial"):
        path = home.images / folder
        found += os.listdir(path) if path.exists() else []
    return found


sys.modules.setdefault("image_crash", sys.modules[__name__])
