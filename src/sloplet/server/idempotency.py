"""``Idempotency-Key``: what was asked twice is done once, also if the server was killed in between.

Before anything is made, the intent is written; afterwards the answer, while it is on its way: whoever asks again finds
it here until it is on record. A request that comes again while the first is under way waits for it. One whose first was
cut off without an answer looks whether what it asked for is there (what has a name can be found), and says so if it
cannot know.

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
from typing import Annotated, TypeVar

from fastapi import Header
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ..errors import KeeperError, RequestInvalid, SandboxError, SlopletError, SpecError, WireError
from ..state.connection import Connected
from .caller import Caller

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
    """What is known of a request. ``answer`` None: it was begun, and nobody knows how it ended."""

    request: str
    answer: bytes | None
    made_at: float


class Done(Connected):
    """The table. Blocking."""

    _cleaned_at = -1e9

    def begin(self, owner: str, key: str, request: str, now: float) -> Row | None:
        """Note the intent. None: go ahead; else what is known."""
        with self._write() as db:
            if time.monotonic() - self._cleaned_at > _CLEAN:
                self._cleaned_at = time.monotonic()
                db.execute("DELETE FROM server_done WHERE made_at < ?", (now - KEPT,))
                db.execute(
                    "DELETE FROM server_done WHERE tenant = ? AND made_at < (SELECT made_at FROM server_done "
                    "WHERE tenant = ? ORDER BY made_at DESC LIMIT 1 OFFSET ?)",
                    (owner, owner, MOST),
                )
            found = db.execute(
                "SELECT request, answer, made_at FROM server_done WHERE tenant = ? AND key = ?", (owner, key)
            ).fetchone()
            if found is not None and found[2] >= now - KEPT:
                answer = None if found[1] is None else zlib.decompress(base64.b64decode(found[1]))
                return Row(str(found[0]), answer, float(found[2]))
            db.execute("INSERT OR REPLACE INTO server_done VALUES (?, ?, ?, NULL, ?)", (owner, key, request, now))
            return None

    def finish(self, owner: str, key: str, answer: bytes) -> None:
        packed = base64.b64encode(zlib.compress(answer)).decode()
        with self._write() as db:
            db.execute("UPDATE server_done SET answer = ? WHERE tenant = ? AND key = ?", (packed, owner, key))

    def forget(self, owner: str, key: str) -> None:
        """Nothing was made: asked again, it is tried again."""
        with self._write() as db:
            db.execute("DELETE FROM server_done WHERE tenant = ? AND key = ? AND answer IS NULL", (owner, key))


@dataclass(frozen=True)
class Job:
    """Something to be done once. ``work`` does it; ``look`` is for what was cut off: what was made since then, None if
    nothing was; without it nobody can tell."""

    work: Callable[[], Awaitable[BaseModel]]
    look: Callable[[float], Awaitable[BaseModel | None]] | None = None
    status: int = 201


class Once:
    """One per server, in its loop."""

    def __init__(self, done: Done) -> None:
        self.done = done
        self._running: dict[tuple[str, str], tuple[str, asyncio.Task[tuple[bytes, bool]]]] = {}
        self._saving: dict[tuple[str, str], asyncio.Future[None]] = {}  # answers on their way to the record

    async def aclose(self) -> None:
        """What was answered is on record then."""
        if self._saving:
            await asyncio.wait(set(self._saving.values()), timeout=_LAST)
        self.done.close()

    async def answer(self, request: Request, caller: Caller, body: bytes, job: Job) -> Response:
        """``body``: what must be the same for a request to be the same."""
        key = request.headers.get("idempotency-key")
        if key is None:
            return _response((await job.work()).model_dump_json().encode(), job.status)
        if not _KEY_RE.match(key):
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
        row = await _off_loop(lambda: self.done.begin(owner, key, digest, time.time()))
        if row is not None:
            _check_same(row.request, digest)
            if row.answer is not None:
                return row.answer, True
            if job.look is None:
                raise SandboxError(
                    "a request with this Idempotency-Key was cut off, and it is not known whether it was done",
                    hint="look at what is there, then ask with another key; what has a name can be asked for again",
                )
            found = await job.look(row.made_at)
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


def _check_same(known: str, digest: str) -> None:
    if not hmac.compare_digest(known, digest):
        raise SpecError(
            "this Idempotency-Key was used for another request", hint="use a new key for what is not the same"
        )


def _digest(request: Request, body: bytes) -> str:
    secret = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
    query = request.url.query
    made = hmac.new(secret.encode("latin-1"), digestmod=hashlib.sha256)
    for part in (request.method.encode(), request.url.path.encode(), query.encode(), body):
        made.update(len(part).to_bytes(8, "big") + part)
    return made.hexdigest()


def _response(data: bytes, status: int, *, replayed: bool = False) -> Response:
    headers = {"Idempotent-Replayed": "true"} if replayed else {}
    return Response(data, status, headers, "application/json")


async def _off_loop(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work)
