"""A certificate authority per sandbox: its key is derived, never stored, so no snapshot can hold it."""

from __future__ import annotations

import ssl
from pathlib import Path


def master_key(home: Path) -> bytes:
    """The 32 bytes of ``home/ca/master.key``; made if there are none, by one of those who try at once."""
    raise NotImplementedError


class Authority:
    """The CA of one sandbox. The same master key and id give the same key and certificate, on every day."""

    def __init__(self, master: bytes, ca_id: str) -> None:
        raise NotImplementedError

    @property
    def ca_pem(self) -> bytes:
        """The certificate to trust."""
        raise NotImplementedError

    def leaf(self, name: str) -> ssl.SSLContext:
        """A server's context with a certificate for that name or address; kept for the next time."""
        raise NotImplementedError
