"""One request to the data plane of one sandbox: what is asked, of whom, as which user."""

from __future__ import annotations

import base64
import binascii
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.types import Receive, Scope, Send

from ...controller import Stream
from ...errors import (
    FileError,
    KeeperError,
    SandboxDead,
    SandboxError,
    SandboxNotFound,
    SandboxPaused,
    SlopletError,
)
from ...wire.fields import Fields
from .answers import gone, refused
from .records import Record

if TYPE_CHECKING:
    from ..tenants import Tenant
    from .door import Facade

_GONE = (SandboxNotFound, SandboxDead, SandboxPaused, KeeperError)


class Label(NamedTuple):
    """What a request is called in books."""

    path: str


@dataclass
class Call:
    """``headers`` by small names; ``query`` by names, the last of each."""

    facade: Facade
    record: Record
    tenant: Tenant
    scope: Scope
    receive: Receive
    send: Send
    headers: dict[str, str]
    query: dict[str, str]

    @property
    def user(self) -> str | None:
        """Whom the call is made for, by Basic authorization without a password; None: the sandbox's own user."""
        kind, _, text = self.headers.get("authorization", "").partition(" ")
        if kind.casefold() != "basic":
            return None
        try:
            name = base64.b64decode(text.strip(), validate=True).decode("utf-8").partition(":")[0]
        except (binascii.Error, ValueError):
            raise refused(401, "invalid authorization header", code="unauthenticated") from None
        return name or None

    async def open(self, fields: Fields, *, wake: bool = True) -> Stream:
        """An operation of the wire. Gone where nobody answers, and it may not be woken."""
        return await self.tenant.controller.open(self.record.sandbox, fields, wake=wake and self.record.auto_resume)

    def gone(self, error: SlopletError) -> SlopletError:
        """What E2B's clients are told of a sandbox that is not there any more; other errors as they are."""
        return gone(self.record.sandbox) if is_gone(error) else error

    async def home(self, user: str | None) -> str:
        """The home of a user inside; refused (401) if there is no such user."""
        return await self.facade.accounts.home(self, user)

    async def path(self, text: Any, user: str | None) -> str:
        """A path inside, absolute: ``~`` and what is relative are of the user's home."""
        if not isinstance(text, str) or "\0" in text:
            raise refused(400, "a path is a text without NUL", code="invalid_argument")
        if not text:
            return self.record.workdir or await self.home(user)
        if text.startswith("/"):
            return posixpath.normpath(text).replace("//", "/", 1)
        if text == "~" or text.startswith("~/"):
            text = text[2:]
        return posixpath.normpath(posixpath.join(await self.home(user), text))


def is_gone(error: BaseException) -> bool:
    """Whether an error says that the sandbox does not answer, and not that it refuses."""
    return isinstance(error, _GONE) or (isinstance(error, SandboxError) and not isinstance(error, FileError))
