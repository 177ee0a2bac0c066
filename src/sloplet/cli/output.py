"""How the CLI prints: JSON documents, tables, errors, sizes and ages. rich is imported only where a table is drawn.

What comes out of a sandbox (command lines, reasons, file names) is hostile: ``plain`` takes its control
characters away before a terminal sees it. Bytes of a command's own output never pass through here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CommandNotExecutable, CommandNotFound, SlopletError

if TYPE_CHECKING:
    from rich.console import Console

#: Exit codes, as `docker run` and `timeout` have them.
EXIT_TIMEOUT = 124
EXIT_OURS = 125
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141


def exit_code_of(error: SlopletError) -> int:
    """The exit code that an error of ours ends the CLI with."""
    if isinstance(error, CommandNotFound):
        return EXIT_NOT_FOUND
    if isinstance(error, CommandNotExecutable):
        return EXIT_NOT_EXECUTABLE
    return EXIT_OURS


def plain(text: str, most: int = 0) -> str:
    """Text without anything that a terminal would act on, cut to ``most`` characters."""
    clean = "".join(c if c.isprintable() else ("\\n" if c == "\n" else "?") for c in text)
    return clean if not most or len(clean) <= most else clean[: most - 1] + "…"


def print_json(value: Any) -> None:
    """One JSON document on stdout. Lone surrogates (undecodable bytes) come out as escapes, so any locale will do."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=True) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line for people, on stderr."""
    complain(f"sloplet: {text}\n")


def complain(text: str) -> None:
    """Write to stderr; when that is closed there is nobody to tell."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


def report_error(error: SlopletError, as_json: bool) -> None:
    """One line, or one JSON object, on stderr."""
    if as_json:
        complain(json.dumps(error.to_dict()) + "\n")
        return
    hint = f" ({_multiline(error.hint)})" if error.hint else ""
    complain(f"sloplet: {_multiline(error.message)}{hint}\n")


def _multiline(text: str) -> str:
    return "\n".join(plain(line) for line in text.splitlines())


def console(stderr: bool = False) -> Console:
    """rich's console; plain text without a terminal, and never narrower than a table needs there."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not made.is_terminal:
        made = Console(stderr=stderr, highlight=False, width=200, no_color=True)
    return made


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table without lines. Cells are text, not markup; the last column takes what width is left."""
    rows = [[plain(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        # For grep and awk: aligned columns, nothing cut.
        widths = [max(len(row[i]) for row in [list(columns), *rows]) for i in range(len(columns))]
        for row in [list(columns), *rows]:
            sys.stdout.write("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() + "\n")
        return
    console().print(make_table(columns, rows))


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        last = name == columns[-1]
        table.add_column(name, overflow="fold" if last else "ellipsis", no_wrap=not last)
    for row in rows:
        cells = [Text(plain(cell)) for cell in row]
        for cell in cells:
            if cell.plain in _STYLES:
                cell.stylize(_STYLES[cell.plain])
        table.add_row(*cells)
    return table


_STYLES = {
    "running": "green", "dead": "red", "starting": "yellow", "paused": "blue", "yes": "green", "no": "red",
    "ok": "green", "missing": "yellow", "failed": "red", "enforced": "green", "not enforced": "red",
    "added": "green", "changed": "yellow", "removed": "red",
}  # fmt: skip


def size(count: int | float | None) -> str:
    """512M, 1.5G: as the options take them."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("", "K", "M", "G", "T"):
        if abs(value) < 1024 or unit == "T":
            return f"{value:.0f}{unit}" if value == int(value) or abs(value) >= 100 else f"{value:.1f}{unit}"
        value /= 1024
    raise AssertionError


def span(seconds: float) -> str:
    """4s, 3m, 2h, 5d: how long, in one or two parts."""
    whole = max(0, int(seconds))
    for length, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= length:
            rest = whole % length // smaller
            return (
                f"{whole // length}{unit}{rest}{small_unit}"
                if rest and whole < length * 10
                else f"{whole // length}{unit}"
            )
    return f"{whole}s"


def age(since: float, now: float | None = None) -> str:
    return span((time.time() if now is None else now) - since)
