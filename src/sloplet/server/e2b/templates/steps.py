"""The steps of a template as instructions of a build. Pure.

E2B means by them: RUN is ``bash -l -c`` as the user of that moment; USER makes a user who is missing; COPY merges
folders, keeps links as links, and gives what it copies to that user; ENV has variables, and no quotes.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....build.image import literal
from ....build.instructions import Copy, Env, Instruction, Run, Text
from ....build.lines import Line
from ..answers import refused
from ..api import optional, texts

HASH_RE = re.compile(r"[0-9a-f]{64}\Z")
_TYPES = ("RUN", "COPY", "USER", "WORKDIR", "ENV")
_USER_RE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}\Z")
_OWNER_RE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?\Z")
_MODE_RE = re.compile(r"(?:0o)?([0-7]{3,5})\Z")
_VARIABLE_RE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_GLOB = frozenset("*?[{")
_MOST_STEPS = 1000
_MOST_ARGS = 1000
_MOST_TEXT = 1 << 20  # characters of one
_ROOT = "root"

_ADD_USER = """set -e
if ! id -u "$1" >/dev/null 2>&1; then
  if command -v useradd >/dev/null; then useradd --create-home --user-group --shell /bin/bash "$1"
  else adduser -D -s /bin/bash "$1"; fi
fi
if [ "$2" = true ]; then
  if command -v usermod >/dev/null; then usermod -a -G sudo "$1"; else addgroup "$1" sudo; fi
fi
rm -f /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /etc/subuid- /etc/subgid-"""


class StepFailed(Exception):
    """A build ends here. ``step``: base, a number from 1, finalize."""

    def __init__(self, step: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.step, self.message, self.hint = step, message, hint


@dataclass(frozen=True)
class Step:
    number: int  #: from 1
    type: str
    args: tuple[str, ...]
    force: bool = False
    files: str = ""  #: COPY: the archive that was sent for it

    @property
    def shown(self) -> str:
        return " ".join([self.type, *self.args]).strip()

    def arg(self, index: int) -> str:
        return self.args[index] if index < len(self.args) else ""

    def wrong(self, message: str) -> StepFailed:
        return StepFailed(str(self.number), message)


@dataclass(frozen=True)
class Placed:
    """What a COPY takes of the folder that its archive was unpacked into, and where that goes."""

    source: str
    target: str


@dataclass(frozen=True)
class Piece:
    """An instruction of the build. ``main``: it is what its step is about; the others prepare it."""

    step: Step
    instruction: Instruction
    main: bool = True


def read_steps(body: dict[str, Any]) -> list[Step]:
    """refused (400)."""
    found = []
    given = optional(body, "steps", list, [])
    if len(given) > _MOST_STEPS:
        raise refused(400, f"these are more than {_MOST_STEPS} steps")
    for number, each in enumerate(given, 1):
        if not isinstance(each, dict) or not isinstance(each.get("type"), str):
            raise refused(400, f"step {number} is none")
        kind = each["type"].upper()
        if kind not in _TYPES:
            raise refused(400, f"step {number}: there is no {each['type'][:40]}; there are {', '.join(_TYPES)}")
        args = tuple(texts(each, "args", most=_MOST_ARGS, longest=_MOST_TEXT))
        if any("\0" in arg for arg in args):
            raise refused(400, f"step {number}: a NUL character")
        files = optional(each, "filesHash", str, "")
        if kind == "COPY" and (len(args) < 2 or not HASH_RE.match(files)):
            raise refused(400, f"step {number}: COPY has a source, a target and the hash of its files")
        if kind != "COPY" and not args:
            raise refused(400, f"step {number}: {kind} needs an argument")
        found.append(Step(number, kind, args, optional(each, "force", bool, False), files))
    return found


def first_forced(steps: Sequence[Step]) -> int:
    """How many steps may come out of the cache: those before the first that may not."""
    return next((index for index, step in enumerate(steps) if step.force), len(steps))


def source_of(text: str) -> str:
    """Which path of an archive a COPY takes: what stands before the first part with a pattern. "": all of it."""
    parts = []
    for part in posixpath.normpath("/" + text).strip("/").split("/"):
        if _GLOB & set(part):
            break
        parts.append(part)
    return "/".join(parts)


def link_target(source: str, target: str) -> tuple[str, str]:
    """For a source that is a link, which is to stay one: the folder it goes to, and what it is called there."""
    if target.endswith("/") or target in (".", "..") or target.endswith(("/.", "/..")):
        return target, posixpath.basename(source)
    folder, name = posixpath.split(target)
    return (folder or "."), name


def translate(
    steps: Sequence[Step], placed: Mapping[int, Placed], user: str, options: Mapping[str, Any] | None = None
) -> list[Piece]:
    """``user``: who the base's user is; ``options``: more for every RUN. StepFailed."""
    translating = _Translating(user, placed, options or {})
    for step in steps:
        translating.take(step)
    return translating.pieces


class _Translating:
    def __init__(self, user: str, placed: Mapping[int, Placed], options: Mapping[str, Any]) -> None:
        self.pieces: list[Piece] = []
        self._user, self._placed, self._options = user, placed, options

    def take(self, step: Step) -> None:
        match step.type:
            case "RUN":
                self._run(step)
            case "COPY":
                self._copy(step)
            case "USER":
                self._change_user(step)
            case "WORKDIR":
                self._add(step, Text(_line(step, "WORKDIR", step.args[0]), literal(step.args[0])))
            case _:
                self._env(step)

    def _add(self, step: Step, instruction: Instruction, *, main: bool = True) -> None:
        self.pieces.append(Piece(step, instruction, main))

    def _be(self, step: Step, user: str) -> None:
        """Later commands run as this one."""
        self._add(step, Text(_line(step, "USER", user), literal(user)), main=False)

    def _run(self, step: Step) -> None:
        command, user = step.args[0], step.arg(1) or self._user
        if not _USER_RE.match(user):
            raise step.wrong(unknown_user(command, user))
        if user != self._user:
            self._be(step, user)
        argv = ("/bin/bash", "-l", "-c", command)
        self._add(step, Run(_line(step, "RUN", command), argv=argv, **self._options))
        if user != self._user:
            self._be(step, self._user)

    def _change_user(self, step: Step) -> None:
        name, sudo = step.args[0], step.arg(1)
        if not _USER_RE.match(name):
            raise step.wrong(f"failed to create user '{name[:80]}': this is no name of a user")
        if name not in (_ROOT, "user"):
            argv = ("/bin/sh", "-c", _ADD_USER, "sh", name, sudo)
            self._be(step, _ROOT)
            self._add(step, Run(_line(step, "RUN", f"adduser {name}"), argv=argv), main=False)
        self._add(step, Text(_line(step, "USER", name), literal(name)))
        self._user = name

    def _env(self, step: Step) -> None:
        if len(step.args) % 2:
            raise step.wrong("ENV has a name without a value")
        pairs = list(zip(step.args[::2], step.args[1::2], strict=True))
        for name, _ in pairs:
            if not name or "=" in name:
                raise step.wrong(f"ENV: {name[:80]!r} is no name of a variable")
        home = "/root" if self._user == _ROOT else f"/home/{self._user}"
        found = tuple((literal(name), expandable(value, home)) for name, value in pairs)
        self._add(step, Env(_line(step, "ENV", " ".join(step.args)), found))

    def _copy(self, step: Step) -> None:
        place = self._placed[step.number]
        owner, mode = step.arg(2) or self._user, step.arg(3)
        if not _OWNER_RE.match(owner):
            raise step.wrong(f"COPY: {owner[:80]!r} is no owner")
        read = _MODE_RE.match(mode) if mode else None
        if mode and read is None:
            raise step.wrong(f"COPY: {mode[:80]!r} is no mode")
        name, _, group = owner.partition(":")
        chown = owner if group and group != name else name  # a user's own group may have another name
        self._add(step, Copy(
            _line(step, "COPY", " ".join(step.args[:2])), (literal(place.source or "."),), literal(place.target),
            chown=chown, chmod=read[1][-4:] if read else None, folder=str(step.number),
        ))  # fmt: skip


def expandable(value: str, home: str) -> str:
    """A value in which ``$NAME`` and ``${NAME}`` are put in by the build, and nothing else means anything."""
    found, at = [], 0
    for match in _VARIABLE_RE.finditer(value):
        found.append(literal(value[at : match.start()]))
        name = match[1] or match[2]
        found.append(literal(home) if name == "HOME" else f"${{{name}}}")
        at = match.end()
    return "".join([*found, literal(value[at:])])


def _line(step: Step, keyword: str, shown: str) -> Line:
    return Line(step.number, keyword, shown, name="template")


def unknown_user(command: str, user: str) -> str:
    return f"failed to run command '{command}': command failed: unauthenticated: invalid username: '{user[:80]}'"
