"""Who visits a server inside an E2B sandbox: by its public host, ``{port}-{id}.DOMAIN``, or by headers that name it.

Every port of such a sandbox has a name from the start, which is anybody's unless the sandbox was made otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..caller import Caller
from ..names.parts import Headers, Place, values
from ..names.wires import Refusal, Way
from ..served import ACTING
from .records import Record

if TYPE_CHECKING:
    from .door import Facade

ENVD_PORT, CODE_PORT = 49983, 49999
OWN_PORTS = frozenset((ENVD_PORT, CODE_PORT))  #: the facade's own, whatever listens there inside
TOKEN_HEADER = b"e2b-traffic-access-token"
_ENVD_HEADER = b"x-access-token"
_HIDDEN = (TOKEN_HEADER, b"e2b-sandbox-id", b"e2b-sandbox-port")
_PATIENCE = 1.0  # seconds that a server may take until it listens: programs ask as soon as they have started one
_GONE = frozenset(("SandboxDead", "SandboxNotFound", "SandboxPaused", "KeeperError"))


class Guests:
    def __init__(self, facade: Facade) -> None:
        self._facade = facade

    def find(self, place: Place, *, must: bool = False) -> Guest | None:
        """Of who comes to that port. None: the sandbox is none of E2B's. Refusal if it was one, or ``must`` be."""
        record = self._facade.records.find(place.sandbox)
        if record is not None:
            return Guest(self._facade, record, place)
        if must or self._facade.records.was(place.sandbox):
            raise gone(place.sandbox[:80])
        return None


class Guest:
    """One visit."""

    def __init__(self, facade: Facade, record: Record, place: Place) -> None:
        self._facade, self._record, self._place = facade, record, place
        self.host = record.mask_host.replace("${PORT}", str(place.port))  #: what servers inside see; "": the visitor's
        self.way = Way(
            record.tenant, place, wake=self._wake, patience=_PATIENCE, secure=place.port in record.https_ports
        )

    def check(self, headers: Headers) -> None:
        """Refusal (403) for who may not; before it is told whether anything is there."""
        if self._place.port in OWN_PORTS:
            raise self._closed()
        if self._record.public:
            return
        shown = [value.decode("latin-1") for value in values(headers, TOKEN_HEADER)]
        if len(shown) != 1 or not self._facade.tokens.opens("traffic", self._record.sandbox, shown[0]):
            raise self._refusal(403, "this sandbox needs its token, in the header e2b-traffic-access-token")

    def hidden(self, headers: Headers) -> list[bytes]:
        """Headers that are none of the sandbox's business. Its own token for files and commands could be sent here by
        mistake; a header of that name that holds something else is the visitor's."""
        shown = [value.decode("latin-1") for value in values(headers, _ENVD_HEADER)]
        ours = any(self._facade.tokens.opens("envd", self._record.sandbox, each) for each in shown)
        return [*_HIDDEN, *([_ENVD_HEADER] if ours else [])]

    async def _wake(self) -> None:
        facade, record = self._facade, self._record
        key = facade.server.keys.current(record.key)
        if not record.auto_resume or key is None:
            raise gone(record.sandbox)
        ACTING.set(key)
        await facade.visited(record, Caller(key, facade.server.tenants.get(record.tenant), "", "", ""))

    def gone(self) -> Refusal:
        """There is no such sandbox any more."""
        self._facade.forget(self._record.sandbox)
        return gone(self._record.sandbox)

    def told(self, refusal: Refusal) -> Refusal:
        """A refusal as E2B's programs read it."""
        if refusal.document is not None:
            return refusal
        if refusal.error in _GONE:
            return gone(self._record.sandbox)
        if refusal.error == "PortUnavailable":
            return self._closed()
        return self._refusal(refusal.status, refusal.message)

    def _closed(self) -> Refusal:
        return self._refusal(502, "The sandbox is running but port is not open", title="Closed Port Error")

    def _refusal(self, status: int, message: str, *, title: str = "") -> Refusal:
        document = {"sandboxId": self._record.sandbox, "message": message, "port": self._place.port, "code": status}
        return Refusal(status, message, document=document, title=title)


def gone(sandbox: str) -> Refusal:
    message = "The sandbox was not found"
    document: dict[str, object] = {"sandboxId": sandbox, "message": message, "code": 502}
    return Refusal(502, message, error="SandboxNotFound", document=document, title="Sandbox Not Found")
