"""The audit log: appended whole, moved aside when full, read from its end; and logs without keys."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sloplet.errors import RequestInvalid
from sloplet.server.audit import Audit, AuditQuery, first_word, follow, read
from sloplet.server.backup import check_backup, make_backup
from sloplet.server.keys import Key, KeyLimits, Keys
from sloplet.server.logs import JsonFormatter, Logs, Sparing, TextFormatter
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone

KEY = Key("k" * 12, "ci", "team", False, KeyLimits(), 0.0)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").open()


def actions(home: Home, query: AuditQuery | None = None, limit: int = 1000) -> list[str]:
    return [line["action"] for line in read(home, query or AuditQuery(), limit=limit).items]


def test_a_line_says_who_and_what(home: Home) -> None:
    audit = Audit(home)
    audit.record(
        "exec.run", key=KEY, address="10.0.0.1", request="r1", sandbox="box", status=403, verdict="refused",
        error="NotAllowed", ms=1.26, detail="make",
    )  # fmt: skip
    audit.close()
    assert stat.S_IMODE(audit.path.stat().st_mode) == 0o600
    line = json.loads(audit.path.read_text())
    assert line.pop("time") > 1e9
    assert line == {
        "action": "exec.run", "verdict": "refused", "key": "k" * 12, "name": "ci", "tenant": "team", "status": 403,
        "address": "10.0.0.1", "sandbox": "box", "error": "NotAllowed", "ms": 1.3, "request": "r1", "detail": "make",
    }  # fmt: skip


def test_full_files_are_moved_aside_and_the_oldest_goes(home: Home) -> None:
    audit = Audit(home, most=2000, kept=3)
    for number in range(100):
        audit.record(f"a.{number}")
    audit.close()
    files = sorted(path.name for path in audit.path.parent.glob("audit*"))
    assert files == ["audit.1.jsonl", "audit.2.jsonl", "audit.3.jsonl", "audit.jsonl"] or len(files) == 3
    assert all(path.stat().st_size < 2400 for path in audit.path.parent.glob("audit*"))
    found = actions(home)
    assert found == [
        f"a.{number}" for number in range(99, 99 - len(found), -1)
    ]  # newest first, nothing between missing
    assert 20 < len(found) < 50


def test_pages(home: Home) -> None:
    audit = Audit(home, most=5000)
    for number in range(60):
        audit.record(f"a.{number}")
    seen: list[str] = []
    cursor = None
    while True:
        page = read(home, AuditQuery(), limit=7, cursor=cursor)
        seen += [line["action"] for line in page.items]
        audit.record("later")  # what comes meanwhile moves no page
        cursor = page.next
        if cursor is None:
            break
    audit.close()
    assert seen == [f"a.{number}" for number in range(59, -1, -1)]
    for wrong in ("", "x", "1", "1-2-3", "-", "1-zz"):
        with pytest.raises(RequestInvalid):
            read(home, AuditQuery(), cursor=wrong)
    assert read(home, AuditQuery(), cursor="1-2").items == []  # of a file that is gone


def test_one_question_reads_so_much_only(home: Home) -> None:
    audit = Audit(home)
    audit.record("rare")
    for _ in range(100):
        audit.record("common")
    audit.close()
    page = read(home, AuditQuery(action="rare"), scan=2000)
    assert page.items == []
    assert page.next is not None
    looks = 1
    while not page.items:
        page = read(home, AuditQuery(action="rare"), scan=2000, cursor=page.next)
        looks += 1
    assert looks > 3


def test_filters(home: Home) -> None:
    audit = Audit(home)
    audit.record("sandboxes.create", key=KEY, sandbox="a,b")
    audit.record("sandboxesx", tenant="other")
    audit.record("exec.run", verdict="refused", sandbox="a")
    audit.close()
    assert actions(home, AuditQuery(key="ci")) == ["sandboxes.create"]
    assert actions(home, AuditQuery(key="k" * 12)) == ["sandboxes.create"]
    assert actions(home, AuditQuery(key_id="k" * 12)) == ["sandboxes.create"]
    assert actions(home, AuditQuery(action="sandboxes")) == ["sandboxes.create"]
    assert actions(home, AuditQuery(sandbox="a")) == ["exec.run", "sandboxes.create"]
    assert actions(home, AuditQuery(verdict="refused")) == ["exec.run"]
    assert actions(home, AuditQuery(tenant="other")) == ["sandboxesx"]
    assert actions(home, AuditQuery(since=2e9)) == []
    assert actions(home, AuditQuery(until=1e9)) == []


def test_a_line_that_was_cut_off_is_no_line(home: Home) -> None:
    audit = Audit(home)
    audit.record("one")
    with open(audit.path, "ab") as file:
        file.write(b'{"time": 1, "acti')
        file.write(b'\n{"time": "x"}\nnull\n[]\n\xff\n')
    audit.record("two")
    audit.close()
    assert actions(home) == ["two", "one"]


def test_a_disk_that_is_full_stops_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = Audit(home)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sloplet.server.audit.os.write", full)
    audit.record("lost")
    assert audit.failures == 1
    monkeypatch.setattr("sloplet.server.audit.os.write", real)
    audit.record("kept")
    audit.close()
    assert actions(home) == ["kept"]


def test_no_link_is_followed(home: Home, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("")
    (home.path / "server").mkdir(mode=0o700)
    (home.path / "server" / "audit.jsonl").symlink_to(target)
    audit = Audit(home)
    audit.record("x")
    assert audit.failures == 1
    assert target.read_text() == ""


def test_following(home: Home) -> None:
    audit = Audit(home, most=1000)
    audit.record("before")
    lines = follow(home, AuditQuery(), wait=0.001)
    found: list[str] = []
    import threading

    reader = threading.Thread(target=lambda: found.extend(next(lines)["action"] for _ in range(20)), daemon=True)
    reader.start()
    for number in range(10_000):
        audit.record(f"a.{number}")
        reader.join(0.002)
        if not reader.is_alive():
            break
    audit.close()
    lines.close()
    assert len(found) == 20
    start = int(found[0].partition(".")[2])
    assert found == [f"a.{number}" for number in range(start, start + 20)]


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("make test", "make"),
        (["curl", "-H", "Authorization: x"], "curl"),
        ("  ls", "ls"),
        ("TOKEN=abc make", ""),
        ("", ""),
        ([], ""),
        (None, ""),
        (7, ""),
        ([7], ""),
        ("x" * 500, "x" * 120),
    ],
)
def test_first_word(command: object, word: str) -> None:
    assert first_word(command) == word


def test_the_command_line(home: Home) -> None:
    audit = Audit(home)
    audit.record("sandboxes.create", key=KEY, status=201)
    audit.record("evil\x1b[31m", status=403, verdict="refused", error="NotAllowed")
    audit.close()
    environment = {**os.environ, "SLOPLET_HOME": str(home.path)}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "sloplet.cli", "audit", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert [line["status"] for line in json.loads(run("--json"))] == [201, 403]
    assert "\x1b" not in run()
    assert [line["status"] for line in json.loads(run("--json", "--verdict", "refused", "--since", "1h"))] == [403]
    assert json.loads(run("--json", "--key", "nobody")) == []


# -- logs ---------------------------------------------------------------------------------


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "levelname": "INFO", "name": "x", **extra})
    return made


def test_logs_hold_no_key_and_no_lines_of_others() -> None:
    key = "slp_" + "a" * 12 + "_" + "Bc-_" * 10 + "xyz"
    for formatter in (TextFormatter(), JsonFormatter()):
        text = formatter.format(record(f"got {key}\n2026 error fake", header=f"Bearer {key}", other="Bearer abc.def"))
        assert "Bc-_" not in text
        assert "abc.def" not in text
        assert "slp_" + "a" * 12 in text
        assert "\n" not in text
    try:
        raise ValueError(key)
    except ValueError:
        import sys as system

        line = JsonFormatter().format(record("failed", exc_info=system.exc_info(), request_id="r1"))
    found = json.loads(line)
    assert found["request_id"] == "r1"
    assert "Traceback" in found["traceback"]
    assert "Bc-_" not in line


def test_a_stderr_that_nobody_reads_holds_up_nothing(tmp_path: Path) -> None:
    program = """
import logging, os, sys, time
from sloplet.server.logs import Logs, log
read_end, write_end = os.pipe()
os.dup2(write_end, 2)
logs = Logs("json")
began = time.monotonic()
for number in range(30_000):
    log.info("x" * 100)
assert logs.lost > 0
logs.close()
print(time.monotonic() - began < 20, flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True"


def test_logs_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logs = Logs("text")
    logging.getLogger("sloplet.server").info("hello", extra={"request_id": "r1"})
    logs.close()
    assert "info hello request_id=r1" in capsys.readouterr().err


# -- backups --------------------------------------------------------------------------------


def test_a_backup_is_whole_and_can_be_used(home: Home, tmp_path: Path) -> None:
    keys = Keys(home)
    _, text = keys.create("ci")
    Keys(home.tenant("ci")).list()  # a tenant with records
    (home.path / "server").mkdir(mode=0o700, exist_ok=True)
    (home.path / "server" / "x.lock").write_text("no")
    Audit(home).record("x")
    target = tmp_path / "backup"
    manifest = make_backup(home, target)
    assert set(manifest["files"]) == {"state.db", "tenants/ci/state.db", "server/audit.jsonl"}
    assert check_backup(target) == []
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in target.rglob("*"))
    keys.revoke("ci")  # later than the backup
    keys.close()
    restored = Keys(Home(target))
    assert restored.verify(text).name == "ci"
    restored.close()
    with pytest.raises(Exception, match="already"):
        make_backup(home, target)


def test_a_backup_that_fails_leaves_nothing(home: Home, tmp_path: Path) -> None:
    Keys(home).list()
    (home.path / "tenants" / "bad").mkdir(parents=True, mode=0o700)
    (home.path / "tenants" / "bad" / "state.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(Exception, match=r"state\.db"):
        make_backup(home, tmp_path / "backup")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_damaged_backup_is_found_out(home: Home, tmp_path: Path) -> None:
    Keys(home).list()
    make_backup(home, tmp_path / "backup")
    with open(tmp_path / "backup" / "state.db", "r+b") as file:
        file.seek(5000)
        file.write(b"!")
    assert check_backup(tmp_path / "backup") == ["state.db: it was changed"]
    (tmp_path / "backup" / "manifest.json").unlink()
    assert len(check_backup(tmp_path / "backup")) == 1


def test_strangers_cannot_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("sloplet.server.logs.time.monotonic", lambda: now[0])
    sparing = Sparing(burst=3)
    lines = [logging.makeLogRecord({"msg": "Invalid HTTP request received."}) for _ in range(100)]
    assert sum(sparing.filter(line) for line in lines) == 3
    now[0] += 1.0
    later = logging.makeLogRecord({"msg": "and one more"})
    assert sparing.filter(later)
    assert json.loads(JsonFormatter().format(later))["left_out"] == 97
