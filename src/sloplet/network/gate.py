"""What a program's first bytes decide: whether they may leave, and who goes on with the connection.

Judged by name, a connection must go where its name says: TLS has to name that server, HTTP that host on every request.
The server's bytes flow meanwhile, so who speaks first does not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .channel import Refused
from .sniff import Broken, Http, Opaque, Tls, sniff

if TYPE_CHECKING:
    from .connection import Connection
    from .needles import Scanner


class Gate:
    """``relay.Outward`` of a connection that was judged by name."""

    def __init__(self, connection: Connection, scanner: Scanner | None) -> None:
        self.done = False
        self._connection = connection
        self._scanner = scanner
        self._held = b""
        self._opaque = False

    def feed(self, data: bytes) -> bytes:
        if self._opaque:
            assert self._scanner is not None
            return self._scanner.feed(data)
        self._held += data
        found = sniff(self._held)
        if found is None:
            return b""
        held, self._held = self._held, b""
        return self._decide(found, held)

    def _decide(self, found: Tls | Http | Opaque | Broken, held: bytes) -> bytes:
        connection = self._connection
        if isinstance(found, Broken):
            raise Refused(found.reason)
        if isinstance(found, Http):
            connection.go_on_http(held)
            return b""
        if isinstance(found, Tls):
            if connection.inspected:
                connection.go_on_tls(held)
                return b""
            connection.saw("tls")
            check_server_name(found, connection.target.name)
            self.done = True
            return held
        connection.saw("tcp")
        if connection.needs_requests:
            raise Refused(
                f"the rules for {connection.target.name} are about requests, and this is not HTTP: ask for a rule "
                "without methods and paths"
            )
        if self._scanner is None:
            self.done = True
            return held
        self._opaque = True
        return self._scanner.feed(held)

    def end(self) -> bytes:
        if self._held:
            raise Refused("the program ended before it could be seen what it speaks")
        return b""


class Scan:
    """``relay.Outward`` of a connection that was judged by address: only placeholders are looked for."""

    done = False

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner

    def feed(self, data: bytes) -> bytes:
        return self._scanner.feed(data)

    def end(self) -> bytes:
        return b""


def check_server_name(hello: Tls, name: str) -> None:
    """Refused unless TLS is for the name that was judged."""
    if hello.server_name is None:
        raise Refused(f"TLS to {name} must name its server, and this connection does not")
    if hello.server_name != name:
        raise Refused(f"TLS names the server {hello.server_name}, and the connection was made to {name}")
    if hello.ech:
        raise Refused(f"TLS to {name} hides the name of its server (ECH)")
