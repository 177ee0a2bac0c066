"""open_url and network_log: what reaches the sandbox, and what it may reach."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from ...netspec import NetworkSpec
from ...network.log import Decision
from ..bounded import clean
from ..call import Answer, BoxArguments, Call, Toolbox

_KEPT = 10_000


class UrlArguments(BoxArguments):
    port: Annotated[int, Field(ge=1, le=65535, description="The port that a server inside listens on.")]


class UrlOutput(BaseModel):
    url: str
    port: int


async def open_url(call: Call, arguments: UrlArguments) -> Answer:
    """The URL at which people outside reach a server that listens inside the sandbox. Start the server first (
    start_process). Inside the sandbox itself use http://127.0.0.1:PORT."""
    held = await call.box(arguments.sandbox)
    url = await call.boxes.url(held, arguments.port)
    return Answer(f"{url} leads to port {arguments.port} of {held.name}", UrlOutput(url=url, port=arguments.port))


class LogArguments(BoxArguments):
    all: Annotated[bool, Field(description="What was allowed, too, not only what was refused or failed.")] = False
    last: Annotated[int, Field(ge=1, le=500, description="How many at most, the newest.")] = 50


class Row(BaseModel):
    target: str
    verdict: str = Field(description="allow, deny, cut (allowed, then not any more) or fail (not reached)")
    reason: str
    request: str = ""
    count: int = Field(default=1, description="How often, one after the other")


class LogOutput(BaseModel):
    policy: str
    allowed: list[str]
    denied: list[str]
    log: list[Row]


async def network_log(call: Call, arguments: LogArguments) -> Answer:
    """What the sandbox may reach, and which connections were refused, and why. Look here when a download or an API call
    fails."""
    held = await call.box(arguments.sandbox)
    spec = await held.box.network.policy()
    rows = await held.box.network.log(limit=_KEPT)
    wanted = [row for row in rows if arguments.all or row.verdict != "allow"]
    log = merged(wanted)[-arguments.last :]
    data = LogOutput(policy=policy_words(spec), allowed=list(spec.allow), denied=list(spec.deny), log=log)
    lines = [f"{row.verdict} {row.target}{_times(row.count)}: {row.reason}{_request(row)}" for row in log]
    text = "\n".join([data.policy, *(lines or ["[nothing was refused]" if not arguments.all else "[no connections]"])])
    return Answer(text[: call.policy.max_output], data)


def policy_words(spec: NetworkSpec) -> str:
    """What may be reached, and who can change that, in a sentence or two."""
    if spec.mode == "none":
        what = "This sandbox has no network: nothing outside can be reached, and no name is resolved."
    elif spec.mode == "learn":
        what = "This sandbox may reach any public host; what it reaches is written down."
    elif spec.allow:
        denied = f", but not {', '.join(spec.deny)}" if spec.deny else ""
        what = f"This sandbox may reach {', '.join(spec.allow)}{denied}, and nothing else."
    else:
        what = "This sandbox may reach nothing yet."
    return f"{what} No tool can change this; the person who started this server can."


def merged(rows: list[Decision]) -> list[Row]:
    """The same refusal many times over is one row."""
    found: list[Row] = []
    for row in rows:
        target = clean(f"{row.name or row.address}:{row.port}")
        each = Row(target=target, verdict=row.verdict, reason=clean(row.reason), request=clean(row.request))
        if found and found[-1].model_copy(update={"count": 1}) == each:
            found[-1].count += 1
        else:
            found.append(each)
    return found


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""


def _request(row: Row) -> str:
    return f" [{row.request}]" if row.request else ""


def add_to(tools: Toolbox) -> None:
    tools.add("open_url", "URL of a port", UrlArguments, UrlOutput, again=True, world=True)(open_url)
    tools.add("network_log", "Network policy and log", LogArguments, LogOutput, reads=True)(network_log)
