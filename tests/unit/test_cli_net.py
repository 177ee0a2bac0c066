"""The CLI's network: options become settings, policies are files, and no value of a secret is ever seen."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_controller import Records, Said

from sloplet.cli import completing
from sloplet.cli.asking import asker, judge
from sloplet.cli.net import preset_names
from sloplet.cli.netfile import policy_settings, read_policy, to_toml
from sloplet.cli.netoptions import network_arguments, parse_port, parse_secrets
from sloplet.errors import SpecError
from sloplet.netspec import Network, NetworkSpec, Secret
from sloplet.network.asks import Ask
from sloplet.network.log import Decision
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

VALUE = "hunter2-very-secret"


@pytest.fixture
def dev(records: Records) -> Records:
    """The sandbox dev has a network and a secret."""
    spec = SandboxSpec.make(
        "dev",
        network=Network(allow=["pypi.org"], deny=["evil.org"]),
        secrets={"TOKEN": Secret(VALUE, hosts=["api.example.com"])},
        links={"db": "box:5432"},
    )
    records.put(records.boxes["id-dev"], spec=spec)
    return records


def decision(seq: int, name: str, verdict: str, **more: Any) -> Decision:
    return Decision(seq, seq, 1_700_000_000.0 + seq, "id-dev", name, "93.184.216.34", 443, verdict, **more)


# -- policies -----------------------------------------------------------------------------------------


def test_the_policy_is_shown_with_all_that_belongs_to_it(dev: Records, said: Said) -> None:
    assert said("url", "dev", "8000") == (0, "http://127.0.0.1:40000\n", "")
    code, out, err = said("net", "dev")
    assert (code, err) == (0, "")
    assert tomllib.loads(out) == {"allow": ["pypi.org"], "deny": ["evil.org"]}
    for fact in ("secret TOKEN for api.example.com", "port 8000 at http://127.0.0.1:40000", "link db to box:5432"):
        assert f"# {fact}" in out
    document = json.loads(said("net", "show", "dev", "--json")[1])
    assert document["policy"] == {"allow": ["pypi.org"], "deny": ["evil.org"]}
    assert document["links"] == [{"name": "db", "sandbox": "box", "port": 5432}]
    assert VALUE not in json.dumps(document)


def test_no_network_is_said_plainly(dev: Records, said: Said) -> None:
    assert "none" in said("net", "show", "box")[1]
    assert json.loads(said("net", "show", "box", "--json")[1])["mode"] == "none"


def test_rules_are_added_and_taken_away(dev: Records, said: Said) -> None:
    code, out, _ = said("net", "allow", "dev", "evil.org", "db.example.com:5432")
    assert code == 0
    assert tomllib.loads(out) == {"allow": ["db.example.com:5432", "evil.org", "pypi.org"]}
    code, out, _ = said("net", "deny", "dev", "pypi.org", "--json")
    assert json.loads(out) == {"allow": ["db.example.com:5432", "evil.org"], "deny": ["pypi.org"]}
    assert dev.policies["id-dev"].deny == ("pypi.org",)


@pytest.mark.parametrize("rule", ["http//x", "", "*.", "x:0", "@nothing"])
def test_a_rule_that_is_none_changes_nothing(dev: Records, said: Said, rule: str) -> None:
    code, out, err = said("net", "allow", "dev", rule)
    assert (code, out) == (125, "")
    assert err.startswith("sloplet: ")
    assert dev.policies == {}


def test_set_replaces_all_of_it(dev: Records, said: Said, tmp_path: Path) -> None:
    file = tmp_path / "locked.toml"
    file.write_text('allow = ["example.com"]\nbandwidth = "1m"\n')
    code, out, _ = said("net", "set", "dev", "--policy", str(file), "--allow", "x.org", "--max-connections", "9")
    assert code == 0
    assert tomllib.loads(out) == {"allow": ["example.com", "x.org"], "bandwidth": 2**20, "connections": 9}
    file.write_text("allow = []")
    assert said("net", "set", "dev", "--policy", str(file))[0] == 0
    assert dev.policies["id-dev"] == NetworkSpec("rules")


@pytest.mark.parametrize(
    ("name", "text", "said_of"),
    [
        ("p.toml", "alow = []", "did you mean allow"),
        ("p.toml", "allow = [", "not understood"),
        ("p.toml", 'allow = "pypi.org"', "not a list"),
        ("p.toml", "connections = true", "connections"),
        ("p.json", "[]", "not a table"),
        ("p.json", '{"allow": [null]}', "None"),
        ("p.yaml", "allow: []", ".toml"),
    ],
)
def test_a_file_that_is_no_policy(dev: Records, said: Said, tmp_path: Path, name: str, text: str, said_of: str) -> None:
    (tmp_path / name).write_text(text)
    code, out, err = said("net", "set", "dev", "--policy", str(tmp_path / name))
    assert (code, out) == (125, "")
    assert said_of in err
    assert dev.policies == {}


def test_a_policy_goes_to_a_file_and_back() -> None:
    made = Network(
        allow=["pypi.org", "GET https://api.github.com/repos/*"], deny=["a.b"], passthrough=["c.d"], inspect=True,
        connections=5, bandwidth="1m", budget="1g", on_budget="pause",
    )  # fmt: skip
    settings = policy_settings(made.spec)
    assert tomllib.loads(to_toml(settings)) == settings
    assert Network(**settings).spec == made.spec
    more = Network(
        inspect="on-demand", by_address=True, headers={"*.a.org:443": ["X-A", "X-B"], "b.org": {"X-A": "value"}},
        proxy="socks5://me:pass@c.org:1080",
    )  # fmt: skip
    assert "value" not in to_toml(policy_settings(more.spec))
    for spec in (NetworkSpec("learn"), NetworkSpec("rules", asks=True), NetworkSpec("rules"), more.spec):
        assert Network(**tomllib.loads(to_toml(policy_settings(spec)))).spec == spec


# -- the log ------------------------------------------------------------------------------------------


def test_the_log(dev: Records, said: Said) -> None:
    dev.decisions = [
        decision(1, "pypi.org", "allow", rule="pypi.org", bytes_out=10, bytes_in=2048, duration=1.5),
        decision(2, "evil\x1b[31m.org", "deny", reason="evil.org is denied"),
        decision(3, "", "cut", reason="not allowed any more"),
    ]
    code, out, _ = said("net", "log", "dev")
    assert code == 0
    assert "pypi.org:443" in out
    assert "evil.org is denied" in out
    assert "\x1b" not in out
    assert "93.184.216.34:443" in out
    _, out, _ = said("net", "log", "dev", "--denied", "--json")
    assert [row["verdict"] for row in json.loads(out)] == ["deny", "cut"]
    _, out, _ = said("net", "log", "dev", "--tail", "1", "--json")
    assert [row["seq"] for row in json.loads(out)] == [3]


def test_the_log_as_it_comes(dev: Records, said: Said) -> None:
    dev.decisions = [decision(1, "pypi.org", "allow"), decision(2, "evil.org", "deny", reason="no")]
    code, out, _ = said("net", "log", "dev", "--follow", "--json")
    assert code == 0
    assert [json.loads(line)["seq"] for line in out.splitlines()] == [1, 2]
    code, out, _ = said("net", "log", "dev", "--follow")
    assert [line.split()[1] for line in out.splitlines()] == ["allow", "deny"]


# -- presets ------------------------------------------------------------------------------------------


def test_presets_are_listed_and_opened(said: Said) -> None:
    code, out, _ = said("net", "presets")
    assert code == 0
    assert "@github" in out
    assert "@package-indexes" in out
    _, out, _ = said("net", "presets", "@github")
    assert "https://api.github.com" in out.splitlines()
    assert json.loads(said("net", "presets", "github", "--json")[1])["github"]["rules"]
    code, _, err = said("net", "presets", "githup")
    assert code == 125
    assert "@github" in err
    assert "github" in preset_names(None, None, "gi")  # type: ignore[arg-type]


# -- secrets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["env", "command", "file", "stdin"])
def test_a_value_is_given_and_never_seen(
    dev: Records, said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    monkeypatch.setenv("MINE", VALUE)
    (tmp_path / "token").write_text(VALUE + "\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(VALUE.encode() + b"\n")))
    words = {
        "env": ("--env", "MINE"), "command": ("--command", "echo $MINE"), "file": ("--file", str(tmp_path / "token")),
        "stdin": ("--file", "-"),
    }[source]  # fmt: skip
    code, out, err = said("secret", "set", "dev", "TOKEN", *words)
    assert code == 0, err
    assert dev.values == {"TOKEN": VALUE}
    assert VALUE not in out + err
    assert said("secret", "rm", "dev", "TOKEN")[0] == 0
    assert dev.values == {"TOKEN": None}


def test_secrets_are_listed_without_values(dev: Records, said: Said) -> None:
    code, out, _ = said("secret", "dev")
    assert code == 0
    assert "TOKEN" in out
    assert "api.example.com" in out
    (spec,) = dev.boxes["id-dev"].spec.secrets
    dev.inherited["id-dev"] = (replace(spec, placeholder="made-by-its-holder"),)
    (found,) = json.loads(said("secret", "ls", "dev", "--json")[1])
    assert found["placeholder"] == "made-by-its-holder"
    assert VALUE not in out + json.dumps(found)


def test_what_a_sandbox_has_of_its_template(dev: Records, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own settings say nothing of it: whoever holds it is asked."""
    monkeypatch.setenv("MINE", VALUE)
    dev.policies["id-box"] = NetworkSpec("rules", ("pypi.org",))
    dev.inherited["id-box"] = dev.boxes["id-dev"].spec.secrets
    out = said("net", "show", "box")[1]
    assert tomllib.loads(out) == {"allow": ["pypi.org"]}
    assert "# secret TOKEN for api.example.com" in out
    assert [item["name"] for item in json.loads(said("secret", "ls", "box", "--json")[1])] == ["TOKEN"]
    assert said("secret", "set", "box", "TOKEN", "--env", "MINE")[0] == 0
    assert dev.values == {"TOKEN": VALUE}


def test_the_secrets_of_a_template_are_completed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {name: Secret(VALUE, hosts=["a.com"]) for name in ("TOKEN", "TOP")}
    of_template = SimpleNamespace(spec=SandboxSpec.make(network=Network(), secrets=secrets))
    own = SimpleNamespace(spec=SandboxSpec.make(template="warm", secrets={"TOKEN": secrets["TOKEN"]}))
    store = SimpleNamespace(find=lambda ref: own, find_snapshot=lambda ref: of_template)
    monkeypatch.setattr("sloplet.cli.completing._store", lambda: store)
    assert completing.secrets("web", "TO") == ["TOKEN", "TOP"]
    assert completing.secrets("web", "TOK") == ["TOKEN"]


def test_a_template_may_have_the_network_that_a_secret_needs(
    records: Records, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", VALUE)
    code, _, err = said("create", "web", "--template", "warm", "--secret", "TOKEN@a.com", "--link", "db=box", "--json")
    assert code == 0, err
    spec = records.boxes["id-web"].spec
    assert ([secret.name for secret in spec.secrets], [link.name for link in spec.links]) == (["TOKEN"], ["db"])


def test_a_value_is_given_to_one_that_sleeps_and_it_sleeps_on(
    dev: Records, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", VALUE)
    dev.put(dev.boxes["id-dev"], state="paused")
    assert said("secret", "set", "dev", "TOKEN", "--env", "MINE")[0] == 0
    assert dev.values == {"TOKEN": VALUE}
    assert dev.boxes["id-dev"].state == "paused"


def test_a_value_without_a_source_or_a_name(dev: Records, said: Said) -> None:
    assert "--env" in said("secret", "set", "dev", "TOKEN")[2]
    assert "it has TOKEN" in said("secret", "set", "dev", "TOKN", "--command", f"echo {VALUE}")[2]
    code, _, err = said("secret", "set", "dev", "TOKEN", "--env", "NOT_SET_ANYWHERE")
    assert code == 125
    assert "NOT_SET_ANYWHERE" in err
    assert dev.values == {}


@pytest.mark.parametrize(
    ("text", "name", "hosts", "where"),
    [
        ("TOKEN@api.example.com", "TOKEN", ("api.example.com",), ("headers",)),
        ("TOKEN=env:MINE@a.com,*.b.com", "TOKEN", ("*.b.com", "a.com"), ("headers",)),
        ("TOKEN=env:MINE@a.com/query,body", "TOKEN", ("a.com",), ("query", "body")),
        ("TOKEN=cmd:printf me@home@a.com", "TOKEN", ("a.com",), ("headers",)),
    ],
)
def test_how_secrets_are_written(text: str, name: str, hosts: tuple[str, ...], where: tuple[str, ...]) -> None:
    ((found, secret),) = parse_secrets([text]).items()
    assert (found, secret.hosts, secret.where) == (name, hosts, where)


def test_what_a_secrets_command_prints_may_hold_an_at_sign() -> None:
    assert parse_secrets(["T=cmd:printf me@home@a.com"])["T"].read() == "me@home"


@pytest.mark.parametrize("text", [f"TOKEN={VALUE}@a.com", f"TOKEN={VALUE}", f"TOKEN=env:@{VALUE}!", "TOKEN", "=@a.com"])
def test_a_value_in_an_option_is_refused_and_not_repeated(said: Said, text: str) -> None:
    code, out, err = said("run", "--engine", "fake", "--allow", "a.com", "--secret", text, "--", "true")
    assert (code, out) == (125, "")
    assert f"{VALUE}@" not in err
    assert err.count(VALUE) <= text.count("env:@")  # there it stands where a host stands


# -- options ------------------------------------------------------------------------------------------


def test_options_become_settings(records: Records, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", VALUE)
    code, out, err = said(
        "create", "web", "--allow", "@github", "--deny", "gist.github.com", "--ask", "--inspect", "--passthrough",
        "pinned.example.com", "--max-connections", "7", "--bandwidth", "1m", "--budget", "1g", "--on-budget", "pause",
        "--secret", "TOKEN@api.github.com", "--port", "8000:8080", "--port", "9000", "--link", "db=box:5432", "--json",
    )  # fmt: skip
    assert code == 0, err
    spec = records.boxes["id-web"].spec
    assert spec.network == NetworkSpec(
        "rules", ("@github",), ("gist.github.com",), ("pinned.example.com",), asks=True, inspect=True, connections=7,
        bandwidth=2**20, budget=2**30, on_budget="pause",
    )  # fmt: skip
    assert [tuple(port) for port in spec.ports] == [(8000, 8080), (9000, 0)]
    assert [tuple(link) for link in spec.links] == [("db", "box", 5432)]
    assert [secret.name for secret in spec.secrets] == ["TOKEN"]
    assert records.values == {"TOKEN": VALUE}
    assert VALUE not in out + err


def test_a_value_that_cannot_be_used_leaves_no_sandbox_behind(
    records: Records, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bad in (f" {VALUE} ", VALUE + "\t", VALUE * 1000):
        monkeypatch.setenv("TOKEN", bad)
        for more in ([], ["--reuse"]):
            code, out, err = said("create", "web", "--allow", "a.com", "--secret", "TOKEN@a.com", *more)
            assert code == 125
            assert "TOKEN" in err
            assert bad not in out + err
    assert "id-web" not in records.boxes


def test_without_options_there_is_no_network() -> None:
    assert network_arguments({"allow": (), "network": None}) == {}
    assert network_arguments({"allow": (), "network": "none"}) == {"network": "none"}
    assert network_arguments({"allow": (), "network": "learn"})["network"].spec.mode == "learn"


def test_a_file_and_options_together(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"allow": ["a.com"], "ask": True, "budget": 5000}))
    options = {"network": str(tmp_path / "p.json"), "allow": ("b.com",), "budget": "9k"}
    made = network_arguments(options)["network"].spec
    assert made == NetworkSpec("rules", ("a.com", "b.com"), asks=True, budget=9 * 1024)
    assert read_policy(str(tmp_path / "p.json"))["budget"] == 5000


@pytest.mark.parametrize(
    ("words", "said_of"),
    [
        (["--network", "none", "--allow", "x.org"], "--allow"),
        (["--secret", "A@x.org"], "needs a network"),
        (["--link", "db=box"], "needs a network"),
        (["--allow", "x.org", "--link", "db"], "link"),
        (["--allow", "x.org", "--max-connections", "many"], "whole number"),
        (["--port", "eighty"], "port"),
        (["--network", "/nowhere/p.toml"], "cannot be read"),
        (["--network", "learn", "--ask"], "learn"),
        (["--ask", "-t"], "net ask"),
    ],
)
def test_options_that_make_no_sense(said: Said, words: list[str], said_of: str) -> None:
    code, out, err = said("run", "--engine", "fake", *words, "--", "true")
    assert (code, out) == (125, "")
    assert said_of in err


@pytest.mark.parametrize(("text", "found"), [("80", (80, 0)), ("80:8080", (80, 8080)), ("80:0", (80, 0))])
def test_ports_as_they_are_written(text: str, found: tuple[int, int]) -> None:
    assert parse_port(text) == found


@pytest.mark.parametrize("text", ["", ":80", "80:", "80:x", "0", "65536", "80:65536", "-1"])
def test_what_is_no_port(text: str) -> None:
    with pytest.raises(SpecError):
        parse_port(text)


def test_a_shell_of_a_sandbox_that_is_there_takes_no_network(dev: Records, said: Said) -> None:
    code, _, err = said("shell", "dev", "--port", "80")
    assert code == 125
    assert "--port is for a fresh sandbox" in err


# -- ports --------------------------------------------------------------------------------------------


def test_urls(dev: Records, said: Said) -> None:
    assert said("url", "dev", "8000", "--host-port", "8080")[1] == "http://127.0.0.1:8080\n"
    made = json.loads(said("url", "dev", "5432", "--address", "0.0.0.0", "--json")[1])
    assert made == {"inside": 5432, "address": "0.0.0.0", "outside": 40001, "url": "http://127.0.0.1:40001"}
    assert "127.0.0.1:8080" in said("url", "dev")[1]
    assert said("url", "dev", "8000", "--close") == (0, "", "")
    assert [item["inside"] for item in json.loads(said("url", "dev", "--json")[1])] == [5432]
    assert said("url", "dev", "--close")[0] == 125
    assert said("url", "nothing", "80")[0] == 125


# -- questions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "meant"),
    [("o", "once"), ("y", "once"), ("always", "always"), ("", "no"), ("n", "no"), ("v", "never"), ("maybe", None)],
)
def test_what_is_typed(word: str, meant: str | None) -> None:
    assert judge(word) == meant


def test_questions_come_one_at_a_time_and_cannot_drive_the_terminal() -> None:
    here, there = os.openpty()
    question = Ask(1, "id-dev", "pypi.org\x1b[2J", "", 443, "")

    async def work() -> list[str]:
        ask = asker(there)
        os.write(here, b"what?\nalways\n")
        first = await ask(question)
        both = asyncio.gather(ask(question), ask(replace(question, name="x.org")))
        await asyncio.sleep(0)
        os.write(here, b"o\n")
        while b"x.org:443" not in (shown := _drain(here, printed)):
            await asyncio.sleep(0.005)
        assert shown
        os.write(here, b"v\n")
        return [first, *await both]

    printed = bytearray()
    try:
        assert asyncio.run(work()) == ["always", "once", "never"]
        assert b"\x1b" not in printed
        assert b"may it connect to pypi.org" in printed
    finally:
        os.close(here)
        os.close(there)


def _drain(fd: int, into: bytearray) -> bytes:
    os.set_blocking(fd, False)
    try:
        into += os.read(fd, 65536)
    except BlockingIOError:
        pass
    return bytes(into)
