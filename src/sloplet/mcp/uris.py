"""The addresses of resources: ``sloplet://SANDBOX/files/PATH`` and ``sloplet://SANDBOX/processes/PID/output``. Pure."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes

SCHEME = "sloplet"
FILES = "sloplet://{sandbox}/files/{+path}"
OUTPUT = "sloplet://{sandbox}/processes/{pid}/output"
_URI_RE = re.compile(r"sloplet://([A-Za-z0-9-]{1,64})/(files|processes)/(.+)\Z", re.DOTALL)
_OUTPUT_RE = re.compile(r"([0-9]{1,10})/output\Z")
MAX_URI = 16_384


@dataclass(frozen=True)
class FileAt:
    sandbox: str
    path: str  #: absolute


@dataclass(frozen=True)
class OutputOf:
    sandbox: str
    pid: int


def file_uri(sandbox: str, path: str, workdir: str) -> str:
    whole = posixpath.normpath(posixpath.join(workdir, path)).lstrip("/")
    return f"{SCHEME}://{sandbox}/files/{quote(whole.encode('utf-8', 'surrogateescape'))}"


def output_uri(sandbox: str, pid: int) -> str:
    return f"{SCHEME}://{sandbox}/processes/{pid}/output"


def parse(uri: str) -> FileAt | OutputOf | None:
    """What an address means; None: nothing."""
    found = _URI_RE.match(uri) if len(uri) <= MAX_URI else None
    if found is None:
        return None
    sandbox, kind, rest = found.groups()
    if kind == "files":
        path = unquote_to_bytes(rest).decode("utf-8", "surrogateescape")
        return None if "\0" in path else FileAt(sandbox, "/" + path.lstrip("/"))
    output = _OUTPUT_RE.match(rest)
    return None if output is None else OutputOf(sandbox, int(output[1]))
