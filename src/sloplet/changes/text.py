"""Unified diffs like git's, of hostile text: the work is bounded, whatever the files hold.

difflib's matcher can take minutes for a few hundred KiB of chosen lines. Here it is Myers' greedy algorithm, which
stops when its steps are used up; what lies between the common beginning and end is then shown as replaced.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

MAX_TEXT = 256 * 1024  # of each side
MAX_TOTAL = 8 * 2**20  # of all files of one diff
_STEPS_ONE = 400_000
_STEPS_ALL = 8_000_000
_CONTEXT = 3

_Block = tuple[int, int, int]  # equal lines: where in old, where in new, how many


class Effort:
    """Steps that are left for all files of one diff."""

    def __init__(self, steps: int = _STEPS_ALL) -> None:
        self.left = steps

    def take(self) -> int:
        """What one file may use."""
        return max(0, min(self.left, _STEPS_ONE))


def as_text(data: bytes) -> str | None:
    """None if it is not text, or too long to be shown."""
    if len(data) > MAX_TEXT or b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def unified(path: str, old: str | None, new: str | None, effort: Effort | None = None) -> str:
    """The diff, headers included; "" if no line differs. None: there is no file on that side."""
    if (old or "") == (new or ""):
        return ""
    before, after = _lines(old or ""), _lines(new or "")
    head = [
        f"--- {_quoted('a' + path) if old is not None else '/dev/null'}\n",
        f"+++ {_quoted('b' + path) if new is not None else '/dev/null'}\n",
    ]
    return "".join(head + list(_hunks(before, after, _blocks(before, after, effort or Effort()))))


def _lines(text: str) -> list[str]:
    """Lines with their ends. A newline is the only end: a carriage return or a form feed is text like any other."""
    lines = text.split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else [])


def _quoted(path: str) -> str:
    """As git writes names that would not survive in a header line."""
    plain = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
    out = []
    for char in path:
        if char in plain:
            out.append(plain[char])
        elif not char.isprintable():
            out.extend(f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogateescape"))
        else:
            out.append(char)
    text = "".join(out)
    return path if text == path else f'"{text}"'


def _blocks(old: list[str], new: list[str], effort: Effort) -> list[_Block]:
    """Runs of equal lines, in order; the last is empty and at both ends."""
    start, least = 0, min(len(old), len(new))
    while start < least and old[start] == new[start]:
        start += 1
    end = 0
    while end < least - start and old[-1 - end] == new[-1 - end]:
        end += 1
    blocks: list[_Block] = [(0, 0, start)] if start else []
    middle = _myers(old[start : len(old) - end], new[start : len(new) - end], effort)
    blocks += [(a + start, b + start, n) for a, b, n in middle]
    if end:
        blocks.append((len(old) - end, len(new) - end, end))
    return [*blocks, (len(old), len(new), 0)]


def _myers(old: list[str], new: list[str], effort: Effort) -> list[_Block]:
    """Equal runs of a shortest edit script; none if that takes too many steps."""
    if not old or not new:
        return []
    allowed, used = effort.take(), 0
    most = min(len(old) + len(new), math.isqrt(2 * allowed) + 1)
    furthest = array("i", [-1]) * (2 * most + 3)  # how far in old each diagonal has come; diagonal k is at most + 1 + k
    furthest[most + 2] = 0
    trail: list[array[int]] = []  # before each round, from diagonal -rounds - 1 on
    for edits in range(most + 1):
        used += edits + 1
        if used > allowed:
            break
        trail.append(furthest[most - edits : most + edits + 3])
        for k in range(-edits, edits + 1, 2):
            at = most + 1 + k
            down = k == -edits or (k != edits and furthest[at - 1] < furthest[at + 1])
            x = furthest[at + 1] if down else furthest[at - 1] + 1
            y = x - k
            while x < len(old) and y < len(new) and old[x] == new[y]:
                x, y, used = x + 1, y + 1, used + 1
            furthest[at] = x
            if x >= len(old) and y >= len(new):
                effort.left -= used
                return _trace(trail, len(old), len(new))
    effort.left -= used
    return []


def _trace(trail: list[array[int]], x: int, y: int) -> list[_Block]:
    """Back from the end along the furthest points, collecting the diagonals."""
    blocks: list[_Block] = []
    for edits in range(len(trail) - 1, 0, -1):
        furthest, k = trail[edits], x - y
        at = edits + 1 + k
        down = k == -edits or (k != edits and furthest[at - 1] < furthest[at + 1])
        from_x = furthest[at + 1] if down else furthest[at - 1]
        start = from_x if down else from_x + 1
        if x > start:
            blocks.append((start, start - k, x - start))
        x, y = from_x, from_x - (k + 1 if down else k - 1)
    if x:
        blocks.append((0, 0, x))
    return blocks[::-1]


def _hunks(old: list[str], new: list[str], blocks: list[_Block]) -> Iterator[str]:
    """Changes with their surroundings; those that touch are one hunk."""
    changes = []
    x = y = 0
    for a, b, count in blocks:
        if a > x or b > y:
            changes.append((x, a, y, b))
        x, y = a + count, b + count
    at = 0
    while at < len(changes):
        last = at
        while last + 1 < len(changes) and changes[last + 1][0] - changes[last][1] <= 2 * _CONTEXT:
            last += 1
        yield from _hunk(old, new, changes[at : last + 1])
        at = last + 1


def _hunk(old: list[str], new: list[str], changes: list[tuple[int, int, int, int]]) -> Iterator[str]:
    lead = min(_CONTEXT, changes[0][0])
    tail = min(_CONTEXT, len(old) - changes[-1][1])
    from_x, to_x = changes[0][0] - lead, changes[-1][1] + tail
    from_y, to_y = changes[0][2] - lead, changes[-1][3] + tail
    yield f"@@ -{_range(from_x, to_x)} +{_range(from_y, to_y)} @@\n"
    x = from_x
    for start, stop, new_start, new_stop in changes:
        yield from (_line(" ", line) for line in old[x:start])
        yield from (_line("-", line) for line in old[start:stop])
        yield from (_line("+", line) for line in new[new_start:new_stop])
        x = stop
    yield from (_line(" ", line) for line in old[x:to_x])


def _range(start: int, stop: int) -> str:
    count = stop - start
    if count == 1:
        return str(start + 1)
    return f"{start + 1 if count else start},{count}"


def _line(sign: str, line: str) -> str:
    return f"{sign}{line}" if line.endswith("\n") else f"{sign}{line}\n\\ No newline at end of file\n"
