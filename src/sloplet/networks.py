"""The networks of a runtime's sandboxes: which egress serves whom, and what of it outlives a wire.

An egress belongs to a sandbox's id: it is there from the sandbox's first start in this process to its end, through
pauses and rollbacks. The policy of the moment is in state.db too, so that one that wakes elsewhere has it; the values
of secrets are nowhere but here, in memory.
"""

from __future__ import annotations

import json
import secrets as random
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from .controller import SandboxInfo
from .engines.base import Guarantee
from .errors import PortUnavailable, SandboxError, SandboxPaused, SlopletError, SpecError
from .live import dead_error
from .netchange import NetworkChange
from .netspec import ON_DEMAND, NetworkSpec, SecretSpec, check_network
from .secretspec import new_placeholder
from .spec import SandboxSpec
from .wire.fields import Fields
from .wire.schema import Tag

if TYPE_CHECKING:
    import socket
    import ssl

    from .live import Live
    from .network.asks import Ask
    from .network.egress import Egress, Inspection
    from .network.injected import Injected
    from .network.log import Decision
    from .network.secrets import SecretTable
    from .network.upstream import Upstream
    from .runtime import Runtime

_Decisions = list["Decision"]
_DENIED = 500  # characters of a reason that a command's result tells


class _Inherited(NamedTuple):
    """What a fork begins with."""

    network: NetworkSpec
    secrets: SecretTable | None = None
    injected: Injected | None = None


class Networks:
    """One per runtime."""

    def __init__(self, runtime: Runtime, upstream: Upstream | None = None) -> None:
        self._runtime = runtime
        self._upstream = upstream
        self._egress: dict[str, Egress] = {}
        self._inherited: dict[str, _Inherited] = {}
        self._context: ssl.SSLContext | None = None

    def find(self, sandbox_id: str) -> Egress | None:
        return self._egress.get(sandbox_id)

    # -- starting ------------------------------------------------------------------------

    async def for_start(self, info: SandboxInfo, spec: SandboxSpec) -> Egress | None:
        """What serves the sandbox from its first moment; None: it has no network. ``spec``: what it runs as."""
        if spec.network.mode == "none":
            return None
        known = self._egress.get(info.id)
        return known if known is not None else await self._make(info, spec)

    async def _make(self, info: SandboxInfo, spec: SandboxSpec) -> Egress:
        from .network.egress import Egress
        from .network.log import NetworkLog, path_of
        from .network.secrets import SecretTable

        runtime, sandbox_id = self._runtime, info.id
        current, before, injected = self._inherited.pop(sandbox_id, _Inherited(spec.network))

        def prepare() -> tuple[NetworkSpec, NetworkLog, Inspection | None]:
            stored = runtime.store.network(sandbox_id)
            network = current if stored is None else NetworkSpec.from_dict(json.loads(stored))
            if stored is None and network != info.spec.network:
                runtime.store.set_network(sandbox_id, json.dumps(network.to_dict()))
            path = path_of(runtime.home.path, sandbox_id) if info.name is not None else None
            return network, NetworkLog(sandbox_id, path), self._inspection(spec)

        network, log, inspection = await runtime.on_state(prepare)
        if sandbox_id in self._egress:  # somebody else has asked for it meanwhile
            return self._egress[sandbox_id]
        egress = Egress(
            sandbox_id,
            network,
            upstream=self._world(),
            log=log,
            links={link.name: (link.ref, link.port) for link in spec.links},
            dial_link=self._dial,
            secrets=SecretTable(with_placeholders(spec).secrets, before=before) if spec.secrets else None,
            inspection=inspection,
            before=injected,
        )
        log.tell = self._tell
        egress.on_policy = lambda policy: self._keep(egress)
        egress.on_budget = lambda action: self._over_budget(sandbox_id, action)
        egress.on_failed = lambda reason: runtime.bus.emit(sandbox_id, "network.failed", reason=reason)
        self._egress[sandbox_id] = egress
        return egress

    def _inspection(self, spec: SandboxSpec) -> Inspection | None:
        if not spec.authority:
            return None
        from .network.authority import Authority, master_key
        from .network.egress import Inspection

        return Inspection(Authority(master_key(self._runtime.home.path), spec.authority), self._trust)

    def _trust(self) -> ssl.SSLContext:
        if self._context is None:
            from .network.tls import upstream_context

            self._context = upstream_context(self._world().ca_file)
        return self._context

    def _world(self) -> Upstream:
        if self._upstream is None:
            from .network.upstream import System

            self._upstream = System()
        return self._upstream

    async def _dial(self, ref: str, port: int) -> socket.socket:
        """A port of another sandbox; wakes it, but for a tenant of a server: how much of his may run is the server's to
        say, and it is not asked here."""
        runtime = self._runtime
        other = await runtime.find(ref)
        elsewhere = runtime.elsewhere if other.holder != runtime.holder else None
        if runtime.home.main is not None:
            while (live := runtime.find_live(other.id)) is not None and live.gate is not None:
                await live.gate.wait()
            if not runtime.is_awake(other.id):
                raise PortUnavailable(
                    f"the sandbox {other.name or other.id!r} sleeps, and on a server a link wakes nobody",
                    hint="wake it first: any command in it does",
                )
        return await runtime.exposed.dial(other.id, port, elsewhere)

    # -- what becomes of it ----------------------------------------------------------------

    async def inherit(self, parent: str, child: str) -> None:
        """A fork may reach what its parent may now, and has the values that its parent has."""
        egress = self._egress.get(parent)
        if egress is not None:
            known = egress.secrets.copy() if egress.secrets is not None else None
            self._inherited[child] = _Inherited(egress.spec, known, egress.injected)
            return
        stored = await self._runtime.on_state(lambda: self._runtime.store.network(parent))
        if stored is not None:
            self._inherited[child] = _Inherited(NetworkSpec.from_dict(json.loads(stored)))

    async def adopted(self, info: SandboxInfo) -> None:
        """One that was started ahead is somebody's now."""
        egress = self._egress.get(info.id)
        if egress is None:
            return
        from .network.log import path_of

        if info.name is not None:
            egress.log.keep(path_of(self._runtime.home.path, info.id))
        if egress.spec != info.spec.network:
            await self._store(egress)

    def with_values(self) -> set[str]:
        """Whose secrets, headers or proxy have values: should this process leave, they would be gone."""
        return {key for key, egress in self._egress.items() if egress.valued}

    def forget_values(self, sandbox_id: str) -> None:
        """It will not send anything any more."""
        egress = self._egress.get(sandbox_id)
        if egress is not None:
            egress.forget_values()

    def drop(self, sandbox_id: str) -> None:
        """It is gone for good, or did not come up. Idempotent."""
        self._inherited.pop(sandbox_id, None)
        egress = self._egress.pop(sandbox_id, None)
        if egress is not None:
            egress.close()

    def close(self) -> None:
        for sandbox_id in list(self._egress):
            self.drop(sandbox_id)

    def close_in_child(self) -> None:
        """After a fork the connections are the parent's: drop our copies of their sockets."""
        for egress in self._egress.values():
            egress.forget()
        self._egress.clear()

    # -- what happens in it ----------------------------------------------------------------

    def _tell(self, row: Decision) -> None:
        bus = self._runtime.bus
        if bus.wanted and row.verdict != "fail":
            kind = "network.allowed" if row.verdict == "allow" else "network.denied"
            bus.emit(
                row.sandbox, kind, name=row.name, address=row.address, port=row.port, rule=row.rule, reason=row.reason
            )

    def _keep(self, egress: Egress) -> None:
        self._runtime.background(self._store(egress))

    async def _store(self, egress: Egress) -> None:
        """What it is when it is written: whoever comes last writes the last one, in whatever order they came to it."""
        store = self._runtime.store
        await self._runtime.on_state(lambda: store.set_network(egress.sandbox, json.dumps(egress.spec.to_dict())))

    def _over_budget(self, sandbox_id: str, action: str) -> None:
        self._runtime.background(self._end_budget(sandbox_id, action))

    async def _end_budget(self, sandbox_id: str, action: str) -> None:
        """Pause or kill. Where that fails its network stays refused, which needs nobody."""
        runtime = self._runtime
        runtime.bus.emit(sandbox_id, "network.budget", action=action)
        live = runtime.find_live(sandbox_id)
        reason = "it has moved the bytes that its budget allows"
        if live is not None:  # what whoever waits for a command of it is told
            paused = SandboxPaused(f"the sandbox {live.info.name or sandbox_id} was paused: {reason}")
            live.farewell = paused if action == "pause" else dead_error(live.info, reason)
        try:
            await (runtime.pause(sandbox_id) if action == "pause" else runtime.give_up(sandbox_id, reason))
        except SlopletError as error:
            if live is not None:
                live.farewell = None
            runtime.bus.emit(sandbox_id, "network.failed", reason=f"its budget is used up, and {action}: {error}")

    # -- the Controller's part -------------------------------------------------------------

    async def of(self, sandbox_id: str) -> Egress | None:
        """To look at: also of one that sleeps, or is dead. None: it was made without a network. SandboxNotFound, also
        if another process holds it: what it may reach, and its log, are there."""
        info, spec = await self._found(sandbox_id)
        if info.holder != self._runtime.holder:
            self.drop(sandbox_id)  # what was seen of it before may be old
        return self._egress.get(sandbox_id) or await self.for_start(info, spec)

    async def _found(self, sandbox_id: str) -> tuple[SandboxInfo, SandboxSpec]:
        """Its record, and what it runs as, which may be its template's."""
        runtime = self._runtime
        live = runtime.find_live(sandbox_id)
        if live is not None:
            return live.info, live.spec
        info = await runtime.find(sandbox_id)
        if info.state != "dead" and not await runtime.timeline.asleep(sandbox_id):
            raise runtime.not_held(sandbox_id)

        def runs_as() -> SandboxSpec:
            if info.saved is not None:
                return runtime.store.snapshot(info.saved).spec
            if (stored := runtime.store.network(sandbox_id)) is None:
                return info.spec
            return replace(info.spec, network=NetworkSpec.from_dict(json.loads(stored)))

        return info, await runtime.on_state(runs_as)

    async def _ours(self, sandbox_id: str) -> Egress | None:
        """To change: of one that runs here, or sleeps and was last here. Of others what a command would be told, as
        nothing would come of it: who holds them has a network of his own."""
        runtime = self._runtime
        if runtime.held_live(sandbox_id) is None:
            if not await runtime.timeline.asleep(sandbox_id):
                raise runtime.not_held(sandbox_id)
            if (info := await runtime.find(sandbox_id)).holder != runtime.holder:
                raise SandboxError(
                    f"the sandbox {info.name or info.id} sleeps, and was held by a program ({info.holder}) that may "
                    "wake it",
                    hint="wake it first, then it is held here: `sloplet resume`",
                )
        return await self.of(sandbox_id)

    async def _networked(self, sandbox_id: str) -> Egress:
        return _there(await self._ours(sandbox_id))

    async def set(
        self, sandbox_id: str, wanted: NetworkSpec | NetworkChange, values: Mapping[str, str | None] | None = None
    ) -> NetworkSpec:
        """A policy, or a change of the one that is there: between the look at it and its being another is no await.
        ``values``: of its headers and its proxy."""
        egress = await self._networked(sandbox_id)
        network = wanted.applied(egress.spec) if isinstance(wanted, NetworkChange) else check_network(wanted)
        if network.mode == "none":
            raise SpecError("a network cannot be taken away", hint="Network() is one that reaches nothing")
        if egress.inspection is None and looks_into(network):
            raise SpecError(
                "rules with methods or paths, and headers, need TLS to be opened: the sandbox was not made for that",
                hint="make it with inspect='on-demand', inspect=True or with secrets",
            )
        egress.set(network, values=values)
        await self._store(egress)
        return network

    async def current(self, sandbox_id: str) -> NetworkSpec:
        egress = await self.of(sandbox_id)
        return NetworkSpec() if egress is None else egress.spec

    async def log(self, sandbox_id: str, after: int, limit: int) -> _Decisions:
        egress = await self.of(sandbox_id)
        if egress is None:
            return []
        egress.refresh()
        return egress.log.read(after=after, limit=limit)

    async def learned(self, sandbox_id: str) -> NetworkSpec:
        egress = _there(await self.of(sandbox_id))
        return replace(egress.spec, mode="rules", allow=egress.learned.allow(), asks=False)

    async def secrets(self, sandbox_id: str) -> tuple[SecretSpec, ...]:
        return (await self._found(sandbox_id))[1].secrets

    async def set_secrets(self, sandbox_id: str, values: Mapping[str, str | None]) -> None:
        """Those of secrets by their names, those of headers and of the proxy by the keys of ``headerspec``. All of
        them, or SpecError."""
        egress = await self._ours(sandbox_id)
        if egress is None or (egress.secrets is None and not all("@" in name for name in values)):
            raise SpecError("the sandbox was made without secrets", hint="make it with secrets={...}")
        egress.set_values(values)

    async def asks(self, sandbox_id: str) -> AsyncIterator[Ask]:
        """From the first ``anext`` on."""
        async for ask in (await self._networked(sandbox_id)).asks.listen():
            yield ask

    async def answer(self, sandbox_id: str, ask_id: int, verdict: str) -> None:
        (await self._networked(sandbox_id)).asks.answer(ask_id, verdict)

    def guarantees(self, live: Live) -> tuple[Guarantee, ...]:
        """What its engine promises, and what is decided here."""
        egress = live.egress
        if egress is None:
            return live.instance.guarantees
        value = {"learn": "learning: whatever is public"}.get(egress.spec.mode, "by policy")
        added = [Guarantee("network", True, "no device; every connection is decided by its holder, by name", value)]
        if egress.failed:
            added = [Guarantee("network", True, f"the proxy has failed: {egress.failed}", "nothing passes any more")]
        if egress.inspection is not None:
            how = "TLS is opened with a certificate authority of its own"
            if live.distrust:
                how += f", which programs inside may not trust: {live.distrust}"
            value = "TLS, where something needs it" if egress.spec.inspect == ON_DEMAND else "TLS"
            added.append(Guarantee("inspection", True, how, value))
        if egress.log.lost:
            added.append(Guarantee("network log", False, "its file could not be written, and lacks some decisions"))
        kept = (item for item in live.instance.guarantees if item.control != "network")
        return (*kept, *added)


def _there(egress: Egress | None) -> Egress:
    if egress is None:
        raise SpecError(
            "the sandbox was made without a network",
            hint="make it with network=Network(...); Network() is: nothing",
        )
    return egress


def with_placeholders(spec: SandboxSpec) -> SandboxSpec:
    """The same, with a placeholder for each secret that has none yet. Not in the sandbox's record, where settings are
    compared: in what it runs as, and so in whatever is saved of it."""
    if all(secret.placeholder for secret in spec.secrets):
        return spec
    made = (replace(one, placeholder=one.placeholder or new_placeholder(one.name)) for one in spec.secrets)
    return replace(spec, secrets=tuple(made))


def with_authority(spec: SandboxSpec) -> SandboxSpec:
    """The same, with the id of a certificate authority if TLS is to be opened and it has none yet."""
    if spec.network.mode == "none" or spec.authority:
        return spec
    if not (spec.secrets or looks_into(spec.network)):
        return spec
    return replace(spec, authority=random.token_hex(16))


def looks_into(network: NetworkSpec) -> bool:
    """Whether TLS is to be opened, or may come to be."""
    if network.mode == "none":
        return False
    from .network.presets import expand

    rules = [*expand(network.allow), *expand(network.deny, deny=True)]
    return bool(network.inspect or network.headers) or any(rule.of_requests for rule in rules)


def with_denied(result: Fields, reasons: list[str]) -> Fields:
    """What the agent says of refusals is not believed: only what was refused here."""
    fields = Fields(*((tag, value) for tag, value in result if tag is not Tag.DENIED))
    for reason in reasons:
        fields.add(Tag.DENIED, reason[:_DENIED])
    return fields
