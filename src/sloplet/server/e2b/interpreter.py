"""E2B's code interpreter (what its templates serve on port 49999), over the sandbox's own cells and contexts.

Each language has a default context, which is the same as ``/v1``'s and ``box.code``'s; those that clients make have
ids as E2B's. A context that has ended is started anew when it is next used, as a notebook's is.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any

from ...code.languages import LANGUAGES, language_of
from ...code.results import CodeContext, CodeFailure, CodeResult, RichResult
from ...errors import ContextNotFound, KernelError, SpecError, WorkdirInvalid
from ...sandbox import AsyncSandbox

HOME = "/home/user"
_DEFAULTS = ("python", "node")  # that are there from the beginning
_CALLED = {"node": "javascript", "shell": "bash"}  # what E2B calls our languages
_ASKED = "E2B_ASKED_CWD"  # in the settings of a context: the folder that was asked for and is none
_QUIET = 5.0  # seconds after which a line says that there is nothing to say
_JOINED = 0.05  # seconds in which the rest of a line may follow
_QUEUE = 64
_MOST_TEXT = 256 * 1024  # characters of a line of the answer
_MOST_JSON = 4 * 2**20  # bytes of JSON that are parsed here: it was written by code that nobody has read
_CONTEXT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
_FIELDS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg",
    "image/png": "png", "image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex",
    "application/json": "json", "application/javascript": "javascript",
    "application/vnd.sloplet.data+json": "data", "application/vnd.sloplet.chart+json": "chart",
}  # fmt: skip
_PARSED = ("json", "data", "chart")
_IMAGES = ("png", "jpeg", "pdf")
_CELL = re.compile(r'  File "<cell (\d+)>", line (\d+), in (.*)')


class InterpreterError(Exception):
    """``status`` and a text are what E2B's server answers."""

    status = 500


class Refused(InterpreterError):
    status = 400


class NoContext(InterpreterError):
    status = 404

    def __init__(self, context: str) -> None:
        super().__init__(f"Context {context[:100]} not found")


# -- cells ---------------------------------------------------------------------------------------------------------


async def execute(
    box: AsyncSandbox, body: Mapping[str, Any], own: Mapping[str, str] | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """Begin with a cell; the lines of the answer, as documents. Errors come before the first of them: InterpreterError.
    Whoever stops reading (``aclose``) interrupts the cell. ``own``: variables that every cell has."""
    code, context, language = body.get("code"), body.get("context_id"), body.get("language")
    if not isinstance(code, str):
        raise Refused("code is a text")
    if context and language:
        raise Refused("Only one of context_id or language can be provided")
    spoken = _language(language)
    env = {**(own or {}), **_variables(body.get("env_vars"))}
    name = spoken if not context else _known(context)
    try:
        kernel = await box._kernels.kernel(spoken, name, restart=True)
    except ContextNotFound:
        raise NoContext(name) from None
    except (KernelError, SpecError) as error:
        raise InterpreterError(f"Failed to create context: {error.message}") from None
    if kernel.language == "python":
        env = {"SLOPLET_SHOW_SAVED": "1", **env}
    return _lines(box, name, kernel.language, code, env)


async def _lines(
    box: AsyncSandbox, context: str, language: str, code: str, env: Mapping[str, str]
) -> AsyncGenerator[dict[str, Any], None]:
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(_QUEUE)

    async def stdout(text: str) -> None:
        await queue.put(_printed("stdout", text))

    async def stderr(text: str) -> None:
        await queue.put(_printed("stderr", text))

    async def result(value: RichResult) -> None:
        await queue.put(_result(value, language))

    async def work() -> None:
        try:
            done = await box.code(
                code, context=context, on_stdout=stdout, on_stderr=stderr, on_result=result, max_output=1, restart=True,
                env=env,
            )  # fmt: skip
            for line in _ended(done):
                await queue.put(line)
        except SpecError as error:
            await queue.put(_error("ValueError", error.message))
        except KernelError:
            await queue.put(_error("ContextRestarting", "Context was restarted"))
        finally:
            if not (task.cancelled() or task.cancelling()):
                await queue.put(None)

    task = asyncio.ensure_future(work())
    try:
        async for line in _joined(queue, split=language == "java"):
            yield line
        await task  # what is neither of the cell nor of its context: the sandbox is gone
        yield {"type": "end_of_execution"}
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _joined(queue: asyncio.Queue[dict[str, Any] | None], *, split: bool) -> AsyncIterator[dict[str, Any]]:
    """Lines of the answer as they come; printed text by whole lines, where their rest is not far behind."""
    held: dict[str, Any] | None = None
    while True:
        try:
            line = await asyncio.wait_for(queue.get(), _QUIET if held is None else _JOINED)
        except TimeoutError:
            yield held if held is not None else {"type": "keepalive"}
            held = None
            continue
        if held is not None and line is not None and line["type"] == held["type"]:
            line["text"] = held["text"] + line["text"]
        elif held is not None:
            yield held
        held = None
        if line is None:
            return
        if line["type"] not in ("stdout", "stderr"):
            yield line
        elif split:  # Java's println is two writes
            for text in re.findall(r"[^\n]+|\n+", line["text"]):
                yield {**line, "text": text}
        elif line["text"].endswith("\n") or len(line["text"]) > _MOST_TEXT:
            yield line
        else:
            held = line


def _printed(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def _error(name: str, value: str, traceback: str = "") -> dict[str, Any]:
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def _ended(done: CodeResult) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"type": "number_of_executions", "execution_count": done.execution_count}]
    failed = done.error
    if failed is not None and failed.name == "ExitStatus":
        lines.append(_error(failed.name, str(done.exit_code)))
    elif failed is not None:
        lines.append(_error(failed.name, failed.message, traceback_of(failed, done.language)))
    return lines


def traceback_of(failed: CodeFailure, language: str) -> str:
    """A traceback as IPython writes it: a rule, the error's name, where it was, and its message."""
    if language != "python":
        return failed.traceback or f"{failed.name}: {failed.message}"
    lines = failed.traceback.rstrip("\n").split("\n")
    if lines[0].startswith("Traceback"):
        lines = lines[1:]
    body = [_CELL.sub(_place, line) for line in lines]
    head = failed.name + "Traceback (most recent call last)".rjust(75 - len(failed.name))
    return "\n".join(["-" * 75, head, *body])


def _place(found: re.Match[str]) -> str:
    where = "" if found[3] == "<module>" else f", in {found[3]}"
    return f"Cell In[{found[1]}], line {found[2]}{where}"


def _result(value: RichResult, language: str) -> dict[str, Any]:
    line: dict[str, Any] = {"type": "result", "is_main_result": value.main}
    extra: dict[str, str] = {}
    for mime, raw in value.data.items():
        field = _FIELDS.get(mime)
        if field in _PARSED:
            parsed = _parse(raw)
            if parsed is not None:
                line[field] = parsed
        elif field in _IMAGES or (
            field is None and not mime.startswith("text/") and not mime.endswith(("json", "xml"))
        ):
            line_of = extra if field is None else line
            line_of[field or mime] = base64.b64encode(raw).decode()
        else:
            line_of = extra if field is None else line
            line_of[field or mime] = raw.decode("utf-8", "replace")
    if "text" in line:
        line["text"] = _unquoted(line["text"], language)
    line["extra"] = extra
    return line


def _unquoted(text: str, language: str) -> str:
    """A string's own text, as E2B has it."""
    quote = '"' if language == "java" else "'"
    return text[1:-1] if language != "r" and len(text) > 1 and text[0] == text[-1] == quote else text


def _parse(raw: bytes) -> Any:
    if len(raw) > _MOST_JSON:
        return None
    try:
        return json.loads(raw, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


# -- contexts ------------------------------------------------------------------------------------------------------


async def create_context(box: AsyncSandbox, body: Mapping[str, Any]) -> dict[str, str]:
    """A context of its own. A folder that is none does not matter: then it begins in the sandbox's."""
    spoken, cwd, name = _language(body.get("language")), body.get("cwd") or _home(box), str(uuid.uuid4())
    if not isinstance(cwd, str):
        raise Refused("cwd is a text")
    try:
        try:
            await box.contexts.create(spoken, name=name, cwd=cwd)
        except WorkdirInvalid:
            await box.contexts.create(spoken, name=name, env={_ASKED: cwd})
    except (KernelError, SpecError) as error:
        raise InterpreterError(f"Failed to create context: {error.message}") from None
    return {"id": name, "language": _called(spoken), "cwd": cwd}


async def list_contexts(box: AsyncSandbox) -> list[dict[str, str]]:
    """The defaults, then the others as they were made."""
    there = {each.name: each for each in await box.contexts.list()}
    made = sorted((each for each in there.values() if each.name not in LANGUAGES), key=lambda each: each.pid)
    found = [
        {"id": name, "language": _called(name), "cwd": _home(box)}
        for name in LANGUAGES
        if name in _DEFAULTS or name in there
    ]
    return found + [await _described(box, each) for each in made]


async def restart_context(box: AsyncSandbox, context: str) -> None:
    """The same id, without its variables."""
    name = _known(context)
    try:
        await box.contexts.restart(name)
    except ContextNotFound:
        if name not in _DEFAULTS:  # which are there, though they have not started
            raise NoContext(name) from None
    except KernelError as error:
        raise InterpreterError(f"Failed to restart context {name}: {error.message}") from None


async def remove_context(box: AsyncSandbox, context: str) -> None:
    name = _known(context)
    if name not in _DEFAULTS and all(each.name != name for each in await box.contexts.list()):
        raise NoContext(name)
    await box.contexts.remove(name)


async def _described(box: AsyncSandbox, context: CodeContext) -> dict[str, str]:
    settings = await box._kernels.settings(context.name)
    cwd = None if settings is None else settings.env.get(_ASKED) or settings.cwd
    return {"id": context.name, "language": _called(context.language), "cwd": cwd or _home(box)}


def _home(box: AsyncSandbox) -> str:
    return box._spec.workdir or HOME


def _called(language: str) -> str:
    return _CALLED.get(language, language)


def _language(asked: Any) -> str:
    """Ours, by E2B's name; python if nothing is said."""
    if not asked:
        return "python"
    try:
        return language_of(asked.strip() if isinstance(asked, str) else asked)
    except SpecError:
        raise InterpreterError(f"Failed to create context: there is no kernel {str(asked)[:40]!r}") from None


def _known(context: Any) -> str:
    if not isinstance(context, str) or not _CONTEXT.fullmatch(context):
        raise NoContext(str(context))
    return context


def _variables(given: Any) -> dict[str, str]:
    if not given:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(value, str) for value in given.values()):
        raise Refused("env_vars is an object of texts")
    return dict(given)
