"""Keys: what is kept of them, who may share a tenant, what makes no sense."""

from __future__ import annotations

import hmac
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sloplet.errors import InvalidLimit, InvalidName, KeyRefused, SlopletError, SpecError
from sloplet.server import keys as module
from sloplet.server.keys import MAIN, KeyLimits, Keys
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Keys]:
    found = Keys(Home(tmp_path / "home"))
    yield found
    found.close()


def test_a_key_is_itself_again(keys: Keys) -> None:
    made, text = keys.create("ci", limits=KeyLimits(max_sandboxes=3, engines=("gvisor",), rate=1.5))
    found = keys.verify(text)
    assert found == made or found.to_dict() == made.to_dict()
    assert found.limits == made.limits
    assert found.tenant == "ci"
    assert not found.admin


def test_only_a_digest_is_kept(keys: Keys) -> None:
    _, text = keys.create("ci")
    keys.close()
    for path in keys.home.path.rglob("*"):
        if path.is_file():
            assert text.split("_", 2)[2].encode() not in path.read_bytes()
    made = keys.list()[0]
    assert "digest" not in json.dumps(made.to_dict())
    assert str(made.digest) not in repr(made)


@pytest.mark.parametrize(
    "wrong", ["", "x", "slp_", "slp_aaaaaaaaaaaa_" + "b" * 43, "{}x", "x{}", " {}", "{}\n", "{short}"]
)
def test_what_is_no_key(keys: Keys, wrong: str) -> None:
    _, text = keys.create("ci")
    with pytest.raises(KeyRefused):
        keys.verify(wrong.format(text, short=text[:-1]))


def test_who_has_the_id_has_nothing(keys: Keys) -> None:
    made, _ = keys.create("ci")
    with pytest.raises(KeyRefused) as unknown:
        keys.verify("slp_" + "a" * 12 + "_" + "b" * 43)
    with pytest.raises(KeyRefused) as wrong:
        keys.verify(f"slp_{made.id}_" + "b" * 43)
    assert str(unknown.value) == str(wrong.value)


def test_digests_are_compared_in_constant_time(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the one function that does, also where there is no such key."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr("sloplet.server.keys.hmac.compare_digest", compare)
    made, text = keys.create("ci")
    keys.verify(text)
    for wrong in (f"slp_{made.id}_" + "b" * 43, "slp_" + "a" * 12 + "_" + "b" * 43, "nonsense"):
        with pytest.raises(KeyRefused):
            keys.verify(wrong)
    assert len(compared) == 4
    assert all(len(each) == 32 for pair in compared for each in pair)


def test_revoked_and_expired(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = keys.create("a")
    keys.revoke("A")
    with pytest.raises(KeyRefused, match="revoked"):
        keys.verify(text)
    with pytest.raises(SpecError, match="no key"):
        keys.revoke("a")
    made, text = keys.create("b", expires=100)
    assert keys.current(made.id) is not None
    now = made.created_at
    monkeypatch.setattr("sloplet.server.keys.time.time", lambda: now + 101)
    with pytest.raises(KeyRefused, match="expired"):
        keys.verify(text)
    assert keys.current(made.id) is None
    assert list(keys.of_tenant("b")) == []


def test_names(keys: Keys) -> None:
    keys.create("ci")
    with pytest.raises(SpecError, match="already"):
        keys.create("CI")
    keys.revoke("ci")
    again, _ = keys.create("ci")  # a rotated key is of the same tenant
    assert again.tenant == "ci"
    for wrong in ("", "-a", "a b", "a/b", "a" * 64, "ä", "a\n", "../x", "$(id)"):
        with pytest.raises(InvalidName):
            keys.create(wrong)
    for wrong in ("", "A", "a_b", "a" * 40, "../x", "a/b", "."):
        with pytest.raises((InvalidName, ValueError)):
            keys.create("other", tenant=wrong)


def test_a_tenant_that_was_not_named_is_nobody_elses(keys: Keys) -> None:
    assert keys.create("team.a")[0].tenant == "team-a"
    for name in ("team-a", "team_a", "Team-A"):
        with pytest.raises(SpecError, match="team-a"):
            keys.create(name)
    assert keys.create("team_a", tenant="team-a")[0].tenant == "team-a"
    with pytest.raises(SpecError, match="main"):
        keys.create(MAIN)  # the server's own
    assert keys.create("root", admin=True)[0].tenant == MAIN


@pytest.mark.parametrize(
    "limits",
    [
        {"max_sandboxes": -1},
        {"max_sandboxes": 1.5},
        {"max_sandboxes": True},
        {"max_memory": "0"},
        {"max_memory": "much"},
        {"max_cpus": 0},
        {"max_cpus": float("nan")},
        {"max_cpus": float("inf")},
        {"max_disk": -1},
        {"engines": ["gvisr"]},
        {"engines": [""]},
        {"at_least": "strong"},
        {"rate": 0},
        {"rate": -1.0},
        {"concurrency": 0},
        {"max_ttl": "soon"},
    ],
)
def test_limits_that_make_no_sense(limits: dict[str, Any]) -> None:
    with pytest.raises((InvalidLimit, SpecError)):
        KeyLimits.make(**limits)


def test_limits_go_to_the_record_and_back(keys: Keys) -> None:
    limits = KeyLimits.make(
        max_sandboxes=0, max_memory="8g", max_cpus=4, max_disk="50g", engines=["gvisor", "gvisor", "container"],
        at_least="container", rate=50, concurrency=100, max_ttl="1d",
    )  # fmt: skip
    assert (limits.max_memory, limits.max_ttl, limits.engines) == (8 << 30, 86400.0, ("gvisor", "container"))
    keys.create("ci", limits=limits)
    assert keys.list()[0].limits == limits


def test_what_another_process_changes_is_seen(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = keys.create("a")
    keys.verify(text)
    other = Keys(keys.home)
    other.revoke("a")
    other.close()
    keys.verify(text)  # for a moment it is remembered
    monkeypatch.setattr(module, "_REFRESH", 0.0)
    with pytest.raises(KeyRefused):
        keys.verify(text)


def test_a_damaged_record_lets_nobody_in(keys: Keys) -> None:
    _, text = keys.create("a")
    keys.close()
    with sqlite3.connect(keys.home.database) as db:
        db.execute('UPDATE server_keys SET limits = \'{"max_sandboxes": 1, "from_tomorrow": 2}\'')
    db.close()
    with pytest.raises((SlopletError, TypeError)):
        keys.verify(text)


def command(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SLOPLET_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "sloplet.cli", "key", *words], env=environment, capture_output=True, text=True
    )


def test_the_command_line(tmp_path: Path) -> None:
    home = tmp_path / "home"
    limits = "--max-sandboxes 20 --max-memory 8g --max-cpus 4 --engines gvisor,container --at-least gvisor --rate 50"
    made = command(home, "create", "--name", "ci", *limits.split(), "--max-ttl", "1d", "--expires", "30d", "--json")
    found = json.loads(made.stdout)
    assert found["key"].startswith("slp_" + found["id"])
    assert found["limits"]["max_memory"] == 8 << 30
    listed = json.loads(command(home, "ls", "--json").stdout)
    assert [(key["name"], key["state"]) for key in listed] == [("ci", "valid")]
    assert "key" not in listed[0]
    assert "20 sandboxes" in command(home).stdout
    assert command(home, "rm", "ci").stdout == "ci\n"
    assert json.loads(command(home, "ls", "--json").stdout) == []
    assert json.loads(command(home, "ls", "-a", "--json").stdout)[0]["state"] == "revoked"
    wrong = command(home, "rm", "ci", "--json")
    assert wrong.returncode == 125
    assert json.loads(wrong.stderr)["error"] == "SpecError"
    log = (home / "server" / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["action"] for line in log] == ["key.create", "key.rm"]
    assert found["key"] not in "".join(log)
