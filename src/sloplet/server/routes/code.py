"""Cells of code, and the contexts that keep their variables. See docs/code.md."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from pydantic import Field

from ...code.languages import LANGUAGES, check_code, language_of
from ...code.results import CodeContext as Context
from ...code.results import RichResult as Rich
from ...process import DEFAULT_MAX_OUTPUT
from ...sandbox import AsyncSandbox
from ..asked import Duration, EnvMap
from ..caller import CallerOf, ServerOf
from ..commands import MAX_OUTPUT
from ..documents import PROBLEMS, Document, Items
from ..documents import Request as Body
from ..settings import MAX_JSON
from ..sse import EVENTS, Events, event, event_stream, to_json
from ..streams import while_connected
from ..tenants import Tenant

router = APIRouter(prefix="/v1/sandboxes/{box}", tags=["code"], responses=PROBLEMS)

_KEPT = 256  # sandboxes of a tenant whose kernels are remembered
_GRACE = 1.0  # seconds in which a cell that cannot begin is an HTTP error, not an event
_QUEUE = 4  # events that wait for the client
ContextName = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
NameInPath = Annotated[str, Path(max_length=63, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
Language = Annotated[str, Field(min_length=1, max_length=16, examples=list(LANGUAGES))]

_boxes: WeakKeyDictionary[Tenant, OrderedDict[str, AsyncSandbox]] = WeakKeyDictionary()


class CodeAsked(Body):
    """A cell."""

    code: str = Field(max_length=MAX_JSON)
    language: Language | None = Field(
        default=None, description=f"python (if nothing is said), {', '.join(LANGUAGES[1:])}"
    )
    context: ContextName | None = Field(default=None, description="Where its variables are; the language's own if none")
    timeout: Duration | None = Field(default=None, description="After it the cell is interrupted.")
    max_output: int = Field(default=DEFAULT_MAX_OUTPUT, ge=1, le=MAX_OUTPUT)
    restart: bool = Field(default=False, description="A context that has ended is started anew.")
    env: EnvMap = Field(default={}, description="For this cell alone; what was there before comes back.")

    def arguments(self) -> dict[str, Any]:
        """Of ``AsyncSandbox.code``. SpecError."""
        check_code(language_of(self.language or "python"), self.code)
        return {
            "code": self.code, "language": self.language, "context": self.context, "timeout": self.timeout,
            "max_output": self.max_output, "restart": self.restart, "env": self.env,
        }  # fmt: skip


class RichResult(Document):
    """A value by its representations: text as text, images as base64. It was made by code that nobody has read: show
    HTML, SVG and JavaScript only where they can do no harm."""

    main: bool = Field(description="The value of the last expression; others were displayed")
    data: dict[str, str] = Field(description="By MIME type")


class CodeFailure(Document):
    name: str
    message: str
    traceback: str


class CodeResult(Document):
    """How a cell ended. Code that raises is a result."""

    text: str | None = Field(description="The value of the last expression, as text")
    stdout: str
    stderr: str
    results: list[RichResult]
    error: CodeFailure | None
    execution_count: int
    duration: float
    timed_out: bool
    restarted: bool = Field(description="It could not be interrupted: its context was started anew, without variables")
    truncated: bool
    context: str
    language: str
    exit_code: int
    ok: bool


class ContextCreate(Body):
    """A context of its own."""

    language: Language = "python"
    name: ContextName | None = Field(default=None, description="Made up if it is not given")
    cwd: str | None = Field(default=None, min_length=1, max_length=4095)
    env: EnvMap = Field(default={})
    user: str | None = Field(default=None, min_length=1, max_length=64)
    python: str | None = Field(default=None, min_length=1, max_length=4095, description="Another interpreter")


class CodeContext(Document):
    """A process that runs cells and keeps their variables."""

    name: str
    language: str
    state: str = Field(description="running; dead or lost: `restart` it")
    pid: int
    started_at: float
    reason: str
    cwd: str | None
    user: str | None
    python: str | None

    @classmethod
    def of(cls, context: Context) -> CodeContext:
        return cls.model_validate(context.to_dict())


async def _box(caller: CallerOf, ref: str) -> AsyncSandbox:
    """The same object for the same sandbox: it knows the kernels, and lets cells of a shell wait for their turn."""
    info = await caller.tenant.controller.find(ref)
    kept = _boxes.setdefault(caller.tenant, OrderedDict())
    found = kept.get(info.id)
    if found is None:
        found = kept[info.id] = AsyncSandbox._adopt(caller.tenant.controller, info)
    kept.move_to_end(info.id)
    if len(kept) > _KEPT:
        kept.popitem(last=False)
    return found


@router.post("/code", response_model=CodeResult)
async def run(box: str, asked: CodeAsked, request: Request, caller: CallerOf, server: ServerOf) -> Response:
    """Run a cell where variables stay. A client that goes away interrupts it."""
    arguments = asked.arguments()
    sandbox = await _box(caller, box)
    server.outputs.hold(request.scope, caller.tenant.name, asked.max_output * 2)  # and once more as JSON
    result = await while_connected(request.receive, sandbox.code(**arguments))
    return Response(to_json(result.to_dict()), media_type="application/json")


@router.post("/code/stream", response_class=Response, responses=EVENTS)
async def stream(box: str, asked: CodeAsked, caller: CallerOf) -> Response:
    """Run a cell, and tell of it as it happens.

    Events: `stdout` and `stderr` {"data"}, `result` (a value by its representations), then `done` (as the answer of
    `code`) or `error` (a problem document). A client that goes away interrupts the cell.
    """
    arguments = asked.arguments()
    sandbox = await _box(caller, box)
    return await event_stream(_told(sandbox, arguments), caller.request_id)


async def _told(sandbox: AsyncSandbox, arguments: dict[str, Any]) -> Events:
    queue: asyncio.Queue[bytes] = asyncio.Queue(_QUEUE)

    async def stdout(text: str) -> None:
        await queue.put(event("stdout", {"data": text}))

    async def stderr(text: str) -> None:
        await queue.put(event("stderr", {"data": text}))

    async def result(value: Rich) -> None:
        await queue.put(event("result", value.to_dict()))

    async def work() -> None:
        done = await sandbox.code(**arguments, on_stdout=stdout, on_stderr=stderr, on_result=result)
        await queue.put(event("done", done.to_dict()))

    task, getter = asyncio.ensure_future(work()), asyncio.ensure_future(queue.get())
    try:
        # An answer that has begun cannot become an error; but one that never begins is taken for a dead server.
        await asyncio.wait((task, getter), timeout=_GRACE, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and not getter.done():
            yield b": it runs\n\n"
        while True:
            await asyncio.wait((task, getter), return_when=asyncio.FIRST_COMPLETED)
            if not getter.done() and queue.empty():
                await task  # all was told, or it failed
                return
            yield await getter
            getter = asyncio.ensure_future(queue.get())
    finally:
        task.cancel()
        getter.cancel()
        await asyncio.gather(task, getter, return_exceptions=True)


# -- contexts ------------------------------------------------------------------------------------------------------


@router.get("/contexts")
async def contexts(box: str, caller: CallerOf) -> Items[CodeContext]:
    """All of them, the languages' own too."""
    sandbox = await _box(caller, box)
    return Items(items=[CodeContext.of(each) for each in await sandbox.contexts.list()])


@router.post("/contexts", status_code=201)
async def create(box: str, asked: ContextCreate, caller: CallerOf) -> CodeContext:
    """Start one."""
    sandbox = await _box(caller, box)
    made = await sandbox.contexts.create(
        asked.language, name=asked.name, cwd=asked.cwd, env=asked.env, user=asked.user, python=asked.python
    )
    return CodeContext.of(made)


@router.delete("/contexts/{name}", status_code=204, response_class=Response)
async def remove(box: str, name: NameInPath, caller: CallerOf) -> None:
    """End it and forget it. That there is none is no error."""
    await (await _box(caller, box)).contexts.remove(name)


@router.post("/contexts/{name}/restart")
async def restart(box: str, name: NameInPath, caller: CallerOf) -> CodeContext:
    """End its process and start it anew, with the settings it was made with. Its variables are gone."""
    return CodeContext.of(await (await _box(caller, box)).contexts.restart(name))


@router.post("/contexts/{name}/interrupt", status_code=204, response_class=Response)
async def interrupt(box: str, name: NameInPath, caller: CallerOf) -> None:
    """Interrupt what runs in it, as Ctrl-C does; its variables stay."""
    await (await _box(caller, box)).contexts.interrupt(name)
