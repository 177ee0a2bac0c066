"""What a server needs to build something, as one tar: the context, other folders, the recipe. See server/contexts.py.

What .dockerignore names is not sent. The tar says nothing of owners and times, which no build takes over.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from ..archive import tarwrite
from ..errors import BuildFailed
from .context import Folder, Found, resolve

RESERVED = ".sloplet-build"
VERSION = 1
_SPECIAL = 0o6000  # setuid and setgid: no unpacker of ours keeps them, so they are told apart


class ContextTar:
    """``request``: what else the server is told. ``folders``: each with the names in it that are copied, () for all."""

    def __init__(
        self, request: Mapping[str, Any], context: Folder | None,
        folders: Sequence[tuple[Folder, tuple[str, ...]]] = (), secrets: Mapping[str, bytes] | None = None,
    ) -> None:  # fmt: skip
        self._request = request
        self._context, self._folders = context, folders
        self._secrets = secrets or {}
        self._modes: dict[str, dict[str, int]] = {}

    def pieces(self) -> Generator[bytes, None, None]:
        """Blocking: files are read. BuildFailed for one that changes meanwhile, or may not be read."""
        if self._context is not None:
            yield from self._all(self._context, self._context.walk(""), "", "context")
        yield _folder(RESERVED)
        yield _folder(f"{RESERVED}/folders")
        for number, (folder, names) in enumerate(self._folders):
            place = f"{RESERVED}/folders/{number}"
            yield _folder(place)
            found = folder.walk("") if not names else _named(folder, names)
            yield from self._all(folder, found, f"{place}/", str(number))
        for name, value in self._secrets.items():
            yield _file(f"{RESERVED}/secrets/{name}", value)
        request = {"version": VERSION, **self._request, "modes": self._modes}
        yield _file(f"{RESERVED}/request.json", json.dumps(request).encode()) + tarwrite.END

    def _all(self, folder: Folder, found: Iterator[Found], prefix: str, whose: str) -> Iterator[bytes]:
        for each in found:
            name = _raw(prefix + each.path)
            if each.path == RESERVED or each.path.startswith(f"{RESERVED}/"):
                raise BuildFailed(f"{each.path[:200]} cannot be sent: the name is used for something else")
            if each.mode & _SPECIAL:
                self._modes.setdefault(whose, {})[each.path] = each.mode
            if each.kind == "symlink":
                yield tarwrite.header(name, kind="symlink", mode=0o777, link=_raw(each.link))
            elif each.kind == "folder":
                yield tarwrite.header(name + b"/", kind="folder", mode=each.mode & 0o1777)
            else:
                yield tarwrite.header(name, size=each.size, mode=each.mode & 0o1777)
                yield from _content(folder, each)


def _named(folder: Folder, names: tuple[str, ...]) -> Iterator[Found]:
    """What these names are, and where they lead."""
    seen: set[str] = set()
    for name in names:
        for path in dict.fromkeys((name, resolve(folder.lstat, name))):
            top = folder.lstat(path)
            if top is None or top.path in seen:
                continue  # what is missing is the build's to complain of
            below = folder.walk(top.path) if top.kind == "folder" else iter(())
            for each in (top, *below):
                if each.path and each.path not in seen and each.kind != "other":
                    seen.add(each.path)
                    yield folder.whole(each)


def _content(folder: Folder, found: Found) -> Iterator[bytes]:
    size = 0
    for piece in folder.data(found)():
        size += len(piece)
        yield piece
    if size != found.size:
        raise BuildFailed(f"{found.path[:200]} changed while it was being read", hint="try again")
    yield tarwrite.padding(size)


def _folder(name: str) -> bytes:
    return tarwrite.header(f"{name}/".encode(), kind="folder", mode=0o700)


def _file(name: str, data: bytes) -> bytes:
    return tarwrite.header(name.encode(), size=len(data), mode=0o600) + data + tarwrite.padding(len(data))


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
