"""Live state through the keeper: the methods it answers, and the client's side of them.

What changes a sandbox needs a keeper, which is started if none runs: a paused sandbox has no holder. What only reads
records does not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..controller import Diff, SandboxInfo, Snapshot

if TYPE_CHECKING:
    from ..runtime import Runtime
    from .server import Client, Server

_Infos = list[SandboxInfo]
_Snapshots = list[Snapshot]
Method = Callable[["Client", dict[str, Any]], Awaitable[Any]]


class HistoryMethods:
    """The keeper's side."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._runtime: Runtime = server.runtime
        self.methods: dict[str, Method] = {
            "set_ttl": self._set_ttl,
            "pause": self._pause,
            "resume": self._resume,
            "release": self._release,
            "snapshot": self._snapshot,
            "snapshots": self._snapshots,
            "find_snapshot": self._find_snapshot,
            "delete_snapshot": self._delete_snapshot,
            "fork": self._fork,
            "rollback": self._rollback,
            "undo": self._undo,
            "diff": self._diff,
            "applied": self._applied,
            "export": self._export,
            "load": self._load,
        }

    async def _set_ttl(self, client: Client, params: dict[str, Any]) -> Any:
        return (await self._runtime.set_ttl(params["sandbox"], params["ttl"])).to_dict()

    async def _pause(self, client: Client, params: dict[str, Any]) -> Any:
        return (await self._runtime.pause(params["sandbox"], memory=params["memory"])).to_dict()

    async def _resume(self, client: Client, params: dict[str, Any]) -> Any:
        info = await self._runtime.resume(params["sandbox"])
        client.use(info.id)
        return info.to_dict()

    async def _release(self, client: Client, params: dict[str, Any]) -> Any:
        """Paused, unless some other program uses it too."""
        sandbox = str(params["sandbox"])
        client.using.discard(sandbox)
        if not any(sandbox in other.using for other in self._server.clients):
            await self._runtime.release(sandbox)

    async def _snapshot(self, client: Client, params: dict[str, Any]) -> Any:
        made = await self._runtime.snapshot(
            params["sandbox"], params["name"], role=params["role"], note=params["note"], memory=params["memory"]
        )
        return made.to_dict()

    async def _snapshots(self, client: Client, params: dict[str, Any]) -> Any:
        return [item.to_dict() for item in await self._runtime.snapshots(params["sandbox"], role=params["role"])]

    async def _find_snapshot(self, client: Client, params: dict[str, Any]) -> Any:
        return (await self._runtime.find_snapshot(params["ref"], params["sandbox"])).to_dict()

    async def _delete_snapshot(self, client: Client, params: dict[str, Any]) -> Any:
        await self._runtime.delete_snapshot(params["snapshot"], force=params["force"])

    async def _fork(self, client: Client, params: dict[str, Any]) -> Any:
        made = await self._runtime.fork(
            params["sandbox"],
            params["count"],
            names=params["names"],
            snapshot=params["snapshot"],
            ttl=params["ttl"],
        )
        client.use(*(info.id for info in made))
        return [info.to_dict() for info in made]

    async def _rollback(self, client: Client, params: dict[str, Any]) -> Any:
        return (await self._runtime.rollback(params["sandbox"], params["snapshot"])).to_dict()

    async def _undo(self, client: Client, params: dict[str, Any]) -> Any:
        return (await self._runtime.undo(params["sandbox"], params["steps"])).to_dict()

    async def _diff(self, client: Client, params: dict[str, Any]) -> Any:
        return (await self._runtime.diff(params["sandbox"], params["against"], text=params["text"])).to_dict()

    async def _applied(self, client: Client, params: dict[str, Any]) -> Any:
        await self._runtime.applied(params["sandbox"], params["marks"])

    async def _export(self, client: Client, params: dict[str, Any]) -> Any:
        return (await self._runtime.export(params["sandbox"], params["path"], image=params["image"])).to_dict()

    async def _load(self, client: Client, params: dict[str, Any]) -> Any:
        info = await self._runtime.load(params["path"], name=params["name"])
        client.use(info.id)
        return info.to_dict()


class KeeperHistory:
    """The client's side: part of ``KeeperClient``. See ``Controller`` for what each method promises."""

    async def _do(self, method: str, **params: Any) -> Any:
        """Ask a keeper of our version, started if there is none, for what may be asked once only."""
        raise NotImplementedError

    async def _look(self, method: str, offline: Callable[[Runtime], Awaitable[Any]], **params: Any) -> Any:
        """Ask the keeper that runs or, where none does, the records. JSON, or what ``offline`` gives."""
        raise NotImplementedError

    async def set_ttl(self, sandbox_id: str, ttl: float | None) -> SandboxInfo:
        return SandboxInfo.from_dict(
            await self._look(
                "set_ttl", lambda runtime: _dict(runtime.set_ttl(sandbox_id, ttl)), sandbox=sandbox_id, ttl=ttl
            )
        )

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> SandboxInfo:
        return SandboxInfo.from_dict(
            await self._look(
                "pause",
                lambda runtime: _dict(runtime.pause(sandbox_id, memory=memory)),
                sandbox=sandbox_id,
                memory=memory,
            )
        )

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        return SandboxInfo.from_dict(await self._do("resume", sandbox=sandbox_id))

    async def release(self, sandbox_id: str) -> None:
        await self._look("release", lambda runtime: runtime.release(sandbox_id), sandbox=sandbox_id)

    async def snapshot(
        self, sandbox_id: str, name: str | None = None, *, role: str = "snapshot", note: str = "", memory: bool = True
    ) -> Snapshot:
        found = await self._do("snapshot", sandbox=sandbox_id, name=name, role=role, note=note, memory=memory)
        return Snapshot.from_dict(found)

    async def snapshots(self, sandbox_id: str | None = None, *, role: str | None = "snapshot") -> _Snapshots:
        found = await self._look(
            "snapshots", lambda runtime: _dicts(runtime.snapshots(sandbox_id, role=role)), sandbox=sandbox_id, role=role
        )
        return [Snapshot.from_dict(item) for item in found]

    async def find_snapshot(self, ref: str, sandbox_id: str | None = None) -> Snapshot:
        found = await self._look(
            "find_snapshot", lambda runtime: _dict(runtime.find_snapshot(ref, sandbox_id)), ref=ref, sandbox=sandbox_id
        )
        return Snapshot.from_dict(found)

    async def delete_snapshot(self, snapshot_id: str, *, force: bool = False) -> None:
        await self._look(
            "delete_snapshot",
            lambda runtime: runtime.delete_snapshot(snapshot_id, force=force),
            snapshot=snapshot_id,
            force=force,
        )

    async def fork(
        self,
        sandbox_id: str,
        count: int,
        *,
        names: Sequence[str] | None = None,
        snapshot: str | None = None,
        ttl: float | None = None,
    ) -> _Infos:
        asked = None if names is None else list(names)
        found = await self._do("fork", sandbox=sandbox_id, count=count, names=asked, snapshot=snapshot, ttl=ttl)
        return [SandboxInfo.from_dict(item) for item in found]

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> SandboxInfo:
        return SandboxInfo.from_dict(await self._do("rollback", sandbox=sandbox_id, snapshot=snapshot_id))

    async def undo(self, sandbox_id: str, steps: int = 1) -> Snapshot:
        return Snapshot.from_dict(await self._do("undo", sandbox=sandbox_id, steps=steps))

    async def diff(self, sandbox_id: str, against: str | None = None, *, text: bool = True) -> Diff:
        return Diff.from_dict(await self._do("diff", sandbox=sandbox_id, against=against, text=text))

    async def applied(self, sandbox_id: str, marks: Mapping[str, str]) -> None:
        await self._do("applied", sandbox=sandbox_id, marks=dict(marks))

    async def export(self, sandbox_id: str, path: str, *, image: bool = True) -> Snapshot:
        return Snapshot.from_dict(await self._do("export", sandbox=sandbox_id, path=path, image=image))

    async def load(self, path: str, *, name: str | None = None) -> SandboxInfo:
        return SandboxInfo.from_dict(await self._do("load", path=path, name=name))


async def _dict(work: Awaitable[SandboxInfo | Snapshot]) -> dict[str, Any]:
    return (await work).to_dict()


async def _dicts(work: Awaitable[_Snapshots]) -> list[dict[str, Any]]:
    return [item.to_dict() for item in await work]
