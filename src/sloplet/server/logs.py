"""The server's log: one line an event on stderr, as text or JSON. Never a key, whoever wrote the line.

Lines are written by a thread, from a bounded queue: a stderr that nobody reads holds up nothing, and loses lines. What
was done for whom is in the audit log (``audit.py``); this one tells about the server itself.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import sys
import threading
import time
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener
from typing import Any

from .limits import Bucket

_KEPT = 10_000  # lines that may wait
#: The id of a key may be told, its secret may not; and neither what else looks like it.
_SECRET = re.compile(r"(slp_[a-z0-9]{12}_)[A-Za-z0-9_-]+")
_BEARER = re.compile(r"(?i)(bearer\s+)(?!slp_)\S+")
#: What a record has by itself; the rest was given with ``extra``.
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}

#: Who writes lines about requests that are none.
_STRANGERS = ("uvicorn.error", "asyncssh")

log = logging.getLogger("sloplet.server")


def without_keys(text: str) -> str:
    return _BEARER.sub(r"\1***", _SECRET.sub(r"\1***", text))


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        more = "".join(f" {name}={_shown(value)}" for name, value in _extra(record).items())
        text = f"{stamp} {record.levelname.lower()} {_one_line(record.getMessage())}{more}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return without_keys(text)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3), "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage(), **_extra(record),
        }  # fmt: skip
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return without_keys(json.dumps(line, default=str))


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _PLAIN and value not in (None, "")}


def _shown(value: object) -> str:
    text = _one_line(str(value))
    return json.dumps(text) if " " in text or not text else text


def _one_line(text: str) -> str:
    """What came from outside cannot make up lines."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


class Sparing(logging.Filter):
    """What anybody can cause by sending nonsense: ``burst`` lines at once, then one a second. The next that is told
    says how many were not."""

    def __init__(self, burst: float = 50.0) -> None:
        super().__init__()
        self._bucket = Bucket(1.0, burst)
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if self._bucket.take(time.monotonic()):
            self._left_out += 1
            return False
        if self._left_out:
            record.left_out, self._left_out = self._left_out, 0
        return True


class _Patient(QueueHandler):
    """Formatted when it is told, so that nothing changes until it is written; dropped if too much waits."""

    lost = 0

    def prepare(self, record: logging.LogRecord) -> Any:
        return self.format(record)

    def enqueue(self, record: Any) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.lost += 1

    def handleError(self, record: logging.LogRecord) -> None:
        self.lost += 1


class _Writer(QueueListener):
    def handle(self, record: Any) -> None:
        try:
            sys.stderr.write(record + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass  # there is nobody to tell

    def finish(self, seconds: float) -> None:
        """As ``stop``, without waiting for ever for a stderr that nobody reads."""
        thread: threading.Thread | None = self._thread
        with suppress(queue.Full):
            self.enqueue_sentinel()
        if thread is not None:
            thread.join(seconds)


class Logs:
    """While it is open, all logging of this process goes to stderr. ``close`` writes what waits."""

    def __init__(self, kind: str, level: int = logging.INFO) -> None:
        lines: queue.Queue[Any] = queue.Queue(_KEPT)
        self._handler = _Patient(lines)
        self._handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
        self._writer = _Writer(lines)
        self._writer.start()
        root = logging.getLogger()
        root.addHandler(self._handler)
        root.setLevel(logging.WARNING)
        log.setLevel(level)
        self._sparing = Sparing()
        for name in _STRANGERS:
            logging.getLogger(name).addFilter(self._sparing)

    @property
    def lost(self) -> int:
        return self._handler.lost

    def close(self) -> None:
        for name in _STRANGERS:
            logging.getLogger(name).removeFilter(self._sparing)
        logging.getLogger().removeHandler(self._handler)
        self._writer.finish(2.0)
