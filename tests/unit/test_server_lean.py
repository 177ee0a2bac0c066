"""The short way to plain routes: the same answers as FastAPI's own, which everything else still goes."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, FastAPI, Query, Request, Response
from pydantic import BaseModel, Field

from sloplet.errors import RequestInvalid, SandboxNotFound, SlopletError
from sloplet.server.caller import BODY_KEY, SCOPE_KEY, CallerOf, ServerOf
from sloplet.server.idempotency import IdempotencyKey
from sloplet.server.incoming import parse_json
from sloplet.server.lean import Lean

pytestmark = pytest.mark.anyone


class Asked(BaseModel):
    number: int = Field(ge=1)


class Told(BaseModel):
    text: str


router = APIRouter(prefix="/v1")


@router.post("/things", status_code=201)
async def make(asked: Asked, caller: CallerOf, server: ServerOf, key: IdempotencyKey = None) -> Told:
    return Told(text=f"{asked.number} for {caller} of {server}, {key}")


@router.get("/things/{thing}")
async def look(thing: str) -> Told:
    return Told(text=thing)


@router.get("/things/{thing}/part/{part}")
async def deeper(thing: str, part: str, request: Request) -> Response:
    return Response(f"{thing}.{part}.{request.scope['route'].path}")


@router.delete("/things/{thing}", status_code=204)
async def remove(thing: str) -> Response:
    if thing == "none":
        raise SandboxNotFound("there is none")
    if thing == "bug":
        raise ZeroDivisionError
    return Response(status_code=204)


@router.get("/things")
async def listed(limit: Annotated[int, Query(ge=1)] = 3) -> Told:
    return Told(text=f"{limit} things")


@router.get("/other/{name}")
async def other(name: str) -> Told:
    return Told(text=f"any other: {name}")


@router.get("/other/first")
async def first() -> Told:
    return Told(text="hidden behind another")


def api() -> FastAPI:
    app = FastAPI(redirect_slashes=False)
    app.router.routes += router.routes
    app.state.sloplet = "the server"

    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, SlopletError)
        return Response(error.message, 404)

    app.add_exception_handler(SlopletError, failed)
    return app


def ask(app: Any, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[Any, ...]:
    """Status, body and type of what an ASGI application answers; the error that it raises instead."""
    path, _, query = path.partition("?")
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = [(b"content-type", b"application/json")] if body is not None else []
    given += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
        "headers": given, "server": ("localhost", 80), "scheme": "http", "root_path": "", SCOPE_KEY: "somebody",
    }  # fmt: skip
    with suppress(RequestInvalid):  # as the guard does, which lets nothing else pass
        if content:
            scope[BODY_KEY] = parse_json(content)
    sent: list[Any] = []
    coming = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        return coming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    try:
        asyncio.run(app(scope, receive, send))
    except ZeroDivisionError as error:
        return (type(error),)
    kind = dict(sent[0]["headers"]).get(b"content-type")
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:]), kind


CASES: list[tuple[Any, ...]] = [
    ("POST", "/v1/things", {"number": 2}),
    ("POST", "/v1/things", {"number": 2}, {"idempotency-key": "abc"}),
    ("POST", "/v1/things", {"number": 2}, {"idempotency-key": "a b"}),
    ("POST", "/v1/things", {"number": 0}),
    ("POST", "/v1/things", {"number": "x"}),
    ("POST", "/v1/things", {}),
    ("POST", "/v1/things", b"[]"),
    ("POST", "/v1/things", b"{"),
    ("POST", "/v1/things", b""),
    ("POST", "/v1/things"),
    ("POST", "/v1/things?more=1", {"number": 1}),
    ("GET", "/v1/things/a"),
    ("GET", "/v1/things/ä b"),
    ("GET", "/v1/things/"),
    ("GET", "/v1/things//part/x"),
    ("GET", "/v1/things/a/part/b"),
    ("GET", "/v1/things/a/part/"),
    ("GET", "/v1/things/a/parts/b"),
    ("GET", "/v1/things/a/"),
    ("GET", "/v1/things"),
    ("GET", "/v1/things?limit=7"),
    ("GET", "/v1/things?limit=0"),
    ("PUT", "/v1/things/a"),
    ("DELETE", "/v1/things/a"),
    ("DELETE", "/v1/things/none"),
    ("DELETE", "/v1/things/bug"),
    ("GET", "/v1/other/first"),
    ("GET", "/v1/other/second"),
    ("GET", "/"),
    ("GET", ""),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]} {case[1]} {case[2:]}" for case in CASES])
def test_the_same_answer_either_way(case: tuple[Any, ...]) -> None:
    assert ask(Lean(api()), *case) == ask(api(), *case)


def test_what_is_plain_goes_the_short_way() -> None:
    """Else it would be for nothing."""
    app = api()
    lean = Lean(app)

    async def long_way(*arguments: Any) -> None:
        raise AssertionError("this is not the short way")

    lean._api = long_way  # type: ignore[assignment]
    long_way.state = app.state  # type: ignore[attr-defined]
    for method, path, body, status in (
        ("POST", "/v1/things", {"number": 2}, 201),
        ("GET", "/v1/things/a", None, 200),
        ("GET", "/v1/things/a/part/b", None, 200),
        ("DELETE", "/v1/things/a", None, 204),
        ("DELETE", "/v1/things/none", None, 404),
    ):
        assert ask(lean, method, path, body)[0] == status
    for method, path in (("GET", "/v1/things"), ("GET", "/v1/other/first"), ("POST", "/v1/things")):
        with pytest.raises(AssertionError, match="short way"):
            ask(lean, method, path)
