"""A stage on its way down the Dockerfile: its variables, its config, and what each instruction asks for. Pure."""

from __future__ import annotations

import posixpath
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..images.config import Healthcheck, ImageConfig
from .instructions import (
    Arg,
    Command,
    Copy,
    Env,
    Health,
    Instruction,
    Label,
    Mount,
    Names,
    OnBuild,
    Run,
    Text,
)
from .lines import Line
from .plan import PROXIES, expanded
from .words import Malformed, expand, expand_list, expand_text

DEFAULT_SHELL = ("/bin/sh", "-c")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_DURATION_RE = re.compile(r"(\d+(?:\.\d+)?)(h|ms|us|µs|ns|m|s)")
_PORT_RE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?(?:/(tcp|udp|sctp))?\Z", re.IGNORECASE)


@dataclass(frozen=True)
class Work:
    """What an instruction asks for that makes a layer. ``line`` is for errors, ``shown`` for people and the history."""

    line: Line
    shown: str


@dataclass(frozen=True)
class RunWork(Work):
    argv: tuple[str, ...]
    script: str  #: a program's text (``#!``): it is run instead of ``argv``
    env: tuple[tuple[str, str], ...]
    user: str
    workdir: str
    network: object  #: None: the build's own; "none"; or one that it has where the build has none
    mounts: tuple[Mount, ...]


@dataclass(frozen=True)
class CopyWork(Work):
    sources: tuple[str, ...]
    files: tuple[tuple[str, str], ...]  #: name and text of what stands in the Dockerfile itself
    target: str  #: absolute; with a slash at its end it is a folder
    origin: str | None
    chown: str | None
    chmod: str | None
    unpack: bool
    parents: bool
    exclude: tuple[str, ...]
    folder: str | None


@dataclass(frozen=True)
class FolderWork(Work):
    """WORKDIR: the folder is made if it is not there."""

    path: str
    owner: str


class Scope:
    """Where a stage is. ``take`` moves it on by one instruction."""

    def __init__(
        self, config: ImageConfig, *, build_args: Mapping[str, str], leading: Mapping[str, str], epoch: int,
        arguments: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self._given = build_args
        self._leading = leading
        self._epoch = epoch
        self._arguments = dict(arguments or {})  # those of the stage that it builds on
        self._cmd_is_ours = False

    def lookup(self, name: str) -> str | None:
        for key, value in reversed(self.config.env):
            if key == name:
                return value
        return self._arguments.get(name, DEFAULT_PATH if name == "PATH" else None)

    @property
    def arguments(self) -> dict[str, str]:
        """ARGs with values so far: a stage that builds on this one has them too."""
        return dict(self._arguments)

    def take(self, step: Instruction) -> Work | None:
        """What is to be done for it; None: its config was all. Raises RecipeInvalid."""
        match step:
            case Run():
                return self._run(step)
            case Copy():
                return self._copy(step)
            case Text() if step.line.keyword == "WORKDIR":
                return self._workdir(step)
            case Env() | Label():
                self._pairs(step)
            case Arg():
                self._argument(step)
            case Text():
                self._text(step)
            case Command():
                self._command(step)
            case Names():
                self._names(step)
            case Health():
                self._set(healthcheck=_healthcheck(step))
            case OnBuild():
                self._set(on_build=(*self.config.on_build, step.text))
            case _:
                raise step.line.wrong(f"{step.line.keyword} cannot stand here")
        return None

    def _set(self, **values: object) -> None:
        self.config = replace(self.config, **values)  # type: ignore[arg-type]

    def _expand(self, line: Line, text: str) -> str:
        return expanded(line, text, self.lookup)

    @property
    def shell(self) -> tuple[str, ...]:
        return self.config.shell or DEFAULT_SHELL

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """Of a RUN: the image's, and build arguments that it does not override."""
        found = {"PATH": DEFAULT_PATH, "SOURCE_DATE_EPOCH": str(self._epoch), **self._arguments}
        found |= {name: self._given[name] for name in PROXIES if name in self._given}
        found |= dict(self.config.env)
        return tuple(sorted(found.items()))

    def _run(self, step: Run) -> Work:
        script = step.script if step.script.startswith("#!") else ""
        argv = step.argv or (*self.shell, step.script or step.text)
        return RunWork(
            step.line, f"RUN {' '.join(step.argv) or step.script or step.text}".strip(), argv, script,
            tuple(sorted({**dict(self.environment), **dict(step.env)}.items())),
            self.config.user or "0", self.config.workdir or "/", step.network if step.policy is None else step.policy,
            tuple(self._mount(step.line, mount) for mount in step.mounts),
        )  # fmt: skip

    def _mount(self, line: Line, mount: Mount) -> Mount:
        return replace(mount, options=tuple((key, self._expand(line, value)) for key, value in mount.options))

    def _copy(self, step: Copy) -> Work:
        line = step.line
        sources = tuple(self._expand(line, source) for source in step.sources)
        target = self._expand(line, step.target)
        if not target or not all(sources):
            raise line.wrong(f"{line.keyword}: a source or the target is empty")
        files = []
        for doc in step.heredocs:
            try:
                files.append((doc.name, expand_text(doc.text, self.lookup, line.escape) if doc.expand else doc.text))
            except Malformed as error:
                raise line.wrong(f"in the heredoc {doc.name}: {error}", error.hint) from None
        chmod = self._expand(line, step.chmod) if step.chmod else None
        if chmod is not None and not re.match(r"[0-7]{3,4}\Z", chmod):
            raise line.wrong(f"--chmod={chmod[:40]} is no mode", "write it in octal, for example --chmod=755")
        if len(sources) + len(files) > 1 and not target.endswith(("/", "/.")) and target != ".":
            raise line.wrong(f"{line.keyword} of several files into {target[:80]}", "a folder ends with /: write it so")
        return CopyWork(
            line, line.text, sources, tuple(files), self._absolute(target, folder=True), step.origin,
            self._expand(line, step.chown) if step.chown else None, chmod, step.unpack, step.parents,
            tuple(self._expand(line, each) for each in step.exclude), step.folder,
        )  # fmt: skip

    def _absolute(self, path: str, *, folder: bool = False) -> str:
        found = posixpath.normpath(posixpath.join("/", self.config.workdir, path))
        found = "/" + found.lstrip("/")
        is_folder = path.endswith(("/", "/.")) or path in (".", "..")
        return found + "/" if folder and is_folder and found != "/" else found

    def _workdir(self, step: Text) -> Work:
        path = self._expand(step.line, step.value)
        if not path:
            raise step.line.wrong("WORKDIR is empty")
        self._set(workdir=self._absolute(path))
        return FolderWork(step.line, step.line.text, self.config.workdir, self.config.user or "0")

    def _pairs(self, step: Env | Label) -> None:
        pairs = [(self._expand(step.line, name), self._expand(step.line, value)) for name, value in step.pairs]
        if isinstance(step, Label):
            labels = {**dict(self.config.labels), **dict(pairs)}
            self._set(labels=tuple(sorted(labels.items())))
            return
        if any(not name or "=" in name for name, _ in pairs):
            raise step.line.wrong("ENV: a variable without a name")
        self._set(env=tuple({**dict(self.config.env), **dict(pairs)}.items()))

    def _argument(self, step: Arg) -> None:
        for name, default in step.pairs:
            if name in self._given:
                self._arguments[name] = self._given[name]
            elif default is not None:
                self._arguments[name] = self._expand(step.line, default)
            elif name in self._leading:
                self._arguments[name] = self._leading[name]

    def _text(self, step: Text) -> None:
        value = self._expand(step.line, step.value)
        if not value:
            raise step.line.wrong(f"{step.line.keyword} is empty")
        if step.line.keyword == "USER":
            self._set(user=value)
        elif step.line.keyword == "MAINTAINER":
            self._set(author=value)
        else:
            name = value.upper().removeprefix("SIG")
            real_time = re.match(r"RTM(?:IN|AX)[+-]?\d*\Z", name)
            if not real_time and not (name.isdecimal() and 1 <= int(name) <= 64) and f"SIG{name}" not in _signals():
                raise step.line.wrong(f"{value[:40]} is no signal", "for example SIGTERM or 15")
            self._set(stop_signal=value)

    def _command(self, step: Command) -> None:
        argv = step.argv or ((*self.shell, step.text) if step.text else ())
        if step.line.keyword == "SHELL":
            self._set(shell=argv)
        elif step.line.keyword == "CMD":
            self._cmd_is_ours = True
            self._set(cmd=argv)
        else:
            self._set(
                entrypoint=argv, cmd=self.config.cmd if self._cmd_is_ours else ()
            )  # as Docker: the base's CMD goes

    def _names(self, step: Names) -> None:
        try:
            words = [expand(word, self.lookup, step.line.escape) for word in step.words] or expand_list(
                step.text, self.lookup, step.line.escape
            )
        except Malformed as error:
            raise step.line.wrong(str(error), error.hint) from None
        if step.line.keyword == "VOLUME":
            if not words or not all(words):
                raise step.line.wrong("VOLUME names no folder")
            paths = {posixpath.normpath(posixpath.join("/", self.config.workdir, word)) for word in words}
            self._set(volumes=tuple(sorted({*self.config.volumes, *paths})))
            return
        ports = {port for word in words for port in _ports(step.line, word)}
        self._set(ports=tuple(sorted({*self.config.ports, *ports})))


def _signals() -> set[str]:
    return {each.name for each in signal.Signals}


def _ports(line: Line, word: str) -> list[str]:
    match = _PORT_RE.match(word)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if match is None or not 1 <= first <= last <= 65535:
        raise line.wrong(f"{word[:40]!r} is no port", "write 8080, 53/udp or 8000-8010")
    return [f"{port}/{(match[3] or 'tcp').lower()}" for port in range(first, last + 1)]


def _healthcheck(step: Health) -> Healthcheck:
    values: dict[str, float] = {}
    for name, text in step.options:
        if name == "retries":
            if not text.isdecimal():
                raise step.line.wrong(f"--retries={text[:40]} is no number")
            continue
        parts = _DURATION_RE.findall(text)
        if not parts or "".join(a + b for a, b in parts) != text:
            raise step.line.wrong(f"--{name}={text[:40]} is no time", "for example 30s, 1m30s or 500ms")
        values[name] = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    default = Healthcheck()
    return Healthcheck(
        step.test,
        interval=values.get("interval") or default.interval,
        timeout=values.get("timeout") or default.timeout,
        start_period=values.get("start-period", default.start_period),
        retries=int(dict(step.options).get("retries", "0")) or default.retries,
    )
