"""The fake's vocabulary: small versions of the everyday commands. ``PROGRAMS`` is the whole list."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator

from .kernel import Context, Program
from .streams import ZEROS, File
from .vfs import READ, fail

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}
_UNITS = {"": 1, "b": 512, "k": 1024, "K": 1024, "m": 2**20, "M": 2**20, "g": 2**30, "G": 2**30}


def signal_of(text: str) -> int:
    if text.isdigit():
        return int(text)
    name = text.upper()
    try:
        return int(signal.Signals[name if name.startswith("SIG") else "SIG" + name])
    except KeyError:
        raise fail(errno.EINVAL, text) from None


def size_of(text: str) -> int:
    match = re.fullmatch(r"(\d+)([bkKmMgG]?)i?B?", text)
    if not match:
        raise fail(errno.EINVAL, text)
    return int(match[1]) * _UNITS[match[2]]


def options(argv: list[str], valued: str = "") -> tuple[dict[str, str], list[str]]:
    """Short options as a dict, and the rest. ``valued`` letters take a value; ``-5`` is ``{"5": ""}``'s number."""
    found: dict[str, str] = {}
    rest = argv[1:]
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        arg = rest.pop(0)
        if arg == "--":
            break
        if arg.startswith("--"):
            found[arg[2:]] = ""
            continue
        if arg[1:].isdigit():
            found["n"] = arg[1:]
            continue
        for index, letter in enumerate(arg[1:], 1):
            if letter in valued:
                found[letter] = arg[index + 1 :] or (rest.pop(0) if rest else "")
                break
            found[letter] = ""
    return found, rest


async def inputs(c: Context, names: list[str]) -> AsyncIterator[bytes]:
    """The bytes of the named files, or of stdin."""
    for name in names or ["-"]:
        file: File | None
        if name == "-":
            file = c.fds[0].dup() if 0 in c.fds else None
        else:
            file = c.kernel.open(name, c.cwd, c.proc.cred, "r", next((f for f in c.fds.values() if f.tty), None))
        if file is None:
            continue
        try:
            while piece := await file.read():
                yield piece
        finally:
            file.close()


async def text_of(c: Context, names: list[str]) -> str:
    parts = []
    async for piece in inputs(c, names):
        c.proc.charge(len(piece))
        parts.append(piece)
    return os.fsdecode(b"".join(parts))


async def _true(c: Context) -> int:
    return 0


async def _false(c: Context) -> int:
    return 1


async def _echo(c: Context) -> int:
    args, end = c.argv[1:], "\n"
    if args[:1] == ["-n"]:
        args, end = args[1:], ""
    await c.out(" ".join(args) + end)
    return 0


def unescape(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        body = match[1]
        if body[0] in "01234567":
            return os.fsdecode(bytes([int(body, 8) & 0xFF]))
        if body[0] == "x":
            return os.fsdecode(bytes([int(body[1:], 16)]))
        return _ESCAPES.get(body, "\\" + body)

    return re.sub(r"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|.)", one, text, flags=re.DOTALL)


async def _printf(c: Context) -> int:
    if len(c.argv) < 2:
        await c.err("usage: printf format [arg ...]")
        return 2
    form, args = c.argv[1], c.argv[2:]
    pieces = re.split(r"(%%|%[-0-9.]*[a-zA-Z])", form)
    takes = sum(1 for piece in pieces[1::2] if piece != "%%")
    while True:
        values = iter(args[:takes])
        await c.out("".join(_formatted(p, values) if i % 2 else unescape(p) for i, p in enumerate(pieces)))
        args = args[takes:]
        if not args or not takes:
            return 0


def _formatted(directive: str, values: Iterator[str]) -> str:
    if directive == "%%":
        return "%"
    value, kind = next(values, ""), directive[-1]
    if kind in "dixXo":
        return str(directive % int(value or "0", 0))
    return str((directive[:-1] + "s") % (unescape(value) if kind == "b" else value))


async def _cat(c: Context) -> int:
    code = 0
    for name in [a for a in c.argv[1:] if a == "-" or not a.startswith("-")] or ["-"]:
        try:
            async for piece in inputs(c, [name]):
                await c.out(piece)
        except BrokenPipeError:
            raise
        except OSError as error:
            if error.filename in (None, "write"):
                raise
            await c.err(f"{error.filename}: {error.strerror}")
            code = 1
    return code


async def _sleep(c: Context) -> int:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    total = 0.0
    for arg in c.argv[1:]:
        match = re.fullmatch(r"(\d*\.?\d+)([smhd]?)", arg)
        if not match:
            await c.err(f"invalid time interval '{arg}'")
            return 1
        total += float(match[1]) * units[match[2] or "s"]
    await asyncio.sleep(min(total, 10**7))
    return 0


async def _env(c: Context) -> int:
    args, env = c.argv[1:], dict(c.env)
    if args[:1] == ["-i"]:
        args, env = args[1:], {}
    while args and "=" in args[0]:
        key, _, value = args.pop(0).partition("=")
        env[key] = value
    if args:
        from .shell import Shell

        return await Shell(c.proc, env, ["env"]).external(args, env, c.fds)
    await c.out("".join(f"{key}={value}\n" for key, value in env.items()))
    return 0


async def _pwd(c: Context) -> int:
    await c.out(c.cwd + "\n")
    return 0


async def _test(c: Context) -> int:
    args = c.argv[1:]
    if c.argv[0].endswith("["):
        if not args or args[-1] != "]":
            await c.err("missing ]")
            return 2
        args = args[:-1]
    return int(not _truth(c, args))


def _truth(c: Context, args: list[str]) -> bool:
    if args[:1] == ["!"]:
        return not _truth(c, args[1:])
    for joiner in ("-o", "-a"):
        if joiner in args[1:-1]:
            at = args.index(joiner)
            left, right = _truth(c, args[:at]), _truth(c, args[at + 1 :])
            return left or right if joiner == "-o" else left and right
    if len(args) == 3:
        a, op, b = args
        if op in ("=", "==", "!="):
            return (a == b) == (op != "!=")
        compare = {"-eq": 0, "-ne": 0, "-lt": -1, "-le": -1, "-gt": 1, "-ge": 1}
        if op in compare:
            difference = int(a) - int(b)
            sign = (difference > 0) - (difference < 0)
            if op == "-ne":
                return sign != 0
            return sign == compare[op] or (op in ("-le", "-ge") and sign == 0)
        raise fail(errno.EINVAL, op)
    if len(args) == 2:
        op, value = args
        if op in ("-n", "-z"):
            return bool(value) == (op == "-n")
        if op == "-t":
            file = c.fds.get(int(value))
            return file is not None and file.tty
        try:
            node = c.kernel.vfs.find(value, c.cwd, c.proc.cred, follow=op not in ("-L", "-h"))
        except OSError:
            return False
        checks = {"-r": 4, "-w": 2, "-x": 1}
        if op in checks:
            return node.allows(c.proc.cred, checks[op])
        if op == "-s":
            return node.size > 0
        kinds = {"-f": node.type == 0 and not node.device, "-d": node.is_dir, "-e": True}
        kinds |= {"-L": node.type == 2, "-h": node.type == 2, "-c": bool(node.device)}
        return kinds.get(op, False)
    return bool(args and args[0])


async def _kill(c: Context) -> int:
    args, number = c.argv[1:], int(signal.SIGTERM)
    if args[:1] == ["-l"]:
        await c.out(" ".join(s.name[3:] for s in signal.Signals) + "\n")
        return 0
    if args[:1] == ["-s"] and len(args) > 1:
        number, args = signal_of(args[1]), args[2:]
    elif args and args[0].startswith("-") and len(args[0]) > 1:
        number, args = signal_of(args[0][1:]), args[1:]
    code = 0
    for arg in args:
        target = c.kernel.procs.get(int(arg)) if arg.isdigit() else None
        if target is None:
            await c.err("No such process")
            code = 1
        elif c.proc.cred.uid not in (0, target.cred.uid):
            await c.err("Operation not permitted")
            code = 1
        else:
            target.signal(number)
            await asyncio.sleep(0)
    return code


async def _id(c: Context) -> int:
    cred, flags = c.proc.cred, c.argv[1:]
    name = cred.name or str(cred.uid)
    if "-u" in flags:
        await c.out(f"{cred.uid}\n")
    elif "-g" in flags:
        await c.out(f"{cred.gid}\n")
    elif "-un" in flags or c.argv[0].endswith("whoami"):
        await c.out(f"{name}\n")
    else:
        await c.out(f"uid={cred.uid}({name}) gid={cred.gid}({name}) groups={cred.gid}({name})\n")
    return 0


async def _head(c: Context) -> int:
    flags, names = options(c.argv, "nc")
    if "c" in flags:
        left = size_of(flags["c"])
        if left == 0:
            return 0
        async for piece in inputs(c, names):
            # the very same bytes object is passed on where it can be: zeros cost nothing, however many
            await c.out(piece if len(piece) <= left else piece[:left])
            left -= len(piece)
            if left <= 0:
                break
        return 0
    left = int(flags.get("n", "10"))
    async for piece in inputs(c, names):
        lines = piece.split(b"\n")
        if len(lines) > left:
            await c.out(b"\n".join(lines[:left]) + b"\n")
            break
        left -= len(lines) - 1
        await c.out(piece)
    return 0


async def _tail(c: Context) -> int:
    flags, names = options(c.argv, "nc")
    if "c" in flags and flags["c"].startswith("+"):
        skip = int(flags["c"]) - 1
        async for piece in inputs(c, names):
            await c.out(piece[skip:]) if skip < len(piece) else None
            skip = max(0, skip - len(piece))
        return 0
    kept: list[bytes] = []
    size, most = 0, size_of(flags["c"]) if "c" in flags else None
    async for piece in inputs(c, names):
        kept.append(ZEROS if piece == ZEROS else piece)
        size += len(piece)
        c.proc.charge(len(piece))
        while most is not None and size - len(kept[0]) >= most:
            c.proc.memory -= len(kept[0])
            size -= len(kept.pop(0))
    if most is not None:
        if kept:
            kept[0] = kept[0][max(0, size - most) :]
        for piece in kept:
            await c.out(piece)
        return 0
    lines = b"".join(kept).splitlines(keepends=True)
    count = int(flags.get("n", "10").lstrip("+"))
    await c.out(b"".join(lines[count - 1 :] if flags.get("n", "").startswith("+") else lines[-count:] if count else []))
    return 0


async def _seq(c: Context) -> int:
    numbers = [int(arg) for arg in c.argv[1:]]
    first, step, last = {1: [1, 1, *numbers], 2: [numbers[0], 1, numbers[-1]]}.get(len(numbers), numbers)
    buffer: list[str] = []
    for value in range(first, last + (1 if step > 0 else -1), step):
        buffer.append(f"{value}\n")
        if len(buffer) >= 4096:
            await c.out("".join(buffer))
            buffer.clear()
    await c.out("".join(buffer))
    return 0


async def _yes(c: Context) -> int:
    line = (" ".join(c.argv[1:]) or "y") + "\n"
    block = (line * (8192 // len(line) + 1)).encode("utf-8", "surrogateescape")
    while True:
        await c.out(block)


async def _ls(c: Context) -> int:
    flags, names = options(c.argv)
    code = shown = 0
    for name in names or ["."]:
        try:
            node = c.kernel.vfs.find(name, c.cwd, c.proc.cred, follow="d" not in flags)
        except OSError as error:
            await c.err(f"cannot access '{name}': {error.strerror}")
            code = 2
            continue
        if not node.is_dir or "d" in flags:
            await c.out(name + "\n")
            continue
        if not node.allows(c.proc.cred, READ):
            await c.err(f"cannot open directory '{name}': Permission denied")
            code = 2
            continue
        if len(names) > 1:
            await c.out("\n" * bool(shown) + f"{name}:\n")
        shown += 1
        for entry in sorted([".", "..", *node.entries] if "a" in flags else node.entries):
            if not entry.startswith(".") or "a" in flags or "A" in flags:
                await c.out(entry + "\n")
    return code


PROGRAMS: dict[str, Program] = {
    "true": _true, "false": _false, "echo": _echo, "printf": _printf, "cat": _cat, "sleep": _sleep, "env": _env,
    "pwd": _pwd, "test": _test, "[": _test, "kill": _kill, "id": _id, "whoami": _id, "head": _head, "tail": _tail,
    "seq": _seq, "yes": _yes, "ls": _ls,
}  # fmt: skip
