"""What the verbs about the server's keys share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..server.keys import Key, Keys


def open_keys() -> Keys:
    """Those of the server of this SLOPLET_HOME, running or not: it sees a change within a second."""
    from ..server.keys import Keys
    from ..state.home import Home

    return Keys(Home().open())


def key_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion. A prompt is no place for errors."""
    try:
        return [key.name for key in open_keys().list() if key.revoked_at is None and key.name.startswith(incomplete)]
    except Exception:
        return []


def tell(action: str, key: Key) -> None:
    """The audit log has it, as if the server had done it."""
    from ..server.audit import Audit
    from ..state.home import Home

    audit = Audit(Home())
    audit.record(action, tenant=key.tenant, address="local", detail=key.name)
    audit.close()
