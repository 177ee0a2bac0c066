"""Sandboxes of the control plane: made, found, listed, ended; their time; asleep and awake; copies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote_plus

from pydantic import RootModel
from starlette.requests import Request

from ...controller import SandboxInfo
from ...errors import SandboxClosed, SandboxDead, SandboxNotFound, SlopletError, SpecError
from ..caller import Caller
from ..idempotency import Job
from . import documents
from .answers import Answer, dump, refused
from .api import Asked, Route, optional
from .making import Making
from .pages import page_size, read_token, write_token
from .records import Record

if TYPE_CHECKING:
    from .door import Facade

DEFAULT_TIMEOUT = 300.0
_OLD_TIMEOUT, _FORK_TIMEOUT = 15.0, 15.0  # of who asks the first version and does not say; of copies
_MAX_TIMEOUT = 10 * 365 * 86400
_MAX_COPIES = 20
_SOON, _PAUSING = 60.0, 600.0  # seconds: what may end while it is being put to sleep; what it has for that


class Document(RootModel[dict[str, Any]]):
    """What is kept of an answer, for it to be given again: no token."""


def _kept_of(record: Record) -> Document:
    named = ("sandbox", "tenant", "key", "template", "alias", "secure", "public")
    return Document({name: getattr(record, name) for name in named})


_Found = list[tuple[SandboxInfo, Record]]  # spelled here: inside Sandboxes, `list` is a method


class Pausing:
    """One that is being put to sleep. ``memory``: with it. ``done`` when it sleeps, or does not after all."""

    def __init__(self, memory: bool) -> None:
        self.memory, self.done = memory, asyncio.Event()


class Sandboxes:
    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self.routes = (
            Route("POST", "/v2/sandboxes", self.create),
            Route("POST", "/sandboxes", self.create_old),
            Route("GET", "/v2/sandboxes", self.list),
            Route("GET", "/sandboxes", self.list_old),
            Route("GET", "/sandboxes/{sandbox}", self.info),
            Route("DELETE", "/sandboxes/{sandbox}", self.kill),
            Route("POST", "/v2/sandboxes/{sandbox}/connect", self.connect),
            Route("POST", "/sandboxes/{sandbox}/connect", self.connect),
            Route("POST", "/sandboxes/{sandbox}/resume", self.resume),
            Route("POST", "/sandboxes/{sandbox}/timeout", self.set_timeout),
            Route("POST", "/sandboxes/{sandbox}/refreshes", self.refresh),
            Route("POST", "/sandboxes/{sandbox}/pause", self.pause),
            Route("POST", "/sandboxes/{sandbox}/fork", self.fork),
        )

    # -- making ------------------------------------------------------------------------

    async def create(self, asked: Asked) -> Answer:
        return await self._create(asked, DEFAULT_TIMEOUT, secure=True)

    async def create_old(self, asked: Asked) -> Answer:
        return await self._create(asked, _OLD_TIMEOUT, secure=optional(asked.body, "secure", bool, False))

    async def _create(self, asked: Asked, default: float, *, secure: bool) -> Answer:
        making = Making(self._facade, asked, _timeout(asked.body, default), secure)
        if asked.header("idempotency-key") is None:
            return Answer(201, self._sandbox(asked, await making.make()))

        async def work() -> Document:
            return _kept_of(await making.make())

        async def find(sandbox: str) -> Document | None:
            found = await making.find(sandbox)
            return None if found is None else _kept_of(found)

        once, body = self._facade.server.once, dump(asked.body)
        try:
            response = await once.answer(Request(asked.scope), asked.caller, body, Job(work, find=find))
        except SpecError as error:
            if "Idempotency-Key" not in error.message:
                raise
            raise refused(422, error.message, error_code="idempotency_request_mismatch") from None
        record = Record(**json.loads(bytes(response.body)))
        replayed = {name: value for name, value in response.headers.items() if name == "idempotent-replayed"}
        return Answer(response.status_code, self._sandbox(asked, record), replayed)

    def _sandbox(self, asked: Asked, record: Record) -> dict[str, Any]:
        facade = self._facade
        return documents.sandbox(
            record, token=facade.tokens.of("envd", record.sandbox), traffic=facade.tokens.of("traffic", record.sandbox),
            domain=facade.domain(asked.host),
        )  # fmt: skip

    # -- finding -----------------------------------------------------------------------

    async def info(self, asked: Asked) -> Answer:
        info, record = await self.find(asked)
        token = self._facade.tokens.of("envd", info.id)
        record = replace(record, network=self._facade.networks.told(info.id, record.network))
        disk_only = await self._facade.is_disk_only(asked.caller, info)
        domain = self._facade.domain(asked.host)
        info = self._facade.told(info)
        if info.state == "ended":
            raise self._unknown(info.id)
        return Answer(200, documents.detail(info, record, token=token, domain=domain, disk_only=disk_only))

    async def find(self, asked: Asked) -> tuple[SandboxInfo, Record]:
        """The one that the path names; refused (404) where there is none that lives."""
        return await self.known(asked.caller, asked.path["sandbox"])

    async def known(self, caller: Caller, sandbox: str) -> tuple[SandboxInfo, Record]:
        try:
            info = await caller.tenant.controller.find(sandbox)
        except SandboxNotFound:
            raise self._unknown(sandbox) from None
        if info.state in ("dead", "ended"):
            raise self._unknown(sandbox)
        record = self._facade.records.find(info.id)
        if record is None or record.tenant != caller.tenant.name:
            record = documents.record_of(info, caller.tenant.name)
        return info, record

    @staticmethod
    def _unknown(sandbox: str) -> SlopletError:
        return refused(404, f"Sandbox \"{sandbox[:80]}\" doesn't exist or you don't have access to it")

    async def list(self, asked: Asked) -> Answer:
        query = asked.query
        states = set(query["state"].split(",")) if query.get("state") else {"running", "paused"}
        if states - {"running", "paused"}:
            raise refused(400, "state is running, paused, or both")
        found = await self._matching(asked, states)
        return self._paged(query, found)

    async def list_old(self, asked: Asked) -> Answer:
        found = await self._matching(asked, {"running"})
        return Answer(200, [documents.listed(*each) for each in found])

    async def _matching(self, asked: Asked, states: set[str]) -> _Found:
        query, caller = asked.query, asked.caller
        wanted = _metadata(query.get("metadata", ""))
        after = _time(query["startedAfter"]) if query.get("startedAfter") else None
        template = query.get("template")
        found = []
        for info in map(self._facade.told, await caller.tenant.controller.list()):
            if info.state in ("dead", "ended") or documents.state_of(info) not in states:
                continue
            record = self._facade.records.find(info.id) or documents.record_of(info, caller.tenant.name)
            if (
                all(record.metadata.get(key) in values for key, values in wanted)
                and (after is None or round(info.created_at, 6) >= after)
                and (template is None or template in (record.template, record.alias))
            ):
                found.append((info, record))
        newest = query.get("order", "desc") != "asc"
        return sorted(found, key=lambda each: (each[0].created_at, each[0].id), reverse=newest)

    def _paged(self, query: dict[str, str], found: _Found) -> Answer:
        limit = page_size(query)
        if token := query.get("nextToken"):
            mark = read_token(token)
            newest = query.get("order", "desc") != "asc"
            found = [
                each for each in found
                if ((each[0].created_at, each[0].id) < mark if newest else (each[0].created_at, each[0].id) > mark)
            ]  # fmt: skip
        page = found[:limit]
        headers = {}
        if len(found) > limit:
            headers["x-next-token"] = write_token(page[-1][0].created_at, page[-1][0].id)
        return Answer(200, [documents.listed(*each) for each in page], headers)

    # -- ending, and when --------------------------------------------------------------

    async def kill(self, asked: Asked) -> Answer:
        info, _ = await self.find(asked)
        known = self._facade.records.find(info.id)
        self._facade.forget(info.id)  # from now on nobody is told that it runs
        try:
            await asked.caller.tenant.controller.kill(info.id)
        except BaseException:
            if known is not None:
                await self._facade.records.put(known)
            raise
        return Answer(204)

    async def set_timeout(self, asked: Asked) -> Answer:
        info, _ = await self.find(asked)
        if info.state == "paused":
            raise self._unknown(info.id)
        await self._set_ttl(asked, info, _timeout(asked.body, DEFAULT_TIMEOUT))
        return Answer(204)

    async def refresh(self, asked: Asked) -> Answer:
        info, _ = await self.find(asked)
        seconds = optional(asked.body, "duration", int, 60)
        await self._extend(asked, info, float(max(0, min(seconds, 3600))))
        return Answer(204)

    async def _set_ttl(self, asked: Asked, info: SandboxInfo, seconds: float) -> None:
        with self._living(info.id):
            await asked.caller.tenant.controller.set_ttl(info.id, seconds)

    @contextmanager
    def _living(self, sandbox: str) -> Iterator[None]:
        """One that is on its way out is as good as gone."""
        try:
            yield
        except (SandboxNotFound, SandboxDead, SandboxClosed):
            raise self._unknown(sandbox) from None

    async def _extend(self, asked: Asked, info: SandboxInfo, seconds: float) -> None:
        """Never less than it has."""
        if info.expires_at is not None and info.expires_at < time.time() + seconds:
            await self._set_ttl(asked, info, seconds)

    # -- asleep and awake --------------------------------------------------------------

    async def pause(self, asked: Asked) -> Answer:
        info, _ = await self._settled(asked)
        if info.state == "paused":
            raise refused(409, f"Sandbox '{info.id}' is already paused")
        pausing = self._facade.pausing[info.id] = Pausing(optional(asked.body, "memory", bool, True))

        async def work() -> None:
            try:
                if pausing.memory:
                    await self._facade.young.settled(info.id)
                await self._pause(asked.caller, info, memory=pausing.memory)
            finally:
                del self._facade.pausing[info.id]
                pausing.done.set()

        with self._living(info.id):  # whoever has asked may be gone before it is done
            await asyncio.shield(self._facade.server.background(work()))
        return Answer(204)

    async def _settled(self, asked: Asked) -> tuple[SandboxInfo, Record]:
        """``find``, when nobody is about to put it to sleep any more."""
        found = await self.find(asked)
        while (pausing := self._facade.pausing.get(found[0].id)) is not None:
            await pausing.done.wait()
            found = await self.find(asked)
        return found

    @staticmethod
    async def _pause(caller: Caller, info: SandboxInfo, *, memory: bool) -> None:
        """Its time does not end it on the way."""
        controller, left = caller.tenant.controller, None
        if info.expires_at is not None and info.expires_at < time.time() + _SOON:
            left = info.expires_at
            await controller.set_ttl(info.id, _PAUSING)
        try:
            await controller.pause(info.id, memory=memory)
        except SlopletError:
            if left is not None:
                await controller.set_ttl(info.id, max(left - time.time(), 0.0))
            raise
        await controller.set_ttl(info.id, None)

    async def connect(self, asked: Asked) -> Answer:
        info, record = await self._settled(asked)
        record = await self._kept(asked.caller, record)
        seconds = _timeout(asked.body, DEFAULT_TIMEOUT)
        if info.state != "paused":
            await self._extend(asked, info, seconds)
            return Answer(200, self._sandbox(asked, record))
        with self._living(info.id):
            await self._facade.wake(asked.caller, record, seconds, memory=optional(asked.body, "memory", bool, True))
        return Answer(201, self._sandbox(asked, record))

    async def _kept(self, caller: Caller, record: Record) -> Record:
        """One that was made by other ways is E2B's, too, from when it is first connected to; one whose key is none any
        more is that of who has come for it."""
        if record.key and self._facade.server.keys.current(record.key) is not None:
            return record
        made = replace(record, key=caller.key.id)
        await self._facade.records.put(made)
        return made

    async def resume(self, asked: Asked) -> Answer:
        """The first version's."""
        info, record = await self._settled(asked)
        record = await self._kept(asked.caller, record)
        if info.state != "paused":
            raise refused(409, f"Sandbox {info.id} is already running")
        await self._facade.wake(asked.caller, record, _timeout(asked.body, _OLD_TIMEOUT))
        return Answer(201, self._sandbox(asked, record))

    async def fork(self, asked: Asked) -> Answer:
        info, record = await self.find(asked)
        count = optional(asked.body, "count", int, 1)
        if not 1 <= count <= _MAX_COPIES:
            raise refused(400, f"count must be between 1 and {_MAX_COPIES}")
        if info.state == "paused":
            raise refused(409, f"Sandbox '{info.id}' is paused")
        seconds = _timeout(asked.body, _FORK_TIMEOUT)
        with self._living(info.id):
            made = await asked.caller.tenant.controller.fork(info.id, count, ttl=seconds)
        copies = [
            replace(record, sandbox=each.id, tenant=asked.caller.tenant.name, key=asked.caller.key.id, timeout=seconds)
            for each in made
        ]
        await self._facade.records.put(*copies)
        for each in copies:
            self._facade.mark(each)
        return Answer(201, [{"sandbox": self._sandbox(asked, each)} for each in copies])


# -- what is asked -----------------------------------------------------------------------------------------------------


def _timeout(body: dict[str, Any], default: float) -> float:
    seconds = optional(body, "timeout", (int, float), default)
    if seconds < 0:
        raise refused(400, "timeout must not be negative")
    if seconds > _MAX_TIMEOUT:
        raise refused(400, f"Timeout cannot be greater than {_MAX_TIMEOUT // 3600} hours")
    return float(seconds)


def _metadata(text: str) -> list[tuple[str, frozenset[str]]]:
    """What is looked for. Clients quote names and values before they encode the pairs, newer ones do not: either way
    of reading a value is good."""
    found = []
    for key, value in parse_qsl(text, keep_blank_values=True):
        found.append((unquote_plus(key), frozenset((value, unquote_plus(value)))))
    if text and not found:
        raise refused(400, "metadata is not understood")
    return found


def _time(text: str) -> float:
    try:
        return round(datetime.fromisoformat(text.replace(" ", "+")).timestamp(), 6)
    except ValueError:
        raise refused(400, "startedAfter is no time") from None
