"""One's own public keys for SSH: /v1/me/ssh-keys. See docs/ssh.md."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import Field

from ..caller import CallerOf, ServerOf
from ..documents import PROBLEMS, Document, Items, Request
from ..ssh.keys import MAX_TEXT, SshKey, SshKeys
from ..state import ServerState

router = APIRouter(prefix="/v1/me/ssh-keys", tags=["ssh"], responses=PROBLEMS)


class SshKeyDocument(Document):
    fingerprint: str = Field(examples=["SHA256:..."])
    name: str
    public: str
    created_at: float

    @classmethod
    def of(cls, key: SshKey) -> SshKeyDocument:
        return cls.model_validate(key.to_dict())


class SshKeyAsked(Request):
    public: str = Field(
        min_length=1, max_length=MAX_TEXT, description="One line of a .pub file", examples=["ssh-ed25519 AAAA... you"]
    )
    name: str | None = Field(default=None, min_length=1, max_length=80, description="[default: the key's comment]")


@router.get("")
async def listed(caller: CallerOf, server: ServerOf) -> Items[SshKeyDocument]:
    """Those that are tied to the key that asks, oldest first."""
    return Items(items=[SshKeyDocument.of(each) for each in _keys(server).list(caller.key.id)])


@router.post("", status_code=201)
async def add(asked: SshKeyAsked, caller: CallerOf, server: ServerOf) -> SshKeyDocument:
    """Whoever has its private half may do by SSH what this key may, for as long as this key is valid."""
    return SshKeyDocument.of(_keys(server).add(caller.key.id, asked.public, asked.name))


@router.delete("/{fingerprint:path}", status_code=204)
async def remove(
    fingerprint: Annotated[str, Path(min_length=1, max_length=200)], caller: CallerOf, server: ServerOf
) -> Response:
    """Its connections end within seconds. That there is none is no error."""
    keys = _keys(server)
    if any(each.fingerprint == fingerprint for each in keys.list(caller.key.id)):
        keys.remove(fingerprint, caller.key.id)
    return Response(status_code=204)


def _keys(server: ServerState) -> SshKeys:
    return server.ssh_keys
