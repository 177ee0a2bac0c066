"""Which kernels a sandbox has: looked up, started, ended.

The registry is in the sandbox: a kernel is a process whose tag says what it is, so a snapshot, a fork, or another
program finds it. Beside it lies a small file with its settings: who restarts it needs them, and where only files
were saved it tells that there was a kernel. A context whose process is gone is told so, never silently replaced.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field

from ..controller import SandboxInfo, Stream
from ..errors import (
    CommandError,
    CommandNotFound,
    ContextNotFound,
    FileError,
    FileExists,
    KernelError,
    ProcessNotFound,
    SpecError,
)
from ..files import AsyncFiles
from ..process import exec_request
from ..results import ProcessInfo
from ..spec import check_env
from ..wire.fields import Fields
from ..wire.mux import request
from ..wire.schema import Op, Tag
from . import languages
from .cell import Kernel, attach_request, restart_hint
from .results import CodeContext

_list = list
_TAG = re.compile(
    rf"sloplet-code/(\d+)/({'|'.join(languages.LANGUAGES)})/([A-Za-z0-9_.-]{{1,63}})/([0-9a-f]{{16}})"
    r"(?:/([0-9a-f]{32})(?:/([^/]{1,64}))?)?"
)
_USER = re.compile(r"[^\0-\x1f/]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
_MAX_SETTINGS = 256 * 1024
_TRUSTED = 1.0  # seconds for which a kernel that was there is taken to be there still
_STARTING = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # how long one may be between its settings and its process
_BORN = 10.0  # how long another client may take to start what it has begun


@dataclass(frozen=True)
class Settings:
    """What a context was made with."""

    language: str
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    python: str | None = None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def digest(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()[:32]

    @staticmethod
    def from_bytes(raw: bytes) -> Settings:
        """What a file of the sandbox says; anybody in there may have written it. ValueError."""
        try:
            data = json.loads(raw)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        texts = {key: data.get(key) for key in ("cwd", "user", "python")} if isinstance(data, dict) else {"cwd": 0}
        if any(value is not None and not isinstance(value, str) for value in texts.values()):
            raise ValueError("not settings")
        env = dict(check_env(data.get("env") or {}))
        return Settings(languages.language_of(data.get("language")), env=env, **texts)


def check_context(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(
            f"{str(name)[:80]!r} is no name for a context", hint="1 to 63 letters, digits, '_', '-' and '.'"
        )
    return name


def check_user(user: object) -> str | None:
    if user is not None and (not isinstance(user, str) or not _USER.fullmatch(user)):
        raise SpecError(f"user={str(user)[:80]!r} is not valid", hint="a name, or numbers as uid[:gid]")
    return user


class Registry:
    """The kernels of one sandbox, as one client of it sees them."""

    def __init__(
        self,
        open: Callable[[Fields], Awaitable[Stream]],
        files: AsyncFiles,
        processes: Callable[[], Awaitable[_list[ProcessInfo]]],
        start: Callable[[], Awaitable[SandboxInfo]],
    ) -> None:
        self.open = open
        self._files = files
        self._processes = processes
        self._start = start
        self.known: dict[str, Kernel] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        #: Of the process rung, whose snapshots have the workdir alone: what this client has made.
        self._made: dict[str, Settings] = {}

    async def kernel(self, language: str, context: str | None, *, restart: bool = False) -> Kernel:
        """The kernel for a cell: a context by name, or the language's own, which is made if there never was one."""
        name = language if context is None else name_of(context)
        known = self.known.get(name)
        if known is not None and known.seen + _TRUSTED > asyncio.get_running_loop().time():
            return known
        async with self.turn(name):
            there = await self.look(name)
            if there is None and context is not None and name not in languages.LANGUAGES:
                raise no_such(name)
            if there is None:
                return await self.begin(name, Settings(language if context is None else name))
            if there.running:
                return self.known[name]
            if not restart:
                raise gone(there)
            settings = await self.remembered(there)
            await self.end(name)
            return await self.spawn(name, settings)

    async def list(self) -> _list[CodeContext]:
        found = {context.name: context for context in _contexts(await self._processes())}
        for name in await self._recorded():
            settings = await self.settings(name) if name not in found else None
            if settings is not None:
                found[name] = _lost(name, settings)
        return [found[name] for name in sorted(found)]

    async def discard(self, name: str) -> None:
        """End it, and let nothing be remembered of it."""
        async with self.turn(name):
            await self.end(name)
            self._made.pop(name, None)
            try:
                await self._files.remove(await self._path(name), missing_ok=True)
            except FileError:
                pass

    async def deposit(self, kernel: Kernel, cell: str, code: bytes) -> str:
        """Code that is too long for one request, in a file for the kernel to read; ``withdraw`` takes it away."""
        if kernel.user is None:
            path = f"{await self._folder()}/{kernel.name}-{cell}"
            await self._files.write(path, code)
            return path
        # In a folder of that user's own: nobody else in there may change what he will run.
        folder = f"{await self._folder()}-{cell}"
        await self._files.mkdir(folder, parents=False, mode=0o700, user=kernel.user)
        await self._files.write(f"{folder}/code", code, mode=0o600, user=kernel.user)
        return f"{folder}/code"

    async def withdraw(self, kernel: Kernel, path: str) -> None:
        place = path if kernel.user is None else path.removesuffix("/code")
        try:
            await self._files.remove(place, recursive=kernel.user is not None, missing_ok=True, user=kernel.user)
        except FileError:
            pass

    def forget(self, name: str | None = None) -> None:
        """What was known may be wrong now: it is looked up again."""
        for kernel in self.known.values():
            if name in (None, kernel.name):
                kernel.seen = float("-inf")

    def turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    async def look(self, name: str) -> CodeContext | None:
        """What there is by that name; one that runs is in ``known`` then. What has settings and no process may just be
        starting, for another client: that is waited for."""
        settings: Settings | None = None
        for pause in (*_STARTING, None):
            now = asyncio.get_running_loop().time()
            for context in _contexts(await self._processes(), self.known, now):
                if context.name == name:
                    return context
            self.known.pop(name, None)
            settings = await self.settings(name)
            if settings is None or pause is None:
                break
            await asyncio.sleep(pause)
        return None if settings is None else _lost(name, settings)

    async def begin(self, name: str, settings: Settings) -> Kernel:
        """Whoever makes the file with the settings starts the kernel; others wait for it."""
        path = await self._path(name)
        try:
            await self._files.write(path, settings.to_bytes(), exclusive=True, mode=0o600)
        except FileExists:
            return await self._wait_for(name)
        except FileError:
            pass  # nowhere to write: the tag alone must do
        try:
            return await self.spawn(name, settings)
        except BaseException:
            try:
                await asyncio.shield(self._files.remove(path))
            except FileError:
                pass
            raise

    async def _wait_for(self, name: str) -> Kernel:
        until = asyncio.get_running_loop().time() + _BORN
        while asyncio.get_running_loop().time() < until:
            there = await self.look(name)
            if there is not None and there.running:
                return self.known[name]
            await asyncio.sleep(0.05)
        raise KernelError(f"the context {name!r} was begun by somebody who did not start it", hint=restart_hint(name))

    async def spawn(self, name: str, settings: Settings) -> Kernel:
        key = secrets.token_hex(8)
        tag = f"sloplet-code/{languages.PROTOCOL}/{settings.language}/{name}/{key}/{settings.digest()}"
        tag += "" if settings.user is None else f"/{settings.user}"
        interpreters = [settings.python]
        if settings.language == "python" and settings.python is None:
            interpreters = [None, "python"]
        for python in interpreters:
            how = languages.launch(settings.language, key, python)
            fields = exec_request(
                how.argv, cwd=settings.cwd, env={**how.env, **settings.env}, user=settings.user, stdin=True,
                detached=True, tag=tag,
            )  # fmt: skip
            stream = await self.open(fields)
            try:
                await stream.send(how.input)  # before anybody else can know of it: it lies in the pipe whole
                started = await stream.started()
                break
            except CommandNotFound as error:
                if python != interpreters[-1]:
                    continue
                raise KernelError(
                    f"there is no {settings.language} in this sandbox to run code with: {error.message}",
                    hint="use an image that has it, or name the interpreter: contexts.create(python=...)",
                ) from None
            finally:
                stream.reset()
        now = asyncio.get_running_loop().time()
        kernel = Kernel(name, settings.language, key, started.integer(Tag.PID), now, (0, 0), early=False)
        kernel.user = settings.user
        self.known[name] = kernel
        if (await self._start()).rung == "process":
            self._made[name] = settings
        return kernel

    async def end(self, name: str) -> None:
        """No process of that name is left, nor the memory of one."""
        self.known.pop(name, None)
        for info in await self._processes():
            found = _TAG.fullmatch(info.tag)
            if found is None or found[3] != name:
                continue
            if info.running:
                await self._kill(info.pid)
            try:
                await (await self.open(request(Op.FORGET, (Tag.PID, info.pid)))).result()
            except CommandError:
                pass

    async def _kill(self, pid: int) -> None:
        kernel = Kernel("", "", "", pid)
        stream = await self.open(attach_request(kernel))
        try:
            await (await self.open(request(Op.SIGNAL, (Tag.PID, pid), (Tag.SIGNUM, 9), (Tag.FLAGS, 0)))).result()
            while await stream.recv() is not None:
                pass
            await stream.result()
        except ProcessNotFound:
            pass
        finally:
            stream.reset()

    # -- the files with the settings ---------------------------------------------------

    async def _folder(self) -> str:
        info = await self._start()
        # The process rung has no /tmp of its own: its folders lie side by side.
        tmp = info.workdir.rpartition("/")[0] + "/tmp" if info.rung == "process" else "/tmp"
        return tmp + "/.sloplet-code"

    async def _path(self, name: str) -> str:
        return f"{await self._folder()}/{name}.json"

    async def settings(self, name: str) -> Settings | None:
        try:
            raw = await self._files.read(await self._path(name), length=_MAX_SETTINGS)
        except FileError:
            return self._made.get(name)
        try:
            return Settings.from_bytes(raw)
        except (ValueError, TypeError, AttributeError):
            return Settings(name) if name in languages.LANGUAGES else None

    async def remembered(self, there: CodeContext) -> Settings:
        """What a context was made with, for starting it anew. The file was in the hands of the code in there. It is
        believed if the process's tag vouches for it, or if it asks for no other user than that code has anyway."""
        name, plain = there.name, Settings(there.language)
        said = await self.settings(name)
        tags = [_TAG.fullmatch(info.tag) for info in await self._processes() if info.pid == there.pid]
        digest = next((found[5] for found in tags if found is not None and found[3] == name), None)
        if digest is None and (said is None or said.user is None or said == self._made.get(name)):
            return said or plain
        for one in (plain, said):
            if one is not None and one.digest() == digest:
                return one
        raise KernelError(
            f"the context {name!r} cannot be started anew as it was: only a file that anybody in the sandbox may have "
            "changed tells its settings",
            hint=f"contexts.remove({name!r}), then contexts.create(...) with the settings that you want",
        )

    async def _recorded(self) -> _list[str]:
        try:
            found = await self._files.list(await self._folder())
        except FileError:
            return list(self._made)
        names = [info.name.removesuffix(".json") for info in found if info.is_file and info.name.endswith(".json")]
        return [name for name in names if _NAME.fullmatch(name)][:1000]


def _contexts(
    processes: _list[ProcessInfo], known: dict[str, Kernel] | None = None, now: float = 0.0
) -> _list[CodeContext]:
    """One for each name: the oldest that runs, or else the last that ended. Those that run are noted in ``known``."""
    found: dict[str, CodeContext] = {}
    for info in sorted(processes, key=lambda info: info.pid):
        match = _TAG.fullmatch(info.tag)
        if match is None or int(match[1]) not in (languages.PLAIN, languages.PROTOCOL):
            continue
        protocol, language, name, key, _, user = match.groups()
        if name in found and found[name].running:
            continue
        reason = "" if info.running else f"its process ended with exit code {info.exit_code}"
        state = "running" if info.running else "dead"
        found[name] = CodeContext(name, language, state, info.pid, info.started_at, reason)
        if info.running and known is not None:
            if name not in known or known[name].key != key or known[name].pid != info.pid:
                known[name] = Kernel(name, language, key, info.pid, user=user, protocol=int(protocol))
            known[name].seen = now
    return list(found.values())


def _lost(name: str, settings: Settings) -> CodeContext:
    return CodeContext(name, settings.language, "lost", reason="its process was not saved")


def described(kernel: Kernel, settings: Settings) -> CodeContext:
    return CodeContext(
        kernel.name, kernel.language, "running", kernel.pid, cwd=settings.cwd, env=settings.env, user=settings.user,
        python=settings.python,
    )  # fmt: skip


def name_of(context: object) -> str:
    return check_context(context.name if isinstance(context, CodeContext) else context)


def no_such(name: str) -> ContextNotFound:
    return ContextNotFound(f"there is no context {name!r} in this sandbox", hint="contexts.create() makes one")


def gone(context: CodeContext) -> KernelError:
    what = f"the {context.language} context {context.name!r}"
    if context.state == "lost":
        return KernelError(
            f"{what} is not here: only the files of its sandbox were kept, not its processes",
            hint=f"{restart_hint(context.name)}; engine 'gvisor' keeps them",
        )
    return KernelError(f"{what} is gone, with its variables: {context.reason}", hint=restart_hint(context.name))
