"""The grammar of the fake's shell: text to a tree. Pure. What it does not know is a SyntaxError, never a guess.

Known: ``; & && || | ! ( ) { }``, if/elif/else, while, until, for, functions, redirections ``> >> < 2> >& <&``,
'single' and "double" quotes, backslash, ``$name ${name} ${name:-x} $? $$ $! $# $@ $1 $(...) `...` $((...))``, comments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_OPERATORS = ("&&", "||", ">>", "<&", ">&", ";", "&", "|", "<", ">", "(", ")", "\n")
_RESERVED = {"if", "then", "elif", "else", "fi", "while", "until", "do", "done", "for", "in", "{", "}", "!"}


@dataclass
class Part:
    """A piece of a word: ``lit`` text, ``var`` name (with an ``other`` word), ``cmd`` script, ``math`` expression."""

    kind: str
    text: str
    quoted: bool = False
    operator: str = ""
    other: Word | None = None


Word = list[Part]


@dataclass
class Redirect:
    fd: int
    how: str  # r, w, a, dup
    word: Word


@dataclass
class Simple:
    assigns: list[tuple[str, Word]] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class Pipeline:
    commands: list[Command]
    negate: bool = False


@dataclass
class AndOr:
    first: Pipeline
    rest: list[tuple[str, Pipeline]] = field(default_factory=list)


@dataclass
class Block:
    items: list[tuple[AndOr, bool]] = field(default_factory=list)  # (what, in the background)


@dataclass
class Compound:
    """``group``, ``subshell``, ``if``, ``while``, ``until``, ``for``, ``function``."""

    kind: str
    blocks: list[Block] = field(default_factory=list)
    name: str = ""
    words: list[Word] | None = None
    body: Command | None = None
    redirects: list[Redirect] = field(default_factory=list)


Command = Simple | Compound


@dataclass
class _Token:
    kind: str  # op, word, end
    text: str = ""
    word: Word = field(default_factory=list)
    fd: int | None = None


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def token(self) -> _Token:
        text = self.text
        while self.at < len(text):
            if text[self.at] in " \t":
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at += 2
            elif text[self.at] == "#":
                while self.at < len(text) and text[self.at] != "\n":
                    self.at += 1
            else:
                break
        if self.at >= len(text):
            return _Token("end")
        digits = re.compile(r"(\d)(?=[<>])").match(text, self.at)
        fd = None
        if digits:
            fd = int(digits[1])
            self.at += 1
        for operator in _OPERATORS:
            if text.startswith(operator, self.at):
                if text.startswith("<<", self.at):
                    raise SyntaxError("here-documents are not known to the fake shell")
                self.at += len(operator)
                return _Token("op", operator, fd=fd)
        start = self.at
        word = self.word()
        return _Token("word", text[start : self.at], word)

    def word(self) -> Word:
        parts: Word = []
        text = self.text

        def lit(piece: str, quoted: bool) -> None:
            if parts and parts[-1].kind == "lit" and parts[-1].quoted == quoted:
                parts[-1].text += piece
            else:
                parts.append(Part("lit", piece, quoted))

        while self.at < len(text):
            c = text[self.at]
            if c in " \t\n;&|<>()":
                break
            if c == "'":
                end = text.find("'", self.at + 1)
                if end < 0:
                    raise SyntaxError("Unterminated quoted string")
                lit(text[self.at + 1 : end], True)
                self.at = end + 1
            elif c == '"':
                self.at += 1
                lit("", True)
                while True:
                    if self.at >= len(text):
                        raise SyntaxError("Unterminated quoted string")
                    c = text[self.at]
                    if c == '"':
                        self.at += 1
                        break
                    if c == "\\" and self.at + 1 < len(text) and text[self.at + 1] in '$`"\\\n':
                        if text[self.at + 1] != "\n":
                            lit(text[self.at + 1], True)
                        self.at += 2
                    elif c in "$`":
                        self.expansion(parts, lit, True)
                    else:
                        lit(c, True)
                        self.at += 1
            elif c == "\\":
                if self.at + 1 < len(text) and text[self.at + 1] != "\n":
                    lit(text[self.at + 1], True)
                self.at += 2
            elif c in "$`":
                self.expansion(parts, lit, False)
            else:
                lit(c, False)
                self.at += 1
        return parts

    def expansion(self, parts: Word, lit: object, quoted: bool) -> None:
        text = self.text
        if text[self.at] == "`":
            end = text.find("`", self.at + 1)
            if end < 0:
                raise SyntaxError("Unterminated `")
            parts.append(Part("cmd", text[self.at + 1 : end], quoted))
            self.at = end + 1
        elif text.startswith("$((", self.at):
            end = text.find("))", self.at)
            if end < 0:
                raise SyntaxError("Unterminated $((")
            parts.append(Part("math", text[self.at + 3 : end], quoted))
            self.at = end + 2
        elif text.startswith("$(", self.at):
            end = self.matching(self.at + 1)
            parts.append(Part("cmd", text[self.at + 2 : end], quoted))
            self.at = end + 1
        elif text.startswith("${", self.at):
            end = text.find("}", self.at)
            if end < 0:
                raise SyntaxError("Bad substitution")
            inner = text[self.at + 2 : end]
            match = re.match(r"(#?)([A-Za-z_][A-Za-z0-9_]*|[0-9?#@*$!])(?:(:?[-+=])(.*))?\Z", inner, re.DOTALL)
            if not match:
                raise SyntaxError("Bad substitution")
            other = _Lexer(match[4]).all_word() if match[4] is not None else None
            operator = "#" if match[1] else (match[3] or "")
            parts.append(Part("var", match[2], quoted, operator, other))
            self.at = end + 1
        else:
            match = _NAME.match(text, self.at + 1)
            if match:
                parts.append(Part("var", match[0], quoted))
                self.at = match.end()
            elif self.at + 1 < len(text) and text[self.at + 1] in "?$!#@*0123456789":
                parts.append(Part("var", text[self.at + 1], quoted))
                self.at += 2
            else:
                parts.append(Part("lit", "$", quoted))
                self.at += 1

    def all_word(self) -> Word:
        """Everything that is left as one word, blanks too."""
        parts: Word = []
        while self.at < len(self.text):
            parts += self.word()
            if self.at < len(self.text):
                parts.append(Part("lit", self.text[self.at], True))
                self.at += 1
        return parts

    def matching(self, at: int) -> int:
        depth, quote = 0, ""
        while at < len(self.text):
            c = self.text[at]
            if quote:
                if c == "\\" and quote == '"':
                    at += 1
                elif c == quote:
                    quote = ""
            elif c in "'\"":
                quote = c
            elif c == "\\":
                at += 1
            elif c == "(":
                depth += 1
            elif c == ")":
                depth -= 1
                if depth == 0:
                    return at
            at += 1
        raise SyntaxError("Unterminated $(")


class _Parser:
    def __init__(self, text: str) -> None:
        self.lexer = _Lexer(text)
        self.token = self.lexer.token()

    def next(self) -> _Token:
        token, self.token = self.token, self.lexer.token()
        return token

    def is_op(self, *texts: str) -> bool:
        return self.token.kind == "op" and self.token.text in texts

    def is_word(self, *texts: str) -> bool:
        return self.token.kind == "word" and self.token.text in texts

    def expect(self, text: str) -> None:
        if self.token.kind == "end" or self.token.text != text:
            raise SyntaxError(f'"{self.shown()}" unexpected (expecting "{text}")')
        self.next()

    def shown(self) -> str:
        return "end of file" if self.token.kind == "end" else self.token.text.replace("\n", "newline")

    def newlines(self) -> None:
        while self.is_op("\n"):
            self.next()

    def block(self, *ends: str) -> Block:
        block = Block()
        self.newlines()
        while self.token.kind != "end" and not self.is_word(*ends) and not (")" in ends and self.is_op(")")):
            item = self.and_or()
            background = self.is_op("&")
            block.items.append((item, background))
            if self.is_op(";", "&", "\n"):
                self.next()
                self.newlines()
            elif self.token.kind != "end" and not self.is_word(*ends) and not self.is_op(")"):
                raise SyntaxError(f'"{self.shown()}" unexpected')
            elif self.is_op(")") and ")" not in ends:
                raise SyntaxError('")" unexpected')
        if ends and not block.items:
            raise SyntaxError(f'"{self.shown()}" unexpected')
        return block

    def and_or(self) -> AndOr:
        item = AndOr(self.pipeline())
        while self.is_op("&&", "||"):
            operator = self.next().text
            self.newlines()
            item.rest.append((operator, self.pipeline()))
        return item

    def pipeline(self) -> Pipeline:
        negate = False
        while self.is_word("!"):
            negate = not negate
            self.next()
        commands = [self.command()]
        while self.is_op("|"):
            self.next()
            self.newlines()
            commands.append(self.command())
        return Pipeline(commands, negate)

    def command(self) -> Command:
        compound = self.compound()
        if compound is not None:
            while self.is_op("<", ">", ">>", ">&", "<&"):
                compound.redirects.append(self.redirect())
            return compound
        simple = Simple()
        while True:
            if self.is_op("<", ">", ">>", ">&", "<&"):
                simple.redirects.append(self.redirect())
            elif self.token.kind == "word":
                token = self.next()
                match = _ASSIGN.match(token.text) if not simple.words else None
                if match and token.word and token.word[0].kind == "lit" and not token.word[0].quoted:
                    name = match[0][:-1]
                    first = Part("lit", token.word[0].text[len(match[0]) :])
                    simple.assigns.append((name, [first, *token.word[1:]]))
                    continue
                simple.words.append(token.word)
                named = token.text == ":" or _NAME.fullmatch(token.text)
                if len(simple.words) == 1 and named and self.is_op("("):
                    self.next()
                    self.expect(")")
                    self.newlines()
                    return Compound("function", name=token.text, body=self.command())
            else:
                break
        if not (simple.words or simple.assigns or simple.redirects):
            raise SyntaxError(f'"{self.shown()}" unexpected')
        return simple

    def redirect(self) -> Redirect:
        token = self.next()
        if self.token.kind != "word":
            raise SyntaxError(f'"{self.shown()}" unexpected')
        how = {"<": "r", ">": "w", ">>": "a", ">&": "dup", "<&": "dup"}[token.text]
        fd = token.fd if token.fd is not None else (0 if token.text.startswith("<") else 1)
        return Redirect(fd, how, self.next().word)

    def compound(self) -> Compound | None:
        if self.is_op("("):
            self.next()
            inner = self.block(")")
            self.expect(")")
            return Compound("subshell", [inner])
        if not self.is_word(*_RESERVED):
            return None
        word = self.token.text
        if word == "{":
            self.next()
            inner = self.block("}")
            self.expect("}")
            return Compound("group", [inner])
        if word == "if":
            self.next()
            blocks = [self.block("then")]
            self.expect("then")
            blocks.append(self.block("elif", "else", "fi"))
            while self.is_word("elif"):
                self.next()
                blocks.append(self.block("then"))
                self.expect("then")
                blocks.append(self.block("elif", "else", "fi"))
            if self.is_word("else"):
                self.next()
                blocks.append(self.block("fi"))
            self.expect("fi")
            return Compound("if", blocks)
        if word in ("while", "until"):
            self.next()
            condition = self.block("do")
            return Compound(word, [condition, self.loop_body()])
        if word == "for":
            self.next()
            name = self.next().text
            words: list[Word] | None = None
            self.newlines()
            if self.is_word("in"):
                self.next()
                words = []
                while self.token.kind == "word":
                    words.append(self.next().word)
            while self.is_op(";", "\n"):
                self.next()
            return Compound("for", [self.loop_body()], name=name, words=words)
        raise SyntaxError(f'"{word}" unexpected')

    def loop_body(self) -> Block:
        self.expect("do")
        body = self.block("done")
        self.expect("done")
        return body


def parse(text: str) -> Block:
    parser = _Parser(text)
    block = parser.block()
    if parser.token.kind != "end":
        raise SyntaxError(f'"{parser.shown()}" unexpected')
    return block
