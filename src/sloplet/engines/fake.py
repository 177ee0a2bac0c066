"""The verified fake: a sandbox without isolation, processes or files, for tests of code that uses Sloplet.

Everything happens in this Python process: files are in memory, commands are a small documented vocabulary
(``programs()`` lists it), and it speaks the same wire as a real sandbox, so the whole library runs over it. It passes
the conformance suite.
It is never chosen by ``engine="auto"``, and it says of itself that nothing is isolated.

Teach it commands::

    @FakeEngine.on("pytest")
    def pytest(call):
        call.files["/workspace/report.txt"] = b"all good"
        return 0, "3 passed"

    with Sandbox(engine="fake") as box:
        assert box.run("pytest -q").stdout == "3 passed"
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ..errors import ControlUnavailable, UnsupportedOperation
from .base import (
    FILES,
    Capabilities,
    Exit,
    Guarantee,
    HelloConfig,
    HostStats,
    Instance,
    Probe,
    StartRequest,
    StateFormat,
    cannot_save,
    wants_egress,
)
from .fakeagent.agent import FakeAgent
from .fakeagent.kernel import Context, Program
from .fakeagent.vfs import Cred, Vfs, fail

_CONTROLS = {
    "memory": "simulated: a command that buffers more is killed",
    "disk": "simulated: writing more is ENOSPC",
    "pids": "simulated: starting more is EAGAIN",
    "open_files": "simulated: ulimit -n",
}
_NOTHING = "not isolated: the fake engine runs inside the calling Python process"


class FakeFiles(MutableMapping[str, bytes]):
    """The sandbox's files as a handler sees them: path to bytes."""

    def __init__(self, vfs: Vfs, cwd: str, cred: Cred) -> None:
        self._vfs, self._cwd, self._cred = vfs, cwd, cred

    def __getitem__(self, path: str) -> bytes:
        try:
            node = self._vfs.find(path, self._cwd, self._cred)
        except FileNotFoundError:
            raise KeyError(path) from None
        if node.is_dir:
            raise fail(errno.EISDIR, path)
        return bytes(node.data)

    def __setitem__(self, path: str, data: bytes) -> None:
        self._vfs.publish(path, self._cwd, self._cred, data, None)

    def __delitem__(self, path: str) -> None:
        self._vfs.remove(path, self._cwd, self._cred)

    def __iter__(self) -> Iterator[str]:
        return (f"/{path}" for path, node in self._vfs.walk(self._vfs.root, self._cred, 100) if not node.is_dir)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class FakeCall:
    """A command as a handler gets it. ``write`` and ``write_error`` stream output before the handler returns."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    stdin: bytes
    files: FakeFiles
    write: Callable[[str | bytes], Awaitable[None]]
    write_error: Callable[[str | bytes], Awaitable[None]]


Answer = int | str | bytes | tuple[int, str | bytes] | tuple[int, str | bytes, str | bytes] | None
Handler = Callable[[FakeCall], Answer | Awaitable[Answer]]
H = TypeVar("H", bound=Handler)


class FakeEngine:
    """See the module. Commands registered with ``on`` exist in every fake sandbox that starts afterwards."""

    name = "fake"
    rung = "process"
    _handlers: ClassVar[dict[str, Handler]] = {}

    @classmethod
    def on(cls, command: str, handler: Handler | None = None) -> Any:
        """Register a handler for a command, as a call or as a decorator. It returns an exit code, the output (str or
        bytes: exit code 0), ``(exit code, stdout)`` or ``(exit code, stdout, stderr)``; it may be async."""
        if not command or "/" in command or "\0" in command:
            raise ValueError(f"{command!r} is not the name of a command")
        if handler is not None:
            cls._handlers[command] = handler
            return handler

        def register(given: H) -> H:
            cls._handlers[command] = given
            return given

        return register

    @classmethod
    def forget(cls, command: str | None = None) -> None:
        """Forget a registered command, or all of them."""
        if command is None:
            cls._handlers.clear()
        else:
            cls._handlers.pop(command, None)

    def probe(self) -> Probe:
        return Probe(
            engine=self.name,
            rung=self.rung,
            available=True,
            details=("for tests only: isolates nothing, runs a small made-up shell",),
            capabilities=Capabilities(
                images=frozenset({"host"}),
                controls=dict(_CONTROLS),
                private_filesystem=True,
                private_processes=True,
                shared_kernel=True,
                users=True,
                disk_snapshots=True,
            ),
        )

    def check(self, request: StartRequest) -> tuple[Guarantee, ...]:
        spec = request.spec
        if request.image.kind != "host":
            raise UnsupportedOperation(
                "the fake engine has files of its own only, no images", hint="use engine='container' for images"
            )
        if any(volume.mounted for volume in spec.volumes):
            raise UnsupportedOperation(
                "the fake engine cannot mount anything", hint="use engine='container' for volumes"
            )
        if wants_egress(spec):
            raise ControlUnavailable(
                "the fake engine cannot give a sandbox a network", hint="use engine='container' or engine='gvisor'"
            )
        if spec.at_least is not None and not spec.allow_weaker:
            raise ControlUnavailable(
                f"at_least={spec.at_least!r} cannot be had from the fake engine: it isolates nothing",
                hint="leave engine= out to get a real one",
            )
        missing = sorted(spec.limits.explicit - set(_CONTROLS))
        if missing and not spec.allow_weaker:
            raise ControlUnavailable(
                f"the fake engine cannot enforce {', '.join(missing)}",
                hint="leave it out, pass allow_weaker=True, or use engine='container'",
            )
        return guarantees(request)

    async def start(self, request: StartRequest) -> Instance:
        promised = self.check(request)
        limits, spec = request.spec.limits, request.spec
        ours, theirs = socket.socketpair()
        agent = FakeAgent(
            theirs.detach(), disk=limits.disk, memory=limits.memory, pids=limits.pids, open_files=limits.open_files,
            programs={name: _program(handler) for name, handler in self._handlers.items()},
        )  # fmt: skip
        fd = ours.detach()
        hello = HelloConfig(
            user=spec.run_user, workdir=spec.run_workdir, home=None if spec.run_user != "agent" else "/home/agent",
            env=spec.env,
        )  # fmt: skip
        return _FakeInstance(agent, fd, hello, promised)

    def state_format(self) -> StateFormat:
        return StateFormat(self.name, FILES)

    def reap(self, sandbox_id: str) -> None:
        """Nothing outlives the process."""


def guarantees(request: StartRequest) -> tuple[Guarantee, ...]:
    """Truthful: limits are imitated inside the fake, isolation there is none."""
    limits = request.spec.limits
    isolation = ("filesystem", "processes", "network", "ipc", "syscalls", "privileges", "users")
    values = {
        "memory": str(limits.memory), "disk": str(limits.disk), "pids": str(limits.pids),
        "open_files": str(limits.open_files),
    }  # fmt: skip
    return (
        *(Guarantee(control, False, _NOTHING) for control in isolation),
        Guarantee("cpus", False, "not enforced: the fake engine has no say over the processor"),
        *(Guarantee(control, True, how, values[control]) for control, how in _CONTROLS.items()),
    )


class _FakeInstance:
    """A running fake. The wire's host end is the caller's, the agent's end is the agent's."""

    def __init__(self, agent: FakeAgent, fd: int, hello: HelloConfig, promised: tuple[Guarantee, ...]) -> None:
        self._agent = agent
        self.read_fd = fd
        self.write_fd = fd
        self.hello = hello
        self.guarantees = promised
        self._reason = "its holder closed the connection"

    async def wait(self) -> Exit:
        await self._agent.gone.wait()
        return Exit(self._reason)

    def kill(self) -> None:
        if not self._agent.ending:
            self._reason = "it was killed"
        self._agent.stop()

    def cleanup(self) -> None:
        """There is nothing outside."""

    def oom_kills(self) -> int | None:
        return self._agent.kernel.oom_kills

    def stats(self) -> HostStats:
        return HostStats(oom_kills=self._agent.kernel.oom_kills)

    async def save(self, folder: int) -> None:
        raise cannot_save("fake")

    def pids(self) -> tuple[int, ...]:
        return ()


def _program(handler: Handler) -> Program:
    """A user's handler as a program of the fake."""

    async def run(c: Context) -> int:
        async def write_error(data: str | bytes) -> None:
            await c.fds[2].write(data.encode() if isinstance(data, str) else data)

        call = FakeCall(
            argv=tuple(c.argv),
            env=dict(c.env),
            cwd=c.cwd,
            stdin=b"" if 0 not in c.fds or c.fds[0].tty else await c.read_all(),
            files=FakeFiles(c.kernel.vfs, c.cwd, c.proc.cred),
            write=c.out,
            write_error=write_error,
        )
        answer = handler(call)
        if inspect.isawaitable(answer):
            answer = await answer
        if answer is None or isinstance(answer, int):
            return answer or 0
        parts = answer if isinstance(answer, tuple) else (0, answer)
        await c.out(parts[1])
        if len(parts) > 2:
            await write_error(parts[2])
        await asyncio.sleep(0)
        return parts[0]

    return run


def programs() -> tuple[str, ...]:
    """The fake's vocabulary, for its documentation and tests."""
    from .fakeagent.builtins import BUILTINS
    from .fakeagent.programs import PROGRAMS
    from .fakeagent.tools import TOOLS

    return tuple(sorted({"sh", *PROGRAMS, *TOOLS, *BUILTINS}))
