"""Every error that Sloplet raises, in one tree.

::

    SlopletError
    ├── SpecError (ValueError)            what was asked for makes no sense; nothing was made
    │   ├── InvalidName                   a sandbox name that is not allowed
    │   └── InvalidLimit                  a limit that is no number, zero, negative, above the host
    ├── EngineError                       the isolation engine could not do it
    │   ├── UnknownEngine (LookupError)   no engine of that name
    │   ├── EngineUnavailable             this machine lacks what the engine needs
    │   ├── ControlUnavailable            a control that was asked for cannot be enforced here
    │   ├── StartFailed                   the sandbox did not come up
    │   └── SaveFailed                    its state could not be written; it runs on
    ├── ImageError                        the image cannot be used
    │   ├── ImageNotFound (LookupError)
    │   ├── ImageInvalid                  damaged, hostile or over a limit
    │   │   └── ImagePlatform             made for another processor or system
    │   ├── ImageInUse                    sandboxes or saved states need it
    │   └── RegistryError                 a registry did not do it
    │       ├── RegistryDenied            it wants (other) credentials
    │       └── RegistryUnavailable       not reached, too slow, too busy, or failing
    ├── BuildError                        an image was not built
    │   ├── RecipeInvalid (ValueError)    a Dockerfile or cloud-config that makes no sense; tells the line
    │   └── BuildFailed                   a step of it failed
    ├── VolumeError                       about a volume
    │   ├── VolumeNotFound (LookupError)
    │   ├── VolumeExists                  the name is taken
    │   └── VolumeInUse                   a sandbox has it
    ├── StorageError                      an S3 service did not do it
    ├── KernelError                       the process that runs code cells ended, or cannot start
    │   └── ContextNotFound (LookupError)
    ├── SandboxError                      about one sandbox
    │   ├── SandboxNotFound (LookupError)
    │   ├── SandboxExists                 the name is taken
    │   ├── SandboxMismatch               it exists with other settings than asked for now
    │   ├── SandboxDead                   it ended, or its engine died
    │   ├── SandboxPaused                 it was paused while this was going on
    │   ├── PortUnavailable               a port of this machine cannot be listened on
    │   └── SandboxClosed                 this object was closed
    ├── SnapshotError                     about a saved state: a snapshot, a template, an archive
    │   ├── SnapshotNotFound (LookupError)
    │   ├── SnapshotExists                the name is taken
    │   ├── SnapshotInUse                 others descend from it
    │   ├── SnapshotDamaged               truncated, changed, or not what its checksum says
    │   └── SnapshotIncompatible          made by another version, engine, processor or image
    ├── CommandError                      about one command
    │   ├── CommandFailed                 check=True and the exit code was not 0
    │   ├── CommandTimeout                check=True and the time was up
    │   ├── CommandNotFound (FileNotFoundError)
    │   ├── CommandNotExecutable (PermissionError)
    │   ├── WorkdirInvalid                the working directory does not exist or is refused
    │   ├── UserNotFound (LookupError)    no such user in the sandbox
    │   ├── ProcessNotFound (LookupError)
    │   └── ProcessLimit                  the sandbox's process limit is reached
    ├── FileError (OSError)               a file operation failed inside the sandbox
    │   ├── FileMissing (FileNotFoundError)
    │   ├── FileExists (FileExistsError)
    │   ├── FileDenied (PermissionError)
    │   ├── FileIsDirectory (IsADirectoryError)
    │   ├── FileNotDirectory (NotADirectoryError)
    │   └── DiskFull                      the sandbox's disk limit is reached
    ├── WireError                         the stream to the agent
    │   ├── ProtocolError                 the other side broke the protocol; the connection was dropped
    │   └── WireClosed                    the stream ended
    ├── StateError                        SLOPLET_HOME
    │   ├── StateUnwritable               read-only, full, or not ours
    │   ├── StateCorrupt                  damaged, or written by another version
    │   └── StateBusy                     another process holds what is needed
    ├── NetworkError                      about what a sandbox may reach, or what reaches it
    │   └── SecretUnavailable             a secret's value cannot be read here
    ├── KeeperError                       the background keeper cannot be reached or started
    ├── ServerError                       a Sloplet server did not do it
    │   ├── KeyRefused                    no key, or one that is unknown, expired or revoked
    │   ├── NotAllowed                    this key may not do that, or the operator does not allow it
    │   ├── QuotaExceeded                 this key has as much as it may have
    │   ├── ServerBusy                    it has too much to do: try again after ``retry_after`` seconds
    │   │   └── RateLimited               this key asks too fast, or for too much at once
    │   ├── RequestInvalid (ValueError)   a request that makes no sense
    │   ├── TenantNotFound (LookupError)
    │   └── ServerUnreachable             it cannot be reached, or the connection to it was lost
    └── UnsupportedOperation              this engine cannot do that; the message names one that can

A command that fails is a *result* (``exit_code``, ``timed_out``); a sandbox that fails is an
*exception*. Every message says what happened, why, and what to do next. Errors cross process
borders (the keeper, HTTP) by ``to_dict``/``from_dict``: by the class name, from this tree only.
"""

from __future__ import annotations

import errno as _errno
from typing import Any


class SlopletError(Exception):
    """Base of all errors of this library. ``hint`` says what to do next, if that helps."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def to_dict(self) -> dict[str, Any]:
        return {"error": type(self).__name__, "message": self.message, "hint": self.hint}


class SpecError(SlopletError, ValueError):
    pass


class InvalidName(SpecError):
    pass


class InvalidLimit(SpecError):
    pass


class EngineError(SlopletError):
    pass


class UnknownEngine(EngineError, LookupError):
    pass


class EngineUnavailable(EngineError):
    pass


class ControlUnavailable(EngineError):
    pass


class StartFailed(EngineError):
    pass


class SaveFailed(EngineError):
    pass


class ImageError(SlopletError):
    pass


class ImageNotFound(ImageError, LookupError):
    pass


class ImageInvalid(ImageError):
    pass


class ImagePlatform(ImageInvalid):
    pass


class ImageInUse(ImageError):
    pass


class RegistryError(ImageError):
    pass


class RegistryDenied(RegistryError):
    pass


class RegistryUnavailable(RegistryError):
    pass


class BuildError(SlopletError):
    pass


class RecipeInvalid(BuildError, ValueError):
    pass


class BuildFailed(BuildError):
    exit_code: int | None = None  #: of the command that failed, if it was one


class VolumeError(SlopletError):
    pass


class VolumeNotFound(VolumeError, LookupError):
    pass


class VolumeExists(VolumeError):
    pass


class VolumeInUse(VolumeError):
    pass


class StorageError(SlopletError):
    pass


class KernelError(SlopletError):
    pass


class ContextNotFound(KernelError, LookupError):
    pass


class SandboxError(SlopletError):
    pass


class SandboxNotFound(SandboxError, LookupError):
    pass


class SandboxExists(SandboxError):
    pass


class SandboxMismatch(SandboxError):
    pass


class SandboxDead(SandboxError):
    pass


class SandboxClosed(SandboxError):
    pass


class SandboxPaused(SandboxError):
    pass


class PortUnavailable(SandboxError):
    pass


class SnapshotError(SlopletError):
    pass


class SnapshotNotFound(SnapshotError, LookupError):
    pass


class SnapshotExists(SnapshotError):
    pass


class SnapshotInUse(SnapshotError):
    pass


class SnapshotDamaged(SnapshotError):
    pass


class SnapshotIncompatible(SnapshotError):
    pass


class CommandError(SlopletError):
    pass


class CommandFailed(CommandError):
    """``check=True`` and the command did not end with 0. ``result`` holds what it printed."""

    result: Any = None


class CommandTimeout(CommandFailed):
    pass


class CommandNotFound(CommandError, FileNotFoundError):
    pass


class CommandNotExecutable(CommandError, PermissionError):
    pass


class WorkdirInvalid(CommandError):
    pass


class UserNotFound(CommandError, LookupError):
    pass


class ProcessNotFound(CommandError, LookupError):
    pass


class ProcessLimit(CommandError):
    pass


class FileError(SlopletError, OSError):
    """A file operation failed inside the sandbox; ``errno`` is Linux's number."""

    def __init__(self, message: str, *, hint: str | None = None, errno: int | None = None) -> None:
        SlopletError.__init__(self, message, hint=hint)
        self.errno = errno

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "errno": self.errno}

    def __reduce__(self) -> tuple[Any, ...]:
        return from_dict, (self.to_dict(),)  # OSError's own would lose errno


class FileMissing(FileError, FileNotFoundError):
    pass


class FileExists(FileError, FileExistsError):
    pass


class FileDenied(FileError, PermissionError):
    pass


class FileIsDirectory(FileError, IsADirectoryError):
    pass


class FileNotDirectory(FileError, NotADirectoryError):
    pass


class DiskFull(FileError):
    pass


class WireError(SlopletError):
    pass


class ProtocolError(WireError):
    pass


class WireClosed(WireError):
    pass


class StateError(SlopletError):
    pass


class StateUnwritable(StateError):
    pass


class StateCorrupt(StateError):
    pass


class StateBusy(StateError):
    pass


class NetworkError(SlopletError):
    pass


class SecretUnavailable(NetworkError):
    pass


class KeeperError(SlopletError):
    pass


class ServerError(SlopletError):
    pass


class KeyRefused(ServerError):
    pass


class NotAllowed(ServerError):
    pass


class QuotaExceeded(ServerError):
    pass


class ServerBusy(ServerError):
    """Nothing was done. ``retry_after``: seconds after which it is worth another try; None: nobody knows."""

    def __init__(self, message: str, *, hint: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "retry_after": self.retry_after}


class RateLimited(ServerBusy):
    pass


class RequestInvalid(ServerError, ValueError):
    """``status``: of HTTP's answer."""

    status = 400


class TenantNotFound(ServerError, LookupError):
    pass


class ServerUnreachable(ServerError):
    pass


class UnsupportedOperation(SlopletError):
    pass


_FILE_ERRORS: dict[int, type[FileError]] = {
    _errno.ENOENT: FileMissing,
    _errno.EEXIST: FileExists,
    _errno.ENOTEMPTY: FileExists,
    _errno.EACCES: FileDenied,
    _errno.EPERM: FileDenied,
    _errno.EROFS: FileDenied,
    _errno.EISDIR: FileIsDirectory,
    _errno.ENOTDIR: FileNotDirectory,
    _errno.ENOSPC: DiskFull,
    _errno.EDQUOT: DiskFull,
}


def file_error(number: int, message: str) -> FileError:
    """The file error class for a Linux errno."""
    kind = _FILE_ERRORS.get(number, FileError)
    hint = "give the sandbox a larger disk=, or remove files" if kind is DiskFull else None
    return kind(message, hint=hint, errno=number)


def _tree(cls: type[SlopletError]) -> dict[str, type[SlopletError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found.update(_tree(sub))
    return found


def from_dict(data: dict[str, Any]) -> SlopletError:
    """Rebuild an error sent by another process. Unknown names become SlopletError."""
    cls = _tree(SlopletError).get(str(data.get("error")), SlopletError)
    message, hint = str(data.get("message", "unknown error")), data.get("hint")
    if issubclass(cls, FileError):
        number = data.get("errno")
        return cls(message, hint=hint, errno=number if isinstance(number, int) else None)
    if issubclass(cls, ServerBusy):
        seconds = data.get("retry_after")
        return cls(message, hint=hint, retry_after=seconds if isinstance(seconds, (int, float)) else None)
    return cls(message, hint=hint)
