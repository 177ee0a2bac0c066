"""The synchronous API: the async one, called on the loop thread. One line per method.

Signatures and documentation are the async methods' own (a test compares them), so there is nothing to keep
in step: what takes an argument there takes it here.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from .code.api import AsyncCode
from .code.contexts import AsyncContexts
from .controller import Controller, SandboxInfo
from .files import AsyncFiles
from .history import AsyncHistory
from .imaged import AsyncImaged
from .network_api import AsyncNetwork, AsyncPorts
from .portal import portal
from .process import AsyncProcess
from .sandbox import AsyncSandbox
from .spec import SandboxSpec

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")


def _call(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The same method, waited for."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return portal().call(method(self._inner, *args, **kwargs))

    return call


def _iterate(method: Callable[Concatenate[A, P], AsyncIterator[T]]) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """The same iterator, item by item."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return portal().iterate(method(self._inner, *args, **kwargs))

    return call


def _process(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, AsyncProcess]],
) -> Callable[Concatenate[Any, P], Process]:
    """The same method, its process made synchronous."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Process:
        return Process(portal().call(method(self._inner, *args, **kwargs)))

    return call


def _family(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, list[Any]]],
) -> Callable[Concatenate[Any, P], list[Any]]:
    """The same method, its sandboxes made synchronous."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> list[Any]:
        made = []
        for inner in portal().call(method(self._inner, *args, **kwargs)):
            child = object.__new__(type(self))
            child._wrap(inner)
            made.append(child)
        return made

    return call


def _constructor(make: Callable[P, AsyncSandbox]) -> Callable[Concatenate[Any, P], None]:
    """A constructor that takes what the async class takes."""

    def init(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._wrap(make(*args, **kwargs))

    init.__signature__ = inspect.signature(AsyncSandbox.__init__)  # type: ignore[attr-defined]
    return init


class Process:
    """A command in a sandbox; ``for channel, data in process`` reads its output as it comes. See AsyncProcess."""

    def __init__(self, inner: AsyncProcess) -> None:
        self._inner = inner
        self.pid = inner.pid
        self.os_pid = inner.os_pid
        self.offsets = inner.offsets

    send = _call(AsyncProcess.send)
    close_stdin = _call(AsyncProcess.close_stdin)
    resize = _call(AsyncProcess.resize)
    signal = _call(AsyncProcess.signal)
    kill = _call(AsyncProcess.kill)
    detach = _call(AsyncProcess.detach)
    wait = _call(AsyncProcess.wait)
    __iter__ = _iterate(AsyncProcess.__aiter__)


class Files:
    """Files of a sandbox. See AsyncFiles."""

    def __init__(self, inner: AsyncFiles) -> None:
        self._inner = inner

    read = _call(AsyncFiles.read)
    read_text = _call(AsyncFiles.read_text)
    stream = _iterate(AsyncFiles.stream)
    write = _call(AsyncFiles.write)
    list = _call(AsyncFiles.list)
    stat = _call(AsyncFiles.stat)
    exists = _call(AsyncFiles.exists)
    mkdir = _call(AsyncFiles.mkdir)
    remove = _call(AsyncFiles.remove)
    move = _call(AsyncFiles.move)
    chmod = _call(AsyncFiles.chmod)
    chown = _call(AsyncFiles.chown)
    symlink = _call(AsyncFiles.symlink)
    watch = _iterate(AsyncFiles.watch)
    attributes = _call(AsyncFiles.attributes)
    set_attributes = _call(AsyncFiles.set_attributes)


class History:
    """A sandbox through time. See AsyncHistory."""

    _inner: AsyncSandbox

    set_ttl = _call(AsyncHistory.set_ttl)
    pause = _call(AsyncHistory.pause)
    resume = _call(AsyncHistory.resume)
    snapshot = _call(AsyncHistory.snapshot)
    template = _call(AsyncHistory.template)
    snapshots = _call(AsyncHistory.snapshots)
    delete_snapshot = _call(AsyncHistory.delete_snapshot)
    rollback = _call(AsyncHistory.rollback)
    undo = _call(AsyncHistory.undo)
    fork = _family(AsyncHistory.fork)
    diff = _call(AsyncHistory.diff)
    apply = _call(AsyncHistory.apply)
    export = _call(AsyncHistory.export)


class SandboxNetwork:
    """What a sandbox may reach, and what it has reached. See AsyncNetwork."""

    def __init__(self, inner: AsyncNetwork) -> None:
        self._inner = inner

    policy = _call(AsyncNetwork.policy)
    set = _call(AsyncNetwork.set)
    allow = _call(AsyncNetwork.allow)
    deny = _call(AsyncNetwork.deny)
    remove = _call(AsyncNetwork.remove)
    log = _call(AsyncNetwork.log)
    follow = _iterate(AsyncNetwork.follow)
    learned = _call(AsyncNetwork.learned)
    set_secret = _call(AsyncNetwork.set_secret)
    asks = _iterate(AsyncNetwork.asks)
    answer = _call(AsyncNetwork.answer)


class Imaged:
    """What a sandbox does by its image's config. See AsyncImaged."""

    _inner: AsyncSandbox

    image_config = _call(AsyncImaged.image_config)
    image_command = _call(AsyncImaged.image_command)
    health = _call(AsyncImaged.health)
    wait_healthy = _call(AsyncImaged.wait_healthy)
    stop = _call(AsyncImaged.stop)
    expose_image_ports = _call(AsyncImaged.expose_image_ports)


class Ports:
    """What this machine can reach of a sandbox. See AsyncPorts."""

    _inner: AsyncSandbox

    url = _call(AsyncPorts.url)
    public_url = _call(AsyncPorts.public_url)
    expose = _call(AsyncPorts.expose)
    ports = _call(AsyncPorts.ports)
    unexpose = _call(AsyncPorts.unexpose)


class Contexts:
    """The contexts of a sandbox: kernels that run code cells, each with variables of its own. See AsyncContexts."""

    def __init__(self, inner: AsyncContexts) -> None:
        self._inner = inner

    create = _call(AsyncContexts.create)
    list = _call(AsyncContexts.list)
    restart = _call(AsyncContexts.restart)
    interrupt = _call(AsyncContexts.interrupt)
    remove = _call(AsyncContexts.remove)


class Code:
    """Code cells. See AsyncCode."""

    _inner: AsyncSandbox

    code = _call(AsyncCode.code)


class Sandbox(History, Ports, Imaged, Code):
    """A computer of its own for code that nobody has read. See AsyncSandbox, which is the same, awaited."""

    _inner: AsyncSandbox
    files: Files
    network: SandboxNetwork
    contexts: Contexts
    __init__ = _constructor(AsyncSandbox)

    def _wrap(self, inner: AsyncSandbox) -> None:
        self._inner = inner
        self.files = Files(inner.files)
        self.network = SandboxNetwork(inner.network)
        self.contexts = Contexts(inner.contexts)

    @classmethod
    def connect(
        cls,
        ref: str,
        *,
        server: str | None = None,
        key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        controller: Controller | None = None,
    ) -> Self:
        """The sandbox of that name or id, as it is. SandboxNotFound if there is none."""
        self = cls.__new__(cls)
        self._wrap(portal().call(AsyncSandbox.connect(ref, server=server, key=key, ca=ca, controller=controller)))
        return self

    @classmethod
    def list(
        cls,
        *,
        server: str | None = None,
        key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        controller: Controller | None = None,
    ) -> list[SandboxInfo]:
        """All sandboxes of this SLOPLET_HOME that the keeper holds; all of the key's, on a server."""
        return portal().call(AsyncSandbox.list(server=server, key=key, ca=ca, controller=controller))

    @classmethod
    def load(
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
        self = cls.__new__(cls)
        loading = AsyncSandbox.load(path, name=name, server=server, key=key, ca=ca, controller=controller)
        self._wrap(portal().call(loading))
        return self

    start = _call(AsyncSandbox.start)
    close = _call(AsyncSandbox.close)
    kill = _call(AsyncSandbox.kill)
    info = _call(AsyncSandbox.info)
    run = _call(AsyncSandbox.run)
    spawn = _process(AsyncSandbox.spawn)
    processes = _call(AsyncSandbox.processes)
    attach = _process(AsyncSandbox.attach)
    signal = _call(AsyncSandbox.signal)
    upload = _call(AsyncSandbox.upload)
    download = _call(AsyncSandbox.download)
    metrics = _call(AsyncSandbox.metrics)
    guarantees = _call(AsyncSandbox.guarantees)
    events = _iterate(AsyncSandbox.events)

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        return self._inner.spec

    @property
    def name(self) -> str | None:
        return self._inner.name

    @property
    def id(self) -> str:
        """Its id, once it has started."""
        return self._inner.id

    @property
    def engine(self) -> str:
        """The engine that runs it, once it has started."""
        return self._inner.engine

    @property
    def workdir(self) -> str:
        """The directory that commands and relative paths begin in, once it has started."""
        return self._inner.workdir

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
