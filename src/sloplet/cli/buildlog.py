"""How a build is shown while it goes on: on a terminal the steps at work with their last lines, elsewhere plain lines.

Output of a step is hostile: its control characters are taken away.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from .output import complain, console, plain
from .working import shown

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..build.events import BuildEvent

_LINES = 5


@dataclass
class _Step:
    event: BuildEvent
    began: float = field(default_factory=time.monotonic)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES))


class BuildLog:
    """An ``OnBuildEvent`` and a context manager. Everything goes to stderr."""

    def __init__(self, *, quiet: bool = False, live: bool | None = None) -> None:
        self._quiet = quiet
        self._live_wanted = shown() if live is None else live
        self._live: Any = None
        self._steps: dict[tuple[str, int], _Step] = {}
        self.events: list[dict[str, Any]] = []  #: how each step ended

    def __enter__(self) -> Self:
        if self._live_wanted and not self._quiet:
            from rich.live import Live

            self._live = Live(
                get_renderable=self._render, console=console(stderr=True), refresh_per_second=8, transient=True
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, event: BuildEvent) -> None:
        key = (event.stage, event.step)
        if event.kind == "begin":
            self._steps[key] = _Step(event)
            if self._live is None:
                self._say(f"{_head(event)} {_short(event.text, 200)}")
        elif event.kind == "log":
            line = plain(event.text)
            if key in self._steps:
                self._steps[key].lines.append(line)
            if self._live is None:
                self._say(f"{_head(event)} | {line}")
        elif event.kind == "end":
            self._end(event, self._steps.pop(key, None))

    def _end(self, event: BuildEvent, step: _Step | None) -> None:
        text = step.event.text if step is not None else ""
        self.events.append({**event.to_dict(), "text": text})
        if self._quiet:
            return
        if self._live is None:
            self._say(f"{_head(event)} {'CACHED' if event.cached else f'done in {event.seconds:.1f} s'}")
            return
        from rich.text import Text

        line = Text.assemble(
            (f"{_head(event)} ", "bold"), (_short(text, max(20, self._live.console.width - 40))), " ",
            ("CACHED", "cyan") if event.cached else (f"{event.seconds:.1f} s", "green"),
        )  # fmt: skip
        self._live.console.print(line, soft_wrap=True)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        rows: list[Text] = []
        width = max(20, self._live.console.width - 2) if self._live is not None else 80
        for step in list(self._steps.values()):
            seconds = f" {time.monotonic() - step.began:.1f} s"
            head = f"{_head(step.event)} {_short(step.event.text, width - 20 - len(seconds))}{seconds}"
            rows.append(Text(head, style="yellow", no_wrap=True, overflow="ellipsis"))
            rows += [Text(f"   {line}", style="dim", no_wrap=True, overflow="ellipsis") for line in step.lines]
        return Group(*rows)

    def _say(self, line: str) -> None:
        if not self._quiet:
            complain(f"{line}\n")


def _head(event: BuildEvent) -> str:
    stage = f" {plain(event.stage)}" if event.stage else ""
    return f"[{event.step}/{event.total}{stage}]"


def _short(text: str, most: int) -> str:
    return plain(" ".join(text.split()), most)
