"""Holding a gVisor sandbox: an ``Instance`` whose first process is a minder (agent/gvisor.c), which runs runsc's verbs
in the sandbox's jail on our word."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import SaveFailed, StartFailed
from . import verbs
from .base import HostStats
from .headroom import Headroom
from .launcher import Jailed, readable

_ANSWER = 8192
_STARTS, _SAVES = 1, 2  # agent/launch.h
_WORDS_SHOWN = 600
_LAST_WORDS = 5.0  # seconds, from the end of gVisor's kernel to that of the sandbox
_ALMOST_FULL = 1 << 20  # where gVisor itself stumbles, and says other things


class Verbs:
    """The control socket: one verb at a time, each answered by its wait status and runsc's last words."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setblocking(False)
        self._turn = asyncio.Lock()

    async def ask(self, words: Sequence[str], fds: Sequence[int] = (), how: int = 0) -> str:
        """Run a verb to its end. "" if it worked, else why not, in a sentence. Raises EOFError when there is no
        minder any more."""
        async with self._turn:
            try:
                message = struct.pack("<I", how) + b"".join(word.encode() + b"\0" for word in words)
                socket.send_fds(self._end, [message], list(fds))
                await readable(self._end.fileno())
                answer = self._end.recv(_ANSWER)
            except OSError as error:
                raise EOFError(str(error)) from error
        if len(answer) < 4:
            raise EOFError("the sandbox has ended")
        (status,) = struct.unpack_from("<i", answer)
        return describe(status, answer[4:].decode("utf-8", "replace"))

    def close(self) -> None:
        self._end.close()


def describe(status: int, words: str) -> str:
    """A verb's wait status (or the minder's negative errno) and what runsc wrote, as a sentence; "" for success."""
    if status == 0:
        return ""
    said = _message(words)
    if status < 0:
        return f"runsc was not run: {os.strerror(-status)}"
    if os.WIFSIGNALED(status):
        return f"runsc was killed by signal {os.WTERMSIG(status)}{': ' + said if said else ''}"
    return said or f"runsc failed without a word (exit code {os.waitstatus_to_exitcode(status)})"


def _message(words: str) -> str:
    """What runsc's log says went wrong, the first line of it; what follows is a stack."""
    found = re.search(r'"msg":"((?:[^"\\]|\\.)*)', words)
    text = words
    if found:
        with suppress(ValueError):
            text = str(json.loads(f'"{found[1]}"'))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:_WORDS_SHOWN] if lines else ""


class Minded(Jailed):
    """A gVisor sandbox. ``attach`` is called once, right after the launch."""

    _verbs: Verbs
    _outside: int | None = None
    _egress = False
    _headroom: Headroom

    def attach(self, verbs: Verbs, outside: int | None, *, egress: bool = False) -> None:
        """``outside``: the host's id of root inside, where that is not the caller's own. ``egress``: the agent brings
        what leaves to itself."""
        self._verbs = verbs
        self._egress = egress
        self._outside = outside
        self._headroom = Headroom(self._group)
        self._end.add_done_callback(lambda _: verbs.close())
        self._end.add_done_callback(lambda _: self._headroom.close())

    def stats(self) -> HostStats:
        """The host counts gVisor's threads, not the sandbox's processes, and the agent ends what uses too much memory
        before the host would."""
        return replace(super().stats(), pids=None, oom_kills=None)

    async def bring_up(self, restore: int | None) -> None:
        """Start the sandbox's own kernel and in it the agent, or what was saved. Raises StartFailed."""
        try:
            if restore is None:
                wrong = await self._verbs.ask(verbs.run_words(egress=self._egress), how=_STARTS)
            else:
                wrong = await self._verbs.ask(verbs.restore_words(egress=self._egress), [restore], _STARTS)
        except EOFError:
            ended = await self.wait()
            raise StartFailed(f"the sandbox did not start: {ended.reason}") from None
        if wrong:
            raise StartFailed(f"gVisor did not {'start' if restore is None else 'restore'} the sandbox: {wrong}")

    async def save(self, folder: int) -> None:
        # To its end, whatever becomes of the caller: half a checkpoint is no state to leave anybody in.
        await asyncio.shield(asyncio.ensure_future(self._save(os.dup(folder))))

    async def _save(self, folder: int) -> None:
        try:
            if self._outside is not None:
                os.fchown(folder, self._outside, self._outside)
            await self._headroom.lift()
            try:
                wrong = await self._verbs.ask(verbs.checkpoint_words(egress=self._egress), [folder], _SAVES)
            except EOFError:
                wrong = "the sandbox has ended"
            finally:
                if not self._end.done():
                    self._headroom.lower()
            settle(folder)
            if wrong.endswith("EOF"):  # gVisor's kernel has gone in the middle of it: what for is known in a moment
                await asyncio.wait({self._end}, timeout=_LAST_WORDS)
            if wrong and self._end.done():
                raise SaveFailed(f"the sandbox has ended while it was saved: {self._end.result().reason}")
            if wrong:
                full = os.fstatvfs(folder).f_bavail * os.fstatvfs(folder).f_frsize < _ALMOST_FULL
                wrong = "the disk is full" if full or "no space left" in wrong else wrong
                raise SaveFailed(f"the sandbox could not be saved: {wrong}", hint="it runs on; try again")
        finally:
            os.close(folder)


def settle(folder: int) -> None:
    """Make what was saved ours again, and readable for the ids of any sandbox that is to go on from it: they come by
    descriptor. Everybody else is kept out by the folder above, which is the caller's alone."""
    uid, gid = os.geteuid(), os.getegid()
    with suppress(OSError):
        os.fchown(folder, uid, gid)
        os.fchmod(folder, 0o755)
        for name in os.listdir(folder):
            os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)
            os.chmod(name, 0o644, dir_fd=folder)
