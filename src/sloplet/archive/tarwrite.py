"""Headers of a tar, to be followed by a member's data: ustar, with PAX records for what does not fit. Pure."""

from __future__ import annotations

BLOCK = 512
END = bytes(2 * BLOCK)
_KINDS = {"file": b"0", "hardlink": b"1", "symlink": b"2", "folder": b"5"}
_MOST_ID = 0o7777777
_MOST_SIZE = 0o77777777777


def padding(size: int) -> bytes:
    """What follows a member's data."""
    return bytes(-size % BLOCK)


def header(
    name: bytes, *, kind: str = "file", size: int = 0, mode: int = 0o600, uid: int = 0, gid: int = 0,
    mtime_ns: int = 0, link: bytes = b"",
) -> bytes:  # fmt: skip
    """The same bytes for the same facts, always."""
    seconds, fraction = divmod(mtime_ns, 10**9)
    records = {}
    if len(name) > 100:
        records[b"path"] = name
    if len(link) > 100:
        records[b"linkpath"] = link
    if size > _MOST_SIZE:
        records[b"size"] = b"%d" % size
    if uid > _MOST_ID:
        records[b"uid"] = b"%d" % uid
    if gid > _MOST_ID:
        records[b"gid"] = b"%d" % gid
    if fraction or not 0 <= seconds <= _MOST_SIZE:
        records[b"mtime"] = _decimal(mtime_ns)
    extension = b""
    if records:
        data = b"".join(_record(key, value) for key, value in records.items())
        extension = _block(b"pax", b"x", len(data), 0o644, 0, 0, 0, b"") + data + padding(len(data))
    plain = _block(
        name[:100], _KINDS[kind], size if size <= _MOST_SIZE else 0, mode, uid if uid <= _MOST_ID else 0,
        gid if gid <= _MOST_ID else 0, seconds if 0 <= seconds <= _MOST_SIZE else 0, link[:100],
    )  # fmt: skip
    return extension + plain


def _decimal(mtime_ns: int) -> bytes:
    seconds, fraction = divmod(abs(mtime_ns), 10**9)
    return b"%s%d.%09d" % (b"-" if mtime_ns < 0 else b"", seconds, fraction)


def _record(key: bytes, value: bytes) -> bytes:
    """``LENGTH KEY=VALUE\\n``; LENGTH counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(b"%d" % rest)
    length = rest + len(b"%d" % length)
    return b"%d %s=%s\n" % (length, key, value)


def _block(name: bytes, kind: bytes, size: int, mode: int, uid: int, gid: int, mtime: int, link: bytes) -> bytes:
    head = b"%b%07o\0%07o\0%07o\0%011o\0%011o\0" % (name.ljust(100, b"\0"), mode, uid, gid, size, mtime)
    tail = kind + link.ljust(100, b"\0") + b"ustar\x0000"
    block = (head + b" " * 8 + tail).ljust(BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]
