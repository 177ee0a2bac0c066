"""``sloplet code``: a cell of code, in a sandbox that keeps its variables or in a fresh one."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from ..errors import SpecError
from .netoptions import NETWORK_KEYS, network_options
from .options import (
    SPEC_KEYS,
    Verb,
    json_option,
    name_argument,
    sandbox_arguments,
    spec_options,
    template_option,
    volume_option,
)
from .output import note, print_json, size

if TYPE_CHECKING:
    from ..code.results import CodeResult, RichResult
    from ..sandbox import AsyncSandbox

_MAX_CODE = 64 * 2**20
_LANGUAGES = {
    ".py": "python", ".js": "node", ".mjs": "node", ".cjs": "node", ".ts": "typescript", ".sh": "shell",
    ".bash": "shell", ".r": "r", ".java": "java", ".jsh": "java",
}  # fmt: skip


@click.command(
    "code",
    cls=Verb,
    examples="""
    sloplet code dev -c 'x = 41'
    sloplet code dev -c 'x + 1'
    sloplet code dev analysis.py --timeout 60 --out ./figures
    sloplet code dev --language node -c 'await Promise.resolve(6 * 7)'
    sloplet code dev --context other --restart < cell.py
    sloplet code --json -c '[n ** 2 for n in range(5)]'
    """,
)
@name_argument(required=False)
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@click.option("-c", "text", metavar="TEXT", help="Run TEXT. [default: FILE, else stdin]")
@click.option(
    "--language",
    metavar="NAME",
    help="python, node, typescript, shell, r, java or deno. [default: by FILE's name, else python]",
)
@click.option("--context", metavar="NAME", help="Another context than the language's own.")
@click.option("--timeout", metavar="TIME", help="Interrupt it after that long, for example 30 or 5m (exit code 124).")
@click.option("--restart", is_flag=True, help="If the context has ended, start it anew.")
@click.option("--out", "out", metavar="DIR", help="Save rich results there: 1.png, 2.html, ...")
@click.option("--max-output", default="4m", show_default=True, metavar="SIZE", help="With --json: what is kept of it.")
@spec_options
@volume_option
@template_option
@network_options
@json_option
@click.pass_context
def code(ctx: click.Context, /, name: str | None, file: str | None, text: str | None, **options: Any) -> int:
    """Run a cell of code. In a named sandbox its variables stay; without a name the sandbox is fresh, and gone
    afterwards.

    What the code prints and displays goes to stdout and stderr as it comes, then the value of its last expression. An
    error is shown with its traceback, and the exit code is 1 (a shell's: its own).
    """
    default = click.core.ParameterSource.DEFAULT
    keys = [key for key in (*SPEC_KEYS, *NETWORK_KEYS) if key in options]
    given = [key for key in keys if ctx.get_parameter_source(key) is not default]
    if name is not None and given:
        flag = "--" + given[0].replace("_", "-")
        raise SpecError(
            f"{flag} is for a fresh sandbox, and {name!r} is there already", hint=f"leave {flag} or the name"
        )
    if options["ask"]:
        raise SpecError("--ask is not for code", hint="answer in another terminal, with `sloplet net ask NAME`")
    if options["language"] is None and file is not None:
        options["language"] = _LANGUAGES.get(os.path.splitext(file)[1].lower())
    source = _source(file, text)
    if options["out"] is not None:
        _folder(options["out"])
    return asyncio.run(_code(name, source, options))


def _folder(path: str) -> None:
    """Made before the cell runs: its results must not be lost for it."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--out {path}: {error.strerror}", hint="name a folder that can be written") from None


def _source(file: str | None, text: str | None) -> str:
    if text is not None:
        if file is not None:
            raise SpecError(f"-c and {file!r} are both code", hint="leave one of them")
        return text
    try:
        if file is None:
            raw = sys.stdin.buffer.read(_MAX_CODE + 1)
        else:
            with open(file, "rb") as source:
                raw = source.read(_MAX_CODE + 1)
        if len(raw) > _MAX_CODE:
            raise SpecError(f"the code is longer than {size(_MAX_CODE)}", hint="`sloplet cp` it there and import it")
        return raw.decode()
    except UnicodeDecodeError:
        raise SpecError(f"{file or 'stdin'} is not UTF-8 text") from None
    except OSError as error:
        raise SpecError(f"{file}: {error.strerror}", hint="name a file that can be read, or -c TEXT") from None


async def _code(name: str | None, source: str, options: dict[str, Any]) -> int:
    from .session import Signals, guarded

    with Signals() as signals:
        return await guarded(_run(name, source, options, signals), signals)


async def _run(name: str | None, source: str, options: dict[str, Any], signals: Any) -> int:
    from ..sandbox import AsyncSandbox
    from .imaging import bring_image
    from .opening import open_box

    box = AsyncSandbox(**sandbox_arguments(options)) if name is None else await open_box(name)
    try:
        if name is None:
            await bring_image(options)
        result = await _cell(box, source, options)
    finally:
        signals.closing()
        if name is None:
            await box.close()
    saved = _save(result.results, options["out"]) if options["out"] is not None else []
    if options["as_json"]:
        document = {**result.to_dict(), "saved": saved, "sandbox": box.name, "sandbox_id": box.id, "engine": box.engine}
        print_json(document)
    else:
        _tell(result, saved)
    return result.exit_code


async def _cell(box: AsyncSandbox, source: str, options: dict[str, Any]) -> CodeResult:
    live = not options["as_json"]
    return await box.code(
        source,
        language=options["language"],
        context=options["context"],
        timeout=options["timeout"],
        restart=options["restart"],
        max_output=options["max_output"] if not live else 1,
        on_stdout=_printer(sys.stdout) if live else None,
        on_stderr=_printer(sys.stderr) if live else None,
        on_result=_show if live else None,
    )


def _printer(stream: Any) -> Any:
    def write(text: str) -> None:
        stream.buffer.write(text.encode("utf-8", "replace"))
        stream.buffer.flush()

    return write


def _show(result: RichResult) -> None:
    """What was displayed, and the value of the last expression, in their order among the output."""
    if result.text is not None:
        _printer(sys.stdout)(result.text + "\n")


def _tell(result: CodeResult, saved: list[str]) -> None:
    if result.error is not None:
        error = result.error
        shown = error.traceback.rstrip() or f"{error.name}: {error.message}"
        _printer(sys.stderr)(shown + "\n")
        if result.timed_out:
            note(error.message)
    if saved:
        note(f"saved {', '.join(saved)}")
    else:
        rich = [mime for one in result.results for mime in one.data if mime != "text/plain" and "json" not in mime]
        if rich:
            note(f"there are rich results ({', '.join(sorted(set(rich)))}): --out DIR saves them")


def _save(results: tuple[RichResult, ...], folder: str) -> list[str]:
    """The folder is the caller's; the names are ours, whatever the code in the sandbox called its types."""
    from ..code.results import SUFFIXES

    made = []
    for number, result in enumerate(results, 1):
        for mime, raw in result.data.items():
            if mime not in SUFFIXES:
                continue
            path = os.path.join(folder, f"{number}.{SUFFIXES[mime]}")
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            with os.fdopen(fd, "wb") as file:
                file.write(raw)
            made.append(path)
    return made
