"""Keys of this server in the form that E2B's older clients insist on: ``e2b_`` and hexadecimal digits. Pure."""

from __future__ import annotations

PREFIX = "e2b_"


def to_e2b(key: str) -> str:
    """The same key, as E2B_API_KEY."""
    return PREFIX + key.encode().hex()


def from_e2b(text: str) -> str:
    """A key as it was made; "" for what is none."""
    try:
        return bytes.fromhex(text[len(PREFIX) :]).decode("ascii")
    except ValueError:
        return ""
