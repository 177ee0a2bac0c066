"""What is sent to be built, on this disk: unpacked into a private folder, and read from there without ever leaving it.

The tar of a request is a context as ``docker build`` has it, with a Dockerfile in it. The library's own client adds a
folder ``.sloplet-build``, which is no part of the context::

    .sloplet-build/request.json   {"version", "recipe" (build/recipefile.py), "build_args", "labels", "network"}
    .sloplet-build/folders/N/     folders that steps copy from, other than the context
    .sloplet-build/secrets/ID     values for ``RUN --mount=type=secret``

Then the client has applied its .dockerignore already. All of it is hostile: links in it lead nowhere else, since every
file is opened below the folder's own descriptor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from ..build.context import Folder, Found, parse_ignore
from ..build.contexttar import RESERVED, VERSION
from ..build.dockerfile import Dockerfile, parse
from ..build.ignore import Ignore
from ..build.image import for_index
from ..build.lines import MAX_BYTES
from ..build.recipefile import from_document
from ..errors import ImageInvalid, RecipeInvalid, RequestInvalid, SlopletError
from ..fs import FOLDER, open_in
from ..images.unpack import UnpackLimits, unpack
from ..state.home import Home, names_in, new_id, remove_below, unwritable
from ..state.locks import FileLock

LIMITS = UnpackLimits(bytes=16 * 2**30, entries=500_000)
_MOST_REQUEST = 8 << 20
_MOST_IGNORE = 1 << 20
_MOST_SECRET = 1 << 20
_MOST_SECRETS = 64
_PREFIX = "context-"


@dataclass
class Sent:
    """What came. ``context`` and ``folders`` are for ``Builder``, which closes them."""

    recipe: Dockerfile
    context: Folder
    folders: dict[str, Folder] = field(default_factory=dict)
    build_args: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    network: Any = None
    secrets: dict[str, bytes] = field(default_factory=dict, repr=False)

    def close(self) -> None:
        for folder in (self.context, *self.folders.values()):
            folder.close()


@contextmanager
def private_folder(home: Home) -> Iterator[Path]:
    """A new one on the disk of ``home``, gone afterwards; what a server that died has left goes first. Blocking."""
    home.open()
    _sweep(home)
    name = f"{_PREFIX}{new_id()}"
    lock = FileLock.take(home.run / f"{name}.lock", wait=True)
    assert lock is not None
    try:
        try:
            home.cache.mkdir(0o700, exist_ok=True)
            (home.cache / name).mkdir(0o700)
        except OSError as error:
            raise unwritable(home.cache, error) from error
        yield home.cache / name
    finally:
        try:
            remove_below(home.cache, name)
        finally:
            lock.release()


def _sweep(home: Home) -> None:
    for name in names_in(home.cache):
        if name.startswith(_PREFIX) and (lock := FileLock.take(home.run / f"{name}.lock")) is not None:
            try:
                with suppress(SlopletError):
                    remove_below(home.cache, name)
            finally:
                lock.release()


def unpacked(file: BinaryIO, folder: Path, dockerfile: str) -> Sent:
    """Unpack a (packed) tar and read what it asks for. RequestInvalid, RecipeInvalid, SpecError, StateUnwritable."""
    place = folder / "context"
    try:
        place.mkdir(0o700)
        root = os.open(place, FOLDER)
        try:
            unpack(file, root, LIMITS)
            return _read(place, root, folder, dockerfile)
        finally:
            os.close(root)
    except ImageInvalid as error:
        raise RequestInvalid(f"the body is no context that can be built: {error.message}", hint="send a tar") from error
    except OSError as error:
        if isinstance(error, SlopletError):
            raise
        raise unwritable(place, error) from error


def _read(place: Path, root: int, folder: Path, dockerfile: str) -> Sent:
    try:
        os.close(open_in(root, RESERVED, FOLDER))
    except OSError:
        return _plain(place, dockerfile)
    os.rename(RESERVED, folder / "sent", src_dir_fd=root)
    return _with_request(place, folder / "sent")


def _plain(place: Path, dockerfile: str) -> Sent:
    """A Dockerfile in the context, links followed inside of it."""
    with Folder(place) as folder:
        text = _text(folder, dockerfile, MAX_BYTES)
        if text is None:
            raise RecipeInvalid(
                f"there is no file {dockerfile[:200]!r} in the context", hint="dockerfile=PATH names it"
            )
        ignore = Ignore()
        for name in (f"{dockerfile}.dockerignore", ".dockerignore"):
            if (lines := _text(folder, name, _MOST_IGNORE)) is not None:
                ignore = parse_ignore(lines.removeprefix("\ufeff").splitlines(), name)
                break
    return Sent(parse(text, os.path.basename(dockerfile)), Folder(place, ignore=ignore))


def _text(folder: Folder, path: str, most: int) -> str | None:
    data = folder.read(path, most)
    if data is None:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise RecipeInvalid(f"{path[:200]} is not UTF-8 text") from None


def _with_request(place: Path, sent: Path) -> Sent:
    with Folder(sent) as folder:
        data = folder.read("request.json", _MOST_REQUEST)
        secrets = {
            name: folder.read(f"secrets/{name}", _MOST_SECRET) for name in _names(folder, "secrets", _MOST_SECRETS)
        }
        numbers = _names(folder, "folders", 10_000)
        for name in numbers:
            found = folder.lstat(f"folders/{name}")
            if found is None or found.kind != "folder":
                raise RequestInvalid(f"folders/{name[:40]!r} in {RESERVED} is no folder")
    remove_below(sent, "secrets")
    try:
        if data is None:
            raise ValueError("there is none, or it is too long")
        document = json.loads(data)
        if document["version"] != VERSION:
            raise ValueError("another version of sloplet wrote it")
        recipe = from_document(document["recipe"], set(numbers), for_index)
        args, labels = _texts(document.get("build_args", {})), _texts(document.get("labels", {}))
        network = document.get("network")
        modes = {str(key): _modes(value) for key, value in document.get("modes", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, SlopletError):
            raise
        raise RequestInvalid(f"{RESERVED}/request.json makes no sense: {error!s:.100}") from None
    folders: dict[str, Folder] = {name: _Moded(sent / "folders" / name, modes.get(name)) for name in numbers}
    known = {name: value for name, value in secrets.items() if value is not None}
    return Sent(recipe, _Moded(place, modes.get("context")), folders, args, labels, network, known)


class _Moded(Folder):
    """With the modes of files that have setuid or setgid, which none has on this disk."""

    def __init__(self, path: Path, modes: dict[str, int] | None) -> None:
        super().__init__(path)
        self._modes = modes or {}

    def whole(self, found: Found) -> Found:
        return replace(found, mode=self._modes.get(found.path, found.mode))


def _modes(found: Any) -> dict[str, int]:
    if not all(isinstance(mode, int) and 0 <= mode <= 0o7777 for mode in found.values()):
        raise ValueError("no modes")
    return {str(path): mode for path, mode in found.items()}


def _names(folder: Folder, path: str, most: int) -> list[str]:
    names = folder.names(path)
    if len(names) > most:
        raise RequestInvalid(f"there are more than {most} {path} in {RESERVED}")
    return names


def _texts(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(key, str) and isinstance(found[key], str) for key in found):
        raise ValueError("no texts by name")
    return found
