"""Pages of a list: by where the last one ended, so that what comes and goes meanwhile moves nothing else."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from fastapi import Query

from ..errors import RequestInvalid
from .documents import Page

Item = TypeVar("Item")
Shown = TypeVar("Shown")

LimitOf = Annotated[int, Query(ge=1, le=1000, description="Items of a page")]
CursorOf = Annotated[str | None, Query(max_length=400, description="`next` of the page before")]


def paged(
    items: Iterable[Item],
    place: Callable[[Item], tuple[Any, ...]],
    shown: Callable[[Item], Shown],
    limit: int,
    cursor: str | None,
) -> Page[Shown]:
    """The page after ``cursor``. ``place``: what a list is ordered by: numbers and texts, different for all items."""
    ordered = sorted(((place(item), item) for item in items), key=lambda pair: pair[0])
    if cursor is not None:
        after = _read(cursor)
        if ordered and [type(part) for part in after] != [type(part) for part in ordered[0][0]]:
            raise _bad()
        ordered = [pair for pair in ordered if pair[0] > after]
    page = ordered[:limit]
    return Page(
        items=[shown(item) for _, item in page],
        next=_write(page[-1][0]) if len(ordered) > limit else None,
    )


def _write(place: tuple[Any, ...]) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def _read(cursor: str) -> tuple[Any, ...]:
    try:
        found = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        raise _bad() from None
    if not isinstance(found, list):
        raise _bad()
    return tuple(found)


def _bad() -> RequestInvalid:
    return RequestInvalid("that is not a cursor of this list", hint="give `next` of the page before, as it is")
