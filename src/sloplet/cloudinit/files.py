"""write_files of a cloud-config. Pure."""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from typing import Any

from .document import Value
from .plan import File

MAX_FILE = 16 * 2**20
_KNOWN = ("path", "content", "encoding", "owner", "permissions", "append", "defer")
_OWNER_RE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?\Z")
_BASE64 = ("b64", "base64")
_GZIP = ("gz", "gzip")
_BOTH = tuple(f"{gz}+{b64}" for gz in _GZIP for b64 in _BASE64)
_TEXT = ("text/plain", "text", "plain")


def files_of(value: Value) -> dict[str, Any]:
    files: list[File] = []
    deferred: list[File] = []
    for item in value.list("write_files"):
        later, file = _file(item)
        (deferred if later else files).append(file)
    return {"files": tuple(files), "deferred": tuple(deferred)}


def _file(item: Value) -> tuple[bool, File]:
    given = dict(item.entries("a file of write_files", (*_KNOWN, "source")))
    if "source" in given:
        raise given["source"].wrong(
            "source: makes no sense in a sandbox", "download it under runcmd:, where the network's policy applies"
        )
    if "path" not in given:
        raise item.wrong("a file of write_files has no path")
    path = given["path"].string("path")
    if not path.startswith("/") or ".." in path.split("/") or path.endswith("/") or len(path) > 4000:
        raise given["path"].wrong(f"{path[:200]!r} is not the absolute path of a file")
    file = File(
        item.line,
        path,
        _content(given),
        mode=permissions(given["permissions"]) if "permissions" in given else 0o644,
        owner=_owner(given["owner"]) if "owner" in given else "root:root",
        append="append" in given and given["append"].boolean("append"),
    )
    return "defer" in given and given["defer"].boolean("defer"), file


def _content(given: dict[str, Value]) -> bytes:
    value = given.get("content")
    where = given.get("encoding")
    encoding = "text" if where is None else where.string("encoding").lower()
    if where is not None and encoding not in _TEXT + _BASE64 + _BOTH + _GZIP:
        raise where.wrong(f"there is no encoding {encoding[:40]!r}", "one of b64, gz+b64, text/plain")
    if value is None or value.is_null:
        return b""
    data = value.text.encode() if value.kind == "binary" else value.string("content").encode("utf-8", "surrogateescape")
    if value.kind == "binary":
        data = _base64(value, data)
    if encoding in _BASE64 + _BOTH:
        data = _base64(value, data)
    return _unzipped(value, data) if encoding in _BOTH + _GZIP else data


def _base64(value: Value, data: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(data.split()), validate=True)
    except binascii.Error:
        raise value.wrong("the content is not base64") from None


def _unzipped(value: Value, data: bytes) -> bytes:
    unpack = zlib.decompressobj(wbits=31)
    try:
        plain = unpack.decompress(data, MAX_FILE + 1)
    except zlib.error:
        raise value.wrong("the content is not gzip", "text that is gzip in base64 has encoding: gz+b64") from None
    if len(plain) > MAX_FILE or not unpack.eof:
        raise value.wrong(f"the content is cut off, or longer than {MAX_FILE} bytes")
    return plain


def permissions(value: Value) -> int:
    """Octal. cloud-init takes ``644`` without quotes for the decimal number, which nobody means: it is refused."""
    text = value.text
    octal = text.removeprefix("0o") if text.startswith("0o") else text
    if value.kind not in ("str", "int") or not re.fullmatch(r"[0-7]{3,5}", octal):
        raise value.wrong(f"{text[:40]!r} are no permissions", "write them in quotes, for example '0644'")
    if not value.quoted and not text.startswith("0"):
        raise value.wrong(
            f"permissions {text} without quotes are a decimal number to cloud-init", f"write '{octal.zfill(4)}'"
        )
    return int(octal, 8) & 0o7777


def _owner(value: Value) -> str:
    text = value.string("owner")
    if not _OWNER_RE.match(text):
        raise value.wrong(f"{text[:80]!r} is not an owner", "for example root:root")
    return text
