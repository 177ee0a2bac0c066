"""WATCH: what the agent tells of changes to files."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from agentclient import AGENT, AgentClient
from sloplet.wire.schema import Op, Tag, WatchFlag, WatchMask

pytestmark = [pytest.mark.anyone, pytest.mark.skipif(not AGENT.exists(), reason="the agent is not built here")]


def watched(client: AgentClient, path: str, flags: int = 0):
    stream = client.open(Op.WATCH, (Tag.PATH, path), (Tag.FLAGS, flags))
    client.until(lambda: stream.reply is not None or stream.close is not None)
    assert stream.reply is not None, stream.close
    return stream


def seen(stream) -> list[tuple[int, bytes, bytes | None]]:
    return [(r[Tag.MASK], r[Tag.NAME], r[Tag.NAME2]) for r in stream.records()]


def test_watch(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w/old").touch()
    stream = watched(box, "w")
    (tmp_path / "w/new").write_bytes(b"x")
    (tmp_path / "w/new").chmod(0o600)
    (tmp_path / "w/new").rename(tmp_path / "w/renamed")
    (tmp_path / "w/renamed").rename(tmp_path / "outside")
    (tmp_path / "outside").rename(tmp_path / "w/back")
    (tmp_path / "w/old").unlink()
    box.until(lambda: (WatchMask.REMOVED, b"old", None) in seen(stream))
    assert seen(stream) == [
        (WatchMask.CREATED, b"new", None),
        (WatchMask.MODIFIED, b"new", None),
        (WatchMask.ATTRIBUTES, b"new", None),
        (WatchMask.RENAMED, b"new", b"renamed"),
        (WatchMask.REMOVED, b"renamed", None),
        (WatchMask.CREATED, b"back", None),
        (WatchMask.REMOVED, b"old", None),
    ]
    box.reset(stream)
    assert box.wait(stream).error == errno.ECANCELED
    assert box.call(Op.WATCH, (Tag.PATH, "none")).error == errno.ENOENT


def test_watch_a_single_file(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    stream = watched(box, "f")
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "f").unlink()
    box.until(lambda: (WatchMask.REMOVED, b"", None) in seen(stream))
    assert (WatchMask.MODIFIED, b"", None) in seen(stream)


def test_watch_recursively(box: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "w/a/b").mkdir(parents=True)
    stream = watched(box, "w", WatchFlag.RECURSIVE)
    (tmp_path / "w/a/b/f").touch()
    box.until(lambda: (WatchMask.CREATED, b"a/b/f", None) in seen(stream))
    (tmp_path / "w/n/m").mkdir(parents=True)
    (tmp_path / "w/n/m/f").touch()
    box.until(lambda: (WatchMask.CREATED, b"n/m/f", None) in seen(stream))
    (tmp_path / "w/n").rename(tmp_path / "w/a/moved")
    box.until(lambda: (WatchMask.RENAMED, b"n", b"a/moved") in seen(stream))
    (tmp_path / "w/a/moved/m/g").touch()
    box.until(lambda: (WatchMask.CREATED, b"a/moved/m/g", None) in seen(stream))
    (tmp_path / "w/a/moved").rename(tmp_path / "gone")
    box.until(lambda: (WatchMask.REMOVED, b"a/moved", None) in seen(stream))
    (tmp_path / "gone/m/unseen").touch()
    shutil.rmtree(tmp_path / "w/a")
    box.until(lambda: (WatchMask.REMOVED, b"a", None) in seen(stream))
    assert not any(b"unseen" in name for _, name, _ in seen(stream))


def test_watch_overflow_is_told(bare: AgentClient, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    stream = watched(bare, "w")
    stream.grants = False
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    names = [tmp_path / "w" / f"{i}" for i in range(200)]
    for _ in range((limit + 20_000) // 400 + 1):
        for name in names:
            name.touch()
        for name in names:
            name.unlink()
    stream.grants = True
    bare.grant(stream)
    bare.until(lambda: any(mask == WatchMask.OVERFLOW for mask, _, _ in seen(stream)), 60)
