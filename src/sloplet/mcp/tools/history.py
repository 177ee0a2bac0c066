"""snapshot, rollback, fork, diff: a sandbox through time."""

from __future__ import annotations

import asyncio
import posixpath
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from ...controller import Change, Snapshot
from ...errors import NotAllowed, QuotaExceeded, UnsupportedOperation
from ..bounded import clean, shorten
from ..boxes import Held
from ..call import Answer, BoxArguments, Call, Toolbox
from ..policy import MAX_SNAPSHOTS
from ..progress import telling
from .sandboxes import Described, describe

_MAX_CHANGES = 500
SnapshotRef = Annotated[str, Field(min_length=1, max_length=64, description="A snapshot's name or id.")]


class SnapshotArguments(BoxArguments):
    name: Annotated[str | None, Field(max_length=63, description="To find it by. Left out: its id does.")] = None


class SnapshotOutput(BaseModel):
    snapshot: str = Field(description="Its id")
    name: str | None
    saved: str = Field(description="live: memory, processes and files; disk: files only")


async def snapshot(call: Call, arguments: SnapshotArguments) -> Answer:
    """Save how the sandbox is now, to come back to with rollback or to make copies of with fork. It runs on. Do this
    before something that may go wrong."""
    held = await call.box(arguments.sandbox)
    if len(await held.box.snapshots()) >= MAX_SNAPSHOTS:
        raise QuotaExceeded(
            f"this sandbox has {MAX_SNAPSHOTS} snapshots, as many as it may have",
            hint="delete_snapshot removes one; list_sandboxes tells which there are",
        )
    async with telling(call.report, "saving the sandbox"):
        made = await held.box.snapshot(arguments.name)
    held.snapshots.add(made.id)
    data = SnapshotOutput(snapshot=made.id, name=made.name, saved=made.kind)
    return Answer(f"saved as {made.name or made.id} ({_kind(made)})", data)


def _kind(made: Snapshot) -> str:
    if made.kind == "live":
        return "memory, processes and files"
    return "files only: after a rollback nothing runs, and variables of run_code are gone"


class RollbackArguments(BoxArguments):
    snapshot: SnapshotRef


class RollbackOutput(BaseModel):
    snapshot: str
    sandbox: str
    restored: str = Field(description="live: memory, processes and files; disk: files only")


async def rollback(call: Call, arguments: RollbackArguments) -> Answer:
    """Take the sandbox back to a snapshot. What was done since then is gone, files and processes alike."""
    held = await call.box(arguments.sandbox)
    known = await held.box.snapshots()
    found = next((each for each in known if arguments.snapshot in (each.name, each.id)), None)
    async with telling(call.report, "going back"):
        await held.box.rollback(found or arguments.snapshot)
    kind = "" if found is None else found.kind
    data = RollbackOutput(snapshot=arguments.snapshot, sandbox=held.name, restored=kind)
    note = " Files are as they were; nothing runs, and kernels of run_code begin anew." if kind == "disk" else ""
    return Answer(f"{held.name} is as it was at {arguments.snapshot}.{note}", data)


class DeleteSnapshotArguments(BoxArguments):
    snapshot: SnapshotRef


class DeletedSnapshot(BaseModel):
    deleted: str


async def delete_snapshot(call: Call, arguments: DeleteSnapshotArguments) -> Answer:
    """Delete a snapshot that you made and do not need any more."""
    held = await call.box(arguments.sandbox)
    known = await held.box.snapshots()
    found = next((each for each in known if arguments.snapshot in (each.name, each.id)), None)
    if found is not None and found.id not in held.snapshots:
        raise NotAllowed(f"the snapshot {arguments.snapshot} was not made in this session", hint="leave it")
    await held.box.delete_snapshot(arguments.snapshot if found is None else found.id, force=True)
    return Answer(f"deleted the snapshot {arguments.snapshot}", DeletedSnapshot(deleted=arguments.snapshot))


class ForkArguments(BoxArguments):
    count: Annotated[int, Field(ge=1, le=100)] = 1
    snapshot: Annotated[
        str | None, Field(max_length=64, description="Copy it as it was then. Left out: as it is now.")
    ] = None


class ForkOutput(BaseModel):
    sandboxes: list[Described]
    copied: str = Field(description="live: memory, processes and files; disk: files only")


async def fork(call: Call, arguments: ForkArguments) -> Answer:
    """Make running copies of the sandbox, to try several ways at once: give a copy's name as `sandbox` to the other
    tools. The original stays as it is. delete_sandbox ends a copy."""
    held = await call.box(arguments.sandbox)
    async with telling(call.report, "forking"):
        made, copied = await _forked(call, held, arguments)
    copies = [await describe(each) for each in made]
    lines = ", ".join(f"{each.name} (id {each.id})" for each in copies)
    note = " Only files were copied: nothing runs in them yet." if copied == "disk" else ""
    return Answer(f"{len(copies)} made of {held.name}: {lines}.{note}", ForkOutput(sandboxes=copies, copied=copied))


async def _forked(call: Call, held: Held, arguments: ForkArguments) -> tuple[Sequence[Held], str]:
    """Where an engine cannot copy what runs, the files are copied, by way of a snapshot."""
    if arguments.snapshot is not None:
        made = await call.boxes.fork(held, arguments.count, arguments.snapshot)
        known = await held.box.snapshots()
        return made, next((each.kind for each in known if arguments.snapshot in (each.name, each.id)), "live")
    try:
        return await call.boxes.fork(held, arguments.count, None), "live"
    except UnsupportedOperation:
        point = await held.box.snapshot()
        try:
            return await call.boxes.fork(held, arguments.count, point.id), point.kind
        finally:
            await asyncio.shield(held.box.delete_snapshot(point.id, force=True))


class DiffArguments(BoxArguments):
    against: Annotated[
        str | None, Field(max_length=64, description="A snapshot. Left out: the image, as the sandbox began.")
    ] = None
    path: Annotated[str | None, Field(max_length=4095, description="Only what is at or below it.")] = None
    text: Annotated[bool, Field(description="With the changes of text files, not only which changed.")] = True


class Changed(BaseModel):
    path: str
    kind: str = Field(description="added, changed or removed")
    type: str
    size: int
    diff: str | None = None


class DiffOutput(BaseModel):
    added: int
    changed: int
    removed: int
    changes: list[Changed]
    left_out: int = 0


async def diff(call: Call, arguments: DiffArguments) -> Answer:
    """What has become of the sandbox's files: added, changed and removed ones, with unified diffs of text, since it
    began or since a snapshot."""
    held = await call.box(arguments.sandbox)
    async with telling(call.report, "comparing files"):
        found = await held.box.diff(arguments.against, text=arguments.text)
    changes = [each for each in found.changes if _below(each.path, arguments.path, held.box.workdir)]
    counts = Counter(each.kind for each in changes)
    room, shown = call.policy.max_output, list[Changed]()
    for change in changes[:_MAX_CHANGES]:
        each = _changed(change, room // 4)
        room -= len(each.path) + len(each.diff or "") + 40
        if room < 0 and shown:
            break
        shown.append(each)
    data = DiffOutput(
        added=counts["added"], changed=counts["changed"], removed=counts["removed"], changes=shown,
        left_out=len(changes) - len(shown),
    )  # fmt: skip
    return Answer(_diff_text(data), data)


def _below(path: str, folder: str | None, workdir: str) -> bool:
    if folder is None:
        return True
    whole = posixpath.normpath(posixpath.join(workdir, folder))
    return path == whole or path.startswith(whole.rstrip("/") + "/")


def _changed(change: Change, most: int) -> Changed:
    text = None if change.text is None else shorten(clean(change.text), max(400, most))
    return Changed(path=clean(change.path), kind=change.kind, type=change.type, size=change.size, diff=text)


def _diff_text(data: DiffOutput) -> str:
    if not data.changes:
        return "[no changes]"
    lines = []
    for each in data.changes:
        lines.append(f"{each.kind} {each.path}" + (f" ({each.type})" if each.type != "file" else ""))
        lines += [each.diff.rstrip("\n")] if each.diff else []
    if data.left_out:
        lines.append(f"[... {data.left_out} more changes; path= narrows it ...]")
    return "\n".join([*lines, f"[{data.added} added, {data.changed} changed, {data.removed} removed]"])


def add_to(tools: Toolbox) -> None:
    tools.add("snapshot", "Save the sandbox's state", SnapshotArguments, SnapshotOutput)(snapshot)
    tools.add("rollback", "Go back to a snapshot", RollbackArguments, RollbackOutput, destroys=True, again=True)(
        rollback
    )
    tools.add("fork", "Copy the sandbox", ForkArguments, ForkOutput)(fork)
    tools.add("diff", "What changed", DiffArguments, DiffOutput, reads=True)(diff)
    tools.add("delete_snapshot", "Delete a snapshot", DeleteSnapshotArguments, DeletedSnapshot, destroys=True)(
        delete_snapshot
    )
