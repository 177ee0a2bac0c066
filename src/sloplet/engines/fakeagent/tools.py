"""More of the fake's vocabulary: files, text, terminals."""

from __future__ import annotations

import errno
import hashlib
import os
import re

from .kernel import Context, Program
from .programs import inputs, options, text_of, unescape
from .vfs import fail


async def _mkdir(c: Context) -> int:
    flags, names = options(c.argv, "m")
    for name in names:
        mode = int(flags["m"], 8) if "m" in flags else 0o755
        c.kernel.vfs.mkdir(name, c.cwd, c.proc.cred, mode, parents="p" in flags)
    return 0


async def _rmdir(c: Context) -> int:
    for name in c.argv[1:]:
        if not c.kernel.vfs.find(name, c.cwd, c.proc.cred, follow=False).is_dir:
            raise fail(errno.ENOTDIR, name)
        c.kernel.vfs.remove(name, c.cwd, c.proc.cred)
    return 0


async def _rm(c: Context) -> int:
    flags, names = options(c.argv)
    recursive = "r" in flags or "R" in flags
    code = 0
    for name in names:
        try:
            node = c.kernel.vfs.find(name, c.cwd, c.proc.cred, follow=False)
            if node.is_dir and not recursive:
                raise fail(errno.EISDIR, name)
            c.kernel.vfs.remove(name, c.cwd, c.proc.cred, recursive=recursive)
        except FileNotFoundError:
            if "f" not in flags:
                await c.err(f"cannot remove '{name}': No such file or directory")
                code = 1
        except OSError as error:
            await c.err(f"cannot remove '{name}': {error.strerror}")
            code = 1
    return code


async def _touch(c: Context) -> int:
    for name in c.argv[1:]:
        try:
            c.kernel.vfs.find(name, c.cwd, c.proc.cred)
        except FileNotFoundError:
            c.kernel.vfs.create(name, c.cwd, c.proc.cred, 0o644)
    return 0


def _target(c: Context, source: str, target: str) -> str:
    """``target`` or, if that is a directory, the name of ``source`` in it."""
    try:
        inside = c.kernel.vfs.find(target, c.cwd, c.proc.cred).is_dir
    except OSError:
        inside = False
    return f"{target}/{source.rstrip('/').rpartition('/')[2]}" if inside else target


async def _mv(c: Context) -> int:
    _, names = options(c.argv)
    for name in names[:-1]:
        c.kernel.vfs.move(name, _target(c, name, names[-1]), c.cwd, c.proc.cred, replace=True)
    return 0


async def _cp(c: Context) -> int:
    _, names = options(c.argv)
    for name in names[:-1]:
        source = c.kernel.open(name, c.cwd, c.proc.cred, "r")
        target = c.kernel.open(_target(c, name, names[-1]), c.cwd, c.proc.cred, "w")
        while piece := await source.read():
            await target.write(piece)
        source.close()
        target.close()
    return 0


async def _ln(c: Context) -> int:
    flags, names = options(c.argv)
    if "s" not in flags:
        raise fail(errno.EPERM, names[0])
    target = _target(c, names[0], names[1])
    if "f" in flags:
        try:
            c.kernel.vfs.remove(target, c.cwd, c.proc.cred)
        except FileNotFoundError:
            pass
    c.kernel.vfs.symlink(target, names[0], c.cwd, c.proc.cred)
    return 0


async def _readlink(c: Context) -> int:
    _, names = options(c.argv)
    node = c.kernel.vfs.find(names[0], c.cwd, c.proc.cred, follow=False)
    if not node.target:
        return 1
    await c.out(node.target + "\n")
    return 0


async def _chmod(c: Context) -> int:
    _, names = options(c.argv)
    for name in names[1:]:
        old = c.kernel.vfs.find(name, c.cwd, c.proc.cred).mode
        symbolic = {"+x": old | 0o111, "-x": old & ~0o111, "-w": old & ~0o222, "-r": old & ~0o444}
        mode = symbolic[names[0]] if names[0] in symbolic else int(names[0], 8)
        c.kernel.vfs.chmod(name, c.cwd, c.proc.cred, mode)
    return 0


async def _stat(c: Context) -> int:
    """``stat -c FORMAT FILE``: %a mode, %s size, %u uid, %g gid, %F nothing else."""
    flags, names = options(c.argv, "c")
    for name in names:
        node = c.kernel.vfs.find(name, c.cwd, c.proc.cred, follow="L" in flags)
        values = {"a": f"{node.mode:o}", "s": str(node.size), "u": str(node.uid), "g": str(node.gid), "n": name}
        await c.out(re.sub(r"%([asugn])", lambda m, v=values: v[m[1]], flags.get("c", "%n")) + "\n")  # type: ignore[misc]
    return 0


async def _wc(c: Context) -> int:
    flags, names = options(c.argv)
    lines = words = size = 0
    async for piece in inputs(c, names):
        lines += piece.count(b"\n")
        words += len(piece.split()) if "c" not in flags and "l" not in flags else 0
        size += len(piece)
    chosen = {"l": lines, "w": words, "c": size}
    shown = [chosen[flag] for flag in "lwc" if flag in flags] or list(chosen.values())
    await c.out(" ".join(map(str, shown)) + (f" {names[0]}" if names else "") + "\n")
    return 0


def _range(text: str) -> str:
    text = unescape(text)
    classes = {"[:upper:]": "A-Z", "[:lower:]": "a-z", "[:digit:]": "0-9"}
    for name, meaning in classes.items():
        text = text.replace(name, meaning)
    return re.sub(r"(.)-(.)", lambda m: "".join(map(chr, range(ord(m[1]), ord(m[2]) + 1))), text, flags=re.DOTALL)


async def _tr(c: Context) -> int:
    flags, sets = options(c.argv)
    first = _range(sets[0]).encode("utf-8", "surrogateescape")
    if "d" in flags:
        async for piece in inputs(c, []):
            await c.out(piece.translate(None, first))
        return 0
    second = _range(sets[1]).encode("utf-8", "surrogateescape")
    table = bytes.maketrans(first, second[: len(first)].ljust(len(first), second[-1:]))
    async for piece in inputs(c, []):
        await c.out(piece.translate(table))
    return 0


async def _sort(c: Context) -> int:
    flags, names = options(c.argv)
    lines = (await text_of(c, names)).splitlines()

    def number(line: str) -> float:
        match = re.match(r"\s*-?\d+", line)
        return float(match[0]) if match else 0

    lines.sort(key=number) if "n" in flags else lines.sort()
    if "u" in flags:
        lines = list(dict.fromkeys(lines))
    if "r" in flags:
        lines.reverse()
    await c.out("".join(line + "\n" for line in lines))
    return 0


async def _grep(c: Context) -> int:
    flags, rest = options(c.argv, "e")
    pattern = flags["e"] if "e" in flags else rest.pop(0)
    expression = re.compile(re.escape(pattern) if "F" in flags else pattern, re.IGNORECASE if "i" in flags else 0)
    hits = [line for line in (await text_of(c, rest)).splitlines() if bool(expression.search(line)) != ("v" in flags)]
    if "c" in flags:
        await c.out(f"{len(hits)}\n")
    elif "q" not in flags:
        await c.out("".join(line + "\n" for line in hits))
    return 0 if hits else 1


async def _tee(c: Context) -> int:
    flags, names = options(c.argv)
    files = [c.kernel.open(name, c.cwd, c.proc.cred, "a" if "a" in flags else "w") for name in names]
    async for piece in inputs(c, []):
        await c.out(piece)
        for file in files:
            await file.write(piece)
    for file in files:
        file.close()
    return 0


async def _sha256sum(c: Context) -> int:
    _, names = options(c.argv)
    for name in names or ["-"]:
        digest = hashlib.sha256()
        async for piece in inputs(c, [name]):
            digest.update(piece)
        await c.out(f"{digest.hexdigest()}  {name}\n")
    return 0


async def _tty(c: Context) -> int:
    is_tty = 0 in c.fds and c.fds[0].tty
    await c.out("/dev/pts/0\n" if is_tty else "not a tty\n")
    return 0 if is_tty else 1


async def _stty(c: Context) -> int:
    from .jobs import TerminalFile

    file = c.fds.get(0)
    if not isinstance(file, TerminalFile):
        await c.err("'standard input': Inappropriate ioctl for device")
        return 1
    terminal = file.terminal
    for arg in c.argv[1:]:
        if arg == "size":
            await c.out(f"{terminal.rows} {terminal.cols}\n")
        elif arg in ("echo", "-echo"):
            terminal.echo = arg == "echo"
        elif arg in ("raw", "cbreak"):
            terminal.lines = False
            terminal.signals = arg == "cbreak"
        elif arg in ("sane", "cooked"):
            terminal.lines = terminal.signals = terminal.echo = True
        else:
            raise fail(errno.EINVAL, arg)
    return 0


async def _nproc(c: Context) -> int:
    await c.out("1\n")
    return 0


async def _nohup(c: Context) -> int:
    from .shell import Shell

    c.proc.ignored.add(1)
    return await Shell(c.proc, c.env, ["nohup"]).external(c.argv[1:], c.env, c.fds)


async def _basename(c: Context) -> int:
    await c.out(os.path.basename(c.argv[1].rstrip("/")) + "\n")
    return 0


TOOLS: dict[str, Program] = {
    "mkdir": _mkdir, "rmdir": _rmdir, "rm": _rm, "touch": _touch, "mv": _mv, "cp": _cp, "ln": _ln,
    "readlink": _readlink, "chmod": _chmod, "stat": _stat, "wc": _wc, "tr": _tr, "sort": _sort, "grep": _grep,
    "tee": _tee, "sha256sum": _sha256sum, "tty": _tty, "stty": _stty, "nproc": _nproc, "nohup": _nohup,
    "setsid": _nohup, "basename": _basename,
}  # fmt: skip
