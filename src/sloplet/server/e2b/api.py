"""The control plane: E2B's paths. Small on purpose: words of a path, a handler, a document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

from starlette.types import Receive, Scope, Send

from ..caller import BODY_KEY, SCOPE_KEY, Caller
from .answers import Answer, dump, refused

if TYPE_CHECKING:
    from .door import Facade

_VARIABLE = ""


@dataclass
class Asked:
    """A request to the control plane. ``path`` has its variables, ``query`` the last of each name."""

    facade: Facade
    caller: Caller
    path: dict[str, str]
    query: dict[str, str]
    body: dict[str, Any]
    scope: Scope
    receive: Receive
    send: Send

    @property
    def host(self) -> str:
        return next((value.decode("latin-1") for name, value in self.scope["headers"] if name == b"host"), "")

    def header(self, wanted: str) -> str | None:
        name = wanted.encode()
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), None)


#: None: the handler has answered by itself.
Handler = Callable[[Asked], Awaitable[Answer | None]]


@dataclass(frozen=True)
class Route:
    method: str
    path: str  #: /sandboxes/{id}
    handler: Handler


class Api:
    def __init__(self, facade: Facade, routes: Iterable[Route]) -> None:
        self._facade = facade
        self.routes = tuple(routes)
        self._by_size: dict[int, list[tuple[tuple[str, ...], Route]]] = {}
        for route in self.routes:
            words = tuple(_VARIABLE if word.startswith("{") else word for word in route.path.split("/")[1:])
            self._by_size.setdefault(len(words), []).append((words, route))
        self._first = {words[0] for many in self._by_size.values() for words, _ in many} | {"v2", "v3"}

    def owns(self, path: str) -> bool:
        """Whether a path is E2B's."""
        return path[1:].partition("/")[0] in self._first

    def find(self, scope: Scope) -> tuple[Route, dict[str, str]]:
        """The route of a request, and the variables in its path. By the raw path: a slash in a variable is %2F."""
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        words = tuple(unquote(word) for word in raw.decode("latin-1").partition("?")[0].split("/")[1:])
        if words and words[-1] == "" and len(words) > 1:
            words = words[:-1]
        fitting = [
            (known, route) for known, route in self._by_size.get(len(words), ())
            if all(want in (_VARIABLE, word) for want, word in zip(known, words, strict=True))
        ]  # fmt: skip
        # What is said by name comes before what fits by place.
        fitting.sort(key=lambda item: sum(word == _VARIABLE for word in item[0]))
        for known, route in fitting:
            if route.method == scope["method"]:
                names = [word[1:-1] for word in route.path.split("/")[1:] if word.startswith("{")]
                values = [word for want, word in zip(known, words, strict=True) if want == _VARIABLE]
                return route, dict(zip(names, values, strict=True))
        if fitting:
            raise refused(405, "method not allowed")
        raise refused(404, "there is no such path")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, variables = self.find(scope)
        scope["route"], scope["endpoint"] = route, route.handler
        scope["path_params"] = {"box": variables.get("sandbox", "")}
        body = scope.get(BODY_KEY)
        if body is not None and not isinstance(body, dict):
            raise refused(400, "the body must be an object")
        query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        asked = Asked(self._facade, scope[SCOPE_KEY], variables, query, body or {}, scope, receive, send)
        answer = await route.handler(asked)
        if answer is None:
            return
        data = b"" if answer.body is None else dump(answer.body)
        headers = [(name.encode(), value.encode("latin-1")) for name, value in answer.headers.items()]
        if answer.body is not None:
            headers.append((b"content-type", b"application/json"))
        if answer.status != 204:
            headers.append((b"content-length", str(len(data)).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": data})


# -- what bodies hold --------------------------------------------------------------------------------------------------


def text(body: dict[str, Any], name: str, *, most: int = 4096) -> str:
    """One that must be there."""
    found = body.get(name)
    if not isinstance(found, str) or not found or len(found) > most:
        raise refused(400, f"{name} is missing, or no text")
    return found


def optional(body: dict[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """null is as good as nothing."""
    found = body.get(name)
    if found is None:
        return default
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise refused(400, f"{name} is of the wrong type")
    return found


def texts(body: dict[str, Any], name: str, *, most: int = 1000, longest: int = 1024) -> list[str]:
    found = optional(body, name, list, [])
    if len(found) > most or not all(isinstance(each, str) and len(each) <= longest for each in found):
        raise refused(400, f"{name} is a list of at most {most} texts of at most {longest} characters")
    return list(found)


def mapping(body: dict[str, Any], name: str, *, most: int = 64 << 10) -> dict[str, str]:
    """``most``: characters in all."""
    found = optional(body, name, dict, {})
    if not all(isinstance(each, str) for each in found.values()):
        raise refused(400, f"{name} has texts for values")
    if sum(len(key) + len(value) for key, value in found.items()) > most:
        raise refused(400, f"{name} is longer than {most} characters")
    try:
        "".join(part for pair in found.items() for part in pair).encode()
    except UnicodeEncodeError:
        raise refused(400, f"{name} is not valid Unicode text") from None
    return dict(found)
