"""One SSH connection: who it is, which sandbox it is about, and what may be opened on it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import asyncssh

from ...controller import Stream
from ...errors import SandboxNotFound, SlopletError
from ...sandbox import AsyncSandbox
from ...wire.fields import Fields
from ...wire.streams import HostStream
from ..keys import Key
from ..problems import without_paths
from ..served import ACTING, PROGRAM, Program
from .ahead import Ahead
from .forward import INSIDE, Forward, dial
from .session import Environment, Session

if TYPE_CHECKING:
    from asyncssh import SSHKey, SSHServerChannel, SSHServerConnection, SSHTCPSession

    from .service import SshService

MOST_SESSIONS = 10  #: shells, commands and SFTPs of one connection at a time
MOST_FORWARDS, MOST_FORWARDS_OF_KEY = 64, 256  #: ports inside: of one connection, and of all that a key has
MOST_TRIES = 20  #: public keys that are offered: an agent may hold many
_WINDOW = 1 << 20  # bytes that a channel may send before it is read


class Visitor(asyncssh.SSHServer):
    """``key`` is the server's key that the client's stands for; None until it has shown one."""

    def __init__(self, service: SshService) -> None:
        self._service = service
        self.key: Key | None = None
        self.fingerprint = ""
        self.address = ""
        self.client = f"ssh-{secrets.token_hex(8)}"
        self.conn: SSHServerConnection | None = None
        self.sessions: set[Session] = set()
        self._forwards: set[HostStream] = set()
        self._opening = 0
        self._tries = 0
        self._box: AsyncSandbox | None = None
        self._name = ""

    # -- coming and going --------------------------------------------------------------

    def connection_made(self, conn: SSHServerConnection) -> None:
        self.conn = conn
        self.address = str((conn.get_extra_info("peername") or ("",))[0])
        if not self._service.came(self):
            conn.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._service.went(self) and self._tries and self._service.server.limits.worth_telling():
            self.key = None
            self.audit("ssh.login", "")(verdict="refused", error="KeyRefused")
        for stream in self._forwards:
            stream.reset()

    def begin_auth(self, username: str) -> bool:
        self._name = username
        return True  # nobody comes in without a key

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: SSHKey) -> bool:
        """Called for each key that is offered, and again for the one that has signed, last: asyncssh then checks the
        signature, so ``key`` is of the one that came in."""
        self._tries += 1
        if self._tries > MOST_TRIES:
            raise asyncssh.DisconnectError(
                asyncssh.DISC_NO_MORE_AUTH_METHODS_AVAILABLE, "too many keys were offered", "en"
            )
        found = self._service.keys.find(key.get_fingerprint())
        self.key = None if found is None else self._service.server.keys.current(found.key)
        self.fingerprint = "" if found is None else found.fingerprint
        self._name = username
        return self.key is not None

    def auth_completed(self) -> None:
        assert self.key is not None
        if self._service.logged_in(self):
            self.audit("ssh.login", "")(sandbox=self._name[:64])
        else:
            self.audit("ssh.login", "")(sandbox=self._name[:64], verdict="refused", error="ServerBusy")
            self.end("this key has too many connections at once")

    def end(self, why: str) -> None:
        if self.conn is not None:
            self.conn.disconnect(asyncssh.DISC_BY_APPLICATION, why)

    # -- what it is about --------------------------------------------------------------

    @property
    def _tenant(self) -> str:
        assert self.key is not None
        return self.key.tenant

    def _act(self) -> None:
        """What this task does from now on is done for this key, and by this program."""
        ACTING.set(self.key)
        PROGRAM.set(Program(self.client, False))

    async def box(self) -> AsyncSandbox:
        """The sandbox that the user name names. SandboxNotFound."""
        self._act()
        if self._box is None:
            if not self._name.isprintable() or len(self._name) > 64:
                raise SandboxNotFound("the user name is not the name of a sandbox")
            controller = self._service.controller(self._tenant)
            self._box = AsyncSandbox._adopt(controller, await controller.find(self._name))
            self._service.server.uses.use(self._tenant, self.client, self._box.id)
        return self._box

    @property
    def ahead(self) -> Ahead:
        assert self.key is not None
        return self._service.ahead(self.key.id)

    @property
    def forwards(self) -> int:
        return len(self._forwards) + self._opening

    async def open(self, fields: Fields) -> Stream:
        """An operation of the wire in it."""
        box = await self.box()
        return await self._service.controller(self._tenant).open(box.id, fields)

    def audit(self, action: str, detail: str) -> Callable[..., None]:
        """A function that writes a line about this connection to the audit log."""
        began = time.monotonic()

        def write(**facts: Any) -> None:
            self._service.server.audit.record(
                action, key=self.key, address=self.address, request=self.client, detail=detail,
                ms=(time.monotonic() - began) * 1000, **facts,
            )  # fmt: skip

        return write

    # -- what may be opened ------------------------------------------------------------

    def session_requested(self) -> tuple[SSHServerChannel[bytes], Session]:
        if self.key is None or self.conn is None or len(self.sessions) >= MOST_SESSIONS:
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_RESOURCE_SHORTAGE, "too many sessions")
        channel: SSHServerChannel[bytes] = self.conn.create_server_channel(None, "strict", _WINDOW)
        channel._env = Environment()  # asyncssh's own would remember whatever is sent
        session = Session(self)
        self.sessions.add(session)
        return channel, session

    def left(self, session: Session) -> None:
        self.sessions.discard(session)

    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> Awaitable[SSHTCPSession[bytes]]:
        """``ssh -L``. Never True, which would make asyncssh connect from this machine."""
        if self.key is None or dest_host.lower() not in INSIDE or not 1 <= dest_port <= 65535:
            raise asyncssh.ChannelOpenError(
                asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED, "only ports of the sandbox itself, at localhost"
            )
        if self.forwards >= MOST_FORWARDS or self._service.forwards(self.key.id) >= MOST_FORWARDS_OF_KEY:
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_RESOURCE_SHORTAGE, "too many connections")
        self._opening += 1  # now: what is returned begins only after all requests that came together were asked
        return self._forward(dest_host.lower(), dest_port)

    async def _forward(self, host: str, port: int) -> SSHTCPSession[bytes]:
        self._act()
        audit = self.audit("ssh.forward", str(port))
        try:
            box = await self.box()
            stream = await dial(self.open, host, port)
        except SlopletError as error:
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, without_paths(str(error))[:200]) from error
        finally:
            self._opening -= 1
        self._forwards.add(stream)
        audit(sandbox=box.id)
        return Forward(stream, lambda: self._forwards.discard(stream))

    def server_requested(self, listen_host: str, listen_port: int) -> bool:
        return False  # no `ssh -R`

    def unix_connection_requested(self, dest_path: str) -> bool:
        return False

    def unix_server_requested(self, listen_path: str) -> bool:
        return False

    def tun_requested(self, unit: int | None) -> bool:
        return False

    def tap_requested(self, unit: int | None) -> bool:
        return False
