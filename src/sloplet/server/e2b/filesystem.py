"""envd's ``filesystem.Filesystem``. As envd does, it acts as root inside, and what it makes is the asking user's."""

from __future__ import annotations

import asyncio
import posixpath
from typing import Any

from ...errors import (
    FileError,
    FileExists,
    FileMissing,
    FileNotDirectory,
    SlopletError,
    SpecError,
    UserNotFound,
)
from ...files import AsyncFiles
from ...results import FileInfo
from .answers import Refused, rpc_error
from .calls import Call
from .entries import PREFIX, entry

ROOT = "root"  # whom envd runs as
_MAX_DEPTH = 1000
_MOST_ENTRIES = 50_000
_FEW = 500  # entries that are told at once


class Filesystem:
    """The unary calls but for watchers. Stateless."""

    async def stat(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        path = await call.path(asked.get("path", ""), call.user)
        try:
            return {"entry": entry(await look(call, path), path)}
        except (FileMissing, FileNotDirectory):
            raise rpc_error("not_found", f"file not found: {path}") from None

    async def make_dir(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        user = call.user
        path = await call.path(asked.get("path", ""), user)
        files = files_of(call)
        try:
            found = await files.stat(path, user=ROOT)
        except FileMissing:
            pass
        except FileNotDirectory:
            raise rpc_error("internal", f"path is a file: {posixpath.dirname(path)}") from None
        else:
            if found.type == "dir":
                raise rpc_error("already_exists", f"directory already exists: {path}")
            raise rpc_error("invalid_argument", f"path already exists but it is not a directory: {path}")
        try:
            await files.mkdir(path, user=ROOT, owner=user or call.record.user)
        except (FileExists, FileNotDirectory):
            raise rpc_error("internal", f"path is a file: {posixpath.dirname(path)}") from None
        return {"entry": entry(await look(call, path), path)}

    async def move(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        user = call.user
        source = await call.path(asked.get("source", ""), user)
        destination = await call.path(asked.get("destination", ""), user)
        files = files_of(call)
        try:
            await files.stat(source, follow=False, user=ROOT)
        except (FileMissing, FileNotDirectory):
            raise rpc_error("not_found", f"source file not found: {source}") from None
        try:
            await files.move(source, destination, replace=True, user=ROOT)
        except FileMissing:
            await files.mkdir(posixpath.dirname(destination), user=ROOT, owner=user or call.record.user)
            await files.move(source, destination, replace=True, user=ROOT)
        return {"entry": entry(await look(call, destination), destination)}

    async def list_dir(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        path = await call.path(asked.get("path", ""), call.user)
        depth = asked.get("depth") or 1
        if isinstance(depth, bool) or not isinstance(depth, int) or not depth >= 1:
            raise rpc_error("invalid_argument", "depth should be at least 1")
        try:
            found = await files_of(call).list(
                path, recursive=True, depth=min(depth, _MAX_DEPTH), owners=True, targets=True, attributes=PREFIX,
                user=ROOT,
            )  # fmt: skip
        except FileMissing:
            raise rpc_error("not_found", f"path not found: {path}") from None
        except FileNotDirectory:
            raise rpc_error("invalid_argument", f"path is not a directory: {path}") from None
        if len(found) > _MOST_ENTRIES:
            raise rpc_error("resource_exhausted", f"{path} holds more than {_MOST_ENTRIES} entries at this depth")
        if len(found) < _FEW:
            return _listed(path, found)
        return await asyncio.to_thread(_listed, path, found)

    async def remove(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        path = await call.path(asked.get("path", ""), call.user)
        try:
            await files_of(call).remove(path, recursive=True, missing_ok=True, user=ROOT)
        except FileNotDirectory:
            pass
        return {}


def _listed(path: str, found: list[FileInfo]) -> dict[str, Any]:
    found.sort(key=lambda info: info.name.split("/"))
    return {"entries": [entry(info, posixpath.join(path, info.name)) for info in found]}


def files_of(call: Call) -> AsyncFiles:
    """The sandbox's files, without waking it unless it is one that wakes."""
    return AsyncFiles(call.open)


async def look(call: Call, path: str) -> FileInfo:
    """What is at a path, with all that an entry tells."""
    return await files_of(call).stat(path, follow=False, owners=True, targets=True, attributes=PREFIX, user=ROOT)


def told(error: SlopletError) -> SlopletError:
    """An error of a file, as a call's."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, UserNotFound):
        return rpc_error("unauthenticated", f"invalid username: {error.message}")
    if isinstance(error, (FileMissing, FileNotDirectory)):
        return rpc_error("not_found", error.message)
    if isinstance(error, SpecError):
        return rpc_error("invalid_argument", error.message)
    if isinstance(error, FileError):
        return rpc_error("internal", error.message)
    return error
