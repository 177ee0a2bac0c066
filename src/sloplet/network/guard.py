"""What the inspection of one connection must know: who was judged, and whom to ask about each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .secrets import SecretTable


class Verdict(Protocol):
    """``policy.Verdict``: only a plain True allows."""

    @property
    def allow(self) -> bool | None: ...

    @property
    def reason(self) -> str: ...


def _nothing(_: str) -> None:
    pass


def _yes() -> bool:
    return True


def _no_request(_method: str, _path: str) -> None:
    pass


def _no_headers() -> Sequence[tuple[bytes, bytes]]:
    return ()


@dataclass
class Guard:
    """Of one connection. The callables are asked at each request, so that a new policy counts at once."""

    name: str  #: the name that was judged: lower case, A-labels, no trailing dot; or an address as text
    port: int
    #: judge(method, path); ``path`` is decoded and without query. None: nothing about requests is judged.
    judge: Callable[[str, str], Verdict] | None = None
    #: Placeholders to swap (TLS, bound hosts) or to refuse (elsewhere); None: the sandbox has no secrets.
    secrets: SecretTable | None = None
    #: Called once at most, with the sentence that the program sees too: for the log and ``result.denied``.
    refused: Callable[[str], None] = _nothing
    #: Called with (method, path) of each request that is forwarded: for the log.
    seen: Callable[[str, str], None] = _no_request
    #: Whether rules about methods or paths apply here now: then what a server could read otherwise is refused unasked.
    strict: Callable[[], bool] = _yes
    #: The headers that a request gets which is sent now, in place of those of the program; may refuse it.
    headers: Callable[[], Sequence[tuple[bytes, bytes]]] = _no_headers
