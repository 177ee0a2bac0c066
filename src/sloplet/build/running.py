"""RUN: one command in a fresh sandbox of the image so far, and what it changed."""

from __future__ import annotations

import codecs
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..controller import Controller
from ..engines import jail, registry
from ..engines.machine import machine
from ..engines.rung import SUBIDS
from ..errors import BuildFailed, CommandError, UnsupportedOperation
from ..netspec import Network, NetworkSpec
from ..results import Result
from ..sandbox import AsyncSandbox
from ..state.home import Home
from .commit import Spool, items_of, read_changes, take_changes
from .distrust import authority, take_out, without_traces
from .ground import Tree
from .layertar import Item
from .mounts import Mounted, patiently
from .scope import RunWork
from .threads import in_thread, to_the_end

_SCRIPT = "/.sloplet-build-script"
_KEPT_LINES = 40
_MAX_LINE = 4096
_LEAST_MEMORY, _MOST_MEMORY = 512 * 2**20, 8 * 2**30

#: Takes a line of output.
OnLine = Callable[[str], None]


@dataclass(frozen=True)
class RunSettings:
    """What all steps of a build run under."""

    network: Any = "none"
    limits: Mapping[str, Any] = field(default_factory=dict)  #: cpus, memory, disk, pids, open_files
    engine: str = "auto"
    allow_weaker: bool = False
    at_least: str | None = None


class _StepSandbox(AsyncSandbox):
    """With more of everything that nobody named a limit for: installing and compiling take a lot."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        limits = self._spec.limits
        more = {name: value for name, value in default_limits().items() if name not in limits.explicit}
        self._spec = replace(self._spec, limits=replace(limits, **more))


def default_limits() -> dict[str, Any]:
    """What a step may use where nothing is said: all CPUs, half of the memory, 8 GiB of disk."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return {"cpus": float(os.cpu_count() or 1), "memory": max(_LEAST_MEMORY, min(_MOST_MEMORY, memory)),
            "disk": 8 * 2**30, "pids": 4096}  # fmt: skip


def engine_of(settings: RunSettings) -> str:
    """What steps run on: unless the caller says more, a container, which compiles and installs several times as fast as
    a kernel in user space; where a container has one user only, gVisor, which has all. UnsupportedOperation. Blocking.
    """
    if settings.engine != "auto" or settings.at_least is not None:
        return settings.engine
    alone = jail.mode(machine()) == "single"
    if not alone and registry.load("container").probe().available:
        return "container"
    if alone and not registry.load("gvisor").probe().available:
        raise UnsupportedOperation(
            "steps of a build need several users inside, and here is one: there are no subordinate ids, and no gVisor",
            hint=f"`sloplet setup gvisor`; or {SUBIDS}",
        )
    return "auto"


class Lines:
    """Output in pieces, as whole lines; the last ones are kept."""

    def __init__(self, tell: OnLine) -> None:
        self._tell = tell
        self._decoders = {
            1: codecs.getincrementaldecoder("utf-8")("replace"),
            2: codecs.getincrementaldecoder("utf-8")("replace"),
        }
        self._rest = {1: "", 2: ""}
        self.last: deque[str] = deque(maxlen=_KEPT_LINES)

    def take(self, channel: int, data: bytes) -> None:
        text = self._rest[channel] + self._decoders[channel].decode(data)
        *lines, rest = text.split("\n")
        for line in lines:
            self._line(line)
        while len(rest) > _MAX_LINE:
            self._line(rest[:_MAX_LINE])
            rest = rest[_MAX_LINE:]
        self._rest[channel] = rest

    def finish(self) -> None:
        for channel, rest in self._rest.items():
            self._rest[channel] = ""
            if rest:
                self._line(rest)

    def _line(self, line: str) -> None:
        line = line.removesuffix("\r").rpartition("\r")[2]  # of a progress bar what it shows in the end
        self.last.append(line)
        self._tell(line)


async def run(
    work: RunWork, tree: Tree, settings: RunSettings, controller: Controller, home: Home, spool: Spool,
    mounted: Mounted, tell: OnLine,
) -> list[Item]:  # fmt: skip
    """Run it, return the entries of the layer that it made. BuildFailed, and errors of the sandbox itself."""
    network = network_of(work, settings)
    box = _StepSandbox(
        image=tree.image.id, user="0:0", workdir="/", sudo=True, network=network,
        engine=await in_thread(engine_of, settings), at_least=settings.at_least, allow_weaker=settings.allow_weaker,
        controller=controller, volumes=mounted.volumes or None, **settings.limits,
    )  # fmt: skip
    lines = Lines(tell)
    try:
        await patiently(box.start, mounted, tell)
        certificate = None if is_offline(network) else await authority(box.files)
        await mounted.enter(controller, box.id, box.files, tree)
        result = await _execute(work, box, lines)
        if not result.ok:
            raise _failed(work, result, lines, network)
        if certificate is not None:
            await take_out(box.files, certificate, tree.folder)
        complete = await take_changes(controller, box.id, spool)
    finally:
        await to_the_end(box.close())

    def items() -> list[Item]:
        listing, contents = read_changes(spool, complete)
        found = items_of(
            listing, contents, tree.folder.lstat, owners=tree.folder.owners, names=tree.folder.names,
            dropped=lambda path: path == _SCRIPT.strip("/") or mounted.covers(path), read=tree.folder.data,
        )  # fmt: skip
        found = mounted.without_own(found)
        return found if certificate is None else without_traces(found, tree.folder)

    return await in_thread(items)


async def _execute(work: RunWork, box: AsyncSandbox, lines: Lines) -> Result:
    argv = list(work.argv)
    if work.script:
        await box.files.write(_SCRIPT, work.script.encode("utf-8", "surrogateescape"), mode=0o755)
        argv = [_SCRIPT]
    if work.workdir != "/":
        await box.files.mkdir(work.workdir, parents=True)
    try:
        result = await box.run(
            argv, cwd=work.workdir, env=dict(work.env), user=work.user, text=False, max_output=1,
            on_stdout=lambda data: lines.take(1, data), on_stderr=lambda data: lines.take(2, data),
        )  # fmt: skip
    except CommandError as error:
        raise BuildFailed(f"{_where(work)}: {error.message}", hint=error.hint) from error
    finally:
        lines.finish()
    return result


def _where(work: RunWork) -> str:
    shown = work.shown if len(work.shown) <= 200 else work.shown[:197] + "..."
    return f"{work.line.name} line {work.line.number}: {shown}"


def _failed(work: RunWork, result: Result, lines: Lines, network: Any) -> BuildFailed:
    text = "\n".join(lines.last)
    message = f"{_where(work)}: {result.describe()}" + (f"\n{text}" if text else "")
    failure = BuildFailed(message, hint=_hint(result, text, network))
    failure.exit_code = result.exit_code
    return failure


def _hint(result: Result, text: str, network: Any) -> str | None:
    if result.denied:
        return f"refused by the network policy: {'; '.join(result.denied[:5])}; allow it with --allow HOST"
    if result.oom:
        return "give the build more with --memory"
    low = text.lower()
    if "no space left on device" in low:
        return "give the build more with --disk"
    if "certificate verify failed" in low or "self-signed certificate" in low or "self signed certificate" in low:
        return (
            "the image does not know the authority of that server; if this machine does, give it to the step: "
            "--secret id=ca,src=FILE, RUN --mount=type=secret,id=ca ... (PIP_CERT, NODE_EXTRA_CA_CERTS, SSL_CERT_FILE)"
        )
    signs = ("temporary failure", "could not resolve", "name resolution", "bad address", "network is unreachable")
    if is_offline(network) and any(sign in low for sign in signs):
        return "builds have no network unless asked for: --allow HOST, or --allow @package-indexes"
    return None


def network_of(work: RunWork, settings: RunSettings) -> Any:
    """What a step may reach: nothing if it says so, else what the build may; where that is nothing, its own."""
    if work.network == "none":
        return "none"
    if work.network in (None, "default") or not is_offline(settings.network):
        return settings.network
    return work.network


def is_offline(network: Any) -> bool:
    if isinstance(network, Network):
        network = network.spec
    return network == "none" or (isinstance(network, NetworkSpec) and network.mode == "none")


def network_facts(network: Any) -> Any:
    """A network policy as part of a cache's key."""
    if isinstance(network, Network):
        network = network.spec
    return network.to_dict() if isinstance(network, NetworkSpec) else network
