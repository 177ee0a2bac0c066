"""The keeper's methods: what the Controller protocol asks for, as JSON on a CONTROL stream.

The answer is the CLOSE's BODY ``{"result": ...}``; one that is too large for a frame comes as DATA before it. An
error is ``{"error": ...}`` of the ``errors`` tree. ``create`` answers with a REPLY and waits for the client's END:
so it knows whether anybody heard of the sandbox. ``events`` and ``asks`` send records until RESET.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from .. import __version__
from ..controller import Event, SandboxInfo
from ..errors import KeeperError, SandboxDead, SandboxError, SandboxNotFound, SlopletError
from ..spec import SandboxSpec
from ..wire.fields import Fields, encode_record
from ..wire.mux import AgentStream
from ..wire.schema import Tag
from . import LEAVING, MAX_BODY, error_close, to_body
from .history import HistoryMethods, Method
from .network import NetworkMethods

if TYPE_CHECKING:
    from .server import Client, Server

#: What a client of another version may ask: enough to see what is there, to end it and to take over.
_ANY_VERSION = {"find", "list", "kill", "leave", "status"}
_MAX_EVENT = 60000
_SETTLE = 2.0
_SEE_LOG = "its log is SLOPLET_HOME/run/keeper.log"
T = TypeVar("T")


class Control:
    """Answers CONTROL streams. One per keeper."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._runtime = server.runtime
        self.creating = 0
        self._starting: dict[str, set[asyncio.Future[None]]] = {}  # by name, while one or more try to make it
        self._chosen: dict[str, asyncio.Task[SandboxInfo]] = {}  # by id, if its client chose that
        self._network = NetworkMethods(server)
        self._changes: dict[str, Method] = {**HistoryMethods(server).methods, **self._network.methods}
        self._methods: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "find": self._find,
            "list": self._list,
            "kill": self._kill,
            "guarantees": self._guarantees,
            "image_config": self._image_config,
            "stats": self._stats,
            "pools": self._pools,
            "status": self._status,
            "leave": self._leave,
        }

    async def serve(self, client: Client, stream: AgentStream) -> None:
        """Answer one request; every error is an answer."""
        try:
            method, params = _parse(stream.request)
            if self._server.leaving:
                raise KeeperError(LEAVING, hint="try again")
            if method not in _ANY_VERSION and not client.same_version:
                from .server import other_version

                raise other_version()
            if method == "create":
                await self._create(client, stream, SandboxSpec.from_dict(params["spec"]), params.get("id"))
            elif method == "events":
                await self._events(stream, params.get("sandbox"))
            elif method == "asks":
                await self._asks(stream, str(params["sandbox"]))
            elif method in self._methods:
                await _answer(stream, await self._methods[method](params))
            elif method in self._changes:
                await _answer(stream, await _while_wanted(stream, self._change(client, method, params)))
            else:
                raise KeeperError(f"the keeper knows no {method!r}")
        except SlopletError as error:
            stream.close(error_close(error))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            stream.close(error_close(KeeperError(f"the keeper does not understand: {type(error).__name__}: {error}")))
        except Exception as error:
            stream.close(error_close(KeeperError(f"the keeper failed: {type(error).__name__}: {error}", hint=_SEE_LOG)))
            raise

    async def _change(self, client: Client, method: str, params: dict[str, Any]) -> Any:
        self.creating += 1  # what it makes is no left-over of a dead keeper
        try:
            if params.get("sandbox") is not None:
                await self._settled(str(params["sandbox"]))
            return await self._changes[method](client, params)
        except SandboxNotFound as error:
            raise await self.why_closed(str(params.get("sandbox")), error) from None
        finally:
            self.creating -= 1
            self._server.consider_leaving()

    async def why_closed(self, sandbox_id: str, error: SlopletError) -> SlopletError:
        """A better word than "there is no running sandbox", where the record has one."""
        if not isinstance(error, SandboxNotFound):
            return error
        try:
            return not_here(await self._settled(sandbox_id))
        except SlopletError:
            return error

    # -- methods -----------------------------------------------------------------------

    async def _find(self, params: Any) -> Any:
        return (await self._settled(str(params["ref"]))).to_dict()

    async def _settled(self, ref: str) -> SandboxInfo:
        """Find it; one that is being made, once it is made (or was not)."""
        if (chosen := self._chosen.get(ref)) is not None:  # its client may ask before it is on record
            await asyncio.wait({chosen})
        info = await self._runtime.find(ref)
        while info.state == "starting" and (making := self._starting.get((info.name or "").casefold())):
            await asyncio.wait(set(making))
            info = await self._runtime.find(ref)
            if info.state != "starting":
                return info
        if self._is_left_over(info):
            await self._tidy()
            return await self._runtime.find(ref)
        return info

    def _is_left_over(self, info: SandboxInfo) -> bool:
        if self._runtime.holds(info.id) or info.id in self._chosen or not left_over(info):
            return False
        return not (info.state == "starting" and (self.creating or self._runtime.changing))

    async def _tidy(self) -> list[SandboxInfo]:
        """Everything on record, after cleaning up what dead programs left. The keeper before us may be dying just now:
        its locks go a moment after its socket."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SETTLE
        while True:
            await loop.run_in_executor(None, self._runtime.reap)
            found = await self._runtime.list()
            if loop.time() > deadline or not any(self._is_left_over(info) for info in found):
                return found
            await asyncio.sleep(0.01)

    async def _list(self, params: Any) -> Any:
        return [info.to_dict() for info in await self._tidy()]

    async def _kill(self, params: Any) -> Any:
        sandbox_id = str(params["sandbox"])
        if (making := self._chosen.get(sandbox_id)) is not None:
            making.cancel()
        try:
            await self._settled(sandbox_id)
            await self._runtime.kill(sandbox_id)
            info = await self._runtime.find(sandbox_id)
        except SandboxNotFound:
            return None
        raise held_elsewhere(info)

    async def _guarantees(self, params: Any) -> Any:
        return [item.to_dict() for item in await self._asked(params, self._runtime.guarantees)]

    async def _image_config(self, params: Any) -> Any:
        config = await self._asked(params, self._runtime.image_config)
        return None if config is None else config.to_json().decode()

    async def _stats(self, params: Any) -> Any:
        return asdict(await self._asked(params, self._runtime.stats))

    async def _asked(self, params: Any, method: Callable[[str], Awaitable[Any]]) -> Any:
        sandbox_id = str(params["sandbox"])
        try:
            return await method(sandbox_id)
        except SandboxNotFound as error:
            raise await self.why_closed(sandbox_id, error) from None

    async def _status(self, params: Any) -> Any:
        return {
            "pid": os.getpid(),
            "version": __version__,
            "sandboxes": self._server.busy,
            "clients": len(self._server.clients),
        }

    async def _pools(self, params: Any) -> Any:
        return self._runtime.pools.known()

    async def _leave(self, params: Any) -> Any:
        """Asked by a client of another version. Only a keeper that holds nothing may go."""
        left = not self._server.busy
        if left:
            self._server.log("leaving: another version takes over")
            asyncio.get_running_loop().call_soon(self._server.retire)
        return {"left": left, "sandboxes": self._server.busy}

    async def _create(self, client: Client, stream: AgentStream, spec: SandboxSpec, sandbox_id: str | None) -> None:
        """Make it, under the id that the client chose if it did, and see that somebody hears of it.

        RESET (the caller gave up): undone. Connection lost: an unnamed one is undone, nobody knows its id; a
        named one stays, and so does one whose client said END: it has the id on record, perhaps before there is an
        answer.
        """
        self.creating += 1
        name = (spec.name or "").casefold()
        made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if name:
            self._starting.setdefault(name, set()).add(made)
        making = asyncio.ensure_future(self._runtime.create_as(sandbox_id, spec))
        if sandbox_id is not None:
            self._chosen[sandbox_id] = making
        heard = asyncio.ensure_future(_heard(stream))
        over = asyncio.ensure_future(_over(stream))
        try:
            try:
                await asyncio.wait({making, over}, return_when=asyncio.FIRST_COMPLETED)
                if not making.done() and not await _is_wanted(client, stream, spec, heard):
                    making.cancel()
                await asyncio.wait({making})
            except asyncio.CancelledError:
                making.cancel()
                await asyncio.wait({making})
                raise
            if making.cancelled():
                stream.close(error_close(SandboxError("the sandbox was given up while it was being made")))
                return
            info = making.result()
            client.use(info.id)
            answer = Fields((Tag.BODY, to_body({"result": info.to_dict(known=spec)})))
            if heard.done() and await _is_wanted(client, stream, spec, heard):
                stream.close(answer)
                return
            if not client.gone:
                stream.reply(answer)
            if not await _is_wanted(client, stream, spec, heard):
                await self._runtime.kill(info.id)
            stream.close(Fields())
        finally:
            heard.cancel()
            over.cancel()
            self.creating -= 1
            made.set_result(None)
            if name:
                self._starting[name].discard(made)
                if not self._starting[name]:
                    del self._starting[name]
            if sandbox_id is not None:
                self._chosen.pop(sandbox_id, None)
            self._server.consider_leaving()

    async def _events(self, stream: AgentStream, sandbox: str | None) -> None:
        if sandbox is not None:
            await self._asked({"sandbox": sandbox}, self._runtime.stats)  # it must be there
        await _tell(stream, _event_bodies(self._runtime.events(sandbox)))

    async def _asks(self, stream: AgentStream, sandbox: str) -> None:
        try:
            await _tell(stream, _bodies(self._network.asks(sandbox)))
        except SandboxNotFound as error:
            raise await self.why_closed(sandbox, error) from None


def left_over(info: SandboxInfo) -> bool:
    """On record as alive with a keeper: if that is not the one that runs, it is dead or dying."""
    return info.holder == "keeper" and info.state in ("starting", "running")


def not_here(info: SandboxInfo) -> SlopletError:
    """Why a sandbox that is on record cannot be asked anything here."""
    if info.state == "dead":
        return SandboxDead(
            f"the sandbox {info.name or info.id} is dead: {info.reason}",
            hint=_advice(info),
        )
    return held_elsewhere(info)


def _advice(info: SandboxInfo) -> str:
    name = info.name or info.id
    if info.saved is not None:
        return f"`sloplet resume {name}` goes on from its last checkpoint, `sloplet rm {name}` removes it"
    return f"`sloplet rm {name}` removes it; then make a new one"


def held_elsewhere(info: SandboxInfo) -> SandboxError:
    if info.holder == "keeper":
        return SandboxError(
            f"the sandbox {info.name or info.id} is held by a keeper that is ending and does not come to its end",
            hint="see `ps -C sloplet-keeper`",
        )
    return SandboxError(
        f"the sandbox {info.name or info.id} is held by a running program ({info.holder}, {info.state}), not by the "
        "keeper",
        hint="only that program can use or end it; it goes when the program ends",
    )


def _parse(request: Fields) -> tuple[str, dict[str, Any]]:
    body = json.loads(request.raw(Tag.BODY, b"{}"))
    return str(body["method"]), dict(body.get("params") or {})


async def _while_wanted(stream: AgentStream, work: Coroutine[Any, Any, T]) -> T:
    """What a client asked for, given up when the client gives up (or goes): what can stop half-way then does."""
    working, ended = asyncio.ensure_future(work), asyncio.ensure_future(stream.reset_or_closed())
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
        if working.cancelled():
            raise KeeperError("the request was given up")
        return working.result()
    finally:
        working.cancel()
        ended.cancel()
        await asyncio.gather(working, ended, return_exceptions=True)


async def _answer(stream: AgentStream, value: Any) -> None:
    body = to_body({"result": value})
    if len(body) <= MAX_BODY:
        stream.close(Fields((Tag.BODY, body)))
        return
    await stream.send(body)
    stream.close(Fields())


async def _heard(stream: AgentStream) -> bool:
    """Whether the client said END: it has the answer, or the id. False once it gave up or was lost."""
    try:
        while await stream.recv() is not None:
            pass
    except SlopletError:
        return False
    return not stream.was_reset


async def _over(stream: AgentStream) -> None:
    """Until the client has given up, or was lost; also after END."""
    with suppress(SlopletError):
        await stream.reset_or_closed()


async def _is_wanted(client: Client, stream: AgentStream, spec: SandboxSpec, heard: asyncio.Task[bool]) -> bool:
    """Whether somebody has heard of it, or will find it by its name. Waits for the client to say so."""
    said = await heard
    return not stream.was_reset and (said or (client.gone and spec.name is not None))


async def _tell(stream: AgentStream, bodies: AsyncIterator[bytes]) -> None:
    """One record after the other, until there are no more or nobody listens. Who gave us ``bodies`` listens already."""
    stream.reply(Fields())

    async def send() -> None:
        async for body in bodies:
            await stream.send(encode_record(Fields((Tag.BODY, body))))

    sending, ended = asyncio.ensure_future(send()), asyncio.ensure_future(stream.reset_or_closed())
    try:
        await asyncio.wait({sending, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        sending.cancel()
        ended.cancel()
        await asyncio.gather(sending, ended, return_exceptions=True)
    if not sending.cancelled() and (error := sending.exception()) is not None:
        raise error
    stream.close(Fields())


async def _event_bodies(source: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    async for event in source:
        yield _event_body(event)


async def _bodies(source: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async for item in source:
        yield to_body(item.to_dict())


def _event_body(event: Event) -> bytes:
    body = to_body(event.to_dict())
    if len(body) > _MAX_EVENT:  # a command line may be a megabyte
        body = to_body({**event.to_dict(), "data": {"truncated": True}})
    return body
