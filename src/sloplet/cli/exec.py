"""``sloplet exec``: a command in a sandbox that is there."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from .options import (
    COMMAND_SETTINGS,
    NamedCommandVerb,
    command_line,
    env_options,
    environment,
    json_option,
    name_argument,
)
from .output import print_json
from .run import asked_by, execute, io_options


@click.command(
    "exec",
    cls=NamedCommandVerb,
    context_settings=COMMAND_SETTINGS,
    examples="""
    sloplet exec dev -- make test
    sloplet exec dev -c 'cd src && ls *.py'
    sloplet exec dev --user root --cwd /tmp --env DEBUG=1 -- id
    sloplet exec dev --detach -- python3 -m http.server
    tar c . | sloplet exec dev -- tar x
    """,
)
@name_argument()
@io_options
@env_options
@click.option("-u", "--user", metavar="USER", help="A name or uid[:gid]. [default: the sandbox's]")
@click.option("-w", "--cwd", "--workdir", "cwd", metavar="PATH", help="Where it begins. [default: the sandbox's]")
@click.option("--ask", is_flag=True, help="Ask in your terminal about connections that no rule decides.")
@click.option("-d", "--detach", is_flag=True, help="Leave it running; print its pid for logs, attach and ps.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def exec_(name: str, command: tuple[str, ...], **options: Any) -> int:
    """Run a command in a named sandbox. Input, output and the exit code pass through."""
    argv = command_line(command, options["shell_text"])
    options["exec_env"] = environment(options["env"], options["env_files"])
    options["exec_user"] = options["user"]
    return asyncio.run(_exec(name, argv, options))


async def _exec(name: str, argv: list[str], options: dict[str, Any]) -> int:
    from .session import Signals, guarded

    with Signals() as signals:
        return await guarded(_connected(name, argv, options, signals), signals)


async def _connected(name: str, argv: list[str], options: dict[str, Any], signals: Any) -> int:
    from .asking import answering
    from .opening import open_box
    from .session import Wiring

    ask = asked_by(options)
    box = await open_box(name)
    if options["detach"]:
        return await _detached(box, argv, options)
    wiring = Wiring(interactive=options["interactive"], tty=options["tty"], capture=options["as_json"])
    async with answering(box, ask):
        code, _ = await execute(box, argv, options, wiring, signals)
    return code


async def _detached(box: Any, argv: list[str], options: dict[str, Any]) -> int:
    process = await box.spawn(
        argv,
        cwd=options["cwd"],
        env=options["exec_env"],
        user=options["exec_user"],
        timeout=options["timeout"],
        pty=bool(options["tty"]),
        detached=True,
    )
    await process.detach()
    if options["as_json"]:
        print_json({"sandbox": box.name, "sandbox_id": box.id, "pid": process.pid, "command": argv})
    else:
        click.echo(str(process.pid))
    return 0
