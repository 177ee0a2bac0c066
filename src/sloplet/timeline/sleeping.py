"""Pause and resume, and recovery of what died."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..controller import SandboxInfo, Snapshot
from ..errors import (
    SandboxDead,
    SandboxNotFound,
    SandboxPaused,
    SlopletError,
)
from ..live import Live, within
from .origins import check_saves, saves
from .saving import Saving

if TYPE_CHECKING:
    from ..runtime import Runtime

_OVER = "its time to live was over"
_HELD = ("starting", "running")  # by somebody else, if not here
_EARLY = 0.1  # seconds: a timer may be that early
_LAST_PAUSE = 30.0  # for each of those that a leaving keeper pauses


class _MoreTime(Exception):
    """It was being put to sleep because its time was up, and got another one meanwhile."""


@dataclass(frozen=True)
class _Word:
    """A time to live that somebody has set."""

    number: int  #: of several the latest counts
    expires: float | None  #: by the loop's clock
    expires_at: float | None


class Sleeping(Saving):
    """See ``Controller``."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._words = itertools.count(1)
        self._alarms: dict[str, asyncio.TimerHandle] = {}  # when the time of one that sleeps is over

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> SandboxInfo:
        return await self._whole(self._pause(sandbox_id, memory=memory))

    async def _pause(
        self, sandbox_id: str, *, memory: bool = True, idle: float | None = None, due: bool = False
    ) -> SandboxInfo:
        """``idle``: only if nothing was asked of it for so long. ``due``: only if its time is up, and it has no other
        one then."""
        runtime = self._runtime
        async with self.turn(sandbox_id):
            live = runtime.held_live(sandbox_id)
            if live is None:
                info = await self._record(sandbox_id)
                if info.state == "paused":
                    return info
                raise runtime.not_held(sandbox_id)
            if due and not _is_due(live):
                return live.info
            check_saves(live.engine, memory=memory)
            draft = await runtime.off_loop(runtime.saved.begin)
            snapshot: Snapshot | None = None
            try:
                if idle is not None and not unused(live, idle):  # somebody came just now
                    await runtime.off_loop(lambda: runtime.saved.abandon(draft))
                    return live.info
                share = None if memory else await self._shares(live, draft)
                async with self._standing_still(live, silent=memory) as still:
                    await self._write(live, draft, share)
                    snapshot = await self._publish(draft, live, "pause", "live" if memory else "disk")
                    if due and not _is_due(live):
                        raise _MoreTime
                    await runtime.on_state(lambda: self._mark_paused(live, snapshot, for_good=due))
                    still.stays = True
            except BaseException as error:
                await asyncio.shield(runtime.off_loop(lambda: runtime.saved.abandon(draft)))
                await asyncio.shield(self._drop(snapshot.id if snapshot is not None else None))
                if isinstance(error, _MoreTime):
                    return live.info
                raise
            too_late = due and not _is_due(live)  # it got another time while that was put on record
            await runtime.put_away(live, _paused(live.info, memory=memory))
            runtime.background(self._drop(live.info.saved))
            runtime.bus.emit(sandbox_id, "paused", bytes=snapshot.bytes, kind=snapshot.kind, expired=due)
            if too_late:
                return await self._wake(sandbox_id)
            if not due:
                self._set_alarm(sandbox_id, live.expires)
            return await self._record(sandbox_id)

    def _set_alarm(self, sandbox_id: str, expires: float | None) -> None:
        self.drop_alarm(sandbox_id)
        if expires is not None:
            loop = asyncio.get_running_loop()
            self._alarms[sandbox_id] = loop.call_at(expires, self._overslept, sandbox_id)

    def drop_alarm(self, sandbox_id: str) -> None:
        """It does not sleep any more, or is gone."""
        if (alarm := self._alarms.pop(sandbox_id, None)) is not None:
            alarm.cancel()

    def _overslept(self, sandbox_id: str) -> None:
        self._alarms.pop(sandbox_id, None)
        self._runtime.background(self._forget(sandbox_id))

    async def _forget(self, sandbox_id: str) -> None:
        """Its time was over while it slept: nobody listens for it, or keeps values for it, any more. (What is saved of
        it goes with the reaper.)"""
        runtime = self._runtime
        async with self.turn(sandbox_id):
            if runtime.holds(sandbox_id) or not await self._is_over(sandbox_id):
                return  # it was woken before: it ends by itself; or it has another time, or none
            runtime.exposed.close(sandbox_id)
            runtime.networks.drop(sandbox_id)
        if runtime.on_gone is not None:
            runtime.on_gone()

    async def _is_over(self, sandbox_id: str) -> bool:
        """Whether the time of one that sleeps is up, and it was to end then."""
        try:
            info = await self._record(sandbox_id)
        except SandboxNotFound:
            return True
        return _has_passed(info) and info.spec.on_ttl == "end"

    def _mark_paused(self, live: Live, snapshot: Snapshot, *, for_good: bool) -> None:
        """Its time to live is put on record by the clock that did not jump while it ran."""
        expires = None if live.expires is None else time.time() + live.expires - time.monotonic()
        self._runtime.store.mark_paused(
            live.info.id, snapshot.id, snapshot.created_at, expires_at=expires, for_good=for_good
        )

    async def set_ttl(self, sandbox_id: str, ttl: float | None) -> SandboxInfo:
        return await self._whole(self._set_ttl(sandbox_id, ttl))

    async def _set_ttl(self, sandbox_id: str, ttl: float | None) -> SandboxInfo:
        info = await self._note_ttl(sandbox_id, ttl)
        if ttl == 0:
            return await self._at_once(info)
        self._runtime.bus.emit(sandbox_id, "ttl", expires_at=info.expires_at)
        return info

    async def _note_ttl(self, sandbox_id: str, ttl: float | None) -> SandboxInfo:
        """One that runs has it at once, not only when it is its turn: whoever is about to put it to sleep sees that.
        (What is to be done at once is not: its caller does it.)"""
        runtime, now = self._runtime, asyncio.get_running_loop().time()
        when = (None, None) if ttl is None else (now + ttl, time.time() + ttl)
        word = _Word(next(self._words), *when)
        early = None if ttl == 0 else runtime.held_live(sandbox_id)
        before = None if early is None else self._hear(early, word)
        try:
            async with self.turn(sandbox_id):
                live = runtime.held_live(sandbox_id)
                info = await self._record(sandbox_id)
                if live is None and (runtime.holds(sandbox_id) or info.saved is None or info.state in _HELD):
                    raise runtime.not_held(sandbox_id, info)
                await runtime.on_state(lambda: runtime.store.set_expiry(sandbox_id, word.expires_at))
                if live is None:
                    self._set_alarm(sandbox_id, word.expires)
                    return replace(info, expires_at=word.expires_at)
                self._hear(live, word)
                return live.info
        except BaseException:
            if early is not None and before is not None and early.word == word.number and not early.ending:
                self._hear(early, replace(before, number=next(self._words)))
            raise

    def _hear(self, live: Live, word: _Word) -> _Word | None:
        """Returns what counted before; None where a later word has come already."""
        if live.word >= word.number:
            return None
        before = _Word(live.word, live.expires, live.info.expires_at)
        live.word, live.info = word.number, replace(live.info, expires_at=word.expires_at)
        left = None if word.expires is None else word.expires - asyncio.get_running_loop().time()
        self._runtime.set_expiry(live, left)
        return before

    async def _at_once(self, info: SandboxInfo) -> SandboxInfo:
        """It has no time left: what is to be done then is done now."""
        runtime = self._runtime
        live = runtime.find_live(info.id)
        if live is not None:
            await self._time_is_up(info.id)
            if live.ending:
                await live.gone.wait()
        elif info.spec.on_ttl == "end":
            await runtime.kill(info.id)
            runtime.bus.emit(info.id, "expired", reason=_OVER)
        else:
            await runtime.on_state(lambda: runtime.store.set_expiry(info.id, None))
        try:
            return await runtime.find(info.id)
        except SandboxNotFound:
            return replace(info, state="ended")

    async def time_is_up(self, sandbox_id: str) -> None:
        """Its time to live is over: what its settings say is done."""
        await self._whole(self._time_is_up(sandbox_id))

    async def _time_is_up(self, sandbox_id: str) -> None:
        runtime = self._runtime
        live, why = runtime.held_live(sandbox_id), _OVER
        if live is None or not _is_due(live):
            return
        if live.info.spec.on_ttl != "end":
            try:
                await self._pause(sandbox_id, memory=live.info.spec.on_ttl == "pause", due=True)
                return
            except SlopletError as error:
                live = runtime.held_live(sandbox_id)
                if live is None:
                    return
                runtime.bus.emit(sandbox_id, "sleep.failed", reason=str(error))
                if not _is_due(live):
                    return
                why = f"{_OVER}, and it could not be paused: {error}"
        runtime.expire(live, why)
        await live.gone.wait()

    async def pause_all(self) -> None:
        """What can be saved and was meant to stay, before its holder goes."""
        lives = [live for live in self._runtime.lives() if _meant_to_stay(live)]

        async def one(live: Live) -> None:
            try:
                await within(self.pause(live.info.id, memory=saves(live.engine)), _LAST_PAUSE)
            except SlopletError:
                pass  # it ends like those that cannot be saved

        await asyncio.gather(*(one(live) for live in lives))

    async def release(self, sandbox_id: str) -> None:
        live = self._runtime.held_live(sandbox_id)
        if live is not None and live.info.name is not None and saves(live.engine):
            try:
                await self.pause(sandbox_id)
            except (SandboxDead, SandboxNotFound):
                pass

    async def awake(self, sandbox_id: str, *, wake: bool = True) -> Live:
        """The sandbox, running: one that changes its state is waited for, one that sleeps is woken. ``wake`` False: it
        is not, SandboxPaused."""
        runtime = self._runtime
        while True:
            live = runtime.find_live(sandbox_id)
            if live is not None and live.gate is not None:
                await live.gate.wait()
            elif live is not None and not live.ending:
                return live
            elif live is None and await self.asleep(sandbox_id):
                if not wake:
                    info = await self._record(sandbox_id)
                    raise SandboxPaused(f"the sandbox {info.name or info.id} is paused", hint="resume() it")
                await self.resume(sandbox_id)
            elif runtime.find_live(sandbox_id) is live:  # else somebody has just woken it
                raise runtime.not_held(sandbox_id)

    async def asleep(self, sandbox_id: str) -> bool:
        """Whether it can go on from something that was saved (or somebody is about to make it)."""
        try:
            info = await self._record(sandbox_id)
        except SandboxNotFound:
            return False
        return info.state == "paused" or (info.saved is not None and info.state in ("dead", "starting"))

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        return await self._whole(self._resume(sandbox_id))

    async def _resume(self, sandbox_id: str) -> SandboxInfo:
        async with self.turn(sandbox_id):
            live = self._runtime.held_live(sandbox_id)
            if live is not None:
                return live.info
            return await self._wake(sandbox_id)

    async def _wake(self, sandbox_id: str, back_to: Snapshot | None = None) -> SandboxInfo:
        """From what was saved of it, or from another of its snapshots. The caller has its turn."""
        runtime = self._runtime
        before = await self._record(sandbox_id)
        if before.state not in ("paused", "dead") or before.saved is None or runtime.holds(sandbox_id):
            raise runtime.not_held(sandbox_id, before)
        over = _has_passed(before)
        if over and before.spec.on_ttl == "end":
            if not await runtime.on_state(lambda: runtime.store.ends(sandbox_id)):
                raise runtime.not_held(sandbox_id, before)
            self.drop_alarm(sandbox_id)
            runtime.exposed.close(sandbox_id)
            await runtime.delete_saved(sandbox_id)
            await runtime.on_state(lambda: runtime.forget("", sandbox_id))
            runtime.networks.drop(sandbox_id)
            raise SandboxNotFound(f"the sandbox {before.name or before.id} is gone: its time to live was over")

        def claim() -> tuple[str, SandboxInfo]:
            owner = runtime.owner()
            info = runtime.store.claim(sandbox_id, owner, runtime.holder)
            try:
                runtime.home.make_place(owner, sandbox_id)
            except BaseException:
                runtime.store.unclaim(sandbox_id, before.state, before.reason)
                raise
            return owner, info

        def give_back() -> None:
            runtime.home.remove_place(owner, sandbox_id)
            runtime.store.unclaim(sandbox_id, before.state, before.reason)

        owner, info = await runtime.on_state(claim)
        if before.holder != runtime.holder:
            runtime.networks.drop(sandbox_id)  # it was elsewhere: what is known here of its network may be old
        try:
            async with self.saved(before.saved if back_to is None else back_to.id) as origin:
                live = await runtime.bring_up(info, owner, origin, sandbox_id)
        except BaseException:
            await asyncio.shield(runtime.on_state(give_back))
            raise
        recovered = before.saved_at if before.state == "dead" and back_to is None else None
        keep = live.spec.checkpoint_every is not None
        expires = None if over else before.expires_at
        if expires is None and before.spec.longest is not None:
            expires = time.time() + before.spec.longest
        live.info = replace(
            live.info,
            reason="",
            saved=before.saved if keep else None,
            saved_at=before.saved_at if keep else None,
            head=before.head if back_to is None else head_at(back_to),
            recovered_from=recovered,
            expires_at=expires,
        )
        runtime.install(live)

        def resumed() -> None:
            runtime.store.mark_resumed(sandbox_id, workdir=live.info.workdir, recovered_from=recovered, keep_saved=keep)
            if expires != before.expires_at:
                runtime.store.set_expiry(sandbox_id, expires)

        try:
            await runtime.on_state(resumed)
        except BaseException:
            if not live.ending:  # nobody killed it: it goes on sleeping
                await asyncio.shield(runtime.put_away(live, _paused(live.info, memory=True)))
                await asyncio.shield(runtime.on_state(give_back))
            raise
        if back_to is not None:
            await self._set_head(sandbox_id, live, live.info.head)
        if not keep:
            runtime.background(self._drop(before.saved))
        self.drop_alarm(sandbox_id)
        if expires is not None and not live.word:
            runtime.set_expiry(live, expires - time.time())
        if recovered is not None:
            runtime.bus.emit(sandbox_id, "recovered", saved_at=recovered, reason=before.reason)
        else:
            runtime.bus.emit(sandbox_id, "resumed")
        return live.info


def head_at(snapshot: Snapshot) -> str | None:
    """Where in the tree of snapshots a sandbox is that was put back to this state."""
    return snapshot.id if snapshot.role == "snapshot" else snapshot.parent


def unused(live: Live, seconds: float) -> bool:
    return not live.mux.waiting and live.used + seconds <= asyncio.get_running_loop().time()


def _is_due(live: Live) -> bool:
    """Whether its time is up: it may have got another one since somebody said so."""
    return live.expires is not None and live.expires <= asyncio.get_running_loop().time() + _EARLY


def _has_passed(info: SandboxInfo) -> bool:
    return info.expires_at is not None and info.expires_at <= time.time()


def _meant_to_stay(live: Live) -> bool:
    """And can. One whose engine saves files only asks for that by its settings: it does not go on where it was."""
    if saves(live.engine):
        return live.info.spec.stays
    return live.info.spec.on_ttl == "pause-disk"


def _paused(info: SandboxInfo, *, memory: bool) -> SandboxPaused:
    hint = "its processes can then be attached to" if memory else "its files are there, and nothing runs in it"
    return SandboxPaused(f"the sandbox {info.name or info.id} was paused", hint=f"resume() it; {hint}")
