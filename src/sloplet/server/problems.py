"""Errors as HTTP tells them: RFC 9457 problem documents of the one error tree, without a path of the host's."""

from __future__ import annotations

import errno
import math
import os
import re
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import SlopletError

MEDIA_TYPE = "application/problem+json"

#: The first class that fits decides.
_STATUS: tuple[tuple[type[SlopletError], int], ...] = (
    (errors.KeyRefused, 401),
    (errors.NotAllowed, 403),
    (errors.QuotaExceeded, 429),
    (errors.RateLimited, 429),
    (errors.ServerBusy, 503),
    (errors.TenantNotFound, 404),
    (errors.ServerUnreachable, 502),
    (errors.UnknownEngine, 422),
    (errors.EngineUnavailable, 422),
    (errors.ControlUnavailable, 422),
    (errors.SpecError, 422),
    (errors.RecipeInvalid, 422),
    (errors.ImageNotFound, 404),
    (errors.ImageInUse, 409),
    (errors.RegistryDenied, 502),
    (errors.RegistryUnavailable, 502),
    (errors.RegistryError, 502),
    (errors.ImageError, 422),
    (errors.BuildError, 422),
    (errors.VolumeNotFound, 404),
    (errors.VolumeExists, 409),
    (errors.VolumeInUse, 409),
    (errors.VolumeError, 422),
    (errors.ContextNotFound, 404),
    (errors.KernelError, 409),
    (errors.SandboxNotFound, 404),
    (errors.SandboxExists, 409),
    (errors.SandboxMismatch, 409),
    (errors.SandboxDead, 409),
    (errors.SandboxPaused, 409),
    (errors.PortUnavailable, 409),
    (errors.SandboxError, 409),
    (errors.SnapshotNotFound, 404),
    (errors.SnapshotExists, 409),
    (errors.SnapshotInUse, 409),
    (errors.SnapshotError, 422),
    (errors.ProcessNotFound, 404),
    (errors.ProcessLimit, 409),
    (errors.CommandNotFound, 422),
    (errors.CommandError, 422),
    (errors.FileMissing, 404),
    (errors.FileExists, 409),
    (errors.FileDenied, 403),
    (errors.DiskFull, 507),
    (errors.FileError, 422),
    (errors.SecretUnavailable, 409),
    (errors.NetworkError, 422),
    (errors.UnsupportedOperation, 422),
    (errors.StateBusy, 503),
    (errors.KeeperError, 503),
    (errors.EngineError, 503),
    (errors.StateError, 503),
    (errors.WireError, 503),
    (errors.StorageError, 502),
)


#: What is told about files and programs of a sandbox.
_INSIDE = (errors.FileError, errors.CommandError, errors.KernelError)


def status_of(error: SlopletError) -> int:
    if isinstance(error, errors.RequestInvalid):
        return error.status
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_for(error: BaseException) -> SlopletError | None:
    """What an error that is none of ours means, if that is known: the machine is short of something."""
    if isinstance(error, SlopletError):
        return error
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS) or isinstance(error, MemoryError):
        return errors.ServerBusy("the server's machine is short of resources", hint="try again later", retry_after=2)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return errors.StateUnwritable("the server's disk is full", hint="ask its operator")
    return None


def problem(error: SlopletError, request_id: str = "") -> dict[str, Any]:
    """The document. ``error`` is the class, of the tree in errors.py."""
    data = told(error)
    found = {
        "type": f"urn:sloplet:error:{data['error']}",
        "title": title_of(str(data["error"])),
        "status": status_of(error),
        "detail": str(data["message"])[:4000],
        "error": data["error"],
        "hint": None if data.get("hint") is None else str(data["hint"])[:4000],
    }
    if data.get("errno") is not None:
        found["errno"] = data["errno"]
    if data.get("retry_after") is not None:
        found["retry_after"] = data["retry_after"]
    if request_id:
        found["request_id"] = request_id
    return found


def told(error: SlopletError) -> dict[str, Any]:
    """``to_dict`` as it may leave the machine: without paths of the host's. Those of what happened inside a sandbox
    are the sandbox's own."""
    data = error.to_dict()
    if not isinstance(error, _INSIDE):
        data["message"] = without_paths(str(data["message"]))
        if data.get("hint") is not None:
            data["hint"] = without_paths(str(data["hint"]))
    return data


def headers_of(error: SlopletError) -> dict[str, str]:
    """What goes with a problem document: who is to come back, and when; who must say who he is."""
    if isinstance(error, errors.ServerBusy) and error.retry_after is not None:
        return {"retry-after": str(max(1, math.ceil(error.retry_after)))}
    if isinstance(error, (errors.StateBusy, errors.KeeperError, errors.ServerBusy)):
        return {"retry-after": "1"}
    if isinstance(error, errors.QuotaExceeded):
        return {"retry-after": "5"}
    return {"www-authenticate": "Bearer"} if isinstance(error, errors.KeyRefused) else {}


def title_of(name: str) -> str:
    """ "Sandbox not found" of SandboxNotFound."""
    words = re.findall(r"[A-Z][a-z0-9]*", name)
    return " ".join([words[0], *(word.lower() for word in words[1:])]) if words else name


@lru_cache(maxsize=1)
def _host_paths() -> re.Pattern[str]:
    from ..state.home import default_path

    found = {os.path.abspath(default_path()), os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sys.prefix}
    found |= {sys.base_prefix, tempfile.gettempdir(), str(Path.home()), "/proc/self", "/var/lib"}
    whole = sorted((re.escape(path) for path in found if len(path) > 3), key=len, reverse=True)
    return re.compile(rf"(?:{'|'.join(whole)})(?:/[^\s'\"`:,;)]*)?")


def without_paths(text: str) -> str:
    """The same without paths below folders of the host's that are nobody's business."""
    return _host_paths().sub("<host>", text)
