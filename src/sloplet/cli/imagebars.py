"""How far work on images is, on stderr: bars on a terminal, elsewhere a line for each blob."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from ..images.progress import ImageProgress
from .output import console, note, plain, size
from .working import shown

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PAST = {"download": "got", "upload": "sent", "unpack": "unpacked"}


class Bars:
    """An ``OnImageProgress`` and a context manager. Any thread."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], TaskID] = {}
        self._over: set[tuple[str, str]] = set()
        self._bars: Progress | None = None

    def __enter__(self) -> Self:
        if not self._quiet and shown():
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            self._bars = Progress(
                TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                console=console(stderr=True), transient=True,
            )  # fmt: skip
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, progress: ImageProgress) -> None:
        if self._quiet or progress.stage == "done":
            return
        with self._lock:
            if progress.stage == "resolve":
                if progress.text and progress.text.startswith("the mirror"):
                    self._say(plain(progress.text))
            elif self._bars is not None:
                self._draw(self._bars, progress)
            else:
                self._tell(progress)

    def _draw(self, bars: Progress, progress: ImageProgress) -> None:
        key = (progress.stage, progress.key)
        if key not in self._rows:
            self._rows[key] = bars.add_task(f"{progress.stage:9} {_short(progress.key)}", total=progress.total)
        bars.update(self._rows[key], completed=progress.done, total=progress.total)

    def _tell(self, progress: ImageProgress) -> None:
        key = (progress.stage, progress.key)
        if progress.total is not None and progress.done >= progress.total and key not in self._over:
            self._over.add(key)
            done = progress.text if progress.text.endswith("already") else _PAST.get(progress.stage, progress.stage)
            note(f"{done} {_short(progress.key)}, {size(progress.total)}")

    def _say(self, text: str) -> None:
        if self._bars is not None:
            self._bars.console.print(f"sloplet: {text}", markup=False)
        else:
            note(text)


def _short(key: str) -> str:
    return plain(key.removeprefix("sha256:")[:12])
