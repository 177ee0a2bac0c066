"""The official MCP client for tests that are not asynchronous: a session in a loop of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

_PATIENCE = 60.0


@dataclass
class Talk:
    """A session. ``progress`` is what was told during the last call."""

    portal: BlockingPortal
    client: Client
    progress: list[tuple[float, str | None]] = field(default_factory=list)

    def call(self, tool: str, /, **arguments: Any) -> Any:
        """A tool's result, errors too."""
        self.progress.clear()

        async def told(progress: float, total: float | None, message: str | None) -> None:
            self.progress.append((progress, message))

        return self.portal.call(partial(self.client.call_tool, tool, arguments, _PATIENCE, progress_callback=told))

    def data(self, tool: str, /, **arguments: Any) -> Any:
        """What it answered, as data; it must have gone well."""
        result = self.call(tool, **arguments)
        assert not result.is_error, text_of(result)
        return result.structured_content

    def text(self, tool: str, /, **arguments: Any) -> str:
        """What it answered, as text; it must have gone well."""
        result = self.call(tool, **arguments)
        assert not result.is_error, text_of(result)
        return text_of(result)

    def refused(self, tool: str, /, **arguments: Any) -> str:
        """Why it did not do it."""
        result = self.call(tool, **arguments)
        assert result.is_error, text_of(result)
        assert "Traceback" not in text_of(result)
        return text_of(result)

    def run(self, method: str, /, *arguments: Any, **more: Any) -> Any:
        """A method of the client's."""
        return self.portal.call(partial(getattr(self.client, method), *arguments, **more))


def text_of(result: Any) -> str:
    return "\n".join(block.text for block in result.content if block.type == "text")


def images_of(result: Any) -> list[Any]:
    return [block for block in result.content if block.type == "image"]


def environment(home: Path, more: dict[str, str] | None = None) -> dict[str, str]:
    runsc = os.environ.get("SLOPLET_TEST_RUNSC")
    return {"SLOPLET_HOME": str(home), **({"SLOPLET_RUNSC": runsc} if runsc else {}), **(more or {})}


@contextmanager
def stdio(home: Path, *arguments: str, mode: str = "auto", env: dict[str, str] | None = None) -> Iterator[Talk]:
    """``sloplet mcp`` as a client starts it. Its stderr is in ``home.log``."""
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "sloplet.cli", "mcp", *arguments], env=environment(home, env)
    )
    with open(f"{home}.log", "a") as errors:
        with _talk(Client(stdio_client(server, errors), mode=mode)) as talk:
            yield talk


@contextmanager
def http(url: str, key: str, query: str = "", *, mode: str = "auto") -> Iterator[Talk]:
    """/mcp of a server."""
    with start_blocking_portal() as portal:
        made = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"}, timeout=httpx2.Timeout(30, read=120), trust_env=False
        )
        try:
            client = Client(streamable_http_client(f"{url}/mcp{query}", http_client=made), mode=mode)
            with portal.wrap_async_context_manager(client) as entered:
                yield Talk(portal, entered)
        finally:
            portal.call(made.aclose)


@contextmanager
def _talk(client: Client) -> Iterator[Talk]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(client) as entered:
        yield Talk(portal, entered)
