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
import gc
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # these have run in this namespace already
    from .charts import beside
    from .words import NoIPython, Words, find_installed, notebook, translated

KEY = sys.argv[2].encode()
PIECE = 2880  # raw bytes in a frame: 3,840 as base64
MOST = 16 * 1024 * 1024  # bytes of one representation
MOST_TEXT = 1024 * 1024  # bytes of text/plain; it is cut there
MOST_TRACE = 64 * 1024
TOP_AWAIT = getattr(ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0)
COROUTINE = 0x80
MIME = re.compile(r"^[a-z0-9]{1,20}/[A-Za-z0-9._+-]{1,80}\Z")
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
        for at in range(0, len(value) or 1, PIECE):
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
    if (mime.startswith("image/") and mime != "image/svg+xml") or mime == "application/pdf":
        return base64.b64decode(value)  # as text it is base64 already
    return value.encode("utf-8", "backslashreplace")


def put(found: dict[str, bytes], mime: str, data: Any) -> None:
    """A representation; one that is none, or whose type is no MIME type, is left out."""
    try:
        raw = encoded(mime, data)
    except (TypeError, ValueError):
        return
    if raw is not None and MIME.match(mime):
        found[mime] = raw


def method_of(value: Any, name: str) -> Any:
    """Values may answer for names that they do not have, or fail to."""
    try:
        method = getattr(value, name, None)
    except Exception:
        return None
    return method if callable(method) else None


def bundle(value: Any) -> dict[str, bytes]:
    """MIME type -> bytes, by IPython's conventions. A representation that fails is left out; ``repr`` may raise."""
    found: dict[str, bytes] = {}
    if not isinstance(value, type):
        method = method_of(value, "_repr_mimebundle_")
        if method is not None:
            try:
                given = method(include=None, exclude=None)
                given = given[0] if isinstance(given, tuple) else given
                for mime, data in dict(given or {}).items():
                    put(found, str(mime), data)
            except Exception:
                found.clear()
        for name, mime in METHODS:
            method = method_of(value, name) if mime not in found else None
            if method is not None:
                try:
                    put(found, mime, method())
                except Exception:
                    continue
    if "text/plain" not in found:
        put(found, "text/plain", repr(value))
    figures = sys.modules.get("matplotlib.figure")
    if figures is not None and isinstance(value, figures.Figure):
        found["image/png"] = drawn(value)
    for mime, raw in beside(value, found.get("text/plain", b"")).items():
        found.setdefault(mime, raw)
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
        try:
            for mime, raw in parts.items():
                if mime == "text/plain" and len(raw) > MOST_TEXT:
                    raw = raw[:MOST_TEXT]
                    wire.say(b"cut")
                if len(raw) > MOST:
                    wire.say(b"cut")
                else:
                    wire.send(mime, raw)
        except BaseException:  # interrupted: half of it is not part of the next one
            wire.say(b"drop")
            raise
        wire.say(kind)


def display(*values: Any, raw: bool = False, display_id: Any = None, **_: Any) -> Any:
    """Show values as rich results, as IPython's ``display`` does. ``raw``: they are MIME bundles themselves."""
    for value in values:
        if wire.child:
            print(value)
        elif raw:
            found: dict[str, bytes] = {}
            for mime, data in dict(value).items():
                put(found, str(mime), data)
            publish(found, b"shown")
        else:
            publish(bundle(value), b"shown")
    # Nothing that was sent can be changed: what a handle updates is shown again.
    return None if display_id is None else types.SimpleNamespace(display_id=display_id, update=display, display=display)


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


def patch_pillow(module: Any) -> None:
    """``image.show()`` shows it here: there is no screen. ``SLOPLET_SHOW_SAVED``: so does saving it under a name."""

    def show(image: Any, *_: Any, **__: Any) -> None:
        display(image)

    save = module.Image.save

    def save_and_show(image: Any, fp: Any, *more: Any, **named: Any) -> Any:
        done = save(image, fp, *more, **named)
        if isinstance(fp, (str, os.PathLike)) and os.environ.get("SLOPLET_SHOW_SAVED"):
            display(image)
        return done

    module.Image.show, module.Image.save = show, save_and_show


def patch_asyncio(module: Any) -> None:
    """Tasks that are made while no loop runs are for the kernel's, as in a notebook, whose loop always runs."""
    create = module.create_task

    def create_task(coroutine: Any, **more: Any) -> Any:
        try:
            return create(coroutine, **more)
        except RuntimeError:
            if module._get_running_loop() is not None:
                raise
            return the_loop().create_task(coroutine, **more)

    module.create_task = create_task
    the_loop()


def after(execute: Callable[[Any], None], patch: Callable[[Any], None]) -> Callable[[Any], None]:
    def both(module: Any) -> None:
        execute(module)
        patch(module)

    return both


class Patches:
    """Completes a few modules right after user code has imported them. Nothing is imported that it did not ask for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        patch = {
            "matplotlib.pyplot": patch_pyplot,
            "IPython.core.display_functions": patch_ipython,
            "PIL.Image": patch_pillow,
            "asyncio": patch_asyncio,
        }.get(name)
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


def settle() -> None:
    """No cell runs. The signal that ended it may have come just before this was said."""
    while signal.getsignal(signal.SIGINT) is not not_now:
        try:
            signal.signal(signal.SIGINT, not_now)
        except KeyboardInterrupt:
            continue


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
    collected = gc.isenabled()
    gc.disable()  # a finalizer that parses (a task's forgotten traceback) would be a SystemError here in Python 3.11
    try:
        tree: Any = compile(source, name, "exec", ast.PyCF_ONLY_AST | TOP_AWAIT, True)
    finally:
        if collected:
            gc.enable()
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or suppressed(source, last):
        return compile(tree, name, "exec", TOP_AWAIT, True), None
    tree.body.pop()
    before = compile(tree, name, "exec", TOP_AWAIT, True) if tree.body else None
    return before, compile(ast.Expression(last.value), name, "eval", TOP_AWAIT, True)


def understood(source: str, name: str) -> tuple[Any, Any]:
    """``compiled``; where that is no Python, with IPython's words put into Python."""
    while True:
        try:
            return compiled(source, name)
        except SyntaxError as problem:
            other = translated(source, name, problem)
            if other is None or other == source:
                raise
            source = other


def evaluate(*parts: Any) -> Any:
    """The value of the last of them. If one awaits something, all run in the loop, as one."""
    parts = tuple(part for part in parts if part is not None)
    if any(part.co_flags & COROUTINE for part in parts):
        return wait_for(awaited(parts))
    value = None
    for part in parts:
        value = eval(part, main.__dict__)  # noqa: S307
    return value


async def awaited(parts: Any) -> Any:
    value = None
    for part in parts:
        value = eval(part, main.__dict__)  # noqa: S307
        if part.co_flags & COROUTINE:
            value = await value
    return value


def run_words(source: str, name: str) -> Any:
    return evaluate(*understood(source, name))


def the_loop() -> Any:
    """The kernel's own loop, which tasks of earlier cells live on, too."""
    global loop
    import asyncio

    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def wait_for(coroutine: Any) -> Any:
    import asyncio

    task = the_loop().create_task(coroutine)
    try:
        return loop.run_until_complete(task)
    except BaseException:
        if not task.done():
            task.cancel()
            loop.run_until_complete(asyncio.wait([task], timeout=1.0))
        if task.done() and not task.cancelled():
            task.exception()  # it is told by us
        raise


def idle(fd: int) -> None:
    """Wait for the host; asyncio tasks that cells have left running go on meanwhile."""
    while loop is not None and not loop.is_closed() and not select.select([fd], [], [], 0)[0]:
        import asyncio

        if not asyncio.all_tasks(loop):
            return
        ready = loop.create_future()
        loop.add_reader(fd, lambda ready=ready: ready.done() or ready.set_result(None))
        try:
            loop.run_until_complete(ready)
        except BaseException as error:  # sys.exit() in a task, loop.stop(): not the end of the kernel
            if wire.child:
                leave(error)
            ready.cancel()
            traceback.print_exception(type(error), error, error.__traceback__)
        finally:
            if wire.child:
                leave(None)
            loop.remove_reader(fd)


def without_us(told: Any) -> Any:
    """A traceback without the frames of this file, and so the errors that led to it."""
    rest = [told]
    while rest:
        one = rest.pop()
        if one is not None:
            one.stack[:] = [frame for frame in one.stack if frame.filename != "<sloplet kernel>"]
            rest += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]
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
            try:
                value = evaluate(*understood(source, name))
                if value is not None and not wire.child:
                    builtins._ = value  # type: ignore[attr-defined]
                    publish(bundle(value), b"value")
            finally:
                show_figures()  # of a cell that failed, too: they are not the next one's
        finally:
            signal.signal(signal.SIGINT, not_now)
    except BaseException as error:
        return error
    return None


def serve_one(cell: dict[str, Any]) -> None:
    global count
    count += not cell.get("silent")
    with wire.lock:  # what a thread displays just now is of one cell
        wire.cell = str(cell.get("id")).encode()
        wire.say(b"begin %d" % count)
        wire.say(b"begin", err=True)
    generation.look()
    find_installed(False)
    if "asyncio" in sys.modules:
        the_loop()  # asyncio.run() leaves none
    error: BaseException | None
    lent = Lent()
    try:
        source, variables, own = asked(cell)
        base.take(own)
        lent.take(variables)
        error = run(source, f"<cell {count}>")
    except BaseException as problem:
        error = problem
    settle()
    lent.give_back()
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


def asked(cell: dict[str, Any]) -> tuple[str, dict[str, str], dict[str, str]]:
    """The source, the variables that the environment has for this cell alone, and the sandbox's own."""
    if "file" in cell:
        with open(cell["file"], "rb") as file:
            text = file.read().decode("utf-8-sig")
        try:
            os.unlink(cell["file"])  # so does the host, if nothing comes in between
        except OSError:
            pass
        cell = json.loads(text) if cell.get("whole") else {**cell, "code": text}
    return str(cell["code"]).lstrip("\ufeff"), dict(cell.get("env") or {}), dict(cell.get("base") or {})


class Base:
    """The sandbox's own variables. A kernel that was saved with a template learns those of the sandbox that it is in;
    what code has changed stays as it is."""

    def __init__(self) -> None:
        self.told = dict(os.environ)

    def take(self, variables: dict[str, str]) -> None:
        for name, value in variables.items():
            if self.told.get(name) != value and os.environ.get(name) == self.told.get(name):
                os.environ[name] = value
            self.told[name] = value


class Lent:
    """Variables of the environment that are there for one cell; what was there before comes back."""

    def __init__(self) -> None:
        self.before: dict[str, str | None] = {}

    def take(self, variables: dict[str, str]) -> None:
        for name, value in variables.items():
            self.before[name] = os.environ.get(name)
            os.environ[name] = value

    def give_back(self) -> None:
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def leave(error: BaseException | None) -> None:
    """A fork that ran to the end of the cell: it ends, as a script would."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    elif error is not None:
        sys.stderr.write(explained(error)[2])
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


base = Base()
generation = Generation()


def begin() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [""]
    sys.modules["__main__"] = main
    words = Words(main.__dict__, run_words, flush, display)
    main.__dict__.update(__builtins__=builtins, display=display, get_ipython=lambda: words)
    builtins.input = refuse_input
    builtins.__sloplet__ = words  # type: ignore[attr-defined]
    os.environ.setdefault("MPLBACKEND", "agg")
    os.register_at_fork(after_in_child=wire.forked)
    sys.meta_path.insert(0, Patches())
    sys.meta_path.append(NoIPython(notebook(display)))
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
