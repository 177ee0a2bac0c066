"""Names of files over HTTP. A file's name is bytes, and need not be text.

Inside of this program such names are what ``os.fsdecode`` makes of them (lone surrogates for bytes that are no UTF-8).
In a URL they are percent-encoded as they are. JSON has no way to say them: there a name is shown with U+FFFD, the bytes
beside it as base64, and a request may give ``{"base64": ...}`` instead of text.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import Depends, Query
from pydantic import Field
from starlette.requests import HTTPConnection

from ..errors import SpecError
from .documents import Request

MAX_PATH = 4095  #: bytes


class RawPath(Request):
    """A path that is no text."""

    base64: str = Field(min_length=1, max_length=4 * MAX_PATH)


#: For models of requests; ``path_of`` makes a path of it.
PathText = Annotated[str, Field(min_length=1, max_length=MAX_PATH)] | RawPath


def path_of(given: str | RawPath) -> str:
    """SpecError."""
    return given if isinstance(given, str) else from_base64(given.base64, "base64").decode("utf-8", "surrogateescape")


def from_base64(text: str, what: str) -> bytes:
    """SpecError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise SpecError(f"{what} is not base64") from None


def named(key: str, name: str | None) -> dict[str, Any]:
    """``key``: the name as text, and ``key_base64``: its bytes if it is none."""
    if name is None:
        return {key: None}
    try:
        name.encode()
    except UnicodeEncodeError:
        raw = name.encode("utf-8", "surrogateescape")
        return {key: raw.decode("utf-8", "replace"), f"{key}_base64": base64.b64encode(raw).decode()}
    return {key: name}


def in_query(connection: HTTPConnection, key: str) -> str | None:
    """The last value of that name in the query, byte for byte."""
    query = connection.scope["query_string"].decode("utf-8", "surrogateescape")
    pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    return next((value for name, value in reversed(pairs) if name == key), None)


async def _path(
    connection: HTTPConnection,
    path: Annotated[
        str,
        Query(
            min_length=1,
            max_length=MAX_PATH,
            description="Absolute, or relative to the sandbox's working directory. Bytes that are no UTF-8 may be "
            "percent-encoded.",
        ),
    ],
) -> str:
    return in_query(connection, "path") or path


async def _path_or_here(
    connection: HTTPConnection,
    path: Annotated[str, Query(min_length=1, max_length=MAX_PATH, description="As elsewhere")] = ".",
) -> str:
    return in_query(connection, "path") or path


#: A route's ``path`` in the query.
PathOf = Annotated[str, Depends(_path)]
#: The same, the working directory if it is not given.
FolderOf = Annotated[str, Depends(_path_or_here)]
#: Whom an operation is done as.
UserOf = Annotated[
    str | None,
    Query(min_length=1, max_length=256, description="A name or uid[:gid]; the sandbox's own user if not given"),
]
