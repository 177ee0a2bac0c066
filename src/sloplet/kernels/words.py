"""IPython's words in cells: ``!command``, ``%magic``, ``%%magic``, and what ``IPython.display`` is where there is none.

Runs INSIDE a sandbox as the first part of kernel.py, in the same namespace. Models write these words as if every
Python cell were IPython's; those that they write often are understood, the others are refused before anything runs.
"""

from __future__ import annotations

import base64
import builtins
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

#: Settings of a notebook, which cells have no use for.
IGNORED = ("matplotlib", "config", "load_ext", "reload_ext", "autoreload", "precision", "colors")
#: Commands that IPython lets one write as magics.
COMMANDS = ("ls", "cat", "cp", "mv", "rm", "mkdir", "rmdir", "ll", "conda", "mamba", "uv")
LINE = ("pip", "cd", "pwd", "env", "set_env", "time", "timeit", "run", "sx", "system", *COMMANDS, *IGNORED)
SHOWN = {"html": "text/html", "markdown": "text/markdown", "latex": "text/latex", "svg": "image/svg+xml",
         "javascript": "application/javascript", "js": "application/javascript"}  # fmt: skip
CELL = ("bash", "sh", "time", "timeit", "capture", "writefile", "file", *SHOWN)

_WORD = re.compile(
    r"([ \t]*)((?:[\w.,\[\]'\"* \t()]+=[ \t]*)?)(?:([!%])(.*)|(pip3?[ \t]+(?:install|uninstall|list|show|freeze)\b.*))"
)
_MAGIC = re.compile(r"(\w+)[ \t]*(.*)", re.S)


def unknown(sign: str, word: str, known: Any, name: str, line: int, text: str) -> SyntaxError:
    told = f"{sign}{word} is none of the magics that cells know: {', '.join(sign + one for one in sorted(known))}"
    return SyntaxError(told, (name, line, 1, text))


def translated(source: str, name: str, problem: SyntaxError) -> str | None:
    """The source with the line that is no Python put into Python; None if it is no word of IPython's either."""
    stripped = source.lstrip()
    if stripped.startswith("%%"):
        first, _, body = stripped.partition("\n")
        before = source[: len(source) - len(stripped)].count("\n")
        found = _MAGIC.match(first[2:].strip())
        word = found.group(1) if found else ""
        if word not in CELL:
            raise unknown("%%", word, CELL, name, before + 1, first)
        rest = found.group(2) if found else ""
        return "\n" * before + f"__sloplet__.cell({word!r}, {rest!r}, {body!r}, {before + 1})"
    if isinstance(problem, IndentationError) and dedented(source) != source:
        return dedented(source)
    lines = source.split("\n")
    at = (problem.lineno or 0) - 1
    found = _WORD.fullmatch(lines[at].rstrip("\r")) if 0 <= at < len(lines) else None
    if found is None:
        return None
    indent, target, sign, rest, pip = found.groups()
    last = at
    text = rest if pip is None else pip
    while text.endswith("\\") and last + 1 < len(lines):  # it goes on in the next line
        last += 1
        text = text[:-1] + lines[last].strip()
    if sign == "!":
        call = f"__sloplet__.{'getoutput' if target else 'system'}({text!r})"
    else:
        given = _MAGIC.match(text.strip())
        word, tail = given.groups() if given else ("", "")
        word = "pip" if pip else word
        if word not in LINE:
            raise unknown("%", word, LINE, name, at + 1, lines[at])
        call = f"__sloplet__.run_line_magic({word!r}, {tail!r})"
    lines[at : last + 1] = [indent + target + call, *[""] * (last - at)]
    return "\n".join(lines)


def dedented(source: str) -> str:
    """Without the indentation of its first line, as text within a program has it; what has less keeps its own."""
    found = re.match(r"(?:[ \t]*\r?\n)*([ \t]+)(?=\S)", source)
    return source if found is None else re.sub("(?m)^" + found.group(1), "", source)


def find_installed(changed: bool = True) -> None:
    """What was installed since Python started: the first ``pip install`` of a user makes the folder for all of his.
    ``changed``: folders that are known may have changed just now."""
    import site

    folder = site.getusersitepackages() if site.ENABLE_USER_SITE else None
    if folder is not None and folder not in sys.path and os.path.isdir(folder):
        site.addsitedir(folder)
    if changed:
        import importlib

        importlib.invalidate_caches()


class Words:
    """What the words do; also what ``get_ipython()`` gives."""

    def __init__(
        self, names: dict[str, Any], run: Callable[[str, str], Any], flush: Callable[[], None], show: Any
    ) -> None:
        self.user_ns = names
        self._run = run  # source, what it is called in tracebacks -> the value of its last expression
        self._flush = flush
        self._show = show
        self._cells = 0

    def _expanded(self, text: str, depth: int = 2) -> str:
        """``{expression}`` and ``$name`` of the code that says it; what is none stays as it is, for the shell."""
        frame = sys._getframe(depth)

        def value(match: Any) -> str:
            said = match.group(1) or match.group(2)
            try:
                if said not in dir(builtins):  # awk '{print}'
                    return str(eval(said, frame.f_globals, frame.f_locals))  # noqa: S307
            except Exception:
                pass
            return str(match.group(0))

        return re.sub(r"(?<!\$)\{([^{}\n]+)\}|(?<![\\$])\$([A-Za-z_]\w*)", value, text)

    def _call(self, command: Any, **more: Any) -> int:
        self._flush()
        status = subprocess.call(command, **more)
        self.user_ns["_exit_code"] = status
        find_installed()
        return status

    def system(self, text: str) -> None:
        self._call(self._expanded(text), shell=True)  # noqa: S604

    def getoutput(self, text: str) -> list[str]:
        return self._output(self._expanded(text))

    def _output(self, command: str) -> list[str]:
        self._flush()
        done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, check=False)  # noqa: S602
        self.user_ns["_exit_code"] = done.returncode
        return done.stdout.decode("utf-8", "replace").splitlines()

    def run_line_magic(self, word: str, text: str = "", *_: Any) -> Any:
        import shlex

        if word in ("time", "timeit"):
            return getattr(self, "_" + word)("", text)
        text = self._expanded(text)
        if word in ("sx", "system"):
            return self._output(text)
        if word in COMMANDS:
            self._call("ls -l " + text if word == "ll" else word + " " + text, shell=True)  # noqa: S604
        elif word == "pip":
            self._call(f"{shlex.quote(sys.executable)} -m pip {text}", shell=True)  # noqa: S604
        elif word == "cd":
            os.chdir(os.path.expanduser(text.strip().strip("\"'") or "~"))
        elif word == "pwd":
            return os.getcwd()
        elif word in ("env", "set_env"):
            return self._env(text)
        elif word == "run":
            import runpy

            path, *sys.argv[1:] = shlex.split(text)
            made = runpy.run_path(path, run_name="__main__")
            self.user_ns.update({key: made[key] for key in made if not key.startswith("__")})
        elif word not in IGNORED:
            raise ValueError(f"%{word} is none of the magics that cells know: {', '.join(LINE)}")
        return None

    magic = run_line_magic

    def cell(self, word: str, text: str, body: str, line: int = 1) -> Any:
        if word in SHOWN:
            self._show({SHOWN[word]: body, "text/plain": body[:1000]}, raw=True)
        elif word in ("bash", "sh"):
            shell = [word] if word == "sh" or any(map(os.path.exists, ("/bin/bash", "/usr/bin/bash"))) else ["sh"]
            short = len(body) < 100_000
            self._flush()
            given = None if short else body.encode()
            done = subprocess.run([*shell, "-c", body] if short else shell, input=given, check=False)
            find_installed()
            if done.returncode:
                raise subprocess.CalledProcessError(done.returncode, word)
        elif word in ("writefile", "file"):
            if not text.strip():
                raise ValueError(f"%%{word} needs the name of the file")
            name = text.split()[-1].strip("\"'")
            with open(os.path.expanduser(name), "a" if "-a" in text.split()[:-1] else "w", encoding="utf-8") as file:
                file.write(body)
            print(f"Writing {name}")
        elif word in ("time", "timeit"):
            return getattr(self, "_" + word)("\n" * line, body if word == "time" or not text else text + "\n" + body)
        elif word == "capture":
            return self._capture(text, "\n" * line + body)
        else:
            raise ValueError(f"%%{word} is none of the magics that cells know: {', '.join(CELL)}")
        return None

    run_cell_magic = cell

    def _env(self, text: str) -> Any:
        name, given, value = text.strip().partition("=" if "=" in text else " ")
        if given:
            os.environ[name.strip()] = value.strip()
            print(f"env: {name.strip()}={value.strip()}")
            return None
        return os.environ.get(name) if name else dict(os.environ)

    def _time(self, before: str, source: str) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            return self._run(before + source, self._named())
        finally:
            self._flush()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            print(f"CPU times: total: {cpu:.3g} s\nWall time: {wall:.3g} s")

    def _timeit(self, before: str, source: str) -> None:
        import timeit

        number, repeat = 0, 3
        while True:
            option = re.match(r"\s*-([nr])\s*(\d+)\s+|\s*-[oqpc]\s+", source)
            if option is None:
                break
            number, repeat = (
                int(option.group(2)) if option.group(1) == "n" else number,
                int(option.group(2)) if option.group(1) == "r" else repeat,
            )
            source = source[option.end() :]
        timer = timeit.Timer(source, globals=self.user_ns)
        number = number or timer.autorange()[0]
        each = min(timer.repeat(max(repeat, 1), number)) / number
        for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)):
            if each * scale >= 1 or unit == "ns":
                print(f"{each * scale:.3g} {unit} per loop (best of {repeat} runs, {number} loops each)")
                return

    def _capture(self, text: str, source: str) -> None:
        import contextlib
        import io

        name = next((word for word in text.split() if not word.startswith("-")), None)
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                self._run(source, self._named())
        finally:
            if name is not None:
                self.user_ns[name] = types.SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())

    def _named(self) -> str:
        """A name for tracebacks: the cell's own, so that lines are found by their numbers."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith("<cell"):
                return str(frame.f_code.co_filename)
            frame = frame.f_back
        return "<cell>"


class Shown:
    """HTML, Markdown and so on of ``IPython.display``: text with a type."""

    mime = "text/plain"

    def __init__(self, data: Any = None, url: Any = None, filename: Any = None, **_: Any) -> None:
        if filename is None and isinstance(data, str) and "\n" not in data and self.mime.startswith("image/"):
            filename = data if os.path.exists(data) else None
        if filename is not None:
            with open(filename, "rb") as file:
                data = file.read()
        if url is not None and data is None:
            raise ValueError("url= is not supported without IPython: pip install ipython, or fetch it yourself")
        self.data = data

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {self.mime: self.data, "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"<IPython.core.display.{type(self).__name__} object>"


class Picture(Shown):
    mime = "image/png"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        data = self.data if isinstance(self.data, bytes) else base64.b64decode(self.data or "")
        kind = "jpeg" if data[:2] == b"\xff\xd8" else "gif" if data[:3] == b"GIF" else "png"
        return {"image/" + kind: data, "text/plain": repr(self)}


def notebook(show: Any) -> dict[str, types.ModuleType]:
    """``IPython.display`` for images without IPython."""
    package, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    kinds = {"HTML": "text/html", "Markdown": "text/markdown", "Latex": "text/latex", "SVG": "image/svg+xml",
             "JSON": "application/json", "Javascript": "application/javascript", "Pretty": "text/plain"}  # fmt: skip
    for name, mime in kinds.items():
        setattr(display, name, type(name, (Shown,), {"mime": mime}))
    made: dict[str, Any] = {"Image": type("Image", (Picture,), {}), "Math": display.Latex}
    made.update(display=show, clear_output=lambda wait=False: None)
    display.__dict__.update(made)
    package.__dict__.update(display=display, get_ipython=lambda: None, __path__=[], __version__="0")
    return {"IPython": package, "IPython.display": display}


class NoIPython:
    """The last of the finders: where nobody else knows IPython."""

    def __init__(self, modules: dict[str, types.ModuleType]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        import importlib.machinery

        return importlib.machinery.ModuleSpec(name, self) if name in self.modules else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        return self.modules[spec.name]

    def exec_module(self, module: Any) -> None:
        """It is complete."""
