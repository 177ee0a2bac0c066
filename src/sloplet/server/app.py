"""The ASGI application: routes behind the guard, errors as problem documents."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route, compile_path
from starlette.types import ASGIApp

from .. import __version__
from ..errors import RequestInvalid, ServerError, SlopletError
from .caller import SCOPE_KEY
from .documents import with_keys, with_problem_media
from .guard import ERROR_KEY, OPEN_PATHS, Guard
from .lean import Lean
from .logs import log
from .problems import MEDIA_TYPE, error_for, headers_of, problem, status_of
from .state import ServerState

if TYPE_CHECKING:
    from .mcp import McpDoor

#: Modules of ``routes`` with a ``router``, in the order of the OpenAPI document. Those that serve WebSockets too. What
#: is asked most often comes first: the router tries one after the other.
ROUTES: tuple[str, ...] = (
    "sandboxes", "exec", "files", "wire", "processes", "code", "system", "admin", "archives", "attributes", "builds",
    "events", "history", "images", "network", "ports", "secrets", "ssh_keys", "volumes", "watch",
)  # fmt: skip


def make_app(server: ServerState) -> ASGIApp:
    """The whole server but for its socket. ``server.start()`` and ``aclose()`` are its lifespan."""
    return Guard(Lean(make_api(server)), server)


def make_api(server: ServerState) -> FastAPI:
    """The routes alone: what the OpenAPI document is made of."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.start()
        try:
            async with door.running() if door is not None else nullcontext():
                yield
        finally:
            await server.aclose()

    door = _mcp_door(server)
    app = FastAPI(
        title="Sloplet",
        version=__version__,
        summary="Sandboxes for code that nobody has read.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.sloplet = server
    for name in ROUTES:
        # Not include_router: it makes each route a second time, when the first request comes (half a second).
        app.router.routes += importlib.import_module(f".routes.{name}", __package__).router.routes
    if door is not None:
        app.router.routes.append(Route("/mcp", door))
    described = app.openapi
    app.openapi = lambda: with_keys(with_problem_media(described()), OPEN_PATHS)  # type: ignore[method-assign]
    app.add_exception_handler(SlopletError, _sloplet_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    return app


def _mcp_door(server: ServerState) -> McpDoor | None:
    """None where the operator does not want it, or the package is not here."""
    if not server.settings.mcp:
        return None
    if importlib.util.find_spec("mcp") is None:
        log.info("there is no /mcp: `pip install 'sloplet[mcp]'` adds it, --no-mcp says that it is not wanted")
        return None
    from .mcp import McpDoor

    return McpDoor(server)


def answer(request: Request, error: SlopletError, status: int | None = None) -> Response:
    caller = request.scope.get(SCOPE_KEY)
    request.scope[ERROR_KEY] = type(error).__name__
    document: dict[str, Any] = problem(error, caller.request_id if caller is not None else "")
    if status is not None:
        document["status"] = status
    return Response(json.dumps(document), status or status_of(error), headers_of(error), MEDIA_TYPE)


async def _sloplet_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SlopletError)
    if status_of(error) >= 500:
        log.warning(f"answered {status_of(error)}: {error}", extra={"request_id": _request_id(request)})
    return answer(request, error)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = next(iter(error.errors()), {"loc": (), "msg": "it makes no sense"})
    where = ".".join(str(part) for part in first["loc"])
    return answer(request, RequestInvalid(f"{where}: {first['msg']}"[:500], hint="see /openapi.json"), 422)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: "there is no such route", 405: f"this route has no {request.method[:20]}"}.get(error.status_code)
    hint = None if text is None else "see /openapi.json and docs/http.md"
    found = answer(request, RequestInvalid(text or str(error.detail), hint=hint), error.status_code)
    found.headers.update(error.headers or {})
    if error.status_code == 405:
        found.headers["allow"] = ", ".join(_allowed(request))
    return found


def _allowed(request: Request) -> list[str]:
    """Every method that this path has: the router names those of the first route that fits it."""
    path, paths = request.url.path, request.app.openapi()["paths"]
    fitting = [path] if path in paths else [each for each in paths if compile_path(each)[0].match(path)]
    return sorted({method.upper() for each in fitting for method in paths[each]})


async def _bug(request: Request, error: Exception) -> Response:
    """The guard logs it, with its traceback."""
    return answer(
        request, error_for(error) or ServerError("the server failed", hint="its log tells more, by the request's id")
    )


def _request_id(request: Request) -> str:
    caller = request.scope.get(SCOPE_KEY)
    return caller.request_id if caller is not None else ""
