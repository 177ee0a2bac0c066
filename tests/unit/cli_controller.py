"""A Controller without sandboxes behind it: records only, with the refusals that the CLI has to show."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sloplet.cli.main import invoke
from sloplet.controller import Change, Diff, Port, SandboxInfo, Snapshot
from sloplet.errors import SandboxNotFound, SnapshotInUse, SnapshotNotFound, UnsupportedOperation
from sloplet.netchange import NetworkChange
from sloplet.netspec import NetworkSpec, SecretSpec
from sloplet.network.asks import Ask
from sloplet.network.log import Decision
from sloplet.spec import SandboxSpec

Said = Callable[..., tuple[int, str, str]]


def install(monkeypatch: pytest.MonkeyPatch) -> Records:
    """A controller for the CLI, with the sandboxes dev (gvisor) and box (container)."""
    made = Records(info("dev"), info("box", engine="container", rung="container"))

    async def controller(start: bool = True) -> Records:
        return made

    monkeypatch.setattr("sloplet.keeper.client.keeper_controller", controller)
    return made


def speaker(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs the CLI in this process: exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = invoke([*words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def info(name: str, **changes: Any) -> SandboxInfo:
    made = SandboxInfo(
        f"id-{name}", name, "running", "gvisor", "gvisor", "keeper", time.time() - 90, None, "/workspace",
        SandboxSpec.make(name),
    )  # fmt: skip
    return replace(made, **changes)


class Records:
    """What the verbs of docs/live.md ask a controller."""

    def __init__(self, *boxes: SandboxInfo) -> None:
        self.boxes = {box.id: box for box in boxes}
        self.saved: list[Snapshot] = []
        self.changes: tuple[Change, ...] = ()
        self.asked: list[tuple[Any, ...]] = []
        self.policies: dict[str, NetworkSpec] = {}
        self.decisions: list[Decision] = []
        self.inherited: dict[str, tuple[SecretSpec, ...]] = {}  # where a template has some
        self.values: dict[str, str | None] = {}
        self.exposed: list[Port] = []
        self.questions: list[Ask] = []

    def put(self, box: SandboxInfo, **changes: Any) -> SandboxInfo:
        self.boxes[box.id] = replace(box, **changes)
        return self.boxes[box.id]

    def add(self, box: str, name: str | None, parent: str | None = None, **changes: Any) -> Snapshot:
        owner = self.boxes[f"id-{box}"]
        number = len(self.saved) + 1
        values: dict[str, Any] = {"role": "snapshot", "kind": "live", "note": "", **changes}
        made = Snapshot(
            id=f"snap{number:04}", name=name, sandbox=owner.id, sandbox_name=owner.name, parent=parent,
            engine=owner.engine, created_at=time.time() - 60 + number, bytes=number * 2**20, spec=owner.spec, **values,
        )  # fmt: skip
        self.saved.append(made)
        return made

    async def find(self, ref: str) -> SandboxInfo:
        for box in self.boxes.values():
            if ref in (box.id, box.name):
                return box
        raise SandboxNotFound(f"there is no sandbox {ref!r}", hint="see `sloplet ls`")

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        return self.put(info(spec.name or ""), spec=spec)

    async def status(self) -> dict[str, Any]:
        return {"pid": 7}

    async def list(self) -> list[SandboxInfo]:
        return [*self.boxes.values()]

    async def set_ttl(self, sandbox_id: str, ttl: float | None) -> SandboxInfo:
        self.asked.append(("set_ttl", sandbox_id, ttl))
        if ttl == 0:
            return replace(self.boxes.pop(sandbox_id), state="ended")
        return self.put(self.boxes[sandbox_id], expires_at=None if ttl is None else time.time() + ttl)

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> SandboxInfo:
        box = self.boxes[sandbox_id]
        if box.engine != "gvisor" and memory:
            raise UnsupportedOperation(
                f"the {box.engine} engine cannot save processes", hint="create it with --engine gvisor"
            )
        state = self.add(box.name or "", None, role="pause", kind="live" if memory else "disk")
        return self.put(box, state="paused", saved=state.id, saved_at=time.time())

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        box = self.boxes[sandbox_id]
        recovered = box.saved_at if box.state == "dead" else box.recovered_from
        return self.put(box, state="running", saved=None, saved_at=None, recovered_from=recovered)

    async def snapshot(
        self, sandbox_id: str, name: str | None = None, *, role: str = "snapshot", note: str = "", memory: bool = True
    ) -> Snapshot:
        box = self.boxes[sandbox_id]
        kind = "live" if box.engine == "gvisor" and memory else "disk"
        made = self.add(box.name or "", name, box.head, role=role, note=note, kind=kind)
        self.put(box, head=made.id)
        return made

    async def snapshots(self, sandbox_id: str | None = None, *, role: str | None = "snapshot") -> Any:
        return [s for s in self.saved if sandbox_id in (None, s.sandbox) and role in (None, s.role)]

    async def find_snapshot(self, ref: str, sandbox_id: str | None = None) -> Snapshot:
        role = "template" if sandbox_id is None else "snapshot"
        for item in self.saved:
            if ref == item.id or (ref == item.name and item.role == role and sandbox_id in (None, item.sandbox)):
                return item
        raise SnapshotNotFound(f"there is no snapshot {ref!r}", hint="see `sloplet snapshots`")

    async def delete_snapshot(self, snapshot_id: str, *, force: bool = False) -> None:
        below = [item.name or item.id for item in self.saved if item.parent == snapshot_id]
        if below and not force:
            raise SnapshotInUse(f"{', '.join(below)} descends from {snapshot_id}", hint="delete those first")
        self.saved = [item for item in self.saved if item.id != snapshot_id]

    async def fork(
        self,
        sandbox_id: str,
        count: int,
        *,
        names: Sequence[str] | None = None,
        snapshot: str | None = None,
        ttl: float | None = None,
    ) -> Any:
        self.asked.append(("fork", sandbox_id, count, list(names or ()), snapshot, *([] if ttl is None else [ttl])))
        children = [info(name) for name in names or ()]
        self.boxes.update({child.id: child for child in children})
        return children

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> SandboxInfo:
        self.asked.append(("rollback", sandbox_id, snapshot_id))
        return self.put(self.boxes[sandbox_id], head=snapshot_id)

    async def undo(self, sandbox_id: str, steps: int = 1) -> Snapshot:
        points = [s for s in self.saved if s.sandbox == sandbox_id and s.role == "undo"]
        if len(points) < steps:
            raise SnapshotNotFound("nothing is kept to go back to", hint="create it with --undo N")
        return points[-steps]

    async def diff(self, sandbox_id: str, against: str | None = None, *, text: bool = True) -> Diff:
        self.asked.append(("diff", sandbox_id, against, text))
        return Diff(against or "image", self.changes)

    async def export(self, sandbox_id: str, path: str, *, image: bool = True) -> Snapshot:
        self.asked.append(("export", sandbox_id, path, image))
        with open(path, "xb") as file:
            file.write(b"x" * 2048)
        return self.add(self.boxes[sandbox_id].name or "", None, role="export")

    async def load(self, path: str, *, name: str | None = None) -> SandboxInfo:
        self.asked.append(("load", path, name))
        return info(name or "loaded")

    async def network(self, sandbox_id: str) -> NetworkSpec:
        return self.policies.get(sandbox_id, self.boxes[sandbox_id].spec.network)

    async def set_network(
        self, sandbox_id: str, network: NetworkSpec, values: Mapping[str, str | None] | None = None
    ) -> None:
        self.policies[sandbox_id] = network
        self.values.update(values or {})

    async def change_network(self, sandbox_id: str, change: NetworkChange) -> NetworkSpec:
        self.policies[sandbox_id] = change.applied(await self.network(sandbox_id))
        return self.policies[sandbox_id]

    async def network_log(self, sandbox_id: str, *, after: int = 0, limit: int = 1000) -> Any:
        if after and after >= len(self.decisions):  # whoever follows it has seen all
            raise SandboxNotFound("it is gone")
        return [row for row in self.decisions if row.seq > after][:limit]

    async def learned(self, sandbox_id: str) -> NetworkSpec:
        return NetworkSpec("rules", ("pypi.org",))

    async def secrets(self, sandbox_id: str) -> tuple[SecretSpec, ...]:
        return self.inherited.get(sandbox_id, self.boxes[sandbox_id].spec.secrets)

    async def set_secrets(self, sandbox_id: str, values: Mapping[str, str | None]) -> None:
        self.values.update(values)

    async def asks(self, sandbox_id: str) -> AsyncIterator[Ask]:
        for question in self.questions:
            yield question

    async def answer(self, sandbox_id: str, ask_id: int, verdict: str) -> None:
        self.asked.append(("answer", sandbox_id, ask_id, verdict))

    async def expose(self, sandbox_id: str, port: int, *, host_port: int = 0, address: str = "127.0.0.1") -> Port:
        self.exposed.append(Port(port, address, host_port or 40000 + len(self.exposed)))
        return self.exposed[-1]

    async def ports(self, sandbox_id: str) -> Any:
        return list(self.exposed)

    async def unexpose(self, sandbox_id: str, port: int) -> None:
        self.exposed = [each for each in self.exposed if each.inside != port]

    async def kill(self, sandbox_id: str) -> None:
        del self.boxes[sandbox_id]
