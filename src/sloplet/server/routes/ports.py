"""Names outside for servers inside: ``https://{port}-{id}.DOMAIN``. See docs/http.md, "Public names"."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import Field

from ..caller import CallerOf, ServerOf
from ..documents import PROBLEMS, Document, Items, Request
from ..names.parts import Place
from ..names.published import PublishedPort
from ..state import ServerState

router = APIRouter(prefix="/v1/sandboxes/{box}/ports", tags=["ports"], responses=PROBLEMS)

PortNumber = Annotated[int, Path(ge=1, le=65535)]


class PortPublished(Document):
    """A port inside, and the URL it has outside."""

    port: int
    url: str
    public: bool = Field(description="Whether anybody may use it. If not: who has the token.")
    token: str | None = Field(
        description="Sent as the header `Sloplet-Token`, or once as `?sloplet_token=`. Null if it is public"
    )


class PortAsked(Request):
    public: bool = Field(default=False, description="Anybody may use it, without a token.")


@router.get("")
async def listed(box: str, caller: CallerOf, server: ServerOf) -> Items[PortPublished]:
    """Those that have a name outside, by port."""
    info = await caller.tenant.controller.find(box)
    return Items(items=[_document(server, each) for each in server.names.published.of(caller.tenant.name, info.id)])


@router.put("/{port}")
async def publish(
    box: str, port: PortNumber, caller: CallerOf, server: ServerOf, asked: PortAsked | None = None
) -> PortPublished:
    """Give a port a name outside, or change who may use it. One that is there keeps its token. Nothing need listen
    inside yet, and a sandbox that sleeps sleeps on until somebody comes."""
    info = await caller.tenant.controller.find(box)
    public = asked.public if asked is not None else False
    return _document(server, server.names.publish(caller.tenant.name, info.id, port, public=public))


@router.delete("/{port}", status_code=204)
async def unpublish(box: str, port: PortNumber, caller: CallerOf, server: ServerOf) -> Response:
    """Take the name back, and with it the token. That there is none is no error."""
    info = await caller.tenant.controller.find(box)
    server.names.unpublish(caller.tenant.name, info.id, port)
    return Response(status_code=204)


def _document(server: ServerState, port: PublishedPort) -> PortPublished:
    url = server.names.url(Place(port.port, port.sandbox))
    return PortPublished(port=port.port, url=url, public=port.public, token=None if port.public else port.token)
