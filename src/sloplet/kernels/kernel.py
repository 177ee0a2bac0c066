"""The Python kernel: runs code cells, one after another, in one namespace.

This file runs INSIDE a sandbox, under whatever Python (3.7 or newer) is there, standard library only; it is sent as
text and never imported on the host. What it says is framed (docs/code.md, "What goes over the wire"): a frame is
one write of at most 4,096 bytes, so that whatever threads and children print beside it stays apart. stdout and stderr
are the process's own: everything that is written to them, by whomever, is the cell's output.
"""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import linecache
import os
import re
import select
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

KEY = sys.argv[2].encode()
PIECE = 2880  # raw bytes in a frame: 3,840 as base64
MOST = 16 * 1024 * 1024  # bytes of one representation
MOST_TEXT = 1024 * 1024  # bytes of text/plain; it is cut there
MOST_TRACE = 64 * 1024
TOP_AWAIT = getattr(ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0)
COROUTINE = 0x80
METHODS = (
    ("_repr_html_", "text/html"), ("_repr_markdown_", "text/markdown"), ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"), ("_repr_jpeg_", "image/jpeg"), ("_repr_latex_", "text/latex"),
    ("_repr_json_", "application/json"), ("_repr_javascript_", "application/javascript"),
    ("_repr_pdf_", "application/pdf"),
)  # fmt: skip


def away(fd: int) -> int:
    """A copy of a descriptor where user code will not stumble over it: high up, if so many may be open."""
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100)
    except OSError:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


class Wire:
    """Frames to the host, and lines from it. The descriptors are our own, away from what user code uses."""

    def __init__(self) -> None:
        self.requests, self.out, self.err = away(0), away(1), away(2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self.lock = threading.RLock()
        self.cell = b""  # the one that runs
        self.child = False  # we are a fork of the kernel, and must not speak for it
        self.buffer = b""
        self.waiting: list[dict[str, Any]] = []

    def forked(self) -> None:
        self.child = True
        self.lock = threading.RLock()

    def say(self, *frames: bytes, err: bool = False) -> None:
        if self.child:
            return
        data = b"".join(b"\x1e" + KEY + b" " + self.cell + b" " + frame + b"\n" for frame in frames)
        fd = self.err if err else self.out
        with self.lock:
            while data:
                try:
                    data = data[os.write(fd, data) :]
                except BlockingIOError:  # a child made the pipe non-blocking
                    select.select([], [fd], [], 1.0)

    def send(self, name: str, value: bytes) -> None:
        """A named part of what the next frame completes."""
        head = b"data " + name.encode() + b" "
        for at in range(0, len(value), PIECE):
            self.say(head + base64.b64encode(value[at : at + PIECE]))

    def take(self, data: bytes) -> None:
        self.buffer += data
        lines = self.buffer.split(b"\n")
        self.buffer = lines.pop()
        for line in lines:
            try:
                request = json.loads(line.decode())
            except ValueError:
                continue
            if not isinstance(request, dict) or request.get("key") != KEY.decode():
                continue
            if "cancel" in request:
                self.waiting = [cell for cell in self.waiting if cell.get("id") != request["cancel"]]
            else:
                self.waiting.append(request)

    def next(self, idle: Callable[[int], None]) -> dict[str, Any] | None:
        """The next cell; None when the host has closed the line. What was cancelled while it waited is skipped."""
        while True:
            while not self.waiting or select.select([self.requests], [], [], 0)[0]:
                if not self.waiting:
                    idle(self.requests)
                data = os.read(self.requests, 65536)
                if not data:
                    return None
                self.take(data)
            return self.waiting.pop(0)


wire = Wire()
main = types.ModuleType("__main__")
count = 0
loop: Any = None  # asyncio's, once a cell has awaited something


# -- what a value looks like --------------------------------------------------------------------------------------


def encoded(mime: str, value: Any) -> bytes | None:
    if isinstance(value, tuple):  # (data, metadata)
        value = value[0] if value else None
    if value is None:
        return None
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if mime == "application/json" or not isinstance(value, str):
        return value.encode("utf-8", "replace") if isinstance(value, str) else json.dumps(value).encode()
    if mime in ("image/png", "image/jpeg"):  # as text it is base64 already
        return base64.b64decode(value)
    return value.encode("utf-8", "backslashreplace")


def bundle(value: Any) -> dict[str, bytes]:
    """MIME type -> bytes, by IPython's conventions. A representation that fails is left out; ``repr`` may raise."""
    found: dict[str, bytes] = {}

    def put(mime: str, data: Any) -> None:
        try:
            raw = encoded(mime, data)
        except (TypeError, ValueError):
            return
        if raw is not None and re.match(r"^[a-z0-9.+-]+/[A-Za-z0-9.+-]+$", mime):
            found[mime] = raw

    if not isinstance(value, type):
        method = getattr(value, "_repr_mimebundle_", None)
        if callable(method):
            try:
                given = method(include=None, exclude=None)
                given = given[0] if isinstance(given, tuple) else given
                for mime, data in dict(given or {}).items():
                    put(str(mime), data)
            except Exception:
                found.clear()
        for name, mime in METHODS:
            method = getattr(value, name, None) if mime not in found else None
            if callable(method):
                try:
                    put(mime, method())
                except Exception:
                    continue
    if "text/plain" not in found:
        put("text/plain", repr(value))
    figures = sys.modules.get("matplotlib.figure")
    if figures is not None and isinstance(value, figures.Figure):
        found["image/png"] = drawn(value)
    return found


def drawn(figure: Any) -> bytes:
    """A figure as PNG. It is closed then, so that it is shown once."""
    target = io.BytesIO()
    try:
        figure.savefig(target, format="png", bbox_inches="tight")
    finally:
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close(figure)
    return target.getvalue()


def publish(parts: dict[str, bytes], kind: bytes) -> None:
    flush()
    with wire.lock:
        for mime, raw in parts.items():
            if mime == "text/plain" and len(raw) > MOST_TEXT:
                raw = raw[:MOST_TEXT]
                wire.say(b"cut")
            if len(raw) > MOST:
                wire.say(b"cut")
            else:
                wire.send(mime, raw)
        wire.say(kind)


def display(*values: Any, raw: bool = False, **_: Any) -> None:
    """Show values as rich results, as IPython's ``display`` does. ``raw``: they are MIME bundles themselves."""
    for value in values:
        if wire.child:
            print(value)
        elif raw:
            publish({str(mime): encoded(str(mime), data) or b"" for mime, data in dict(value).items()}, b"shown")
        else:
            publish(bundle(value), b"shown")


def show_figures(*_: Any, **__: Any) -> None:
    """Every open matplotlib figure as a PNG, then closed. ``plt.show`` is this."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or wire.child:
        return
    for number in pyplot.get_fignums():
        publish(bundle(pyplot.figure(number)), b"shown")


def patch_pyplot(module: Any) -> None:
    module.show = show_figures


def patch_ipython(module: Any) -> None:
    module.display = display


def after(execute: Callable[[Any], None], patch: Callable[[Any], None]) -> Callable[[Any], None]:
    def both(module: Any) -> None:
        execute(module)
        patch(module)

    return both


class Patches:
    """Completes two modules right after user code has imported them. Nothing is imported that it did not ask for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        patch = {"matplotlib.pyplot": patch_pyplot, "IPython.core.display_functions": patch_ipython}.get(name)
        if patch is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
                spec.loader.exec_module = after(spec.loader.exec_module, patch)
                return spec
        return None


# -- running ------------------------------------------------------------------------------------------------------


def refuse_input(prompt: Any = "") -> str:
    """Code cells have no terminal."""
    raise RuntimeError("input() has nobody to ask in a code cell: put the value into the code")


def not_now(number: int, frame: Any) -> None:
    """SIGINT while no cell runs: it came too late."""


def flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except Exception:
            continue


def suppressed(source: str, last: Any) -> bool:
    """Whether a semicolon behind the last expression says that nobody wants its value."""
    end = getattr(last, "end_lineno", None)
    if end is None:  # Python 3.7
        return source.rstrip().endswith(";")
    lines = source.encode("utf-8", "surrogatepass").split(b"\n")
    rest = b"\n".join([lines[end - 1][last.end_col_offset :], *lines[end:]])
    return rest.lstrip(b" \t\f\r)").startswith(b";")


def compiled(source: str, name: str) -> tuple[Any, Any]:
    """The statements, and the last expression if its value is wanted; either may be None."""
    tree: Any = compile(source, name, "exec", ast.PyCF_ONLY_AST | TOP_AWAIT, True)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or suppressed(source, last):
        return compile(tree, name, "exec", TOP_AWAIT, True), None
    tree.body.pop()
    before = compile(tree, name, "exec", TOP_AWAIT, True) if tree.body else None
    return before, compile(ast.Expression(last.value), name, "eval", TOP_AWAIT, True)


def spoken_to_ipython(source: str) -> str:
    """The few words of IPython that models write into cells, as Python: ``!command``, ``%pip``, ``%cd``,
    ``%matplotlib``, ``%%bash``. Used where the cell is no Python as it is."""

    def plain(match: Any) -> str:
        indent, sign, rest = match.groups()
        word, _, tail = rest.strip().partition(" ")
        if sign == "%" and word not in ("pip", "cd", "matplotlib"):
            return str(match.group(0))
        return f"{indent}__sloplet__({sign!r}, {word if sign == '%' else ''!r}, {tail if sign == '%' else rest!r})"

    first, _, body = source.lstrip().partition("\n")
    if re.match(r"^%%(bash|sh)\s*$", first):
        return f"__sloplet__('!', '', {body!r})"
    return re.sub(r"(?m)^([ \t]*)([!%])(.*)$", plain, source)


def magic(sign: str, word: str, text: str) -> None:
    import shlex
    import subprocess

    flush()
    if sign == "!":
        subprocess.call(text, shell=True)  # noqa: S602
    elif word == "pip":
        subprocess.call([sys.executable, "-m", "pip", *shlex.split(text)])
    elif word == "cd":
        os.chdir(os.path.expanduser(text.strip() or "~"))


def understood(source: str, name: str) -> tuple[Any, Any]:
    try:
        return compiled(source, name)
    except SyntaxError:
        other = spoken_to_ipython(source)
        if other == source:
            raise
        return compiled(other, name)


def evaluate(code: Any) -> Any:
    value = eval(code, main.__dict__)  # noqa: S307
    return wait_for(value) if code.co_flags & COROUTINE else value


def wait_for(coroutine: Any) -> Any:
    """Await on the kernel's own loop, which background tasks of earlier cells live on, too."""
    global loop
    import asyncio

    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    task = loop.create_task(coroutine)
    try:
        return loop.run_until_complete(task)
    except KeyboardInterrupt:
        task.cancel()
        loop.run_until_complete(asyncio.wait([task], timeout=1.0))
        raise


def idle(fd: int) -> None:
    """Wait for the host; asyncio tasks that cells have left running go on meanwhile."""
    if loop is None or loop.is_closed():
        return
    import asyncio

    if not asyncio.all_tasks(loop):
        return
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        loop.run_until_complete(ready)
    finally:
        loop.remove_reader(fd)


def without_us(told: Any) -> Any:
    """A traceback without the frames of this file, and so the errors that led to it."""
    for one in (told, told.__cause__, told.__context__):
        if one is not None:
            one.stack[:] = [frame for frame in one.stack if frame.filename != "<sloplet kernel>"]
    return told


def explained(error: BaseException) -> tuple[str, str, str]:
    """Name, message and traceback, without the frames of this file."""
    name = type(error).__name__
    try:
        message = str(error)
    except Exception:
        message = "(its message could not be made)"
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell"):
        trace = trace.tb_next
    try:
        if trace is None:
            lines = traceback.format_exception_only(type(error), error)
        else:
            lines = list(without_us(traceback.TracebackException(type(error), error, trace)).format())
        text = "".join(lines)
    except BaseException:
        text = name + ": " + message
    if len(text) > MOST_TRACE:
        text = text[: MOST_TRACE // 2] + "\n...\n" + text[-MOST_TRACE // 2 :]
    return name, message[:MOST_TRACE], text


def run(source: str, name: str) -> BaseException | None:
    """Run a cell; the error that ended it, if one did. Its value and figures are published."""
    if len(source) < MOST_TEXT:  # for tracebacks; kept as long as the kernel lives
        linecache.cache[name] = (len(source), None, [line + "\n" for line in source.split("\n")], name)
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            before, last = understood(source, name)
            if before is not None:
                evaluate(before)
            if last is not None:
                value = evaluate(last)
                if value is not None and not wire.child:
                    builtins._ = value  # type: ignore[attr-defined]
                    publish(bundle(value), b"value")
            show_figures()
        finally:
            signal.signal(signal.SIGINT, not_now)
    except BaseException as error:
        return error
    return None


def serve_one(cell: dict[str, Any]) -> None:
    global count
    count += 1
    wire.cell = str(cell.get("id")).encode()
    wire.say(b"begin %d" % count)
    wire.say(b"begin", err=True)
    generation.look()
    error: BaseException | None
    try:
        error = run(source_of(cell), f"<cell {count}>")
    except BaseException as problem:
        error = problem
    flush()
    if wire.child:
        leave(error)
    if error is not None:
        name, message, trace = explained(error)
        for part, text in (("name", name), ("message", message), ("traceback", trace)):
            wire.send(part, text.encode("utf-8", "backslashreplace"))
        wire.say(b"error")
        error = None
    flush()
    wire.say(b"end 0")
    wire.say(b"end", err=True)


def source_of(cell: dict[str, Any]) -> str:
    if "file" not in cell:
        return str(cell["code"])
    with open(cell["file"], "rb") as file:
        return file.read().decode()


def leave(error: BaseException | None) -> None:
    """A fork that ran to the end of the cell: it ends, as a script would."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    elif error is not None:
        traceback.print_exception(type(error), error, error.__traceback__)
        code = 1
    flush()
    os._exit(code & 0xFF)


class Generation:
    """Which copy of the sandbox this is. A fork's random numbers must not be its sister's."""

    def __init__(self) -> None:
        try:
            self.fd = os.open(os.environ.get("SLOPLET_GENERATION_FILE", ""), os.O_RDONLY)
        except OSError:
            self.fd = -1
        self.seen = self.read()

    def read(self) -> bytes:
        return os.pread(self.fd, 128, 0) if self.fd >= 0 else b""

    def look(self) -> None:
        now = self.read()
        if now == self.seen:
            return
        self.seen = now
        for name in ("random", "numpy.random"):
            if name in sys.modules:
                sys.modules[name].seed()


generation = Generation()


def begin() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [""]
    sys.modules["__main__"] = main
    main.__dict__.update(__builtins__=builtins, display=display)
    builtins.input = refuse_input
    builtins.__sloplet__ = magic  # type: ignore[attr-defined]
    os.environ.setdefault("MPLBACKEND", "agg")
    os.register_at_fork(after_in_child=wire.forked)
    sys.meta_path.insert(0, Patches())
    signal.signal(signal.SIGINT, not_now)
    try:
        import faulthandler

        faulthandler.enable(wire.err)
    except Exception:
        pass
    while True:
        cell = wire.next(idle)
        if cell is None:
            return
        serve_one(cell)


begin()
