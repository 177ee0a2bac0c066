"""``sloplet forward``: ports of a sandbox at this machine, for as long as the command runs."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from ..errors import SandboxDead
from .netoptions import parse_port
from .options import Verb, json_option, name_argument
from .output import print_json

if TYPE_CHECKING:
    from ..controller import Port
    from ..network.ports import Ports

_LOOK = 0.5


@click.command(
    "forward",
    cls=Verb,
    examples="""
    sloplet forward dev 8000
    sloplet forward dev 8000:8080 5432:5432
    sloplet forward dev 8000:8080 --address 0.0.0.0
    """,
)
@name_argument()
@click.argument("ports", nargs=-1, required=True, metavar="PORT[:HERE]...")
@click.option("--address", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Listen on this one.")
@json_option
def forward(name: str, ports: tuple[str, ...], address: str, as_json: bool) -> int:
    """Bring ports of a sandbox to this machine until Ctrl-C: HTTP, WebSocket, any TCP.

    PORT is the one inside, HERE the one on this machine (PORT itself, if it is free). A connection wakes a sandbox that
    sleeps.
    """
    pairs = [parse_port(text) for text in ports]
    return asyncio.run(_forward(name, pairs, address, as_json))


async def _forward(name: str, pairs: list[tuple[int, int]], address: str, as_json: bool) -> int:
    from ..finding import lives
    from ..live import dead_error
    from ..network.ports import Ports
    from .holding import holder

    controller = await holder()
    info = await controller.find(name)
    if not await lives(controller, info.id):
        raise dead_error(info, info.reason)
    # In this process, so that they end with it whatever ends it.
    listening = Ports(controller)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, over.set)
    try:
        made = [_listen(listening, info.id, inside, outside, address) for inside, outside in pairs]
        if as_json:
            print_json([port.to_dict() for port in made])
        for port in made if not as_json else ():
            click.echo(f"{port.url} -> {name}:{port.inside}")
        while not over.is_set() and listening.holders() and await lives(controller, info.id):
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await over.wait()
        if not over.is_set():
            raise SandboxDead(f"the sandbox {name} is gone", hint="see `sloplet ls`")
    finally:
        listening.close_all()
    return 0


def _listen(listening: Ports, sandbox_id: str, inside: int, outside: int, address: str) -> Port:
    from ..errors import PortUnavailable

    if outside:
        return listening.expose(sandbox_id, inside, outside, address)
    try:
        return listening.expose(sandbox_id, inside, inside, address)
    except PortUnavailable:
        return listening.expose(sandbox_id, inside, 0, address)
