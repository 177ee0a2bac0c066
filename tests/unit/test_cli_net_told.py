"""What users of the CLI's network are told, and when: slips before anything runs, and nothing lost or hidden."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_controller import Records, Said, info

from sloplet.cli.netfile import read_policy, write_policy
from sloplet.cli.netlearn import _tell
from sloplet.cli.run import execute, tell_ports
from sloplet.controller import Port
from sloplet.errors import SandboxDead, SandboxPaused, SlopletError, SpecError
from sloplet.netspec import Network, NetworkSpec
from sloplet.network.indexes import Indexes
from sloplet.network.log import Decision
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone


@pytest.fixture
def dev(records: Records) -> Records:
    """The sandbox dev has a network, box has none."""
    records.put(records.boxes["id-dev"], spec=SandboxSpec.make("dev", network=Network(allow=["pypi.org"])))
    return records


# -- policies as files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("p.json", '{"allow": ["a.com"], "allow": ["b.com"]}', "'allow' is there twice"),
        ("p.json", "[" * 100_000, "nested too deep"),
        ("p.json", '{"ask": "yes"}', "neither true nor false"),
        ("p.toml", 'ask = "yes"', "neither true nor false"),
        ("p.toml", "ask = 1", "neither true nor false"),
        ("p.toml", "allow = " + "[" * 50_000, "nested too deep"),
    ],
)
def test_slips_in_a_file(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=why):
        read_policy(str(tmp_path / name))


@pytest.mark.parametrize("name", ["policy.yaml", "missing/policy.toml", "folder.toml"])
def test_where_a_policy_cannot_be_written_nothing_runs(said: Said, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.toml").mkdir()
    code, out, err = said("net", "learn", "--engine", "nonsense", "--output", str(tmp_path / name), "--", "true")
    assert (code, out) == (125, "")
    assert f"the policy '{tmp_path / name}'" in err  # and not: there is no such engine
    assert [each.name for each in tmp_path.rglob("*")] == ["folder.toml"]


def test_what_was_learned_is_told_if_it_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(*words: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SpecError, match="No space left"):
        _tell(NetworkSpec("rules", ("a.com:443",)), str(tmp_path / "p.toml"), False, 0, ())
    assert tomllib.loads(capsys.readouterr().out) == {"allow": ["a.com:443"]}
    assert list(tmp_path.iterdir()) == []


def test_a_policy_is_written_over_another(tmp_path: Path) -> None:
    for rules in (["a.com:443"], []):
        write_policy(str(tmp_path / "p.json"), {"allow": rules})
        assert read_policy(str(tmp_path / "p.json")) == {"allow": rules}
    assert [each.name for each in tmp_path.iterdir()] == ["p.json"]


def test_rules_are_taken_away(dev: Records, said: Said) -> None:
    code, out, err = said("net", "remove", "dev", "PyPI.org")
    assert (code, tomllib.loads(out), err) == (0, {"allow": []}, "")
    code, out, err = said("net", "remove", "dev", "pypi.org")
    assert (code, out) == (125, "")
    assert "there is no rule 'pypi.org'" in err


# -- ports --------------------------------------------------------------------------------------------


def test_a_port_that_cannot_be_had_is_told(dev: Records, said: Said) -> None:
    dev.exposed = [Port(80, "::1", 8080), Port(81, "", 0, "port 8081 of 127.0.0.1 cannot be listened on")]
    rows = [line.split(maxsplit=2) for line in said("url", "dev")[1].splitlines()[1:]]
    assert rows == [
        ["80", "[::1]:8080", "http://[::1]:8080"],
        ["81", "-", "none: port 8081 of 127.0.0.1 cannot be listened on"],
    ]
    assert "# port 81: port 8081 of 127.0.0.1 cannot be listened on\n" in said("net", "dev")[1]
    assert json.loads(said("url", "dev", "--json")[1])[1]["problem"]


def test_a_port_that_is_not_there_cannot_be_closed(dev: Records, said: Said) -> None:
    code, out, err = said("url", "dev", "9999", "--close")
    assert (code, out) == (125, "")
    assert "nothing is listened on for port 9999" in err


class _Paused:
    """A sandbox whose budget is used up while a command runs."""

    def __init__(self, name: str | None) -> None:
        self.name = name

    async def spawn(self, *words: Any, **settings: Any) -> Any:
        raise SandboxPaused("the sandbox was paused: it has moved the bytes that its budget allows")


@pytest.mark.parametrize(("name", "kind"), [("dev", SandboxPaused), (None, SandboxDead)])
def test_what_becomes_of_a_command_whose_sandbox_was_paused(name: str | None, kind: type[SlopletError]) -> None:
    """One without a name ends with its command: it cannot be looked at or attached to."""
    box: Any = _Paused(name)
    wiring: Any = SimpleNamespace(environment=dict, pty_argument=False, stdin=False)
    options = {"as_json": False, "timeout": None}
    with pytest.raises(SlopletError, match="its budget allows") as caught:
        asyncio.run(execute(box, ["true"], options, wiring, SimpleNamespace()))  # type: ignore[arg-type]
    assert type(caught.value) is kind


def test_a_fresh_sandboxs_ports_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Box:
        async def ports(self) -> list[Port]:
            return [Port(8000, "127.0.0.1", 40000), Port(9000, "127.0.0.1", 40001)]

    box: Any = Box()
    asyncio.run(tell_ports(box, {"ports": ("8000", "9000")}))
    asyncio.run(tell_ports(box, {"ports": ()}))
    told = [f"sloplet: port {port} at http://127.0.0.1:{here}" for port, here in ((8000, 40000), (9000, 40001))]
    assert capsys.readouterr().err.splitlines() == told


# -- slips --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("create", "web", "--port", "8000", "--port", "8000:8080"), "--port 8000 is there twice"),
        (("create", "web", "--allow", "a.com", "--link", "db=dev", "--link", "db=box"), "--link db is there twice"),
        (("create", "web", "--allow", "a.com", "--secret", "T@a.com", "--secret", "T=env:U@b.com"), "same name"),
        (("create", "web", "--allow", "a.com", "--on-budget", "kill"), "without a budget"),
        (("create", "web", "--deny", "PSOT https://a.com"), "did you mean POST?"),
        (("net", "set", "dev"), "there is no policy"),
        (("net", "allwo", "dev", "a.com"), "did you mean `sloplet net allow`?"),
        (("net", "lgo", "dev", "--follow"), "did you mean `sloplet net log`?"),
        (("secret", "sett", "dev", "T", "--env", "T"), "did you mean `sloplet secret set`?"),
    ],
)
def test_slips_are_told(dev: Records, said: Said, words: tuple[str, ...], why: str) -> None:
    code, out, err = said(*words)
    assert (code, out) == (125, "")
    assert why in err
    assert set(dev.boxes) == {"id-dev", "id-box"}
    assert dev.policies == {}


def test_an_empty_value_is_told(dev: Records, said: Said, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    code, out, err = said("secret", "set", "dev", "T", "--file", str(tmp_path / "empty"))
    assert (code, out) == (125, "")
    assert "the value is empty (`sloplet secret rm dev T`" in err


def test_a_name_that_looks_like_a_verb_is_a_name(dev: Records, said: Said) -> None:
    dev.put(info("lo"), spec=dev.boxes["id-dev"].spec)
    assert said("net", "lo", "--json")[0] == 0
    assert "no such option" in said("net", "lo", "--tail", "5")[2].lower()


# -- presets ------------------------------------------------------------------------------------------


def test_what_to_know_of_this_machines_indexes_is_told(
    dev: Records, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = "pip goes through a proxy on this machine"
    monkeypatch.setattr("sloplet.network.indexes.package_indexes", lambda: Indexes((), (warning,)))
    assert f"# {warning}" in said("net", "presets", "package-indexes")[1].splitlines()
    assert json.loads(said("net", "presets", "--json")[1])["package-indexes"]["warnings"] == [warning]
    code, out, err = said("create", "web", "--allow", "@package-indexes")
    assert (code, out, err) == (0, "web\n", f"sloplet: {warning}\n")
    assert f"sloplet: {warning}\n" in said("run", "--engine", "fake", "--allow", "@package-indexes", "--", "true")[2]
    assert said("create", "other", "--allow", "pypi.org")[2] == ""


# -- what is gone -------------------------------------------------------------------------------------


def test_nothing_is_brought_here_of_one_that_is_dead(dev: Records, said: Said) -> None:
    dev.put(dev.boxes["id-dev"], state="dead", reason="its keeper ended")
    code, out, err = said("forward", "dev", "8000")
    assert (code, out) == (125, "")
    assert "its keeper ended" in err


@pytest.mark.parametrize("how", ["dead", "removed"])
def test_what_was_brought_here_ends_with_its_sandbox(dev: Records, said: Said, how: str) -> None:
    looks = 0

    async def find(ref: str) -> Any:
        nonlocal looks
        looks += 1
        if looks == 4:  # it has been listened on for a while
            if how == "removed":
                await dev.kill("id-dev")
            else:
                dev.put(dev.boxes["id-dev"], state="dead", reason="out of memory")
        return await Records.find(dev, ref)

    dev.find = find  # type: ignore[method-assign]
    code, out, err = said("forward", "dev", "8000")
    assert code == 125
    assert "-> dev:8000" in out
    assert "the sandbox dev is gone" in err


def test_a_log_is_followed_to_the_end_of_its_sandbox(dev: Records, said: Said) -> None:
    """What was decided last is told, then it ends: a dead one's log can be read for ever."""
    rows = [Decision(number, number, 1_700_000_000.0, "id-dev", "x.org", "", 443, "deny") for number in (1, 2, 3)]

    async def network_log(sandbox_id: str, *, after: int = 0, limit: int = 1000) -> list[Decision]:
        if after >= 2:
            dev.put(dev.boxes["id-dev"], state="dead")
        return [row for row in rows if row.seq > after][:1] if after else rows[:1]

    dev.network_log = network_log  # type: ignore[method-assign]
    code, out, _ = said("net", "log", "dev", "--follow", "--json")
    assert code == 0
    assert [json.loads(line)["seq"] for line in out.splitlines()] == [1, 2, 3]
