"""Every route of the server, as the application itself has them: a new one is in every table of the tests at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from starlette.routing import WebSocketRoute

from sloplet.server.guard import OPEN_PATHS
from sloplet.server.openapi import api

#: What is not in the OpenAPI document: itself, and MCP, which is a protocol of its own.
BESIDES = (("GET", "/openapi.json"), ("GET", "/mcp"), ("POST", "/mcp"), ("DELETE", "/mcp"))
METHODS = ("get", "put", "post", "patch", "delete", "head")


@dataclass(frozen=True, order=True)
class Route:
    method: str  #: GET, PUT, ..., or WS
    path: str  #: with {parameters}

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    def at(self, **values: str) -> str:
        """The path with its parameters filled in: "1" where none is given."""
        return re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: values.get(match[1], "1"), self.path)


@cache
def document() -> dict[str, Any]:
    return dict(_api().openapi())


@cache
def routes() -> tuple[Route, ...]:
    """All: those of the OpenAPI document, WebSockets, and what is mounted besides."""
    found = {
        Route(method.upper(), path)
        for path, item in document()["paths"].items()
        for method in item
        if method in METHODS
    }
    found |= {Route("WS", each.path) for each in _flat(_api().routes) if isinstance(each, WebSocketRoute)}
    found |= {Route(*each) for each in BESIDES}
    return tuple(sorted(found))


def keyed() -> tuple[Route, ...]:
    """Those that need a key."""
    return tuple(route for route in routes() if route.path not in OPEN_PATHS)


@cache
def _api() -> Any:
    return api()


def _flat(routes: Any) -> list[Any]:
    """FastAPI may keep included routers as routes of their own."""
    found = []
    for each in routes:
        below = getattr(each, "routes", None) or getattr(getattr(each, "original_router", None), "routes", None)
        found += _flat(below) if below else [each]
    return found
