"""The keeper: one background process per SLOPLET_HOME that holds named sandboxes, as tmux's server holds sessions.

``client`` is the Controller that programs use, ``launch`` starts the keeper, ``server`` is the keeper itself (the
Runtime class behind a Unix socket), ``relay`` ties a client's stream to a sandbox's. See docs/keeper.md.
This module holds what both sides must agree on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import KeeperError, SlopletError, from_dict
from ..state.home import Home
from ..wire.fields import Fields
from ..wire.schema import Tag

#: A JSON body up to this size travels in one frame, a larger one as DATA under flow control.
MAX_BODY = 32768
#: What a keeper answers on its way out. It has then done nothing, and the client asks the next one.
LEAVING = "the keeper is leaving"
#: In the FLAGS of a client's HELLO: what it asks for is asked for by others, so nothing counts as used by it.
ACTS_FOR_OTHERS = 1
#: Given by the keeper in its own CLOSE; an agent's CLOSE never carries BODY through a relay.
_EIO = 5


def keeper_lock(home: Home) -> Path:
    """Held by the keeper for its life: whoever has it may bind the socket."""
    return home.run / "keeper.lock"


def start_lock(home: Home) -> Path:
    """Held by a client while it starts the keeper, so that a crowd starts one."""
    return home.run / "keeper.start"


def log_path(home: Home) -> Path:
    return home.run / "keeper.log"


def unreachable(path: Path, error: OSError) -> KeeperError:
    return KeeperError(
        f"the keeper's socket {path} cannot be used: {error.strerror}", hint="whose is it, and which are its modes?"
    )


def to_body(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def from_body(data: bytes) -> Any:
    """What ``to_body`` made. KeeperError for anything else."""
    try:
        return json.loads(data)
    except ValueError:
        raise KeeperError("the keeper's answer is not understood", hint="is it of another version?") from None


def error_close(error: SlopletError) -> Fields:
    """The CLOSE that raises this very error on the other side."""
    data = error.to_dict()
    data["message"] = str(data["message"])[:4000]
    if data.get("hint") is not None:
        data["hint"] = str(data["hint"])[:4000]
    return Fields((Tag.ERRNO, _EIO), (Tag.BODY, to_body({"error": data})))


def error_of(close: Fields) -> SlopletError | None:
    """The error that ``error_close`` put there, if it did."""
    if Tag.BODY not in close or Tag.ERRNO not in close:
        return None
    body = from_body(close.raw(Tag.BODY))
    data = body.get("error") if isinstance(body, dict) else None
    return from_dict(data) if isinstance(data, dict) else KeeperError("the keeper failed without saying why")
