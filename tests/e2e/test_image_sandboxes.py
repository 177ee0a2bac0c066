"""Sandboxes of images in the store: owners as the image has them, files shared, nothing removed under their feet."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import cli_helpers
import pytest

from image_kit import busybox_image, default_home, needs_busybox
from layer_kit import MODE, folder, make_image, member, symlink, tar
from sloplet import Sandbox
from sloplet.engines import registry
from sloplet.errors import ImageInUse, ImageNotFound
from sloplet.images.store import ImageStore

pytestmark = [needs_busybox]


def sloplet(*words: str) -> subprocess.CompletedProcess[str]:
    """The CLI; what it says is text."""
    done = cli_helpers.sloplet(*words)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture
def store() -> Iterator[ImageStore]:
    made = ImageStore(default_home())
    yield made
    made.close()


@pytest.fixture
def name(store: ImageStore) -> Iterator[str]:
    """An image that is there for one test, and whose end is looked at."""
    made = f"t{uuid.uuid4().hex[:10]}"
    variables = (("PATH", "/usr/bin"), ("FROM_IMAGE", "yes"))
    # files of its own: one that shares all its layers with another may go while a sandbox runs, its tree stays
    image = busybox_image(store.home, made, env=variables, labels=(("own", made),), files={"etc/own": made})
    yield made
    try:
        store.remove(image.id)
    except ImageNotFound:
        pass


def test_owners_are_the_images(engine: str, name: str) -> None:
    with Sandbox(image=name, engine=engine) as box:
        told = box.run("stat -c '%u:%g %a %n' /home/app /etc/passwd /tmp /usr/bin/busybox").stdout.splitlines()
        home, passwd, tmp, program = told
        assert passwd.endswith(" 644 /etc/passwd")
        assert tmp.endswith(" 1777 /tmp")
        assert program.endswith(" 755 /usr/bin/busybox")
        several = registry.load(engine).probe().capabilities.users
        if MODE == "single" or not several:
            return
        assert home == "1000:1001 750 /home/app"
        assert passwd.startswith("0:0")
        tried = box.run(
            "touch ~/mine && stat -c '%u:%g' ~/mine; touch /etc/passwd; cat /etc/passwd | head -1", user="app"
        )
        assert tried.stdout == "1000:1001\nroot:x:0:0:root:/root:/bin/sh\n"
        assert "Permission denied" in tried.stderr
        assert box.run("cd /home/app && ls mine", user="0:0").exit_code == (
            0 if box.run("id -u").stdout == "0\n" else 1
        )


def test_a_whole_life(engine: str, name: str, store: ImageStore) -> None:
    """By its id; what it says of itself counts; while a sandbox lives its image stays."""
    image = store.find(name)
    with Sandbox(image=image.id, engine=engine) as box:
        assert box.run("echo $FROM_IMAGE").stdout == "yes\n"
        assert box.run("echo changed > /etc/motd; cat /etc/motd").stdout == "changed\n"
        with pytest.raises(ImageInUse, match=r"the running sandbox"):
            store.remove(name)
        code = sloplet("image", "rm", name)
        assert code.returncode == 125
        assert "in use by the running sandbox" in code.stderr
    with Sandbox(image=name, engine=engine) as box:
        assert box.run("cat /etc/motd").exit_code != 0, "what one writes the next does not see"


def test_removed_when_nobody_needs_it(name: str, store: ImageStore) -> None:
    with Sandbox(image=name, engine="container") as box:
        box.run("true", check=True)
    done = sloplet("image", "rm", name)
    assert done.returncode == 0, done.stderr
    assert "removed" in done.stdout
    with pytest.raises(ImageNotFound):
        store.find(name)


def test_a_template_keeps_its_image(engine: str, name: str, store: ImageStore) -> None:
    template = f"{name}-{engine}"
    with Sandbox(image=name, engine=engine) as box:
        box.run("echo kept > /root/note || echo kept > note", check=True)
        box.template(template)
    with pytest.raises(ImageInUse, match=f"the template {template}"):
        store.remove(name)
    store.remove(name, force=True)
    with Sandbox(template=template) as box:
        assert box.run("cat /root/note 2>/dev/null || cat note").stdout == "kept\n"
        assert box.run("echo $FROM_IMAGE").stdout == "yes\n"
    assert sloplet("template", "rm", template).returncode == 0
    assert store.prune().images


def test_an_image_of_one_program(store: ImageStore) -> None:
    """Without /etc/passwd, without anything: root is root."""
    from image_kit import BUSYBOX

    assert BUSYBOX is not None
    layer = tar(
        folder("bin"), member("bin/busybox", Path(BUSYBOX).read_bytes(), mode=0o755), symlink("bin/sh", "busybox"),
        symlink("bin/id", "busybox"),
    )  # fmt: skip
    image = make_image(store, layer)
    with Sandbox(image=image.short, engine="container") as box:
        assert box.run("id -u").stdout == ("0\n" if MODE != "single" else "1000\n")
    store.remove(image.id)


def test_sandboxes_share_files(name: str, store: ImageStore) -> None:
    """One inode below all of them: one copy on disk and in the page cache."""
    with Sandbox(image=name, engine="container") as one, Sandbox(image=name, engine="container") as two:
        found = [box.run("stat -c %i /usr/bin/busybox").stdout for box in (one, two)]
    image = store.resolve(store.find(name))
    assert image.path is not None
    assert {int(each) for each in found} == {(image.path / "usr/bin/busybox").stat().st_ino}
    image.close()


def test_the_verbs(name: str) -> None:
    listed = sloplet("image", "ls").stdout
    assert f"{name}:latest" in listed
    assert sloplet("image", "tag", name, f"{name}:other").returncode == 0
    told = json.loads(sloplet("image", "inspect", f"{name}:other", "--json").stdout)
    assert told["config"]["labels"] == {"own": name}
    assert told["references"] == [f"docker.io/library/{name}:latest", f"docker.io/library/{name}:other"]
    assert sloplet("image", "inspect", name).stdout.count("FROM_IMAGE=yes") == 1
    assert "its name is gone" in sloplet("image", "rm", f"{name}:other").stdout
    assert json.loads(sloplet("image", "prune", "--older-than", "1d", "--json").stdout)["images"] == []
    for words, says in (
        (("inspect", "nothing-such"), "there is no image"),
        (("rm", "nothing-such"), "there is no image"),
        (("prune", "--older-than", "soon"), "is not a duration"),
        (("prune", "--keep", "much"), "is not a size"),
        (("tag", name, "Not/A/Name"), "lower case"),
    ):
        failed = sloplet("image", *words)
        assert failed.returncode == 125
        assert says in failed.stderr
        assert "Traceback" not in failed.stderr


def test_exported_and_imported(name: str, store: ImageStore, tmp_path: Path) -> None:
    """With its image, whose files may be others' on disk, and with what that says of itself."""
    with Sandbox(image=name, engine="container") as box:
        box.run("echo mine > /root/note || echo mine > note", check=True)
        box.export(str(tmp_path / "box.sloplet"))
        told = box.run("stat -c '%a %u:%g' /home/app", check=True).stdout
    store.remove(name)
    with Sandbox.load(str(tmp_path / "box.sloplet")) as box:
        assert box.run("cat /root/note 2>/dev/null || cat note").stdout == "mine\n"
        assert box.run("echo $FROM_IMAGE").stdout == "yes\n"
        if os.geteuid() == 0:
            assert box.run("stat -c '%a %u:%g' /home/app").stdout == told
