"""What a sandbox has reached, as the smallest policy that allows it."""

from __future__ import annotations

from . import addresses, names

_MOST = 10_000
_ALL = ""  # no rule about requests has narrowed what was done there


class Learned:
    """Names and addresses that were connected to, with their ports. Bounded; ``full`` says that some are missing."""

    def __init__(self) -> None:
        self.full = False
        self._found: dict[str, dict[int, set[str]]] = {}  # host -> port -> the rules about requests that let it through
        self._count = 0

    def add(self, name: str, address: str, port: int, rule: str = _ALL) -> None:
        """One that was allowed, and answered. ``rule``: the one about methods and paths that allowed it, which is less
        than name and port. An address that a rule by name alone would not open is noted too."""
        if name:
            self._note(name, port, rule)
        parsed = addresses.parse(address)
        if name != names.HOST and (not name or parsed is None or addresses.special(parsed) is not None):
            self._note(_written(address), port, _ALL)

    def _note(self, host: str, port: int, rule: str) -> None:
        if rule in self._found.get(host, {}).get(port, ()):
            return
        if self._count >= _MOST:
            self.full = True
            return
        self._count += 1
        self._found.setdefault(host, {}).setdefault(port, set()).add(rule)

    def allow(self) -> tuple[str, ...]:
        """The rules, sorted. Ports are named, also the usual ones: what was not used is not allowed."""
        rules: set[str] = set()
        for host, ports in self._found.items():
            whole = sorted(port for port, by in ports.items() if _ALL in by)
            if whole:
                rules.add(f"{host}:{','.join(str(port) for port in whole)}")
            for by in ports.values():
                rules |= by if _ALL not in by else set()
        return tuple(sorted(rules))


def _written(address: str) -> str:
    return f"[{address}]" if ":" in address else address
