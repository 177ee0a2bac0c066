"""Tokens of the data plane. Each is a keyed digest of what it opens, so nothing is stored and none can be guessed; the
same sandbox always has the same one, as clients expect that come back to it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Mapping
from functools import lru_cache

from ...fs import FOLDER, write_atomic
from ...state.home import Home
from .answers import refused

_NAME = "e2b.key"
_SIZE = 32


class Tokens:
    """``purpose`` is one word: ``envd``, ``traffic``, ``volume``."""

    def __init__(self, home: Home) -> None:
        self._key = _read_or_make(home)
        self.of = lru_cache(maxsize=16384)(self._of)

    def _of(self, purpose: str, subject: str) -> str:
        """The token that opens it."""
        return hmac.new(self._key, f"{purpose}\0{subject}".encode(), hashlib.sha256).hexdigest()

    def key(self, purpose: str) -> bytes:
        """A key of 32 bytes for something else than tokens."""
        return hmac.new(self._key, f"key\0{purpose}".encode(), hashlib.sha256).digest()

    def opens(self, purpose: str, subject: str, shown: str) -> bool:
        """In constant time."""
        return hmac.compare_digest(self.of(purpose, subject).encode(), shown.encode("utf-8", "replace"))


def signature(path: str, operation: str, user: str, token: str, expires: str | None) -> str:
    """Of a signed URL, as clients make it. ``operation``: read, write."""
    text = ":".join([path, operation, user, token, *([expires] if expires is not None else [])])
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return "v1_" + base64.b64encode(digest).decode().rstrip("=")


def _read_or_make(home: Home) -> bytes:
    folder = os.open(home.path / "server", FOLDER)
    try:
        try:
            fd = os.open(_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            key = secrets.token_bytes(_SIZE)
            write_atomic(folder, _NAME, key)
            return key
        with os.fdopen(fd, "rb") as file:
            key = file.read(_SIZE + 1)
        if len(key) != _SIZE:  # a torn disk: sandboxes' tokens change, and secrets have to be set anew
            key = secrets.token_bytes(_SIZE)
            write_atomic(folder, _NAME, key)
        return key
    finally:
        os.close(folder)


def is_signed(query: Mapping[str, str], operation: str, token: str) -> bool:
    """Whether the signature in a query was made with this token."""
    expires = query.get("signature_expiration")
    made = signature(query.get("path", ""), operation, query.get("username", ""), token, expires)
    return hmac.compare_digest(made.encode(), query.get("signature", "").encode("utf-8", "replace"))


def check_signed(query: Mapping[str, str], operation: str, token: str) -> None:
    """refused (401), in the words that clients know."""
    if not query.get("signature"):
        raise refused(401, "missing signature query parameter")
    if not is_signed(query, operation, token):
        raise refused(401, "invalid signature")
    expires = query.get("signature_expiration")
    if expires is not None:
        if not expires.isascii() or not expires.isdecimal() or len(expires) > 15:
            raise refused(401, "invalid signature expiration")
        if int(expires) < time.time():
            raise refused(401, "signature is already expired")
