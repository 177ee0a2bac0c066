"""``box.network``: what a sandbox may reach, what it has reached, and its secrets; and its ports. Part of
``AsyncSandbox``, over the Controller protocol. docs/network.md is the guide."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from .controller import Controller, Port, Publisher
from .errors import SandboxDead, SandboxNotFound, SlopletError, SpecError, UnsupportedOperation
from .finding import lives
from .netchange import NetworkChange
from .netspec import Network, NetworkSpec, Secret
from .network.asks import ANSWERS, Ask
from .network.log import Decision
from .secretspec import check_value

AskFunction = Callable[[Ask], "bool | str | Awaitable[bool | str]"]
_LOOK = 0.2  # seconds between looks at the log of whoever follows it
_AGAIN = 0.5  # after questions could not be listened to


class Held(Protocol):
    async def __call__(self) -> tuple[Controller, str]:
        """Who holds the sandbox, and its id; it has started then."""


class Asker:
    """Puts questions to a user's function, for as long as his sandbox object is open."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def listen(self, controller: Controller, sandbox_id: str, ask: AskFunction) -> None:
        """From now on: what is run after this call is asked about."""
        self.let_go()
        source = controller.asks(sandbox_id)
        self._task = asyncio.ensure_future(_put_questions(controller, sandbox_id, source, ask))

    def let_go(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None


class AsyncNetwork:
    """``box.network``. Decisions are made outside of the sandbox; changes hold at once."""

    def __init__(self, held: Held, asker: Asker) -> None:
        self._held = held
        self._asker = asker

    async def policy(self) -> NetworkSpec:
        """What it may reach now: as it was made, and what was changed since."""
        controller, sandbox_id = await self._held()
        return await controller.network(sandbox_id)

    async def set(
        self,
        network: Network | None = None,
        *,
        allow: Iterable[str] | None = None,
        deny: Iterable[str] | None = None,
    ) -> NetworkSpec:
        """Another policy, or other lists of rules in the one it has. Open connections that are not allowed any more are
        cut. Gives the policy as it is then."""
        if (network is None) == (allow is None and deny is None):
            raise SpecError("set() needs a policy", hint="set(Network(allow=[...])), or set(allow=[...], deny=[...])")
        controller, sandbox_id = await self._held()
        if network is not None:
            if not isinstance(network, Network):
                raise SpecError(f"{str(network)[:80]!r} is not a Network", hint="set(Network(allow=[...]))")
            await controller.set_network(sandbox_id, network.spec, network.values)
            if network.ask is not None:
                self._asker.listen(controller, sandbox_id, network.ask)
            return network.spec
        return await controller.change_network(
            sandbox_id,
            NetworkChange(
                allow=None if allow is None else _rules("allow", allow),
                deny=None if deny is None else _rules("deny", deny),
            ),
        )

    async def allow(self, *rules: str) -> NetworkSpec:
        """Allow these too, beginning now. A rule that was among the denied is taken from there."""
        return await self._change(NetworkChange(add_allow=_rules("allow", rules)))

    async def deny(self, *rules: str) -> NetworkSpec:
        """Deny these, beginning now: open connections there are cut. A rule that was among the allowed is taken from
        there."""
        return await self._change(NetworkChange(add_deny=_rules("deny", rules)))

    async def remove(self, *rules: str) -> NetworkSpec:
        """Take rules away, allowed or denied ones; what nothing else allows is cut. SpecError if there is none such."""
        return await self._change(NetworkChange(remove=_rules("deny", rules)))

    async def _change(self, change: NetworkChange) -> NetworkSpec:
        controller, sandbox_id = await self._held()
        return await controller.change_network(sandbox_id, change)

    async def log(self, *, after: int = 0, limit: int = 1000) -> list[Decision]:
        """What was decided, and what became of it, oldest first: the first ``limit`` that changed after the ``seq``
        ``after``. 10,000 are kept."""
        controller, sandbox_id = await self._held()
        return await controller.network_log(sandbox_id, after=after, limit=limit)

    async def follow(self, *, after: int | None = None) -> AsyncIterator[Decision]:
        """Decisions as they come, from now on or from after that ``seq``. A connection comes when it is decided and
        again (``state`` "done") when it has ended. Ends with the sandbox."""
        controller, sandbox_id = await self._held()
        if after is None:
            known = await controller.network_log(sandbox_id, limit=1_000_000)
            after = known[-1].seq if known else 0
        while True:
            over = not await lives(controller, sandbox_id)  # before the last look: what was written until then comes
            try:
                found = await controller.network_log(sandbox_id, after=after)
            except (SandboxDead, SandboxNotFound):
                return
            for decision in found:
                after = decision.seq
                yield decision
            if not found:
                if over:
                    return
                await asyncio.sleep(_LOOK)

    async def learned(self) -> NetworkSpec:
        """The smallest policy that allows what it has reached so far: ``Sandbox(network=...)`` takes it."""
        controller, sandbox_id = await self._held()
        return await controller.learned(sandbox_id)

    async def set_secret(self, name: str, secret: Secret | str | None) -> None:
        """Another value for one of its secrets (a rotation), at once, for commands that run too; None: forget it, and
        refuse what needs it. The hosts it may be sent to stay as they were."""
        value = await read_secret(secret) if isinstance(secret, Secret) else secret
        if value is not None and not isinstance(value, str):
            raise SpecError(f"the value of the secret {str(name)[:80]!r} is not text")
        controller, sandbox_id = await self._held()
        await controller.set_secrets(sandbox_id, {name: value})

    # -- questions ---------------------------------------------------------------------

    async def asks(self) -> AsyncIterator[Ask]:
        """What no rule decides, as it comes. While this is iterated, such connections wait (60 s at most) for
        ``answer``."""
        controller, sandbox_id = await self._held()
        async for ask in controller.asks(sandbox_id):
            yield ask

    async def answer(self, ask: Ask, verdict: bool | str) -> None:
        """``"once"`` (or True), ``"always"`` (and a rule for it), ``"no"`` (or False), ``"never"`` (and a rule)."""
        controller, sandbox_id = await self._held()
        await controller.answer(sandbox_id, ask.id, verdict_of(verdict))


def _rules(what: str, rules: Iterable[str]) -> tuple[str, ...]:
    """Of one spelling; what is no rule is said here, before anybody is asked."""
    from .network.presets import check_rule

    if isinstance(rules, str):
        raise SpecError(f"{rules[:80]!r} is not a list of rules", hint=f"write [{rules[:80]!r}]")
    return tuple(check_rule(rule, what) for rule in rules)


def verdict_of(value: object) -> str:
    """An answer in words."""
    if isinstance(value, bool):
        return "once" if value else "no"
    if value not in ANSWERS:
        raise SpecError(f"{str(value)[:80]!r} is not an answer", hint=f"True, False, or one of {', '.join(ANSWERS)}")
    return str(value)


async def _put_questions(controller: Controller, sandbox_id: str, source: AsyncIterator[Ask], ask: AskFunction) -> None:
    """Each question to the user's function, several at a time. What it raises, and nonsense, is a no."""
    answering: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                async for question in source:
                    task = asyncio.ensure_future(_answered(controller, sandbox_id, question, ask))
                    answering.add(task)
                    task.add_done_callback(answering.discard)
            except (SandboxDead, SandboxNotFound, SpecError):  # SpecError: it has no network to ask about
                return
            except SlopletError:
                pass  # its keeper was replaced
            await asyncio.sleep(_AGAIN)
            source = controller.asks(sandbox_id)
    finally:
        for task in answering:
            task.cancel()


async def _answered(controller: Controller, sandbox_id: str, question: Ask, ask: AskFunction) -> None:
    try:
        outcome: Any = ask(question) if inspect.iscoroutinefunction(ask) else await _in_a_thread(ask, question)
        if inspect.isawaitable(outcome):
            outcome = await outcome
        verdict = verdict_of(outcome)
    except Exception as error:
        verdict = "no"
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"sloplet: ask= failed, so {question.target} was refused", "exception": error}
        )
    try:
        await controller.answer(sandbox_id, question.id, verdict)
    except SlopletError:
        pass  # nobody waits for it any more


async def _in_a_thread(ask: AskFunction, question: Ask) -> Any:
    """A plain function may wait for a person: not on the loop, not in a thread that others wait for, and not so that
    the process could not end."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Any] = loop.create_future()

    def settle(outcome: Any, error: BaseException | None) -> None:
        if answered.done():
            return
        if error is None:
            answered.set_result(outcome)
        else:
            answered.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def work() -> None:
        outcome, error = None, None
        try:
            outcome = ask(question)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome, error)

    threading.Thread(target=work, name="sloplet-ask", daemon=True).start()
    return await answered


class AsyncPorts:
    """What ``AsyncSandbox`` lets this machine reach of itself."""

    async def _holder(self) -> tuple[Controller, str]:
        """Who holds it, and its id; it has started then."""
        raise NotImplementedError

    async def url(self, port: int, *, host_port: int = 0) -> str:
        """``http://127.0.0.1:PORT`` for a server inside on ``port``, listened on from the first call on. Works while it
        sleeps, and wakes it; for HTTP, WebSocket and any other TCP."""
        return (await self.expose(port, host_port=host_port)).url

    async def expose(self, port: int, *, host_port: int = 0, address: str = "127.0.0.1") -> Port:
        """Listen on this machine for a port inside. ``host_port`` 0: any that is free, the same on every call.
        ``address``: who may connect; "0.0.0.0" is everybody who can reach this machine. PortUnavailable."""
        controller, sandbox_id = await self._holder()
        return await controller.expose(sandbox_id, port, host_port=host_port, address=address)

    async def public_url(self, port: int, *, public: bool = False) -> str:
        """A URL by which a server inside can be reached from anywhere that reaches the Sloplet server it is on. Who has
        the URL, which holds a token, may use it; with ``public`` everybody may. It wakes a sandbox that sleeps."""
        controller, sandbox_id = await self._holder()
        if not isinstance(controller, Publisher):
            raise UnsupportedOperation(
                "only a sandbox on a server has public URLs", hint="url() and expose() are for this machine"
            )
        return (await controller.publish(sandbox_id, port, public=public)).link

    async def ports(self) -> list[Port]:
        """What is listened on for it."""
        controller, sandbox_id = await self._holder()
        return await controller.ports(sandbox_id)

    async def unexpose(self, port: int) -> None:
        """Listen no more for that port inside, and cut what is connected. Idempotent."""
        controller, sandbox_id = await self._holder()
        await controller.unexpose(sandbox_id, port)


async def read_secrets(secrets: Mapping[str, Secret]) -> dict[str, str | None]:
    """The values, as this process sees them now, and such as the holder will take: what is wrong with one is said
    before anything is made."""
    places = [secret.placeholder for secret in secrets.values() if secret.placeholder]
    values = {name: await read_secret(secret) for name, secret in secrets.items()}
    return {
        name: check_value(f"the value of the secret {name}", value, secrets[name].where, places)
        for name, value in values.items()
    }


async def read_secret(secret: Secret) -> str:
    """Its value. A command may take seconds: not on the loop; and it ends with whoever waits for it."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(secret.read, stop)
    finally:
        stop.set()
