"""AsyncSandbox: a computer of one's own. Knows only the Controller protocol.

``Sandbox`` in ``sync.py`` is the same object without ``await``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from . import transfer
from .code.api import AsyncCode
from .code.contexts import AsyncContexts
from .code.registry import Registry
from .controller import Controller, Event, SandboxInfo, Stream
from .engines.base import Guarantee
from .errors import ProcessNotFound, ProtocolError, SandboxClosed, SandboxNotFound
from .files import AsyncFiles, records
from .finding import create_or_find, holder_at, place_of
from .history import AsyncHistory
from .imaged import AsyncImaged
from .netspec import UNSAID, Network, NetworkSpec, Secret, check_arguments
from .network_api import Asker, AskFunction, AsyncNetwork, AsyncPorts, read_secrets
from .process import (
    DEFAULT_MAX_OUTPUT,
    AsyncProcess,
    Command,
    Output,
    checked,
    collect,
    exec_request,
    make_capture,
    process_info,
    signal_number,
)
from .results import Metrics, ProcessInfo, Progress, Result
from .spec import SandboxSpec, check_name, parse_size
from .volumespec import Volume
from .wire.fields import Fields
from .wire.mux import request
from .wire.schema import ExecFlag, Op, SignalFlag, Tag

if TYPE_CHECKING:
    from .remote.place import Place
    from .s3.settings import S3

OnProgress = Callable[[Progress], None]
_MAX_PROCESSES = 100_000
_list = list  # the class has a method of that name
_TO_BE_BUILT = "(built when it starts)"


@runtime_checkable
class Recipe(Protocol):
    """An image that is built first (``sloplet.Image``)."""

    async def resolve_reference(
        self, *, engine: str = "auto", at_least: str | None = None, place: Place | None = None
    ) -> str:
        """Build it there (None: here), on an engine as asked for, or find it built; what to call it then."""


class AsyncSandbox(AsyncHistory, AsyncPorts, AsyncImaged, AsyncCode):
    """A sandbox. Nothing is started before it is entered or first used.

    Without a name it is held by this process and gone when closed. With a name it is held by the keeper:
    leaving the block pauses it (where the engine can save processes; else it runs on), opening it again, from any
    process, wakes it; ``kill()`` ends it. Opening a name with other settings than it was made with is
    ``SandboxMismatch``. With ``server`` and ``key`` (or SLOPLET_URL and SLOPLET_KEY) it is on that server instead.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        image: str | Recipe = "host",
        engine: str = "auto",
        at_least: str | None = None,
        cpus: float | None = None,
        memory: int | str | None = None,
        disk: int | str | None = None,
        pids: int | None = None,
        open_files: int | None = None,
        ttl: float | str | None = None,
        on_ttl: str = "end",
        network: str | Network | NetworkSpec | Mapping[str, Any] = UNSAID,
        secrets: Mapping[str, Secret] | None = None,
        ports: Mapping[int, int] | Sequence[int] = (),
        links: Mapping[str, Any] | None = None,
        volumes: Mapping[str, str | os.PathLike[str] | Volume] | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        sudo: bool | None = None,
        cloud_init: str | os.PathLike[str] | None = None,
        allow_weaker: bool = False,
        template: str | None = None,
        idle: float | str | None = None,
        undo: int = 0,
        checkpoint_every: float | str | None = None,
        pool: int = 0,
        labels: Mapping[str, str] | None = None,
        server: str | None = None,
        key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        controller: Controller | None = None,
    ) -> None:
        asked = None
        if cloud_init is not None:
            from .cloudinit.asked import asked as read_cloud_init

            asked = read_cloud_init(cloud_init)
            env = {**asked.env, **(env or {})}
        recipe = image if isinstance(image, Recipe) else None
        if isinstance(network, Mapping):
            network = check_arguments(network)
        self._spec = SandboxSpec.make(
            name, image=image if recipe is None else _TO_BE_BUILT, engine=engine, at_least=at_least, cpus=cpus,
            memory=memory, disk=disk, pids=pids, open_files=open_files, ttl=ttl, on_ttl=on_ttl, network=network,
            secrets=secrets, ports=ports, links=links, volumes=volumes, env=env, workdir=workdir, user=user, sudo=sudo,
            allow_weaker=allow_weaker, template=template, idle=idle,
            undo=undo, checkpoint_every=checkpoint_every, pool=pool, labels=labels,
            cloud_init=asked.spec if asked else None, hostname=asked.hostname if asked else None,
        )  # fmt: skip
        place = None if controller is not None else place_of(server, key, ca)
        self._init(controller, secrets, network if isinstance(network, Network) else None, recipe, place)

    def _init(
        self,
        controller: Controller | None,
        secrets: Mapping[str, Secret] | None = None,
        network: Network | None = None,
        recipe: Recipe | None = None,
        place: Place | None = None,
    ) -> None:
        self._place = place
        self._controller: Controller | None = controller
        self._info: SandboxInfo | None = None
        self._starting: asyncio.Lock | None = None
        self._closed = False
        self._recipe = recipe
        self._secrets = dict(secrets or {})
        self._values = {} if network is None else dict(network.values)
        self._ask: AskFunction | None = None if network is None else network.ask
        self._asker = Asker()
        self.files = AsyncFiles(self._open)
        self.network = AsyncNetwork(self._holder, self._asker)
        self._kernels = Registry(self._open, self.files, self.processes, self.start)
        self.contexts = AsyncContexts(self._kernels)

    @classmethod
    async def connect(
        cls,
        ref: str,
        *,
        server: str | None = None,
        key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        controller: Controller | None = None,
    ) -> Self:
        """The sandbox of that name or id, as it is. SandboxNotFound if there is none."""
        held = controller or await holder_at(place_of(server, key, ca), named=True)
        return cls._adopt(held, await held.find(ref))

    @classmethod
    async def load(
        cls,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        server: str | None = None,
        key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        controller: Controller | None = None,
    ) -> Self:
        """Start the sandbox that ``export`` wrote to an archive, as a new one. Every byte is checked first."""
        if name is not None:
            check_name(name)
        held = controller or await holder_at(place_of(server, key, ca), named=name is not None)
        return cls._adopt(held, await held.load(os.path.abspath(os.fspath(path)), name=name))

    @classmethod
    def _adopt(cls, controller: Controller, info: SandboxInfo) -> Self:
        self = cls.__new__(cls)
        self._init(controller)
        self._info = info
        self._spec = info.spec
        return self

    def _inherit(self, parent: Self) -> None:
        self._ask = parent._ask
        if self._ask is not None and self._controller is not None:
            self._asker.listen(self._controller, self.id, self._ask)

    def _learn(self, info: SandboxInfo) -> None:
        self._info = info
        self._kernels.forget()

    async def _holder(self) -> tuple[Controller, str]:
        info = await self.start()
        assert self._controller is not None
        return self._controller, info.id

    @classmethod
    async def list(
        cls,
        *,
        server: str | None = None,
        key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        controller: Controller | None = None,
    ) -> _list[SandboxInfo]:
        """All sandboxes of this SLOPLET_HOME that the keeper holds; all of the key's, on a server."""
        held = controller or await holder_at(place_of(server, key, ca), named=True)
        return await held.list()

    # -- life ------------------------------------------------------------------

    async def start(self) -> SandboxInfo:
        """Start it, or find it by its name. Idempotent; entering the block and first use do it too."""
        if self._closed:
            raise SandboxClosed("this sandbox object was closed", hint="make a new Sandbox")
        if self._info is not None:
            return self._info
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._info is None:
                if self._controller is None:
                    self._controller = await holder_at(self._place, named=self._spec.name is not None)
                # before anything is made that a missing one would leave
                values = {**await read_secrets(self._secrets), **self._values}
                if self._recipe is not None:
                    there = getattr(self._controller, "place", None)  # of a server's
                    built = await self._recipe.resolve_reference(
                        engine=self._spec.engine, at_least=self._spec.at_least, place=there
                    )
                    self._spec = replace(self._spec, image=built)
                info = await create_or_find(self._controller, self._spec)
                await self._furnish(self._controller, info, values)
                self._info = info
        return self._info

    async def _furnish(self, controller: Controller, info: SandboxInfo, values: dict[str, str | None]) -> None:
        """What it needs of this process before anything runs in it: the values of its secrets, and whom to ask."""
        try:
            if values:
                await controller.set_secrets(info.id, values)
            if self._ask is not None:
                self._asker.listen(controller, info.id, self._ask)
        except BaseException:
            if info.name is None:
                await asyncio.shield(controller.kill(info.id))
            raise

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go: an unnamed sandbox ends, a named one is paused where its engine can save it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._asker.let_go()
        if self._info is None or self._controller is None:
            return
        if self._info.name is None:
            await asyncio.shield(self._controller.kill(self._info.id))
        else:
            await asyncio.shield(self._controller.release(self._info.id))

    async def kill(self) -> None:
        """End the sandbox and remove all it had. Idempotent."""
        self._closed = True
        self._asker.let_go()
        if self._info is None and self._spec.name is not None:
            try:
                self._controller = self._controller or await holder_at(self._place, named=True)
                self._info = await self._controller.find(self._spec.name)
            except SandboxNotFound:
                return
        if self._info is not None and self._controller is not None:
            await asyncio.shield(self._controller.kill(self._info.id))

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        return self._spec

    @property
    def name(self) -> str | None:
        return self._spec.name

    @property
    def id(self) -> str:
        """Its id, once it has started."""
        return self._known().id

    @property
    def engine(self) -> str:
        """The engine that runs it, once it has started."""
        return self._known().engine

    @property
    def workdir(self) -> str:
        """The directory that commands and relative paths begin in, once it has started."""
        return self._known().workdir

    def _known(self) -> SandboxInfo:
        if self._info is None:
            raise SandboxClosed("the sandbox has not started yet", hint="enter the block, or call start()")
        return self._info

    async def info(self) -> SandboxInfo:
        """Its state as the holder knows it now."""
        info = await self.start()
        assert self._controller is not None
        return await self._controller.find(info.id)

    # -- commands --------------------------------------------------------------

    async def run(
        self,
        command: Command | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | str | None = None,
        input: str | bytes | None = None,
        check: bool = False,
        text: bool = True,
        on_stdout: Output | None = None,
        on_stderr: Output | None = None,
        max_output: int | str = DEFAULT_MAX_OUTPUT,
        pty: bool | tuple[int, int] = False,
    ) -> Result:
        """Run a command to its end. A string goes to /bin/sh, a list is the argument vector; without one it is what the
        image runs by itself.

        ``timeout`` ends it with everything it started (``timed_out``). ``on_stdout`` and ``on_stderr`` get the
        output as it comes: text, or bytes with ``text=False``.
        Output beyond ``max_output`` is counted and dropped (``truncated``). ``check`` raises CommandFailed.
        """
        capture = make_capture(max_output, text, on_stdout, on_stderr)
        if command is None:
            command = await self.image_command()
        fields = exec_request(command, cwd=cwd, env=env, user=user, timeout=timeout, pty=pty, stdin=input is not None)
        stream = await self._open(fields)
        if input is None:
            return checked(await collect(stream, capture), check)
        feeder = asyncio.ensure_future(_feed(stream, input))
        try:
            return checked(await collect(stream, capture), check)
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)

    async def spawn(
        self,
        command: Command | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | str | None = None,
        pty: bool | tuple[int, int] = False,
        stdin: bool = False,
        detached: bool = False,
        tag: str | None = None,
        text: bool = True,
        max_output: int | str = DEFAULT_MAX_OUTPUT,
    ) -> AsyncProcess:
        """Start a command and return at once. ``pty`` gives it a terminal (``True`` or ``(rows, cols)``), ``stdin`` a
        pipe to write to. ``detached``: it goes on when nobody follows it, until the sandbox ends."""
        most = parse_size(max_output, "max_output")
        if command is None:
            command = await self.image_command()
        stream = await self._open(
            exec_request(
                command, cwd=cwd, env=env, user=user, timeout=timeout, pty=pty, stdin=stdin, detached=detached, tag=tag
            )
        )
        return await _started(stream, text, most)

    async def processes(self) -> _list[ProcessInfo]:
        """Every process started through this API, running or ended lately."""
        found: _list[ProcessInfo] = []
        async for record in records(await self._open(request(Op.PS))):
            found.append(process_info(record))
            if len(found) > _MAX_PROCESSES:
                raise ProtocolError("the sandbox lists more processes than there can be")
        return sorted(found, key=lambda info: info.pid)

    async def attach(
        self,
        pid: int,
        *,
        replay: bool = True,
        lossy: bool = False,
        text: bool = True,
        max_output: int | str = DEFAULT_MAX_OUTPUT,
        by_os_pid: bool = False,
    ) -> AsyncProcess:
        """Follow a process by its ``pid`` from ``processes()``: first what is kept of its output (``replay``), then
        what comes. ``lossy`` never holds the process up. Works from another process too. ``by_os_pid``: the number is
        the kernel's inside the sandbox (``os_pid``)."""
        number = Tag.OSPID if by_os_pid else Tag.PID
        fields = request(Op.ATTACH, (number, pid), (Tag.FLAGS, int(ExecFlag.LOSSY) if lossy else 0))
        if not replay:
            fields.add(Tag.FROM_OUT, -1).add(Tag.FROM_ERR, -1)
        return await _started(await self._open(fields), text, parse_size(max_output, "max_output"))

    async def signal(self, pid: int, signal: int | str = "TERM", *, tree: bool = True, by_os_pid: bool = False) -> None:
        """Send a signal to a process by its ``pid`` from ``processes()`` and to everything it started."""
        flags = 0 if tree else int(SignalFlag.MAIN_ONLY)
        number = Tag.OSPID if by_os_pid else Tag.PID
        stream = await self._open(
            request(Op.SIGNAL, (number, pid), (Tag.SIGNUM, signal_number(signal)), (Tag.FLAGS, flags))
        )
        await stream.result()

    async def _check(self, command: Command, timeout: float) -> Result:
        return await self.run(command, timeout=timeout)

    async def _ended(self, pid: int) -> None:
        try:
            await (await self.attach(pid, replay=False, lossy=True, max_output=1)).wait()
        except ProcessNotFound:
            pass

    async def _send_signal(self, pid: int, signal: str) -> None:
        await self.signal(pid, signal)

    # -- files -----------------------------------------------------------------

    async def upload(
        self,
        source: str | os.PathLike[str],
        target: str = ".",
        *,
        on_progress: OnProgress | None = None,
        s3: S3 | None = None,
    ) -> Progress:
        """Copy a file or a directory of this machine into the sandbox. A directory's content goes into ``target``.
        ``s3://BUCKET/KEY`` is an object, or what is below that key; ``s3`` says which S3 and as whom."""
        await self.start()
        return await transfer.upload(self.files, source, target, on_progress, s3=s3)

    async def download(
        self,
        source: str,
        target: str | os.PathLike[str],
        *,
        on_progress: OnProgress | None = None,
        s3: S3 | None = None,
    ) -> Progress:
        """Copy a file or a directory out of the sandbox. Links that lead out of it and special files are left out.
        The target may be ``s3://BUCKET/KEY``; ``s3`` says which S3 and as whom."""
        await self.start()
        return await transfer.download(self.files, source, target, on_progress, s3=s3)

    # -- what is going on ------------------------------------------------------

    async def metrics(self) -> Metrics:
        """What it uses now."""
        info = await self.start()
        assert self._controller is not None
        stream = await self._open(request(Op.METRICS))
        inside, outside = await stream.result(), await self._controller.stats(info.id)
        host_cpu, host_memory, host_pids = outside.cpu_us, outside.memory, outside.pids
        # What the file system really has: a default may have been lowered, and on the process rung it is the host's.
        disk_total = inside.integer(Tag.DISK_TOTAL, 0)
        watched = outside.oom_kills is None and Tag.COUNT in inside  # no cgroup, but the agent's watchdog
        own_disk = disk_total <= info.spec.limits.disk
        return Metrics(
            cpu_seconds=(inside.integer(Tag.CPU_US) if host_cpu is None else host_cpu) / 1e6,
            memory=inside.integer(Tag.MEMORY) if host_memory is None else host_memory,
            memory_limit=info.spec.limits.memory,
            memory_peak=outside.memory_peak,
            pids=inside.integer(Tag.PIDS) if host_pids is None else host_pids,
            pids_limit=info.spec.limits.pids,
            disk_used=inside.integer(Tag.DISK_USED),
            disk_limit=disk_total or info.spec.limits.disk,
            uptime=inside.integer(Tag.UPTIME_MS) / 1000,
            oom_kills=inside.integer(Tag.COUNT) if watched else outside.oom_kills,
            source={
                "cpu_seconds": "agent" if host_cpu is None else "cgroup",
                "memory": "agent" if host_memory is None else "cgroup",
                "pids": "agent" if host_pids is None else "cgroup",
                "disk_used": "agent" if own_disk else "the host's file system, with all else on it",
            },
        )

    async def guarantees(self) -> tuple[Guarantee, ...]:
        """What is enforced, at which value, by what. Truthful."""
        info = await self.start()
        assert self._controller is not None
        return await self._controller.guarantees(info.id)

    async def events(self) -> AsyncIterator[Event]:
        """What happens to this sandbox from now on, until it ends."""
        info = await self.start()
        assert self._controller is not None
        async for event in self._controller.events(info.id):
            yield event

    async def _open(self, fields: Fields) -> Stream:
        info = await self.start()
        assert self._controller is not None
        return await self._controller.open(info.id, fields)


async def _started(stream: Stream, text: bool, max_output: int) -> AsyncProcess:
    try:
        return AsyncProcess(stream, await stream.started(), text=text, max_output=max_output)
    except BaseException:
        stream.reset()
        raise


async def _feed(stream: Stream, data: str | bytes) -> None:
    await stream.send(data.encode() if isinstance(data, str) else bytes(data))
    await stream.send_end()
