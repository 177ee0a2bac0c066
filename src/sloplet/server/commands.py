"""Commands as requests ask for them, and results as they are told. Used by ``exec`` and ``processes``."""

from __future__ import annotations

import base64
import codecs
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from ..errors import SpecError
from ..process import DEFAULT_MAX_OUTPUT, Command
from ..results import Result
from .asked import Duration, EnvMap
from .documents import Document, Request
from .outputs import WrittenAnswer
from .rawnames import from_base64
from .settings import MAX_JSON
from .sse import to_json

MAX_OUTPUT = 16 << 20  #: bytes of output that one answer may hold; as JSON they can be six times as many
_MAX_COMMAND = 1_000_000
_SMALL = 64 << 10  # bytes of output that are answered in one piece
Encoding = Literal["utf-8", "base64"]
SignalName = Annotated[int, Field(ge=1, le=64)] | Annotated[str, Field(min_length=1, max_length=16, examples=["TERM"])]


class CommandAsked(Request):
    """What to run, and how."""

    command: (
        Annotated[str, Field(min_length=1, max_length=_MAX_COMMAND)]
        | Annotated[list[Annotated[str, Field(max_length=_MAX_COMMAND)]], Field(min_length=1, max_length=65536)]
        | None
    ) = Field(
        default=None,
        description="Text is run by /bin/sh, a list is the argument vector. Without it: what the image runs by itself.",
        examples=["echo hello", ["python3", "-c", "print(6 * 7)"]],
    )
    cwd: str | None = Field(default=None, min_length=1, max_length=4095)
    env: EnvMap = Field(default={})
    user: str | None = Field(default=None, min_length=1, max_length=256)
    timeout: Duration | None = Field(default=None, description="After it the command and all that it started is ended.")

    def arguments(self) -> dict[str, Any]:
        """Of ``AsyncSandbox.run`` and ``spawn``."""
        command: Command | None = self.command
        return {"command": command, "cwd": self.cwd, "env": self.env, "user": self.user, "timeout": self.timeout}


class ExecAsked(CommandAsked):
    """A command to run to its end."""

    stdin: str | None = Field(default=None, max_length=MAX_JSON, description="What it reads, as text")
    stdin_base64: str | None = Field(default=None, max_length=MAX_JSON, description="The same, as bytes")
    max_output: int = Field(
        default=DEFAULT_MAX_OUTPUT, ge=1, le=MAX_OUTPUT, description="Bytes; what is beyond is counted and dropped."
    )
    encoding: Encoding = Field(default="utf-8", description="How output is told. In text, what is no UTF-8 is U+FFFD.")

    def input(self) -> bytes | None:
        """SpecError."""
        if self.stdin is not None and self.stdin_base64 is not None:
            raise SpecError("stdin and stdin_base64 contradict each other", hint="leave one of them out")
        if self.stdin_base64 is not None:
            return from_base64(self.stdin_base64, "stdin_base64")
        return None if self.stdin is None else self.stdin.encode()


class Terminal(Request):
    rows: int = Field(default=24, ge=1, le=10000)
    cols: int = Field(default=80, ge=1, le=10000)


class SpawnAsked(CommandAsked):
    """A command that is followed, or not, while it runs."""

    pty: bool | Terminal = Field(default=False, description="A terminal: all output is on stdout then.")
    stdin: bool = Field(default=False, description="Whether it has an input that can be written to.")
    tag: str | None = Field(default=None, min_length=1, max_length=1024, description="For the list of processes")

    @property
    def has_input(self) -> bool:
        return self.stdin or bool(self.pty)

    def arguments(self) -> dict[str, Any]:
        terminal = (self.pty.rows, self.pty.cols) if isinstance(self.pty, Terminal) else self.pty
        return {**super().arguments(), "pty": terminal, "stdin": self.stdin, "tag": self.tag}


class FollowAsked(SpawnAsked):
    """The first message of a WebSocket that runs a command."""

    detached: bool = Field(default=False, description="It goes on when the client leaves.")


class Ended(Document):
    """How a command ended."""

    exit_code: int = Field(description="128 + n if signal n ended it")
    duration: float
    signal: int | None
    timed_out: bool
    oom: bool
    truncated: bool = Field(description="Not all of what it wrote is here.")
    stdout_size: int = Field(description="Bytes that it wrote")
    stderr_size: int
    cpu_seconds: float
    max_rss: int
    denied: list[str] = Field(description="Why connections were refused while it ran")


class ExecResult(Ended):
    """How a command ended, and what it wrote."""

    stdout: str
    stderr: str
    encoding: Encoding


def told(result: Result, encoding: Encoding) -> dict[str, Any]:
    """An ``ExecResult``."""
    found = {**result.to_dict(), "encoding": encoding}
    if encoding == "base64":
        found["stdout"] = base64.b64encode(result.stdout_raw).decode()
        found["stderr"] = base64.b64encode(result.stderr_raw).decode()
    return found


def answered(result: Result, encoding: Encoding) -> Response:
    """The same as an answer."""
    if len(result.stdout_raw) + len(result.stderr_raw) <= _SMALL:
        return Response(to_json(told(result, encoding)), media_type="application/json")
    document = {**replace(result, stdout_raw=b"", stderr_raw=b"").to_dict(), "encoding": encoding}
    del document["stdout"], document["stderr"]
    texts = {"stdout": result.stdout_raw, "stderr": result.stderr_raw}
    return WrittenAnswer(document, texts, as_base64=encoding == "base64")


def ended(result: Result, sent: Mapping[int, int]) -> dict[str, Any]:
    """An ``Ended``, of a command whose output was passed on: so many bytes by channel."""
    found = result.to_dict()
    del found["stdout"], found["stderr"]
    found["truncated"] = result.stdout_size > sent.get(1, 0) or result.stderr_size > sent.get(2, 0)
    return found


class Texts:
    """Output as the data of events: characters are never cut in two."""

    def __init__(self, encoding: Encoding) -> None:
        self._decoders = None
        if encoding == "utf-8":
            made = codecs.getincrementaldecoder("utf-8")
            self._decoders = {1: made("replace"), 2: made("replace")}

    def of(self, channel: int, data: bytes, *, final: bool = False) -> str:
        """ "" if there is nothing to tell yet."""
        if self._decoders is None:
            return base64.b64encode(data).decode()
        return self._decoders[channel].decode(data, final)
