"""The SDK's server over our tools and resources. It knows no transport: ``which`` tells whose session a request is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from .. import __version__
from ..errors import SlopletError
from . import resources
from .boxes import Boxes
from .call import Call, failed
from .policy import Policy
from .progress import Report
from .tools import toolbox

logger = logging.getLogger("sloplet.mcp")
Context = ServerRequestContext[Any, Any]

INSTRUCTIONS = """
These tools give you a sandbox: a disposable Linux computer of your own, apart from the user's machine. It is made when
a tool first needs it; you need not create it. Work in its workspace folder: files stay between calls. run executes
shell commands, run_code keeps variables between calls, start_process is for servers. Before something risky, take a
snapshot; rollback undoes it. What the sandbox may reach and use is set by whoever started this server: no tool can
change it. When a connection is refused, network_log says why.
""".strip()


@dataclass
class Session:
    """Whose sandboxes, and what is allowed."""

    boxes: Boxes
    policy: Policy


Which = Callable[[Context], Session]
#: A tool was called: its name, its arguments, and what it answered.
Called = Callable[[Context, str, dict[str, Any], types.CallToolResult], None]


def make_server(which: Which, *, called: Called | None = None) -> Server[Any]:
    """``which`` raises SlopletError where a request belongs to no session. ``called`` hears of every call."""
    tools = toolbox().tools

    async def list_tools(ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool.listed() for tool in tools.values()])

    async def call_tool(ctx: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        tool = tools.get(params.name)
        if tool is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name[:80]!r}")
        try:
            session = which(ctx)
        except SlopletError as error:
            return failed(error)
        arguments = params.arguments or {}
        result = await tool.call(Call(session.boxes, session.policy, _report(ctx)), arguments)
        if called is not None:
            called(ctx, tool.name, arguments, result)
        return result

    async def list_resources(ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListResourcesResult:
        with _told():
            return types.ListResourcesResult(resources=await resources.listed(which(ctx).boxes))

    async def list_templates(
        ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=resources.TEMPLATES)

    async def read_resource(ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        with _told():
            return types.ReadResourceResult(contents=[await resources.read(which(ctx).boxes, params.uri)])

    return Server(
        "sloplet",
        version=__version__,
        title="Sloplet sandbox",
        description="Sandboxes for code that nobody has read.",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
    )


def _report(ctx: Context) -> Report | None:
    """None where the client did not ask for progress."""
    return ctx.session.report_progress if (ctx.meta or {}).get("progress_token") is not None else None


class _told:
    """Errors of ours as errors of the protocol, without a host's path or a traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SlopletError):
            text = failed(error).content[0]
            assert isinstance(text, types.TextContent)
            raise MCPError(types.INVALID_PARAMS, text.text) from None
        if isinstance(error, Exception) and not isinstance(error, MCPError):
            logger.error("a resource could not be read", exc_info=error)
            raise MCPError(types.INTERNAL_ERROR, "Sloplet itself failed: this is a bug; its log tells more") from None
