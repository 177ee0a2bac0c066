"""The log of decisions: bounded, in order, harmless to print, and on disk for those that have a name."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from sloplet.network import log as module
from sloplet.network.log import Decision, NetworkLog, path_of

pytestmark = pytest.mark.anyone


def test_a_connection_is_one_row_and_a_follower_sees_each_change() -> None:
    log = NetworkLog("box")
    first = log.add("a.example.com", "1.2.3.4", 443, "allow", rule="a.example.com", state="open")
    log.add("b.example.com", "", 443, "deny", rule="default", reason="no")
    seen = log.read()
    assert [row.name for row in seen] == ["a.example.com", "b.example.com"]
    log.change(first, state="done", bytes_in=7)
    (news,) = log.read(after=seen[-1].seq)
    assert (news.connection, news.state, news.bytes_in) == (first.connection, "done", 7)
    assert [row.name for row in log.read()] == ["b.example.com", "a.example.com"]
    assert [row.name for row in log.read(limit=1)] == ["b.example.com"]
    assert log.read(after=news.seq) == []


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 10)
    log = NetworkLog("box")
    rows = [log.add(f"n{number}", "", 1, "deny", reason=f"r{number}") for number in range(25)]
    assert [row.name for row in log.read()] == [f"n{number}" for number in range(15, 25)]
    log.change(rows[0], bytes_in=1)  # of one that is forgotten
    assert len(log.read()) == 10


def test_what_comes_from_inside_cannot_speak_to_a_terminal() -> None:
    log = NetworkLog("box")
    row = log.add("evil\x1b]0;title\x07\u202e.com", "1.2.3.4\n", 1, "deny", reason="x\r\ny" + "z" * 5000)
    for text in (row.name, row.address, row.reason):
        assert text.isprintable()
        assert len(text) <= 1024


def test_refusals_since_a_command_began_are_told_once_each() -> None:
    log = NetworkLog("box")
    log.add("a", "", 1, "deny", reason="before")
    mark = log.denials
    assert log.denied_since(mark) == []
    for reason in ("one", "two", "one"):
        log.add("a", "", 1, "deny", reason=reason)
    log.add("a", "", 1, "fail", reason="not refused")
    log.change(log.add("a", "", 1, "allow", state="open"), verdict="cut", reason="cut", state="done")
    assert log.denied_since(mark) == ["one", "two", "cut"]
    mark = log.denials
    refused = log.change(log.add("a", "", 1, "allow", state="open"), verdict="deny", reason="said")
    assert log.denied_since(mark) == ["said"]
    mark = log.denials
    log.change(refused, state="done")  # its end is no second refusal
    assert log.denied_since(mark) == []
    for number in range(50):
        log.add("a", "", 1, "deny", reason=str(number))
    assert len(log.denied_since(mark)) == 20


def test_who_listens_is_told_of_decisions_not_of_counters() -> None:
    told: list[Decision] = []
    log = NetworkLog("box", tell=told.append)
    row = log.add("a", "", 1, "allow", state="open")
    row = log.note(row, bytes_in=5)
    row = log.change(row, state="done")
    assert [item.verdict for item in told] == ["allow"]
    log.change(row, verdict="cut")
    assert [item.verdict for item in told] == ["allow", "cut"]


def test_a_file_is_private_goes_on_and_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "network").mkdir()
    path = path_of(tmp_path, "box1")
    log = NetworkLog("box1", path)
    row = log.add("a.example.com", "1.2.3.4", 443, "allow", state="open")
    assert not path.exists()  # it is not over
    log.change(row, state="done", bytes_out=3)
    log.add("b.example.com", "", 443, "deny", reason="no")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["a.example.com", "b.example.com"]
    path.write_text(path.read_text() + "half a li")  # a crash
    again = NetworkLog("box1", path)
    assert [item.name for item in again.read()] == ["a.example.com", "b.example.com"]
    new = again.add("c.example.com", "", 443, "deny")
    assert new.seq > log.read()[-1].seq
    assert new.connection > log.read()[-1].connection
    monkeypatch.setattr(module, "ROTATE", 1000)
    for _ in range(30):
        again.add("d.example.com", "", 443, "deny")
    assert sorted(each.name for each in path.parent.iterdir()) == ["box1.jsonl", "box1.jsonl.1"]
    assert sum(each.stat().st_size for each in path.parent.iterdir()) < 4000


def test_a_file_that_cannot_be_written_costs_no_connection(tmp_path: Path) -> None:
    (tmp_path / "network").mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path_of(tmp_path, "box1").symlink_to(victim)
    log = NetworkLog("box1", path_of(tmp_path, "box1"))
    log.add("a", "", 1, "deny", reason="no")
    assert log.lost
    assert victim.read_text() == "precious"
    assert len(log.read()) == 1
