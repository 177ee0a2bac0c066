"""The operator's images in a tenant's store: the same files, two stores that know nothing of each other afterwards."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from state_helpers import finish, memory_folder, start

from layer_kit import (
    MODE,
    empty,
    folder,
    hardlink,
    inside,
    left,
    make_image,
    member,
    opened,
    symlink,
    tar,
    tree,
    zipped,
)
from sloplet.errors import ImageNotFound
from sloplet.images import adopting, compose, layers, staging
from sloplet.images.layers import Layers
from sloplet.images.owners import recorded
from sloplet.images.reference import parse
from sloplet.images.resolve import find_or_pull, resolve
from sloplet.images.store import ImageStore
from sloplet.images.storelock import StoreLock
from sloplet.images.userns import Session
from sloplet.state.home import Home

_LARGE = os.urandom(1 << 20)
BASE = tar(
    folder("bin"), member("bin/tool", _LARGE, mode=0o755), hardlink("bin/also", "bin/tool"), symlink("sbin", "bin"),
    folder("home"), folder("home/app", mode=0o750, uid=1000, gid=1001),
    member("home/app/mine", b"mine", uid=1000, gid=1001, mode=0o640), member("old", b"old"),
)  # fmt: skip
#: Takes something away, and links to a file of the layer below: what only means something above that.
SECOND = tar(folder("srv"), member("srv/data", _LARGE[::-1]), member(".wh.old", b""), hardlink("srv/tool", "bin/tool"))


@pytest.fixture
def main(tmp_path: Path) -> Iterator[ImageStore]:
    """The operator's store."""
    home = Home(tmp_path / "home").open()
    (home.path / "server").mkdir()
    made = ImageStore(home)
    yield made
    made.close()


@pytest.fixture
def tenant(main: ImageStore) -> Iterator[ImageStore]:
    made = ImageStore(main.home.tenant("one"))
    yield made
    made.close()


def used(path: Path) -> int:
    """What the disk holds below a folder, each file once."""
    seen: dict[tuple[int, int], int] = {}
    for base, folders, files in os.walk(path):
        for name in (*folders, *files):
            info = os.lstat(os.path.join(base, name))
            seen[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sum(seen.values())


def blob_inodes(store: ImageStore) -> dict[str, int]:
    return {digest: os.stat(store.blobs.path_of(digest)).st_ino for digest in store.blobs.digests()}


def test_what_the_operator_has_is_the_tenants_by_the_same_name(main: ImageStore, tenant: ImageStore) -> None:
    image = make_image(main, BASE, SECOND, name="app:1", pack=zipped, env=(("A", "1"),))
    main.tag(image, parse("other:name"))
    found = find_or_pull("app:1", tenant, lambda _: None, None)
    assert (found.id, found.manifest, found.references) == (image.id, image.manifest, ("docker.io/library/app:1",))
    assert found.config == image.config
    assert blob_inodes(tenant) == blob_inodes(main)
    with opened(main, image) as theirs, opened(tenant, found) as ours:
        assert tree(ours) == tree(theirs)
        assert "old" not in tree(ours)
        for path in ("bin/tool", "srv/tool", "srv/data"):
            assert os.stat(ours / path).st_ino == os.stat(theirs / path).st_ino, path


def test_the_disk_holds_it_once(main: ImageStore, tenant: ImageStore) -> None:
    image = make_image(main, BASE, SECOND, name="app:1", pack=zipped)
    main.resolve(image).close()
    before = used(main.home.path)
    resolve("app:1", tenant.home, store=tenant).close()
    more = used(main.home.path) - before
    assert more < len(_LARGE) // 2  # of more than four times that: records, folders, state.db
    assert before > 4 * len(_LARGE)


def test_what_is_not_unpacked_yet_is_unpacked_once_for_all(main: ImageStore, tenant: ImageStore) -> None:
    image = make_image(main, BASE, name="app:1", pack=zipped)
    resolve("app:1", tenant.home, store=tenant).close()
    after_one = used(main.home.path)
    name = Layers(main.home, main.blobs).path_of(image.config.diff_ids[0]).name
    places = [home.images / "layers" / name / "tree/bin/tool" for home in (main.home, tenant.home)]
    assert len({os.stat(path).st_ino for path in places}) == 1
    other = ImageStore(main.home.tenant("two"))
    resolve("app:1", other.home, store=other).close()
    assert used(main.home.path) - after_one < len(_LARGE) // 2
    other.close()


def test_layers_are_shared_with_what_a_tenant_brought_itself(main: ImageStore, tenant: ImageStore) -> None:
    """Its blob is here, so its files are no secret; other content by the same diff id is not believed."""
    image = make_image(main, BASE, name="app:1", pack=zipped)
    main.resolve(image).close()
    own = make_image(tenant, BASE, tar(member("more", b"more")), name="own:1", pack=zipped)
    with opened(main, image) as theirs, opened(tenant, own) as ours:
        assert os.stat(ours / "bin/tool").st_ino == os.stat(theirs / "bin/tool").st_ino
    fresh = ImageStore(main.home.tenant("two"))
    made = make_image(fresh, BASE, name="own:1")  # the same files, packed another way: another blob
    with opened(fresh, made) as ours, opened(main, image) as theirs:
        assert os.stat(ours / "bin/tool").st_ino != os.stat(theirs / "bin/tool").st_ino
    fresh.close()


def test_owners_are_as_they_were(main: ImageStore, tenant: ImageStore) -> None:
    image = make_image(main, BASE, name="app:1")
    found = adopting.find(tenant, "app:1")
    with opened(main, image) as theirs, opened(tenant, found) as ours:
        one, two = tenant.resolve(found), main.resolve(image)
        assert one.owners_kept == two.owners_kept
        one.close()
        two.close()
        if MODE == "single":
            assert recorded(ours) == recorded(theirs) == {"home/app": (1000, 1001), "home/app/mine": (1000, 1001)}
        else:
            assert inside(os.stat(ours / "home/app")) == (1000, 1001)
        for path in ("home/app", "bin", "bin/tool", "."):
            mine, its = os.stat(ours / path), os.stat(theirs / path)
            assert (mine.st_mode, mine.st_uid, mine.st_gid, mine.st_mtime_ns) == (
                its.st_mode, its.st_uid, its.st_gid, its.st_mtime_ns,
            ), path  # fmt: skip


def test_each_side_removes_its_own_only(main: ImageStore, tenant: ImageStore) -> None:
    image = make_image(main, BASE, SECOND, name="app:1", pack=zipped)
    main.resolve(image).close()
    found = adopting.find(tenant, "app:1")
    tenant.resolve(found).close()
    whole = lying(tenant)
    assert main.remove("app:1").image == image.id
    assert main.list() == []
    assert left(main.home) == set()
    assert lying(tenant) == whole
    tenant.prune(everything=False)
    with opened(tenant, tenant.find("app:1")) as ours:
        assert (ours / "bin/tool").read_bytes() == _LARGE
    again = adopting.find(tenant, "app:1")
    assert again.id == image.id
    assert tenant.remove("app:1").image == image.id
    assert left(tenant.home) == set()


def lying(store: ImageStore) -> set[str]:
    return {name for name in left(store.home) if not name.endswith("/synced")}


def test_what_was_taken_and_never_unpacked_needs_nobody(main: ImageStore, tenant: ImageStore) -> None:
    image = make_image(main, BASE, name="app:1", pack=zipped)
    found = adopting.find(tenant, "app:1")
    main.remove("app:1")
    assert left(main.home) == set()
    with opened(tenant, found) as ours:
        assert (ours / "bin/tool").read_bytes() == _LARGE
    assert found.id == image.id


def test_nothing_goes_the_other_way_nor_to_another_tenant(main: ImageStore, tenant: ImageStore) -> None:
    make_image(tenant, BASE, name="private:1")
    make_image(main, SECOND, name="app:1")
    adopting.find(tenant, "app:1")
    tenant.tag(tenant.find("app:1"), parse("mine:1"))
    other = ImageStore(main.home.tenant("two"))
    for store in (main, other):
        for name in ("private:1", "mine:1", tenant.find("private:1").id):
            with pytest.raises(ImageNotFound):
                adopting.find(store, name)
    assert [image.references for image in main.list()] == [("docker.io/library/app:1",)]
    assert other.list() == []
    other.close()


def test_the_tenants_own_comes_first_and_stays(main: ImageStore, tenant: ImageStore) -> None:
    own = make_image(tenant, BASE, name="app:1")
    make_image(main, SECOND, name="app:1")
    assert adopting.find(tenant, "app:1").id == own.id
    tenant.remove("app:1")
    adopted = adopting.find(tenant, "app:1")
    make_image(main, BASE, SECOND, name="app:1")  # the operator's moves on
    assert adopting.find(tenant, "app:1").id == adopted.id


def test_by_id_and_digest_only_what_has_a_name(main: ImageStore, tenant: ImageStore) -> None:
    named, step = make_image(main, BASE, name="app:1"), make_image(main, BASE, SECOND)
    for text in (step.id, step.manifest, step.id[7:20]):
        with pytest.raises(ImageNotFound):
            adopting.find(tenant, text)
    assert adopting.find(tenant, named.id).references == ()
    assert adopting.find(tenant, f"app@{named.manifest}").id == named.id
    fresh = ImageStore(main.home.tenant("two"))
    assert adopting.find(fresh, f"app@{named.manifest}").references == (f"docker.io/library/app@{named.manifest}",)
    fresh.close()


def test_standard_images_too(main: ImageStore, tenant: ImageStore) -> None:
    make_image(main, BASE, name="sloplet/code")
    assert find_or_pull("sloplet/code", tenant, lambda _: None, None).references == ("docker.io/sloplet/code:latest",)
    with pytest.raises(ImageNotFound, match="not built yet"):
        resolve("sloplet/base", tenant.home, store=tenant)


def test_a_home_that_is_nobodys_tenant(tmp_path: Path, main: ImageStore) -> None:
    make_image(main, BASE, name="app:1")
    for path in (tmp_path / "elsewhere" / "tenants" / "one", main.home.path / "other" / "one"):
        store = ImageStore(Home(path))
        with pytest.raises(ImageNotFound):
            adopting.find(store, "app:1")
        store.close()


def test_an_operator_without_any_image(main: ImageStore, tenant: ImageStore) -> None:
    with pytest.raises(ImageNotFound):
        adopting.find(tenant, "app:1")
    assert not main.home.database.exists()


# Where files cannot be linked


def test_another_filesystem_is_copied_from(tmp_path: Path) -> None:
    with memory_folder() as memory:
        home = Home(tmp_path / "home").open()
        (home.path / "server").mkdir()
        os.symlink(memory, home.path / "tenants")
        main = ImageStore(home)
        image = make_image(main, BASE, SECOND, name="app:1", pack=zipped)
        tenant = ImageStore(Home(home.path / "tenants" / "one"))
        found = adopting.find(tenant, "app:1")
        with opened(main, image) as theirs, opened(tenant, found) as ours:
            assert os.stat(ours).st_dev != os.stat(theirs).st_dev
            assert tree(ours) == tree(theirs)
            if MODE != "single":
                assert inside(os.stat(ours / "home/app")) == (1000, 1001)
        main.close()
        tenant.close()
        empty(memory)


def test_a_file_with_too_many_names_is_copied(
    main: ImageStore, tenant: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = make_image(main, BASE, name="app:1", pack=zipped)
    main.resolve(image).close()

    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    monkeypatch.setattr(os, "link", link)  # a child, where one is needed, still can
    found = adopting.find(tenant, "app:1")
    assert blob_inodes(tenant).keys() == blob_inodes(main).keys()
    assert not set(blob_inodes(tenant).values()) & set(blob_inodes(main).values())
    with opened(tenant, found) as ours:
        monkeypatch.undo()
        with opened(main, image) as theirs:
            assert tree(ours) == tree(theirs)


def test_a_damaged_store_of_the_operators_is_no_reason_to_fail(main: ImageStore, tenant: ImageStore) -> None:
    make_image(main, BASE, name="app:1", pack=zipped)
    found = adopting.find(tenant, "app:1")
    main.blobs.remove(found.layers[0].digest)  # somebody's rm
    with opened(tenant, found) as ours:
        assert (ours / "bin/tool").read_bytes() == _LARGE


# Many at once, and killed


def test_whoever_removes_waits(main: ImageStore, tenant: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a layer is linked nothing of the operator's goes."""
    image = make_image(main, BASE, name="app:1", pack=zipped)
    main.resolve(image).close()
    found = adopting.find(tenant, "app:1")
    tried: list[object] = []
    real = layers.make_layer

    def make(home: Home, name: str, work: object) -> None:
        tried.append(StoreLock.exclusive(main.home))
        tried.append(StoreLock.exclusive(tenant.home))
        real(home, name, work)  # type: ignore[arg-type]

    monkeypatch.setattr(adopting, "make_layer", make)
    tenant.resolve(found).close()
    assert tried == [None, None]


def test_many_processes_take_the_same(main: ImageStore, tenant: ImageStore) -> None:
    image = make_image(main, BASE, SECOND, name="app:1", pack=zipped)
    home = tenant.home

    def one() -> str:
        store = ImageStore(home)
        found = adopting.find(store, "app:1")
        store.resolve(found).close()
        return found.id

    assert {finish(*each) for each in [start(one) for _ in range(6)]} == {image.id}
    with opened(tenant, tenant.find("app:1")) as ours:
        assert (ours / "srv/data").read_bytes() == _LARGE[::-1]
    assert not [name for name in left(home) if name.startswith(".tmp")]


def test_taken_while_the_operator_removes(main: ImageStore, tenant: ImageStore) -> None:
    """Whole or not at all, whoever is first."""
    stop = threading.Event()

    def flicker() -> None:
        store = ImageStore(main.home)
        while not stop.is_set():
            make_image(store, BASE, name="app:1", pack=zipped)
            store.remove("app:1")
        store.close()

    thread = threading.Thread(target=flicker)
    thread.start()
    got = 0
    try:
        until = time.monotonic() + 3
        while time.monotonic() < until and got < 20:
            try:
                found = adopting.find(tenant, "app:1")
            except ImageNotFound:
                continue
            got += 1
            with opened(tenant, found) as ours:
                assert (ours / "bin/tool").read_bytes() == _LARGE
            tenant.remove("app:1")
    finally:
        stop.set()
        thread.join()
    assert got


@pytest.mark.parametrize("where", ["link", "record", "relink", "publish"])
def test_killed_half_way(main: ImageStore, tenant: ImageStore, where: str) -> None:
    image = make_image(main, BASE, SECOND, name="app:1", pack=zipped)
    home = tenant.home

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def doomed() -> None:
        if where == "link":
            real, count = os.link, iter(range(2))
            os.link = lambda *args, **more: real(*args, **more) if next(count, 9) == 0 else die()  # type: ignore
        elif where == "record":
            ImageStore.record = die  # type: ignore[assignment, method-assign]
        elif where == "relink":
            compose.relink = die  # type: ignore[assignment]
            Session.run = die  # type: ignore[assignment, method-assign]
        else:
            staging.Staging.publish = die  # type: ignore[method-assign, assignment]
        resolve("app:1", home)

    pid, read = start(doomed)
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    found = adopting.find(tenant, "app:1")
    assert found.id == image.id
    with opened(tenant, found) as ours, opened(main, image) as theirs:
        assert tree(ours) == tree(theirs)
    tenant.remove("app:1")
    tenant.prune(everything=True)
    assert left(home) == set()
