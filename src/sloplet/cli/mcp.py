"""``sloplet mcp``: a sandbox for a model, over stdin and stdout."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ..errors import SpecError
from .netoptions import NETWORK_KEYS, network_options
from .options import SPEC_KEYS, Verb, life_options, sandbox_arguments, spec_options, template_option, volume_option
from .output import note

if TYPE_CHECKING:
    from ..images.progress import ImageProgress
    from ..mcp.local import LocalGround
    from ..mcp.policy import Policy
    from ..mcp.progress import Say

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ENDING = 30.0  # seconds that ending the sandboxes may take


@click.command(
    "mcp",
    cls=Verb,
    examples="""
    claude mcp add sloplet -- sloplet mcp
    sloplet mcp --allow @package-indexes --memory 2g
    sloplet mcp --image python:3.12-slim --at-least gvisor -v ./repo:/workspace:copy
    sloplet mcp --sandbox dev
    sloplet mcp --allow api.github.com --secret GITHUB_TOKEN@api.github.com
    """,
)
@click.option("--sandbox", "name", metavar="NAME", help="Use this named sandbox, made if it is not there; it stays.")
@click.option("--keep", is_flag=True, help="Leave the sandboxes when the session ends; `sloplet ls` shows them.")
@click.option("--max-sandboxes", type=int, default=5, show_default=True, metavar="N",
              help="How many the model may have at a time.")  # fmt: skip
@click.option("--max-output", type=int, default=30_000, show_default=True, metavar="N",
              help="Characters of output in one answer; of more, head and tail.")  # fmt: skip
@click.option("--timeout", default="2m", show_default=True, metavar="TIME",
              help="What a command may take, if the model does not say.")  # fmt: skip
@click.option("--max-timeout", default="1h", show_default=True, metavar="TIME", help="The most that it may ask for.")
@spec_options
@volume_option
@template_option
@network_options
@life_options
@click.pass_context
def mcp(
    ctx: click.Context,
    /,
    name: str | None,
    keep: bool,
    max_sandboxes: int,
    max_output: int,
    timeout: str,
    max_timeout: str,
    **options: Any,
) -> int:
    """Serve the Model Context Protocol over stdin and stdout: tools to run commands and code, and to read and write
    files, in a sandbox of the session's own.

    All that the sandbox is and may reach is decided here, by these options; the model cannot change it. The sandbox is
    made when it is first used and ends with the session.
    """
    protocol = _take_over()
    from ..mcp import require

    require()
    if options.get("ask"):
        raise SpecError("--ask is not for mcp: stdin and stdout are the protocol's", hint="name hosts with --allow")
    from ..mcp.local import LocalGround
    from ..mcp.policy import Policy
    from ..quantities import parse_duration

    policy = Policy(
        max_sandboxes, max_output, parse_duration(timeout, "timeout"), parse_duration(max_timeout, "max-timeout")
    )
    default = click.core.ParameterSource.DEFAULT
    said = [key for key in (*SPEC_KEYS, *NETWORK_KEYS, "env", "env_files", "volumes") if key in options]
    as_it_is = all(ctx.get_parameter_source(key) in (default, None) for key in said)
    ground = LocalGround(sandbox_arguments(options), name=name, as_it_is=as_it_is, keep=keep, bring=_bring(options))
    ground.check()
    return asyncio.run(_serve(ground, policy, *protocol))


async def _serve(ground: LocalGround, policy: Policy, protocol_in: int, protocol_out: int) -> int:
    """Until stdin ends, or a signal comes. The sandboxes are gone, or left, when it returns."""
    from ..mcp.boxes import Boxes
    from ..mcp.server import Session, make_server
    from ..mcp.stdio import serve
    from .streams import Output, read_chunks

    received: list[int] = []
    closing = False
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop(number: int) -> None:
        received.append(number)
        if len(received) == 1 and not closing:  # what ends the sandboxes must not be cut short
            task.cancel()

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop, number)
    boxes = Boxes(ground, policy.max_sandboxes)
    session = Session(boxes, policy)
    server = make_server(lambda _: session)
    if os.isatty(protocol_in):
        note("this speaks MCP over stdin and stdout: a client should start it (Ctrl-D ends it; see docs/mcp.md)")
    try:
        with suppress(asyncio.CancelledError):
            await serve(server, read_chunks(protocol_in), Output(protocol_out).write)
    finally:
        closing = True
        task.uncancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDING):
                await boxes.close()
    return 128 + received[0] if received else 0


def _take_over() -> tuple[int, int]:
    """stdin and stdout as descriptors of our own; what reads or prints by the old numbers meets nothing, and stderr."""
    import fcntl

    found = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3), fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return found


def _bring(options: dict[str, Any]) -> Any:
    async def bring(say: Say) -> None:
        from ..mcp.progress import image_words
        from .imaging import bring_image

        def told(progress: ImageProgress) -> None:
            if words := image_words(options["image"], progress.stage, progress.done, progress.total):
                say(words)

        await bring_image(options, told)

    return bring
