"""Building images: a context comes, its log goes out as it is written."""

from __future__ import annotations

from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from ...build.executor import BuildOptions, parse_tags
from ...build.layertar import DEFAULT_EPOCH
from ...build.running import RunSettings
from ...errors import SpecError
from ...quantities import parse_size
from ..building import arrived, build, left_out, network_of
from ..caller import CallerOf, ServerOf
from ..documents import PROBLEMS
from ..imaging import Told, access_for, followed
from ..sse import EVENTS, Events, event_stream
from ..writing import pieces

router = APIRouter(prefix="/v1/images", tags=["images"], responses=PROBLEMS)

_Word = Annotated[str, Query(min_length=1, max_length=1000)]
_Words = Annotated[list[Annotated[str, Query(min_length=1, max_length=65536)]], Query(max_length=1000)]
_Size = Annotated[str | None, Query(min_length=1, max_length=40, examples=["2g"])]
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.post("/build", response_class=Response, responses=EVENTS, openapi_extra=_BODY)
async def build_image(
    request: Request,
    caller: CallerOf,
    server: ServerOf,
    tag: _Words = [],  # noqa: B006
    dockerfile: _Word = "Dockerfile",
    target: Annotated[str | None, Query(min_length=1, max_length=200)] = None,
    build_arg: Annotated[_Words, Query(description="NAME=VALUE")] = [],  # noqa: B006
    label: Annotated[_Words, Query(description="NAME=VALUE")] = [],  # noqa: B006
    no_cache: bool = False,
    pull: bool = False,
    platform: Annotated[str | None, Query(min_length=1, max_length=80)] = None,
    allow: Annotated[_Words, Query(description="What steps may reach: docs/policy.md")] = [],  # noqa: B006
    deny: _Words = [],  # noqa: B006
    network: Literal["none", "learn"] | None = None,
    engine: Annotated[str, Query(max_length=31, pattern=r"^[a-z][a-z0-9_-]*$")] = "auto",
    at_least: Literal["process", "container", "gvisor", "microvm", "vm"] | None = None,
    cpus: Annotated[float | None, Query(ge=0.01, le=4096)] = None,
    memory: _Size = None,
    disk: _Size = None,
    pids: Annotated[int | None, Query(ge=8, le=4_000_000)] = None,
    open_files: Annotated[int | None, Query(ge=16, le=4_000_000)] = None,
    allow_weaker: bool = False,
    epoch: Annotated[int, Query(ge=0, lt=2**33, description="SOURCE_DATE_EPOCH")] = DEFAULT_EPOCH,
) -> Response:
    """Build an image. The body is the context: a tar, packed or not, with the Dockerfile in it.

    Events: `begin`, `log` and `end` of each step ({"kind", "step", "total", "stage", "text", "cached", "seconds"}),
    then `done` (the image) or `error` (a problem document). A client that goes away ends the build; steps that were
    done are kept. Steps have no network unless `allow` gives them one.
    """
    for what, text in (("memory", memory), ("disk", disk)):
        if text is not None:
            parse_size(text, what)
    limits = {"cpus": cpus, "memory": memory, "disk": disk, "pids": pids, "open_files": open_files}
    options = BuildOptions(
        tags=parse_tags(tag), build_args=_pairs("build_arg", build_arg), labels=_pairs("label", label), target=target,
        settings=RunSettings(limits={k: v for k, v in limits.items() if v is not None}, engine=engine,
                             allow_weaker=allow_weaker, at_least=at_least),
        no_cache=no_cache, pull=pull, platform=platform, epoch=epoch, access=await access_for(caller),
    )  # fmt: skip
    tenant = caller.tenant
    server.images.builds.check(tenant.name)

    async def events() -> Events:
        async with AsyncExitStack() as stack:
            body = pieces(request, server.settings.max_upload)
            with server.images.uploads.take(tenant.name):
                sent = await stack.enter_async_context(arrived(body, dockerfile, tenant.home))
            settings = replace(options.settings, network=network_of(sent.network, allow, deny, network))

            async def work(told: Told) -> dict[str, Any]:
                with server.images.builds.take(tenant.name):
                    return (await build(caller, sent, replace(options, settings=settings), told)).to_dict()

            async with aclosing(followed(work, left_out)) as following:
                async for each in following:
                    yield each

    return await event_stream(events(), caller.request_id)


def _pairs(what: str, texts: list[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise SpecError(f"{what} {text[:80]!r} is no pair", hint=f"write {what}=NAME=VALUE")
        found[name] = value
    return found
