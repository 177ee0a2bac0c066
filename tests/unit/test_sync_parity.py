"""Sync and async are one API: the same names, the same signatures, the same defaults, the same words."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from sloplet.code.api import AsyncCode
from sloplet.code.contexts import AsyncContexts
from sloplet.files import AsyncFiles
from sloplet.history import AsyncHistory
from sloplet.imaged import AsyncImaged
from sloplet.network_api import AsyncNetwork, AsyncPorts
from sloplet.process import AsyncProcess
from sloplet.sandbox import AsyncSandbox
from sloplet.sync import Code, Contexts, Files, History, Imaged, Ports, Process, Sandbox, SandboxNetwork

pytestmark = pytest.mark.anyone

PAIRS = [
    (Sandbox, AsyncSandbox), (History, AsyncHistory), (Process, AsyncProcess), (Files, AsyncFiles),
    (SandboxNetwork, AsyncNetwork), (Ports, AsyncPorts),
    (Code, AsyncCode), (Contexts, AsyncContexts), (Imaged, AsyncImaged),
]  # fmt: skip
TRANSLATED = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}
_IGNORED = {"__init__", "__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__"}


def _public(cls: type) -> set[str]:
    own = {name for name in vars(cls) if not name.startswith("_") or name in {*TRANSLATED, *TRANSLATED.values()}}
    return {TRANSLATED.get(name, name) for name in own}


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    found = list(inspect.signature(function).parameters.values())
    return [(p.name, p.kind, p.default) for p in found if p.name not in ("self", "cls")]


@pytest.mark.parametrize(("sync", "async_"), PAIRS)
def test_the_same_names(sync: type, async_: type) -> None:
    assert _public(sync) == _public(async_)


@pytest.mark.parametrize(("sync", "async_"), PAIRS)
def test_the_same_signatures(sync: type, async_: type) -> None:
    for name in sorted(vars(async_)):
        if name not in TRANSLATED and name.startswith("_"):
            continue
        theirs = inspect.getattr_static(async_, name)
        ours = inspect.getattr_static(sync, TRANSLATED.get(name, name))
        if isinstance(theirs, property):
            assert isinstance(ours, property), name
            assert theirs.__doc__ == ours.__doc__, name
            continue
        assert isinstance(theirs, classmethod) == isinstance(ours, classmethod), name
        if isinstance(theirs, classmethod):
            theirs, ours = theirs.__func__, ours.__func__
        assert _parameters(ours) == _parameters(theirs), name
        if name not in TRANSLATED:
            assert ours.__doc__ == theirs.__doc__, name


@pytest.mark.parametrize(("sync", "async_"), PAIRS)
def test_sync_is_not_async(sync: type, async_: type) -> None:
    for name in _public(sync):
        function = inspect.getattr_static(sync, name)
        assert not inspect.iscoroutinefunction(function), name
        assert not inspect.isasyncgenfunction(function), name


def test_the_constructor() -> None:
    assert _parameters(Sandbox.__init__) == _parameters(AsyncSandbox.__init__)
    assert _parameters(Sandbox) == _parameters(AsyncSandbox)


def test_every_async_method_is_documented() -> None:
    for _, async_ in PAIRS:
        for name in _public(async_):
            if not name.startswith("_") and name not in ("name",):
                assert inspect.getdoc(inspect.getattr_static(async_, name)), f"{async_.__name__}.{name}"


def test_the_same_results() -> None:
    with Sandbox(engine="fake") as box:
        ours = box.run("echo hi; exit 2")

    async def other() -> Any:
        async with AsyncSandbox(engine="fake") as box:
            return await box.run("echo hi; exit 2")

    theirs = asyncio.run(other())
    assert (ours.exit_code, ours.stdout) == (theirs.exit_code, theirs.stdout)
