"""What the hostile tests of the network share: rungs with a way out, attempts from inside, some names.

Every rung of this machine that has a network of its own is tried, gVisor too; in files that say ``EACH_MAPPING = True``
in each way of mapping users. All traffic ends in the fake internet (tests/netkit), whose judge sees each packet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hostile_kit import Target, runtime, targets
from live_kit import call, gvisor_in_use

import sloplet.testing.attempts
from netkit import Internet
from sloplet import Network, Sandbox
from sloplet.engines import registry
from sloplet.engines.base import Capabilities

ATTEMPTS = Path(sloplet.testing.attempts.__file__).read_text()
FAST_MS = 2000
GOOD, EVIL, INNER = "good.example", "evil.example", "inner.example"
GOOD_AT, EVIL_AT, INNER_AT = "5.5.5.5", "6.6.6.6", "10.1.2.3"
HELLO = f"hello from {GOOD}"


@dataclass(frozen=True)
class Rung:
    """One engine in one way of mapping users; ``target`` is None for gVisor."""

    label: str
    target: Target | None

    @property
    def can(self) -> Capabilities:
        if self.target is not None:
            return self.target.can
        return registry.load("gvisor").probe().capabilities

    @contextmanager
    def here(self) -> Iterator[None]:
        """Sandboxes with ``engine=self.name`` are of this rung; skips where it cannot run or has no way out."""
        with ExitStack() as stack:
            stack.enter_context(gvisor_in_use() if self.target is None else self.target.in_use())
            if not self.can.egress:
                pytest.skip(f"capability: {self.label} has no egress here")
            yield

    @property
    def name(self) -> str:
        return "gvisor" if self.target is None else self.target.name

    @contextmanager
    def box(self, **settings: Any) -> Iterator[Sandbox]:
        with self.here():
            made = Sandbox(**{"engine": self.name, "network": Network(), **settings})
            made.start()
            try:
                made.files.write("attempts.py", ATTEMPTS)
                yield made
            finally:
                made.kill()


def rungs(*, each_mapping: bool) -> list[Rung]:
    """Those that have a network of their own; ``each_mapping``: in each way of mapping users that there is here."""
    isolated = [target for target in targets() if target.can.private_processes]
    chosen = [target for target in isolated if each_mapping or target.facts is None]
    return [*(Rung(target.label, target) for target in chosen), Rung("gvisor", None)]


@contextmanager
def connected(internet: Internet) -> Iterator[None]:
    """Sandboxes of this process that are made in here reach that internet and no other."""
    with internet.serves(runtime()):
        yield


def furnish(internet: Internet) -> None:
    """The names that every test finds in it; it has seen nothing."""
    for each, address in ((GOOD, GOOD_AT), (EVIL, EVIL_AT), (f"*.{EVIL}", EVIL_AT), (INNER, INNER_AT)):
        internet.name(each, address)
    internet.forget()


# -- from inside ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    asked: dict[str, Any]
    error: str | None
    data: str
    ms: int
    more: dict[str, Any]

    @property
    def refused(self) -> bool:
        """It failed, and not by waiting; nothing was received, but perhaps the proxy's own words to who speaks HTTP."""
        if self.data:
            return self.data.startswith("HTTP/1.1 403 ") and "X-Sloplet-Denied: " in self.data
        return self.error not in (None, "TIMEOUT")

    def __str__(self) -> str:
        return f"{self.asked}: {self.error} {self.data[:200]!r} {self.ms} ms"


@dataclass(frozen=True)
class Tried:
    outcomes: list[Outcome]
    denied: tuple[str, ...]

    def all_refused(self) -> None:
        for outcome in self.outcomes:
            assert outcome.refused, f"not refused: {outcome}"
            assert outcome.ms < FAST_MS, f"slow: {outcome}"

    @property
    def one(self) -> Outcome:
        assert len(self.outcomes) == 1
        return self.outcomes[0]


def attempt(box: Sandbox, *asked: dict[str, Any], **options: Any) -> Tried:
    """Make attempts from inside, one after the other."""
    result = box.run(["python3", "attempts.py", json.dumps(asked)], **{"timeout": 60, **options})
    assert result.ok, f"{result.describe()}\n{result.stderr}"
    told = [json.loads(line) for line in result.stdout.splitlines()]
    outcomes = [
        Outcome(one, said.pop("error"), said.pop("data"), said.pop("ms"), said)
        for one, said in zip(asked, told, strict=True)
    ]
    assert box.run("echo alive").stdout == "alive\n"
    return Tried(outcomes, tuple(result.denied))


def tcp(to: str, port: int, *talk: tuple[str, str | None], **more: Any) -> dict[str, Any]:
    return {"way": "tcp", "to": to, "port": port, "talk": talk or [("", None)], **more}


def get(host: str, path: str = "/", method: str = "GET", *headers: str, close: bool = True) -> str:
    """The text of a request."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, *(["Connection: close"] if close else [])]
    return "\r\n".join(lines) + "\r\n\r\n"


def http(to: str, port: int = 80, *, host: str | None = None, path: str = "/", **more: Any) -> dict[str, Any]:
    return tcp(to, port, (get(host or to, path), None), **more)


def https(to: str, port: int = 443, *, sni: str | None = None, host: str | None = None, **more: Any) -> dict[str, Any]:
    return http(to, port, host=host, tls=to if sni is None else sni, **more)


def name(to: str) -> dict[str, Any]:
    return {"way": "name", "to": to}


def set_network(box: Sandbox, network: Network) -> None:
    box.network.set(network)


def decisions(box: Sandbox, **wanted: Any) -> list[Any]:
    """The lines of the sandbox's network log that are so."""
    lines = call(runtime().network_log(box.id))
    return [line for line in lines if all(getattr(line, key) == value for key, value in wanted.items())]


def files_with(top: Path, *wanted: bytes) -> list[list[str]]:
    """For each of some texts: the files below a folder that hold it."""
    found: list[list[str]] = [[] for _ in wanted]
    for folder, _, names in os.walk(top):
        for each in names:
            path = Path(folder, each)
            with suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    data = path.read_bytes()
                    for paths, text in zip(found, wanted, strict=True):
                        if text in data:
                            paths.append(str(path))
    return found
