"""``sloplet net learn``: run something, and write the smallest policy that allows what it reached."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from ..errors import SpecError
from .netoptions import reach_options, rule_options, secret_option
from .options import COMMAND_SETTINGS, Verb, command_line, json_option, sandbox_arguments, spec_options, template_option
from .output import note, plain, print_json
from .run import execute, io_options, tell_ports

if TYPE_CHECKING:
    from ..netspec import NetworkSpec
    from .session import Signals


@click.command(
    "learn",
    cls=Verb,
    context_settings=COMMAND_SETTINGS,
    examples="""
    sloplet net learn -- pip install --user requests
    sloplet net learn --output policy.toml -c 'git clone https://github.com/a/b && cd b && npm install'
    sloplet run --network policy.toml -- pip install --user requests
    """,
)
@spec_options
@template_option
@rule_options
@secret_option
@reach_options
@io_options
@click.option("-o", "--output", metavar="FILE", help="Write the policy there (.toml or .json), not to stdout.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def learn(command: tuple[str, ...], output: str | None, as_json: bool, **options: Any) -> int:
    """Run a command in a fresh sandbox that may reach everything public, and print the smallest policy that allows what
    it reached: look at it, then give it to `sloplet run --network FILE`.

    Without --output the command's own output goes to stderr.
    """
    from .netfile import check_target

    argv = command_line(command, options["shell_text"])
    if output is not None:
        check_target(output)
    options.update(network="learn", as_json=False)
    return asyncio.run(_learn(argv, options, output, as_json))


async def _learn(argv: list[str], options: dict[str, Any], output: str | None, as_json: bool) -> int:
    from .session import Signals, guarded

    with Signals() as signals:
        return await guarded(_run(argv, options, output, as_json, signals), signals)


async def _run(argv: list[str], options: dict[str, Any], output: str | None, as_json: bool, signals: Signals) -> int:
    from ..sandbox import AsyncSandbox
    from .session import Wiring

    box = AsyncSandbox(**sandbox_arguments(options))
    wiring = Wiring(interactive=options["interactive"], tty=options["tty"])
    wiring.out = 1 if output is not None else 2
    try:
        await box.start()
        await tell_ports(box, options)
        code, result = await execute(box, argv, options, wiring, signals)
        found = await box.network.learned()
    finally:
        signals.closing()
        await box.close()
    _tell(found, output, as_json, code, result.denied)
    return code


def _tell(found: NetworkSpec, output: str | None, as_json: bool, code: int, denied: tuple[str, ...]) -> None:
    from .netfile import policy_settings, to_toml, write_policy

    settings = policy_settings(found)
    failure: SpecError | None = None
    if output is not None:
        try:
            write_policy(output, settings)
            note(f"{plain(output)}: {len(settings['allow'])} rules")
        except SpecError as error:
            failure = error
    if as_json:
        print_json({"policy": settings, "exit_code": code, "denied": list(denied)})
    elif output is None or failure is not None:  # what was learned is not lost with a disk that is full
        click.echo(to_toml(settings), nl=False)
    if failure is not None:
        raise failure
