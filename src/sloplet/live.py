"""A sandbox that a runtime holds: its instance, its wire, and the small acts upon them. No records here."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from .controller import SandboxInfo
from .engines.base import Engine, Instance, ResolvedImage
from .errors import EngineError, ProtocolError, SandboxDead, SaveFailed, SlopletError, StartFailed
from .spec import SandboxSpec
from .wire.fields import Fields
from .wire.mux import HostMux
from .wire.schema import FreezeFlag, HelloFlag, Op, Tag
from .wire.streams import HostStream

if TYPE_CHECKING:
    from .network.egress import Egress
    from .volumes.opening import Opened

T = TypeVar("T")
_RING = 262144
_FREEZE = 5.0  # for everything inside to stand still
_FREEZE_ANSWER = 30.0


@dataclass
class Live:
    """A sandbox that this process holds."""

    info: SandboxInfo
    owner: str
    engine: Engine
    instance: Instance
    mux: HostMux
    spec: SandboxSpec  #: what it runs as: as asked for, and what its template adds
    image: ResolvedImage
    place: str  #: the id that its engine and its folder know it by: another than its own after a rollback
    egress: Egress | None = None  #: what serves its connections; None: it has no network
    volumes: Opened | None = None  #: what it has of volumes
    ending: bool = False
    farewell: SlopletError | None = None  #: what whoever still waits on it is told; None: that it is dead
    gate: asyncio.Event | None = None  #: while it stands still, nothing is asked of it: wait for this and look again
    expires: float | None = None  #: by the loop's clock
    word: int = 0  #: the number of who last set that
    first: bool = False  #: it has not slept since it began, with the time of its settings
    used: float = 0.0  #: when something was last asked of it, by the loop's clock
    chores: list[asyncio.Task[None]] = field(default_factory=list)  #: idle sleep, checkpoints
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    watcher: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    fault: str = ""
    distrust: str = ""  #: why its programs may not trust what opens their TLS
    running: dict[int, int | None] = field(default_factory=dict)  # stream id -> oom kills when it was opened
    denials: dict[int, int] = field(default_factory=dict)  # stream id -> refused connections when it was opened
    quiet: asyncio.TimerHandle | None = None  # while something is asked of it
    overdue: dict[int, asyncio.TimerHandle] = field(default_factory=dict)  # commands with a time limit


def hello_fields(
    instance: Instance, generation: str, env: Mapping[str, str] | None = None, *, still: bool = False
) -> Fields:
    """Who it is from now on. A restored one takes all of it, fresh entropy too, before anything in it goes on. ``env``:
    variables that its holder adds; what its settings say stays. ``still``: nothing in a restored one goes on."""
    config = instance.hello
    fields = Fields((Tag.USER, config.user), (Tag.WORKDIR, config.workdir), (Tag.RING, _RING))
    flags = (HelloFlag.NO_USERS if config.no_users else 0) | (HelloFlag.EGRESS if config.egress else 0)
    fields.add(Tag.FLAGS, int(flags | (HelloFlag.STILL if still else 0)))
    fields.add(Tag.ENTROPY, secrets.token_bytes(32))
    fields.add(Tag.GENERATION, f"{generation}-{secrets.token_hex(8)}")
    if config.home is not None:
        fields.add(Tag.HOME, config.home)
    if config.hostname is not None:
        fields.add(Tag.HOSTNAME, config.hostname)
    if config.memory is not None:
        fields.add(Tag.MEMORY, config.memory)
    for key, value in {**(env or {}), **dict(config.env)}.items():
        fields.add(Tag.ENV, f"{key}={value}")
    return fields


def ask_to_end(live: Live, grace: float) -> bool:
    try:
        live.mux.open(Fields((Tag.OP, int(Op.SHUTDOWN)), (Tag.TIMEOUT_MS, int(grace * 1000))))
    except SlopletError:
        return False
    return True


async def first_answer(instance: Instance, mux: HostMux, timeout: float) -> Fields:
    """The agent's HELLO, or why there is none."""
    try:
        async with asyncio.timeout(timeout):
            return await mux.peer_hello()
    except TimeoutError:
        raise StartFailed(
            f"the sandbox did not answer within {timeout:g} s", hint="is the machine overloaded?"
        ) from None
    except ProtocolError as error:
        raise StartFailed(f"the sandbox's agent answered nonsense: {error.message}") from error
    except EngineError:
        raise
    except SlopletError:
        ended = await within(instance.wait(), 2.0)
        reason = ended.reason if ended else "its agent closed the connection"
        raise StartFailed(f"the sandbox did not start: {reason}", hint="`sloplet doctor` checks this machine") from None


async def feel_pulse(live: Live, timeout: float) -> None:
    """The agent ends what is over its time; one that is stopped or stuck in the kernel does not. (A reader that is
    slow to take the output is no fault: an agent that answers is left alone.)"""
    try:
        async with asyncio.timeout(timeout):
            await live.mux.answers()
    except TimeoutError:
        live.fault = live.fault or "its agent does not answer any more"
        live.instance.kill()


async def freeze(live: Live, *, silent: bool = True) -> None:
    """Stop everything in it until ``thaw`` or HELLO. ``silent``: the agent says nothing more meanwhile; otherwise it
    serves on, but starts no command. SaveFailed if it does not answer."""
    request = Fields((Tag.OP, int(Op.FREEZE)), (Tag.TIMEOUT_MS, int(_FREEZE * 1000)))
    if not silent:
        request.add(Tag.FLAGS, int(FreezeFlag.SERVE))
    try:
        async with asyncio.timeout(_FREEZE + _FREEZE_ANSWER):
            stream = live.mux.open(request)
            if silent:
                live.mux.hold()  # it is saved between two frames
            await stream.result()
    except TimeoutError:
        raise SaveFailed(
            "the sandbox's agent does not answer, so its state cannot be saved", hint="try again"
        ) from None


def thaw(live: Live) -> Coroutine[Any, Any, None]:
    """Let it go on: whatever is asked of it after this call finds it going. To await is to wait until it does. One that
    is dead or does not answer is its watcher's matter."""
    live.mux.let_go()
    try:
        stream = live.mux.open(Fields((Tag.OP, int(Op.THAW))))
    except SlopletError:
        stream = None
    return _thawed(stream)


async def _thawed(stream: HostStream | None) -> None:
    try:
        async with asyncio.timeout(_FREEZE_ANSWER):
            if stream is not None:
                await stream.result()
    except (TimeoutError, SlopletError):
        pass


def dead_error(info: SandboxInfo, reason: str) -> SandboxDead:
    return SandboxDead(f"the sandbox {info.name or info.id} is dead: {reason}", hint="make a new one")


def close_fds(instance: Instance) -> None:
    for fd in {instance.read_fd, instance.write_fd}:
        if fd >= 0:
            try:
                os.close(fd)
            except OSError:
                pass
    instance.read_fd = instance.write_fd = -1


async def wait_and_clean(instance: Instance) -> None:
    await instance.wait()
    instance.cleanup()


async def within(work: Awaitable[T], seconds: float) -> T | None:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        return None
