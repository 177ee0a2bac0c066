"""``sloplet run``: a fresh sandbox, one command, gone afterwards."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import click

from ..errors import SandboxDead, SandboxPaused, SpecError
from .netoptions import network_options
from .options import (
    COMMAND_SETTINGS,
    Verb,
    command_line,
    json_option,
    label_option,
    sandbox_arguments,
    spec_options,
    stacked,
    template_option,
    volume_option,
)
from .output import complain, note, plain, print_json, size

if TYPE_CHECKING:
    from ..results import Result
    from ..sandbox import AsyncSandbox
    from .session import Signals, Wiring

io_options = stacked(
    click.option("-i", "--interactive", is_flag=True, help="Pass stdin on even if it is a terminal."),
    click.option("-t/-T", "--tty/--no-tty", "tty", default=None,
                 help="Give it a terminal, or do not. [default: if you are at one]"),
    click.option("-c", "shell_text", metavar="TEXT", help="Run TEXT by /bin/sh -c."),
    click.option("--timeout", metavar="TIME", help="End it after that long, for example 30 or 5m (exit code 124)."),
    click.option("--max-output", default="4m", show_default=True, metavar="SIZE",
                 help="With --json: what is kept of the output."),
)  # fmt: skip


@click.command(
    "run",
    cls=Verb,
    context_settings=COMMAND_SETTINGS,
    examples="""
    sloplet run -- python3 -c 'print(6*7)'
    sloplet run -c 'echo $HOME; rm -rf --no-preserve-root /'
    cat data.csv | sloplet run --memory 256m --timeout 30 -- sort
    sloplet run --copy ./project:project -w /workspace/project -- make test
    sloplet run -v ./repo:/workspace:rw -v cache:/home/agent/.cache -- make test
    sloplet run --out result.json -c 'echo {} > result.json'
    sloplet run --at-least container --json -- id
    sloplet run -it -- bash
    sloplet run --image python:3.12-slim
    sloplet run --image nginx:alpine --publish-image-ports
    sloplet run --template warm -- python3 -c 'import numpy'
    sloplet run --allow @package-indexes -- pip install --user requests
    sloplet run --allow api.github.com --secret GITHUB_TOKEN@api.github.com -- gh api user
    """,
)
@spec_options
@volume_option
@template_option
@label_option
@network_options
@io_options
@click.option("--copy", "copies", multiple=True, metavar="SRC[:DST]", help="Copy a file or folder in, before.")
@click.option("--out", "outs", multiple=True, metavar="SRC[:DST]", help="Copy a file or folder out, afterwards.")
@click.option("--entrypoint", is_flag=True, help="Give the command to the image's own entrypoint, as its arguments.")
@click.option("-P", "--publish-image-ports", "image_ports", is_flag=True,
              help="Listen on this machine for the ports that the image exposes.")  # fmt: skip
@click.option("--verbose", is_flag=True, help="Say on stderr what is enforced and how long things took.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def run(command: tuple[str, ...], **options: Any) -> int:
    """Run a command in a fresh sandbox that is gone afterwards.

    Input, output and the exit code pass through. Words after the options are the command's argument vector, exactly
    as written; -c TEXT is for shell text. Without a command it is what the image runs by itself.
    """
    own = (not command and options["image"] != "host") or options["entrypoint"]
    if own and options["shell_text"] is None:
        return asyncio.run(run_fresh(list(command), {**options, "entrypoint": True}))
    return asyncio.run(run_fresh(command_line(command, options["shell_text"]), {**options, "entrypoint": False}))


async def run_fresh(argv: list[str], options: dict[str, Any]) -> int:
    from ..sandbox import AsyncSandbox
    from .session import Signals, guarded

    box = AsyncSandbox(**sandbox_arguments(options, asked_by(options)))
    with Signals() as signals:
        return await guarded(_run(box, argv, options, signals), signals)


def asked_by(options: dict[str, Any]) -> Any:
    """Who answers where --ask is given: the person at this terminal, or nobody. The terminal is then not the
    command's."""
    if not options.get("ask"):
        return True
    if options["tty"] or options["interactive"]:
        raise SpecError(
            "--ask puts its questions to the terminal that -t and -i give to the command",
            hint="leave them, or answer elsewhere with `sloplet net ask NAME`",
        )
    options["tty"] = False
    from .asking import asker, terminal

    fd = terminal()
    if fd is None:
        note("there is no terminal to ask at: what no rule allows is refused")
        return True
    return asker(fd)


async def _run(box: AsyncSandbox, argv: list[str], options: dict[str, Any], signals: Signals) -> int:
    from .imaging import bring_image
    from .session import Wiring

    began = time.monotonic()
    wiring = Wiring(interactive=options["interactive"], tty=options["tty"], capture=options["as_json"])
    if options["outs"]:
        from .copying import check_outs

        await check_outs(options["outs"])
    try:
        await bring_image(options)
        await box.start()
        ready = time.monotonic()
        if options.get("entrypoint"):
            argv = await box.image_command(argv or None)
        if options.get("image_ports"):
            await box.expose_image_ports()
        await tell_ports(box, options)
        if options["copies"]:
            from .copying import copy_in

            for pair in options["copies"]:
                await copy_in(box, pair)
        if options["verbose"]:
            await _say_what_is_enforced(box)
        code, result = await execute(box, argv, options, wiring, signals)
        if options["outs"]:
            from .copying import copy_outs

            await copy_outs(box, options["outs"])
    finally:
        signals.closing()
        await box.close()
    if options["verbose"]:
        ended = time.monotonic()
        complain(
            f"sloplet: started in {(ready - began) * 1000:.0f} ms, the command took {result.duration * 1000:.0f} ms "
            f"({result.cpu_seconds * 1000:.0f} ms of CPU, {size(result.max_rss)} of memory at most), "
            f"all in all {(ended - began) * 1000:.0f} ms\n"
        )
    return code


async def tell_ports(box: AsyncSandbox, options: dict[str, Any]) -> None:
    """Where a fresh sandbox's servers will be: nobody else can ask for it by name."""
    for port in await box.ports() if options["ports"] or options.get("image_ports") else ():
        note(f"port {port.inside} at {port.url}")


async def execute(
    box: AsyncSandbox, argv: list[str], options: dict[str, Any], wiring: Wiring, signals: Signals
) -> tuple[int, Result]:
    """Start the command, pass everything through, and judge how it ended. run and exec are this."""
    try:
        return await _execute(box, argv, options, wiring, signals)
    except SandboxPaused as error:
        if box.name is not None:
            raise
        hint = "a sandbox without a name ends with its command; `sloplet create` makes one that stays"
        raise SandboxDead(error.message, hint=hint) from None


async def _execute(
    box: AsyncSandbox, argv: list[str], options: dict[str, Any], wiring: Wiring, signals: Signals
) -> tuple[int, Result]:
    from .session import capture, exit_code, follow

    as_json: bool = options["as_json"]
    process = await box.spawn(
        argv,
        cwd=options.get("cwd"),
        env={**wiring.environment(), **options.get("exec_env", {})},
        user=options.get("exec_user"),
        timeout=options["timeout"],
        pty=wiring.pty_argument,
        stdin=wiring.stdin,
        text=False,
        max_output=options["max_output"] if as_json else 1,
    )
    if not as_json:
        result = await follow(process, wiring, signals)
        signals.closing()
        for reason in result.denied:
            note(f"refused: {plain(reason)}")
        return exit_code(result, signals), result
    result = await capture(process, wiring, signals)
    signals.closing()
    print_json(result_document(box, argv, result))
    return exit_code(result, signals, quiet=True), result


def result_document(box: AsyncSandbox, argv: list[str], result: Result) -> dict[str, Any]:
    """What --json prints. The base64 keys are null where the text is exact."""
    return {
        **result.to_dict(),
        "stdout_base64": _exact(result.stdout_raw),
        "stderr_base64": _exact(result.stderr_raw),
        "command": argv,
        "sandbox": box.name,
        "sandbox_id": box.id,
        "engine": box.engine,
    }


def _exact(raw: bytes) -> str | None:
    try:
        raw.decode()
    except UnicodeDecodeError:
        import base64

        return base64.b64encode(raw).decode()
    return None


async def _say_what_is_enforced(box: AsyncSandbox) -> None:
    complain(f"sloplet: sandbox {box.id} on the {box.engine} engine\n")
    for item in await box.guarantees():
        sign = "+" if item.enforced else "-"
        value = f" {item.value}" if item.value else ""
        complain(f"sloplet:  {sign} {item.control}{value}: {item.how}\n")
