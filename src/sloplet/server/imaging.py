"""Images for requests: how many are brought and built at a time, on whose behalf, and what is told of it meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ImageNotFound, ServerBusy
from ..images.access import Access, access_of
from ..images.progress import ImageProgress, OnImageProgress
from ..images.resolve import is_tar
from ..images.store import ImageStore
from ..images.threads import Abandoned, seen_through
from .bodies import check_room
from .settings import ServeSettings
from .sse import Events, event

if TYPE_CHECKING:
    from ..state.home import Home
    from .caller import Caller
    from .keys import Key

T = TypeVar("T")
_UPLOADS = 16
_MOST_LOG = 4 << 20  # bytes of a log that wait for whoever follows it
_RETRY = 5.0


class Places:
    """So many at a time, and of one tenant a part of them. Nobody waits: work like this takes minutes."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._share = most, max(1, most // 2)
        self._what = what
        self._taken: dict[str, int] = {}

    def check(self, tenant: str) -> None:
        """ServerBusy if there is none just now."""
        mine, all_of_them = self._taken.get(tenant, 0), sum(self._taken.values())
        if mine >= self._share or all_of_them >= self._most:
            count = f"{mine} of yours are" if mine >= self._share else f"{all_of_them} are"
            raise ServerBusy(
                f"{count} under way, and this server does not {self._what} more at a time",
                hint="try again when one is done",
                retry_after=_RETRY,
            )

    @contextmanager
    def take(self, tenant: str) -> Iterator[None]:
        self.check(tenant)
        self._taken[tenant] = self._taken.get(tenant, 0) + 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]


class ImageWork:
    """One per server; all in its loop."""

    def __init__(self, settings: ServeSettings) -> None:
        self.builds = Places(settings.max_builds, "build")
        self.pulls = Places(settings.max_pulls, "pull or push")
        self.uploads = Places(_UPLOADS, "take in")  #: archives and contexts, while they come


@asynccontextmanager
async def opened(home: Home) -> AsyncIterator[ImageStore]:
    """The images of a home, for one request."""
    store = ImageStore(home)
    try:
        yield store
    finally:
        await asyncio.shield(asyncio.to_thread(store.close))


async def access_for(caller: Caller, username: str | None = None, password: str | None = None) -> Access:
    """How registries are asked for this caller: an admin's key as the operator himself does, others as tenants. What
    comes with a request counts for it alone. DiskFull if there is no room for what would come."""
    home = caller.tenant.home
    access = await asyncio.to_thread(access_of, home, tenant=not caller.key.admin)
    await asyncio.to_thread(check_room, home.open())
    return access if username is None else access.with_login(username, password or "")


async def check_here(home: Home, key: Key | None, image: str) -> None:
    """The keeper of the operator's own home pulls as he does, with his logins and from anywhere. So for a key of that
    tenant that is no admin's the image has to be here: ``POST /v1/images/pull`` brings it, as it may. ImageNotFound."""
    if image == "host" or key is None or key.admin or home.main is not None or is_tar(image):
        return
    if image.startswith(("dir:", "/", ".", "~")):
        return  # paths are the policy's matter
    async with opened(home) as store:
        try:
            await asyncio.to_thread(store.find, image)
        except ImageNotFound as error:
            raise ImageNotFound(error.message, hint="bring it first: POST /v1/images/pull") from error


async def stoppable(work: Callable[[OnImageProgress], T]) -> T:
    """``work`` in a thread, which is told to stop, by what it tells its progress to, when nobody wants it any more; and
    is waited for: what it uses goes away then."""
    stop = threading.Event()

    def check(part: ImageProgress) -> None:
        if stop.is_set():
            raise Abandoned

    return await seen_through(asyncio.ensure_future(asyncio.to_thread(work, check)), stop.set)


class Told:
    """What is waiting to be told. Progress of one thing replaces what was not told yet; of a log that nobody reads as
    fast as it comes, lines in the middle are left out, and that is said. Any thread may add."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: OrderedDict[object, bytes] = OrderedDict()
        self._size = self._missed = 0
        self._changed = asyncio.Event()

    def progress(self, part: ImageProgress) -> None:
        """``OnImageProgress``."""
        if part.stage != "done":
            self._put((part.stage, part.key or part.text), event("progress", part.to_dict()))

    def line(self, piece: bytes) -> None:
        """A line of a log."""
        with self._lock:
            if self._size + len(piece) > _MOST_LOG:
                self._missed += 1
                return
        self.always(piece)

    def always(self, piece: bytes) -> None:
        self._put(object(), piece)

    def _put(self, key: object, piece: bytes) -> None:
        with self._lock:
            self._size += len(piece) - len(self._waiting.get(key, b""))
            self._waiting[key] = piece
        self._loop.call_soon_threadsafe(self._changed.set)

    def wake(self, *_: object) -> None:
        self._changed.set()

    def take(self) -> tuple[list[bytes], int]:
        """All that waits, in order, and how many lines were left out."""
        with self._lock:
            found, missed = list(self._waiting.values()), self._missed
            self._waiting.clear()
            self._size = self._missed = 0
        return found, missed

    async def more(self) -> None:
        await self._changed.wait()
        self._changed.clear()


async def followed(
    work: Callable[[Told], Coroutine[Any, Any, dict[str, Any]]], missed: Callable[[int], bytes] | None = None
) -> Events:
    """Events of what ``work`` tells, then ``done`` with its result. Whoever stops to follow it ends it."""
    told = Told()
    task = asyncio.ensure_future(work(told))
    task.add_done_callback(told.wake)
    try:
        while True:
            over = task.done()
            pieces, left_out = told.take()
            for piece in pieces:
                yield piece
            if left_out and missed is not None:
                yield missed(left_out)
            if over:
                break
            await told.more()
        yield event("done", task.result())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
