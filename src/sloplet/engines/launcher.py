"""Starting the launcher and holding what it started. Shared by the container and the process rung."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ..errors import StartFailed
from . import cgroups
from .agentbin import agent_program
from .base import Exit, Guarantee, HelloConfig, HostStats, cannot_save
from .plan import End

_PLAN_FD = 3
_CONTROL_FD = 4
_GIVEN_FD = 5
_STATUS_LIMIT = 16384
_CLEANUP_SECONDS = 2.0
_STUCK = 0.05


@dataclass(frozen=True)
class _Spawned:
    pid: int
    pidfd: int
    read_fd: int
    write_fd: int
    status_fd: int


def _plan_file(plan: bytes) -> int:
    fd = os.memfd_create("sloplet-plan", os.MFD_CLOEXEC)
    data = memoryview(plan)
    while data:
        data = data[os.write(fd, data) :]
    return fd


def _spawn(plan: bytes, control: int = -1, given: Sequence[int] = ()) -> _Spawned:
    """Start the launcher: wire on 0 and 1, its words on 2, the plan on 3, a minder's control socket on 4, what it is
    given beyond that from 5 on. A session of its own, so that Ctrl-C in the user's terminal does not reach the
    sandbox. Raises OSError."""
    program = agent_program()
    opened: list[int] = []

    def keep(fd: int) -> int:
        # Above the numbers that they become: no dup2 may overwrite one that is still to be moved.
        if fd < _GIVEN_FD + len(given):
            low, fd = fd, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _GIVEN_FD + len(given))
            os.close(low)
        opened.append(fd)
        return fd

    try:
        plan_fd = keep(_plan_file(plan))
        wire_in, write_fd = map(keep, os.pipe())
        read_fd, wire_out = map(keep, os.pipe())
        status_fd, status_out = map(keep, os.pipe())
        moves = [(wire_in, 0), (wire_out, 1), (status_out, 2), (plan_fd, _PLAN_FD)]
        if control >= 0:
            moves.append((keep(os.dup(control)), _CONTROL_FD))
        moves += [(keep(os.dup(fd)), _GIVEN_FD + number) for number, fd in enumerate(given)]
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for fd, target in moves]
        pid = os.posix_spawn(program, ["sloplet-agent", "launch"], {}, file_actions=actions, setsid=True)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        for fd in (read_fd, write_fd, status_fd):
            opened.remove(fd)
        return _Spawned(pid, pidfd, read_fd, write_fd, status_fd)
    finally:
        for fd in opened:
            os.close(fd)


def _abandon(spawned: _Spawned) -> None:
    """End a launcher that nobody will hold. Its sandbox, if there is one already, dies with it."""
    for fd in (spawned.read_fd, spawned.write_fd, spawned.status_fd, spawned.pidfd):
        os.close(fd)
    os.kill(spawned.pid, signal.SIGKILL)
    os.waitpid(spawned.pid, 0)


def _split(line: str) -> StartFailed:
    """The launcher's line "step: what: why: hint" as an error."""
    text = line.strip()
    return StartFailed(f"the sandbox did not start: {text}" if text else "the launcher ended without a word")


async def readable(fd: int) -> None:
    """Return once ``fd`` has something to read, or its end."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, wake)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


async def _readable_within(fd: int, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await readable(fd)
    except TimeoutError:
        return False
    return True


async def _first_word(fd: int) -> str:
    """What the launcher says until its "ok" line or its end."""
    said = b""
    while len(said) < _STATUS_LIMIT:
        await readable(fd)
        data = os.read(fd, 4096)
        if not data:
            break
        said += data
        if said.startswith(b"ok ") and said.endswith(b"\n"):
            break
    return said.decode("utf-8", "replace")


def describe_end(code: int, oom_seen: bool) -> Exit:
    """From the supervisor's wait code (negative: a signal ended it) to a sentence."""
    if code < 0:
        return Exit(f"its supervisor was killed by signal {-code}", oom_seen)
    oom = oom_seen or bool(code & End.OOM)
    kind = code & ~End.OOM
    if kind == End.CLEAN:
        return Exit("it ended", oom)
    if kind == End.STOPPED:
        return Exit("it was stopped", oom)
    if kind >= End.SIGNAL:
        number = kind - End.SIGNAL
        return Exit(f"its agent was killed by signal {number}{' (out of memory)' if oom else ''}", oom)
    return Exit("its agent failed", oom)


class Jailed:
    """An ``Instance``: a supervisor process, the wire, and cgroups."""

    def __init__(
        self,
        spawned: _Spawned,
        hello: HelloConfig,
        guarantees: tuple[Guarantee, ...],
        group: cgroups.GroupPlan,
        released: Callable[[], None],
        cleaned: Callable[[], None],
    ) -> None:
        self.read_fd = spawned.read_fd
        self.write_fd = spawned.write_fd
        self.hello = hello
        self.guarantees = guarantees
        self._supervisor = spawned.pid
        self._pidfd = spawned.pidfd
        self._agent = 0
        self._group = group
        self._released = released
        self._cleaned = cleaned
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Exit] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._on_end)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        try:
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            code = 0 if info is None else info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        except ChildProcessError:
            code = 0  # somebody set SIGCHLD to be ignored: the kernel threw the status away
        os.close(self._pidfd)
        self._pidfd = -1
        ended = describe_end(code, bool(self.oom_kills()))
        if code >= 0 or not self._agent:
            self._finish(ended)
        else:  # a killed supervisor takes the agent with it, but not at the same instant
            self._loop.create_task(self._await_agent(ended))

    async def _await_agent(self, ended: Exit) -> None:
        try:
            pidfd = os.pidfd_open(self._agent)
        except OSError:
            self._finish(ended)
            return
        try:
            with suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            while not await _readable_within(pidfd, _STUCK):
                for pid in _descendants(self._agent):  # see agent/supervise.c: they may hold its end up
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
        finally:
            os.close(pidfd)
            self._finish(ended)

    def _finish(self, ended: Exit) -> None:
        self._released()
        if not self._end.done():
            self._end.set_result(ended)

    async def started(self, status_fd: int) -> None:
        """Wait for the launcher's word. Raises StartFailed; the supervisor has ended then."""
        try:
            said = await _first_word(status_fd)
        finally:
            os.close(status_fd)
        if said.startswith("ok "):
            self._agent = int(said.split()[1])
            return
        await self.wait()
        raise _split(said)

    async def wait(self) -> Exit:
        return await asyncio.shield(self._end)

    def kill(self) -> None:
        if self._pidfd < 0:
            return
        # The supervisor ends every process and clears away; SIGCONT in case somebody has stopped it.
        with suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)

    async def give_up(self) -> None:
        """End one that does not come up: nobody has its wire yet. It is gone, and leaves nothing, when this returns."""
        os.close(self.read_fd)
        os.close(self.write_fd)
        self.kill()
        await asyncio.shield(self.wait())
        self.cleanup()

    def cleanup(self) -> None:
        cgroups.remove(self._group.folders, seconds=_CLEANUP_SECONDS)
        self._cleaned()

    def oom_kills(self) -> int | None:
        return cgroups.oom_kills(self._group)

    def stats(self) -> HostStats:
        return cgroups.stats(self._group)

    async def save(self, folder: int) -> None:
        raise cannot_save("container")

    def pids(self) -> tuple[int, ...]:
        if self._pidfd < 0:
            return ()
        return (self._supervisor, *_descendants(self._supervisor))


def _descendants(pid: int) -> list[int]:
    """Children are the thread's that made them: gVisor's kernel has many."""
    found: list[int] = []
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        with suppress(OSError, ValueError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
            children += [int(word) for word in file.read().split()]
    for child in children:
        found.append(child)
        found.extend(_descendants(child))
    return found


_J = TypeVar("_J", bound=Jailed)


async def launch(
    plan: bytes,
    hello: HelloConfig,
    guarantees: tuple[Guarantee, ...],
    hierarchy: cgroups.Hierarchy,
    group: cgroups.GroupPlan,
    released: Callable[[], None] = lambda: None,
    cleaned: Callable[[], None] = lambda: None,
    *,
    control: int = -1,
    given: Sequence[int] = (),
    kind: type[_J] = Jailed,  # type: ignore[assignment]
) -> _J:
    """Make the cgroups, start the launcher and wait until the agent serves. ``released`` is called when it has ended,
    ``cleaned`` by ``cleanup``; both when it fails, which leaves nothing behind. ``control``: the minder's end of its
    socket; ``given``: what the plan speaks of as GIVEN. Both are the caller's to close."""

    def give_back() -> None:
        cgroups.remove(group.folders, seconds=_CLEANUP_SECONDS)
        released()
        cleaned()

    try:
        cgroups.make(hierarchy, group)
    except OSError as error:
        released()
        cleaned()
        raise StartFailed(f"the sandbox's cgroup cannot be made: {error}") from error
    try:
        spawned = _spawn(plan, control, given)
    except OSError as error:  # perhaps after it had begun: then it takes a moment to be gone
        give_back()
        raise StartFailed(
            f"the launcher cannot be started: {error}", hint="are too many files or processes open?"
        ) from error
    try:
        instance = kind(spawned, hello, guarantees, group, released, cleaned)
    except OSError as error:  # the loop cannot watch it
        _abandon(spawned)
        give_back()
        raise StartFailed(f"the launcher cannot be watched: {error}") from error
    try:
        await instance.started(spawned.status_fd)
    except BaseException:
        await instance.give_up()
        raise
    return instance


def try_plan(plan: bytes, *, control: bool = False) -> str:
    """Run a plan with the PROBE flag. Empty if it works, else the launcher's words. Milliseconds, synchronous."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC) if control else -1
    try:
        spawned = _spawn(plan, nothing)
    except OSError as error:
        return f"the launcher cannot be started: {error}"
    finally:
        if control:
            os.close(nothing)
    try:
        said = b""
        while data := os.read(spawned.status_fd, 4096):
            said += data
        os.waitpid(spawned.pid, 0)
    finally:
        for fd in (spawned.read_fd, spawned.write_fd, spawned.status_fd, spawned.pidfd):
            os.close(fd)
    text = said.decode("utf-8", "replace").strip()
    return "" if text.startswith("ok ") else text or "the launcher ended without a word"
