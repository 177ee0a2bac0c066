"""Where credentials are found, and what is wrong with files and helpers."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from sloplet.errors import RegistryDenied
from sloplet.images import credentials
from sloplet.images.credentials import ANONYMOUS, Credentials, files, find, keys, normal

pytestmark = pytest.mark.anyone

HUB_KEY = "https://index.docker.io/v1/"


def packed(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def environ(home: Path, **more: str) -> dict[str, str]:
    return {"HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}", **more}


def docker(home: Path, document: Any) -> Path:
    path = home / ".docker" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def helper(home: Path, name: str, script: str) -> None:
    path = home / "bin" / f"docker-credential-{name}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_nothing_is_anonymous(home: Path) -> None:
    found = find("docker.io", "library/python", environ(home))
    assert found == ANONYMOUS
    assert not found


def test_the_order_of_files() -> None:
    assert files({"REGISTRY_AUTH_FILE": "/a", "HOME": "/h", "DOCKER_CONFIG": "/d"}) == [Path("/a")]
    assert files({"HOME": "/h"}) == [Path("/h/.config/containers/auth.json"), Path("/h/.docker/config.json")]
    assert files({"HOME": "/h", "XDG_RUNTIME_DIR": "/r", "XDG_CONFIG_HOME": "/c", "DOCKER_CONFIG": "/d"}) == [
        Path("/r/containers/auth.json"), Path("/c/containers/auth.json"), Path("/d/config.json"),
    ]  # fmt: skip
    assert files({"XDG_RUNTIME_DIR": "relative"}) == []


def test_the_first_file_that_knows_the_registry_counts(home: Path) -> None:
    docker(home, {"auths": {"a.test": {"auth": packed("docker:1")}, "b.test": {"auth": packed("docker:2")}}})
    podman = home / ".config" / "containers"
    podman.mkdir(parents=True)
    (podman / "auth.json").write_text(json.dumps({"auths": {"a.test": {"auth": packed("podman:3")}}}))
    assert find("a.test", "", environ(home)).username == "podman"
    assert find("b.test", "", environ(home)).username == "docker"
    assert find("b.test:5000", "", environ(home)) == ANONYMOUS


@pytest.mark.parametrize("key", [HUB_KEY, "index.docker.io", "docker.io", "https://docker.io", "registry-1.docker.io"])
def test_docker_hub_has_many_names(key: str, home: Path) -> None:
    docker(home, {"auths": {key: {"auth": packed("me:pass:with:colons")}}})
    found = find("docker.io", "library/python", environ(home))
    assert (found.username, found.password) == ("me", "pass:with:colons")
    assert found.source.endswith("config.json")


def test_an_entry_for_a_part_of_a_registry(home: Path) -> None:
    entries = {"a.test": packed("all:1"), "a.test/team": packed("team:2"), "a.test/team/app": packed("app:3")}
    docker(home, {"auths": {key: {"auth": value} for key, value in entries.items()}})
    names = {name: find("a.test", name, environ(home)).username for name in ("x", "team/x", "team/app", "team/app/y")}
    assert names == {"x": "all", "team/x": "team", "team/app": "app", "team/app/y": "app"}
    assert list(keys("a.test", "team/app")) == ["a.test/team/app", "a.test/team", "a.test"]


def test_names_are_compared_without_scheme_and_version() -> None:
    texts = ("https://a.test/v1/", "http://a.test", "a.test/", "https://a.test/v2", "a.test")
    assert {normal(text) for text in texts} == {"a.test"}
    assert normal("https://a.test:5000/team") == "a.test:5000/team"


def test_tokens_and_plain_names(home: Path) -> None:
    docker(home, {"auths": {
        "a.test": {"auth": packed("<token>:"), "identitytoken": "an-identity"},
        "b.test": {"username": "me", "password": "secret"},
        "c.test": {},
    }})  # fmt: skip
    assert find("a.test", "", environ(home)).identity_token == "an-identity"
    assert find("b.test", "", environ(home)).basic == "Basic " + packed("me:secret")
    assert find("c.test", "", environ(home)) == ANONYMOUS


def test_nothing_secret_is_shown() -> None:
    text = repr(Credentials("me", "secret", "an-identity", "file"))
    assert "secret" not in text
    assert "an-identity" not in text


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ("[" * 100_000, "no JSON"),
        ({"auths": []}, "auths is no object"),
        ({"auths": {"a.test": {"auth": "!!!"}}}, "not base64"),
        ({"auths": {"a.test": {"auth": packed("nocolon")}}}, "not base64"),
        ({"auths": {"a.test": {"auth": base64.b64encode(b"\xff:\xff").decode()}}}, "not base64"),
        ({"credsStore": "../../bin/sh"}, "not the name of a credential helper"),
        ({"credHelpers": {"a.test": "is-not-there"}}, "docker-credential-is-not-there, which is not installed"),
        (" " * (2**20 + 1), "more than"),
    ],
)
def test_a_file_that_cannot_be_used(document: Any, text: str, home: Path) -> None:
    path = docker(home, document)
    with pytest.raises(RegistryDenied, match=text) as caught:
        find("a.test", "", environ(home))
    assert str(path) in str(caught.value)


def test_what_is_no_file(home: Path) -> None:
    (home / "fifo").parent.mkdir(exist_ok=True)
    os.mkfifo(home / "fifo")
    with pytest.raises(RegistryDenied, match="no file"):
        find("a.test", "", environ(home, REGISTRY_AUTH_FILE=str(home / "fifo")))
    with pytest.raises(RegistryDenied):
        find("a.test", "", environ(home, REGISTRY_AUTH_FILE=str(home)))


def test_helpers_are_asked_over_stdin(home: Path) -> None:
    helper(home, "test", 'read server; echo "$@" > "$HOME/args"; printf \'{"Username":"%s","Secret":"s3"}\' "$server"')
    docker(home, {"credHelpers": {"a.test": "test"}, "auths": {"a.test": {"auth": packed("file:1")}}})
    found = find("a.test", "team/app", environ(home))
    assert (found.username, found.password, found.source) == ("a.test", "s3", "docker-credential-test")
    assert (home / "args").read_text() == "get\n"
    docker(home, {"credsStore": "test"})
    assert find("docker.io", "library/x", environ(home)).username == HUB_KEY


def test_a_store_comes_after_entries(home: Path) -> None:
    helper(home, "test", "echo credentials not found in native keychain; exit 1")
    docker(home, {"credsStore": "test", "auths": {"a.test": {"auth": packed("file:1")}, "b.test": {}}})
    assert find("a.test", "", environ(home)).username == "file"
    assert find("b.test", "", environ(home)) == ANONYMOUS


def test_a_helper_may_give_a_token(home: Path) -> None:
    helper(home, "test", 'echo \'{"Username":"<token>","Secret":"an-identity"}\'')
    docker(home, {"credsStore": "test"})
    assert find("a.test", "", environ(home)).identity_token == "an-identity"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo broken >&2; exit 3", "exit code 3: 'broken'"),
        ("echo hello", "did not answer with a Username"),
        ('echo \'{"Username": 1, "Secret": 2}\'', "did not answer with a Username"),
        ("head -c 100000 /dev/zero", "did not answer with a Username"),
        ("sleep 60", "did not answer within"),
    ],
)
def test_a_helper_that_fails(script: str, text: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep" in script:
        monkeypatch.setattr(credentials, "_HELPER_SECONDS", 0.2)
    helper(home, "test", script)
    docker(home, {"credsStore": "test"})
    with pytest.raises(RegistryDenied, match=text):
        find("a.test", "", environ(home))
