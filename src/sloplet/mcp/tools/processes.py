"""start_process, process_output, stop_process: what runs in the background."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from ...errors import ProcessNotFound
from ...results import ProcessInfo
from ..bounded import Kept, clean, share
from ..call import Answer, BoxArguments, Call, Env, Toolbox
from ..output import Printed, ended, printed
from ..progress import telling
from .running import MAX_COMMAND

_GRACE = 3.0  # seconds between TERM and KILL
_SHOWN = 200  # characters of a command line
_KERNELS = "sloplet-code/"  # processes of run_code

Pid = Annotated[int, Field(ge=0, le=2**31, description="As start_process answered.")]
Wait = Annotated[float, Field(ge=0, le=60, description="Seconds to wait for its end first.")]


class StartArguments(BoxArguments):
    command: Annotated[str, Field(min_length=1, max_length=MAX_COMMAND, description="Shell text.")]
    cwd: Annotated[str | None, Field(max_length=4095, description="Where it runs, if not in the workspace.")] = None
    env: Env = None
    wait: Annotated[float, Field(ge=0, le=60, description="Seconds to watch it before answering.")] = 1.0


class ProcessOutput(BaseModel):
    pid: int
    command: str
    running: bool
    exit_code: int | None
    stdout: str
    stderr: str
    truncated: bool = False


async def start_process(call: Call, arguments: StartArguments) -> Answer:
    """Start a command in the background (a server, a watcher, a long build) and answer with its pid and what it printed
    at first. It goes on between calls; process_output reads what it prints, stop_process ends it."""
    held = await call.box(arguments.sandbox)
    process = await held.box.spawn(
        arguments.command, cwd=arguments.cwd, env=arguments.env, detached=True, tag="mcp", max_output=1
    )
    await process.detach()
    async with telling(call.report, f"started: {arguments.command}"):
        await ended(held.box, process.pid, arguments.wait)
    return answer(await printed(held.box, process.pid), call.policy.max_output)


class OutputArguments(BoxArguments):
    pid: Annotated[Pid | None, Field(description="Left out: all processes are listed.")] = None
    lines: Annotated[int, Field(ge=1, le=100_000, description="The last so many lines of each stream.")] = 200
    wait: Wait = 0.0


class Listed(BaseModel):
    pid: int
    command: str
    running: bool
    exit_code: int | None


class ProcessesOutput(BaseModel):
    """Of one process, or (without a pid) of all."""

    process: ProcessOutput | None = None
    processes: list[Listed] = []


async def process_output(call: Call, arguments: OutputArguments) -> Answer:
    """What a background process has printed lately, and whether it runs; wait= waits for its end first. Without a pid:
    the commands of the sandbox, with their pids."""
    held = await call.box(arguments.sandbox)
    if arguments.pid is None:
        infos = [info for info in await held.box.processes() if not info.tag.startswith(_KERNELS)][-200:]
        listed = [_listed(info) for info in infos]
        lines = [f"{each.pid}: {_state(each.running, each.exit_code)}: {each.command}" for each in listed]
        return Answer("\n".join(lines) or "[no commands yet]", ProcessesOutput(processes=listed))
    async with telling(call.report, f"waiting for process {arguments.pid}"):
        if arguments.wait:
            await ended(held.box, arguments.pid, arguments.wait)
    found = answer(await printed(held.box, arguments.pid), call.policy.max_output, arguments.lines)
    assert isinstance(found.data, ProcessOutput)
    return Answer(found.text, ProcessesOutput(process=found.data))


class StopArguments(BoxArguments):
    pid: Pid
    signal: Annotated[
        Literal["INT", "TERM", "HUP", "KILL"], Field(description="What it gets first; KILL follows after 3 s.")
    ] = "TERM"


async def stop_process(call: Call, arguments: StopArguments) -> Answer:
    """End a background process and everything that it started."""
    held = await call.box(arguments.sandbox)
    try:
        await held.box.signal(arguments.pid, arguments.signal)
        if not await ended(held.box, arguments.pid, _GRACE):
            await held.box.signal(arguments.pid, "KILL")
            await ended(held.box, arguments.pid, _GRACE)
    except ProcessNotFound:
        pass  # it has ended; what it printed may be there
    return answer(await printed(held.box, arguments.pid), call.policy.max_output, 50)


def answer(found: Printed, most: int, lines: int = 100_000) -> Answer:
    """The last lines of both streams, bounded."""
    out, err = (_tail(text, lines) for text in (found.stdout, found.stderr))
    first, second = share(most, len(out), len(err))
    stdout, stderr = _cut(out, first), _cut(err, second)
    missing = found.missing > 0 or len(stdout) + len(stderr) < len(found.stdout) + len(found.stderr)
    listed = _listed(found.info)
    data = ProcessOutput(**listed.model_dump(), stdout=stdout, stderr=stderr, truncated=missing)
    parts = [f"[process {data.pid}: {_state(data.running, data.exit_code)}: {data.command}]"]
    if missing:
        parts.append("[earlier output is left out]")
    parts += [stdout.rstrip("\n")] if stdout else []
    parts += ["[stderr]\n" + stderr.rstrip("\n")] if stderr else []
    return Answer("\n".join(parts), data)


def _tail(text: str, lines: int) -> str:
    return "".join(text.splitlines(keepends=True)[-lines:])


def _cut(text: str, most: int) -> str:
    kept = Kept(most)
    kept.add(text)
    return kept.cut(most)


def _listed(info: ProcessInfo) -> Listed:
    words = info.command[2:] if info.command[:2] == ("/bin/sh", "-c") else info.command
    command = clean(" ".join(words))
    shown = command if len(command) <= _SHOWN else command[: _SHOWN - 1] + "…"
    return Listed(pid=info.pid, command=shown, running=info.running, exit_code=info.exit_code)


def _state(running: bool, code: int | None) -> str:
    return "running" if running else f"ended with exit code {code}"


def add_to(tools: Toolbox) -> None:
    tools.add("start_process", "Start a background process", StartArguments, ProcessOutput, world=True)(start_process)
    tools.add("process_output", "Output of a process", OutputArguments, ProcessesOutput, reads=True)(process_output)
    tools.add("stop_process", "Stop a process", StopArguments, ProcessOutput, destroys=True, again=True)(stop_process)
