"""What a sandbox has reached, as the smallest policy that allows it."""

from __future__ import annotations

from . import addresses, names

_DEFAULT = frozenset({80, 443})
_MOST = 10_000


class Learned:
    """Names and addresses that were connected to, with their ports. Bounded; ``full`` says that some are missing."""

    def __init__(self) -> None:
        self.full = False
        self._ports: dict[str, set[int]] = {}
        self._count = 0

    def add(self, name: str, address: str, port: int) -> None:
        """One that was allowed, and answered. An address that a rule by name alone would not open is noted too."""
        if name:
            self._note(name, port)
        parsed = addresses.parse(address)
        if name != names.HOST and (not name or parsed is None or addresses.special(parsed) is not None):
            self._note(_written(address), port)

    def _note(self, host: str, port: int) -> None:
        ports = self._ports.get(host)
        if ports is not None and port in ports:
            return
        if self._count >= _MOST:
            self.full = True
            return
        self._count += 1
        self._ports.setdefault(host, set()).add(port)

    def allow(self) -> tuple[str, ...]:
        """The rules, sorted."""
        rules = []
        for host, ports in self._ports.items():
            implied = frozenset() if host == names.HOST else _DEFAULT  # the host's own ports are always named
            others = sorted(ports - implied)
            if ports & implied:
                rules.append(host)
            if others:
                rules.append(f"{host}:{','.join(str(port) for port in others)}")
        return tuple(sorted(rules))


def _written(address: str) -> str:
    return f"[{address}]" if ":" in address else address
