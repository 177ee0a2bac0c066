"""Text for a model: bounded, with head and tail where something is left out, and always encodable. Pure."""

from __future__ import annotations

_ROUND = 200  # characters that may be given up to end a cut at a line's end


class Kept:
    """The first and the last characters of a text that may be endless, at most ``most`` of each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._head = ""
        self._tail: list[str] = []
        self._tail_size = 0
        self.size = 0  #: characters that came

    def add(self, text: str) -> None:
        self.size += len(text)
        room = self._most - len(self._head)
        if room > 0:
            self._head += text[:room]
            text = text[room:]
        if text:
            self._tail.append(text[-self._most :])
            self._tail_size += len(self._tail[-1])
            if self._tail_size > 4 * self._most:
                self._shrink()

    def _shrink(self) -> None:
        tail = "".join(self._tail)[-self._most :]
        self._tail, self._tail_size = [tail], len(tail)

    def cut(self, most: int) -> str:
        """What fits into ``most`` characters (not above that of the constructor); a note says what does not."""
        most = min(most, self._most)
        tail = "".join(self._tail)
        if self.size <= most:
            return self._head + tail
        first, last = most // 2, most - most // 2
        whole_tail = tail if len(tail) >= last else (self._head + tail)
        head, end = _to_line_end(self._head[:first]), _from_line_start(whole_tail[-last:] if last else "")
        return f"{head}\n{left_out(self.size - len(head) - len(end))}\n{end}"

    @property
    def last_line(self) -> str:
        """The last line that is not empty, for a word on how it goes."""
        text = "".join(self._tail)[-2000:] or self._head[-2000:]
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def left_out(count: int) -> str:
    return f"[... {count:,} characters left out ...]"


def shorten(text: str, most: int) -> str:
    """Head and tail of a text that is here already."""
    kept = Kept(most)
    kept.add(text)
    return kept.cut(most)


def share(most: int, first: int, second: int) -> tuple[int, int]:
    """How ``most`` characters are shared by two texts of these sizes: what one does not need is the other's."""
    half = most // 2
    if first <= half:
        return first, most - first
    if second <= half:
        return most - second, second
    return half, most - half


def clean(text: str) -> str:
    """The same text, without what cannot be sent: names of files may hold bytes that are no Unicode."""
    return text.encode("utf-8", "replace").decode()


def one_line(text: str, most: int = 200) -> str:
    """For a progress message: printable, one line, short."""
    shown = "".join(char if char.isprintable() else " " for char in clean(text)).strip()
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _to_line_end(text: str) -> str:
    end = text.rfind("\n", max(0, len(text) - _ROUND))
    return text[:end] if end > 0 else text


def _from_line_start(text: str) -> str:
    start = text.find("\n", 0, _ROUND)
    return text[start + 1 :] if start >= 0 else text
