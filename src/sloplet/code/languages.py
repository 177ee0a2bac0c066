"""Which program runs a language, how it is started, and what a cell looks like to it. Pure.

A kernel is started by a few words that read the rest of it from stdin, so nothing of it need be in the image and no
folder need be writable. Its requests are lines of at most 4,096 bytes: one write, whole, whoever else writes too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import SpecError
from ..spec import check_env

MAX_REQUEST = 4096  # PIPE_BUF: requests of several clients never mix
PROTOCOL = 2
#: Kernels of before, which a saved state may hold: they take code and nothing else.
PLAIN = 1

ALIASES = {
    "javascript": "node", "js": "node", "ts": "typescript", "bash": "shell", "sh": "shell", "python3": "python",
    "py": "python",
}  # fmt: skip
LANGUAGES = ("python", "node", "typescript", "shell", "r", "java", "deno")
#: Their kernels have no JSON, so their requests are words: x and hexadecimal digits.
_WORDS = ("r", "java")
#: They read a request when the one before has ended: one that waits cannot be taken back.
ONE_BY_ONE = ("shell", "r")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_PYTHON = """\
# Sloplet's Python kernel: the rest of it comes on stdin
import os, sys
size, text = int(sys.argv[1]), b""
while len(text) < size:
    piece = os.read(0, size - len(text))
    if not piece:
        sys.exit("the kernel did not arrive")
    text += piece
names = {"__name__": "sloplet_kernel"}
for part in text.split(b"\\0"):
    exec(compile(part, "<sloplet kernel>", "exec"), names)
"""
_NODE = """\
// Sloplet's Node kernel: the rest of it comes on descriptor 3
{
  const fs = require('fs'), text = Buffer.alloc(Number(process.argv[1]));
  for (let at = 0; at < text.length; ) {
    const n = fs.readSync(3, text, at, text.length - at);
    if (!n) throw new Error('the kernel did not arrive');
    at += n;
  }
  const kernel = require('vm').runInThisContext(text.toString(), {filename: 'sloplet kernel'});
  kernel(require, process.argv[2], (name) => import(name), process.argv[3]);
}
"""
#: Children must not read the kernel's requests, and Node cannot move descriptors.
_START_NODE = 'exec node --no-warnings -e "$0" -- "$@" 3<&0 </dev/null'
_DENO = """\
// Sloplet's Deno kernel: the rest of it comes on descriptor 3
import { createRequire } from 'node:module';
const require = createRequire(Deno.cwd() + '/'), fs = require('fs');
const requests = fs.openSync('/proc/self/fd/3', 'r'), text = Buffer.alloc(Number(Deno.args[0]));
for (let at = 0; at < text.length; ) {
  const n = fs.readSync(requests, text, at, text.length - at);
  if (!n) throw new Error('the kernel did not arrive');
  at += n;
}
const kernel = require('vm').runInThisContext(text.toString(), {filename: 'sloplet kernel'});
kernel(require, Deno.args[1], (name) => import(name), 'deno', requests);
"""
_START_DENO = 'export NO_COLOR=1 DENO_NO_UPDATE_CHECK=1; exec deno eval --quiet "$0" -- "$@" 3<&0 </dev/null'
#: R reads files by large pieces, pipes of its own by bytes; an interrupt is not for what feeds it.
_R = """\
# Sloplet's R kernel: the rest of it comes on descriptor 3
local({
  given <- commandArgs(TRUE)
  requests <- pipe("trap '' INT; exec cat <&3", "rb")
  text <- rawToChar(readBin(requests, "raw", as.integer(given[1])))
  Encoding(text) <- "UTF-8"
  names <- list2env(list(key = given[2], requests = requests), parent = globalenv())
  eval(parse(text = text, keep.source = FALSE), names)
})
"""
_START_R = ': "${LANG:=C.UTF-8}"; export LANG; exec Rscript --vanilla -e "$0" "$@" 3<&0 </dev/null'
#: Java compiles its kernel from a file, which is gone at once.
_START_JAVA = """\
# Sloplet's Java kernel
file=$(mktemp) && dd bs=1 "count=$0" of="$file" 2>/dev/null && exec 3<"$file" && rm -f "$file" || exit 1
exec java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 --source 11 /dev/fd/3 "$1"
"""
#: Interactive shells return to the top on SIGINT and on errors; the others end.
_START_SHELL = (
    "# Sloplet's shell kernel\n"
    "if command -v bash >/dev/null 2>&1; then exec bash --norc --noprofile --noediting -i; fi; exec sh -i"
)


@dataclass(frozen=True)
class Launch:
    """How a kernel is started: its argument vector, variables, and what it reads first."""

    argv: tuple[str, ...]
    input: bytes
    env: Mapping[str, str] = field(default_factory=dict)


@cache
def _source(name: str) -> bytes:
    return (files("sloplet.kernels") / name).read_bytes()


def language_of(text: object) -> str:
    """The language's own name. SpecError."""
    if isinstance(text, str):
        name = ALIASES.get(text.lower(), text.lower())
        if name in LANGUAGES:
            return name
    raise SpecError(f"language={str(text)[:40]!r} is not one that cells run in", hint=f"{', '.join(LANGUAGES)}")


def launch(language: str, key: str, python: str | None = None) -> Launch:
    """The kernel of a language. ``python``: another interpreter than the python3 of the sandbox's PATH."""
    if language == "python":
        source = b"\0".join(map(_source, ("words.py", "charts.py", "kernel.py")))
        return Launch((python or "python3", "-c", _PYTHON, str(len(source)), key), source)
    if language in ("node", "typescript"):
        source = _source("kernel.js")
        return Launch(("/bin/sh", "-c", _START_NODE, _NODE, str(len(source)), key, language), source)
    if language == "deno":
        source = _source("kernel.js")
        return Launch(("/bin/sh", "-c", _START_DENO, _DENO, str(len(source)), key), source)
    if language == "r":
        source = _source("kernel.r")
        return Launch(("/bin/sh", "-c", _START_R, _R, str(len(source)), key), source)
    if language == "java":
        source = _source("kernel.java")
        return Launch(("/bin/sh", "-c", _START_JAVA, str(len(source)), key), source)
    source = _source("kernel.sh").replace(b"@KEY@", key.encode())
    return Launch(("/bin/sh", "-c", _START_SHELL), source, {"PS1": "", "PS2": "", "ENV": "", "HISTFILE": ""})


def check_code(language: str, code: object) -> bytes:
    """A cell's text as bytes. SpecError for what no kernel could take."""
    if not isinstance(code, str):
        raise SpecError(f"code is text, not {type(code).__name__}")
    try:
        raw = code.encode()
    except UnicodeEncodeError:
        raise SpecError("the code holds a lone surrogate: it is not valid Unicode text") from None
    if language == "shell" and b"\0" in raw:
        raise SpecError("shell code cannot hold a NUL character")
    return raw


def check_variables(language: str, env: Mapping[str, str]) -> dict[str, str]:
    """Variables of the environment for one cell. SpecError for what cannot be set."""
    checked = dict(check_env(env))
    for name, value in checked.items():
        if language == "shell" and not _VARIABLE.fullmatch(name):
            raise SpecError(f"{name[:80]!r} is no name that a shell could set", hint="letters, digits and '_'")
        try:
            (name + value).encode()
        except UnicodeEncodeError:
            raise SpecError(f"the environment variable {name[:80]!r} is not valid Unicode text") from None
    return checked


def request(
    language: str,
    key: str,
    cell: str,
    code: bytes,
    env: Mapping[str, str] | None = None,
    more: Mapping[str, object] | None = None,
) -> bytes | None:
    """What a kernel is sent for a cell; None if it is too long for one write: then its code goes by a file. ``more``:
    what else Python's is told (docs/code.md)."""
    if len(code) > MAX_REQUEST:
        return None
    if language == "shell":
        made = _shell(cell, b"eval " + _quoted(by_file(language, code, env)))
    elif language in _WORDS:
        made = f"{key} {cell} code ".encode() + by_file(language, code, env)
    else:
        given = {"env": dict(env)} if env else {}
        made = _line({"key": key, "id": cell, "code": code.decode(), **given, **(more or {})})
    return made if len(made) <= MAX_REQUEST else None


def by_file(
    language: str, code: bytes, env: Mapping[str, str] | None = None, more: Mapping[str, object] | None = None
) -> bytes:
    """What the file holds that a cell goes by."""
    if language == "shell":
        lent = b"".join(b" %b %b" % (name.encode(), _quoted(value.encode())) for name, value in (env or {}).items())
        return b"sloplet_lend%b; " % lent + code if lent else code
    if language in _WORDS:
        variables = [part.encode() for pair in (env or {}).items() for part in pair]
        return " ".join(map(_word, (code, *variables))).encode() + b"\n"
    return _line({"code": code.decode(), "env": dict(env or {}), **(more or {})}) if env or more else code


def request_by_file(language: str, key: str, cell: str, path: str, env: Mapping[str, object] | None = None) -> bytes:
    """The same, for a cell that lies in a file of the sandbox."""
    if language == "shell":
        return _shell(cell, b". " + _quoted(path.encode()))
    if language in _WORDS:
        return f"{key} {cell} file {_word(path.encode())}\n".encode()
    return _line({"key": key, "id": cell, "file": path, **({"whole": True} if env else {})})


def cancellation(language: str, key: str, cell: str) -> bytes | None:
    """Takes a cell back that has not begun; None where that cannot be."""
    if language in ONE_BY_ONE:
        return None
    return f"{key} {cell} cancel\n".encode() if language in _WORDS else _line({"key": key, "cancel": cell})


def after_interrupt(language: str) -> bytes:
    """Some shells forget what they had read when they are interrupted: their cell's end is said again."""
    return b"sloplet_end\n" if language == "shell" else b""


def _word(text: bytes) -> str:
    return "x" + text.hex()


def _quoted(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def _shell(cell: str, what: bytes) -> bytes:
    return b"sloplet_begin %b; command %b </dev/null\nsloplet_end\n" % (cell.encode(), what)
