"""A short way to routes whose arguments need no framework to be found: a path's words, a JSON body, who asks.

FastAPI and its layers take half a millisecond to look up the arguments of a request on a processor that has slept, and
a sandbox starts in ten. What is sound and plain is read here in a few lines; everything else, and everything that is
wrong, goes FastAPI's own way, so there is one document and one kind of error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, get_type_hints

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .caller import BODY_KEY, SCOPE_KEY, CallerOf, ServerOf
from .idempotency import IdempotencyKey, is_key

_Finder = Callable[[Request], Any]
_VARIABLE = "/"  # in a path's words: any word


class _NotPlain(Exception):
    """FastAPI knows what to make of it."""


class Lean:
    """In front of FastAPI's application. Errors are answered by its handlers; what they do not know is raised."""

    def __init__(self, api: FastAPI) -> None:
        self._api = api
        self._handlers: dict[Any, Any] = {
            kind: handler for kind, handler in api.exception_handlers.items() if kind is not Exception
        }
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._shapes: dict[tuple[str, int], list[tuple[int, ...]]] = {}  # where variables are, by method and length
        for plan in _plans(api.routes):
            self._plans[plan.key] = plan
            shapes = self._shapes.setdefault((plan.key[0], len(plan.key)), [])
            if plan.variables not in shapes:
                shapes.append(plan.variables)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._api(scope, receive, send)
            return
        body = scope.pop(BODY_KEY, _NONE)
        words = scope["path"].split("/")
        plan = self._find(scope["method"], words)
        if plan is None:
            await self._api(scope, receive, send)
            return
        scope["app"], scope["route"], scope["endpoint"] = self._api, plan.route, plan.route.endpoint
        scope["path_params"] = {name: words[at] for name, at in plan.names.items()}
        request = Request(scope, receive)
        try:
            values = plan.values(request, body)
        except _NotPlain:
            await self._api(scope, receive, send)
            return
        try:
            made = await plan.route.endpoint(**values)
        except Exception as error:
            handler = next((found for kind in type(error).__mro__ if (found := self._handlers.get(kind))), None)
            if handler is None:
                raise
            made = await handler(request, error)
        if not isinstance(made, Response):
            made = Response(made.model_dump_json(), plan.route.status_code or 200, media_type="application/json")
        await made(scope, receive, send)

    def _find(self, method: str, words: list[str]) -> _Plan | None:
        for variables in self._shapes.get((method, len(words)), ()):
            key = [method, *words[1:]]
            for at in variables:
                key[at] = words[at] and _VARIABLE  # an empty word is none
            if plan := self._plans.get(tuple(key)):
                return plan
        return None


class _Plan:
    """How to find each argument of a route."""

    def __init__(
        self, route: APIRoute, key: tuple[str, ...], found: dict[str, _Finder], body: tuple[str, type[BaseModel]] | None
    ) -> None:
        self.route = route
        self.key = key  #: its method and its path's words
        self.variables = tuple(at for at, word in enumerate(key) if word == _VARIABLE)
        self.names = {word[1:-1]: at for at, word in enumerate(route.path.split("/")) if word.startswith("{")}
        self._found = found
        self._body = body

    def values(self, request: Request, body: Any) -> dict[str, Any]:
        """``body``: what the guard read of it."""
        values = {name: find(request) for name, find in self._found.items()}
        if self._body is not None:
            name, model = self._body
            try:
                values[name] = model.model_validate(body)
            except ValidationError:
                raise _NotPlain from None
        return values


def _plans(routes: Iterable[Any]) -> list[_Plan]:
    """Of those routes that are plain, and that no other could be meant by the same words."""
    keys = [(method, *_words(route.path)) for route in routes for method in getattr(route, "methods", None) or ()]
    plans = [plan for route in routes if isinstance(route, APIRoute) and (plan := _plan(route)) is not None]
    return [plan for plan in plans if sum(_alike(plan.key, key) for key in keys) == 1]


def _words(path: str) -> list[str]:
    return [_VARIABLE if word.startswith("{") else word for word in path.split("/")[1:]]


def _alike(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return len(one) == len(other) and all(a == b or _VARIABLE in (a, b) for a, b in zip(one, other, strict=True))


def _plan(route: APIRoute) -> _Plan | None:
    """None: not by simple means."""
    hints = get_type_hints(route.endpoint, localns={"ServerState": object}, include_extras=True)  # ServerOf's
    made = hints.get("return")
    plain = made is Response or (isinstance(made, type) and issubclass(made, BaseModel))
    methods = tuple(route.methods or ())
    if not plain or len(methods) != 1 or ":" in route.path:
        return None
    found: dict[str, _Finder] = {}
    body: tuple[str, type[BaseModel]] | None = None
    for name, parameter in inspect.signature(route.endpoint).parameters.items():
        hint = hints[name]
        if finder := _finder(hint):
            found[name] = finder
        elif hint is str and f"/{{{name}}}" in route.path:
            found[name] = _word(name)
        elif isinstance(hint, type) and issubclass(hint, BaseModel) and body is None and parameter.default is _NONE:
            body = (name, hint)
        else:
            return None
    return _Plan(route, (*methods, *_words(route.path)), found, body)


def _word(name: str) -> _Finder:
    return lambda request: request.path_params[name]


def _key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not is_key(key):
        raise _NotPlain
    return key


def _finder(hint: Any) -> _Finder | None:
    if hint is Request:
        return lambda request: request
    said = getattr(hint, "__metadata__", (None,))[0]  # what FastAPI is told of it
    if said is CallerOf.__metadata__[0]:  # type: ignore[attr-defined]
        return lambda request: request.scope[SCOPE_KEY]
    if said is ServerOf.__metadata__[0]:  # type: ignore[attr-defined]
        return lambda request: request.app.state.sloplet
    return _key if said is IdempotencyKey.__metadata__[0] else None  # type: ignore[attr-defined]


_NONE = inspect.Parameter.empty
