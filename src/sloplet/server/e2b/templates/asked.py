"""What the bodies of requests about templates ask for. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..answers import refused
from ..api import optional, text, texts
from .names import DEFAULT_TAG, Reference, bare_tags, parse
from .steps import Step, read_steps

DEFAULT_CPUS, DEFAULT_MEMORY = 2, 1024
_MOST_CPUS, _MOST_MEMORY, _LEAST_MEMORY = 128, 512 * 1024, 128
_MOST_COMMAND = 64 << 10


@dataclass(frozen=True)
class NewBuild:
    """A build that is announced."""

    reference: Reference
    tags: list[str]
    cpus: int
    memory: int

    @property
    def explicit(self) -> list[str]:
        """Older clients always say the default."""
        found = ["cpus"] if self.cpus != DEFAULT_CPUS else []
        return [*found, *(["memory"] if self.memory != DEFAULT_MEMORY else [])]


@dataclass(frozen=True)
class BuildAsked:
    """What is to be built. ``registry`` has credentials: for this build's pull, and nothing else."""

    steps: list[Step]
    force: bool = False
    from_image: str = ""
    from_template: str = ""
    start: str = ""
    ready: str = ""
    registry: dict[str, str] = field(default_factory=dict, repr=False)


def new_build(body: dict[str, Any], name: str = "name") -> NewBuild:
    """refused (400)."""
    reference = parse(text(body, name, most=512))
    tags = bare_tags(texts(body, "tags", most=1000))
    if reference.said:
        tags = list(dict.fromkeys([reference.tag, *tags]))
    cpus = optional(body, "cpuCount", int, DEFAULT_CPUS)
    memory = optional(body, "memoryMB", int, DEFAULT_MEMORY)
    if cpus < 1:
        raise refused(400, "validation error: CPU count must be at least 1")
    if memory < _LEAST_MEMORY:
        raise refused(400, f"validation error: Memory must be at least {_LEAST_MEMORY} MB")
    if cpus > _MOST_CPUS:
        raise refused(400, f"CPU count can't be higher than {_MOST_CPUS}")
    if memory > _MOST_MEMORY:
        raise refused(400, f"Memory can't be higher than {_MOST_MEMORY} MB")
    if memory % 2:
        raise refused(400, "Memory must be divisible by 2")
    return NewBuild(reference, tags or [DEFAULT_TAG], cpus, memory)


def build_asked(body: dict[str, Any]) -> BuildAsked:
    """refused (400)."""
    image, template = (optional(body, name, str, "") for name in ("fromImage", "fromTemplate"))
    if bool(image) == bool(template):
        raise refused(400, "a template begins with an image or with another template: fromImage or fromTemplate")
    start, ready = (optional(body, name, str, "").strip() for name in ("startCmd", "readyCmd"))
    if any(len(each) > _MOST_COMMAND or "\0" in each for each in (start, ready)):
        raise refused(400, "startCmd or readyCmd is too long, or has a NUL character")
    registry = optional(body, "fromImageRegistry", dict, {})
    if not all(isinstance(value, str) for value in registry.values()):
        raise refused(400, "fromImageRegistry has texts for values")
    if registry and registry.get("type") not in ("registry", "aws", "gcp"):
        raise refused(400, "fromImageRegistry is of the type registry, aws or gcp")
    force = optional(body, "force", bool, False)
    return BuildAsked(read_steps(body), force, image.strip(), template.strip(), start, ready, dict(registry))
