"""From a registry to a running sandbox, as whoever runs the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from registry_kit import RealRegistry, busybox_root, layout_of, needs, real_registry
from sloplet import Sandbox
from sloplet.errors import EngineUnavailable, ImageNotFound
from sloplet.images.store import ImageStore
from sloplet.state.home import Home


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    """With an image of umoci's, whose layers end without the mark of an end."""
    needs("skopeo", "umoci")
    folder = tmp_path_factory.mktemp("registry")
    layout = layout_of(busybox_root(folder / "root"), folder / "layout", second={"note.txt": "second\n"})
    with real_registry(folder / "served") as running:
        running.skopeo("copy", f"oci:{layout}:v1", f"docker://{running.host}/team/app:v1")
        yield running


@pytest.fixture
def settings(registry: RealRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registries.toml").write_text(registry.settings)
    monkeypatch.setenv("SLOPLET_REGISTRIES", str(tmp_path / "registries.toml"))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "none.json"))


@pytest.mark.usefixtures("settings")
def test_a_sandbox_of_an_image_that_is_not_here_yet(registry: RealRegistry) -> None:
    name = f"{registry.host}/team/app:v1"
    try:
        with Sandbox(image=name, engine="container") as box:
            said = box.run("id -u; pwd; echo $GREETING; cat note.txt; cat /usr/share/größe.txt", check=True).stdout
            assert said.splitlines() == ["65534", "/srv", "hello", "second", "in Bytes"]
            assert box.run("echo x > /etc/passwd", user="0").exit_code == 0  # in the sandbox, not in the image
    except EngineUnavailable as error:
        pytest.skip(str(error))
    store = ImageStore(Home())
    image = store.find(name)
    assert image.config.user == "nobody"
    with Sandbox(image=image.short, engine="container") as box:  # by its id, from what is here
        assert box.run("cat /etc/passwd", check=True).stdout.startswith("root:x:0:0")
    store.remove(name)
    with pytest.raises(ImageNotFound):
        store.find(name)
    store.close()


@pytest.mark.usefixtures("settings")
def test_what_no_registry_has(registry: RealRegistry) -> None:
    with pytest.raises(ImageNotFound, match="has no team/none v1"):
        Sandbox(image=f"{registry.host}/team/none:v1", engine="container").run("true")
