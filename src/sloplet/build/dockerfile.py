"""A Dockerfile: its text, read into stages. Pure; every error is a RecipeInvalid that names the line."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import RecipeInvalid
from .instructions import Arg, From, Instruction, parse_instruction
from .lines import Line, first_word, read_lines


@dataclass
class Stage:
    """One FROM and what follows it."""

    index: int
    base: From
    steps: list[Instruction] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.base.alias or str(self.index)


@dataclass
class Dockerfile:
    stages: list[Stage]
    arguments: list[Arg] = field(default_factory=list)  #: ARGs before the first FROM
    name: str = "Dockerfile"


def parse(text: str, name: str = "Dockerfile") -> Dockerfile:
    """Raises RecipeInvalid."""
    found = Dockerfile([], [], name)
    for line in read_lines(text, name):
        instruction = parse_instruction(line)
        if isinstance(instruction, From):
            if any(stage.base.alias == instruction.alias for stage in found.stages if instruction.alias):
                raise line.wrong(f"there are two stages named {instruction.alias}", "give this one another name")
            found.stages.append(Stage(len(found.stages), instruction))
        elif found.stages:
            found.stages[-1].steps.append(instruction)
        elif isinstance(instruction, Arg):
            found.arguments.append(instruction)
        else:
            raise line.wrong(f"{line.keyword} before the first FROM", "only ARG may stand there")
    if not found.stages:
        raise RecipeInvalid(f"{name} has no FROM", hint="begin with FROM IMAGE, or FROM scratch")
    return found


def parse_trigger(text: str, image: str) -> Instruction:
    """An ONBUILD instruction out of a base image's config."""
    keyword, rest = first_word(text)
    lines = read_lines(text, f"ONBUILD of {image}")
    line = lines[0] if len(lines) == 1 else Line(1, keyword.upper(), rest, name=f"ONBUILD of {image}")
    return parse_instruction(line)
