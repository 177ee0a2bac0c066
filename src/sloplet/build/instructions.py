"""The instructions of a Dockerfile as values. Variables are still in them: ``scope`` puts them in. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from .lines import Heredoc, Line, first_word, near
from .words import split

_NAME_RE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_STAGE_RE = re.compile(r"[a-z][a-z0-9._-]*\Z")
_FLAG_RE = re.compile(r"--([A-Za-z][A-Za-z0-9-]*)(?:=(.*))?\Z", re.DOTALL)
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Instruction:
    line: Line


@dataclass(frozen=True)
class From(Instruction):
    image: str
    alias: str | None = None
    platform: str | None = None


@dataclass(frozen=True)
class Mount:
    """``RUN --mount=type=...``."""

    type: str  #: cache, bind, tmpfs, secret
    options: Pairs = ()

    def get(self, *names: str) -> str | None:
        return next((value for key, value in self.options if key in names), None)


@dataclass(frozen=True)
class Run(Instruction):
    """A command: an argument vector, or text for the shell; ``script`` is a heredoc that is all of it."""

    argv: tuple[str, ...] = ()
    text: str = ""
    script: str = ""
    network: str | None = None  #: none, default
    policy: object = None  #: the network it has where the build names none (``Image.apt`` and the like)
    env: Pairs = ()  #: variables for this command only, as they are
    index: str = ""  #: apt, pip, npm: it installs from this machine's index, of which its variables and mounts tell
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True)
class Copy(Instruction):
    """COPY and ADD (``unpack``)."""

    sources: tuple[str, ...]
    target: str
    unpack: bool = False
    origin: str | None = None
    chown: str | None = None
    chmod: str | None = None
    parents: bool = False
    exclude: tuple[str, ...] = ()
    heredocs: tuple[Heredoc, ...] = ()
    folder: str | None = None  #: a folder of this machine, instead of the context (``Image.copy``)


@dataclass(frozen=True)
class Env(Instruction):
    pairs: Pairs


@dataclass(frozen=True)
class Label(Instruction):
    pairs: Pairs


@dataclass(frozen=True)
class Arg(Instruction):
    pairs: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Text(Instruction):
    """WORKDIR, USER, STOPSIGNAL, MAINTAINER: one value."""

    value: str


@dataclass(frozen=True)
class Command(Instruction):
    """ENTRYPOINT, CMD, SHELL: an argument vector, or text for the shell."""

    argv: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Names(Instruction):
    """EXPOSE, VOLUME: a list, as it is written (variables may hold several words), or already split."""

    text: str = ""
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Health(Instruction):
    test: tuple[str, ...]  #: ("NONE",), ("CMD", ...), ("CMD-SHELL", text)
    options: Pairs = ()


@dataclass(frozen=True)
class OnBuild(Instruction):
    text: str  #: the instruction, its heredocs with it


def parse_instruction(line: Line) -> Instruction:
    """RecipeInvalid."""
    make = _PARSERS.get(line.keyword)
    if make is None:
        hint = near(line.keyword, _PARSERS)
        raise line.wrong(f"unknown instruction {line.keyword[:40]}", hint)
    flags, rest = _flags(line)
    if not rest and not line.heredocs and line.keyword not in ("CMD", "ENTRYPOINT"):
        raise line.wrong(f"{line.keyword} needs an argument", f"for example: {_EXAMPLES[line.keyword]}")
    return make(line, flags, rest)


_EXAMPLES = {
    "FROM": "FROM debian:12", "RUN": "RUN make", "COPY": "COPY . /app", "ADD": "ADD app.tar.gz /app",
    "ENV": "ENV NAME=value", "LABEL": "LABEL name=value", "ARG": "ARG VERSION=1", "WORKDIR": "WORKDIR /app",
    "USER": "USER app", "STOPSIGNAL": "STOPSIGNAL SIGTERM", "MAINTAINER": "LABEL org.opencontainers.image.authors=...",
    "SHELL": 'SHELL ["/bin/bash", "-c"]', "EXPOSE": "EXPOSE 8080", "VOLUME": "VOLUME /data",
    "HEALTHCHECK": "HEALTHCHECK CMD curl -f http://localhost/", "ONBUILD": "ONBUILD COPY . /app",
}  # fmt: skip
_FLAGS = {
    "FROM": ("platform",), "RUN": ("mount", "network", "security"),
    "COPY": ("from", "chown", "chmod", "link", "parents", "exclude"),
    "ADD": ("chown", "chmod", "link", "exclude", "checksum", "keep-git-dir", "unpack"),
    "HEALTHCHECK": ("interval", "timeout", "start-period", "start-interval", "retries"),
}  # fmt: skip
_REPEATED = ("mount", "exclude")
_SWITCHES = ("link", "parents", "keep-git-dir", "unpack")

Flags = dict[str, list[str]]


def _flags(line: Line) -> tuple[Flags, str]:
    """The ``--name=value`` in front, and the rest."""
    known, found, rest = _FLAGS.get(line.keyword, ()), Flags(), line.rest
    while rest.startswith("--"):
        word, after = first_word(rest)
        match = _FLAG_RE.match(word)
        if match is None or word == "--":
            break
        name, value = match[1], match[2]
        if name not in known:
            if not known:
                raise line.wrong(f"{line.keyword} takes no flags, and --{name} is one")
            raise line.wrong(f"{line.keyword} has no flag --{name}", near(f"--{name}", [f"--{item}" for item in known]))
        if value is None and name not in _SWITCHES:
            raise line.wrong(f"--{name} needs a value", f"write --{name}=VALUE")
        if name in found and name not in _REPEATED:
            raise line.wrong(f"--{name} is there twice", "leave one of them")
        if name in _SWITCHES and value not in (None, "true", "false"):
            raise line.wrong(f"--{name}={value} is neither true nor false")
        found.setdefault(name, []).append("true" if value is None else value)
        rest = after
    return found, rest


def _one(flags: Flags, name: str) -> str | None:
    return flags[name][0] if name in flags else None


def json_words(line: Line, rest: str) -> tuple[str, ...] | None:
    """The exec form, ``["a", "b"]``; None if it is none (then, as Docker has it, it is text)."""
    if not rest.startswith("["):
        return None
    try:
        value = json.loads(rest)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise line.wrong(f"{line.keyword} with a list takes texts only", 'write for example ["make", "all"]')
    if any("\0" in item for item in value):
        raise line.wrong("a word holds a NUL character")
    return tuple(value)


def _from(line: Line, flags: Flags, rest: str) -> Instruction:
    words = split(rest)
    if len(words) == 3 and words[1].upper() == "AS":
        if not _STAGE_RE.match(words[2].lower()):
            raise line.wrong(f"{words[2][:80]} is no name for a stage", "letters, digits, '-', '_' and '.'")
        return From(line, words[0], words[2].lower(), _one(flags, "platform"))
    if len(words) != 1:
        raise line.wrong("FROM takes one image, and a name for the stage", "write FROM IMAGE AS NAME")
    return From(line, words[0], None, _one(flags, "platform"))


def _run(line: Line, flags: Flags, rest: str) -> Instruction:
    network = _one(flags, "network")
    if network not in (None, "none", "default"):
        raise line.wrong(f"--network={network} is not possible in a sandbox", "none, or default (the build's own)")
    if _one(flags, "security") not in (None, "sandbox"):
        raise line.wrong("--security=insecure is not possible", "leave it: every step runs in a sandbox")
    mounts = tuple(_mount(line, text) for text in flags.get("mount", ()))
    argv = json_words(line, rest)
    if argv is not None:
        if not argv or not argv[0]:
            raise line.wrong("RUN with an empty list runs nothing")
        return Run(line, argv=argv, network=network, mounts=mounts)
    if len(line.heredocs) == 1 and len(split(rest)) == 1:
        return Run(line, script=line.heredocs[0].text, network=network, mounts=mounts)
    text = "\n".join([rest, *(f"{doc.text}{doc.name}" for doc in line.heredocs)])
    return Run(line, text=text, network=network, mounts=mounts)


_MOUNT_OPTIONS = {
    "cache": (
        "id",
        "target",
        "dst",
        "destination",
        "sharing",
        "ro",
        "readonly",
        "from",
        "source",
        "mode",
        "uid",
        "gid",
    ),
    "bind": ("target", "dst", "destination", "source", "src", "from", "rw", "readwrite", "ro", "readonly"),
    "tmpfs": ("target", "dst", "destination", "size"),
    "secret": ("id", "target", "dst", "destination", "required", "mode", "uid", "gid", "env"),
}


def _mount(line: Line, text: str) -> Mount:
    pairs = tuple((part.partition("=")[0].strip().lower(), part.partition("=")[2]) for part in text.split(","))
    options = dict(pairs)
    kind = options.pop("type", "bind")
    if kind == "ssh":
        raise line.wrong("--mount=type=ssh is not supported", "use --mount=type=secret, or an allowed host")
    if kind not in _MOUNT_OPTIONS:
        raise line.wrong(f"--mount=type={kind[:40]} is not known", near(kind, _MOUNT_OPTIONS))
    for key in options:
        if key not in _MOUNT_OPTIONS[kind]:
            raise line.wrong(f"--mount=type={kind} has no option {key[:40]}", near(key, _MOUNT_OPTIONS[kind]))
    mount = Mount(kind, tuple(options.items()))
    if kind != "secret" and not mount.get("target", "dst", "destination"):
        raise line.wrong(f"--mount=type={kind} needs a target", f"write --mount=type={kind},target=/path")
    return mount


def _copy(line: Line, flags: Flags, rest: str) -> Instruction:
    add = line.keyword == "ADD"
    if "checksum" in flags:
        raise line.wrong("ADD --checksum is not supported", "download it in a RUN, and check it there")
    words = list(json_words(line, rest) or split(rest))
    named = {doc.name: doc for doc in line.heredocs}
    if len(words) < 2:
        raise line.wrong(
            f"{line.keyword} needs at least a source and a target", f"for example: {_EXAMPLES[line.keyword]}"
        )
    *sources, target = words
    plain = tuple(word for word in sources if not (named and "<<" in word))
    if add:
        for word in plain:
            if re.match(r"(https?|ftp)://|git@|git://", word):
                raise line.wrong(
                    f"ADD of a URL is not supported: {word[:200]}",
                    "download it in a RUN (curl, wget) and allow its host with --allow HOST",
                )
    if named and _one(flags, "from"):
        raise line.wrong("--from and a heredoc do not go together")
    return Copy(
        line, plain, target, unpack=add and _one(flags, "unpack") != "false", origin=_one(flags, "from"),
        chown=_one(flags, "chown"), chmod=_one(flags, "chmod"), parents=_one(flags, "parents") == "true",
        exclude=tuple(flags.get("exclude", ())), heredocs=line.heredocs,
    )  # fmt: skip


def _pairs(line: Line, flags: Flags, rest: str) -> Instruction:
    """ENV and LABEL: ``a=b c=d``, or the old ``a b c``."""
    kind = Env if line.keyword == "ENV" else Label
    words = split(rest, line.escape)
    if "=" not in words[0]:
        name, value = first_word(rest)
        if not value:
            raise line.wrong(f"{line.keyword} {name[:80]} has no value", f"write {line.keyword} {name[:80]}=VALUE")
        return kind(line, ((name, value),))
    pairs = []
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise line.wrong(f"{word[:80]!r} has no =", "put values with spaces in quotes: NAME='two words'")
        if not name:
            raise line.wrong(f"{word[:80]!r} has no name")
        pairs.append((name, value))
    return kind(line, tuple(pairs))


def _arg(line: Line, flags: Flags, rest: str) -> Instruction:
    pairs: list[tuple[str, str | None]] = []
    for word in split(rest, line.escape):
        name, separator, value = word.partition("=")
        if not _NAME_RE.match(name):
            raise line.wrong(f"ARG {name[:80]!r} is no name of a variable", "letters, digits and '_'")
        pairs.append((name, value if separator else None))
    return Arg(line, tuple(pairs))


def _text(line: Line, flags: Flags, rest: str) -> Instruction:
    if line.keyword in ("USER", "STOPSIGNAL") and len(split(rest, line.escape)) != 1:
        raise line.wrong(f"{line.keyword} takes one argument", f"for example: {_EXAMPLES[line.keyword]}")
    return Text(line, rest)


def _command(line: Line, flags: Flags, rest: str) -> Instruction:
    argv = json_words(line, rest)
    if line.keyword == "SHELL" and not argv:
        raise line.wrong("SHELL takes a list", f"write {_EXAMPLES['SHELL']}")
    return Command(line, text=rest) if argv is None else Command(line, argv=argv)


def _names(line: Line, flags: Flags, rest: str) -> Instruction:
    words = json_words(line, rest)
    return Names(line, text=rest) if words is None else Names(line, words=words)


def _health(line: Line, flags: Flags, rest: str) -> Instruction:
    kind, rest = first_word(rest)
    if kind.upper() == "NONE":
        if rest or flags:
            raise line.wrong("HEALTHCHECK NONE takes nothing else")
        return Health(line, ("NONE",))
    if kind.upper() != "CMD" or not rest:
        raise line.wrong("HEALTHCHECK takes CMD and a command, or NONE", f"for example: {_EXAMPLES['HEALTHCHECK']}")
    argv = json_words(line, rest)
    options = tuple((name, values[0]) for name, values in flags.items())
    return Health(line, ("CMD-SHELL", rest) if argv is None else ("CMD", *argv), options)


def _onbuild(line: Line, flags: Flags, rest: str) -> Instruction:
    keyword, inner = first_word(rest)
    if keyword.upper() in ("ONBUILD", "FROM", "MAINTAINER"):
        raise line.wrong(f"ONBUILD {keyword.upper()} is not possible")
    parse_instruction(Line(line.number, keyword.upper(), inner, line.heredocs, line.escape, line.name))
    return OnBuild(line, "\n".join([f"{keyword.upper()} {inner}", *(f"{doc.text}{doc.name}" for doc in line.heredocs)]))


_PARSERS: dict[str, Callable[[Line, Flags, str], Instruction]] = {
    "FROM": _from, "RUN": _run, "COPY": _copy, "ADD": _copy, "ENV": _pairs, "LABEL": _pairs, "ARG": _arg,
    "WORKDIR": _text, "USER": _text, "STOPSIGNAL": _text, "MAINTAINER": _text, "SHELL": _command,
    "ENTRYPOINT": _command, "CMD": _command, "EXPOSE": _names, "VOLUME": _names, "HEALTHCHECK": _health,
    "ONBUILD": _onbuild,
}  # fmt: skip
