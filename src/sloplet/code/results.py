"""What a code cell gives back. Plain values."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: How a saved representation's file is called.
SUFFIXES = {
    "text/plain": "txt", "text/html": "html", "text/markdown": "md", "text/latex": "tex", "image/png": "png",
    "image/jpeg": "jpg", "image/svg+xml": "svg", "application/json": "json", "application/javascript": "js",
    "application/pdf": "pdf", "application/vnd.sloplet.chart+json": "chart.json",
    "application/vnd.sloplet.data+json": "data.json",
}  # fmt: skip


@dataclass(frozen=True)
class RichResult:
    """A value as its representations: MIME type -> bytes. It was made by untrusted code: show HTML, SVG and
    JavaScript only where they can do no harm."""

    data: Mapping[str, bytes]
    main: bool = False  #: the value of the cell's last expression; the others were displayed

    def _text(self, mime: str) -> str | None:
        raw = self.data.get(mime)
        return None if raw is None else raw.decode("utf-8", "replace")

    @property
    def text(self) -> str | None:
        return self._text("text/plain")

    @property
    def html(self) -> str | None:
        return self._text("text/html")

    @property
    def markdown(self) -> str | None:
        return self._text("text/markdown")

    @property
    def latex(self) -> str | None:
        return self._text("text/latex")

    @property
    def svg(self) -> str | None:
        return self._text("image/svg+xml")

    @property
    def javascript(self) -> str | None:
        return self._text("application/javascript")

    @property
    def png(self) -> bytes | None:
        return self.data.get("image/png")

    @property
    def jpeg(self) -> bytes | None:
        return self.data.get("image/jpeg")

    @property
    def json(self) -> Any:
        """The value of its JSON, parsed; None if there is none. ValueError if it is not JSON after all."""
        return self._parsed("application/json")

    @property
    def chart(self) -> Any:
        """What a matplotlib figure shows, parsed: its type, labels, ticks and elements; see docs/code.md."""
        return self._parsed("application/vnd.sloplet.chart+json")

    @property
    def columns(self) -> Any:
        """The columns of a data frame, parsed: name -> values."""
        return self._parsed("application/vnd.sloplet.data+json")

    def _parsed(self, mime: str) -> Any:
        import json

        raw = self.data.get(mime)
        if raw is None:
            return None
        try:
            return json.loads(raw)
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None

    def to_dict(self) -> dict[str, Any]:
        """Text as text, images as base64."""
        return {"main": self.main, "data": {mime: _portable(mime, raw) for mime, raw in self.data.items()}}


_TEXTS = ("application/json", "application/javascript")


def _portable(mime: str, raw: bytes) -> str:
    if mime.startswith("text/") or mime.endswith(("+json", "+xml")) or mime in _TEXTS:
        return raw.decode("utf-8", "replace")
    return base64.b64encode(raw).decode()


@dataclass(frozen=True)
class CodeFailure:
    """What ended a cell: the exception's class, its message, and the traceback as plain text."""

    name: str
    message: str
    traceback: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"name": self.name, "message": self.message, "traceback": self.traceback}


@dataclass(frozen=True)
class CodeResult:
    """How a cell ended. Code that raises is a result, not an exception."""

    stdout: str = ""
    stderr: str = ""
    results: tuple[RichResult, ...] = ()
    error: CodeFailure | None = None
    execution_count: int = 0
    duration: float = 0.0
    timed_out: bool = False  #: it was interrupted because its time was up
    restarted: bool = False  #: it could not be interrupted: the context was started anew, its variables are lost
    truncated: bool = False  #: output or results beyond a limit were dropped
    context: str = ""
    language: str = ""
    exit_code: int = 0  #: a shell's; elsewhere 0, or 1 with an error

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def text(self) -> str | None:
        """The value of the last expression as text; None if it has none."""
        return next((result.text for result in self.results if result.main), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text, "stdout": self.stdout, "stderr": self.stderr,
            "results": [result.to_dict() for result in self.results],
            "error": None if self.error is None else self.error.to_dict(), "execution_count": self.execution_count,
            "duration": self.duration, "timed_out": self.timed_out, "restarted": self.restarted,
            "truncated": self.truncated, "context": self.context, "language": self.language,
            "exit_code": self.exit_code, "ok": self.ok,
        }  # fmt: skip


@dataclass(frozen=True)
class CodeContext:
    """A kernel of a sandbox, by the name that ``context=`` takes."""

    name: str
    language: str
    state: str  #: running; dead (its process ended), lost (it was not saved with the sandbox): ``restart`` it
    pid: int = 0  #: of ``processes()``
    started_at: float = 0.0
    reason: str = ""  #: why it is dead
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    python: str | None = None

    @property
    def running(self) -> bool:
        return self.state == "running"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "language": self.language, "state": self.state, "pid": self.pid,
            "started_at": self.started_at, "reason": self.reason, "cwd": self.cwd, "user": self.user,
            "python": self.python,
        }  # fmt: skip
