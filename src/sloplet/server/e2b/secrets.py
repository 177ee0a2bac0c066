"""E2B's secrets: values that a team keeps here, for headers that the proxy of its sandboxes adds
(``${e2b.secrets.NAME}``). They are never told to anybody, and no log has them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .answers import Answer, refused
from .api import Asked, Route, mapping
from .documents import time_of
from .pages import page_size, read_token, write_token
from .secretstore import Secret, SecretStore

if TYPE_CHECKING:
    from .door import Facade

MOST = 1000  #: of one tenant
_MOST_NAME, _MOST_VALUE = 128, 65536  # characters, bytes
_MOST_METADATA, _MOST_KEY, _MOST_TEXT, _MOST_TOTAL = 32, 128, 1024, 8192
_NAME = re.compile(r"[^{}\x00-\x1f\x7f]+\Z")
_NO_HEADER = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_REFERENCE = re.compile(r"\$\{e2b\.secrets\.([^{}]+)\}")

#: Told that a secret has another value, or none any more: its tenant and its name.
Changed = Callable[[str, str], None]


class Secrets:
    def __init__(self, facade: Facade) -> None:
        self._store = SecretStore(facade.server.home, facade.tokens.key("secrets"))
        self.on_change: list[Changed] = []
        self.routes = (
            Route("GET", "/secrets", self.list),
            Route("POST", "/secrets", self.create),
            Route("GET", "/secrets/{secret}", self.info),
            Route("POST", "/secrets/{secret}", self.update),
            Route("DELETE", "/secrets/{secret}", self.remove),
        )

    def close(self) -> None:
        self._store.close()

    # -- for the network -----------------------------------------------------------------

    def fill(self, tenant: str, text: str) -> str:
        """A header's value with the values of secrets that it refers to. refused (400) for one that is not there, or
        that no header can have. Blocking, quick."""

        def value(match: re.Match[str]) -> str:
            found = self._store.value(tenant, match[1].lower())
            if found is None:
                raise refused(400, f"secret '{match[1][:80]}' not found", error_code="secret_not_found")
            if _NO_HEADER.search(found):
                raise refused(400, f"the value of secret '{match[1][:80]}' cannot be part of a header")
            return found

        return _REFERENCE.sub(value, text)

    @staticmethod
    def names(text: str) -> frozenset[str]:
        """The secrets that a text refers to."""
        return frozenset(name.lower() for name in _REFERENCE.findall(text))

    # -- routes --------------------------------------------------------------------------

    async def list(self, asked: Asked) -> Answer:
        found = await asyncio.to_thread(self._store.all, asked.caller.tenant.name)
        if token := asked.query.get("nextToken"):
            mark = read_token(token)
            found = [each for each in found if (each.created_at, each.id) < mark]
        limit = page_size(asked.query)
        page, headers = found[:limit], {}
        if len(found) > limit:
            headers["x-next-token"] = write_token(page[-1].created_at, page[-1].id)
        return Answer(200, [document(each) for each in page], headers)

    async def create(self, asked: Asked) -> Answer:
        name, value = _name(asked.body.get("name")), _value(asked.body.get("value"))
        tenant, metadata = asked.caller.tenant.name, _metadata(asked.body)
        try:
            made = await asyncio.to_thread(self._store.add, tenant, name, value, metadata or {}, MOST)
        except OverflowError:
            raise refused(409, f"there are {MOST} secrets already", error_code="secret_limit_reached") from None
        if made is None:
            raise refused(409, f"a secret named '{name}' already exists")
        self._changed(tenant, name)
        return Answer(201, document(made))

    async def info(self, asked: Asked) -> Answer:
        return Answer(200, document(await self._find(asked)))

    async def update(self, asked: Asked) -> Answer:
        value, metadata = _value(asked.body.get("value")), _metadata(asked.body)
        secret = await self._find(asked)
        changed = await asyncio.to_thread(self._store.change, secret, value, metadata)
        if changed is None:
            raise _unknown(asked)
        self._changed(changed.tenant, changed.name)
        return Answer(200, document(changed))

    async def remove(self, asked: Asked) -> Answer:
        secret = await self._find(asked)
        if not await asyncio.to_thread(self._store.remove, secret):
            raise _unknown(asked)
        self._changed(secret.tenant, secret.name)
        return Answer(204)

    async def _find(self, asked: Asked) -> Secret:
        found = await asyncio.to_thread(self._store.find, asked.caller.tenant.name, asked.path["secret"])
        if found is None:
            raise _unknown(asked)
        return found

    def _changed(self, tenant: str, name: str) -> None:
        for tell in self.on_change:
            tell(tenant, name)


def document(secret: Secret) -> dict[str, Any]:
    return {
        "secretID": secret.id, "name": secret.name, "currentVersion": secret.version, "metadata": secret.metadata,
        "createdAt": time_of(secret.created_at), "updatedAt": time_of(secret.updated_at),
    }  # fmt: skip


def _unknown(asked: Asked) -> Exception:
    return refused(404, f"secret '{asked.path['secret'][:80]}' not found")


def _name(given: Any) -> str:
    if not isinstance(given, str) or not given or len(given) > _MOST_NAME or not _NAME.match(given) or "/" in given:
        raise refused(400, f"name is 1 to {_MOST_NAME} characters without braces, slashes and control characters")
    if given.lower().startswith("sec_"):
        raise refused(400, "names do not begin with sec_: ids do")
    return given.lower()


def _value(given: Any) -> str:
    """No word of it goes into an error."""
    if not isinstance(given, str) or not given:
        raise refused(400, "value is missing, or no text")
    try:
        size = len(given.encode())
    except UnicodeEncodeError:
        raise refused(400, "value is no text") from None
    if size > _MOST_VALUE:
        raise refused(400, f"value is longer than {_MOST_VALUE} bytes")
    return given


def _metadata(body: dict[str, Any]) -> dict[str, str] | None:
    if body.get("metadata") is None:
        return None
    found = mapping(body, "metadata")
    sizes = [
        (len(key.encode("utf-8", "replace")), len(value.encode("utf-8", "replace"))) for key, value in found.items()
    ]
    if (
        len(sizes) > _MOST_METADATA
        or any(key > _MOST_KEY or value > _MOST_TEXT for key, value in sizes)
        or sum(map(sum, sizes)) > _MOST_TOTAL
    ):
        raise refused(
            400, f"metadata has at most {_MOST_METADATA} entries, keys of {_MOST_KEY} bytes, values of {_MOST_TEXT}, "
            f"{_MOST_TOTAL} in all",
        )  # fmt: skip
    return found
