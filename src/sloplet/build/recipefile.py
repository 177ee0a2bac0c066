"""A recipe as JSON, for a server that builds it: what a Dockerfile says, and what ``Image`` says and no Dockerfile can.

An instruction that its own line says completely goes as that line, and is parsed where it arrives. Steps of ``Image``
go as values: a network of their own, files of other folders than the context (by a number, never by a path), packages
of whatever indexes the machine has that builds. What arrives is hostile. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from ..errors import RecipeInvalid, SpecError
from ..netspec import Network, NetworkSpec, check_network
from .dockerfile import Dockerfile, Stage
from .instructions import Arg, Command, Copy, Env, From, Instruction, Label, Names, Run, Text, parse_instruction
from .lines import MAX_BYTES, Heredoc, Line

VERSION = 1
_MOST_STEPS = 10_000
_MOST_STAGES = 500
#: What a kind of step may stand for; all others go as their lines.
_KEYWORDS: dict[type[Instruction], tuple[str, ...]] = {
    From: ("FROM",), Run: ("RUN",), Copy: ("COPY",), Env: ("ENV",), Label: ("LABEL",), Text: ("WORKDIR", "USER"),
    Command: ("ENTRYPOINT", "CMD", "SHELL"), Names: ("EXPOSE", "VOLUME"),
}  # fmt: skip
_KINDS = {kind.__name__: kind for kind in _KEYWORDS}
INDEXES = ("apt", "pip", "npm")

#: From a machine's index to the variables and mounts of a step that installs something from it.
OfIndex = Callable[[str], dict[str, Any]]


# -- to JSON -------------------------------------------------------------------------------------------------------


def to_document(recipe: Dockerfile, folders: list[str]) -> dict[str, Any]:
    """``folders`` gets the folders that steps copy from; their numbers are in the document. SpecError for what cannot
    leave this program."""
    return {
        "version": VERSION,
        "name": recipe.name,
        "arguments": [_told(step, folders) for step in recipe.arguments],
        "stages": [
            {"base": _told(stage.base, folders), "steps": [_told(step, folders) for step in stage.steps]}
            for stage in recipe.stages
        ],
    }


def _told(step: Instruction, folders: list[str]) -> dict[str, Any]:
    line = step.line
    said = {
        "number": line.number, "keyword": line.keyword, "rest": line.rest, "escape": line.escape, "name": line.name,
        "heredocs": [dataclasses.astuple(doc) for doc in line.heredocs],
    }  # fmt: skip
    try:
        if parse_instruction(line) == step:
            return {"line": said}
    except RecipeInvalid:
        pass
    if type(step) not in _KEYWORDS:
        raise SpecError(f"{line.text[:80]!r} cannot be built on a server")
    values = {field.name: getattr(step, field.name) for field in dataclasses.fields(step) if field.name != "line"}
    if isinstance(step, Run):
        values = _told_run(step, values)
    elif isinstance(step, Copy) and step.folder is not None:
        if step.folder not in folders:
            folders.append(step.folder)
        values["folder"] = folders.index(step.folder)
    default = {field.name: field.default for field in dataclasses.fields(step)}
    return {"line": said, "kind": type(step).__name__, **{k: v for k, v in values.items() if v != default.get(k)}}


def _told_run(step: Run, values: dict[str, Any]) -> dict[str, Any]:
    if step.index:  # what is needed of an index is known where it is built
        values = {**values, "env": (), "mounts": ()}
    elif step.mounts:
        raise SpecError(f"{step.line.text[:80]!r}: its mounts cannot be told to a server")
    policy = step.policy
    if isinstance(policy, Network):
        if policy.ask is not None:
            raise SpecError("a step whose network asks cannot be built on a server", hint="write rules instead")
        policy = policy.spec
    return {**values, "policy": policy.to_dict() if isinstance(policy, NetworkSpec) else policy}


# -- from JSON -----------------------------------------------------------------------------------------------------


def from_document(document: Any, folders: Collection[str], of_index: OfIndex) -> Dockerfile:
    """What ``to_document`` gave. ``folders``: the numbers of those that came with it. RecipeInvalid, SpecError."""
    try:
        if document["version"] != VERSION:
            raise RecipeInvalid(
                "the recipe was written by another version of sloplet", hint=f"this one knows {VERSION}"
            )
        read = _Reader(folders, of_index)
        found = Dockerfile([], [], read.text(document["name"], 1000))
        stages = document["stages"]
        if not isinstance(stages, list) or not 1 <= len(stages) <= _MOST_STAGES:
            raise ValueError("stages")
        for index, stage in enumerate(stages):
            base = read.step(stage["base"])
            if not isinstance(base, From):
                raise ValueError("base")
            if any(other.base.alias == base.alias for other in found.stages if base.alias):
                raise base.line.wrong(f"there are two stages named {base.alias}")
            found.stages.append(Stage(index, base, read.steps(stage["steps"])))
        for step in read.steps(document.get("arguments", [])):
            if not isinstance(step, Arg):
                raise ValueError("arguments")
            found.arguments.append(step)
        return found
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, (RecipeInvalid, SpecError)):
            raise
        raise RecipeInvalid(f"the recipe is not what sloplet writes ({type(error).__name__}: {error!s:.80})") from None


class _Reader:
    def __init__(self, folders: Collection[str], of_index: OfIndex) -> None:
        self._folders, self._of_index = folders, of_index
        self._left, self._steps = MAX_BYTES, _MOST_STEPS

    def steps(self, found: Any) -> list[Instruction]:
        if not isinstance(found, list):
            raise ValueError("steps")
        return [self.step(each) for each in found]

    def step(self, found: Any) -> Instruction:
        self._steps -= 1
        if self._steps < 0:
            raise RecipeInvalid(f"the recipe has more than {_MOST_STEPS} steps, the limit")
        line = self._line(found["line"])
        if "kind" not in found:
            return parse_instruction(line)
        kind = _KINDS[found["kind"]]
        if line.keyword not in _KEYWORDS[kind]:
            raise ValueError("keyword")
        values = {key: value for key, value in found.items() if key not in ("line", "kind")}
        make: Callable[[Line, dict[str, Any]], Instruction] = getattr(self, f"_{kind.__name__.lower()}")
        step = make(line, values)
        if values:
            raise ValueError(f"{sorted(values)[0][:40]} is not known")
        return step

    def _line(self, found: Any) -> Line:
        number, escape = found["number"], found["escape"]
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 10**9:
            raise ValueError("number")
        if escape not in ("\\", "`"):
            raise ValueError("escape")
        docs = tuple(
            Heredoc(self.text(name, 1000), self.text(text), self._flag(expand))
            for name, text, expand in found["heredocs"]
        )
        return Line(
            number,
            self.text(found["keyword"], 40),
            self.text(found["rest"]),
            docs,
            escape,
            self.text(found["name"], 1000),
        )

    def text(self, found: Any, most: int = MAX_BYTES) -> str:
        """Of all that is read at most ``MAX_BYTES`` characters."""
        if not isinstance(found, str) or "\0" in found or len(found) > most:
            raise ValueError("no text, or too long")
        found.encode()  # UnicodeEncodeError is a ValueError
        self._left -= len(found)
        if self._left < 0:
            raise RecipeInvalid(f"the recipe has more than {MAX_BYTES} characters, the limit")
        return found

    def _flag(self, found: Any) -> bool:
        if not isinstance(found, bool):
            raise ValueError("neither true nor false")
        return found

    def _texts(self, found: Any, least: int = 0) -> tuple[str, ...]:
        if not isinstance(found, list) or len(found) < least:
            raise ValueError("no list of texts")
        return tuple(self.text(each) for each in found)

    def _pairs(self, found: Any) -> tuple[tuple[str, str], ...]:
        pairs = tuple((self.text(name), self.text(value)) for name, value in found)
        if not all(name for name, _ in pairs):
            raise ValueError("a pair without a name")
        return pairs

    def _maybe(self, values: dict[str, Any], key: str) -> str | None:
        found = values.pop(key, None)
        return None if found is None else self.text(found)

    def _from(self, line: Line, values: dict[str, Any]) -> Instruction:
        return From(line, self.text(values.pop("image")))

    def _run(self, line: Line, values: dict[str, Any]) -> Instruction:
        argv, text = self._texts(values.pop("argv", [])), self.text(values.pop("text", ""))
        if bool(argv) == bool(text.strip()) or (argv and not argv[0]):
            raise line.wrong("RUN runs nothing, or two things")
        index = self._maybe(values, "index") or ""
        if index and index not in INDEXES:
            raise ValueError("index")
        policy = values.pop("policy", None)
        if policy is not None:
            policy = "none" if policy == "none" else check_network(NetworkSpec.from_dict(policy))
        extra = self._of_index(index) if index else {"env": self._pairs(values.pop("env", []))}
        return Run(line, argv=argv, text=text, policy=policy, index=index, **extra)

    def _copy(self, line: Line, values: dict[str, Any]) -> Instruction:
        folder = values.pop("folder", None)
        if folder is not None:
            if isinstance(folder, bool) or not isinstance(folder, int) or str(folder) not in self._folders:
                raise ValueError("folder")
            folder = str(folder)
        origin = self._maybe(values, "origin")
        if (folder is None) == (origin is None):
            raise ValueError("a copy of nothing, or of two things")
        return Copy(
            line, self._texts(values.pop("sources"), 1), self.text(values.pop("target")), origin=origin,
            chown=self._maybe(values, "chown"), chmod=self._maybe(values, "chmod"),
            exclude=self._texts(values.pop("exclude", [])), folder=folder,
        )  # fmt: skip

    def _env(self, line: Line, values: dict[str, Any]) -> Instruction:
        return Env(line, self._pairs(values.pop("pairs")))

    def _label(self, line: Line, values: dict[str, Any]) -> Instruction:
        return Label(line, self._pairs(values.pop("pairs")))

    def _text(self, line: Line, values: dict[str, Any]) -> Instruction:
        return Text(line, self.text(values.pop("value")))

    def _command(self, line: Line, values: dict[str, Any]) -> Instruction:
        return Command(line, argv=self._texts(values.pop("argv"), 1))

    def _names(self, line: Line, values: dict[str, Any]) -> Instruction:
        return Names(line, words=self._texts(values.pop("words"), 1))
