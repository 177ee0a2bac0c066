"""One connection that a program inside asked for, from the question to its end: judged, dialled, relayed, logged."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ..errors import SlopletError
from ..wire.fields import Fields
from ..wire.mux import AgentStream
from . import names, reasons
from .channel import Refused
from .channels import SocketChannel, StreamChannel
from .policy import Verdict
from .relay import Relay, closing
from .target import Target
from .tie import close_socket

if TYPE_CHECKING:
    from .egress import Egress
    from .log import Decision
    from .policy import Policy

_DIALLING = 30.0  # seconds for all addresses of a name together
_TRIES = 8  # of those


class Denied(Refused):
    """Refused by a rule."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.rule = verdict.rule


class Connection:
    """It belongs to its egress, which can ``cut`` it at any time."""

    def __init__(self, egress: Egress, stream: AgentStream, target: Target) -> None:
        self.stream = stream
        self.target = target
        self.address = "" if target.name else target.address  #: the one that is dialled
        self.rule = ""
        self.protocol = "link" if target.name in egress.links else ""
        self.request = ""
        self._egress = egress
        self._asked = False  # somebody allowed this one
        self._dialled = False
        self._own = False  # it leads to this machine itself
        self._through = ""  # the proxy that it goes through
        self._learned: tuple[Policy, str] | None = None
        self._row: Decision | None = None
        self._relay: Relay | None = None
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._began = asyncio.get_running_loop().time()
        self._cut_reason = ""
        self._refusal: dict[str, str] = {}
        self._channel: StreamChannel | None = None
        self._server: SocketChannel | None = None
        self._over = False

    def start(self) -> None:
        self.stream.on_change(self._look)
        self._begin(self._run())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.ensure_future(work)
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """One that was cancelled before it had begun has done nothing, not even end."""
        if task.cancelled():
            if self._server is not None:
                self._server.close(reset=True)
            self._end(errno.ECONNABORTED)

    def _look(self) -> None:
        """While there is no relay: the program may give up, or end with its sandbox."""
        if (self.stream.was_reset or self.stream.mux.error is not None) and self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            policy = self._egress.policy
            self._socket = await self._reach(policy)
            self._dialled = True
            if self._egress.policy is not policy and not self.allowed():
                raise Refused("the policy has changed meanwhile, and does not allow it any more")
            self._allowed()
            self.stream.reply(Fields())
            self._tie(self._socket)
        except asyncio.CancelledError:  # by us: the program has given up, or it was cut
            self._end(errno.ECONNABORTED)
        except Exception as error:
            self._failed(error)

    # -- judging -------------------------------------------------------------------------

    async def _reach(self, policy: Policy) -> socket.socket:
        name = self.target.name
        if self.protocol == "link":
            return await self._reach_link(policy)
        await self._judge(policy)
        if name == names.HOST:
            return await self._dial(["127.0.0.1"], None)
        self._through = self._egress.spec.proxy
        if self._through:
            return await self._reach_by_proxy(policy)
        return await self._dial([self.target.address] if not name else await self._usable(policy), policy)

    async def _usable(self, policy: Policy) -> list[str]:
        """The addresses of its name that may be dialled."""
        name, port = self.target.name, self.target.port
        async with asyncio.timeout(_DIALLING):
            found = await self._egress.resolver.resolve(name)
        if not found:
            raise OSError(errno.ENOENT, f"there is no name {name}")
        usable, verdict = policy.check_addresses(name, port, found)
        if not usable:
            self.address = found[0]
            raise Denied(verdict)
        return usable

    async def _reach_by_proxy(self, policy: Policy) -> socket.socket:
        """The proxy resolves a name, unless where it leads to is to be judged here: then it is told that address. It
        may be near: it is not asked for this machine's own, either."""
        if self.target.name and policy.sees_addresses:
            self._take_first(await self._usable(policy), policy)
        elif self.address:
            self._take_first([self.address], policy)
        from . import socks

        async with asyncio.timeout(_DIALLING):
            return await socks.dial(self._egress, policy, self.address or self.target.name, self.target.port)

    def _take_first(self, addresses: list[str], policy: Policy) -> None:
        """Of those that are not this machine's own, or meant. Denied if none is left."""
        refusals = []
        for self.address in addresses:
            self._own = self._egress.upstream.is_own(self.address)
            if (refusal := self._own_refusal(policy)) is None:
                return
            refusals.append(refusal)
        raise Denied(refusals[0])

    async def _judge(self, policy: Policy) -> None:
        """Returns if it may go on; Refused."""
        verdict = self.target.judged(policy)
        self.rule = verdict.rule
        if verdict.allow:
            return
        if verdict.allow is None and self._egress.spec.asks:
            self.rule = await self._egress.ask(self.target, verdict.reason)
            self._asked = True
            return
        raise Denied(verdict)

    async def _reach_link(self, policy: Policy) -> socket.socket:
        """Another sandbox, by the name that a link gives it here. The link is its own rule."""
        name, port = self.target.name, self.target.port
        ref, only = self._egress.links[name]
        self.rule = f"link {name}"
        verdict = policy.judge(name, port)
        if verdict.allow is False and verdict.rule != "default":
            raise Denied(verdict)
        if only and port != only:
            raise Refused(f"the link {name} leads to port {only} only")
        self.address = ref
        async with asyncio.timeout(_DIALLING):
            return await self._egress.dial_link(ref, port)

    async def _dial(self, addresses: list[str], policy: Policy | None) -> socket.socket:
        """The first of them that answers: these very addresses were judged. With a policy: not this machine's own,
        unless that opens it."""
        failure: Exception | None = None
        try:
            async with asyncio.timeout(_DIALLING):
                for address in addresses[:_TRIES]:
                    self.address = address
                    try:
                        self._own = policy is not None and self._egress.upstream.is_own(address)
                        if policy is not None and (refusal := self._own_refusal(policy)) is not None:
                            raise Denied(refusal)
                        return await self._egress.upstream.connect(address, self.target.port)
                    except (Denied, OSError) as error:
                        failure = failure or error
                        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                            break
        except TimeoutError:
            failure = failure or OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        raise failure or OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))

    def _own_refusal(self, policy: Policy) -> Verdict | None:
        """If the address is this machine's own, and neither a rule nor whoever was asked about it means that."""
        if not self._own or (self._asked and not self.target.name):
            return None
        return policy.check_own(self.target.name, self.address, self.target.port)

    def allowed(self) -> bool:
        """Whether the policy as it is now allows what was allowed before."""
        policy, name = self._egress.policy, self.target.name
        verdict = self.target.judged(policy)
        if self.protocol == "link":
            return verdict.allow is not False or verdict.rule == "default"
        if not self._dialled:  # it will be looked at again; somebody may just be thinking about it
            return verdict.allow is not False
        if not verdict.allow and not (verdict.allow is None and self._asked):
            return False
        if self.needs_requests and self.protocol in ("tls", "tcp"):
            return False  # its requests would have to be seen
        if self.gets_headers and self.protocol == "tls":
            return False  # they would have to be opened
        if self.request and self.judge_request(*self.request.split(" ", 1)).allow is not True:
            return False  # a WebSocket, or a long answer, of a request that would be refused now
        if self._own_refusal(policy) is not None:
            return False
        if name == names.HOST:
            return True
        if self._through != self._egress.spec.proxy:
            return False
        if not name or not self.address:
            return not name or not policy.sees_addresses
        return bool(policy.check_addresses(name, self.target.port, [self.address])[0])

    @property
    def needs_requests(self) -> bool:
        """Whether rules are about requests there."""
        name, port = self.target.name, self.target.port
        return bool(name) and self._egress.policy.inspects(name, port)

    def no_requests(self, what: str) -> str:
        """Why nothing passes where ``needs_requests``: ``what`` it is instead."""
        return reasons.no_requests(what, self._egress.policy.request_rules(self.target.name, self.target.port))

    @property
    def gets_headers(self) -> bool:
        """Whether requests to there are given some."""
        name, port = self.target.name, self.target.port
        return bool(name) and self.protocol != "link" and self._egress.injected.at(name, port)

    @property
    def inspected(self) -> bool:
        """Whether TLS of it is opened."""
        return self._egress.inspects(self.target)

    def judge_request(self, method: str, path: str) -> Verdict:
        """By the policy as it is now."""
        if not self.needs_requests:
            return Verdict(True, self.rule, "")
        verdict = self._egress.policy.judge_request(self.target.name, self.target.port, method, path)
        return Verdict(True, self.rule, "") if verdict.allow is None and self._asked else verdict

    def decide_request(self, method: str, path: str) -> Verdict:
        """One that is about to be sent, or refused."""
        verdict = self.judge_request(method, path)
        if verdict.allow:
            self._learn(verdict.rule)
        return verdict

    # -- going on ------------------------------------------------------------------------

    def _allowed(self) -> None:
        egress, target = self._egress, self.target
        self._row = egress.log.add(
            target.name, self.address, target.port, "allow", rule=self.rule, protocol=self.protocol, state="open"
        )
        if self.protocol != "link":
            self._learn(self.rule)

    def _learn(self, rule: str) -> None:
        """What the rule has let through. Where requests are looked at, a rule about some of them is all that counts."""
        egress, target = self._egress, self.target
        if self._learned == (egress.policy, rule):
            return  # most requests of a connection are let through by the same
        self._learned = (egress.policy, rule)
        narrow = egress.policy.of_requests.get(rule, "") if self.needs_requests else ""
        egress.learned.add(target.name, self.address, target.port, narrow)

    def _tie(self, sock: socket.socket) -> None:
        relay = self._relay = Relay(self.stream, sock, self._egress.meter, self._ended)
        relay.outward = self._egress.gate(self)
        self._socket = None
        relay.start()

    def release(self, held: Callable[[], bytes]) -> None:
        """What was held back of the program's bytes goes out now."""
        if self._relay is not None:
            self._relay.release(held)

    def go_on_http(self, first: bytes) -> None:
        """It is plain HTTP: every request of it is looked at."""
        self.saw("http")
        self._look_into(first, tls=False)

    def go_on_tls(self, first: bytes) -> None:
        """It is TLS, to be opened."""
        self.saw("https")
        self._look_into(first, tls=True)

    def _look_into(self, first: bytes, *, tls: bool) -> None:
        assert self._relay is not None
        spoke = self._relay.bytes_in
        server = SocketChannel(self._relay.detach())
        client = StreamChannel(self.stream, self._egress.meter, first)
        client.bytes_in, self._relay, self._channel, self._server = spoke, None, client, server
        self._begin(self._serve(client, server, tls=tls, spoke=bool(spoke)))

    async def _serve(self, client: StreamChannel, server: SocketChannel, *, tls: bool, spoke: bool) -> None:
        self.stream.on_change(self._look)  # it may be the server that is waited for
        code, error = 0, None
        try:
            if tls and spoke:
                raise Refused("the server spoke before TLS had begun")
            await self._egress.look_into(self, client, server, tls=tls)
            code = errno.EACCES if client.aborted else 0
        except asyncio.CancelledError:
            code = errno.ECONNABORTED
        except Exception as failure:
            error = failure
        server.close(reset=bool(code or error))
        self._server = None
        if error is not None and not (isinstance(error, OSError) and self._row is not None):
            self._failed(error)
        else:
            self._end(code or (errno.ECONNRESET if error else 0), **self._refusal)

    def refuse(self, reason: str) -> None:
        """Who looks into it has refused it. Said before the program is told, who may end on that: its result has it."""
        self._refusal = {"verdict": "deny", "reason": reason}
        if self._row is not None:
            self._row = self._egress.log.change(self._row, **self._refusal)

    def saw(self, protocol: str, request: str = "") -> None:
        """What it turned out to be."""
        self.protocol = self.protocol or protocol
        if request:
            self.request = request

    # -- ending --------------------------------------------------------------------------

    def cut(self, reason: str) -> None:
        """It is not allowed any more: both sides see a reset."""
        self._cut_reason = self._cut_reason or reason
        if self._relay is not None and not self._relay.done:
            self._relay.cut()
        elif self._task is not None and not self._task.done():
            self._task.cancel()

    def _ended(self, relay: Relay, code: int, error: Exception | None) -> None:
        if error is not None:
            self._failed(error)
        else:
            self._end(code)

    def _failed(self, error: Exception) -> None:
        """It could not be made, or must not go on."""
        if isinstance(error, Refused):
            self._end(errno.EACCES, verdict="deny", reason=str(error), rule=getattr(error, "rule", self.rule))
        elif isinstance(error, TimeoutError):
            self._end(errno.ETIMEDOUT, verdict="fail", reason="it did not answer in time")
        elif isinstance(error, SlopletError):
            self._end(errno.EHOSTUNREACH, verdict="fail", reason=error.message)
        elif isinstance(error, OSError):
            code = error.errno or errno.EIO
            self._end(code, verdict="fail", reason=error.strerror or os.strerror(code))
        else:  # a fault of ours: nothing passes, and it is said
            self._end(errno.EIO, verdict="fail", reason=f"an error in the proxy: {type(error).__name__}")
            self._egress.report(error)

    def _end(self, code: int, **more: str) -> None:
        """The one end of it."""
        if self._over:
            return
        self._over = True
        if self._socket is not None:
            close_socket(self._socket, reset=True)
            self._socket = None
        self.stream.on_change(None)
        self.stream.close(closing(code, more.get("reason", "")))
        if self._cut_reason:
            more = {"verdict": "cut", "reason": self._cut_reason}
        self._egress.ended(self)
        self._note(more)

    def _note(self, more: dict[str, str]) -> None:
        log, target = self._egress.log, self.target
        if self._row is not None:
            log.change(self._row, state="done", **self._counters(), **more)
        elif more:
            known = {"rule": self.rule, "protocol": self.protocol, "request": self.request}
            more = {**known, **more}
            log.add(target.name, self.address, target.port, more.pop("verdict"), duration=self._age(), **more)

    def _counters(self) -> dict[str, object]:
        seen = self._relay or self._channel
        return {
            "bytes_out": seen.bytes_out if seen is not None else 0,
            "bytes_in": seen.bytes_in if seen is not None else 0,
            "duration": self._age(),
            "protocol": self.protocol,
            "request": self.request,
        }

    def _age(self) -> float:
        return round(asyncio.get_running_loop().time() - self._began, 6)

    def forget(self) -> None:
        """Only our descriptor goes, without a word to anybody."""
        for held in (self._socket, self._relay, self._server):
            if held is not None:
                os.close(held.fileno())

    def refresh(self) -> None:
        """Bring its row up to date, for somebody who looks."""
        if self._row is not None and not self._over:
            self._row = self._egress.log.note(self._row, **self._counters())
