"""The local Controller: engines, wire, images and state, wired together. Embedded, and inside the keeper.

Order of things: intent is recorded, then the place is made, then the engine starts; the end goes the other
way round. Whatever a crash leaves is found from the record, the owner's lock and the id (state/reaper.py).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from .controller import Diff, Event, SandboxInfo, Snapshot, Stream
from .engines import registry
from .engines.base import Guarantee, HostStats, ResolvedImage, StartRequest
from .errors import EngineError, ProtocolError, SandboxDead, SandboxNotFound, SlopletError, StartFailed
from .events import EventBus
from .live import (
    Live,
    ask_to_end,
    close_fds,
    dead_error,
    feel_pulse,
    first_answer,
    hello_fields,
    wait_and_clean,
    within,
)
from .pools import Pools
from .spec import SandboxSpec
from .state.home import Home, new_id
from .state.locks import Owner
from .state.snapshots import SnapshotStore
from .state.store import Store
from .timeline import Origin, Timeline
from .wire.fields import Fields
from .wire.mux import HostMux, HostStream
from .wire.schema import Op, Tag

T = TypeVar("T")
_Infos = list[SandboxInfo]  # spelled here: inside Runtime, `list` is its method
_Snapshots = list[Snapshot]
_Lives = list[Live]
_NO_ROOM = "is the machine, or this process, out of files, memory or disk space?"
_START_TIMEOUT = 30.0
_LAST_WORDS = 0.2
_OVERDUE = 2.0  # a command still there that long after its time: is the agent itself?
_PULSE = 5.0
_QUIET = 10.0  # nothing heard for that long from one that was asked something: does it still answer?
_PATIENCE = 60.0
_COMMAND_OPS = (Op.EXEC, Op.ATTACH)


class Runtime:
    """Holds sandboxes in this process, on one event loop. See ``Controller`` for what each method promises."""

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
        self._dead_reasons: dict[str, str] = {}  # of embedded sandboxes that died; bounded
        self._reaped = False
        self._over = False  # at interpreter exit: nothing new begins
        self.timeline = Timeline(self)
        self.pools = Pools(self)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pid = os.getpid()
        _runtimes.add(self)

    # -- Controller --------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        try:
            return await self._create(spec)
        except OSError as error:
            if isinstance(error, SlopletError):
                raise
            raise StartFailed(f"the sandbox could not be made: {error}", hint=_NO_ROOM) from error

    async def _create(self, spec: SandboxSpec) -> SandboxInfo:
        try:
            live = await self.pools.claim(spec) if spec.pool else None
            if live is None:
                async with self.timeline.origin(spec) as origin:
                    live = await self.make(spec, origin)
        finally:
            if spec.pool:
                self.pools.fill(spec)
        return live.info

    async def make(self, spec: SandboxSpec, origin: Origin) -> Live:
        """A new sandbox of these settings, started from ``origin``. Nothing is left behind on failure."""
        sandbox_id = new_id()

        def begin() -> tuple[str, SandboxInfo]:
            owner = self.owner()
            engine = origin.engine
            engine.check(StartRequest(sandbox_id, origin.spec, origin.image, self.home.place(owner, sandbox_id)))
            info = self.store.reserve(
                sandbox_id,
                spec,
                engine=engine.name,
                rung=engine.rung,
                holder=self.holder,
                owner=owner,
                head=origin.head,
            )
            try:
                self.home.make_place(owner, sandbox_id)
            except BaseException:
                self.store.remove(sandbox_id)
                raise
            return owner, info

        # Shielded: a cancelled caller must not leave a record behind that nobody knows of.
        begun = asyncio.ensure_future(self.on_state(begin))
        try:
            owner, info = await asyncio.shield(begun)
        except asyncio.CancelledError:
            owner, _ = await begun
            await self.on_state(lambda: self.forget(owner, sandbox_id))
            raise
        try:
            live = await self.bring_up(info, owner, origin, sandbox_id)
        except BaseException:
            await asyncio.shield(self.on_state(lambda: self.forget(owner, sandbox_id)))
            raise
        await self._begin_life(live)
        return live

    async def adopt(self, live: Live, spec: SandboxSpec) -> Live:
        """Give one that was started ahead, and has no record yet, its settings and its record. SandboxExists."""
        sandbox_id, engine, head = live.place, live.engine, live.info.head

        def reserve() -> SandboxInfo:
            return self.store.reserve(
                sandbox_id, spec, engine=engine.name, rung=engine.rung, holder=self.holder, owner=live.owner, head=head
            )

        reserved = asyncio.ensure_future(self.on_state(reserve))
        try:
            info = await asyncio.shield(reserved)
        except asyncio.CancelledError:
            await asyncio.wait({reserved})
            await self.on_state(lambda: self.store.remove(sandbox_id))
            raise
        live.info = replace(info, state="running", workdir=live.info.workdir)
        kept = {what: getattr(spec, what) for what in ("name", "ttl", "idle", "undo", "checkpoint_every")}
        live.spec = replace(live.spec, **kept)
        live.used = asyncio.get_running_loop().time()
        await self._begin_life(live)
        return live

    async def _begin_life(self, live: Live) -> None:
        """It answers, and is on record as starting: from now on it is held."""
        sandbox_id, spec = live.info.id, live.info.spec
        self.install(live)
        marked = self.background(self.on_state(lambda: self.store.mark_running(sandbox_id, workdir=live.info.workdir)))
        if self.holder == "keeper":  # one that was acknowledged must be on record if the keeper dies
            try:
                await asyncio.shield(marked)
            except BaseException:
                await asyncio.shield(self.kill(sandbox_id))
                raise
        if spec.ttl is not None:
            self.set_expiry(live, spec.ttl)
        self.bus.emit(sandbox_id, "started", engine=live.engine.name, name=spec.name)

    async def find(self, ref: str) -> SandboxInfo:
        live = self._live.get(ref) or next((item for item in self._live.values() if _named(item.info, ref)), None)
        if live is not None:
            return live.info
        return await self.on_state(lambda: self.store.find(ref))

    async def list(self) -> list[SandboxInfo]:
        return await self.on_state(self.store.list)

    async def open(self, sandbox_id: str, request: Fields) -> Stream:
        live = self._live.get(sandbox_id)
        if live is None or live.ending or live.gate is not None:
            live = await self.timeline.awake(sandbox_id)
        if live.spec.undo and request.integer(Tag.OP) == Op.EXEC:
            live = await self.timeline.before_command(live, request)
        if live.mux.congested:
            await live.mux.drained()
        stream = live.mux.open(request)
        if live.quiet is None:
            self._listen(live)
        if request.integer(Tag.OP) in _COMMAND_OPS:
            live.running[stream.id] = live.instance.oom_kills()
            if limit := request.integer(Tag.TIMEOUT_MS, 0):
                live.overdue[stream.id] = asyncio.get_running_loop().call_later(
                    limit / 1000 + _OVERDUE, self._suspect, live, stream.id
                )
            if self.bus.wanted:
                self._announce(sandbox_id, request)
        return stream

    async def kill(self, sandbox_id: str) -> None:
        live = self._live.get(sandbox_id)
        if live is not None:
            ours = not live.ending
            if ours:
                live.ending = True
                self.background(self._end(live, "killed"))
            await live.gone.wait()
            if ours:
                return
        # It was dead or paused, or just died: its record goes now, and all that was saved of it.
        async with self.timeline.turn(sandbox_id):
            if sandbox_id not in self._live:
                record = await self.on_state(lambda: _maybe(lambda: self.store.record(sandbox_id)))
                if record is not None and record.info.state in ("dead", "paused"):
                    await self.delete_saved(sandbox_id)
                    await self.on_state(lambda: self.forget(record.owner, record.info.id))
                return
        await self.kill(sandbox_id)  # somebody has woken it meanwhile

    # -- live state: see timeline.py ---------------------------------------------------

    async def pause(self, sandbox_id: str) -> SandboxInfo:
        return await self.timeline.pause(sandbox_id)

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        return await self.timeline.resume(sandbox_id)

    async def release(self, sandbox_id: str) -> None:
        await self.timeline.release(sandbox_id)

    async def snapshot(
        self, sandbox_id: str, name: str | None = None, *, role: str = "snapshot", note: str = ""
    ) -> Snapshot:
        return await self.timeline.snapshot(sandbox_id, name, role=role, note=note)

    async def snapshots(self, sandbox_id: str | None = None, *, role: str | None = "snapshot") -> _Snapshots:
        return await self.on_state(lambda: self.store.list_snapshots(sandbox_id, role))

    async def find_snapshot(self, ref: str, sandbox_id: str | None = None) -> Snapshot:
        return await self.on_state(lambda: self.store.find_snapshot(ref, sandbox_id))

    async def delete_snapshot(self, snapshot_id: str, *, force: bool = False) -> None:
        await self.off_loop(lambda: self.saved.delete(snapshot_id, force=force))

    async def fork(
        self, sandbox_id: str, count: int, *, names: Sequence[str] | None = None, snapshot: str | None = None
    ) -> _Infos:
        return await self.timeline.fork(sandbox_id, count, names=names, snapshot=snapshot)

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> SandboxInfo:
        return await self.timeline.rollback(sandbox_id, snapshot_id)

    async def undo(self, sandbox_id: str, steps: int = 1) -> Snapshot:
        return await self.timeline.undo(sandbox_id, steps)

    async def diff(self, sandbox_id: str, against: str | None = None, *, text: bool = True) -> Diff:
        return await self.timeline.diff(sandbox_id, against, text=text)

    async def export(self, sandbox_id: str, path: str, *, image: bool = True) -> Snapshot:
        return await self.timeline.export(sandbox_id, path, image=image)

    async def load(self, path: str, *, name: str | None = None) -> SandboxInfo:
        return await self.timeline.load(path, name=name)

    async def guarantees(self, sandbox_id: str) -> tuple[Guarantee, ...]:
        live = self._held(sandbox_id)
        ttl = live.info.spec.ttl
        if ttl is None:
            return live.instance.guarantees
        return (*live.instance.guarantees, Guarantee("ttl", True, f"timer of its holder ({self.holder})", f"{ttl:g} s"))

    async def stats(self, sandbox_id: str) -> HostStats:
        return self._held(sandbox_id).instance.stats()

    def events(self, sandbox_id: str | None = None) -> AsyncIterator[Event]:
        return self.bus.listen(sandbox_id)

    async def end_all(self, reason: str, *, grace: float = 2.0) -> None:
        """End every sandbox. A named one whose engine can save it is paused; of the others commands are first asked
        to end, and they stay on record as dead with the reason (what is embedded is forgotten, as ever)."""
        if self.holder == "keeper":
            await self.timeline.pause_all()
        lives = [live for live in self._live.values() if not live.ending]
        for live in lives:
            live.ending = True
        asked = [live.instance.wait() for live in lives if ask_to_end(live, grace)]
        if asked:
            await within(asyncio.gather(*asked), grace + 1)
        for live in lives:
            self.background(self._end(live, "died", reason=reason))
        await asyncio.gather(*(live.gone.wait() for live in list(self._live.values())))

    async def aclose(self) -> None:
        await self.pools.close()
        await asyncio.gather(*(self.kill(sandbox_id) for sandbox_id in list(self._live)))
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await self.on_state(self._release)
        self._state.shutdown(wait=False)
        _runtimes.discard(self)

    @property
    def held(self) -> int:
        """How many sandboxes this process holds, or is about to (a wake, a fork)."""
        return len(self._live) + self.timeline.at_work

    @property
    def changing(self) -> bool:
        """Whether some sandbox is just changing its state: it may be on record as starting."""
        return self.timeline.at_work > 0

    def holds(self, sandbox_id: str) -> bool:
        """Whether that sandbox is in this process."""
        return sandbox_id in self._live

    def pids(self, sandbox_id: str) -> tuple[int, ...]:
        """The host's pids of a sandbox (benchmarks, leak checks)."""
        return self._held(sandbox_id).instance.pids()

    def reap(self) -> None:
        """Clean up after holders that died. Cheap when there is nothing to do."""
        from .state.reaper import reap

        reap(self.home, self.store, registry.reap)

    # -- starting ------------------------------------------------------------------

    def owner(self) -> str:
        """Our token, for what we are about to hold. Cleans up after dead holders the first time."""
        if self._over:
            raise EngineError("this program is ending")
        self.home.open()
        if not self._reaped:
            self._reaped = True
            self.reap()
        return self._owner.token

    async def resolve(self, spec: SandboxSpec) -> ResolvedImage:
        if spec.image == "host":
            return ResolvedImage("host")
        from .images.resolve import resolve

        return await self.on_state(lambda: resolve(spec.image, self.home))

    async def bring_up(self, info: SandboxInfo, owner: str, origin: Origin, place: str) -> Live:
        """Start what the records know as ``info``, until it answers. It is not held yet: see ``install``."""
        spec = origin.spec
        if place != info.id or spec.name != info.name:  # its host name is its own, wherever it comes from
            spec = replace(spec, name=info.name, hostname=spec.hostname or info.name or info.id)
        request = StartRequest(place, spec, origin.image, self.home.place(owner, place), origin.restore)
        instance = await origin.engine.start(request)
        mux: HostMux | None = None
        try:
            mux = HostMux(instance.read_fd, instance.write_fd)
            mux.hello(hello_fields(instance, info.id))
            await first_answer(instance, mux, _START_TIMEOUT)
            info = replace(info, state="running", workdir=instance.hello.workdir)
            live = Live(info, owner, origin.engine, instance, mux, origin.spec, origin.image, place)
            live.used = asyncio.get_running_loop().time()
            await origin.lay_out(live)
        except BaseException:
            if mux is not None:
                mux.fail(SandboxDead("the sandbox did not start"))
            instance.kill()
            close_fds(instance)
            await asyncio.shield(wait_and_clean(instance))
            raise
        return live

    def install(self, live: Live) -> None:
        """From now on it is held, under its id."""
        live.mux.set_on_lost(lambda error: self._on_lost(live, error))
        live.mux.annotate = lambda stream, result: self._annotate(live, stream, result)
        self._live[live.info.id] = live
        live.watcher = self.background(self._watch(live))
        self.timeline.tend(live)

    async def discard(self, live: Live) -> None:
        """End one that was brought up and is not wanted after all."""
        await self._stop(live, SandboxDead("the sandbox was not wanted any more"))

    def find_live(self, sandbox_id: str) -> Live | None:
        """The sandbox, if it is held here, also on its way out."""
        return self._live.get(sandbox_id)

    def held_live(self, sandbox_id: str) -> Live | None:
        """The sandbox, if it is held here and not on its way out."""
        live = self._live.get(sandbox_id)
        return live if live is not None and not live.ending else None

    def lives(self) -> _Lives:
        return [live for live in self._live.values() if not live.ending]

    def set_expiry(self, live: Live, seconds: float) -> None:
        """It ends by itself after so many seconds, by a clock that does not jump."""
        loop = asyncio.get_running_loop()
        live.expires = loop.time() + seconds
        live.timer = loop.call_later(max(seconds, 0.0), self._expire, live.info.id)

    # -- ending --------------------------------------------------------------------

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

        def finish() -> None:
            if died and self.holder == "keeper":
                self.store.mark_dead(sandbox_id, reason, disown=True)
            else:
                self.store.remove(sandbox_id)

        try:
            # Should this fail (a failing disk), the record stays for the reaper, and nobody waits for us in vain.
            await self._stop(live, dead_error(live.info, reason or "it was closed"))
            async with self.timeline.turn(sandbox_id):  # what was just being done with it has come to its end
                if not (died and self.holder == "keeper"):
                    await self.delete_saved(sandbox_id)
                await self.on_state(finish)
        except OSError as error:
            if isinstance(error, SlopletError):
                raise
            raise EngineError(f"what the sandbox {sandbox_id} left could not be removed: {error}") from error
        finally:
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
        live = self._live.get(sandbox_id)
        if live is not None and not live.ending:
            live.ending = True
            self.background(self._end(live, "expired", reason="its time to live was over"))

    async def delete_saved(self, sandbox_id: str) -> None:
        """All that was saved of it. Whoever has some of it open (a fork) is waited for, and may need the state."""
        await self.off_loop(lambda: self.saved.delete_of_sandbox(sandbox_id))

    def forget(self, owner: str, sandbox_id: str) -> None:
        if owner:
            self.home.remove_place(owner, sandbox_id)
        self.saved.delete_of_sandbox(sandbox_id)
        self.store.remove(sandbox_id)

    def _release(self) -> None:
        self._owner.release()
        self.store.close()

    def end_now(self) -> None:
        """The synchronous backstop at interpreter exit: nothing survives us, also without a loop."""
        if self._pid != os.getpid():
            return
        self._over = True
        self.pools.end_now()
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
        self.pools.close_in_child()

    # -- small things ----------------------------------------------------------------

    def _annotate(self, live: Live, stream: HostStream, result: Fields) -> Fields:
        """Add OOM where the memory limit killed something while the command ran; what the agent says of it stays."""
        if stream.request.integer(Tag.OP) != Op.METRICS:  # who only looks does not keep it awake
            live.used = asyncio.get_running_loop().time()
        if stream.id not in live.running:
            return result
        before = live.running.pop(stream.id)
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

    def _announce(self, sandbox_id: str, request: Fields) -> None:
        if request.integer(Tag.OP) == Op.EXEC:
            argv = [part.decode("utf-8", "replace") for part in request.all(Tag.ARGV)]
            self.bus.emit(sandbox_id, "command.started", command=argv)

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

    async def off_loop(self, job: Callable[[], T]) -> T:
        """What may take seconds (hashing), in a thread of its own; finished even if the caller is cancelled."""
        return await asyncio.shield(self.background(asyncio.to_thread(job)))

    async def on_state(self, job: Callable[[], T]) -> T:
        try:
            work = asyncio.get_running_loop().run_in_executor(self._state, job)
        except RuntimeError as error:
            raise EngineError(f"no thread can be started: {error}", hint=_NO_ROOM) from error
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


def _named(info: SandboxInfo, ref: str) -> bool:
    return info.name is not None and info.name.casefold() == ref.casefold()


def _remember(reasons: dict[str, str], sandbox_id: str, reason: str) -> None:
    reasons[sandbox_id] = reason
    while len(reasons) > 1000:
        del reasons[next(iter(reasons))]


def _maybe(job: Callable[[], T]) -> T | None:
    try:
        return job()
    except SandboxNotFound:
        return None


_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()
_embedded: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Runtime] = weakref.WeakKeyDictionary()


async def embedded_runtime() -> Runtime:
    """The runtime of this event loop; it lives as long as the loop."""
    loop = asyncio.get_running_loop()
    runtime = _embedded.get(loop)
    if runtime is None:
        runtime = _embedded[loop] = Runtime()
    return runtime


def _end_all() -> None:
    for runtime in list(_runtimes):
        runtime.end_now()


def _close_all_in_child() -> None:
    for runtime in list(_runtimes):
        runtime.close_in_child()
    _runtimes.clear()
    _embedded.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_close_all_in_child)
