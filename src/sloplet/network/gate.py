"""What a program's first bytes decide: whether they may leave, and who goes on with the connection.

Judged by name, a connection must go where its name says: TLS has to name that server, HTTP that host on every request.
The server's bytes flow meanwhile, so who speaks first does not matter.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from .channel import Refused
from .sniff import Broken, Http, Opaque, SecondHello, Tls, sniff

if TYPE_CHECKING:
    from .connection import Connection
    from .needles import Scanner

_PATIENCE = 0.1  # seconds that the rest is waited for of what begins like a request, or like old TLS
_TEXT = re.compile(rb"[\t-\r -~]")
_LIKE_A_METHOD = re.compile(rb"[A-Z]{1,20}(?: |\Z)")


class Gate:
    """``relay.Outward`` of a connection that was judged by name.

    Text without an end of line may be anything: a word of some protocol whose answer the program waits for, or a
    request that comes in pieces. So may a few bytes that could be the beginning of an old kind of TLS. They are let
    through (after a moment, if they begin like a request or are no text), and what follows is watched on: should it
    become a request or TLS after all, the connection is cut before the rest of it has left.
    """

    def __init__(self, connection: Connection, scanner: Scanner | None) -> None:
        self.done = False
        self._connection = connection
        self._scanner = scanner
        self._held = b""
        self._sent = b""  # of a first line that is not over, what has left already
        self._hello: SecondHello | None = None
        self._opaque = False
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, data: bytes) -> bytes:
        if self._opaque:
            return self._passed(data)
        if self._hello is not None:
            return self._after_hello(self._hello, data)
        self._held += data
        whole = self._sent + self._held
        found = sniff(whole)
        if found is None:
            return self._undecided()
        self._stop_waiting()
        held, self._held = self._held, b""
        if self._sent and isinstance(found, Http | Tls):
            what = "an HTTP request whose first line" if isinstance(found, Http) else "a TLS ClientHello which"
            raise Refused(f"it is {what} came in pieces, with pauses between them")
        return self._decide(found, held)

    def _undecided(self) -> bytes:
        if self._may_be_hello or self._connection.needs_requests:
            return b""
        if not self._sent and (_LIKE_A_METHOD.match(self._held) or not _TEXT.match(self._held)):
            self._stop_waiting()
            self._timer = asyncio.get_running_loop().call_later(_PATIENCE, self._waited)
            return b""
        return self._let_go()

    @property
    def _may_be_hello(self) -> bool:
        """Of TLS as it is spoken today, which nobody sends in pieces that mean something by themselves."""
        return (self._sent or self._held)[0] == 0x16

    def _let_go(self) -> bytes:
        self._connection.saw("tcp")
        held, self._held = self._held, b""
        self._sent += held
        return self._scanned(held)

    def _waited(self) -> None:
        self._timer = None
        if self._held:
            self._connection.release(self._let_go)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

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
            if connection.needs_requests:
                raise Refused(connection.no_requests("its TLS is not opened"))
            if connection.gets_headers:
                raise Refused(f"requests to {connection.target.name} get headers, and its TLS is not opened")
            check_server_name(found, connection.target.name)
            self._hello = SecondHello(found)
            return self._after_hello(self._hello, held)
        connection.saw("tcp")
        if connection.needs_requests:
            raise Refused(connection.no_requests("this is not HTTP; it needs rules without methods and paths"))
        self._opaque = True
        return self._passed(held)

    def _after_hello(self, hello: SecondHello, data: bytes) -> bytes:
        """A server may ask for a second ClientHello: it must name the same server."""
        why = hello.feed(data)
        if why is not None:
            raise Refused(why)
        self.done = hello.done
        return data

    def _passed(self, data: bytes) -> bytes:
        self.done = self._scanner is None
        return self._scanned(data)

    def _scanned(self, data: bytes) -> bytes:
        return data if self._scanner is None else self._scanner.feed(data)

    def end(self) -> bytes:
        self._stop_waiting()
        if not self._held:
            return b""
        if self._may_be_hello or self._connection.needs_requests:
            raise Refused("the program ended before it could be seen what it speaks")
        return self._let_go()


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
