"""Words of the fake's shell: variables, command substitution, arithmetic, splitting, patterns."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable
from typing import Any

from .kernel import Kernel, Proc
from .syntax import Part, Word


class Words:
    """A shell's variables, and how its words become arguments."""

    def __init__(self, proc: Proc, env: dict[str, str], args: list[str]) -> None:
        self.proc = proc
        self.kernel: Kernel = proc.kernel
        self.exported = dict(env)
        self.vars: dict[str, str] = dict(env)
        self.args = args
        self.last = 0
        self.last_background = 0

    async def substitute(self, script: str) -> str:
        raise NotImplementedError

    def assign(self, name: str, value: str) -> None:
        self.vars[name] = value
        if name in self.exported:
            self.exported[name] = value

    async def expand_all(self, words: list[Word]) -> list[str]:
        found: list[str] = []
        for word in words:
            found += await self.expand(word)
        return found

    async def expand(self, word: Word, *, split: bool = True) -> list[str]:
        fields: list[str] = []
        pattern = current = ""
        started = magic = False
        if word and word[0].kind == "lit" and not word[0].quoted and re.match(r"~(/|\Z)", word[0].text):
            word = [Part("lit", self.vars.get("HOME", "/"), True), Part("lit", word[0].text[1:]), *word[1:]]

        def finish() -> None:
            nonlocal pattern, current, started, magic
            if started:
                fields.extend(self.glob(pattern, current) if magic and split else [current])
            pattern = current = ""
            started = magic = False

        for part in word:
            if part.kind == "var" and part.text == "@" and part.quoted and split:
                for index, arg in enumerate(self.args[1:]):
                    if index:
                        finish()
                    current, pattern, started = current + arg, pattern + glob_escape(arg), True
                continue
            value = part.text if part.kind == "lit" else await self.value(part)
            if part.quoted or part.kind == "lit" or not split:
                started = started or part.quoted or bool(value) or not split
                current += value
                quoted = part.quoted or part.kind != "lit"
                pattern += glob_escape(value) if quoted else value
                magic = magic or (not quoted and any(c in value for c in "*?["))
                continue
            pieces = value.split()
            if value[:1].isspace() and started:
                finish()
            for index, piece in enumerate(pieces):
                if index:
                    finish()
                current, pattern, started = current + piece, pattern + piece, True
                magic = magic or any(c in piece for c in "*?[")
            if pieces and value[-1:].isspace():
                finish()
        finish()
        return fields

    def glob(self, pattern: str, literal: str) -> list[str]:
        folder, _, last = pattern.rpartition("/")
        try:
            start = folder or ("/" if pattern.startswith("/") else ".")
            node = self.kernel.vfs.find(start, self.proc.cwd, self.proc.cred)
        except OSError:
            return [literal]
        prefix = folder + "/" if "/" in pattern else ""
        names = sorted(n for n in node.entries if fnmatch.fnmatchcase(n, last) and (last[0] == "." or n[0] != "."))
        return [prefix + name for name in names] or [literal]

    async def value(self, part: Part) -> str:
        if part.kind == "cmd":
            return await self.substitute(part.text)
        if part.kind == "math":
            return str(arithmetic(part.text, self.vars))
        special = {
            "?": str(self.last), "$": str(self.proc.pid), "#": str(len(self.args) - 1),
            "!": str(self.last_background or ""), "@": " ".join(self.args[1:]), "*": " ".join(self.args[1:]),
        }  # fmt: skip
        if part.text in special:
            value: str | None = special[part.text]
        elif part.text.isdigit():
            value = self.args[int(part.text)] if int(part.text) < len(self.args) else None
        else:
            value = self.vars.get(part.text)
        if part.operator == "#":
            return str(len(value or ""))
        if part.operator:
            empty = value is None or (part.operator.startswith(":") and not value)
            other = "".join(await self.expand(part.other or [], split=False)) if empty or "+" in part.operator else ""
            if "+" in part.operator:
                return "" if empty else other
            if empty and "=" in part.operator:
                self.assign(part.text, other)
            return other if empty else value or ""
        return value or ""


def glob_escape(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)


_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Lt: operator.lt, ast.Gt: operator.gt, ast.LtE: operator.le, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip


def arithmetic(text: str, variables: dict[str, str]) -> int:
    """The value of ``$((...))``: whole numbers, names, + - * / % comparisons, bits and parentheses."""
    source = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text.strip()).replace("/", "//") or "0"

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return int(node.value)
        if isinstance(node, ast.Name):
            inner = variables.get(node.id, "").strip()
            return int(inner) if re.fullmatch(r"-?\d+", inner) else 0
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            return -value(node.operand) if isinstance(node.op, ast.USub) else value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return int(_OPERATORS[type(node.ops[0])](value(node.left), value(node.comparators[0])))
        raise ValueError(text)

    try:
        return value(ast.parse(source, mode="eval").body)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return 0
