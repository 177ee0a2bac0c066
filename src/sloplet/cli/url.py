"""``sloplet url``: a server inside, at an address of this machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from ..errors import SpecError
from .options import CountVerb, json_option, name_argument
from .output import plain, print_json, print_table

if TYPE_CHECKING:
    from ..controller import Port, PublicPort


@click.command(
    "url",
    cls=CountVerb,
    examples="""
    sloplet url dev 8000
    curl $(sloplet url dev 8000)/index.html
    sloplet url dev 5432 --host-port 5432
    sloplet url dev
    sloplet url dev 8000 --close
    """,
)
@name_argument()
@click.argument("port", type=int, required=False, metavar="[PORT]")
@click.option("--host-port", "host_port", type=int, default=0, metavar="N", help="At this port here. [default: any]")
@click.option("--address", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Listen on this one.")
@click.option("--close", is_flag=True, help="Listen no more for it, and cut what is connected.")
@click.option("--public", is_flag=True, help="On a server: anybody may use it. [default: who has the URL]")
@json_option
def url(name: str, port: int | None, host_port: int, address: str, close: bool, public: bool, as_json: bool) -> None:
    """Print the URL of a server inside that listens on PORT; without PORT, those that are there.

    It stays while the sandbox does, asleep or awake: a connection wakes it. Of a sandbox on a server (--server) it is
    one of that server's; `sloplet forward` brings ports to this machine.
    """
    from .holding import elsewhere

    if port is None and (close or host_port or public):
        raise SpecError("there is no port", hint=f"for example: sloplet url {name} 8000")
    if elsewhere() is not None:
        if host_port or address != "127.0.0.1":
            raise SpecError("a server's URLs are not ports of this machine", hint=f"sloplet forward {name} {port}")
        _show_public(asyncio.run(_public(name, port, close, public)), port is None or close, as_json)
        return
    if public:
        raise SpecError("--public is for sandboxes on a server", hint="--address 0.0.0.0 lets others connect here")
    found = asyncio.run(_url(name, port, host_port, address, close))
    if as_json:
        shown = [item.to_dict() for item in found]
        print_json(shown if port is None or close else shown[0])
    elif port is None:
        print_table(("PORT", "HERE", "URL"), [_row(item) for item in found])
    elif not close:
        click.echo(found[0].url)


def _show_public(found: list[PublicPort], table: bool, as_json: bool) -> None:
    if as_json:
        shown = [item.to_dict() for item in found]
        print_json(shown if table else shown[0])
    elif table:
        rows = [(str(item.port), "yes" if item.public else "no", item.link) for item in found]
        print_table(("PORT", "PUBLIC", "URL"), rows)
    else:
        click.echo(found[0].link)


async def _public(name: str, port: int | None, close: bool, public: bool) -> list[PublicPort]:
    from ..controller import Publisher
    from .holding import holder

    controller = await holder()
    assert isinstance(controller, Publisher)
    info = await controller.find(name)
    if port is not None and not close:
        return [await controller.publish(info.id, port, public=public)]
    if port is not None:
        if not any(item.port == port for item in await controller.published(info.id)):
            raise SpecError(f"port {port} of {name} has no URL", hint=f"see `sloplet url {name}`")
        await controller.unpublish(info.id, port)
    return await controller.published(info.id)


def _row(port: Port) -> tuple[str, str, str]:
    if port.problem:
        return str(port.inside), "-", f"none: {plain(port.problem)}"
    host = f"[{port.address}]" if ":" in port.address else port.address
    return str(port.inside), f"{host}:{port.outside}", port.url


async def _url(name: str, port: int | None, host_port: int, address: str, close: bool) -> list[Port]:
    from .holding import holder

    controller = await holder()
    info = await controller.find(name)
    if port is None:
        return await controller.ports(info.id)
    if close:
        if not any(item.inside == port for item in await controller.ports(info.id)):
            raise SpecError(f"nothing is listened on for port {port} of {name}", hint=f"see `sloplet url {name}`")
        await controller.unexpose(info.id, port)
        return await controller.ports(info.id)
    return [await controller.expose(info.id, port, host_port=host_port, address=address)]
