"""The content of volumes for E2B's clients: what needs room on the disk, and what is done off the server's loop."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sloplet import Volumes
from sloplet.errors import DiskFull
from sloplet.server.e2b import volumecontent
from sloplet.server.e2b.answers import speak_api
from sloplet.server.e2b.api import Asked
from sloplet.server.e2b.volumecontent import Opened, VolumeContent
from sloplet.state.home import Home


class Door:
    """Requests to a volume's content, as if a token had opened it."""

    def __init__(self, path: Path) -> None:
        self.home = Home(path / "home").open()
        Volumes(self.home).create("data")
        self.folder = self.home.volumes / "data" / "data"
        self.content = VolumeContent(cast(Any, None), lambda tenant, info: "vol")

    def ask(self, what: Callable[[Asked], Awaitable[Any]], path: str, *body: bytes) -> tuple[Any, bytes]:
        """The answer, and what was sent by itself."""
        sent, left = bytearray(), list(body)

        async def receive() -> dict[str, Any]:
            data = left.pop(0) if left else b""
            return {"type": "http.request", "body": data, "more_body": bool(left)}

        async def send(message: Any) -> None:
            sent.extend(message.get("body", b""))

        scope = {"query_string": f"path={path}".encode(), volumecontent._OPENED: Opened("k", "t", "data", "vol")}
        caller = SimpleNamespace(tenant=SimpleNamespace(name="t", home=self.home))
        asked = Asked(cast(Any, None), cast(Any, caller), {"volume": "vol"}, {}, {}, scope, receive, cast(Any, send))

        async def work() -> Any:
            return await what(asked)

        return asyncio.run(work()), bytes(sent)

    def left(self) -> list[str]:
        return sorted(os.listdir(self.folder))


@pytest.fixture
def door(tmp_path: Path) -> Any:
    made = Door(tmp_path)
    yield made
    asyncio.run(made.content.aclose())


def test_what_is_left_of_the_disk_is_the_servers(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    content = door.content
    assert door.ask(content.write, "/before", b"text")[0].status == 201
    full: list[int] = [0]

    def check(home: Home) -> None:
        assert home is door.home
        full[0] -= 1
        if full[0] < 0:
            raise DiskFull("the disk of the server is nearly full")

    monkeypatch.setattr(volumecontent, "check_room", check)
    for what in (content.write, content.make_folder):
        full[0] = 0
        with pytest.raises(DiskFull) as caught:
            door.ask(what, "/new", b"text")
        assert speak_api(caught.value)[0] == 507
    piece = b"x" * volumecontent._PIECE
    full[0] = 3
    with pytest.raises(DiskFull):  # in the middle of it
        door.ask(content.write, "/new", piece, piece, piece)
    assert door.left() == ["before"], "nothing is left of it"
    full[0] = 4
    assert door.ask(content.write, "/new", piece, piece, piece)[0].body["size"] == 3 * len(piece)
    full[0] = 0
    assert door.ask(content.look, "/new")[0].status == 200
    assert door.ask(content.read, "/before") == (None, b"text")
    assert door.ask(content.remove, "/new")[0].status == 204, "that makes room"


def test_a_listing_is_made_off_the_loop(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    assert door.ask(door.content.listing, "/") == (None, b"[]")
    names = [f"{number:04}" for number in range(2 * volumecontent._ENTRIES + 1)]
    for name in (*names, os.fsdecode(b"not\xffutf8"), "\u00e4"):
        (door.folder / name).write_text("")
    threads: set[int] = set()
    entry = volumecontent.entry

    def noted(found: dict[str, Any]) -> dict[str, Any]:
        threads.add(threading.get_ident())
        return entry(found)

    monkeypatch.setattr(volumecontent, "entry", noted)
    answer, sent = door.ask(door.content.listing, "/")
    assert answer is None
    found = json.loads(sent)
    assert sorted(each["name"] for each in found) == sorted([*names, "not\ufffdutf8", "\u00e4"])
    assert found[0].keys() >= {"path", "type", "size", "mode", "uid", "gid", "mtime"}
    assert threads
    assert threading.get_ident() not in threads
