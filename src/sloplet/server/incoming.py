"""What a request's head and body must look like. Pure.

Bodies are JSON, read whole and small, but for a few routes that take a stream of bytes. Whoever adds one of those names
it here: everything else is refused with 415, so that a form or a script of some web page never reaches a route.
"""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Any

from ..errors import RequestInvalid

#: Routes whose body is a stream of bytes.
STREAMED: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("PUT", re.compile(r"/v1/sandboxes/[^/]+/files(/archive)?\Z")),
    ("POST", re.compile(r"/v1/sandboxes/import\Z")),
    ("POST", re.compile(r"/v1/images/(import|build)\Z")),
    ("PUT", re.compile(r"/volumecontent/[^/]+/file\Z")),
    ("PUT", re.compile(r"/templates/[^/]+/upload/[^/]+\Z")),
)
MAX_DEPTH = 64  #: of JSON
#: Values in one document, and names in one object. Nobody else is served while one is read and checked: 16 MiB of short
#: names would take many seconds.
MAX_VALUES, MAX_NAMES = 80_000, 6_000
_MANY = re.compile(r"/v1/sandboxes/[^/]+/applied\Z")  # of these there may be more: a name for each file
_MANY_VALUES, _MANY_NAMES = 220_000, 100_001
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_JSON = re.compile(r"application/json\s*(;\s*charset=\"?utf-8\"?\s*)?\Z", re.IGNORECASE)
_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9_.-]{1,253}))(?::[0-9]{1,5})?\Z", re.IGNORECASE)
#: Which of them a request gets was never agreed: two would be read differently by a proxy and by us.
SINGLE = frozenset(
    ("host", "origin", "authorization", "x-api-key", "content-length", "content-type", "content-encoding",
     "transfer-encoding", "sloplet-tenant", "sloplet-client", "idempotency-key", "e2b-sandbox-id", "e2b-sandbox-port",
     "x-access-token")
)  # fmt: skip


def headers_of(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """By small name; the last of several counts, where there may be several. RequestInvalid."""
    found: dict[str, str] = {}
    for name, value in raw:
        key = name.decode("latin-1").lower()
        if key in found and key in SINGLE:
            raise RequestInvalid(f"there are two {key} headers", hint="send one")
        found[key] = value.decode("latin-1")
    return found


def host_name(host: str | None) -> str:
    """The name or address in a Host header, without the port and brackets, in small letters. RequestInvalid."""
    match = _HOST.match(host or "")
    if match is None:
        raise RequestInvalid("the request names no host", hint="HTTP/1.1 with a Host header")
    if match[1] is not None:
        try:
            return str(ipaddress.IPv6Address(match[1]))
        except ValueError:
            raise RequestInvalid("the Host header is no address") from None
    return match[2].casefold().rstrip(".")


def is_streamed(method: str, path: str) -> bool:
    return any(method == which and pattern.match(path) for which, pattern in STREAMED)


def has_body(headers: dict[str, str]) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def content_length(headers: dict[str, str]) -> int | None:
    """None: it is not said. RequestInvalid."""
    text = headers.get("content-length")
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise RequestInvalid("Content-Length is no number")
    return int(text)


def check_type(headers: dict[str, str]) -> None:
    """RequestInvalid (415) unless the body says that it is JSON."""
    if not _JSON.match(headers.get("content-type", "")):
        raise _refusal(415, "the body must be JSON", "send it with `Content-Type: application/json`")
    if headers.get("content-encoding", "identity") != "identity":
        raise _refusal(415, "the body must not be compressed", "send it as it is")


def too_large(most: int) -> RequestInvalid:
    return _refusal(413, f"the body is longer than {most} bytes", "send less at a time")


def parse_json(body: bytes, path: str = "") -> Any:
    """RequestInvalid unless it is JSON in UTF-8, without a name twice in an object, not too deep, and not of too many
    parts for where it goes."""
    values, names = (_MANY_VALUES, _MANY_NAMES) if _MANY.match(path) else (MAX_VALUES, MAX_NAMES)
    check_parts(body, values)

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > names:
            raise ValueError(f"an object has more than {names} names")
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name is there twice in one object")
        return found

    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=made, parse_constant=_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # also of bytes that are no UTF-8, and of numbers that are too long
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)[:200]
        raise RequestInvalid(f"the body is not JSON: {reason}") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return value


def check_parts(text: bytes, most: int = MAX_VALUES) -> None:
    """RequestInvalid (413) if a document has more values than ``most``. Before it is read; commas in texts are none."""
    if _parts(text) <= most:
        return
    at = parts = texts = 0
    for match in _STRINGS.finditer(text):
        parts += _parts(text[at : match.start()])
        texts, at = texts + 1, match.end()
        if parts > most or texts > 2 * most:
            break
    else:
        parts += _parts(text[at:])
    if parts > most or texts > 2 * most:
        raise _refusal(413, f"the body has more than {most} values", "send less at a time")


def _parts(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += each
        level = [each for each in below if isinstance(each, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RequestInvalid:
    return RequestInvalid("the body is nested too deeply", hint=f"{MAX_DEPTH} levels at most")


def _refusal(status: int, message: str, hint: str) -> RequestInvalid:
    error = RequestInvalid(message, hint=hint)
    error.status = status
    return error
