"""All that leaves a sandbox: one object per sandbox id, whatever wire it has just now.

It holds the policy as it is now, the log, the limits, the questions and the secrets, and serves the streams that the
agent opens. It outlives pauses and rollbacks of the sandbox in the same holder. Whatever goes wrong in it ends in no
connection: one that fails is closed, and if the whole fails (``fail``) all are, and nothing passes any more.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import ProtocolError
from ..netspec import NetworkSpec, check_openable
from ..wire.fields import Fields
from ..wire.mux import AgentStream
from ..wire.schema import Op, ResolveFlag, Tag
from . import names, reasons
from .asks import Asks
from .channel import Refused
from .channels import SocketChannel, StreamChannel
from .connection import Connection
from .crowd import Crowd
from .gate import Gate, Scan
from .hosts import Host, parse_host
from .injected import Injected
from .learn import Learned
from .limits import Meter
from .log import NetworkLog
from .policy import Policy
from .presets import policy_of
from .relay import Outward, closing
from .resolving import Resolver
from .target import Target
from .upstream import Upstream

if TYPE_CHECKING:
    import ssl

    from .authority import Authority
    from .secrets import SecretTable

Links = Mapping[str, tuple[str, int]]  # name inside -> the other sandbox, its port or 0
_Handler = Callable[[AgentStream], Awaitable[None]]


@dataclass
class Inspection:
    """What opening TLS takes."""

    authority: Authority
    trust: Callable[[], ssl.SSLContext]


class Egress:
    """See the module. The callbacks are the holder's: ``on_policy`` when an answer has changed the policy,
    ``on_budget`` when the budget is used up ("pause", "kill"), ``on_failed`` when nothing passes any more."""

    def __init__(
        self,
        sandbox: str,
        spec: NetworkSpec,
        *,
        upstream: Upstream,
        log: NetworkLog,
        links: Links | None = None,
        dial_link: Callable[[str, int], Awaitable[socket.socket]] | None = None,
        secrets: SecretTable | None = None,
        inspection: Inspection | None = None,
        before: Injected | None = None,
    ) -> None:
        self.sandbox = sandbox
        self.spec = spec
        self.policy, self._certain, self._passthrough = _read(spec)
        self.upstream = upstream
        self.log = log
        self.links = dict(links or {})
        self.secrets = secrets
        self.inspection = inspection
        self.injected = Injected(spec, before)
        self.resolver = Resolver(upstream)
        self.meter = Meter(self._spent)
        self.asks = Asks(sandbox)
        self.learned = Learned()
        self.failed = ""  #: why nothing passes any more
        self.on_policy: Callable[[NetworkSpec], None] | None = None
        self.on_budget: Callable[[str], None] | None = None
        self.on_failed: Callable[[str], None] | None = None
        self._dial_link = dial_link
        self._connections: set[Connection] = set()
        self._crowd = Crowd(self._admit, self._refuse)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._limit()

    # -- serving -------------------------------------------------------------------------

    def accept(self, stream: AgentStream) -> None:
        """Serve a stream of the agent's. Never raises."""
        try:
            if self.failed or self._closed:
                stream.close(closing(errno.EIO, self.failed))
                return
            op = stream.request.integer(Tag.OP)
            if op == Op.CONNECT:
                self._connect(stream)
            elif op == Op.RESOLVE:
                self._resolve(stream)
            else:
                stream.close(closing(errno.ENOSYS))
        except (ValueError, ProtocolError) as error:  # nonsense from inside is nobody's fault here
            self.log.add("", "", 0, "deny", reason=f"the sandbox asked for nonsense: {error}")
            stream.close(closing(errno.EINVAL))
        except Exception as error:
            stream.close(closing(errno.EIO))
            self.report(error)
            self.fail(f"an error in the proxy: {type(error).__name__}")

    def _connect(self, stream: AgentStream) -> None:
        target = Target.read(stream.request)
        if self.meter.spent:
            self._refuse(stream, target)
        elif self.meter.full:
            self._crowd.wait(stream, target)
        else:
            self._admit(stream, target)

    def _refuse(self, stream: AgentStream, target: Target) -> None:
        why = self.failed or self.meter.refuses() or "the sandbox's network has ended"
        address = "" if target.name else target.address
        self.log.add(target.name, address, target.port, "deny", rule="limits", reason=why)
        stream.close(closing(errno.EACCES, why))

    def _admit(self, stream: AgentStream, target: Target) -> None:
        connection = Connection(self, stream, target)
        self._connections.add(connection)
        self.meter.connections = len(self._connections)
        connection.start()

    def ended(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self.meter.connections = len(self._connections)
            self._crowd.move_up(self._has_room)

    def _has_room(self) -> bool:
        return not (self.meter.full or self.meter.spent or self.failed or self._closed)

    def gate(self, connection: Connection) -> Outward | None:
        """Who looks at what the program sends first."""
        scanner = self.secrets.scan() if self.secrets is not None else None
        if connection.target.name and connection.protocol != "link":
            return Gate(connection, scanner)
        return None if scanner is None else Scan(scanner)

    def inspects(self, target: Target) -> bool:
        """Whether TLS to there is opened."""
        if self.inspection is None or not target.name or target.name in self.links:
            return False
        wanted = self.secrets is not None or self.spec.inspect is True or self.injected.at(target.name, target.port)
        wanted = wanted or self.policy.inspects(target.name, target.port)
        return wanted and not any(host.matches(target.name, target.port) for host in self._passthrough)

    async def look_into(
        self, connection: Connection, client: StreamChannel, server: SocketChannel, *, tls: bool
    ) -> None:
        """Serve one whose requests are to be seen."""
        from .guard import Guard
        from .inspect import check_http, inspect_tls

        guard = Guard(
            connection.target.name,
            connection.target.port,
            connection.decide_request,
            self.secrets,
            connection.refuse,
            lambda method, path: connection.saw("", f"{method} {path}"),
            strict=lambda: connection.needs_requests,
            headers=lambda: self.injected.fields(connection.target.name, connection.target.port),
        )
        if not tls:
            await check_http(client, server, guard)
            return
        assert self.inspection is not None

        async def dial() -> SocketChannel:
            return server

        await inspect_tls(client, dial, guard, self.inspection.authority, self.inspection.trust())

    async def dial_link(self, ref: str, port: int) -> socket.socket:
        if self._dial_link is None:
            raise OSError(errno.EHOSTUNREACH, "there are no links here")
        return await self._dial_link(ref, port)

    # -- names ---------------------------------------------------------------------------

    def _resolve(self, stream: AgentStream) -> None:
        """Is there such a name? Only one that could be reached is asked for: a question leaves the host too."""
        try:
            name = Target.name_of(stream.request)
        except ValueError:
            stream.close(closing(errno.ENOENT))
            return
        if stream.request.integer(Tag.FLAGS, 0) & ResolveFlag.FULL:
            self.log.add(name, "", 53, "deny", rule="limits", protocol="dns", reason=reasons.too_many_names(name))
            stream.close(closing(errno.EAGAIN))
            return
        ours = name in self.links or name == names.HOST or (self.spec.proxy and not self.policy.sees_addresses)
        if not name or ours or not self._certain.may_resolve(name):
            stream.close(Fields())
            return
        task = asyncio.ensure_future(self._answer(stream, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, stream: AgentStream, name: str) -> None:
        try:
            found = await self.resolver.resolve(name)
        except OSError as error:
            self.log.add(name, "", 53, "fail", protocol="dns", reason=error.strerror or str(error))
            stream.close(closing(errno.EAGAIN))
        except asyncio.CancelledError:
            stream.close(closing(errno.EAGAIN))
            raise
        except Exception as error:
            stream.close(closing(errno.EAGAIN))
            self.report(error)
        else:
            if not found:
                self.log.add(name, "", 53, "fail", protocol="dns", reason=f"there is no name {name}")
            stream.close(Fields() if found else closing(errno.ENOENT))

    # -- deciding ------------------------------------------------------------------------

    def set(
        self,
        spec: NetworkSpec,
        why: str = "the policy has changed, and does not allow it any more",
        values: Mapping[str, str | None] | None = None,
    ) -> None:
        """Another policy, at once. SpecError: and nothing has changed. ``why``: what is told of those that are cut.
        ``values``: of its headers and its proxy; those that are known stay."""
        check_openable(spec, () if self.secrets is None else self.secrets.specs, self.links)
        injected = self.injected.under(spec)
        if values:
            injected.check(values, () if self.secrets is None else self.secrets.placeholders.values())
            injected.set(values)
        self.policy, self._certain, self._passthrough = _read(spec)
        self.spec, self.injected = spec, injected
        self.resolver.forget()
        self._limit()
        for connection in list(self._connections):
            if not connection.allowed():
                connection.cut(why)

    def set_values(self, values: Mapping[str, str | None]) -> None:
        """Of secrets, headers and the proxy. SpecError: and nothing has changed."""
        injected = {key: value for key, value in values.items() if "@" in key}
        self.injected.check(injected, () if self.secrets is None else self.secrets.placeholders.values())
        if self.secrets is not None:
            self.secrets.set({key: value for key, value in values.items() if key not in injected})
        self.injected.set(injected)

    @property
    def valued(self) -> bool:
        """Whether there is a value now of anything, that nobody else has."""
        return bool(self.injected.values() or (self.secrets is not None and self.secrets.values()))

    def forget_values(self) -> None:
        self.injected.clear()
        if self.secrets is not None:
            self.secrets.clear()

    def _limit(self) -> None:
        self.meter.set(self.spec.connections, self.spec.bandwidth, self.spec.budget)
        self._crowd.move_up(self._has_room)

    async def ask(self, target: Target, reason: str) -> str:
        """What allows it: somebody's answer, or the rule that it has become. Refused."""
        answer, why = await self.asks.decide(target.name, target.address, target.port, reason)
        if answer in ("always", "never"):
            self._remember(target, answer)
        if answer in ("once", "always"):
            return target.rule() if answer == "always" else "asked"
        raise Refused(f"{reason}; {why or 'it was asked for, and refused'}")

    def _remember(self, target: Target, answer: str) -> None:
        rule, spec = target.rule(), self.spec
        known = spec.allow if answer == "always" else spec.deny
        if rule in known:
            return  # others waited for the same answer
        rules = tuple(sorted({*known, rule}))
        spec = replace(spec, allow=rules) if answer == "always" else replace(spec, deny=rules)
        self.set(spec, f"{target.rule()} was asked for, and the answer was: {answer}")
        if self.on_policy is not None:
            self.on_policy(spec)

    def _spent(self) -> None:
        self._cut_all(f"the sandbox has moved the {self.spec.budget} bytes that its budget allows")
        if self.spec.on_budget != "refuse" and self.on_budget is not None:
            self.on_budget(self.spec.on_budget)

    def refresh(self) -> None:
        """Bring the log's rows of open connections up to date."""
        for connection in self._connections:
            connection.refresh()

    @property
    def open(self) -> int:
        """How many connections there are, also those that are being made."""
        return len(self._connections)

    # -- ending --------------------------------------------------------------------------

    def report(self, error: Exception) -> None:
        """An error of ours, for whoever looks after this process; it has ended one connection only."""
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"sloplet: the network of {self.sandbox}", "exception": error}
        )

    def fail(self, reason: str) -> None:
        """It cannot be trusted any more: nothing passes from now on."""
        if self.failed or self._closed:
            return
        self.failed = reason
        if self.on_failed is not None:
            self.on_failed(reason)
        self._cut_all(f"the proxy has failed: {reason}")

    def _cut_all(self, reason: str) -> None:
        """Every one of them, whatever is broken."""
        self._crowd.close()
        for connection in list(self._connections):
            try:
                connection.cut(reason)
            except Exception as error:
                self.report(error)

    def forget(self) -> None:
        """In a forked child, without a loop: only the descriptors go."""
        self._closed = True
        for connection in self._connections:
            connection.forget()

    def close(self) -> None:
        """The sandbox is gone for good. Idempotent."""
        self._closed = True
        self._cut_all("the sandbox has ended")
        for task in self._tasks:
            task.cancel()
        self.asks.close()
        self.meter.close()
        self.resolver.close()


def _read(spec: NetworkSpec) -> tuple[Policy, Policy, list[Host]]:
    """The policy; the same without questions (what is only asked for is not resolved before it is answered); and the
    names whose TLS is never opened."""
    policy = policy_of(spec)
    certain = policy_of(replace(spec, asks=False)) if spec.asks else policy
    return policy, certain, [parse_host(text) for text in spec.passthrough]
