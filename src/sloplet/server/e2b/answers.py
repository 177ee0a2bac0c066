"""What E2B's clients are answered: JSON documents, and errors in the shapes that they read. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ... import errors
from ...errors import RequestInvalid, SlopletError
from ..problems import headers_of, status_of, told

#: In the scope: how an error is told to who asked; a problem document if it is not there.
SPEAKING = "sloplet.speaking"
#: In the scope: the sandbox that somebody asks for who has shown no token, and need not.
STRANGER = "sloplet.stranger"
Told = tuple[int, dict[str, str], bytes]
Speaker = Callable[[SlopletError], Told]

JSON = "application/json"
_CODES = {
    400: "invalid_argument", 401: "unauthenticated", 403: "permission_denied", 404: "not_found", 409: "already_exists",
    413: "resource_exhausted", 415: "invalid_argument", 429: "resource_exhausted", 499: "canceled",
    501: "unimplemented", 502: "unavailable", 503: "unavailable", 504: "deadline_exceeded", 507: "resource_exhausted",
}  # fmt: skip
_STATUS_OF_CODE = {
    "canceled": 499, "unknown": 500, "invalid_argument": 400, "deadline_exceeded": 504, "not_found": 404,
    "already_exists": 409, "permission_denied": 403, "resource_exhausted": 429, "failed_precondition": 400,
    "aborted": 409, "out_of_range": 400, "unimplemented": 501, "internal": 500, "unavailable": 503, "data_loss": 500,
    "unauthenticated": 401,
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """``body`` is a document; None: there is none."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


class Refused(RequestInvalid):
    """An error with a status, a text and, for Connect, a code of E2B's own."""

    code = ""
    error_code = ""  #: of the control plane's documents, where clients look for one


def refused(status: int, message: str, *, code: str = "", error_code: str = "") -> Refused:
    error = Refused(message)
    error.status, error.code, error.error_code = status, code, error_code
    return error


def rpc_error(code: str, message: str) -> Refused:
    """Of a Connect call."""
    return refused(_STATUS_OF_CODE[code], message, code=code)


class Gone(RequestInvalid):
    """There is no sandbox that answers: it was ended, or sleeps. Clients know it by these words."""

    status = 502
    sandbox = ""


def gone(sandbox: str, message: str = "The sandbox was not found") -> Gone:
    error = Gone(message)
    error.sandbox = sandbox
    return error


def text_of(error: SlopletError) -> str:
    """One sentence of it, as it may leave the machine."""
    if isinstance(error, Refused):
        return error.message[:4000]  # the facade's own words: paths in them are a sandbox's
    data = told(error)
    hint = data.get("hint")
    return str(data["message"])[:4000] + (f" ({str(hint)[:1000]})" if hint else "")


def status_for(error: SlopletError) -> int:
    """E2B knows no 422: what makes no sense is 400."""
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, errors.UnsupportedOperation):
        return 400
    if isinstance(error, errors.EngineUnavailable):
        return 503  # the operator's matter, and no fault of who asks
    status = status_of(error)
    return 400 if status == 422 else status


def _headers(error: SlopletError, status: int) -> dict[str, str]:
    again = (status == 503 and not isinstance(error, errors.EngineUnavailable)) or isinstance(error, errors.RateLimited)
    return {**headers_of(error), "content-type": JSON, "should-retry": "true" if again else "false"}


def speak_api(error: SlopletError) -> Told:
    """``{"code": 404, "message": ...}``"""
    status = status_for(error)
    document: dict[str, Any] = {"code": status, "message": text_of(error)}
    if isinstance(error, Refused) and error.error_code:
        document["error_code"] = error.error_code
    return status, _headers(error, status), _dump(document)


def speak_plain(error: SlopletError) -> Told:
    """The same of envd's ``/files``, and of a sandbox that is not there."""
    if isinstance(error, Gone):
        document = {"sandboxId": error.sandbox, "message": error.message, "code": 502}
        return 502, {"content-type": JSON, "should-retry": "false"}, _dump(document)
    return speak_api(error)


def speak_rpc(error: SlopletError) -> Told:
    """``{"code": "not_found", "message": ...}``: Connect's unary errors."""
    if isinstance(error, Gone):
        return speak_plain(error)
    document = connect_error(error)
    return _STATUS_OF_CODE[document["code"]], {"content-type": JSON}, _dump(document)


def connect_error(error: SlopletError) -> dict[str, str]:
    """What the last frame of a stream says of it."""
    code = error.code if isinstance(error, Refused) and error.code else _CODES.get(status_for(error), "internal")
    return {"code": code, "message": text_of(error)}


def _dump(document: Any) -> bytes:
    return json.dumps(document).encode()


def dump(document: Any) -> bytes:
    """JSON without spaces, in UTF-8."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
