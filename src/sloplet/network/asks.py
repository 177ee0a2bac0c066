"""Questions about what no rule decides: put to whoever listens, answered once for all who wait for the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import SpecError

#: once: this connection; always: and a rule for the future; no: not this time; never: and a rule for the future
ANSWERS = ("once", "always", "no", "never")
PATIENCE = 60.0
_MOST = 64  # questions that wait at the same time


@dataclass(frozen=True)
class Ask:
    """May the sandbox connect there?"""

    id: int
    sandbox: str
    name: str  #: "" if it is about an address
    address: str
    port: int
    reason: str  #: why no rule decided

    @property
    def target(self) -> str:
        """What a rule for exactly this would be."""
        host = self.name or (f"[{self.address}]" if ":" in self.address else self.address)
        return f"{host}:{self.port}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Ask:
        return Ask(**data)


class _Asker:
    def __init__(self) -> None:
        self.queue: list[Ask] = []
        self.changed = asyncio.Event()


class Asks:
    """One per sandbox."""

    def __init__(self, sandbox: str, *, patience: float = PATIENCE) -> None:
        self._sandbox = sandbox
        self._patience = patience
        self._next = 1
        self._askers: list[_Asker] = []
        self._waiting: dict[tuple[str, str, int], tuple[Ask, asyncio.Future[str]]] = {}
        self._patients: dict[asyncio.Future[str], int] = {}  # how many wait for it
        self._closed = False

    @property
    def pending(self) -> list[Ask]:
        return [ask for ask, _ in self._waiting.values()]

    async def decide(self, name: str, address: str, port: int, reason: str) -> tuple[str, str]:
        """(answer, why): one of ANSWERS. "no" if nobody is there to ask, or nobody answers."""
        key = (name, "" if name else address, port)
        if key in self._waiting:
            _, future = self._waiting[key]
        else:
            if not self._askers or self._closed:
                return "no", "nobody is there to be asked"
            if len(self._waiting) >= _MOST:
                return "no", "too many questions wait for an answer"
            future = asyncio.get_running_loop().create_future()
            ask = Ask(self._next, self._sandbox, name, address, port, reason)
            self._next += 1
            self._waiting[key] = (ask, future)
            for asker in self._askers:
                if len(asker.queue) >= _MOST:  # of these some are not asked any more
                    asker.queue[:] = [each for each in asker.queue if each in self.pending]
                asker.queue.append(ask)
                asker.changed.set()
        self._patients[future] = self._patients.get(future, 0) + 1
        try:
            async with asyncio.timeout(self._patience):
                answer = await asyncio.shield(future)
        except TimeoutError:
            self._settle(key, future, "")
            return "no", f"nobody answered within {self._patience:g} s"
        finally:
            self._patients[future] -= 1
            if not self._patients[future]:  # who asked has given up: nobody needs to be bothered
                del self._patients[future]
                self._settle(key, future, "")
        return (answer, "") if answer else ("no", "nobody is there any more to be asked")

    def answer(self, ask_id: int, answer: str) -> bool:
        """False if it does not wait any more."""
        if answer not in ANSWERS:
            raise SpecError(f"{str(answer)[:80]!r} is not an answer", hint=f"one of {', '.join(ANSWERS)}")
        for key, (ask, future) in list(self._waiting.items()):
            if ask.id == ask_id:
                self._settle(key, future, answer)
                return True
        return False

    def _settle(self, key: tuple[str, str, int], future: asyncio.Future[str], answer: str) -> None:
        if self._waiting.get(key, (None, None))[1] is future:
            del self._waiting[key]
        if not future.done():
            future.set_result(answer)

    def listen(self) -> AsyncIterator[Ask]:
        """Questions from this call on, and those that wait now. While anybody listens, questions are put."""
        asker = _Asker()
        asker.queue += self.pending
        if asker.queue:
            asker.changed.set()
        self._askers.append(asker)
        return self._drain(asker)

    async def _drain(self, asker: _Asker) -> AsyncIterator[Ask]:
        try:
            while not self._closed:
                while asker.queue:
                    ask = asker.queue.pop(0)
                    if any(ask is waiting for waiting, _ in self._waiting.values()):
                        yield ask
                if not self._closed:
                    await asker.changed.wait()
                    asker.changed.clear()
        finally:
            self._leave(asker)

    def _leave(self, asker: _Asker) -> None:
        if asker in self._askers:
            self._askers.remove(asker)
        if not self._askers:
            self._give_up()

    def _give_up(self) -> None:
        for key, (_, future) in list(self._waiting.items()):
            self._settle(key, future, "")

    def close(self) -> None:
        """The sandbox is gone: whoever listens is let go."""
        self._closed = True
        self._give_up()
        for asker in self._askers:
            asker.changed.set()
