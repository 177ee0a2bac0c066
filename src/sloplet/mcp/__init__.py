"""MCP: a sandbox as tools for models, with the official SDK (``mcp``). See docs/mcp.md.

What a model may do is decided by whoever starts the server: image, engine, limits, network, secrets and volumes are not
arguments of any tool. ``boxes`` holds the sandboxes of one session, ``tools`` are the tools, ``resources`` files and
logs, ``server`` joins them to the SDK, ``stdio`` serves one session over stdin and stdout; /mcp of ``sloplet serve`` is
server/mcp.py. Nothing but ``boxes.Ground`` knows where sandboxes come from.
"""

from __future__ import annotations

import importlib.util

from ..errors import SlopletError


def require() -> None:
    """The SDK is an extra. SlopletError, with the command that installs it."""
    if importlib.util.find_spec("mcp") is None or importlib.util.find_spec("mcp_types") is None:
        raise SlopletError(
            "MCP needs the package mcp, version 2 or newer, which is not installed",
            hint="pip install 'sloplet[mcp]'",
        )
