"""Extended attributes of a sandbox's files."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from ...files import MAX_ATTRIBUTE
from ..caller import CallerOf
from ..documents import PROBLEMS, Document
from ..documents import Request as Body
from ..rawnames import PathOf, PathText, UserOf, from_base64, named, path_of
from ..sse import to_json

router = APIRouter(prefix="/v1/sandboxes/{box}/files/attributes", tags=["files"], responses=PROBLEMS)

PrefixOf = Annotated[str, Query(pattern=r"^user\.", max_length=255, description="What their names begin with")]


class Attribute(Document):
    name: str
    name_base64: str | None = Field(default=None, description="The name's bytes, if they are no UTF-8")
    value_base64: str


class Attributes(Document):
    items: list[Attribute]


class AttributesAsked(Body):
    path: PathText
    attributes: dict[str, Annotated[str, Field(max_length=2 * MAX_ATTRIBUTE)] | None] = Field(
        description="Their values as base64; null removes one", max_length=4096, examples=[{"user.origin": "YSBib3g="}]
    )
    prefix: str = Field(default="user.", pattern=r"^user\.", max_length=255, description="What all of them begin with")
    replace: bool = Field(default=False, description="All others that begin with `prefix` are removed")
    user: str | None = Field(default=None, min_length=1, max_length=256)


def told(attributes: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """A list of ``Attribute``."""
    return [
        {**named("name", name), "value_base64": base64.b64encode(value).decode()}
        for name, value in sorted(attributes.items())
    ]


@router.get("", response_model=Attributes)
async def read(box: str, path: PathOf, caller: CallerOf, user: UserOf = None, prefix: PrefixOf = "user.") -> Response:
    """The extended attributes of a file or folder whose names begin with `prefix`."""
    files = (await caller.tenant.box(box)).files
    found = await files.attributes(path, prefix=prefix, user=user)
    return Response(to_json({"items": told(found)}), media_type="application/json")


@router.put("", status_code=204, response_class=Response)
async def put(box: str, asked: AttributesAsked, caller: CallerOf) -> None:
    """Set extended attributes of a file or folder."""
    files = (await caller.tenant.box(box)).files
    values = {
        name: None if value is None else from_base64(value, f"the attribute {name[:80]!r}")
        for name, value in asked.attributes.items()
    }
    await files.set_attributes(path_of(asked.path), values, prefix=asked.prefix, replace=asked.replace, user=asked.user)
