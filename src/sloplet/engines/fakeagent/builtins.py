"""Commands that the fake's shell does itself, because they change it."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Awaitable, Callable

from .kernel import DEFAULT_PATH, Context, Exited, shell_code
from .programs import PROGRAMS, signal_of
from .shell import LoopControl, Returned, Shell
from .streams import File
from .vfs import EXECUTE, fail

Builtin = Callable[[Shell, Context], Awaitable[int]]


def _number(text: str, default: int = 0) -> int:
    return int(text) if text.lstrip("-").isdigit() else default


async def _cd(shell: Shell, c: Context) -> int:
    target = c.argv[1] if len(c.argv) > 1 else shell.vars.get("HOME", "/")
    node = c.kernel.vfs.find(target, shell.proc.cwd, shell.proc.cred)
    if not node.is_dir:
        raise fail(errno.ENOTDIR, target)
    if not node.allows(shell.proc.cred, EXECUTE):
        raise fail(errno.EACCES, target)
    shell.proc.cwd = node.path()
    shell.assign("PWD", shell.proc.cwd)
    return 0


async def _exit(shell: Shell, c: Context) -> int:
    raise Exited(_number(c.argv[1]) if len(c.argv) > 1 else shell.last)


async def _return(shell: Shell, c: Context) -> int:
    raise Returned(_number(c.argv[1]) & 0xFF if len(c.argv) > 1 else shell.last)


async def _loop(shell: Shell, c: Context) -> int:
    raise LoopControl(c.argv[0], _number(c.argv[1], 1) if len(c.argv) > 1 else 1)


async def _export(shell: Shell, c: Context) -> int:
    for arg in c.argv[1:]:
        name, has_value, value = arg.partition("=")
        if has_value:
            shell.vars[name] = value
        shell.exported[name] = shell.vars.get(name, "")
    return 0


async def _unset(shell: Shell, c: Context) -> int:
    for name in c.argv[1:]:
        shell.vars.pop(name, None)
        shell.exported.pop(name, None)
    return 0


async def _set(shell: Shell, c: Context) -> int:
    args = c.argv[1:]
    while args and args[0][:1] in "-+" and args[0] != "--" and len(args[0]) > 1:
        if "e" in args[0]:
            shell.stop_on_error = args[0][0] == "-"
        args = args[1:]
    if args:
        shell.args = [shell.args[0], *(args[1:] if args[0] == "--" else args)]
    return 0


async def _shift(shell: Shell, c: Context) -> int:
    count = _number(c.argv[1], 1) if len(c.argv) > 1 else 1
    shell.args = [shell.args[0], *shell.args[1 + count :]]
    return 0


async def _wait(shell: Shell, c: Context) -> int:
    wanted = [_number(arg) for arg in c.argv[1:]] or list(shell.background)
    code = 0
    for pid in wanted:
        child = shell.background.get(pid)
        if child is None:
            code = 127
            continue
        while child.status is None:
            if shell.proc.pending:
                return 128 + shell.proc.pending[0]
            await _either(shell, child.bell.wait())
        shell.background.pop(pid, None)
        code = shell_code(child.status)
    return code if len(c.argv) > 1 else 0


async def _either(shell: Shell, child: Awaitable[None]) -> None:
    """Until the child changes or a trapped signal comes."""
    import asyncio

    waits = [asyncio.ensure_future(child), asyncio.ensure_future(shell.proc.bell.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _trap(shell: Shell, c: Context) -> int:
    if len(c.argv) < 3:
        return 0
    for name in c.argv[2:]:
        number = 0 if name in ("EXIT", "0") else signal_of(name)
        shell.proc.traps.pop(number, None)
        shell.proc.ignored.discard(number)
        if c.argv[1] == "":
            shell.proc.ignored.add(number)
        elif c.argv[1] != "-":
            shell.proc.traps[number] = c.argv[1]
    return 0


async def _read(shell: Shell, c: Context) -> int:
    names = [arg for arg in c.argv[1:] if arg != "-r"] or ["REPLY"]
    line = b""
    source = c.fds.get(0)
    while source is not None:
        byte = await source.read(1)
        if byte in (b"", b"\n"):
            break
        line += byte
    else:
        byte = b""
    words = os.fsdecode(line).split(None, len(names) - 1)
    for index, name in enumerate(names):
        shell.assign(name, words[index].rstrip() if index < len(words) else "")
    return 0 if byte else 1


async def _ulimit(shell: Shell, c: Context) -> int:
    args = c.argv[1:]
    flags = "".join(arg[1:] for arg in args if arg.startswith("-"))
    values = [arg for arg in args if not arg.startswith("-")]
    if "n" not in flags:
        await c.out("unlimited\n")
    elif not values:
        await c.out(f"{c.kernel.open_files}\n")
    elif _number(values[0], 2**31) > c.kernel.open_files:
        await c.err("error setting limit (Operation not permitted)")
        raise Exited(2)
    return 0


async def _command(shell: Shell, c: Context) -> int:
    if c.argv[1:2] == ["-v"] and len(c.argv) == 3:
        name = c.argv[2]
        if name in BUILTINS or name in shell.functions:
            await c.out(f"{name}\n")
            return 0
        path = shell.vars.get("PATH", DEFAULT_PATH)
        for folder in [""] if "/" in name else path.split(":"):
            candidate = f"{folder}/{name}" if folder else name
            try:
                c.kernel.vfs.executable(candidate, path, shell.proc.cwd, shell.proc.cred)
            except OSError:
                continue
            await c.out(f"{candidate}\n")
            return 0
        return 127
    return await shell.external(c.argv[1:], shell.exported, c.fds)


async def _exec(shell: Shell, c: Context) -> int:
    raise Exited(await shell.external(c.argv[1:], shell.exported, c.fds))


async def _eval(shell: Shell, c: Context) -> int:
    return await shell.with_files(" ".join(c.argv[1:]), c.fds)


async def _source(shell: Shell, c: Context) -> int:
    node = c.kernel.vfs.find(c.argv[1], shell.proc.cwd, shell.proc.cred)
    return await shell.with_files(os.fsdecode(bytes(node.data)), c.fds)


async def _kill(shell: Shell, c: Context) -> int:
    return await PROGRAMS["kill"](c)


def _program(name: str) -> Builtin:
    async def run(shell: Shell, c: Context) -> int:
        c.cwd = shell.proc.cwd
        return await PROGRAMS[name](c)

    return run


async def _colon(shell: Shell, c: Context) -> int:
    return 0


BUILTINS: dict[str, Builtin] = {
    ":": _colon, "cd": _cd, "exit": _exit, "return": _return, "break": _loop, "continue": _loop, "export": _export,
    "unset": _unset, "set": _set, "shift": _shift, "wait": _wait, "trap": _trap, "read": _read, "ulimit": _ulimit,
    "command": _command, "exec": _exec, "eval": _eval, ".": _source, "kill": _kill, "umask": _colon,
    **{name: _program(name) for name in ("echo", "printf", "true", "false", "test", "[", "pwd")},
}  # fmt: skip


async def sh(c: Context) -> int:
    """``sh -c SCRIPT [NAME [ARG...]]``, ``sh FILE [ARG...]``, or a script from stdin, line by line."""
    args = c.argv[1:]
    stop = False
    while args and args[0] in ("-e", "-l", "-i", "-s"):
        stop = stop or args[0] == "-e"
        args = args[1:]
    if args and args[0] in ("-c", "-ec"):
        stop = stop or args[0] == "-ec"
        if len(args) < 2:
            await c.err("-c requires an argument")
            return 2
        shell = Shell(c.proc, c.env, args[2:] or [c.argv[0]])
        script: str | None = args[1]
    elif args:
        node = c.kernel.vfs.find(args[0], c.cwd, c.proc.cred)
        if not node.allows(c.proc.cred, 4):
            raise fail(errno.EACCES, args[0])
        shell = Shell(c.proc, c.env, args)
        script = os.fsdecode(bytes(node.data))
    else:
        shell, script = Shell(c.proc, c.env, [c.argv[0]]), None
    shell.assign("PWD", c.cwd)
    shell.stop_on_error = stop
    if script is not None:
        return await shell.script(script)
    return await _interactive(shell, c)


async def _interactive(shell: Shell, c: Context) -> int:
    source: File | None = c.fds.get(0)
    prompt = source is not None and source.tty
    if prompt:
        shell.proc.ignored |= {signal.SIGINT, signal.SIGTERM}
    code = 0
    while source is not None:
        if prompt:
            await c.fds[2].write(b"# " if c.proc.cred.uid == 0 else b"$ ")
        line = b""
        while (byte := await source.read(1)) not in (b"", b"\n"):
            line += byte
        if not byte and not line:
            break
        try:
            code = await shell.line(os.fsdecode(line))
        except Exited as end:
            return end.code
    return code
