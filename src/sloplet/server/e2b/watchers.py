"""envd's watchers: those that are asked for news now and then, and those that tell by themselves."""

from __future__ import annotations

import asyncio
import posixpath
import secrets
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ...errors import FileError, FileMissing, FileNotDirectory, SlopletError
from ...results import FileChange
from ...wire.mux import request
from ...wire.schema import Op
from . import connect
from .answers import rpc_error
from .calls import Call
from .connect import Out
from .entries import entry
from .filesystem import ROOT, files_of, look

_KINDS = {"created": "CREATE", "modified": "WRITE", "removed": "REMOVE", "attributes": "CHMOD"}
_MOST_EVENTS = 8192  # that wait to be asked for, of all watchers of a sandbox; the oldest go
_MOST_TEXT = 2 << 20  # characters of their names
_MOST = 64  # watchers of one sandbox


@dataclass(eq=False)
class _Watcher:
    sandbox: str
    events: deque[dict[str, Any]] = field(default_factory=deque)
    text: int = 0  #: characters of their names
    reading: asyncio.Task[None] | None = None

    def add(self, event: dict[str, Any], share: int) -> None:
        """``share``: which part of what a sandbox may have waiting is this one's."""
        self.events.append(event)
        self.text += _size(event)
        while self.events and (len(self.events) > _MOST_EVENTS // share or self.text > _MOST_TEXT // share):
            self.text -= _size(self.events.popleft())

    def take(self) -> list[dict[str, Any]]:
        found = list(self.events)
        self.events.clear()
        self.text = 0
        return found


class Watchers:
    """One per server. What is watched by asking lives until it is removed, or its sandbox ends."""

    def __init__(self) -> None:
        self._watchers: dict[str, _Watcher] = {}

    def close(self) -> None:
        for watcher in self._watchers.values():
            if watcher.reading is not None:
                watcher.reading.cancel()

    async def create(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        if self._count(call.record.sandbox) >= _MOST:
            raise rpc_error("resource_exhausted", f"a sandbox can have {_MOST} watchers")
        name, watcher = secrets.token_hex(12), _Watcher(call.record.sandbox)
        self._watchers[name] = watcher
        try:
            changes = _changes(call, await call.path(asked.get("path", ""), call.user), asked)
            await anext(changes)  # it is armed: what comes after this call is told
        except BaseException as error:
            self._watchers.pop(name, None)
            if isinstance(error, StopAsyncIteration):
                raise rpc_error("internal", "the watcher has ended") from None
            raise
        watcher.reading = asyncio.ensure_future(self._read(name, watcher, changes))
        return {"watcherId": name}

    async def _read(self, name: str, watcher: _Watcher, changes: AsyncIterator[dict[str, Any]]) -> None:
        try:
            async for event in changes:
                watcher.add(event, max(1, self._count(watcher.sandbox)))
        except SlopletError:
            self._watchers.pop(name, None)  # its sandbox is gone, or sleeps: whoever asks is told

    async def events(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        watcher = self._find(call, asked)
        await _settle(call)
        return {"events": watcher.take()}

    async def remove(self, call: Call, asked: dict[str, Any]) -> dict[str, Any]:
        watcher = self._find(call, asked)
        self._watchers.pop(str(asked.get("watcherId")), None)
        if watcher.reading is not None:
            watcher.reading.cancel()
        return {}

    def _count(self, sandbox: str) -> int:
        return sum(each.sandbox == sandbox for each in self._watchers.values())

    def _find(self, call: Call, asked: dict[str, Any]) -> _Watcher:
        name = str(asked.get("watcherId", ""))
        watcher = self._watchers.get(name)
        if watcher is None or watcher.sandbox != call.record.sandbox:
            raise rpc_error("not_found", f"watcher with id {name[:80]} not found")
        return watcher

    async def watch_dir(self, call: Call, out: Out) -> None:
        """The same as a stream."""
        asked = await connect.first(call.receive)
        seconds, interval = connect.seconds_of(call.headers), connect.keepalive_of(call.headers)
        path = await call.path(asked.get("path", ""), call.user)
        try:
            async with asyncio.timeout(seconds):
                async with aclosing(_changes(call, path, asked)) as changes:  # type: ignore[type-var]
                    await anext(changes)
                    await out.tell({"start": {}})
                    await _tell(out, changes, interval)
        except TimeoutError:
            raise rpc_error("deadline_exceeded", "the time to watch is over") from None


async def _tell(out: Out, changes: AsyncIterator[dict[str, Any]], interval: float) -> None:
    coming = asyncio.ensure_future(anext(changes))
    try:
        while True:
            done, _ = await asyncio.wait((coming,), timeout=interval)
            if not done:
                await out.tell({"keepalive": {}})
                continue
            try:
                event = coming.result()
            except StopAsyncIteration:
                return
            await out.tell({"filesystem": event})
            coming = asyncio.ensure_future(anext(changes))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)


async def _changes(call: Call, path: str, asked: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """What happens below a folder. The first is nothing: from then on nothing is missed."""
    changes = files_of(call).watch(path, recursive=asked.get("recursive") is True, folder=True, user=ROOT)
    try:
        async for change in changes:
            if change.kind == "ready":
                yield {}
            for event in events_of(change):
                if asked.get("includeEntry") is True:
                    await _add_entry(call, event, path)
                yield event
    except FileMissing:
        raise rpc_error("not_found", f"path {path} not found") from None
    except FileNotDirectory:
        raise rpc_error("invalid_argument", f"path {path} not a directory") from None
    except SlopletError as error:
        raise call.gone(error) from None


def _size(event: dict[str, Any]) -> int:
    return 200 + len(event["name"]) + (800 + 2 * len(event["name"]) if "entry" in event else 0)


def events_of(change: FileChange) -> list[dict[str, Any]]:
    """As fsnotify tells it: a rename is of the old name, and then there is a new one."""
    if change.kind == "renamed":
        found = [_event(change.name, "RENAME")]
        return found if change.new_name is None else [*found, _event(change.new_name, "CREATE")]
    return [_event(change.name, _KINDS[change.kind])] if change.kind in _KINDS else []


def _event(name: str, kind: str) -> dict[str, Any]:
    return {"name": name or ".", "type": f"EVENT_TYPE_{kind}"}


async def _add_entry(call: Call, event: dict[str, Any], path: str) -> None:
    at = posixpath.normpath(posixpath.join(path, event["name"]))
    try:
        event["entry"] = entry(await look(call, at), at)
    except FileError:
        pass  # it has gone already


async def _settle(call: Call) -> None:
    """What was done before this call is told to watchers by now: the agent, which does one thing after the other, has
    answered twice since."""
    for _ in range(2):
        stream = await call.open(request(Op.METRICS))
        try:
            await stream.result()
        finally:
            stream.reset()
