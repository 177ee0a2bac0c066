"""The sandboxes that a runtime holds: how they come up, are watched, and go.

Intent is recorded, then the place is made, then the engine starts; the end goes the other way round. Whatever a crash
leaves is found from the record, the owner's lock and the id (state/reaper.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from .controller import SandboxInfo
from .engines import registry
from .engines.base import ResolvedImage, StartRequest
from .errors import EngineError, ProtocolError, SandboxDead, SandboxNotFound, SlopletError
from .events import EventBus
from .live import (
    Live,
    close_fds,
    dead_error,
    feel_pulse,
    first_answer,
    hello_fields,
    wait_and_clean,
)
from .netstart import check_served, environment, furnish
from .networks import with_authority, with_denied, with_placeholders
from .owning import give_owners
from .spec import SandboxSpec
from .state.home import Home, remove_log
from .state.locks import Owner
from .state.snapshots import SnapshotStore
from .state.store import Store
from .volumed import bring_copies, drop_copies, give_back, open_for
from .wire.fields import Fields
from .wire.mux import HostMux, HostStream
from .wire.schema import Op, Tag

if TYPE_CHECKING:
    from .images.store import ImageStore
    from .network.ports import Ports
    from .networks import Networks
    from .pools import Pools
    from .timeline import Origin, Timeline

T = TypeVar("T")
_Lives = list[Live]
NO_ROOM = "is the machine, or this process, out of files, memory or disk space?"
_START_TIMEOUT = 30.0
_LAST_WORDS = 0.2
_PULSE = 5.0
_QUIET = 10.0  # nothing heard for that long from one that was asked something: does it still answer?
_PATIENCE = 60.0


class Holder:
    """The part of ``Runtime`` below the Controller protocol."""

    timeline: Timeline
    pools: Pools
    exposed: Ports
    networks: Networks

    def __init__(self, home: Home | None = None, *, holder: str = "embedded") -> None:
        self.home = home or Home()
        self.store = Store(self.home)
        self.saved = SnapshotStore(self.home, self.store)
        self.holder = holder
        self.bus = EventBus()
        self.on_gone: Callable[[], None] | None = None  # called after each sandbox that ends
        self._owner = Owner(self.home)
        self._live: dict[str, Live] = {}
        self._state = ThreadPoolExecutor(1, thread_name_prefix="sloplet-state")
        self._images: ImageStore | None = None
        self._dead_reasons: dict[str, str] = {}  # of embedded sandboxes that died; bounded
        self._reaped = False
        self._over = False  # at interpreter exit: nothing new begins
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pid = os.getpid()

    # -- what is held ----------------------------------------------------------------

    @property
    def held(self) -> int:
        """How many sandboxes this process holds, is about to (a wake, a fork), or has something for while they sleep:
        listeners, values of secrets."""
        asleep = (self.exposed.holders() | self.networks.with_values()) - self._live.keys()
        return len(self._live) + self.timeline.at_work + len(asleep)

    @property
    def changing(self) -> bool:
        """Whether some sandbox is just changing its state: it may be on record as starting."""
        return self.timeline.at_work > 0

    def holds(self, sandbox_id: str) -> bool:
        """Whether that sandbox is in this process."""
        return sandbox_id in self._live

    def is_awake(self, sandbox_id: str) -> bool:
        """Whether it runs just now, and nothing stands still."""
        live = self._live.get(sandbox_id)
        return live is not None and not live.ending and live.gate is None

    def pids(self, sandbox_id: str) -> tuple[int, ...]:
        """The host's pids of a sandbox (benchmarks, leak checks)."""
        return self._held(sandbox_id).instance.pids()

    def find_live(self, sandbox_id: str) -> Live | None:
        """The sandbox, if it is held here, also on its way out."""
        return self._live.get(sandbox_id)

    def held_live(self, sandbox_id: str) -> Live | None:
        """The sandbox, if it is held here and not on its way out."""
        live = self._live.get(sandbox_id)
        return live if live is not None and not live.ending else None

    def lives(self) -> _Lives:
        return [live for live in self._live.values() if not live.ending]

    def _held(self, sandbox_id: str) -> Live:
        live = self.held_live(sandbox_id)
        if live is None:
            raise self.not_held(sandbox_id)
        return live

    def not_held(self, sandbox_id: str, info: SandboxInfo | None = None) -> SlopletError:
        """Why nothing can be asked of a sandbox here."""
        if sandbox_id in self._dead_reasons:
            return SandboxDead(f"the sandbox is dead: {self._dead_reasons[sandbox_id]}", hint="make a new one")
        live = self._live.get(sandbox_id)
        if live is not None:
            try:
                live.mux.check()  # one that has just died says of what
            except SlopletError as error:
                return error
            return SandboxDead("the sandbox is being closed")
        if info is not None and info.state == "dead":
            return dead_error(info, info.reason)
        return SandboxNotFound(
            f"there is no running sandbox {sandbox_id}", hint="it was closed, or it died: `sloplet ls`"
        )

    # -- starting --------------------------------------------------------------------

    def owner(self) -> str:
        """Our token, for what we are about to hold. Cleans up after dead holders the first time."""
        if self._over:
            raise EngineError("this program is ending")
        self.home.open()
        if not self._reaped:
            self._reaped = True
            self.reap()
        return self._owner.token

    def reap(self) -> None:
        """Clean up after holders that died. Cheap when there is nothing to do."""
        from .state.reaper import reap

        reap(self.home, self.store, registry.reap)

    async def resolve(self, spec: SandboxSpec) -> ResolvedImage:
        if spec.image == "host":
            return ResolvedImage("host")
        from .images.resolve import resolve
        from .images.store import ImageStore
        from .images.threads import Abandoned, Patient

        if self._images is None:
            self._images = ImageStore(self.home)
        store = self._images
        # Minutes, where it is pulled: in a thread of its own. For who gives up a pull ends; what was made is closed.
        patient = Patient()

        def job() -> ResolvedImage:
            try:
                return resolve(spec.image, self.home, store=store, patient=patient)
            except Abandoned:
                raise EngineError("whoever wanted the image has given up") from None

        work = self.background(self._in_thread(None, job))
        try:
            found: ResolvedImage = await asyncio.shield(work)
        except asyncio.CancelledError:
            patient.give_up()
            work.add_done_callback(_close_image)
            raise
        return found

    async def bring_up(
        self,
        info: SandboxInfo,
        owner: str,
        origin: Origin,
        place: str,
        *,
        alone: bool = False,
        started: Callable[[str], None] = lambda workdir: None,
    ) -> Live:
        """Start what the records know as ``info``, until it answers. It is not held yet: see ``install``. ``alone``: it
        is only looked at; it reaches nothing, whatever its settings say, and nothing that was saved of it runs.
        ``started`` is called when its processes run, a moment before it answers, with where its commands will begin."""
        again = origin.opened is not None and bool(origin.spec.authority)  # its programs were made to trust it before
        origin = replace(origin, spec=with_placeholders(with_authority(origin.spec)))
        egress = None if alone else await self.networks.for_start(info, origin.spec)
        spec = origin.spec
        if place != info.id or spec.name != info.name:  # its host name is its own, wherever it comes from
            spec = replace(spec, name=info.name, hostname=spec.hostname or info.name or info.id)
        request = StartRequest(place, spec, origin.image, self.home.place(owner, place), origin.restore)
        volumes = await open_for(self, info, spec, alone=alone)
        image = origin.image.held()
        try:
            if volumes is not None:
                request = replace(request, volumes=volumes.mounts, held=volumes.held)
            instance = await origin.engine.start(request)
        except BaseException:
            image.close()
            if volumes is not None:
                volumes.close()
            raise
        mux: HostMux | None = None
        try:
            if volumes is not None:
                volumes.started()
            mux = HostMux(instance.read_fd, instance.write_fd)
            mux.set_accept(egress.accept if egress is not None else None)
            added = environment(egress, single_user=instance.hello.no_users)
            mux.hello(hello_fields(instance, info.id, added, still=alone))
            started(instance.hello.workdir)
            check_served(egress, await first_answer(instance, mux, _START_TIMEOUT))
            info = replace(info, state="running", workdir=instance.hello.workdir)
            live = Live(info, owner, origin.engine, instance, mux, origin.spec, image, place)
            live.egress, live.volumes = egress, volumes
            live.used = asyncio.get_running_loop().time()
            if origin.restore is None:
                await give_owners(live)
            await origin.lay_out(live)
            if not alone:
                await give_back(live, origin)
                await bring_copies(self, live, origin)
            await furnish(live, _START_TIMEOUT, again=again)
        except BaseException:
            if mux is not None:
                mux.fail(SandboxDead("the sandbox did not start"))
            instance.kill()
            close_fds(instance)
            await asyncio.shield(wait_and_clean(instance))
            image.close()
            if volumes is not None:
                volumes.close()
            raise
        return live

    def install(self, live: Live) -> None:
        """From now on it is held, under its id."""
        live.mux.set_on_lost(lambda error: self._on_lost(live, error))
        live.mux.annotate = lambda stream, result: self._annotate(live, stream, result)
        self._live[live.info.id] = live
        live.watcher = self.background(self._watch(live))
        self.timeline.tend(live)
        if problem := self.exposed.begin(live.info.id, live.info.spec.ports):
            self.bus.emit(live.info.id, "port.failed", reason=problem)
        if live.distrust:
            self.bus.emit(live.info.id, "trust.failed", reason=live.distrust)

    async def discard(self, live: Live) -> None:
        """End one that was brought up and is not wanted after all."""
        await self._stop(live, SandboxDead("the sandbox was not wanted any more"))
        if self._live.get(live.info.id) is None:  # else it was to take the place of one that goes on
            self.networks.drop(live.info.id)

    def set_expiry(self, live: Live, seconds: float | None) -> None:
        """Its time is up after so many seconds, by a clock that does not jump; None: never."""
        if live.timer is not None:
            live.timer.cancel()
        live.expires = live.timer = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            live.expires = loop.time() + seconds
            live.timer = loop.call_later(max(seconds, 0.0), self._expire, live.info.id)

    # -- watching --------------------------------------------------------------------

    def _on_lost(self, live: Live, error: SlopletError) -> None:
        if isinstance(error, ProtocolError):
            live.fault = f"its agent broke the protocol: {error.message}"
            live.instance.kill()
        else:  # most likely it has just ended: let its engine find out how, before we end it ourselves
            asyncio.get_running_loop().call_later(_LAST_WORDS, live.instance.kill)

    def _listen(self, live: Live) -> None:
        """While something is asked of a sandbox, look now and then whether anything is heard of it. Its commands can
        stop an agent in its tracks (a locked pipe); callers must not wait for ever then."""
        loop = asyncio.get_running_loop()
        live.quiet = loop.call_later(_QUIET, self._heard, live, live.mux.heard)

    def _heard(self, live: Live, before: int) -> None:
        live.quiet = None
        if live.ending or not live.mux.waiting:
            return
        if live.mux.heard == before and live.gate is None:
            self.background(feel_pulse(live, _PATIENCE))
        self._listen(live)

    def _suspect(self, live: Live, stream_id: int) -> None:
        live.overdue.pop(stream_id, None)
        if not live.ending and live.gate is None:
            self.background(feel_pulse(live, _PULSE))

    async def _watch(self, live: Live) -> None:
        """Wait for a sandbox's end, whoever brings it about, and tell everybody who waits on it."""
        ended = await live.instance.wait()
        reason = live.fault or ended.reason
        live.mux.fail(live.farewell or dead_error(live.info, "it was closed" if live.ending else reason))
        if not live.ending:
            live.ending = True
            await self._end(live, "died", reason=reason, oom=ended.oom)

    def _annotate(self, live: Live, stream: HostStream, result: Fields) -> Fields:
        """Add OOM where the memory limit killed something while the command ran; what the agent says of it stays."""
        if stream.request.integer(Tag.OP) != Op.METRICS:  # who only looks does not keep it awake
            live.used = asyncio.get_running_loop().time()
        if stream.id not in live.running:
            return result
        before = live.running.pop(stream.id)
        mark = live.denials.pop(stream.id, 0)
        if live.egress is not None or Tag.DENIED in result:
            result = with_denied(result, live.egress.log.denied_since(mark) if live.egress is not None else [])
        if stream.id in live.overdue:
            live.overdue.pop(stream.id).cancel()
        failed = result.integer(Tag.SIGNUM, 0) or result.integer(Tag.EXIT_CODE, 0)
        if result.integer(Tag.OOM, 0):
            self.bus.emit(live.info.id, "oom")
        elif failed and before is not None:
            now = live.instance.oom_kills()
            if now is not None and now > before:
                result = Fields(*((tag, value) for tag, value in result if tag is not Tag.OOM), (Tag.OOM, 1))
                self.bus.emit(live.info.id, "oom", kills=now)
        if self.bus.wanted and stream.request.integer(Tag.OP) == Op.EXEC:
            self.bus.emit(
                live.info.id, "command.exited", exit_code=failed and result.integer(Tag.EXIT_CODE, 128 + failed)
            )
        return result

    # -- ending ----------------------------------------------------------------------

    async def _stop(self, live: Live, farewell: SlopletError) -> None:
        """End every process of it, and remove what only they needed. Should that fail (a failing disk), what is left
        is the reaper's."""
        live.ending = True
        live.farewell = live.farewell or farewell
        for timer in (live.timer, live.quiet, *live.overdue.values()):
            if timer is not None:
                timer.cancel()
        for chore in live.chores:
            if chore is not asyncio.current_task():
                chore.cancel()
        live.instance.kill()
        await live.instance.wait()
        live.mux.fail(live.farewell)
        close_fds(live.instance)
        live.instance.cleanup()
        live.image.close()
        if live.volumes is not None:
            live.volumes.close()
        await self.on_state(lambda: self.home.remove_place(live.owner, live.place))

    async def put_away(self, live: Live, farewell: SlopletError, *, after: Live | None = None) -> None:
        """End its processes, and leave its record to the caller: it is paused, or ``after`` goes on in its place."""
        ended = live.ending  # somebody ends it for good just now: it is held until that is done
        try:
            await self._stop(live, farewell)
        finally:
            if after is None and not ended:
                self._live.pop(live.info.id, None)
            if not ended:
                live.gone.set()
            if live.gate is not None:
                live.gate.set()
                live.gate = None
            if self.on_gone is not None:
                self.on_gone()

    async def _end(self, live: Live, event: str, *, reason: str = "", oom: bool = False) -> None:
        """The one way a held sandbox goes for good. Runs as a task of its own, so nobody's cancellation stops it."""
        sandbox_id = live.info.id
        died = event == "died"
        self.exposed.close(sandbox_id)

        def finish() -> None:
            if died and self.holder == "keeper":
                self.store.mark_dead(sandbox_id, reason, disown=True)
            else:
                self.store.remove(sandbox_id)
                remove_log(self.home, sandbox_id)

        try:
            # Should this fail (a failing disk), the record stays for the reaper, and nobody waits for us in vain.
            await self._stop(live, dead_error(live.info, reason or "it was closed"))
            async with self.timeline.turn(sandbox_id):  # what was just being done with it has come to its end
                if not (died and self.holder == "keeper"):
                    await self.delete_saved(sandbox_id)
                await self.on_state(finish)
            if live.spec.volumes:
                await drop_copies(self)
        except OSError as error:
            if isinstance(error, SlopletError):
                raise
            raise EngineError(f"what the sandbox {sandbox_id} left could not be removed: {error}") from error
        finally:
            if not (died and self.holder == "keeper"):  # else it may go on from a checkpoint
                self.networks.drop(sandbox_id)
            elif live.info.saved is None:
                self.networks.forget_values(sandbox_id)
            if died and self.holder != "keeper":
                _remember(self._dead_reasons, sandbox_id, reason)
            if self._live.get(sandbox_id) is live:
                del self._live[sandbox_id]
            live.gone.set()
            if live.gate is not None:
                live.gate.set()
            if self.on_gone is not None:
                self.on_gone()
            self.bus.emit(sandbox_id, event, reason=reason, oom=oom)

    def _expire(self, sandbox_id: str) -> None:
        live = self.held_live(sandbox_id)
        if live is not None and live.info.spec.on_ttl != "end":
            self.background(self.timeline.time_is_up(sandbox_id))
        elif live is not None:
            self.expire(live)

    def expire(self, live: Live, why: str = "its time to live was over") -> None:
        """End one whose time is up. Returns at once; ``live.gone`` tells when it is done."""
        live.ending = True
        self.background(self._end(live, "expired", reason=why))

    async def delete_saved(self, sandbox_id: str) -> None:
        """All that was saved of it. Whoever has some of it open (a fork) is waited for, and may need the state."""
        if await self.on_state(lambda: any(each.role != "template" for each in self.store.list_snapshots(sandbox_id))):
            await self.off_loop(lambda: self.saved.delete_of_sandbox(sandbox_id))

    def forget(self, owner: str, sandbox_id: str) -> None:
        if owner:
            self.home.remove_place(owner, sandbox_id)
        self.saved.delete_of_sandbox(sandbox_id)
        self.store.remove(sandbox_id)
        remove_log(self.home, sandbox_id)

    def _release(self) -> None:
        self._owner.release()
        self.store.close()
        if self._images is not None:
            self._images.close()

    def end_now(self) -> None:
        """The synchronous backstop at interpreter exit: nothing survives us, also without a loop."""
        if self._pid != os.getpid():
            return
        self._over = True
        self.pools.end_now()
        self.exposed.forget()
        lives, self._live = list(self._live.values()), {}
        for live in lives:
            live.ending = True  # a loop that still runs must not end it a second time
            live.instance.kill()
        for live in lives:
            try:
                live.instance.cleanup()
                self.home.remove_place(live.owner, live.place)
                if self.holder == "keeper":
                    self.store.mark_dead(live.info.id, "its keeper ended", disown=True)
                else:
                    self.forget(live.owner, live.info.id)
            except (SlopletError, OSError):
                pass  # the next start reaps what is left
        try:
            self._release()
        except SlopletError:
            pass

    def close_in_child(self) -> None:
        """After a fork: the sandboxes are the parent's. Drop our copies of their wires, or they would outlive it."""
        for live in self._live.values():
            close_fds(live.instance)
        self._live = {}
        self.networks.close_in_child()
        self.pools.close_in_child()
        self.exposed.forget()

    # -- small things ----------------------------------------------------------------

    async def off_loop(self, job: Callable[[], T]) -> T:
        """What may take seconds (hashing), in a thread of its own; finished even if the caller is cancelled."""
        return await asyncio.shield(self.background(self._in_thread(None, job)))

    async def on_state(self, job: Callable[[], T]) -> T:
        """The records: one at a time, in the order they were asked for."""
        return await self._in_thread(self._state, job)

    async def _in_thread(self, pool: ThreadPoolExecutor | None, job: Callable[[], T]) -> T:
        try:
            work = asyncio.get_running_loop().run_in_executor(pool, job)
        except RuntimeError as error:
            raise EngineError(f"no thread can be started: {error}", hint=NO_ROOM) from error
        return await work

    def background(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not isinstance(task.exception(), SlopletError):
            asyncio.get_running_loop().call_exception_handler(
                {"message": "sloplet: a background task failed", "exception": task.exception(), "task": task}
            )


def _close_image(work: asyncio.Task[ResolvedImage]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().close()


def _remember(reasons: dict[str, str], sandbox_id: str, reason: str) -> None:
    reasons[sandbox_id] = reason
    while len(reasons) > 1000:
        del reasons[next(iter(reasons))]
