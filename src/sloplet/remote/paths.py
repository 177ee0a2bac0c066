"""Paths of a server's routes, and its answers as values. Pure."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from ..controller import SandboxInfo, Snapshot
from ..errors import SandboxNotFound, ServerError, SnapshotNotFound
from ..spec import NAME_RE


def box_path(ref: str, *more: str) -> str:
    """The path of a sandbox's route. SandboxNotFound for what cannot be one."""
    if not isinstance(ref, str) or not NAME_RE.match(ref):
        raise SandboxNotFound(f"there is no sandbox {str(ref)[:80]!r}", hint="see `sloplet ls`")
    return "/".join(["/v1/sandboxes", quote(ref, safe=""), *more])


def snapshot_path(ref: str) -> str:
    """The path of a saved state's route. SnapshotNotFound for what cannot be one."""
    if not isinstance(ref, str) or not NAME_RE.match(ref):
        raise SnapshotNotFound(f"there is no snapshot {str(ref)[:80]!r}", hint="see `sloplet snapshots`")
    return f"/v1/snapshots/{quote(ref, safe='')}"


def info_of(data: Any) -> SandboxInfo:
    """What the server said of a sandbox."""
    try:
        return SandboxInfo.from_dict({key: value for key, value in data.items() if key != "tenant"})
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _strange(error) from error


def snapshot_of(data: Any) -> Snapshot:
    """What the server said of a saved state."""
    try:
        return Snapshot.from_dict(data)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _strange(error) from error


def _strange(error: Exception) -> ServerError:
    return ServerError(
        f"the server's answer is not understood: {type(error).__name__}", hint="is it of another version?"
    )
