"""A server's problem documents as errors of the one tree: what ``server/problems.py`` made of them, the way back."""

from __future__ import annotations

from typing import Any

from ..errors import ServerError, ServerUnreachable, SlopletError, from_dict


def error_of(document: Any, status: int = 500) -> SlopletError:
    """What the document was made of. What is none becomes ServerError."""
    if not isinstance(document, dict) or not isinstance(document.get("error"), str):
        if status in (502, 504):  # a proxy in between
            return ServerUnreachable(f"the server is not reached by what stands before it (HTTP status {status})")
        return ServerError(f"the server answered {status} without saying why", hint="is it a Sloplet server?")
    hint = document.get("hint")
    return from_dict({
        "error": document["error"], "message": str(document.get("detail", "")),
        "hint": hint if isinstance(hint, str) else None, "errno": document.get("errno"),
    })  # fmt: skip
