"""The fake's sh: runs a parsed script inside a process of the fake kernel."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable

from .kernel import DEFAULT_PATH, Context, Exited, Proc, shell_code, start
from .streams import Device, File, new_pipe
from .syntax import AndOr, Block, Command, Compound, Pipeline, Redirect, Simple, parse
from .vfs import fail
from .words import Words


class LoopControl(BaseException):
    def __init__(self, kind: str, levels: int = 1) -> None:
        self.kind = kind
        self.levels = levels


class Returned(BaseException):
    def __init__(self, code: int) -> None:
        self.code = code


class Shell(Words):
    """One shell process. A subshell is a copy in a process of its own."""

    def __init__(self, proc: Proc, env: dict[str, str], args: list[str]) -> None:
        super().__init__(proc, env, args)
        self.functions: dict[str, Command] = {}
        self.background: dict[int, Proc] = {}
        self.stop_on_error = False

    def copy(self, proc: Proc) -> Shell:
        other = Shell(proc, self.exported, list(self.args))
        other.vars, other.functions, other.last = dict(self.vars), dict(self.functions), self.last
        other.stop_on_error = self.stop_on_error
        return other

    async def script(self, text: str) -> int:
        try:
            block = parse(text)
        except SyntaxError as error:
            await self.complain(f"Syntax error: {error.msg}")
            return 2
        try:
            code = await self.block(block)
        except Exited as end:
            code = end.code
        except Returned as end:
            code = end.code
        except LoopControl:
            code = 0
        if 0 in self.proc.traps:
            await self.block(parse(self.proc.traps.pop(0)))
        return code

    async def line(self, text: str) -> int:
        """One line of an interactive shell: an error in it does not end the shell."""
        try:
            self.last = await self.block(parse(text))
        except SyntaxError as error:
            await self.complain(f"Syntax error: {error.msg}")
            self.last = 2
        except (Returned, LoopControl):
            pass
        return self.last

    async def with_files(self, text: str, fds: dict[int, File]) -> int:
        """Run a script in this shell with other open files (eval, .)."""
        try:
            block = parse(text)
        except SyntaxError as error:
            await self.complain(f"Syntax error: {error.msg}", fds)
            raise Exited(2) from None
        saved, self.proc.fds = self.proc.fds, {n: f.dup() for n, f in fds.items()}
        try:
            return await self.block(block)
        finally:
            mine, self.proc.fds = self.proc.fds, saved
            for file in mine.values():
                file.close()

    async def complain(self, text: str, fds: dict[int, File] | None = None) -> None:
        file = (fds if fds is not None else self.proc.fds).get(2)
        if file is not None:
            try:
                await file.write(f"sh: {text}\n".encode("utf-8", "surrogateescape"))
            except OSError:
                pass

    # -- control flow ------------------------------------------------------------------

    async def block(self, block: Block) -> int:
        for item, in_background in block.items:
            if in_background:
                try:
                    child = self.child(lambda shell, item=item: shell.and_or(item), "sh", stdin_null=True)  # type: ignore[misc]
                except BlockingIOError:
                    await self.complain("Cannot fork")
                    raise Exited(2) from None
                self.background[child.pid] = child
                self.last_background, self.last = child.pid, 0
            else:
                self.last = await self.and_or(item)
            await self.traps()
            await asyncio.sleep(0)
        return self.last

    async def traps(self) -> None:
        while self.proc.pending:
            script = self.proc.traps.get(self.proc.pending.pop(0), "")
            kept = self.last
            await self.block(parse(script))
            self.last = kept

    async def and_or(self, item: AndOr) -> int:
        self.last = await self.pipeline(item.first)
        for which, pipeline in item.rest:
            if (which == "&&") == (self.last == 0):
                self.last = await self.pipeline(pipeline)
        if self.stop_on_error and self.last and not item.rest and not item.first.negate:
            raise Exited(self.last)
        return self.last

    async def pipeline(self, item: Pipeline) -> int:
        if len(item.commands) == 1:
            code = await self.command(item.commands[0], {})
        else:
            code = await self.piped(item.commands)
        return int(code == 0) if item.negate else code

    async def piped(self, commands: list[Command]) -> int:
        children: list[Proc] = []
        source: File | None = None
        for index, command in enumerate(commands):
            extra: dict[int, File] = {}
            if source is not None:
                extra[0] = source
            reader: File | None = None
            if index < len(commands) - 1:
                reader, extra[1] = new_pipe()
            try:
                children.append(self.child(lambda shell, c=command: shell.command(c, {}), "sh", extra))  # type: ignore[misc]
            except BlockingIOError:
                for file in extra.values():
                    file.close()
                if reader is not None:
                    reader.close()
                await self.complain("Cannot fork")
                raise Exited(2) from None
            source = reader
        statuses = [await child.wait() for child in children]
        return shell_code(statuses[-1])

    def child(
        self,
        work: Callable[[Shell], Awaitable[int]],
        name: str,
        extra: dict[int, File] | None = None,
        *,
        stdin_null: bool = False,
    ) -> Proc:
        """A forked copy of this shell. ``extra`` files are given away on success."""
        inherited = {n: f.dup() for n, f in self.proc.fds.items() if n not in (extra or {})}
        if stdin_null and 0 in inherited and not inherited[0].tty:
            inherited.pop(0).close()
            inherited[0] = Device("null")
        fds = {**inherited, **(extra or {})}

        async def main(proc: Proc) -> int:
            shell = self.copy(proc)
            try:
                return await work(shell)
            except Returned as end:
                return end.code
            except LoopControl:
                return 0

        try:
            return self.kernel.fork(self.proc.tree, self.proc, [name], self.proc.cred, self.proc.cwd, fds, main)
        except OSError:
            for file in inherited.values():
                file.close()
            raise

    async def command(self, command: Command, fds: dict[int, File]) -> int:
        if isinstance(command, Simple):
            return await self.simple(command)
        if command.kind == "function":
            assert command.body is not None
            self.functions[command.name] = command.body
            return 0
        if not command.redirects:
            return await self.compound(command)
        saved = self.proc.fds
        opened: dict[int, File] = {}
        try:
            opened = await self.redirected(command.redirects)
        except OSError as error:
            await self.complain(f"cannot open {error.filename}: {error.strerror}")
            return 2
        self.proc.fds = opened
        try:
            return await self.compound(command)
        finally:
            self.proc.fds = saved
            for file in opened.values():
                file.close()

    async def compound(self, command: Compound) -> int:
        blocks = command.blocks
        if command.kind == "group":
            return await self.block(blocks[0])
        if command.kind == "subshell":
            try:
                child = self.child(lambda shell: shell.block(blocks[0]), "sh")
            except BlockingIOError:
                await self.complain("Cannot fork")
                raise Exited(2) from None
            return shell_code(await child.wait())
        if command.kind == "if":
            for index in range(0, len(blocks) - 1, 2):
                if await self.block(blocks[index]) == 0:
                    return await self.block(blocks[index + 1])
            return await self.block(blocks[-1]) if len(blocks) % 2 else 0
        code = 0
        if command.kind == "for":
            words = self.args[1:] if command.words is None else await self.expand_all(command.words)
            for word in words:
                self.assign(command.name, word)
                code, go_on = await self.body(blocks[0])
                if not go_on:
                    break
            return code
        while (await self.block(blocks[0]) == 0) == (command.kind == "while"):
            code, go_on = await self.body(blocks[1])
            if not go_on:
                break
        return code

    async def body(self, block: Block) -> tuple[int, bool]:
        try:
            return await self.block(block), True
        except LoopControl as control:
            if control.levels > 1:
                raise LoopControl(control.kind, control.levels - 1) from None
            return 0, control.kind == "continue"

    # -- simple commands ---------------------------------------------------------------

    async def simple(self, command: Simple) -> int:
        argv = await self.expand_all(command.words)
        assigns = [(name, "".join(await self.expand(word, split=False))) for name, word in command.assigns]
        try:
            fds = await self.redirected(command.redirects)
        except OSError as error:
            await self.complain(f"cannot open {error.filename}: {error.strerror}")
            if argv and argv[0] in ("exec", ":", "export", "set"):
                raise Exited(2) from None
            return 2
        if argv[:1] == ["exec"] and len(argv) == 1:
            old, self.proc.fds = self.proc.fds, fds
            for file in old.values():
                file.close()
            return 0
        try:
            if not argv:
                for name, value in assigns:
                    self.assign(name, value)
                return self.last if any(p.kind == "cmd" for _, word in command.assigns for p in word) else 0
            if argv[0] in self.functions:
                return await self.function(argv, fds)
            from .builtins import BUILTINS

            builtin = BUILTINS.get(argv[0])
            if builtin is not None:
                for name, value in assigns:
                    self.assign(name, value)
                context = Context(self.kernel, self.proc, argv, self.exported, self.proc.cwd, fds)

                async def run_builtin(inner: Context) -> int:
                    return await builtin(self, inner)

                return await self.kernel.call(run_builtin, context)
            return await self.external(argv, {**self.exported, **dict(assigns)}, fds)
        finally:
            for file in fds.values():
                file.close()

    async def function(self, argv: list[str], fds: dict[int, File]) -> int:
        saved_args, saved_fds = self.args, self.proc.fds
        self.args, self.proc.fds = [self.args[0], *argv[1:]], {n: f.dup() for n, f in fds.items()}
        try:
            return await self.command(self.functions[argv[0]], {})
        except Returned as end:
            return end.code
        finally:
            mine, self.args, self.proc.fds = self.proc.fds, saved_args, saved_fds
            for file in mine.values():
                file.close()

    async def external(self, argv: list[str], env: dict[str, str], fds: dict[int, File]) -> int:
        proc = self.proc
        try:
            node = self.kernel.vfs.executable(argv[0], env.get("PATH", DEFAULT_PATH), proc.cwd, proc.cred)
        except OSError as error:
            missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
            await self.complain(f"{argv[0]}: {'not found' if missing else error.strerror}", fds)
            return 127 if missing else 126
        try:
            child = start(self.kernel, proc.tree, proc, node, argv, env, fds)
        except BlockingIOError:
            await self.complain("Cannot fork", fds)
            raise Exited(2) from None
        status = await child.wait()
        if status == -signal.SIGKILL:
            await self.complain("Killed", fds)
        return shell_code(status)

    async def redirected(self, redirects: list[Redirect]) -> dict[int, File]:
        """Copies of this shell's files with redirections applied; the caller closes them."""
        fds = {number: file.dup() for number, file in self.proc.fds.items()}
        try:
            for redirect in redirects:
                target = "".join(await self.expand(redirect.word, split=False))
                fresh: File | None
                if redirect.how == "dup":
                    if target == "-":
                        fresh = None
                    elif target.isdigit() and int(target) in fds:
                        fresh = fds[int(target)].dup()
                    else:
                        raise fail(errno.EBADF, target)
                else:
                    tty = next((file for file in self.proc.fds.values() if file.tty), None)
                    fresh = self.kernel.open(target, self.proc.cwd, self.proc.cred, redirect.how, tty)
                if redirect.fd in fds:
                    fds.pop(redirect.fd).close()
                if fresh is not None:
                    fds[redirect.fd] = fresh
        except BaseException:
            for file in fds.values():
                file.close()
            raise
        return fds

    async def substitute(self, script: str) -> str:
        reader, writer = new_pipe()
        try:
            child = self.child(lambda shell: shell.script(script), "sh", {1: writer})
        except BlockingIOError:
            await self.complain("Cannot fork")
            raise Exited(2) from None
        parts = []
        while piece := await reader.read():
            parts.append(piece)
        reader.close()
        self.last = shell_code(await child.wait())
        return os.fsdecode(b"".join(parts)).rstrip("\n")
