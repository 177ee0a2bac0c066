"""registries.toml, and the servers that a reference stands for."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from sloplet.errors import SpecError
from sloplet.images.reference import parse as reference
from sloplet.images.registries import Registries, is_loopback, load, parse
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone


def registries(text: str = "") -> Registries:
    return Registries(parse(tomllib.loads(text), Path("/folder")))


def test_without_a_file_there_is_the_registry_itself() -> None:
    (only,) = registries().pull(reference("python:3.12"))
    assert (only.host, only.url, only.plain) == ("docker.io", "https://registry-1.docker.io/v2/library/python", False)
    (only,) = registries().pull(reference("ghcr.io/owner/app:1"))
    assert only.url == "https://ghcr.io/v2/owner/app"
    assert only.base == "https://ghcr.io/v2/"


def test_mirrors_come_first_and_are_for_pulls_only() -> None:
    found = registries("""
        [registry."docker.io"]
        mirrors = ["mirror.test:5000", "127.0.0.1:5001/hub/cache"]
        [registry."127.0.0.1:5001"]
        insecure = true
    """)
    assert [endpoint.url for endpoint in found.pull(reference("python"))] == [
        "https://mirror.test:5000/v2/library/python",
        "http://127.0.0.1:5001/v2/hub/cache/library/python",
        "https://registry-1.docker.io/v2/library/python",
    ]
    assert found.push(reference("me/app")).url == "https://registry-1.docker.io/v2/me/app"


def test_insecure_is_for_this_machine_unless_it_is_written_down() -> None:
    assert registries().push(reference("localhost:5000/x"), insecure=True).url == "http://localhost:5000/v2/x"
    assert registries().push(reference("localhost:5000/x")).url == "https://localhost:5000/v2/x"
    with pytest.raises(SpecError, match="without TLS"):
        registries().pull(reference("registry.test/x"), insecure=True)
    written = registries('[registry."registry.test"]\ninsecure = true\nca = "own.pem"')
    endpoint = written.push(reference("registry.test/x"))
    assert (endpoint.plain, endpoint.loopback, endpoint.ca) == (True, False, ("/folder/own.pem",))


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:5000", "127.0.0.1", "127.9.9.9:1", "[::1]:50", "[::1]", "::1"]
)
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["localhost.test", "a.localhost", "127.0.0.1.test", "10.0.0.1:5", "[::2]", "::2", "0.0.0.0", "x.y"]
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = [", "no TOML"),
        ("x = 1", "'x' is not known"),
        ("registry = 1", "no table"),
        ('[registry."not a host"]', "no host"),
        ('registry."a.test" = 1', "no table"),
        ('[registry."a.test"]\nmirror = []', "'mirror' of 'a.test' is not known"),
        ('[registry."a.test"]\nmirrors = "b"', "no list"),
        ('[registry."a.test"]\nmirrors = ["https://b"]', "not HOST"),
        ('[registry."a.test"]\nmirrors = ["b/"]', "not HOST"),
        ('[registry."a.test"]\ninsecure = "yes"', "neither true nor false"),
        ('[registry."a.test"]\nca = 7', "not the path"),
    ],
)
def test_a_file_that_makes_no_sense(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "registries.toml").write_text(text)
    with pytest.raises(SpecError, match=problem) as caught:
        load(Home(tmp_path), {})
    assert "registries.toml" in str(caught.value)


def test_the_file_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[registry."a.test"]\nmirrors = ["b.test"]')
    found = load(Home(tmp_path / "home"), {"SLOPLET_REGISTRIES": str(tmp_path / "mine.toml")})
    assert [endpoint.host for endpoint in found.pull(reference("a.test/x"))] == ["b.test", "a.test"]
    with pytest.raises(SpecError, match="does not exist"):
        load(Home(tmp_path / "home"), {"SLOPLET_REGISTRIES": str(tmp_path / "nothing.toml")})
    assert [endpoint.host for endpoint in load(Home(tmp_path / "home"), {}).pull(reference("a.test/x"))] == ["a.test"]


def test_authorities_of_podman_and_docker_count(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "containers" / "certs.d" / "a.test:5000"
    folder.mkdir(parents=True)
    (folder / "ca.crt").write_text("x")
    (folder / "client.key").write_text("x")
    found = load(Home(tmp_path / "home"), {"HOME": str(tmp_path)})
    assert found.push(reference("a.test:5000/x")).ca == (str(folder / "ca.crt"),)
    assert found.push(reference("b.test:5000/x")).ca == ()
