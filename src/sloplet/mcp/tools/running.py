"""run and run_code: commands, and cells whose variables stay."""

from __future__ import annotations

import base64
import re
from typing import Annotated, Literal

import mcp_types as types
from pydantic import BaseModel, Field

from ...code.results import CodeResult, RichResult
from ...errors import KernelError
from ...results import Result
from ...sandbox import AsyncSandbox
from ..bounded import Kept, shorten
from ..bounded import share as shared
from ..call import Answer, BoxArguments, Call, Env, Toolbox
from ..progress import Say, telling

MAX_COMMAND = 200_000
MAX_CODE = 1_000_000
MAX_IMAGE = 4 * 2**20  #: bytes: more than that no model takes
MAX_IMAGES = 20  #: of one answer
#: What programs say where there is no network at all, and so nobody who could have refused anything.
_OFFLINE_RE = re.compile(
    r"could not resolve|name resolution|name or service not known|network is unreachable|getaddrinfo"
    r"|EAI_AGAIN|ENOTFOUND|no such host|failed to resolve",
    re.IGNORECASE,
)
_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")

Timeout = Annotated[
    float | None,
    Field(gt=0, description="Seconds after which it is ended. Left out: what this server is set to."),
]


class RunArguments(BoxArguments):
    command: Annotated[
        str, Field(min_length=1, max_length=MAX_COMMAND, description="Shell text, run by /bin/sh -c in a fresh shell.")
    ]
    cwd: Annotated[str | None, Field(max_length=4095, description="Where it runs, if not in the workspace.")] = None
    env: Env = None
    stdin: Annotated[str | None, Field(max_length=MAX_CODE, description="What it reads from its standard input.")] = (
        None
    )
    timeout: Timeout = None


class RunOutput(BaseModel):
    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: bool = Field(default=False, description="Characters were left out of stdout or stderr")
    duration: float
    denied: list[str] = Field(default=[], description="Why connections were refused while it ran")


async def run(call: Call, arguments: RunArguments) -> Answer:
    """Run a shell command in the sandbox and wait for its end. Files and installed packages stay for the next call;
    variables, the folder and background jobs do not (use cwd=, run_code, start_process). Long output is shortened in
    its middle: redirect it to a file to read parts of it."""
    held = await call.box(arguments.sandbox)
    limit = call.policy.seconds(arguments.timeout)
    async with telling(call.report, f"running: {arguments.command}") as say:
        kept = Printed(call.policy.max_output, say)
        result = await held.box.run(
            arguments.command, cwd=arguments.cwd, env=arguments.env, input=arguments.stdin, timeout=limit,
            on_stdout=kept.out, on_stderr=kept.err, max_output=1,
        )  # fmt: skip
    stdout, stderr = kept.texts(call.policy.max_output)
    denied = list(result.denied)
    if not result.ok and not denied and held.box.spec.network.mode == "none" and _OFFLINE_RE.search(stdout + stderr):
        denied = ["this sandbox has no network: no name is resolved, and no host is reached"]
    data = RunOutput(
        exit_code=result.exit_code, stdout=stdout, stderr=stderr, timed_out=result.timed_out, out_of_memory=result.oom,
        truncated=kept.size > len(stdout) + len(stderr), duration=round(result.duration, 3),
        denied=denied,
    )  # fmt: skip
    return Answer(_run_text(result, data, limit), data)


class Printed:
    """What a command prints, head and tail of it, and its last line as a word on how it goes."""

    def __init__(self, most: int, say: Say) -> None:
        self._kept = {1: Kept(most), 2: Kept(most)}
        self._say = say

    def out(self, text: str) -> None:
        self._take(1, text)

    def err(self, text: str) -> None:
        self._take(2, text)

    def _take(self, channel: int, text: str) -> None:
        self._kept[channel].add(text)
        if line := self._kept[channel].last_line:
            self._say(line)

    @property
    def size(self) -> int:
        return self._kept[1].size + self._kept[2].size

    def texts(self, most: int) -> tuple[str, str]:
        first, second = shared(most, self._kept[1].size, self._kept[2].size)
        return self._kept[1].cut(first), self._kept[2].cut(second)


def _run_text(result: Result, data: RunOutput, limit: float) -> str:
    parts = [data.stdout] if data.stdout else []
    if data.stderr:
        parts.append(f"[stderr]\n{data.stderr}")
    if result.timed_out:
        parts.append(
            f"[stopped after {limit:g} s: the time limit was reached; ask for more with timeout=, or use start_process]"
        )
    elif result.oom or result.signal:
        parts.append(f"[{result.describe()}]")
    else:
        parts.append(f"[exit code {result.exit_code}]")
    parts += denials(data.denied)
    return "\n".join(part.rstrip("\n") for part in parts)


def denials(reasons: list[str]) -> list[str]:
    """Why connections were refused, and who could change that."""
    if not reasons:
        return []
    listed = "\n".join(f"- {reason}" for reason in reasons)
    return [
        f"[network: refused while it ran]\n{listed}\n"
        "[this is policy: trying again does not help; if it is needed, tell the person which host to allow]"
    ]


class CodeArguments(BoxArguments):
    code: Annotated[str, Field(max_length=MAX_CODE)]
    language: Literal["python", "node", "typescript", "shell", "r", "java", "deno"] = "python"
    context: Annotated[
        str | None,
        Field(max_length=63, description="A kernel of its own name, with variables of its own; made when first used."),
    ] = None
    timeout: Timeout = None
    restart: Annotated[
        bool, Field(description="Start the kernel anew first if it has ended; its variables are gone.")
    ] = False


class Failure(BaseModel):
    name: str
    message: str
    traceback: str


class CodeOutput(BaseModel):
    result: str | None = Field(description="The value of the last expression")
    displayed: list[str] = Field(default=[], description="What was displayed besides")
    stdout: str
    stderr: str
    error: Failure | None = None
    timed_out: bool = False
    restarted: bool = Field(default=False, description="The kernel was started anew: its variables are gone")
    truncated: bool = False
    duration: float


async def run_code(call: Call, arguments: CodeArguments) -> Answer:
    """Run code in a kernel that keeps its variables between calls, as a notebook does: Python by default, also Node
    and shell; TypeScript, R and Java where the image has them. The value of the last expression is the result;
    figures of matplotlib, images and tables that are displayed come back with it. An error is answered with its
    traceback, and variables stay."""
    held = await call.box(arguments.sandbox)
    limit = call.policy.seconds(arguments.timeout)
    if arguments.context is not None and not arguments.restart:
        await _context(held.box, arguments.context, arguments.language)
    async with telling(call.report, f"running {arguments.language}") as say:
        kept = Printed(call.policy.max_output, say)
        result = await held.box.code(
            arguments.code, language=arguments.language, context=arguments.context, timeout=limit,
            on_stdout=kept.out, on_stderr=kept.err, restart=arguments.restart,
        )  # fmt: skip
    return code_answer(result, kept, call.policy.max_output)


async def _context(box: AsyncSandbox, name: str, language: str) -> None:
    """A context that is named is made when it is first used, as the languages' own are."""
    if all(each.name != name for each in await box.contexts.list()):
        try:
            await box.contexts.create(language, name=name)
        except KernelError:
            if all(each.name != name for each in await box.contexts.list()):  # nobody else was quicker
                raise


def code_answer(result: CodeResult, kept: Printed, most: int) -> Answer:
    """Texts share ``most``: what was printed, the error, the results."""
    images, notes = _images(result)
    main = next((each for each in result.results if each.main), None)
    value = None if main is None else shorten(_readable(main), most)
    shown = [
        shorten(_readable(each), most // 4)
        for each in result.results[:MAX_IMAGES]
        if not each.main and not _image_of(each)
    ]
    left = max(2000, most - len(value or "") - sum(map(len, shown)))
    stdout, stderr = kept.texts(left)
    error = result.error
    data = CodeOutput(
        result=value, displayed=shown, stdout=stdout, stderr=stderr,
        error=None if error is None else Failure(
            name=error.name, message=shorten(error.message, most // 4), traceback=shorten(error.traceback, most // 2)
        ),
        timed_out=result.timed_out, restarted=result.restarted,
        truncated=result.truncated or kept.size > len(stdout) + len(stderr), duration=round(result.duration, 3),
    )  # fmt: skip
    return Answer("\n".join(_code_parts(data, notes)), data, images)


def _code_parts(data: CodeOutput, notes: list[str]) -> list[str]:
    parts = [data.stdout.rstrip("\n")] if data.stdout else []
    if data.stderr:
        parts.append("[stderr]\n" + data.stderr.rstrip("\n"))
    parts += data.displayed
    if data.result is not None:
        parts.append(f"[result]\n{data.result}" if parts else data.result)
    if data.error is not None:
        told = data.error.traceback.rstrip("\n") or f"{data.error.name}: {data.error.message}"
        parts.append(f"[error]\n{told}")
    if data.timed_out:
        parts.append("[its time limit was reached" + ("; variables are kept]" if not data.restarted else "]"))
    if data.restarted:
        parts.append("[the kernel was started anew: its variables are gone]")
    return [*parts, *notes] or ["[done; it printed nothing and has no value]"]


def _images(result: CodeResult) -> tuple[list[types.ContentBlock], list[str]]:
    found: list[types.ContentBlock] = []
    too_large = 0
    for each in result.results:
        image = _image_of(each)
        if image is None:
            continue
        mime, raw = image
        if len(raw) > MAX_IMAGE or len(found) >= MAX_IMAGES:
            too_large += 1
        else:
            found.append(types.ImageContent(data=base64.b64encode(raw).decode(), mime_type=mime))
    notes = [f"[{len(found)} image{'s' if len(found) > 1 else ''} below]"] if found else []
    if too_large:
        notes.append(f"[{too_large} images were left out: at most {MAX_IMAGES}, each of {MAX_IMAGE >> 20} MiB]")
    return found, notes


def _image_of(rich: RichResult) -> tuple[str, bytes] | None:
    return next(((mime, rich.data[mime]) for mime in _IMAGES if mime in rich.data), None)


def _readable(rich: RichResult) -> str:
    """What a model reads best of a value: Markdown, then plain text (a table of pandas' is well laid out), then the
    rest as it is."""
    for text in (rich.markdown, rich.text, rich.latex, rich.html, rich.svg, rich.javascript):
        if text is not None:
            return text
    raw = rich.data.get("application/json")
    return raw.decode("utf-8", "replace") if raw is not None else f"[{', '.join(rich.data)}]"


def add_to(tools: Toolbox) -> None:
    tools.add("run", "Run a command", RunArguments, RunOutput, destroys=True, world=True)(run)
    tools.add("run_code", "Run code", CodeArguments, destroys=True, world=True)(run_code)
