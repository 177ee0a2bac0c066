"""create_sandbox, list_sandboxes, delete_sandbox."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from ...errors import SandboxNotFound, SlopletError
from ..boxes import Held
from ..call import Answer, Arguments, Call, Toolbox
from ..progress import telling


class CreateArguments(Arguments):
    name: Annotated[
        str | None,
        Field(max_length=32, description="To name it by in this session: small letters, digits and '-'."),
    ] = None


class Described(BaseModel):
    name: str
    id: str
    origin: str
    state: str
    engine: str
    image: str
    workdir: str
    snapshots: list[str] = []


class CreateOutput(BaseModel):
    sandbox: Described


async def create_sandbox(call: Call, arguments: CreateArguments) -> Answer:
    """Make another sandbox beside the session's own, empty, with the same image and policy. Most work needs none: the
    session's own is there without being asked for."""
    async with telling(call.report, "starting a sandbox") as say:
        held = await call.boxes.create(arguments.name, say)
    found = await describe(held)
    ref = found.id if call.boxes.explicit else found.name
    text = f"made {found.name} (id {found.id}): give sandbox={ref!r} to the other tools\n{_line(found)}"
    return Answer(text, CreateOutput(sandbox=found))


class ListSandboxesOutput(BaseModel):
    sandboxes: list[Described]
    room: int = Field(description="How many more may be made")


async def list_sandboxes(call: Call, arguments: Arguments) -> Answer:
    """The sandboxes of this session and their snapshots."""
    found = [await describe(held, snapshots=True) for held in call.boxes.all()]
    room = max(0, call.policy.max_sandboxes - len(found))
    none = "create_sandbox makes one" if call.boxes.explicit else "the session's own is made when it is first used"
    lines = [_line(each) for each in found] or [f"[none yet: {none}]"]
    return Answer("\n".join([*lines, f"[{room} more may be made]"]), ListSandboxesOutput(sandboxes=found, room=room))


class DeleteArguments(Arguments):
    sandbox: Annotated[str, Field(max_length=64, description="Its name or id.")]


class DeleteOutput(BaseModel):
    deleted: str


async def delete_sandbox(call: Call, arguments: DeleteArguments) -> Answer:
    """End a sandbox and everything in it, with its files and snapshots. If it is the session's own, the next use makes
    a new, empty one."""
    gone = await call.boxes.delete(arguments.sandbox)
    return Answer(f"{gone.name} is gone", DeleteOutput(deleted=gone.name))


async def describe(held: Held, *, snapshots: bool = False) -> Described:
    box, state, names = held.box, "gone", list[str]()
    try:
        state = (await box.info()).state
        if snapshots:
            names = [each.name or each.id for each in await box.snapshots()]
    except SandboxNotFound:
        pass  # its time to live is over, say
    except SlopletError as error:
        state = f"unknown: {error.message}"[:200]
    return Described(
        name=held.name, id=held.id, origin=held.origin, state=state, engine=box.engine, image=box.spec.image,
        workdir=box.workdir, snapshots=names,
    )  # fmt: skip


def _line(each: Described) -> str:
    saved = f"; snapshots: {', '.join(each.snapshots)}" if each.snapshots else ""
    return (
        f"{each.name} (id {each.id}, {each.origin}): {each.state}, image {each.image}, engine {each.engine}, "
        f"workspace {each.workdir}{saved}"
    )


def add_to(tools: Toolbox) -> None:
    tools.add("create_sandbox", "Create a sandbox", CreateArguments, CreateOutput)(create_sandbox)
    tools.add("list_sandboxes", "List sandboxes", Arguments, ListSandboxesOutput, reads=True)(list_sandboxes)
    tools.add("delete_sandbox", "Delete a sandbox", DeleteArguments, DeleteOutput, destroys=True)(delete_sandbox)
