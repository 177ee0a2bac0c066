"""``box.code``: part of ``AsyncSandbox``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..controller import Controller
from ..errors import KernelError, ProcessNotFound, SandboxError, SpecError
from ..files import AsyncFiles
from ..process import DEFAULT_MAX_OUTPUT, Output
from ..spec import SandboxSpec, parse_duration
from . import languages
from .cell import EndedBefore, Kernel, OnResult, Running, Unfinished, Wishes, attach_request, new_cell
from .contexts import AsyncContexts
from .registry import Registry
from .results import CodeContext, CodeFailure, CodeResult

_NOTE = 200  # characters of a cell that its undo point shows


class AsyncCode:
    """What ``AsyncSandbox`` can do with code cells. See docs/code.md."""

    contexts: AsyncContexts
    _kernels: Registry
    _spec: SandboxSpec

    async def _holder(self) -> tuple[Controller, str]:
        """Who holds it, and its id; it has started then."""
        raise NotImplementedError

    files: AsyncFiles

    async def code(
        self,
        code: str,
        *,
        language: str | None = None,
        context: str | CodeContext | None = None,
        timeout: float | str | None = None,
        on_stdout: Output | None = None,
        on_stderr: Output | None = None,
        on_result: OnResult | None = None,
        max_output: int | str = DEFAULT_MAX_OUTPUT,
        restart: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> CodeResult:
        """Run a cell of code where variables stay: ``code("x = 1")``, then ``code("x + 1").text`` is ``"2"``.

        ``language`` is "python" (the default), "node", "typescript", "shell", "r", "java" or "deno"; each has a context
        of its own, and ``context`` names another one. ``timeout`` interrupts the cell; only if that does not help the
        context is started anew (``restarted``). The callbacks get output and results as they come. Code that raises is
        a result with ``error``; a context that has ended is a KernelError, until ``restart=True`` starts it anew.
        ``env`` has variables for this cell alone: what was there before comes back.
        """
        name = context.name if isinstance(context, CodeContext) else context
        limit = None if timeout is None else parse_duration(timeout, "timeout")
        spoken = languages.language_of(language or "python")
        languages.check_code(spoken, code)
        lent = languages.check_variables(spoken, env or {})
        wishes = Wishes(limit, max_output, on_stdout, on_stderr, on_result, lent)
        kernel = await self._kernels.kernel(spoken, name, restart=restart)
        if self._spec.undo:
            controller, sandbox_id = await self._holder()
            await controller.snapshot(sandbox_id, role="undo", note=code.strip()[:_NOTE])
        if language is not None and kernel.language != spoken:
            raise SpecError(f"the context {kernel.name!r} speaks {kernel.language}, not {spoken}")
        try:
            return await self._cell(kernel, code, wishes)
        except ProcessNotFound:  # it was rolled back, or ended and was forgotten: what is there now?
            self._kernels.forget(kernel.name)
            return await self._cell(await self._kernels.kernel(spoken, name, restart=restart), code, wishes)
        except EndedBefore as error:
            self._kernels.forget(kernel.name)
            if not restart:
                raise KernelError(error.message, hint=error.hint) from None
            return await self._cell(await self._kernels.kernel(spoken, name, restart=True), code, wishes)
        except Unfinished as error:
            try:
                await self.contexts.restart(kernel.name)
            except KernelError:
                await self._kernels.discard(kernel.name)
                raise
            failed = error.partial.error or CodeFailure("Timeout", "its time limit was reached")
            message = f"{failed.message}; it did not stop, so the context was started anew, without its variables"
            return replace(error.partial, error=replace(failed, message=message), restarted=True)

    def _told_of(self, kernel: Kernel, wishes: Wishes) -> dict[str, object]:
        """What a Python kernel is told besides: the sandbox's own variables, which may be others than those of the
        template that it was saved with."""
        if kernel.language != "python" or kernel.protocol == languages.PLAIN:
            return {}
        given: dict[str, object] = {"base": dict(self._spec.env)} if self._spec.env else {}
        return {**given, "silent": True} if wishes.silent else given

    async def _cell(self, kernel: Kernel, code: str, wishes: Wishes) -> CodeResult:
        if kernel.language not in languages.ONE_BY_ONE:
            return await self._sent(kernel, code, wishes)
        # What a shell has read ahead it may forget when it is interrupted: ours wait here for their turn.
        async with self._kernels.turn(f"{kernel.name} cells"):
            return await self._sent(kernel, code, wishes)

    async def _sent(self, kernel: Kernel, code: str, wishes: Wishes) -> CodeResult:
        cell = new_cell()
        raw = languages.check_code(kernel.language, code)
        env = languages.check_variables(kernel.language, wishes.env)
        if env and kernel.protocol == languages.PLAIN:
            raise KernelError(
                f"{kernel.describe()} was started by an older version, which knows no variables for one cell",
                hint=f"contexts.restart({kernel.name!r}) starts it anew, without its variables; or leave env= out",
            )
        more = self._told_of(kernel, wishes)
        request = languages.request(kernel.language, kernel.key, cell, raw, env, more)
        path = None
        try:
            if request is None:
                held = languages.by_file(kernel.language, raw, env, more)
                path = await self._kernels.deposit(kernel, cell, held)
                request = languages.request_by_file(kernel.language, kernel.key, cell, path, env or more)
            stream = await self._kernels.open(attach_request(kernel))
            try:
                await stream.send(request)
            except BaseException:
                stream.reset()
                raise
            return await Running(kernel, stream, cell, wishes).finish()
        except KernelError:
            self._kernels.forget(kernel.name)
            if not kernel.early and not kernel.begun:  # it never ran a cell, so no variables were lost with it
                await self._kernels.discard(kernel.name)
            raise
        except SandboxError:  # paused, or dead: looking after the file would wake it
            path = None
            raise
        finally:
            if path is not None:
                await self._kernels.withdraw(kernel, path)
