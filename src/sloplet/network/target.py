"""Where a program inside wants to go, as its agent says it. All of it is hostile: bounded, and in one spelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..wire.fields import Fields
from ..wire.schema import Tag
from . import addresses, names

if TYPE_CHECKING:
    from .policy import Policy, Verdict

_LONGEST = 1024  # bytes of a name or address on the wire


@dataclass(frozen=True)
class Target:
    """Where a program wants to go."""

    name: str  #: "" if it connected to an address
    address: str
    port: int

    @staticmethod
    def read(request: Fields) -> Target:
        """ValueError for what no agent of ours says."""
        name, port = Target.name_of(request), request.integer(Tag.PORT)
        address = addresses.parse(_text(request, Tag.ADDRESS))
        if address is None or not 1 <= port <= 65535:
            raise ValueError("a connection without a sensible target")
        if name and names.is_number(name):  # an address, in whatever notation
            address = addresses.parse(name)
            if address is None:
                raise ValueError(f"{name} is neither a name nor an address")
            name = ""
        return Target(name, str(address), port)

    @staticmethod
    def name_of(request: Fields) -> str:
        """Its one spelling; "" if there is none. ValueError."""
        text = _text(request, Tag.NAME)
        if not text or (names.is_number(text.rstrip(".")) and addresses.parse(text) is not None):
            return text.rstrip(".")
        return names.normal(text)

    def rule(self) -> str:
        """What a rule for exactly this would be."""
        host = self.name or (f"[{self.address}]" if ":" in self.address else self.address)
        return f"{host}:{self.port}"

    def judged(self, policy: Policy) -> Verdict:
        return policy.judge(self.name, self.port) if self.name else policy.judge_address(self.address, self.port)


def _text(request: Fields, tag: Tag) -> str:
    raw = request.raw(tag, b"")
    if len(raw) > _LONGEST:
        raise ValueError("a name that is too long")
    return raw.decode("ascii")
