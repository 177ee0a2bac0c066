"""``sloplet shell``: a terminal in a sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from ..errors import SpecError
from .netoptions import NETWORK_KEYS, network_options
from .options import SPEC_KEYS, Verb, name_argument, sandbox_arguments, spec_options, template_option, volume_option
from .output import note

_PROMPT = r"\[\e[1;32m\]\u@{name}\[\e[0m\]:\[\e[1;34m\]\w\[\e[0m\]\$ "
_PLAIN_PROMPT = r"\u@{name}:\w\$ "
#: The best shell of the image, as the terminal's own process (exec), so that job control works.
_START = "command -v bash >/dev/null 2>&1 && exec bash; unset PS1; exec sh -i"


@click.command(
    "shell",
    cls=Verb,
    examples="""
    sloplet shell
    sloplet shell dev
    sloplet shell dev --shell 'zsh -l'
    sloplet shell --memory 2g --at-least container
    sloplet shell --template warm
    """,
)
@name_argument(required=False)
@spec_options
@volume_option
@template_option
@network_options
@click.option("--shell", "program", metavar="COMMAND", help="Another shell. [default: bash, else sh]")
@click.pass_context
def shell(ctx: click.Context, /, name: str | None, program: str | None, **options: Any) -> int:
    """A terminal in a named sandbox, or in a fresh one that is gone when you leave.

    `~.` at the beginning of a line leaves at once.
    """
    default = click.core.ParameterSource.DEFAULT
    known = [key for key in (*SPEC_KEYS, *NETWORK_KEYS, "volumes") if key in options]
    given = [key for key in known if ctx.get_parameter_source(key) is not default]
    if options["ask"]:
        raise SpecError("the terminal is the shell's", hint="answer in another, with `sloplet net ask NAME`")
    if name is not None and (refused := [key for key in given if key not in ("user", "workdir")]):
        several = refused[0] in ("secrets", "ports", "links", "volumes")
        flag = "--" + refused[0].removesuffix("s" if several else "").replace("_", "-")
        raise SpecError(
            f"{flag} is for a fresh sandbox, and {name!r} is there already", hint=f"leave {flag} or the name"
        )
    start = _START if program is None else f"exec {program}"
    return asyncio.run(_shell(name, ["/bin/sh", "-c", start], options, given))


async def _shell(name: str | None, argv: list[str], options: dict[str, Any], given: list[str]) -> int:
    from .session import Signals, guarded

    with Signals() as signals:
        return await guarded(_session(name, argv, options, given, signals), signals)


async def _session(name: str | None, argv: list[str], options: dict[str, Any], given: list[str], signals: Any) -> int:
    from ..sandbox import AsyncSandbox
    from .imaging import bring_image
    from .opening import open_box
    from .options import environment
    from .run import execute, tell_ports
    from .session import Wiring

    wiring = Wiring(interactive=True, tty=None)
    options = {**options, "as_json": False, "timeout": None}
    if name is None:
        box = AsyncSandbox(**sandbox_arguments(options))
    else:
        box = await open_box(name)
        options["exec_user"] = options["user"] if "user" in given else None
        options["cwd"] = options["workdir"] if "workdir" in given else None
        options["exec_env"] = environment(options["env"], options["env_files"])
    if wiring.pty:
        dumb = wiring.environment()["TERM"] == "dumb"
        prompt = (_PLAIN_PROMPT if dumb else _PROMPT).format(name=name or "sandbox")
        options["exec_env"] = {"PS1": prompt, "LANG": "C.UTF-8", **options.get("exec_env", {})}
    try:
        if name is None:
            await bring_image(options)
        await box.start()
        if name is None and wiring.pty:
            note(f"a fresh sandbox on the {box.engine} engine: all of it is gone when you leave")
        await tell_ports(box, options)
        code, _ = await execute(box, argv, options, wiring, signals)
    finally:
        signals.closing()
        if name is None:  # leaving a named one must not pause what runs in it
            await box.close()
    return code
