"""F-01, F-02, F-05 to F-08: images that attack whoever unpacks, stores or runs them. As every user.

Each case has a positive control: an unpacker that trusts its tar, a bomb that is one, a program whose bits do count.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import signal
import stat
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from hostile_kit import Target

from layer_kit import (
    Member,
    digest,
    folder,
    hardlink,
    left,
    make_image,
    member,
    opened,
    symlink,
    tar,
    tree,
    zipped,
)
from sloplet.engines import registry
from sloplet.errors import ImageError, ImageInvalid, ImageNotFound, ImagePlatform
from sloplet.images import media
from sloplet.images.config import ImageConfig
from sloplet.images.extract import UnpackLimits
from sloplet.images.layer import unpack_layer
from sloplet.images.owners import Owners
from sloplet.images.reference import parse
from sloplet.images.store import ImageStore
from sloplet.state.home import Home
from sloplet.state.reaper import reap
from sloplet.state.store import Store

CANARY = "host"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    """A store of its own beside a canary. Whatever was tried: the canary is as it was, and nothing half is there."""
    (tmp_path / "canary").write_text(CANARY)
    made = ImageStore(Home(tmp_path / "home"))
    yield made
    assert (tmp_path / "canary").read_text() == CANARY
    assert (tmp_path / "canary").stat().st_nlink == 1
    assert sorted(os.listdir(tmp_path)) == ["canary", "home"]
    assert not [name for name in left(made.home) if ".tmp" in name]
    assert not [name for name in os.listdir(made.home.run) if name != "owners"]
    made.prune(everything=True)
    assert left(made.home) == set()
    made.close()


def refused(store: ImageStore, *layers: bytes, match: str = "", pack: Callable[[bytes], bytes] = bytes) -> None:
    """It is not unpacked, says why, and leaves nothing but its blobs."""
    image = make_image(store, *layers, pack=pack)
    before = {name for name in left(store.home) if len(name) == 64}
    with pytest.raises(ImageInvalid, match=match) as caught:
        store.resolve(image)
    assert len(str(caught.value)) < 600
    assert {name for name in left(store.home) if len(name) == 64} == before


def naive(root: Path, data: bytes) -> None:
    """What an unpacker does that believes names: the positive control of what leads out."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for info in archive:
            path = root / info.name
            with suppress(OSError):
                if info.issym():
                    path.symlink_to(info.linkname)
                elif info.islnk():
                    os.link(root / info.linkname, path)
                elif info.isdir():
                    path.mkdir(parents=True)
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.extractfile(info).read())  # type: ignore[union-attr]


# F-01


@pytest.mark.parametrize("make", [member, folder, lambda n: symlink(n, "x"), lambda n: hardlink(n, "ok")])
def test_f01_names_that_lead_out(store: ImageStore, make: Callable[[str], Member]) -> None:
    for name in (
        "../../canary",
        "../canary",
        "a/../../../canary",
        "./../canary",
        "/../canary",
        "a//..//../canary",
        "..",
    ):
        refused(store, tar(member("ok"), make(name)), match="leads out")
    info, _ = make("short")
    for name, says in (("a\0b", "NUL"), ("/".join(["a" * 100] * 41), "longer than 4096"), ("x" * 256, "too long")):
        info.pax_headers = {"path": name}
        refused(store, tar(member("ok"), (info, b"")), match=says)


def test_f01_positive_control(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    naive(tmp_path / "root", tar(member("../canary", b"evil")))
    assert (tmp_path / "canary").read_text() == "evil"


def test_f01_odd_names_are_kept(store: ImageStore, tmp_path: Path) -> None:
    """Absolute ones are the image's own; what is legal stays, byte for byte."""
    names = [
        b"caf\xe9",
        b"\xff\xfe",
        b"new\nline",
        b"\x1b[31m",
        b"-rf",
        b"$(id)",
        b"...",
        b"..x",
        b" ",
        b"x" * 255,
        b"wh.",
    ]
    layer = tar(
        *[member(name, b"1") for name in names], member(f"{tmp_path}/canary", b"2"), member(".//dot//slash", b"3")
    )
    with opened(store, make_image(store, layer, tar(member(b"/caf\xe9", b"4")))) as root:
        assert set(os.listdir(os.fsencode(root))) == {*names, b"dot", os.fsencode(tmp_path.parts[1])}
        assert Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9")).read_text() == "4"
        assert Path(f"{root}{tmp_path}/canary").read_text() == "2"


# F-02


def test_f02_links_between_layers(store: ImageStore, tmp_path: Path) -> None:
    outside = str(tmp_path)
    ways = [
        "..",
        "../../../../../..",
        "/",
        outside,
        f"{outside}/canary",
        "/proc/self/root",
        f"../../../../../../{outside}",
    ]
    for to in ways:
        below = tar(symlink("l", to), folder("d"), symlink("d/m", to), folder("etc"))
        for above in (
            (member("l/canary", b"evil"),), (member("d/m/canary", b"evil"),), (member("l", b"evil"),),
            (folder("l"), member("l/canary", b"evil")), (hardlink("h", "l"), member("h/canary", b"evil")),
            (member("l/.wh.canary"), member("x")), (member("l/.wh..wh..opq"), member("x")),
            (hardlink("h", "l/canary"), member("h", b"evil")), (hardlink("h", f"{outside}/canary"),),
        ):  # fmt: skip
            try:
                with opened(store, make_image(store, below, tar(*above))) as root:
                    inodes = {os.lstat(root / name).st_ino for name in os.listdir(root)}
                    assert (tmp_path / "canary").stat().st_ino not in inodes
            except ImageInvalid:
                pass
    for data in (
        tar(hardlink("h", "../canary")),
        tar(hardlink("h", f"{outside}/canary")),
        tar(hardlink("h", "missing")),
    ):
        refused(store, data, match=r"leads out|missing")


def test_f02_positive_control(tmp_path: Path) -> None:
    """Layer by layer into one folder, by an unpacker that follows: both reach the host's file."""
    (tmp_path / "canary").write_text(CANARY)
    for name, above in (("one", tar(member("l/canary", b"evil"))), ("two", tar(hardlink("h", "l/canary")))):
        (tmp_path / name).mkdir()
        naive(tmp_path / name, tar(symlink("l", "..")))
        naive(tmp_path / name, above)
    assert (tmp_path / "canary").read_text() == "evil"
    assert (tmp_path / "two/h").samefile(tmp_path / "canary")


def test_f02_legal_links_unpack(store: ImageStore) -> None:
    """Hard links before their target (pnpm), to symlinks, to files of lower layers; folders behind symlinks."""
    image = make_image(
        store,
        tar(folder("usr/lib"), symlink("lib", "usr/lib"), member("usr/lib/a", b"a"), symlink("s", "usr/lib/a")),
        tar(hardlink("early", "store/late"), hardlink("s2", "s"), member("store/late", b"late"), hardlink("b", "lib/a"),
            member("lib/c", b"c")),
    )  # fmt: skip
    with opened(store, image) as root:
        assert (root / "early").samefile(root / "store/late")
        assert os.readlink(root / "s2") == "usr/lib/a"
        assert (root / "b").samefile(root / "usr/lib/a")
        assert (root / "usr/lib/c").read_text() == "c"
        assert os.readlink(root / "lib") == "usr/lib"


# F-05


def test_f05_devices_bits_and_attributes(store: ImageStore) -> None:
    capable, data = member("capable", b"x", mode=0o755)
    capable.pax_headers = {
        "SCHILY.xattr.security.capability": "\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        "SCHILY.xattr.trusted.overlay.redirect": "/etc",
        "SCHILY.xattr.user.overlay.redirect": "/etc",
        "SCHILY.xattr.user.overlay.metacopy": "",
    }
    opaque, _ = folder("d")
    opaque.pax_headers = {"SCHILY.xattr.trusted.overlay.opaque": "y", "SCHILY.xattr.user.overlay.opaque": "y"}
    layer = tar(
        member("sda", type=tarfile.BLKTYPE, devmajor=os.major(os.stat("/").st_dev), devminor=0),
        member("mem", type=tarfile.CHRTYPE, devmajor=1, devminor=1), member("whiteout", type=tarfile.CHRTYPE),
        member("fifo", type=tarfile.FIFOTYPE), member("suid", b"x", mode=0o6755), (capable, data), (opaque, b""),
    )  # fmt: skip
    with opened(store, make_image(store, layer)) as root:
        assert sorted(os.listdir(root)) == ["capable", "d", "suid"]
        for name in ("capable", "d", "suid"):
            assert os.listxattr(root / name) == []
            assert not (root / name).stat().st_mode & (stat.S_ISUID | stat.S_ISGID)


def test_f05_positive_control(tmp_path: Path) -> None:
    """Such bits and attributes are kept by what unpacks without care, as far as this user may."""
    made = tmp_path / "suid"
    made.touch()
    made.chmod(0o6755)
    assert made.stat().st_mode & stat.S_ISUID
    with suppress(OSError):  # not on every filesystem
        os.setxattr(made, "user.overlay.redirect", b"/etc")
        assert os.listxattr(made) == ["user.overlay.redirect"]


def test_f05_inside(target: Target, busybox: Path) -> None:
    """In a sandbox of such an image nobody becomes root by a program's bits, and there is no device of the host."""
    target.need("users")
    if "rootfs" not in target.can.images:
        pytest.skip("no rootfs images")
    store = ImageStore(Home(os.environ["SLOPLET_HOME"]))
    program = busybox.read_bytes()
    layer = tar(
        folder("bin"), member("bin/busybox", program, mode=0o755), symlink("bin/sh", "busybox"),
        symlink("bin/ls", "busybox"), symlink("bin/cat", "busybox"), symlink("bin/id", "busybox"),
        member("bin/busybox-suid", program, mode=0o6755), member("secret", b"root's", mode=0o600),
        member("sda", type=tarfile.BLKTYPE, devmajor=8), folder("tmp", 0o1777),
    )  # fmt: skip
    make_image(store, layer, name="f05:test", env=(("PATH", "/bin"),))
    try:
        with target.box(image="f05:test", user="1234:1234") as box:
            assert box.run("id -u").stdout == "1234\n"
            assert box.run("ls /sda").exit_code != 0
            tried = box.run("/bin/busybox-suid cat /secret; /bin/busybox-suid id -u; ls -l /bin/busybox-suid")
            assert "root's" not in tried.stdout
            assert tried.stdout.startswith("1234\n-rwxr-xr-x")
            assert box.run("cat /secret", user="0").stdout == "root's", "positive control: root can"
    finally:
        with suppress(ImageError):
            store.remove("f05:test")
        store.close()


# F-06


def repeated_member(data: bytes, times: int) -> bytes:
    """gzip: several members in a row are one stream, so a large bomb takes no time to make."""
    return gzip.compress(data, 9, mtime=0) * times


def header(name: str, size: int, **facts: object) -> bytes:
    info, _ = member(name, **facts)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def packed_image(store: ImageStore, packed: bytes, kind: str = "+gzip", diff: str = "sha256:" + "0" * 64) -> None:
    """Resolve an image whose one layer is ``packed``, already packed."""
    layer = media.Descriptor(media.OCI_LAYER + kind, store.blobs.add_bytes(packed), len(packed))
    raw = ImageConfig(architecture=media.host_platform().architecture, diff_ids=(diff,)).to_json()
    config = media.Descriptor(media.OCI_CONFIG, store.blobs.add_bytes(raw), len(raw))
    image = store.record(store.blobs.add_bytes(media.make_manifest(config, (layer,)).raw))
    store.resolve(image).close()


def test_f06_ten_gigabytes_of_zeros(store: ImageStore) -> None:
    zeros = 16 * 2**20
    bomb = gzip.compress(header("zeros", 640 * zeros), 9) + repeated_member(bytes(zeros), 640)
    assert len(bomb) < 11 * 2**20
    last = zlib.decompressobj(31).decompress(bomb[-len(gzip.compress(bytes(zeros), 9, mtime=0)) :])
    assert len(last) == zeros, "positive control: it is one, of 640 such parts"
    before = shutil.disk_usage(store.home.path.parent).free
    with pytest.raises(ImageInvalid, match="200 times its size, the limit"):
        packed_image(store, bomb)
    assert before - shutil.disk_usage(store.home.path.parent).free < 512 * 2**20, "what was unpacked is gone"


def test_f06_bombs_in_bombs(store: ImageStore) -> None:
    """Packed twice is no tar; a window that would take memory is refused; so is what layers are never packed with."""
    inner = tar(member("f", bytes(10_000_000)))
    for packed, kind, says in (
        (zstandard.compress(zstandard.compress(inner)), "+zstd", "the tar is"),
        (gzip.compress(gzip.compress(inner)), "+gzip", "the tar is"),
        (zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=29)).compress(
            inner * 2), "+zstd", "damaged|not what|memory"),
        (__import__("lzma").compress(inner), "+gzip", "packed with xz"),
        (__import__("bz2").compress(inner), "", "packed with bzip2"),
    ):  # fmt: skip
        with pytest.raises(ImageInvalid, match=says):
            packed_image(store, packed, kind)


def test_f06_lies_about_size(store: ImageStore) -> None:
    info, _ = member("f")
    for value, says in (("9223372036854775807", "the limit is"), ("9" * 30, "size="), ("-1", "size=")):
        info.pax_headers = {"size": value}
        refused(store, tar((info, b"")), match=says)
    info.pax_headers = {"GNU.sparse.size": str(2**61), "GNU.sparse.map": "0,0", "GNU.sparse.numblocks": "1"}
    refused(store, tar((info, b"")), match="the limit is")
    cut = zipped(tar(member("f", random.Random(1).randbytes(500_000))))
    for end in (len(cut) // 2, len(cut) - 4, 20):
        with pytest.raises(ImageInvalid, match=r"cut short|end is missing"):
            packed_image(store, cut[:end])


def test_f06_too_many(tmp_path: Path) -> None:
    """Entries, marks, the same name again and again, links, folders that are only implied: all are counted."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for entry in (
            header("same", 0), header(".wh.x", 0), header("h", 0, type=tarfile.LNKTYPE, linkname="none"),
            header("d/" * 5, 0, type=tarfile.DIRTYPE), header("dev", 0, type=tarfile.CHRTYPE),
        ):  # fmt: skip
            data = entry * 2001 + bytes(1024)
            with pytest.raises(ImageInvalid, match="more than 2000 entries, the limit"):
                unpack_layer(io.BytesIO(data), fd, digest(data), Owners(False), UnpackLimits(entries=2000))
        implied = b"".join(header(f"{number}/" + "a/" * 40 + "f", 0) for number in range(60)) + bytes(1024)
        with pytest.raises(ImageInvalid, match="more than 2000 entries, the limit"):
            unpack_layer(io.BytesIO(implied), fd, digest(implied), Owners(False), UnpackLimits(entries=2000))
    finally:
        os.close(fd)
    assert UnpackLimits().entries == 1_000_000


def test_f06_too_many_layers(store: ImageStore) -> None:
    layer = media.Descriptor(media.OCI_LAYER, store.blobs.add_bytes(tar(member("f"))), 10240)
    raw = ImageConfig(diff_ids=()).to_json()
    config = media.Descriptor(media.OCI_CONFIG, store.blobs.add_bytes(raw), len(raw))
    for count, says in ((1025, "at most 1024"), (100_000, "at most")):
        made = media.make_manifest(config, (layer,) * count).raw
        found = store.blobs.add_bytes(made)
        with pytest.raises(ImageInvalid, match=says):
            store.record(found)
    assert store.list() == []


# F-07


def test_f07_documents_that_lie(store: ImageStore) -> None:
    """Typed errors, and what is asked for next works: nothing was poisoned."""
    good = tar(member("f", b"good"))
    layer = {"mediaType": media.OCI_LAYER, "digest": store.blobs.add_bytes(good), "size": len(good)}
    diff = digest(good)

    def attempt(config: bytes | None = None, **manifest: object) -> None:
        raw = ImageConfig(architecture=media.host_platform().architecture, diff_ids=(diff,)).to_json()
        raw = raw if config is None else config
        described = {"mediaType": media.OCI_CONFIG, "digest": store.blobs.add_bytes(raw), "size": len(raw)}
        document = {"schemaVersion": 2, "config": described, "layers": [layer], **manifest}
        image = store.record(store.blobs.add_bytes(json.dumps(document).encode()), reference=parse("f07"))
        store.resolve(image).close()

    def config(**changes: object) -> bytes:
        whole = {"architecture": media.host_platform().architecture, "os": "linux",
                 "rootfs": {"type": "layers", "diff_ids": [diff]}, **changes}  # fmt: skip
        return json.dumps(whole).encode()

    cases: list[tuple[type[ImageError], Callable[[], None]]] = [
        (ImageInvalid, lambda: attempt(layers=[])),
        (ImageInvalid, lambda: attempt(b"")),
        (ImageInvalid, lambda: attempt(b"{}")),
        (ImageInvalid, lambda: attempt(b"[" * 100_000)),
        (ImageInvalid, lambda: attempt(b" " * 100_000_000)),
        (ImageInvalid, lambda: attempt(config(config={"Env": ["A=b\0c"]}))),
        (ImageInvalid, lambda: attempt(config(config={"Env": ["=nameless"]}))),
        (ImageInvalid, lambda: attempt(config(rootfs={"diff_ids": ["sha256:" + "1" * 64]}))),
        (ImageInvalid, lambda: attempt(config(rootfs={"diff_ids": ["../../x"]}))),
        (ImagePlatform, lambda: attempt(config(architecture="s390x"))),
        (ImageInvalid, lambda: attempt(layers=[{**layer, "size": 1}])),
        (ImageInvalid, lambda: attempt(layers=[{**layer, "mediaType": "text/plain"}])),
        (ImageNotFound, lambda: attempt(layers=[{**layer, "digest": "sha256:" + "2" * 64}])),
        (ImageInvalid, lambda: attempt(mediaType=media.OCI_INDEX, manifests=[])),
    ]
    for error, case in cases:
        with pytest.raises(error):
            case()
    attempt()
    with opened(store, store.find("f07")) as root:
        assert tree(root) == {"f": "good"}


def test_f07_a_blob_that_changed_on_disk(store: ImageStore) -> None:
    """The layer's content is checked as it is unpacked, whatever its name on disk says."""
    image = make_image(store, tar(member("f", b"good" * 1000)), name="changed", pack=zipped)
    path = store.blobs.path_of(image.layers[0].digest)
    path.write_bytes(zipped(tar(member("f", b"evil" * 1000))))
    with pytest.raises(ImageInvalid, match="not what the image says"):
        store.resolve(image)
    path.write_bytes(zipped(tar(member("f", b"good" * 1000))))
    with opened(store, image) as root:
        assert (root / "f").read_bytes() == b"good" * 1000


# F-08


def bring(path: Path, layers: list[bytes], ready: int) -> None:
    """Bring an image in pieces, as a download does, and unpack it."""
    store = ImageStore(Home(path))
    os.write(ready, b".")
    with store.adding():
        found = []
        for layer in layers:
            packed = zipped(layer)
            with store.blobs.writer(digest(packed), len(packed)) as writer:
                while writer.offset < len(packed):
                    writer.write(packed[writer.offset : writer.offset + 5000])
                    time.sleep(0)
                writer.commit()
            found.append(media.Descriptor(media.OCI_LAYER + "+gzip", digest(packed), len(packed)))
        raw = ImageConfig(
            architecture=media.host_platform().architecture, diff_ids=tuple(digest(layer) for layer in layers)
        ).to_json()
        config = media.Descriptor(media.OCI_CONFIG, store.blobs.add_bytes(raw), len(raw))
        manifest = store.blobs.add_bytes(media.make_manifest(config, tuple(found)).raw)
        image = store.record(manifest, reference=parse("f08"))
    store.resolve(image).close()
    store.close()


def test_f08_two_at_once_and_one_is_killed(store: ImageStore) -> None:
    """Whenever one of two that bring the same image is killed, the other has one valid image."""
    chance = random.Random(8)
    layers = [tar(*[member(f"f{part}-{number}", chance.randbytes(3000)) for number in range(40)]) for part in range(3)]
    for turn in range(8):
        read, write = os.pipe()
        pids = []
        for _ in range(2):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    bring(store.home.path, layers, write)
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        os.read(read, 1)
        os.read(read, 1)
        time.sleep(turn * 0.02)
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids[0], 0)
        _, status = os.waitpid(pids[1], 0)
        os.close(read)
        os.close(write)
        assert status == 0, f"the one that was not killed failed, turn {turn}"
        image = store.find("f08")
        with opened(store, image) as root:
            assert len(os.listdir(root)) == 120
        records = Store(store.home)
        reap(store.home, records, registry.reap, thorough=True)
        records.close()
        names = left(store.home)
        assert not [name for name in names if ".tmp" in name or "partial/" in name], names
        assert len(os.listdir(store.home.images / "layers")) == 3
        store.remove("f08")
        assert left(store.home) == set()
