"""``Idempotency-Key``: what was asked twice is done once, also if the server was killed in between.

Before anything is made, the intent is written; afterwards the answer, while it is on its way: whoever asks again finds
it here until it is on record. A request that comes again while the first is under way waits for it. One whose first was
cut off without an answer looks whether what it asked for is there, by its name or by the id that was chosen for it, and
says so if it cannot know.

A sandbox without a name is undone by its keeper unless the server says that it has heard of it. So its intent need not
be written first, only before that word: it goes on record, with the id, while the sandbox starts (``intent.py``).

Of a request only a digest is kept, made with the caller's key: who reads the database learns nothing of values in it,
not even by guessing.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import Header
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ..errors import KeeperError, RequestInvalid, SandboxError, SlopletError, SpecError, WireError
from ..state.connection import Connected
from .caller import Caller
from .intent import INTENT, Intent

if TYPE_CHECKING:
    import sqlite3

KEPT = 24 * 3600.0  #: seconds that an answer is remembered
MOST = 10_000  #: answers that are remembered for one key
_CLEAN = 60.0  # seconds between looks for what is too old
_A_MOMENT = 0.03
_LAST = 5.0  # seconds for answers to be on record when the server ends
_KEY_RE = re.compile(r"[\x21-\x7e]{1,255}\Z")

T = TypeVar("T")

#: For routes: ``async def route(key: IdempotencyKey = None)``. It is read from the request; this describes it.
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="Asked again with the same key and body within 24 hours, the answer is the same, and nothing is "
        "done again (`Idempotent-Replayed: true`). With another body it is 422.",
    ),
]


@dataclass(frozen=True)
class Row:
    """What is known of a request. ``answer`` None: it was begun, and nobody knows how it ended. ``sandbox``: the id
    that was chosen for what it makes, if one was."""

    request: str
    answer: bytes | None
    made_at: float
    sandbox: str | None = None


class Done(Connected):
    """The table. Blocking."""

    _cleaned_at = -1e9

    def begin(self, owner: str, key: str, request: str, now: float) -> Row | None:
        """Note the intent. None: go ahead; else what is known."""
        with self._write() as db:
            self._clean(db, owner, now)
            found = _row(db.execute(_FIND, (owner, key)).fetchone(), now)
            if found is None:
                Intent(owner, key, request, now).enter(db, None)
            return found

    def look(self, owner: str, key: str, now: float) -> Row | None:
        """What is known. Quick, and waits for no writer."""
        rows = self._read(_FIND, (owner, key))
        return _row(rows[0], now) if rows else None

    def finish(self, owner: str, key: str, answer: bytes) -> None:
        packed = base64.b64encode(zlib.compress(answer)).decode()
        with self._write() as db:
            db.execute("UPDATE server_done SET answer = ? WHERE tenant = ? AND key = ?", (packed, owner, key))
            self._clean(db, owner, time.time())

    def _clean(self, db: sqlite3.Connection, owner: str, now: float) -> None:
        if time.monotonic() - self._cleaned_at > _CLEAN:
            self._cleaned_at = time.monotonic()
            db.execute("DELETE FROM server_done WHERE made_at < ?", (now - KEPT,))
            db.execute(
                "DELETE FROM server_done WHERE tenant = ? AND made_at < (SELECT made_at FROM server_done "
                "WHERE tenant = ? ORDER BY made_at DESC LIMIT 1 OFFSET ?)",
                (owner, owner, MOST),
            )

    def forget(self, owner: str, key: str) -> None:
        """Nothing was made: asked again, it is tried again."""
        with self._write() as db:
            db.execute("DELETE FROM server_done WHERE tenant = ? AND key = ? AND answer IS NULL", (owner, key))


_FIND = "SELECT request, answer, made_at, sandbox FROM server_done WHERE tenant = ? AND key = ?"


def _row(found: tuple[Any, ...] | None, now: float) -> Row | None:
    if found is None or found[2] < now - KEPT:
        return None
    answer = None if found[1] is None else zlib.decompress(base64.b64decode(found[1]))
    return Row(str(found[0]), answer, float(found[2]), found[3])


@dataclass(frozen=True)
class Job:
    """Something to be done once. ``work`` does it. For what was cut off there is one of these two, or nobody can tell:
    ``look`` tells what was made since then, None if nothing was; ``find`` tells it by its id, and says that ``work``
    makes it with the intent (``Tenant.controller.create`` of what has no name)."""

    work: Callable[[], Awaitable[BaseModel]]
    look: Callable[[float], Awaitable[BaseModel | None]] | None = None
    status: int = 201
    find: Callable[[str], Awaitable[BaseModel | None]] | None = None


class Once:
    """One per server, in its loop."""

    def __init__(self, done: Done) -> None:
        self.done = done
        self._seen = Done(done.home)  # for the loop alone: a connection that is never in a writer's hands
        self._running: dict[tuple[str, str], tuple[str, asyncio.Task[tuple[bytes, bool]]]] = {}
        self._saving: dict[tuple[str, str], asyncio.Future[None]] = {}  # answers on their way to the record

    async def aclose(self) -> None:
        """What was answered is on record then."""
        if self._saving:
            await asyncio.wait(set(self._saving.values()), timeout=_LAST)
        self.done.close()
        self._seen.close()

    async def answer(self, request: Request, caller: Caller, body: bytes, job: Job) -> Response:
        """``body``: what must be the same for a request to be the same."""
        key = request.headers.get("idempotency-key")
        if key is None:
            return _response((await job.work()).model_dump_json().encode(), job.status)
        if not is_key(key):
            raise RequestInvalid("Idempotency-Key is not 1 to 255 printable ASCII characters", hint="a UUID is fine")
        owner, digest = f"{caller.tenant.name}/{caller.key.id}", _digest(request, body)
        known = self._running.get((owner, key))
        if known is None:
            task = asyncio.ensure_future(self._do(owner, key, digest, job))
            known = self._running[owner, key] = (digest, task)
            task.add_done_callback(lambda task: self._ended(owner, key, task))
            data, replayed = await asyncio.shield(task)  # whoever goes away does not undo it
            return _response(data, job.status, replayed=replayed)
        _check_same(known[0], digest)
        return _response((await asyncio.shield(known[1]))[0], job.status, replayed=True)

    def _ended(self, owner: str, key: str, task: asyncio.Task[tuple[bytes, bool]]) -> None:
        if (owner, key) not in self._saving:
            self._running.pop((owner, key), None)
        if not task.cancelled():
            task.exception()  # seen: whoever asked may have gone

    def _save(self, owner: str, key: str, data: bytes) -> None:
        loop = asyncio.get_running_loop()

        async def keep() -> None:
            await asyncio.sleep(_A_MOMENT)  # whoever asked goes on with what was made: not beside that
            await _off_loop(lambda: self.done.finish(owner, key, data))

        saving = asyncio.ensure_future(keep())
        self._saving[owner, key] = saving

        def saved(saving: asyncio.Future[None]) -> None:
            del self._saving[owner, key]
            self._running.pop((owner, key), None)
            if not saving.cancelled() and (error := saving.exception()) is not None:
                # The intent is there, so nothing is done again: who asks is told that it is not known.
                loop.call_exception_handler({"message": "an answer could not be kept", "exception": error})

        saving.add_done_callback(saved)

    async def _do(self, owner: str, key: str, digest: str, job: Job) -> tuple[bytes, bool]:
        now = time.time()
        if job.find is not None:
            INTENT.set(Intent(owner, key, digest, now))  # of this task, and so of the work
            row = self._seen.look(owner, key, now)
        else:
            row = await _off_loop(lambda: self.done.begin(owner, key, digest, now))
        if row is not None:
            _check_same(row.request, digest)
            if row.answer is not None:
                return row.answer, True
            found = await _cut_off(job, row)
            if found is not None:
                data = found.model_dump_json().encode()
                await _off_loop(lambda: self.done.finish(owner, key, data))
                return data, True
        try:
            data = (await job.work()).model_dump_json().encode()
        except (KeeperError, WireError):
            raise  # it may have been done
        except SlopletError:
            await _off_loop(lambda: self.done.forget(owner, key))
            raise
        self._save(owner, key, data)
        return data, False


def is_key(text: str) -> bool:
    """Whether it can be an ``Idempotency-Key``."""
    return _KEY_RE.match(text) is not None


async def _cut_off(job: Job, row: Row) -> BaseModel | None:
    """What such a request has made; None: nothing."""
    if job.find is not None and row.sandbox is not None:
        return await job.find(row.sandbox)
    if job.look is None:
        raise SandboxError(
            "a request with this Idempotency-Key was cut off, and it is not known whether it was done",
            hint="look at what is there, then ask with another key; what has a name can be asked for again",
        )
    return await job.look(row.made_at)


def _check_same(known: str, digest: str) -> None:
    if not hmac.compare_digest(known, digest):
        raise SpecError(
            "this Idempotency-Key was used for another request", hint="use a new key for what is not the same"
        )


def _digest(request: Request, body: bytes) -> str:
    secret = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
    scope = request.scope
    made = hmac.new(secret.encode("latin-1"), digestmod=hashlib.sha256)
    for part in (scope["method"].encode(), scope["path"].encode(), scope["query_string"], body):
        made.update(len(part).to_bytes(8, "big") + part)
    return made.hexdigest()


def _response(data: bytes, status: int, *, replayed: bool = False) -> Response:
    headers = {"Idempotent-Replayed": "true"} if replayed else {}
    return Response(data, status, headers, "application/json")


async def _off_loop(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work)
