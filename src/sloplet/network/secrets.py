"""Placeholders and what stands for them: swapped for bound hosts inside TLS, refused everywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class Spec(Protocol):
    """``netspec.SecretSpec``."""

    @property
    def name(self) -> str: ...

    @property
    def hosts(self) -> Sequence[str]: ...

    @property
    def where(self) -> Sequence[str]: ...

    @property
    def placeholder(self) -> str: ...


class Scanner:
    """Watches a stream that is not HTTP for placeholders, across the borders of its pieces."""

    def feed(self, data: bytes) -> bytes:
        """What may be sent on now: what could be the beginning of a placeholder is held. Refused if there is one."""
        raise NotImplementedError

    def finish(self) -> bytes:
        """What was held, at the end of the stream."""
        raise NotImplementedError


class SecretTable:
    """The secrets of one sandbox, with their values. Values are in no repr, text or exception of this."""

    def __init__(self, specs: Iterable[Spec], values: Mapping[str, str | None] | None = None) -> None:
        raise NotImplementedError

    def set(self, values: Mapping[str, str | None]) -> None:
        """New values, at once, also for open connections; None takes one away. SpecError: unknown name, or a value
        that cannot be put where it is asked for."""
        raise NotImplementedError

    @property
    def placeholders(self) -> dict[str, str]:
        """By name: what the sandbox's environment holds."""
        raise NotImplementedError

    def values(self) -> dict[str, str]:
        """Those that are known now: for a fork in the same holder."""
        raise NotImplementedError

    def scan(self) -> Scanner:
        """For the program's side of one opaque connection (and of HTTP judged by address)."""
        raise NotImplementedError
