"""What a tool is: arguments that are checked, a function, an answer as text and as data, and what goes wrong told in
words that a model can act on."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

import mcp_types as types
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.json_schema import JsonSchemaMode

from ..errors import CommandError, FileError, KernelError, SlopletError, SpecError
from ..server.problems import without_paths
from .bounded import clean, shorten
from .boxes import MAIN, Boxes, Held
from .policy import Policy
from .progress import Report, telling

logger = logging.getLogger("sloplet.mcp")
A = TypeVar("A", bound="Arguments")
_MOST_ERROR = 4000  # characters of what went wrong
#: Their messages are about the inside of a sandbox: paths in them are the model's own.
_INSIDE = (FileError, CommandError, KernelError)


def _parsed(value: Any) -> Any:
    """Some clients send lists and objects as text that holds JSON."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


Ref = Annotated[
    str | None,
    Field(max_length=64, description="Which sandbox: its name or id. Left out: this session's own."),
]
Env = Annotated[
    dict[str, str] | None,
    BeforeValidator(_parsed),
    Field(max_length=256, description="Further environment variables."),
]
Path = Annotated[
    str, Field(min_length=1, max_length=4095, description="Absolute, or relative to the working directory.")
]


class Arguments(BaseModel):
    """Base of all arguments. What is not known is refused: no tool has a way to say more than its schema."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class BoxArguments(Arguments):
    sandbox: Ref = None


@dataclass
class Answer:
    """``data`` and ``text`` say the same, to programs and to models: clients show a model only one of them. So where
    there is an image or another block that data cannot hold, there is no data."""

    text: str
    data: BaseModel | None = None
    blocks: Sequence[types.ContentBlock] = ()

    def result(self) -> types.CallToolResult:
        content: list[types.ContentBlock] = [types.TextContent(text=clean(self.text))] if self.text else []
        data = None if self.data is None or self.blocks else _portable(self.data.model_dump(mode="python"))
        return types.CallToolResult(content=[*content, *self.blocks], structured_content=data)


@dataclass
class Call:
    """One call of a tool: whose session, what is allowed, and whom to tell how it goes."""

    boxes: Boxes
    policy: Policy
    report: Report | None = None

    async def box(self, ref: str | None) -> Held:
        """The sandbox that is meant, made if need be."""
        if self.boxes.find(MAIN if ref is None else ref) is not None:
            return await self.boxes.get(ref)
        async with telling(self.report, "starting the sandbox") as say:
            return await self.boxes.get(ref, say)


Handler = Callable[[Call, A], Awaitable[Answer]]


@dataclass(frozen=True)
class Tool(Generic[A]):
    name: str
    title: str
    description: str
    arguments: type[A]
    handler: Handler[A]
    output: type[BaseModel] | None = None  #: None: it may answer with images
    reads: bool = False  #: it changes nothing
    destroys: bool = False
    again: bool = False  #: a second call with the same arguments changes nothing more
    world: bool = False  #: what it does may reach beyond the sandbox

    def listed(self) -> types.Tool:
        return types.Tool(
            name=self.name,
            title=self.title,
            description=self.description,
            input_schema=_schema(self.arguments),
            output_schema=None if self.output is None else _schema(self.output, mode="serialization"),
            annotations=types.ToolAnnotations(
                title=self.title,
                read_only_hint=self.reads,
                destructive_hint=self.destroys and not self.reads,
                idempotent_hint=self.again or self.reads,
                open_world_hint=self.world,
            ),
        )

    async def call(self, call: Call, arguments: dict[str, Any]) -> types.CallToolResult:
        try:
            checked = self.arguments.model_validate(arguments)
            return (await self.handler(call, checked)).result()
        except ValidationError as error:
            return failed(SpecError(_wrong(self, error)))
        except SlopletError as error:
            return failed(error)
        except Exception:
            logger.exception("the tool %s failed", self.name)
            return failed(SlopletError("Sloplet itself failed", hint="this is a bug; its log tells more"))


def failed(error: SlopletError) -> types.CallToolResult:
    """A tool error: what, why, and what to do next."""
    text = f"{type(error).__name__}: {error.message}" + (f"\nHint: {error.hint}" if error.hint else "")
    if not isinstance(error, _INSIDE):
        text = without_paths(text)
        if error.__cause__ is not None:
            logger.info("%s", error)
    return types.CallToolResult(content=[types.TextContent(text=shorten(clean(text), _MOST_ERROR))], is_error=True)


@dataclass
class Toolbox:
    """The tools by name, in the order they are told."""

    tools: dict[str, Tool[Any]] = field(default_factory=dict)

    def add(
        self, name: str, title: str, arguments: type[A], output: type[BaseModel] | None = None, **hints: bool
    ) -> Callable[[Handler[A]], Handler[A]]:
        """The function's docstring is what the model reads."""

        def added(handler: Handler[A]) -> Handler[A]:
            text = " ".join((handler.__doc__ or "").split())
            self.tools[name] = Tool(name, title, text, arguments, handler, output, **hints)
            return handler

        return added


def _schema(model: type[BaseModel], mode: JsonSchemaMode = "validation") -> dict[str, Any]:
    """JSON Schema without what a model has no use for: every word of it is in every conversation."""
    schema = _slim(model.model_json_schema(mode=mode), mode == "validation")
    schema.pop("description", None)
    schema.setdefault("properties", {})
    return schema


def _slim(schema: dict[str, Any], asked: bool) -> dict[str, Any]:
    """Without titles, which repeat names. Where something is ``asked`` for, "or null" means that it can be left out."""
    schema.pop("title", None)
    for part in ("properties", "$defs"):
        for name, item in schema.get(part, {}).items():
            schema[part][name] = _slim(item, asked)
    options = schema.get("anyOf", ())
    if asked and len(options) == 2 and {"type": "null"} in options and schema.get("default", 0) is None:
        schema.update(next(each for each in options if each != {"type": "null"}))
        del schema["anyOf"], schema["default"]
    return schema


def _wrong(tool: Tool[Any], error: ValidationError) -> str:
    """Which argument, and why, without the value: it may be long."""
    known = ", ".join(tool.arguments.model_fields) or "none"
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:80]
    if first["type"] == "extra_forbidden":
        return f"{tool.name} has no argument {where!r}; its arguments are: {known}"
    if first["type"] == "missing":
        return f"{tool.name} needs the argument {where!r}"
    return f"{tool.name}: {where}: {first['msg']}"


def _portable(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(key): _portable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(each) for each in value]
    return value
