"""Live state through a server: part of ``RemoteController``. Archives are streamed to and from files of this
machine."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..controller import Diff, SandboxInfo, Snapshot
from ..errors import FileExists, ServerUnreachable, SnapshotError
from .http import json_of
from .paths import box_path, info_of, snapshot_of, snapshot_path

if TYPE_CHECKING:
    from .link import Link

ARCHIVE = "application/vnd.sloplet.archive"
_PIECE = 1 << 20
_TRIES, _PAUSE = 4, 0.2
_Infos = list[SandboxInfo]
_Snapshots = list[Snapshot]


class RemoteHistory:
    """See ``Controller`` for what each method promises."""

    leasing: bool

    @property
    def link(self) -> Link:
        raise NotImplementedError

    async def _get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        raise NotImplementedError

    async def _ask(self, method: str, path: str, body: Any = None, params: Mapping[str, Any] | None = None) -> Any:
        raise NotImplementedError

    async def find(self, ref: str) -> SandboxInfo:
        raise NotImplementedError

    async def _make(self, path: str, body: Any, *, leased: bool, undo: bool = True) -> Any:
        raise NotImplementedError

    # -- asleep and awake --------------------------------------------------------------

    async def set_ttl(self, sandbox_id: str, ttl: float | None) -> SandboxInfo:
        if ttl == 0:
            self.link.slept(sandbox_id)
        return info_of(await self._ask("PUT", box_path(sandbox_id, "ttl"), {"ttl": ttl}))

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> SandboxInfo:
        self.link.slept(sandbox_id)
        return info_of(await self._ask("POST", box_path(sandbox_id, "pause"), None if memory else {"memory": False}))

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        self.link.tunnel.begin()
        return info_of(await self._ask("POST", box_path(sandbox_id, "resume")))

    async def release(self, sandbox_id: str) -> None:
        await self._ask("POST", box_path(sandbox_id, "release"))

    # -- saved states ------------------------------------------------------------------

    async def snapshot(
        self, sandbox_id: str, name: str | None = None, *, role: str = "snapshot", note: str = "", memory: bool = True
    ) -> Snapshot:
        body = {"name": name, "role": role, "note": note, **({} if memory else {"memory": False})}
        return snapshot_of(await self._ask("POST", box_path(sandbox_id, "snapshots"), body))

    async def snapshots(self, sandbox_id: str | None = None, *, role: str | None = "snapshot") -> _Snapshots:
        path = "/v1/snapshots" if sandbox_id is None else box_path(sandbox_id, "snapshots")
        found = await self._get(path, {"role": role or "all"})
        return [snapshot_of(item) for item in found["items"]]

    async def find_snapshot(self, ref: str, sandbox_id: str | None = None) -> Snapshot:
        params = {} if sandbox_id is None else {"sandbox": sandbox_id}
        return snapshot_of(await self._get(snapshot_path(ref), params))

    async def delete_snapshot(self, snapshot_id: str, *, force: bool = False) -> None:
        await self._ask("DELETE", snapshot_path(snapshot_id), params={"force": "true"} if force else None)

    # -- branches ----------------------------------------------------------------------

    async def fork(
        self,
        sandbox_id: str,
        count: int,
        *,
        names: Sequence[str] | None = None,
        snapshot: str | None = None,
        ttl: float | None = None,
    ) -> _Infos:
        body: dict[str, Any] = {"count": count, "names": None if names is None else list(names), "snapshot": snapshot}
        if ttl is not None:
            body["ttl"] = ttl
        found = await self._make(box_path(sandbox_id, "fork"), body, leased=names is None)
        return [info_of(item) for item in found["items"]]

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> SandboxInfo:
        return info_of(await self._ask("POST", box_path(sandbox_id, "rollback"), {"snapshot": snapshot_id}))

    async def undo(self, sandbox_id: str, steps: int = 1) -> Snapshot:
        return snapshot_of(await self._ask("POST", box_path(sandbox_id, "undo"), {"steps": steps}))

    async def diff(self, sandbox_id: str, against: str | None = None, *, text: bool = True) -> Diff:
        params = {"text": "true" if text else "false", **({} if against is None else {"against": against})}
        return Diff.from_dict(await self._ask("GET", box_path(sandbox_id, "diff"), params=params))

    async def applied(self, sandbox_id: str, marks: Mapping[str, str]) -> None:
        await self._ask("POST", box_path(sandbox_id, "applied"), {"marks": dict(marks)})

    # -- archives ----------------------------------------------------------------------

    async def export(self, sandbox_id: str, path: str, *, image: bool = True) -> Snapshot:
        """The archive goes to a file beside ``path``, which has that name when all of it is here."""
        if os.path.lexists(path):
            raise FileExists(
                f"there already is {path[:300]!r}", hint="name a new file, or remove that one", errno=errno.EEXIST
            )
        info = await self.find(sandbox_id)
        part = f"{path}.{secrets.token_hex(6)}.part"
        params = {"image": "true" if image else "false"}
        try:
            async with self.link.http.stream("GET", box_path(sandbox_id, "export"), params=params) as response:
                size = await _write(part, response.aiter_raw(_PIECE))
                told = response.headers
            if size != int(told.get("Content-Length", size)):
                raise ServerUnreachable("the archive broke off before its end", hint="try again")
            os.link(part, path)  # not rename: what came there meanwhile is not replaced
        except OSError as error:
            raise SnapshotError(f"the archive cannot be written to {path}: {error.strerror}") from error
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part)
        return Snapshot(
            told.get("Sloplet-Snapshot", ""), None, "export", told.get("Sloplet-Snapshot-Kind", "disk"), info.id,
            info.name, info.head, info.engine, time.time(), size, info.spec,
        )  # fmt: skip

    async def load(self, path: str, *, name: str | None = None) -> SandboxInfo:
        headers = {"Content-Type": ARCHIVE, "Idempotency-Key": secrets.token_hex(16)}
        if self.leasing:
            headers["Sloplet-Lease"] = "true"  # it is for what turns out to have no name
        self.link.tunnel.begin()
        for attempt in range(_TRIES):
            try:
                return await self._load(path, headers, {} if name is None else {"name": name})
            except ServerUnreachable:
                if attempt == _TRIES - 1:
                    raise
                await asyncio.sleep(_PAUSE * 2**attempt)
        raise AssertionError

    async def _load(self, path: str, headers: dict[str, str], params: dict[str, str]) -> SandboxInfo:
        try:
            file = open(path, "rb")  # noqa: SIM115, ASYNC230 - opened at once, read in a thread
        except OSError as error:
            raise SnapshotError(f"the archive {path} cannot be read: {error.strerror}") from error
        with file:
            length = {"Content-Length": str(os.fstat(file.fileno()).st_size)}
            async with self.link.http.stream(
                "POST", "/v1/sandboxes/import", params=params, headers={**headers, **length}, content=_read(file)
            ) as response:
                return info_of(await json_of(response))


async def _write(path: str, pieces: AsyncIterator[bytes]) -> int:
    loop, size = asyncio.get_running_loop(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb", buffering=0) as file:  # noqa: ASYNC230
        async for piece in pieces:
            size += len(piece)
            await loop.run_in_executor(None, file.write, piece)
        await loop.run_in_executor(None, os.fsync, fd)
    return size


async def _read(file: Any) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    while piece := await loop.run_in_executor(None, file.read, _PIECE):
        yield piece
