"""Layers and what is composed of them (GAUNTLET F-01, F-02, F-05): as the OCI specification has it, never outside."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layer_kit import (
    MODE,
    Member,
    folder,
    hardlink,
    inside,
    left,
    make_image,
    member,
    opened,
    patched,
    symlink,
    tar,
    tree,
    zipped,
)
from sloplet.errors import ImageInvalid
from sloplet.images import compose
from sloplet.images.layer import LayerFacts
from sloplet.images.layers import Layers
from sloplet.images.progress import ImageProgress
from sloplet.images.store import ImageStore
from sloplet.state.home import Home

BASE = (
    folder("usr/"), folder("usr/bin"), member("usr/bin/a", b"a"), symlink("bin", "usr/bin"), folder("etc"),
    member("etc/conf", b"1"), member("etc/other", b"2"), folder("data"), folder("data/deep"),
    member("data/deep/x", b"x"),
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    """A store whose images can be made and removed; beside it a canary that nothing reaches."""
    canary = tmp_path / "canary"
    canary.write_text("host")
    made = ImageStore(Home(tmp_path / "home"))
    yield made
    made.close()
    assert canary.read_text() == "host"
    assert canary.stat().st_nlink == 1
    assert sorted(os.listdir(tmp_path)) == ["canary", "home"]


def composed(store: ImageStore, *layers: tuple[Member, ...]) -> dict[str, str]:
    with opened(store, make_image(store, *(tar(*members) for members in layers))) as root:
        return tree(root)


def facts(store: ImageStore, image_layer: bytes) -> LayerFacts:
    from layer_kit import digest

    path = Layers(store.home, store.blobs).path_of(digest(image_layer))
    return LayerFacts.from_json((path / compose.LAYER_FACTS).read_bytes())


def test_what_a_layer_adds_and_takes_away(store: ImageStore) -> None:
    found = composed(
        store, BASE,
        (member("etc/.wh.conf"), member("etc/new", b"3"), member("data/.wh..wh..opq"), member("data/own", b"own")),
        (member("etc/other", b"changed"), member(".wh.nothing-of-that-name"), folder("usr/bin/a")),
    )  # fmt: skip
    assert found == {
        "usr": "/", "usr/bin": "/", "usr/bin/a": "/", "bin": "-> usr/bin", "etc": "/", "etc/other": "changed",
        "etc/new": "3", "data": "/", "data/own": "own",
    }  # fmt: skip


def test_whiteouts_are_of_what_lies_below(store: ImageStore) -> None:
    """A mark takes nothing of its own layer, in whichever order they come; and one of a folder takes all of it."""
    found = composed(
        store, BASE,
        (member("etc/conf", b"new"), member("etc/.wh.conf"), member("data/deep/y", b"y"), member(".wh.data")),
    )  # fmt: skip
    assert found["etc/conf"] == "new"
    assert {name: text for name, text in found.items() if name.startswith("data")} == {
        "data": "/", "data/deep": "/", "data/deep/y": "y",
    }  # fmt: skip
    everything_gone = composed(store, BASE, (member(".wh..wh..opq"), member("only", b"this")))
    assert everything_gone == {"only": "this"}


def test_what_a_layer_implies_follows_links_of_lower_ones(store: ImageStore) -> None:
    """``bin/b`` above ``bin -> usr/bin`` is ``usr/bin/b``; a folder that is an entry takes the link's place."""
    implied = composed(store, BASE, (member("bin/b", b"b"), member("lib/c", b"c")))
    assert (implied["bin"], implied["usr/bin/b"], implied["lib/c"]) == ("-> usr/bin", "b", "c")
    spoken = composed(store, BASE, (folder("bin"), member("bin/b", b"b")))
    assert (spoken["bin"], spoken["bin/b"], "usr/bin/b" in spoken) == ("/", "b", False)
    gone = composed(store, BASE, (member("bin/.wh.a"), member("x", b"")))
    assert "usr/bin/a" not in gone, "a mark is followed too"


def test_folders_that_are_implied_keep_their_rights(store: ImageStore) -> None:
    layers = tar(folder("tmp", 0o1777, mtime=1000), folder("tmp/d", 0o700, mtime=2000)), tar(member("tmp/d/f", b"f"))
    with opened(store, make_image(store, *layers)) as root:
        assert stat.S_IMODE((root / "tmp").stat().st_mode) == 0o1777
        assert stat.S_IMODE((root / "tmp/d").stat().st_mode) == 0o700
        assert ((root / "tmp").stat().st_mtime, (root / "tmp/d").stat().st_mtime) == (1000, 2000)
    with opened(store, make_image(store, layers[1])) as root:
        assert stat.S_IMODE((root / "tmp/d").stat().st_mode) == 0o755
        assert (root / "tmp/d").stat().st_mtime == 0, "the same for all who unpack it"


def test_links_between_layers(store: ImageStore) -> None:
    """Hard links to files of lower layers, through their symlinks too, and before their target (pnpm)."""
    with opened(
        store,
        make_image(
            store,
            tar(*BASE),
            tar(
                hardlink("link", "usr/bin/a"),
                hardlink("etc/second", "bin/a"),
                hardlink("early", "late"),
                member("late"),
            ),
        ),
    ) as root:
        assert (root / "link").samefile(root / "usr/bin/a")
        assert (root / "etc/second").samefile(root / "usr/bin/a")
        assert (root / "early").samefile(root / "late")
    with pytest.raises(ImageInvalid, match=r"'link'.*'etc/none'.*missing"):
        composed(store, BASE, (hardlink("link", "etc/none"),))
    with pytest.raises(ImageInvalid, match="folder"):
        composed(store, BASE, (hardlink("link", "usr/bin"),))


def test_files_are_shared_between_images(store: ImageStore) -> None:
    base = tar(*BASE)
    one, two = make_image(store, base, tar(member("one"))), make_image(store, base, tar(member("two")))
    with opened(store, one) as first, opened(store, two) as second:
        assert (first / "usr/bin/a").samefile(second / "usr/bin/a")
        assert not (first / "usr").samefile(second / "usr")
        assert sorted(os.listdir(first)) == ["bin", "data", "etc", "one", "usr"]
    assert len(os.listdir(store.home.images / "layers")) == 3


def test_owners_rights_and_times(store: ImageStore) -> None:
    layer = tar(
        folder("home/u", 0o750, uid=1000, gid=1001, mtime=5), member("home/u/f", b"f", uid=1000, gid=1001, mode=0o640),
        member("su", b"s", mode=0o6755), folder("sg", 0o2770), member("far", b"", uid=2_000_000, gid=70_000),
    )  # fmt: skip
    with opened(store, make_image(store, layer)) as root:
        info = (root / "home/u").stat()
        assert (stat.S_IMODE(info.st_mode), info.st_mtime) == (0o750, 5)
        assert stat.S_IMODE((root / "su").stat().st_mode) == 0o755
        assert stat.S_IMODE((root / "sg").stat().st_mode) == 0o770
        if MODE == "single":
            assert info.st_uid == os.geteuid()
        else:
            assert inside(info) == (1000, 1001)
            assert inside((root / "far").stat()) == (65534, 65534), "nobody that a sandbox knows"
    known = facts(store, layer)
    assert (known.stripped, known.foreign) == (2, 1)
    assert known.owners == (
        {b"home/u": (1000, 1001), b"home/u/f": (1000, 1001), b"far": (65534, 65534)} if MODE == "single" else {}
    )


def test_extended_attributes(store: ImageStore, tmp_path: Path) -> None:
    info, data = member("f", b"x")
    info.pax_headers = {
        "SCHILY.xattr.user.mine": "kept",
        "SCHILY.xattr.user.overlay.redirect": "/etc",
        "SCHILY.xattr.user.overlay.opaque": "y",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.security.capability": "\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        "SCHILY.xattr.system.posix_acl_access": "x",
    }
    holder, _ = folder("d")
    holder.pax_headers = {"SCHILY.xattr.user.folder": "too", "SCHILY.xattr.user.overlay.impure": "y"}
    layer = tar((info, data), (holder, b""))
    with opened(store, make_image(store, layer)) as root:
        assert os.listxattr(root / "f") == ["user.mine"]
        assert os.getxattr(root / "f", "user.mine") == b"kept"
        assert os.listxattr(root / "d") == ["user.folder"]
    assert facts(store, layer).attributes == 6


def test_devices_are_left_out(store: ImageStore) -> None:
    layer = tar(
        member("dev/sda", type=tarfile.BLKTYPE, devmajor=8), member("dev/null", type=tarfile.CHRTYPE, devmajor=1),
        member("whiteout-of-overlayfs", type=tarfile.CHRTYPE), member("fifo", type=tarfile.FIFOTYPE), member("ok"),
    )  # fmt: skip
    with opened(store, make_image(store, layer)) as root:
        assert tree(root) == {"ok": ""}
    assert facts(store, layer).skipped == 4


@pytest.mark.parametrize(
    ("name", "says"),
    [("../canary", "leads out"), ("a/../../canary", "leads out"), ("d/.wh...", "names nothing"),
     (".wh..", "names nothing"), (".wh.", "names nothing"), ("../.wh.canary", "leads out"), (".wh.d/x", "mark"),
     ("/".join("d" * 257), "256 folders deep"), ("x" * 256, "too long")],
)  # fmt: skip
def test_names_that_are_refused(store: ImageStore, name: str, says: str) -> None:
    info, data = member("short")
    info.pax_headers = {"path": name}
    image = make_image(store, tar(*BASE), tar((info, data)))
    before = left(store.home)
    with pytest.raises(ImageInvalid, match=says):
        store.resolve(image)
    assert {name for name in left(store.home) - before if not name.startswith("layers/")} == set()


@pytest.mark.parametrize(
    "to",
    ["..", "../..", "/", "../canary", "{outside}", "{outside}/canary", "/proc/self/cwd", "x/../..", "etc/../../.."],
)
def test_writing_through_links_of_lower_layers(store: ImageStore, tmp_path: Path, to: str) -> None:
    """GAUNTLET F-02: what leads out leads to the image's own root."""
    to = to.format(outside=tmp_path)
    for above in (
        (member("l/canary", b"evil"),),
        (member("l/.wh.canary"), member("x")),
        (member("l/.wh..wh..opq"), member("x")),
        (hardlink("h", "l/canary"),),
        (member("l/a/b/canary", b"evil"), hardlink("l/h", "l/a/b/canary")),
        (symlink("m", "l"), member("m/canary", b"evil")),
    ):
        image = make_image(store, tar(symlink("l", to), folder("etc")), tar(*above))
        try:
            with opened(store, image) as root:
                assert ("evil" in tree(root).values()) == any(data == b"evil" for _, data in above)
        except ImageInvalid:
            pass  # refused is as good


def test_loops_of_links(store: ImageStore) -> None:
    with pytest.raises(ImageInvalid, match="loop"):
        composed(store, (symlink("a", "b"), symlink("b", "a")), (member("a/x", b"x"),))
    with pytest.raises(ImageInvalid, match="symbolic links"):
        composed(store, (symlink("a", "b"), symlink("b", "a"), member("a/x", b"x")))


def test_too_deep_together(store: ImageStore) -> None:
    """Each layer keeps the limit; what a link of one makes of another does not exceed it either."""
    deep = "/".join("d" * 250)
    with pytest.raises(ImageInvalid, match="folders deep"):
        composed(store, (folder(deep), symlink("l", deep)), (member(f"l/{deep}/f", b""), symlink(f"l/{deep}/m", "x")),
                 (symlink("n", f"l/{deep}"), member("y")), (member(f"n/{deep}/z", b""),))  # fmt: skip


def test_deeper_than_its_names(store: ImageStore) -> None:
    """A layer that goes on where a link of its own leads."""
    for step, count, says in (("d", 200, "folders deep"), ("d" * 200, 15, "4096 bytes")):
        members, here = [folder("r")], "r"
        for number in range(6):
            members += [folder(f"{here}/" + "/".join([step] * deep)) for deep in range(1, count + 1)]
            members.append(symlink(f"l{number}", f"{here}/" + "/".join([step] * count)))
            here = f"l{number}"
        with pytest.raises(ImageInvalid, match=says):
            composed(store, tuple(members))
        store.prune(everything=True)
        assert os.listdir(store.home.images / "layers") == [], "however deep"


def test_links_imply_no_more_than_there_may_be(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    links = [symlink(f"s{number}", f"{number}/" + "/".join("d" * 100)) for number in range(5)]
    through = [member(f"s{number}/f", b"") for number in range(5)]
    assert "4/" + "/".join("d" * 100) + "/f" in composed(store, tuple(links), tuple(through))
    monkeypatch.setattr(compose, "_MOST", 400)
    store.prune(everything=True)
    if MODE != "range":  # there a child composes
        with pytest.raises(ImageInvalid, match="more than 400 files"):
            composed(store, tuple(links), tuple(through))


def test_a_file_with_too_many_names_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each name: a layer of some kilobytes has 60,000 names for one large file."""
    tree_of_layer = tmp_path / "layers" / "one" / compose.LAYER_TREE
    tree_of_layer.mkdir(parents=True)
    with open(tree_of_layer / "0", "wb") as file:
        file.write(b"data")
        file.truncate(1 << 24)
    for number in range(1, 10):
        os.link(tree_of_layer / "0", tree_of_layer / str(number))
    (tree_of_layer.parent / compose.LAYER_FACTS).write_bytes(LayerFacts("sha256:x").to_json())
    (tmp_path / "root").mkdir()
    real = os.link

    def limited(src: str | bytes, dst: str | bytes, *, src_dir_fd: int, **how: Any) -> None:
        if os.lstat(src, dir_fd=src_dir_fd).st_nlink >= 12:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
        real(src, dst, src_dir_fd=src_dir_fd, **how)

    monkeypatch.setattr(os, "link", limited)
    fds = [os.open(tmp_path / name, os.O_RDONLY | os.O_DIRECTORY) for name in ("root", "layers")]
    try:
        made = compose.compose(fds[0], fds[1], ["one"], keep_owners=False)
    finally:
        for fd in fds:
            os.close(fd)
    files = [tmp_path / "root" / str(number) for number in range(10)]
    assert (made.files, made.copied) == (10, 1)
    assert len({file.stat().st_ino for file in files}) == 2
    assert all(file.stat().st_size == 1 << 24 and file.stat().st_blocks * 512 < 1 << 20 for file in files), "holes stay"
    assert all(file.read_bytes()[:5] == b"data\0" for file in files)


def test_a_layer_that_is_another_one(store: ImageStore) -> None:
    """The tar's own digest is checked while it is unpacked: nothing of another one is kept."""
    wrong = make_image(store, tar(member("a")), diff_ids=("sha256:" + "0" * 64,))
    with pytest.raises(ImageInvalid, match=r"not what the image says.*sha256:0000"):
        store.resolve(wrong)
    assert not os.listdir(store.home.images / "layers")
    assert not [name for name in os.listdir(store.home.images) if name.startswith(".tmp")]


def test_progress_is_told(store: ImageStore) -> None:
    told: list[ImageProgress] = []
    image = make_image(store, tar(member("f", os.urandom(9_000_000))), pack=zipped)
    store.resolve(image, told.append).close()
    assert [each.stage for each in told] == ["unpack"] * len(told)
    assert told[0].done == 0
    assert told[-1].done == told[-1].total == image.layers[0].size
    assert [each.done for each in told] == sorted(each.done for each in told)
    assert len(told) >= 3


@pytest.mark.parametrize("form", ["gnu", "posix0.0", "posix0.1", "posix1.0"])
def test_sparse_files(store: ImageStore, tmp_path_factory: pytest.TempPathFactory, form: str) -> None:
    """As GNU tar writes them: with the holes, and byte for byte."""
    place = tmp_path_factory.mktemp("sparse")
    holes = place / "holes"
    with open(holes, "wb") as file:
        for number in range(40):  # more than fit into one header
            file.seek(number * 1_000_000 + 4096)
            file.write(bytes([number + 1]) * 4096)
        file.truncate(50_000_000)
    (place / "empty").touch()
    os.truncate(place / "empty", 3_000_000)
    argv = ["tar", "--sparse", "-cf", "-", "-C", str(place), "holes", "empty"]
    argv += ["--format=gnu"] if form == "gnu" else ["--format=posix", f"--sparse-version={form.removeprefix('posix')}"]
    made = subprocess.run(argv, capture_output=True, check=True).stdout
    assert len(made) < 1_000_000
    with opened(store, make_image(store, made)) as root:
        assert sorted(os.listdir(root)) == ["empty", "holes"]
        assert (root / "holes").read_bytes() == holes.read_bytes()
        assert (root / "holes").stat().st_blocks * 512 < 2_000_000
        assert (root / "empty").stat().st_size == 3_000_000


def test_sparse_files_that_lie(store: ImageStore) -> None:
    def pax(**records: str) -> bytes:
        info, data = member("f", b"x" * 1024)
        info.pax_headers = {f"GNU.sparse.{key}": value for key, value in records.items()}
        return tar((info, data))

    lies = {
        "8 EiB": pax(major="0", minor="1", size=str(2**63 - 1), numblocks="1", map="0,1024"),
        "7 EiB, within what a number may be": pax(size=str(2**61), numblocks="1", map="0,1024"),
        "beyond the end": pax(size="100", numblocks="1", map="0,1024"),
        "too little data": pax(size="9999", numblocks="1", map="0,5"),
        "overlapping": pax(size="9999", numblocks="2", map="0,512,100,512"),
        "odd": pax(size="9999", map="0,512,100"),
        "no numbers": pax(size="9999", map="a,b"),
        "negative": pax(size="9999", map="-5,1024"),
        "another count": pax(size="9999", numblocks="7", map="0,1024"),
        "no size": pax(map="0,1024"),
        "unknown format": pax(major="3", minor="0", realsize="1024", map="0,1024"),
        "a map that never ends": pax(major="1", minor="0", realsize="99999"),
        "old, of no size": patched(tar(member("f", b"x" * 512)), 156, b"S"),
        "a sparse folder": pax(size="99").replace(b"0000000\0ustar", b"5000000\0ustar"),
    }
    for data in lies.values():
        image = make_image(store, data)
        with pytest.raises(ImageInvalid):
            store.resolve(image).close()
