"""Images of a registry for MCP sessions: brought before the first call is answered, and how far that is, told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcp_kit import http, stdio
from registry_kit import RealRegistry, busybox_root, layout_of, needs, real_registry
from server_kit import need_container, served

pytestmark = pytest.mark.anyone

SIZE = 96 << 20  # bytes: enough to be under way for a while


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    needs("docker-registry", "skopeo", "umoci", "busybox")
    need_container()
    folder = tmp_path_factory.mktemp("registry")
    root = busybox_root(folder / "root")
    (root / "large").write_bytes(os.urandom(SIZE))
    layout = layout_of(root, folder / "layout")
    with real_registry(folder / "registry") as found:
        found.skopeo("copy", f"oci:{layout}:v1", f"docker://{found.host}/app:v1")
        yield found


def _home(folder: Path, registry: RealRegistry) -> Path:
    home = folder / "home"
    home.mkdir(mode=0o700)
    (home / "registries.toml").write_text(registry.settings)
    return home


def test_over_stdio(registry: RealRegistry, tmp_path: Path) -> None:
    home = _home(tmp_path, registry)
    with stdio(home, "--engine", "container", "--image", f"{registry.host}/app:v1") as talk:
        assert talk.data("run", command="cat /usr/share/gr*")["stdout"] == "in Bytes\n"
        assert any(f"image {registry.host}/app:v1: download" in (message or "") for _, message in talk.progress)
    with stdio(home, "--engine", "container", "--image", f"{registry.host}/nothing:v1") as talk:
        told = talk.refused("run", command="true")
        assert "nothing" in told
        assert str(home) not in told


def test_on_a_server(registry: RealRegistry, tmp_path: Path) -> None:
    """The operator's own key: registries of private networks are not for others."""
    with served(_home(tmp_path, registry)) as server:
        query = f"?engine=container&image={registry.host}/app:v1"
        with http(server.url, server.key, query) as talk:
            assert talk.data("run", command="cat /usr/share/gr*")["stdout"] == "in Bytes\n"
            assert any("app:v1: download" in (message or "") for _, message in talk.progress)
        with http(server.url, server.new_key("other"), f"?engine=container&image={registry.host}/nothing:v1") as talk:
            assert talk.refused("run", command="true")
