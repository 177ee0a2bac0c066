"""Makes programs inside trust the sandbox's CA: the usual bundles, and the usual variables."""

from __future__ import annotations

from ..files import Opener


def env(*, single_user: bool) -> dict[str, str]:
    """Variables for HELLO; their paths exist once ``install`` is through. The sandbox's own settings win."""
    raise NotImplementedError


async def install(open_stream: Opener, ca_pem: bytes, *, single_user: bool) -> None:
    """Put the CA into every usual place that exists. Idempotent: also after a restore or a rollback.
    StartFailed, naming the file, if that cannot be done. ``single_user``: nobody inside is root."""
    raise NotImplementedError
