"""The caller's terminal while a command of a sandbox has it: raw mode, size, the way out, all put back afterwards."""

from __future__ import annotations

import atexit
import os
import re
import termios
import tty
from types import TracebackType
from typing import Any, Self

_ENDS_LINE = b"\r\n"
#: Modes that programs switch on and, when killed, leave on: alternate screens, mouse, focus, paste.
_TRACKED = {47, 1047, 1049, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 2004, 1}
_MODE_RE = re.compile(rb"\x1b\[\?([0-9;]{1,40})([hl])")
_LONGEST = 48


def size(fd: int) -> tuple[int, int]:
    """Rows and columns; 24 by 80 where there is no terminal or it does not know."""
    try:
        found = os.get_terminal_size(fd)
    except OSError:
        return 24, 80
    return min(found.lines, 10000) or 24, min(found.columns, 10000) or 80


class RawTerminal:
    """Raw mode for a block, restored on the way out whatever happens, at interpreter exit at the latest."""

    def __init__(self, fd: int = 0) -> None:
        self._fd = fd
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._fd)
        atexit.register(self.restore)
        self.apply()
        return self

    def apply(self) -> None:
        """Raw mode (again: after the process was stopped and continued)."""
        try:
            tty.setraw(self._fd, termios.TCSADRAIN)
        except termios.error:
            pass  # the terminal is gone

    def restore(self) -> None:
        if self._before is not None:
            try:
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
            except termios.error:
                pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
        self._before = None
        atexit.unregister(self.restore)


class Escapes:
    """ssh's way out: ``~.`` at the beginning of a line leaves, ``~~`` is a tilde."""

    def __init__(self) -> None:
        self._at_line_start = True
        self._tilde = False

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """What to pass on, and whether to leave."""
        if b"~" not in data and not self._tilde:  # nearly always
            self._at_line_start = data[-1:] in (b"\r", b"\n") if data else self._at_line_start
            return data, False
        passed = bytearray()
        for byte in data:
            if self._tilde:
                self._tilde = False
                if byte == ord("."):
                    return bytes(passed), True
                if byte != ord("~"):
                    passed.append(ord("~"))
                passed.append(byte)
                self._at_line_start = byte in _ENDS_LINE
            elif byte == ord("~") and self._at_line_start:
                self._tilde = True
            else:
                passed.append(byte)
                self._at_line_start = byte in _ENDS_LINE
        return bytes(passed), False


class ModeTracker:
    """Watches a command's output for terminal modes that it switched and did not switch back."""

    def __init__(self) -> None:
        self._tail = b""
        self._on: set[int] = set()
        self._cursor_hidden = False

    def feed(self, data: bytes) -> None:
        if b"\x1b" not in data and not self._tail:
            return
        text = self._tail + data
        end = 0
        for match in _MODE_RE.finditer(text):
            end = match.end()
            switched_on = match[2] == b"h"
            for number in match[1].split(b";"):
                self._switch(int(number or b"0"), switched_on)
        start = text.rfind(b"\x1b", max(end, len(text) - _LONGEST))
        self._tail = text[start:] if start >= 0 else b""

    def _switch(self, mode: int, switched_on: bool) -> None:
        if mode == 25:
            self._cursor_hidden = not switched_on
        elif mode in _TRACKED:
            (self._on.add if switched_on else self._on.discard)(mode)

    def undo(self) -> bytes:
        """What brings the terminal back; empty if all is as it was."""
        codes = b"".join(b"\x1b[?%dl" % mode for mode in sorted(self._on))
        return codes + (b"\x1b[?25h" if self._cursor_hidden else b"")
