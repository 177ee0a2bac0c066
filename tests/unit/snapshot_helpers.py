"""Helpers for tests of saved states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sloplet.controller import SandboxInfo, Snapshot
from sloplet.engines.base import StateFormat
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home, new_id
from sloplet.state.locks import Owner
from sloplet.state.reaper import Report, reap
from sloplet.state.snapshots import SnapshotStore
from sloplet.state.store import Store

FORMAT = StateFormat("gvisor", "runsc release-1", "systrap", "x86_64", ("avx2", "sse2"))
FILES = {"checkpoint.img": b"kernel" * 1000, "pages.img": b"memory" * 10_000, "pages_meta.img": b""}


class World:
    """A home with its store, its snapshots, and this process as an owner."""

    def __init__(self, path: Path) -> None:
        self.home = Home(path)
        self.store = Store(self.home)
        self.snapshots = SnapshotStore(self.home, self.store)
        self.owner = Owner(self.home)

    def close(self) -> None:
        self.store.close()
        self.owner.release()

    def sandbox(self, name: str | None = None, *, holder: str = "keeper", **spec: Any) -> SandboxInfo:
        """A running one."""
        head = spec.pop("head", None)
        sandbox_id = new_id()
        asked = SandboxSpec.make(name, **spec)
        token = self.owner.token
        self.store.reserve(sandbox_id, asked, engine="gvisor", rung="gvisor", holder=holder, owner=token, head=head)
        self.store.mark_running(sandbox_id)
        return self.store.find(sandbox_id)

    def save(self, sandbox: SandboxInfo, name: str | None = None, *, role: str = "snapshot", **more: Any) -> Snapshot:
        """What a runtime does: begin, let the engine write, publish."""
        files = more.pop("files", FILES)
        with self.snapshots.begin() as draft:
            for file, data in files.items():
                (draft.path / file).write_bytes(data)
            fields: dict[str, Any] = {"kind": "live", "format": FORMAT, "image": {"kind": "host"}, **more}
            return self.snapshots.publish(draft, sandbox, role=role, name=name, **fields)

    def pause(self, sandbox: SandboxInfo) -> Snapshot:
        saved = self.save(sandbox, role="pause")
        self.store.mark_paused(sandbox.id, saved.id, saved.created_at)
        return saved

    def reap(self) -> Report:
        return reap(self.home, self.store, lambda engine, sandbox_id: None)

    def folder(self, snapshot: Snapshot) -> Path:
        return self.home.snapshots / snapshot.id

    def left(self) -> dict[str, list[str]]:
        """What lies on disk and is no listed snapshot."""
        listed = {snapshot.id for snapshot in self.store.list_snapshots()}
        return {
            "snapshots": sorted(set(os.listdir(self.home.snapshots)) - listed),
            "run": sorted(set(os.listdir(self.home.run)) - {"owners"}),
        }

    def check_whole(self) -> None:
        """What must hold after a reap: every listed snapshot can be used, and there is nothing else."""
        for snapshot in self.store.list_snapshots():
            with self.snapshots.open(snapshot.id, FORMAT) as opened:
                assert set(os.listdir(opened.fd)) == {*opened.manifest["files"], "manifest.json"}
        for info in self.store.list():
            if info.saved is not None:
                assert self.store.snapshot(info.saved).sandbox == info.id
            assert (info.state == "paused") <= (info.saved is not None)
        assert self.left() == {"snapshots": [], "run": []}
