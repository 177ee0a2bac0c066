"""The pure parts of the remote client: where a server is, what a spec becomes on its way, errors on their way back."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloplet import Network, Sandbox, Secret, Volume, errors
from sloplet.cli.main import _choose_server
from sloplet.errors import SandboxNotFound, ServerError, ServerUnreachable, SlopletError, SnapshotNotFound, SpecError
from sloplet.finding import place_of
from sloplet.remote.arguments import spec_arguments
from sloplet.remote.controller import RemoteController
from sloplet.remote.paths import box_path, info_of, snapshot_path
from sloplet.remote.place import parse
from sloplet.remote.problems import error_of
from sloplet.server.asked import SandboxCreate
from sloplet.server.problems import problem
from sloplet.spec import RUNGS, SandboxSpec

pytestmark = pytest.mark.anyone

KEY = "slp_abcdefghijkl_" + "x" * 43

# -- specs ---------------------------------------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True)
texts = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30)
seconds = st.floats(1, 1e6, allow_nan=False) | st.integers(1, 10**6)
hosts = st.sampled_from(["pypi.org", "*.example.com", "api.example.org", "10.0.0.1", "db.example.com:5432"])

networks = st.one_of(
    st.just("none"),
    st.builds(
        lambda allow, deny, ask, inspect, connections, bandwidth, budget, then: Network(
            allow=allow, deny=deny, ask=ask, inspect=inspect, connections=connections, bandwidth=bandwidth,
            budget=budget, on_budget=then,
        ),
        st.lists(hosts | st.just("@package-indexes"), max_size=3), st.lists(hosts, max_size=2),
        st.booleans(), st.booleans(), st.integers(1, 1000), st.none() | st.integers(1024, 10**9),
        st.none() | st.integers(1, 10**12), st.sampled_from(["refuse", "pause", "kill"]),
    ),
    st.builds(lambda deny: Network(deny=deny, learn=True), st.lists(hosts, max_size=2)),
)  # fmt: skip

arguments = st.fixed_dictionaries(
    {},
    optional={
        "name": names,
        "image": st.sampled_from(
            ["host", "debian:12", "python:3.12-slim", "registry.example.com:5000/a/b@sha256:" + "0" * 64]
        ),
        "engine": st.sampled_from(["auto", "container", "gvisor", "my-own"]),
        "at_least": st.sampled_from(RUNGS),
        "cpus": st.floats(0.01, 64) | st.integers(1, 64),
        "memory": st.integers(8 << 20, 1 << 40) | st.sampled_from(["512m", "2g"]),
        "disk": st.integers(1 << 20, 1 << 45) | st.just("1g"),
        "pids": st.integers(8, 4_000_000),
        "open_files": st.integers(16, 4_000_000),
        "ttl": seconds | st.sampled_from(["5m", "2h"]),
        "network": networks,
        "env": st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True), texts, max_size=4),
        "labels": st.dictionaries(names, texts.filter(str.isprintable), max_size=3),
        "workdir": st.sampled_from(["/workspace", "/", "/srv/app"]),
        "user": st.sampled_from(["root", "agent", "1000:1000"]),
        "sudo": st.booleans(),
        "allow_weaker": st.booleans(),
        "template": names,
        "idle": seconds,
        "undo": st.integers(0, 100),
        "checkpoint_every": seconds,
        "ports": st.dictionaries(st.integers(1, 65535), st.just(0), max_size=3)
        | st.lists(st.integers(1, 65535), unique=True, max_size=3),
        "volumes": st.dictionaries(
            st.sampled_from(["/data", "/srv/a", "/srv/b"]),
            st.sampled_from(
                [
                    "cache",
                    "/srv/folder",
                    Volume("cache2", mode="ro"),
                    Volume("many", shared=True),
                    Volume("/opt", mode="rw"),
                ]
            ),
            max_size=2,
        ),
        "links": st.dictionaries(st.sampled_from(["db", "cache"]), st.sampled_from(["pg", "pg:5432", "redis:6379"])),
    },
)


@settings(max_examples=300, deadline=None)
@given(arguments)
def test_the_server_makes_the_same_spec(given: dict[str, Any]) -> None:
    """Through JSON and the server's own model, strict as it is."""
    try:
        spec = SandboxSpec.make(given.pop("name", None), **given)
    except SpecError:
        return  # what makes no sense here is refused here
    body = json.dumps(spec_arguments(spec))
    assert SandboxCreate.model_validate_json(body).spec() == spec


def test_what_an_older_server_does_not_know_is_told_only_if_it_is_wanted() -> None:
    """It refuses what it does not know. Here are all the names that it did know."""
    asked: list[dict[str, Any]] = []

    class Told(RemoteController):
        def __init__(self) -> None:
            pass

        async def _ask(self, method: str, path: str, body: Any = None, params: Any = None) -> Any:
            asked.append(body)
            raise SandboxNotFound("all that was to be seen")

        async def _make(self, path: str, body: Any, *, leased: bool, undo: bool = True) -> Any:
            return await self._ask("POST", path, body)

    def ask(call: Coroutine[Any, Any, Any]) -> set[str]:
        with pytest.raises(SandboxNotFound):
            asyncio.run(call)
        return set(asked.pop())

    remote = Told()
    rules = {
        "mode", "allow", "deny", "passthrough", "asks", "inspect", "connections", "bandwidth", "budget", "on_budget",
    }  # fmt: skip
    plain = Network(allow=["pypi.org"])
    assert ask(remote.snapshot("box")) == {"name", "role", "note"}
    assert ask(remote.snapshot("box", memory=False)) == {"name", "role", "note", "memory"}
    assert ask(remote.fork("box", 1)) == {"count", "names", "snapshot"}
    assert ask(remote.fork("box", 1, ttl=5)) == {"count", "names", "snapshot", "ttl"}
    assert ask(remote.set_network("box", plain.spec)) == rules
    assert set(spec_arguments(SandboxSpec.make(network=plain))["network"]) == rules
    more = Network(allow=["pypi.org"], by_address=True, headers={"a.org": {"X": "1"}}, proxy="socks5://a.org:1")
    assert ask(remote.set_network("box", more.spec, more.values)) == {*rules, "by_address", "headers", "proxy"}


def test_secrets_and_pools_and_cloud_init() -> None:
    secret = Secret("value", hosts=["api.example.org"], where=["headers", "query"])
    cases: list[dict[str, Any]] = [
        {"network": Network(allow=["api.example.org"]), "secrets": {"TOKEN": secret}},
        {"pool": 3},
        {"template": "warm", "network": "none"},
        {"template": "warm"},
    ]
    for case in cases:
        spec = SandboxSpec.make(None, **case)
        body = json.dumps(spec_arguments(spec))
        assert "value" not in body
        assert SandboxCreate.model_validate_json(body).spec() == spec
    box = Sandbox(cloud_init="#cloud-config\nhostname: web\npackages: []\n", server="")
    body = json.dumps(spec_arguments(box.spec))
    assert SandboxCreate.model_validate_json(body).spec() == box.spec
    with pytest.raises(SpecError, match="applied"):
        spec_arguments(box.spec.recorded())


# -- where ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://127.0.0.1:7667", "http://127.0.0.1:7667"),
        ("https://sandbox.example.org", "https://sandbox.example.org:443"),
        ("http://sandbox.example.org/", "http://sandbox.example.org:80"),
        ("https://[::1]:8443", "https://[::1]:8443"),
    ],
)
def test_urls(url: str, wanted: str) -> None:
    place = parse(url, KEY)
    assert place.url == wanted
    assert KEY not in repr(place)


@pytest.mark.parametrize(
    "url",
    ["", "localhost:7667", "ftp://x", "http://", "http://user:pw@host", "http://h:port", "https://h/v1", "https://h?x"],
)
def test_what_is_no_server(url: str) -> None:
    with pytest.raises(SpecError):
        parse(url, KEY)


@pytest.mark.parametrize("key", ["", "a b", "x\n", "é", "x" * 600])
def test_what_is_no_key(key: str) -> None:
    with pytest.raises(SpecError, match="key"):
        parse("http://localhost:1", key)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLOPLET_URL", "SLOPLET_KEY", "SLOPLET_CA"):
        monkeypatch.delenv(name, raising=False)
    assert place_of() is None
    with pytest.raises(SpecError, match="no server"):
        place_of(key=KEY)
    with pytest.raises(SpecError, match="needs a key"):
        place_of("http://localhost:1")
    monkeypatch.setenv("SLOPLET_URL", "https://one.example:1")
    monkeypatch.setenv("SLOPLET_KEY", KEY)
    monkeypatch.setenv("SLOPLET_CA", "/ca.pem")
    found = place_of()
    assert found is not None
    assert (found.url, found.key, found.ca) == ("https://one.example:1", KEY, "/ca.pem")
    other = place_of("http://two.example:2", "k2")
    assert other is not None
    assert (other.host, other.key) == ("two.example", "k2")
    assert place_of("") is None
    assert Sandbox()._inner._place == found
    assert Sandbox(server="")._inner._place is None


def test_proxies_are_not_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    assert parse("http://other.example", KEY).proxy() == "http://proxy.example:3128"
    for host in ("localhost", "127.0.0.1", "[::1]", "8000-abc.localhost"):
        assert parse(f"http://{host}:1", KEY).proxy() is None
    monkeypatch.setenv("no_proxy", "other.example")
    assert parse("http://other.example", KEY).proxy() is None


def test_a_ca_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        parse("https://h", KEY, str(tmp_path / "nothing")).context()
    (tmp_path / "file").write_text("not a certificate")
    with pytest.raises(SpecError, match="no certificate"):
        parse("https://h", KEY, str(tmp_path / "file")).context()


# -- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(errors._tree(SlopletError).values(), key=lambda kind: kind.__name__))
def test_errors_come_back_as_they_were(kind: type[SlopletError]) -> None:
    error = kind("what happened", hint="what to do")
    back = error_of(json.loads(json.dumps(problem(error, "id"))), 400)
    assert type(back) is kind
    assert (back.message, back.hint) == ("what happened", "what to do")


@pytest.mark.parametrize("document", [None, [], {}, {"error": 5}, "text"])
def test_what_is_no_problem_document(document: Any) -> None:
    assert type(error_of(document, 500)) is ServerError
    assert type(error_of(document, 502)) is ServerUnreachable


@pytest.mark.parametrize("ref", ["", ".", "..", "a/b", "x?y", "a b", "ü", "%2e%2e", None])
def test_refs_stay_in_their_place(ref: Any) -> None:
    with pytest.raises(SandboxNotFound):
        box_path(ref)
    with pytest.raises(SnapshotNotFound):
        snapshot_path(ref)


def test_an_answer_that_makes_no_sense() -> None:
    for data in ({}, [], None, {"id": "x", "spec": {}}):
        with pytest.raises(ServerError):
            info_of(data)


@pytest.mark.parametrize(
    ("url", "verb", "told"),
    [
        ("https://sandboxes.example.org:7667", "key", True),
        ("https://sandboxes.example.org:7667", "audit", True),
        ("http://127.0.0.1:7667", "key", False),
        ("https://localhost:7667", "backup", False),
        ("http://127.0.0.1:7667", "doctor", True),
        ("https://sandboxes.example.org:7667", "version", False),
    ],
)
def test_verbs_about_this_machine_say_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], url: str, verb: str, told: bool
) -> None:
    monkeypatch.setenv("SLOPLET_URL", url)
    _choose_server(verb, None, None, None)
    assert ("about this machine" in capfd.readouterr().err) == told
    assert "SLOPLET_URL" not in os.environ
