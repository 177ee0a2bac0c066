"""The standard images' recipes, really built, from a small part of their packages (scripts/standard-images builds them
whole); and what cloud-init installs in one."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import sloplet

from sloplet import Network, Sandbox
from sloplet.build.image import Image
from sloplet.engines import registry
from sloplet.errors import BuildFailed, ImageNotFound, SnapshotExists, SpecError
from sloplet.images.resolve import resolve
from sloplet.images.store import ImageStore
from sloplet.recipes import base, build, recipe, template_name, warm
from sloplet.state.home import Home

pytestmark = pytest.mark.timeout(400)  # the first of them waits for mmdebstrap

#: What apt says of a mirror that this machine cannot reach.
_UNREACHABLE = re.compile(r"Failed to fetch|Could not (resolve|connect)|Temporary failure|Unable to fetch|Connection")


@pytest.fixture
def nothing_here(tmp_path: Path) -> Iterator[ImageStore]:
    store = ImageStore(Home(tmp_path / "home"))
    yield store
    store.close()


@pytest.mark.anyone
@pytest.mark.parametrize("name", ["sloplet/base", "sloplet/code", "sloplet/code:latest", "docker.io/sloplet/base"])
def test_one_that_is_not_built_says_how(nothing_here: ImageStore, name: str) -> None:
    with pytest.raises(ImageNotFound, match="not built yet") as caught:
        resolve(name, nothing_here.home, store=nothing_here)
    assert (caught.value.hint or "").startswith("`sloplet image build sloplet/")


@pytest.mark.anyone
def test_none_is_pulled(tmp_path: Path) -> None:
    """By a registry's owner of the name, who would have every sandbox of it."""
    done = sloplet("image", "pull", "sloplet/base", env={"SLOPLET_HOME": str(tmp_path / "home")})
    assert done.returncode == 125
    assert b"built, not pulled" in done.stderr
    assert b"`sloplet image build sloplet/base`" in done.stderr


@pytest.mark.anyone
def test_a_dockerfile_on_one_that_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM sloplet/code\nENV A=b\n")
    done = sloplet("image", "build", str(tmp_path), env={"SLOPLET_HOME": str(tmp_path / "home")})
    assert done.returncode == 125
    assert b"sloplet image build sloplet/code" in done.stderr


@pytest.mark.anyone
@pytest.mark.parametrize("name", ["sloplet/base", "sloplet/code"])
def test_recipes(name: str) -> None:
    found = recipe(name)
    assert isinstance(found.image(), Image)
    assert (found.__doc__ or "").startswith(name)
    if hasattr(found, "WARM"):
        compile(found.WARM, "warm", "exec")
    assert template_name(name) == name.replace("/", "-")


@pytest.mark.anyone
def test_names_that_are_none() -> None:
    with pytest.raises(ImageNotFound, match="sloplet/base, sloplet/code"):
        recipe("sloplet/nothing")
    done = sloplet("image", "build", "sloplet/base", "--build-arg", "A=b")
    assert (done.returncode, b"--build-arg is for Dockerfiles" in done.stderr) == (125, True)


@pytest.fixture(scope="module")
def small() -> Iterator[str]:
    """sloplet/base, of few packages, in this home."""
    if shutil.which("mmdebstrap") is None:
        pytest.skip("needs mmdebstrap")
    probe = registry.load("container").probe()
    if not probe.available or not probe.capabilities.users:
        pytest.skip("needs a container engine with several users")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "PACKAGES", ("passwd", "tzdata"))
        from sloplet.portal import portal

        try:
            image = portal().call(build("sloplet/base", ["small:1"], engine="container"))
        except BuildFailed as error:
            if _UNREACHABLE.search(str(error)):
                pytest.skip(f"no packages can be had here: {str(error).splitlines()[-1]}")
            raise
        assert portal().call(build("sloplet/base", engine="container")).id == image.id
        yield image.id


def test_its_user(small: str) -> None:
    with Sandbox(image="sloplet/base", engine="container") as box:
        assert box.run("id -un; id -u; pwd; cd; pwd").stdout.split() == ["agent", "1000", "/workspace", "/home/agent"]
        assert box.run("touch /workspace/x && sudo id -u", check=True).stdout == "0\n"
        assert box.run(["bash", "-lc", "sudo id -un"], check=True).stdout == "root\n"
        assert box.run("touch /usr/x").exit_code != 0
    with Sandbox(image="sloplet/base", engine="container", sudo=False) as box:
        assert box.run("sudo id -u").exit_code != 0


def test_it_is_there_under_its_names(small: str) -> None:
    shown = sloplet("image", "inspect", "sloplet/base", "--json")
    assert json.loads(shown.stdout)["id"] == small
    config: Any = json.loads(sloplet("image", "inspect", "small:1", "--json").stdout)
    assert config["id"] == small


def test_newer_images_are_not_asked_for_one_of_ours(small: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM sloplet/base\nENV A=b\n")
    done = sloplet("image", "build", "--pull", "-t", "mine", str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_cloud_init_installs_packages(small: str) -> None:
    file = "#cloud-config\npackages: [hello, jq]\ntimezone: Europe/Berlin\nruncmd: [hello > /opt/said]\n"
    network = Network(allow=["@package-indexes"])
    with Sandbox(image="sloplet/base", engine="container", cloud_init=file, network=network) as box:
        assert box.run("cat /opt/said", check=True).stdout == "Hello, world!\n"
        assert box.run("jq -n 1+1", check=True).stdout == "2\n"
        assert box.run("date +%Z", check=True).stdout.strip() in ("CET", "CEST")


def test_packages_that_the_network_refuses_are_told(small: str) -> None:
    file = "#cloud-config\npackages: [hello]\n"
    with pytest.raises(BuildFailed, match="packages, line 2: apt-get") as caught:
        Sandbox(image="sloplet/base", engine="container", cloud_init=file, network=Network()).start()
    assert "policy refused" in (caught.value.hint or "")


def test_nothing_to_warm_up(small: str) -> None:
    from sloplet.finding import default_controller
    from sloplet.portal import portal

    async def main() -> None:
        await warm("sloplet/base", await default_controller(named=False))

    with pytest.raises(SpecError, match="nothing to warm up"):
        portal().call(main())


@pytest.mark.anyone
def test_a_template_of_something_else_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not registry.load("container").probe().available:
        pytest.skip("no container engine here")
    monkeypatch.setenv("SLOPLET_HOME", str(tmp_path / "home"))
    from sloplet.runtime import Runtime
    from sloplet.sandbox import AsyncSandbox

    async def main() -> None:
        runtime = Runtime(Home(tmp_path / "home"))
        try:
            async with AsyncSandbox(engine="container", controller=runtime) as box:
                mine = await box.template("mine")
            with pytest.raises(SnapshotExists, match="not of sloplet/code"):
                await warm("sloplet/code", runtime, template="mine")
            assert (await runtime.find_snapshot("mine")).id == mine.id
        finally:
            await runtime.aclose()

    asyncio.run(main())
