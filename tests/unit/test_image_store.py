"""The store: what is recorded, found, in use, removed and pruned; by many at once."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from state_helpers import finish, start

from layer_kit import digest, folder, left, make_image, member, opened, tar, tree, zipped
from sloplet.engines.base import StateFormat
from sloplet.errors import (
    ImageError,
    ImageInUse,
    ImageInvalid,
    ImageNotFound,
    ImagePlatform,
    SpecError,
    StateUnwritable,
)
from sloplet.images import cleaning, lease, media, staging, userns
from sloplet.images.config import ImageConfig
from sloplet.images.reference import parse
from sloplet.images.resolve import resolve
from sloplet.images.store import ImageStore
from sloplet.images.storelock import StoreLock
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home, new_id
from sloplet.state.image_rows import ImageRow, ImageRows
from sloplet.state.opened import image_facts
from sloplet.state.snapshots import SnapshotStore
from sloplet.state.store import Store

_TREE = re.compile(r"[0-9a-f]{64}\Z")
BASE = tar(folder("bin"), member("bin/tool", b"tool", mode=0o755))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    made = ImageStore(Home(tmp_path / "home"))
    yield made
    made.close()


def app(number: int) -> bytes:
    return tar(member(f"app{number}", os.urandom(1000 * number)))


# Recording and finding


def test_an_image_is_found_by_all_its_names(store: ImageStore) -> None:
    image = make_image(store, BASE, name="app:1", pack=zipped, env=(("A", "1"),))
    store.tag(image, parse("registry.example:5000/team/app:2"))
    for text in (
        "app:1", "docker.io/library/app:1", "library/app:1", "registry.example:5000/team/app:2", image.id,
        image.id.removeprefix("sha256:"), image.short, image.id[7:13], image.id[:15], image.manifest,
        f"app@{image.manifest}", f"app:1@{image.manifest}",
    ):  # fmt: skip
        found = store.find(text)
        assert found.id == image.id, text
        assert found.references == ("docker.io/library/app:1", "registry.example:5000/team/app:2")
        assert (found.config.env, found.layers, found.platform) == (image.config.env, image.layers, image.platform)
    for text in ("app", "app:3", "other:1", image.id[7:12], "sha256:" + "0" * 64, "Not A Name", "", "000000"):
        with pytest.raises(ImageNotFound):
            store.find(text)
    assert image.size == sum(os.stat(store.blobs.path_of(each)).st_size for each in store.blobs.digests())


def test_a_name_moves(store: ImageStore) -> None:
    old, new = make_image(store, BASE, name="app"), make_image(store, BASE, app(1), name="app")
    assert store.find("app").id == new.id
    assert store.find(old.id).references == ()
    assert {image.id for image in store.list()} == {old.id, new.id}
    store.untag(parse("app"))
    with pytest.raises(ImageNotFound):
        store.untag(parse("app"))
    assert store.find(new.id).references == ()
    with pytest.raises(SpecError, match="content"):
        store.tag(new, parse(f"app@{new.manifest}"))


def test_parts_that_do_not_fit(store: ImageStore) -> None:
    """Nothing is on record then."""
    packed = store.blobs.add_bytes(BASE)
    layer = media.Descriptor(media.OCI_LAYER, packed, len(BASE))

    def record(layers: tuple[media.Descriptor, ...], diffs: tuple[str, ...], *, lie: int = 0) -> None:
        raw = ImageConfig(architecture="amd64", diff_ids=diffs).to_json()
        config = media.Descriptor(media.OCI_CONFIG, store.blobs.add_bytes(raw), len(raw) + lie)
        store.record(store.blobs.add_bytes(media.make_manifest(config, layers).raw))

    for layers, diffs, lie, says in (
        ((layer,), (), 0, "1 layers, and its config 0"),
        ((layer,), (packed, packed), 0, "1 layers, and its config 2"),
        ((layer,), ("sha512:" + "0" * 128,), 0, "only sha256"),
        ((layer,), ("nothing",), 0, "only sha256"),
        ((media.Descriptor(media.OCI_LAYER, packed, 1),), (packed,), 0, "says 1"),
        ((layer,), (packed,), 1, "the image's manifest says"),
        ((), (), 0, "no layers"),
    ):
        with pytest.raises(ImageInvalid, match=says):
            record(layers, diffs, lie=lie)
    missing = media.Descriptor(media.OCI_LAYER, digest(b"not here"), 8)
    with pytest.raises(ImageNotFound):
        record((missing,), (packed,))
    with pytest.raises(ImageNotFound):
        store.record(digest(b"no manifest"))
    with pytest.raises(ImageInvalid):
        store.record(packed)
    assert store.list() == []


def test_an_image_for_another_machine(store: ImageStore) -> None:
    other = "arm64" if media.host_platform().architecture != "arm64" else "amd64"
    image = make_image(store, BASE, name="foreign", architecture=other)
    assert store.find("foreign").platform == f"linux/{other}"
    with pytest.raises(ImagePlatform, match=other):
        store.resolve(image)
    with pytest.raises(ImagePlatform):
        resolve("foreign", store.home)
    windows = make_image(store, BASE, os="windows")
    with pytest.raises(ImagePlatform, match="windows"):
        store.resolve(windows)


# Trees and leases


def test_a_tree_is_made_once(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    image = make_image(store, BASE, app(1), name="app")
    with opened(store, image) as first:
        found = tree(first)
    assert found["bin/tool"] == "tool"

    def no_more(*_: object) -> None:
        raise AssertionError("it is made again")

    monkeypatch.setattr("sloplet.images.trees.Trees._compose", no_more)
    with opened(store, store.find("app")) as second:
        assert second == first
    found_by_name = resolve("app", store.home)
    assert found_by_name.path == first
    assert found_by_name.config == image.config
    found_by_name.close()


def test_after_a_loss_of_power(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not yet on the disk when the machine went off is made again; what was, is used."""
    monkeypatch.setattr(staging, "sync_later", lambda *folders: None)
    monkeypatch.setattr("sloplet.images.trees.sync_later", lambda *folders: None)
    image = make_image(store, BASE)
    with opened(store, image) as root:
        os.truncate(root / "bin/tool", 0)  # as a disk may leave it
    monkeypatch.setattr(staging, "boot_id", lambda: "another-boot")
    with opened(store, image) as root:
        assert (root / "bin/tool").read_text() == "tool"
        layers = list((store.home.images / "layers").iterdir())
        staging._sync([root.parent, *layers])
    monkeypatch.setattr(staging, "boot_id", lambda: "a-third-boot")
    with opened(store, image) as root:
        os.truncate(root / "bin/tool", 1)
    with opened(store, image) as root:
        assert (root / "bin/tool").read_text() == "t", "it is used as it is"


def test_a_tree_that_somebody_deleted(store: ImageStore) -> None:
    image = make_image(store, BASE)
    with opened(store, image) as root:
        pass
    shutil.rmtree(root)
    with opened(store, image) as root:
        assert (root / "bin/tool").read_text() == "tool"
    shutil.rmtree(store.home.images / "layers")
    with opened(store, image) as root:
        assert (root / "bin/tool").read_text() == "tool", "a tree does not need its layers"
    (root.parent / "image.json").write_text("{")
    with opened(store, image) as root:
        assert (root / "bin/tool").read_text() == "tool", "nor what is damaged beside it"


def test_who_only_looks_whether_it_can_go(store: ImageStore) -> None:
    """Is waited for: what is there is not made again under somebody's feet."""
    image = make_image(store, BASE)
    with opened(store, image) as root:
        inode = root.stat().st_ino
    looking = lease.take(root.parent, shared=False)
    assert looking is not None
    threading.Timer(0.1, lambda: looking.release(remove=False)).start()
    with opened(store, image) as root:
        assert root.stat().st_ino == inode


def test_many_layers(store: ImageStore) -> None:
    """No limit of the kernel's counts, nor on open files."""
    layers = [tar(member(f"f{number}", b"x"), member("last", str(number).encode())) for number in range(300)]
    with opened(store, make_image(store, *layers)) as root:
        assert len(os.listdir(root)) == 301
        assert (root / "last").read_text() == "299"


def test_what_is_in_use_stays(store: ImageStore) -> None:
    image = make_image(store, BASE, name="app")
    first = store.resolve(image)
    second = first.held()
    for each in (first, second):
        with pytest.raises(ImageInUse, match="app:latest is in use by a sandbox"):
            store.remove("app")
        assert store.prune(everything=True).used == (image.id,)
        assert (first.path / "bin/tool").read_text() == "tool"  # type: ignore[operator]
        each.close()
        each.close()
    removed = store.remove("app")
    assert removed.image == image.id
    assert removed.bytes > len(BASE)
    assert left(store.home) == set()


def test_force_takes_the_names(store: ImageStore) -> None:
    image = make_image(store, BASE, name="app")
    with opened(store, image) as root:
        assert store.remove("app", force=True).image is None
        assert store.find(image.id).references == ()
        assert (root / "bin/tool").exists()
        assert store.prune().images == ()
    assert store.prune().images == (image.id,)
    assert left(store.home) == set()


def test_a_saved_state_keeps_its_image(store: ImageStore) -> None:
    image = make_image(store, BASE, name="app")
    records = Store(store.home)
    saved = SnapshotStore(store.home, records)
    info = records.reserve(
        new_id(), SandboxSpec(image="app"), engine="fake", rung="fake", holder="embedded", owner=new_id()
    )
    root = store.resolve(image)
    draft = saved.begin()
    snapshot = saved.publish(
        draft, info, role="template", name="warm", kind="disk", format=StateFormat("fake", "1"),
        image=image_facts(root),
    )  # fmt: skip
    root.close()
    records.remove(info.id)
    for text in ("app", image.id):
        with pytest.raises(ImageInUse, match="the template warm"):
            store.remove(text)
    assert store.prune(everything=True).images == ()
    store.remove("app", force=True)
    assert store.prune(everything=True).used == (image.id,)
    assert root.path is not None
    assert root.path.exists()
    saved.delete(snapshot.id)
    assert store.prune(everything=True).images == (image.id,)
    assert left(store.home) == set()
    records.close()


def test_images_of_the_same_files(store: ImageStore) -> None:
    """They have one tree, which goes with the last of them."""
    one, two = make_image(store, BASE, name="one"), make_image(store, BASE, name="two", user="1000")
    assert one.id != two.id
    with opened(store, one) as first, opened(store, two) as second:
        assert first == second
        assert store.remove("one").image == one.id
        with pytest.raises(ImageInUse):
            store.remove("two")
    with opened(store, two) as root:
        assert (root / "bin/tool").exists()
    store.remove("two")
    assert left(store.home) == set()


# Removing and pruning


def test_one_of_several_names(store: ImageStore) -> None:
    image = make_image(store, BASE, name="a")
    store.tag(image, parse("b:2"))
    assert store.remove("a").image is None
    assert store.find(image.id).references == ("docker.io/library/b:2",)
    store.tag(image, parse("c"))
    removed = store.remove(image.short)
    assert removed.image == image.id
    assert removed.references == ("docker.io/library/b:2", "docker.io/library/c:latest")
    with pytest.raises(ImageNotFound):
        store.remove("b:2")
    assert left(store.home) == set()


def test_what_somebody_names_meanwhile_stays(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process pulls the same image by another name, or names it, just when it is to go."""
    drop = ImageRows.drop
    meanwhile: list[Callable[[ImageStore], object]] = []

    def dropping(self: ImageRows, row: ImageRow, tree: str) -> bool | None:
        if meanwhile:
            other = ImageStore(store.home)
            meanwhile.pop()(other)
            other.close()
        return drop(self, row, tree)

    monkeypatch.setattr(ImageRows, "drop", dropping)
    image = make_image(store, BASE, name="app")
    meanwhile.append(lambda other: make_image(other, BASE, name="pulled"))
    assert store.remove("app").image is None, "that name alone went"
    assert store.find("pulled").references == ("docker.io/library/pulled:latest",)
    store.untag(parse("pulled"))
    meanwhile.append(lambda other: other.tag(image, parse("kept")))
    assert store.prune().images == ()
    with opened(store, store.find("kept")) as root:
        assert (root / "bin/tool").exists()
    assert store.remove("kept").image == image.id
    assert left(store.home) == set()


def test_what_others_need_stays(store: ImageStore) -> None:
    one, two = make_image(store, BASE, app(1), name="one"), make_image(store, BASE, app(2), name="two")
    for image in (one, two):
        store.resolve(image).close()
    store.remove("one")
    assert len(os.listdir(store.home.images / "layers")) == 2
    with opened(store, two) as root:
        assert set(tree(root)) == {"bin", "bin/tool", "app2"}
    assert {layer.digest for layer in two.layers} < set(store.blobs.digests())
    assert store.prune(everything=True).images == (two.id,)
    assert left(store.home) == set()


def test_prune_by_age_and_size(store: ImageStore) -> None:
    images = {number: make_image(store, app(number), name=f"app:{number}") for number in (100, 200, 300)}
    nameless = make_image(store, app(50))
    now = time.time()
    for number, age in ((100, 10), (200, 5 * 86400), (300, 9 * 86400)):
        with store.rows._write() as db:
            db.execute("UPDATE images SET used_at = ? WHERE id = ?", (now - age, images[number].id))
    assert store.prune(older_than=7 * 86400).images == (images[300].id,)
    assert store.prune(older_than=7 * 86400).images == ()
    assert store.prune().images == (nameless.id,)
    assert store.prune(keep_bytes=350_000).images == ()
    assert store.prune(keep_bytes=150_000).images == (images[200].id,)
    assert [image.id for image in store.list()] == [images[100].id]
    store.resolve(images[100]).close()
    assert store.find("app:100").used_at >= now - 10
    assert store.prune(keep_bytes=150_000).images == (images[100].id,), "its unpacked layer counts too"
    assert left(store.home) == set()


def test_nobody_waits_for_files_that_go(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing an image of many files takes its time, in which others may be added; this one too."""
    image = make_image(store, BASE, app(1), name="app")
    store.resolve(image).close()
    remove, looked = userns.remove, []

    def removing(parent: Path, name: str) -> int:
        lock = StoreLock.exclusive(store.home)  # which nobody else has, then, shared or not
        looked.append(lock is not None and not any(_TREE.match(each) for each in os.listdir(store.home.images)))
        if lock is not None:
            lock.release(remove=False)
        return remove(parent, name)

    monkeypatch.setattr(userns, "remove", removing)
    removed = store.remove("app")
    assert looked == [True] * 3, "a tree and two layers"
    assert removed.bytes > image.size
    assert left(store.home) == set()


def test_what_cannot_be_removed_keeps_nothing_else(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    image = make_image(store, BASE, app(1), name="app")
    store.resolve(image).close()
    remove, tried = userns.remove, []

    def removing(parent: Path, name: str) -> int:
        tried.append(name)
        if len(tried) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return remove(parent, name)

    monkeypatch.setattr(userns, "remove", removing)
    with pytest.raises(StateUnwritable):
        store.remove("app")
    assert len(tried) == 3
    assert [name for name in os.listdir(store.home.run) if name.startswith("image-")] == []
    make_image(store, BASE, app(1), name="app")
    with opened(store, store.find("app")) as root:
        assert (root / "bin/tool").exists()


def test_what_no_record_names(store: ImageStore) -> None:
    """Left by a crash: found by looking, when it is nobody's work of just now."""
    image = make_image(store, BASE, name="app")
    store.resolve(image).close()
    orphan = store.blobs.add_bytes(b"orphan")
    with store.blobs.writer(digest(b"never finished"), 100) as writer:
        writer.write(b"begun")
    (store.home.images / "layers" / ("a" * 64) / "tree").mkdir(parents=True)
    (store.home.images / ("b" * 64) / "rootfs").mkdir(parents=True)
    (store.home.images / ("b" * 64) / "composed").touch()
    (store.home.images / ("c" * 64) / "rootfs").mkdir(parents=True)  # of a tar
    swept = cleaning.sweep(store.home, store.rows)
    assert (swept.blobs, swept.layers, swept.trees) == (0, 1, 1)
    assert store.blobs.has(orphan), "it came only just now"
    old = time.time() - 2 * 86400
    os.utime(store.blobs.path_of(orphan), (old, old))
    for name in os.listdir(store.blobs.partial):
        os.utime(store.blobs.partial / name, (old, old))
    with store.adding():
        assert cleaning.sweep(store.home, store.rows).later
        assert store.blobs.has(orphan)
    assert cleaning.sweep(store.home, store.rows).blobs == 1
    assert os.listdir(store.blobs.partial) == []
    assert (store.home.images / ("c" * 64)).exists()
    with opened(store, image) as root:
        assert (root / "bin/tool").exists()


def test_tars_go_when_everything_does(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_bytes(BASE)
    found = resolve(str(tmp_path / "root.tar"), store.home)
    assert found.path is not None
    store.prune(everything=True)
    assert found.path.exists(), "it is in use"
    found.close()
    store.prune()
    assert found.path.exists()
    store.prune(everything=True)
    assert not found.path.exists()
    resolve(str(tmp_path / "root.tar"), store.home).close()


# Many at once


def test_many_resolve_one_image(store: ImageStore) -> None:
    image = make_image(store, BASE, app(1), app(2), name="app")

    def work() -> str:
        mine = ImageStore(Home(store.home.path))
        found = mine.resolve(mine.find("app"))
        assert found.path is not None
        assert len(tree(found.path)) == 4
        found.close()
        mine.close()
        return str(found.path)

    assert len({finish(*child) for child in [start(work) for _ in range(5)]}) == 1
    assert len(os.listdir(store.home.images / "layers")) == 3
    assert os.listdir(store.home.run) == ["owners"], "no locks are left"
    store.remove(image.id)
    assert left(store.home) == set()


def test_adding_using_and_removing_at_once(store: ImageStore) -> None:
    """Whoever gets an image gets all of it; nobody meets a half one; in the end nothing is left."""
    layers = [app(number) for number in (1, 2, 3)]

    def work(seed: int) -> int:
        used = 0
        mine = ImageStore(Home(store.home.path))
        for turn in range(6):
            try:
                if (seed + turn) % 3 == 0:
                    with suppress(ImageNotFound):
                        mine.remove("app")
                elif (seed + turn) % 3 == 1:
                    mine.prune(everything=True)
                else:
                    image = make_image(mine, BASE, layers[turn % 3], name="app")
                    with opened(mine, image) as root:
                        assert set(tree(root)) == {"bin", "bin/tool", f"app{turn % 3 + 1}"}
                        used += 1
            except (ImageInUse, ImageNotFound):
                pass
            except ImageError as error:
                raise AssertionError(f"{seed} {turn}: {error}") from error
        mine.close()
        return used

    children = [start(lambda seed=seed: work(seed)) for seed in range(4)]
    assert sum(finish(*child) for child in children) > 0
    store.prune(everything=True)
    assert left(store.home) == set()
    assert store.list() == []
