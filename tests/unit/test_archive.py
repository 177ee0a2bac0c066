"""Archives: what is written comes back byte for byte, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from archive_helpers import Crafted, export, receive
from snapshot_helpers import FILES, World

from sloplet import Network, Secret, errors
from sloplet.archive import hostprint, images, layout, moving, rootfs, tarwrite
from sloplet.archive import read as reading
from sloplet.archive import write as writing
from sloplet.archive.read import Archive
from sloplet.archive.work import Work
from sloplet.archive.write import Target
from sloplet.engines.base import ResolvedImage
from sloplet.images.resolve import resolve
from sloplet.images.tarstream import TarReader
from sloplet.images.unpack import unpack
from sloplet.network.presets import policy_of
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone

BIG = {"pages.img": os.urandom(300_000) + bytes(3 << 20) + b"end" + bytes(70_000), "checkpoint.img": b"", "o-x": b"1"}


@pytest.fixture
def other(tmp_path: Path) -> Iterator[World]:
    """The machine that it comes to. Nothing may be left there but images."""
    made = World(tmp_path / "other")
    made.home.open()
    yield made
    assert made.left() == {"snapshots": [], "run": []}
    assert not [name for name in os.listdir(made.home.images) if name.startswith(".")]
    made.close()


@pytest.fixture
def whole(world: World, tmp_path: Path) -> Path:
    path = tmp_path / "dev.sloplet"
    export(world, path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root filesystem with one of each kind."""
    made = tmp_path / "root"
    (made / "bin").mkdir(parents=True)
    (made / "bin/sh").write_bytes(b"#!" * 100_000)
    (made / "bin/sh").chmod(0o755)
    os.link(made / "bin/sh", made / "bin/ash")
    (made / "sh").symlink_to("bin/sh")
    (made / "empty").write_bytes(b"")
    (made / ("n" * 120)).mkdir()
    (made / ("n" * 120) / ("m" * 200)).write_bytes(b"deep")
    (made / ("n" * 120) / "long-link").symlink_to("x" * 150)
    Path(os.fsdecode(os.fsencode(made) + b"/caf\xe9\n")).write_bytes(b"a name of bytes")
    (made / "closed").mkdir(0o700)
    for number, path in enumerate(sorted(made.rglob("*"))):
        os.utime(path, ns=(0, 1_700_000_000_000_000_001 + number * 1_000_000_007), follow_symlinks=False)
    os.utime(made, ns=(0, 1_600_000_000_123_456_789))
    return made


def facts(root: Path) -> dict[str, Any]:
    found = {}
    for path in [root, *root.rglob("*")]:
        info = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[os.fsencode(path.relative_to(root))] = (info.st_mode, info.st_mtime_ns, content)
    return found


# -- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [FILES, BIG], ids=["small", "big"])
def test_there_and_back(world: World, other: World, tmp_path: Path, files: dict[str, bytes]) -> None:
    path = tmp_path / "dev.sloplet"
    steps: list[tuple[int, int]] = []
    made = export(world, path, files=files, extra={"more": [1]}, settings={"memory": "64m", "env": {"A": "é"}})
    assert path.stat().st_mode & 0o7777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["dev.sloplet", "home", "other"]
    with Archive(str(path)) as archive:
        assert archive.manifest.spec == SandboxSpec.make("dev", memory="64m", env={"A": "é"})
        assert archive.manifest.format.to_dict() == made["format"]
        assert archive.manifest.extra == {"more": [1]}
    assert receive(other, path, Work("import", lambda *now: steps.append(now)))[0] == files
    total = sum(map(len, files.values()))
    assert steps[-1] == (total, total)


def test_other_programs_can_read_it(whole: Path) -> None:
    """It is zstd around a tar."""
    with zstandard.open(whole, "rb") as stream:  # reads one frame: the skippable mark is skipped
        data = zstandard.ZstdDecompressor().stream_reader(whole.read_bytes(), read_across_frames=True).read()
        assert stream is not None
    (whole.parent / "x.tar").write_bytes(data)
    with tarfile.open(whole.parent / "x.tar") as tar:
        assert tar.getnames() == ["manifest.json", *sorted(f"state/{name}" for name in FILES)]
        member = tar.extractfile("state/pages.img")
        assert member is not None
        assert member.read() == FILES["pages.img"]
    seen = subprocess.run(["tar", "-tf", whole.parent / "x.tar"], capture_output=True, text=True, check=True).stdout
    assert "state/pages.img" in seen


def test_zeros_become_holes(world: World, other: World, tmp_path: Path) -> None:
    files = {"pages.img": b"x" * 65536 + bytes(16 << 20) + b"y"}
    export(world, tmp_path / "a", files=files)
    assert (tmp_path / "a").stat().st_size < 100_000
    with Archive(str(tmp_path / "a")) as archive, other.snapshots.begin() as draft:
        with reading.Incoming(other.home, archive.manifest) as incoming:
            archive.receive(draft, incoming, Work("import"))
        assert (draft.path / "pages.img").read_bytes() == files["pages.img"]
        assert (draft.path / "pages.img").stat().st_blocks * 512 < 1 << 20


# -- the image ---------------------------------------------------------------------------------


def test_a_root_becomes_a_tar_and_comes_back(root: Path, tmp_path: Path) -> None:
    data = b"".join(rootfs.tar(root, owners=False))
    assert (len(data), hashlib.sha256(data).hexdigest()) == rootfs.measure(root, owners=False)
    target = tmp_path / "target"
    target.mkdir()
    fd = os.open(target, os.O_RDONLY)
    try:
        (tmp_path / "x.tar").write_bytes(data)
        with open(tmp_path / "x.tar", "rb") as file:
            unpack(file, fd)
    finally:
        os.close(fd)
    assert facts(target) == facts(root)
    assert os.path.samefile(target / "bin/sh", target / "bin/ash")
    assert rootfs.measure(target, owners=False) == rootfs.measure(root, owners=False)
    with tarfile.open(tmp_path / "x.tar", encoding="utf-8", errors="surrogateescape") as tar:
        assert len(tar.getnames()) == len(facts(root))
        assert tar.getmember("bin/sh").islnk() != tar.getmember("bin/ash").islnk()


def test_what_an_image_is_told_by(root: Path) -> None:
    before = rootfs.measure(root, owners=False)
    os.utime(root / "empty", ns=(0, 1_700_000_000_000_000_002))
    assert rootfs.measure(root, owners=False) != before


@pytest.mark.parametrize("name", ["device", "setuid"])
def test_what_an_image_loses(root: Path, name: str) -> None:
    before = rootfs.measure(root, owners=False)
    times = root.stat()
    if name == "device":
        os.mkfifo(root / "fifo")
    else:
        (root / "bin/sh").chmod(0o4755)
    os.utime(root, ns=(0, times.st_mtime_ns))
    assert rootfs.measure(root, owners=False) == before


def test_an_image_that_changes_meanwhile(world: World, root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    whole = rootfs.tar

    def tar(path: Path, *, owners: bool) -> Iterator[bytes]:
        yield from whole(path, owners=owners)
        (root / "bin/sh").write_bytes(b"other")

    monkeypatch.setattr(rootfs, "tar", tar)
    with pytest.raises(errors.ImageError, match="changed"):
        export(world, tmp_path / "a", image=ResolvedImage("rootfs", root))
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial") or name == "a"]


def test_a_folder_image_comes_along_once(world: World, other: World, root: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        export(
            world, tmp_path / name, name=name, image=ResolvedImage("rootfs", root), settings={"image": f"dir:{root}"}
        )
    files, image = receive(other, tmp_path / "a")
    assert files == FILES
    assert image.path is not None
    assert image.path.parent.parent == other.home.images
    assert facts(image.path) == facts(root)
    again = receive(other, tmp_path / "b")[1]
    assert again == image
    assert len(os.listdir(other.home.images)) == 1


def test_the_image_of_a_tar_is_shared(world: World, other: World, root: Path, tmp_path: Path) -> None:
    """A machine that has unpacked the same tar uses its own; one that has not gets what the archive brings, under the
    digest of that: an archive may claim any."""
    subprocess.run(["tar", "-C", root, "-cf", tmp_path / "image.tar", "."], check=True)
    image = resolve(str(tmp_path / "image.tar"), world.home)
    assert image.path is not None
    export(world, tmp_path / "a", image=image, settings={"image": str(tmp_path / "image.tar")})
    (tmp_path / "away").mkdir()
    brought = receive(World(tmp_path / "third"), tmp_path / "a")[1]
    assert brought.path is not None
    assert brought.path.parent.name not in ("", image.path.parent.name)
    assert facts(brought.path) == facts(image.path)
    own = resolve(str(tmp_path / "image.tar"), other.home)
    assert receive(other, tmp_path / "a")[1] == own


@pytest.mark.parametrize("packed", ["folder", "tar"])
def test_without_the_image(world: World, other: World, root: Path, tmp_path: Path, packed: str) -> None:
    reference = f"dir:{root}"
    if packed == "tar":
        subprocess.run(["tar", "-C", root, "-cf", tmp_path / "image.tar", "."], check=True)
        reference = str(tmp_path / "image.tar")
    image = resolve(reference, world.home)
    export(world, tmp_path / "a", image=image, include=False, settings={"image": reference})
    assert (tmp_path / "a").stat().st_size < 10_000
    found = receive(other, tmp_path / "a")[1]
    assert found == resolve(reference, other.home)
    (root / "bin/sh").write_bytes(b"another one")
    if packed == "tar":
        subprocess.run(["tar", "-C", root, "-cf", tmp_path / "image.tar", "."], check=True)
        receive(other, tmp_path / "a")  # it was unpacked, and is here still
        subprocess.run(["rm", "-rf", found.path.parent if found.path else ""], check=True)
    with pytest.raises(errors.ImageNotFound, match="another one here"):
        receive(other, tmp_path / "a")
    os.rename(root, tmp_path / "gone")
    (tmp_path / "image.tar").unlink(missing_ok=True)
    with pytest.raises(errors.ImageNotFound, match="is not here"):
        receive(other, tmp_path / "a")


def test_no_registry_is_asked_for_an_image_that_an_archive_names(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as registry:
        registry.setblocking(False)
        facts = layout.ImageFacts("rootfs", f"127.0.0.1:{registry.getsockname()[1]}/team/app:v1", content="0" * 64)
        with pytest.raises(errors.ImageNotFound, match="which is not here"):
            images._by_reference(Home(tmp_path / "home"), facts)
        with pytest.raises(BlockingIOError):
            registry.accept()


def test_another_machines_own_programs(
    world: World, other: World, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(world, tmp_path / "disk", kind="disk", name="second")
    receive(other, whole)
    monkeypatch.setattr(hostprint, "_FILES", ("/dev/null",))
    with pytest.raises(errors.SnapshotIncompatible, match="another machine's own programs"):
        receive(other, whole)
    assert receive(other, tmp_path / "disk")[0] == FILES


# -- where it goes ---------------------------------------------------------------------------------


def test_a_file_that_is_there_is_kept(world: World, tmp_path: Path) -> None:
    for make in (lambda p: p.write_bytes(b"mine"), lambda p: p.mkdir(), lambda p: p.symlink_to("nowhere")):
        path = tmp_path / f"t{len(os.listdir(tmp_path))}"
        make(path)
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(errors.FileExists):
            Target(str(path), world.home)
        assert sorted(os.listdir(tmp_path)) == before


def test_a_file_that_comes_meanwhile_is_kept(world: World, tmp_path: Path) -> None:
    with Target(str(tmp_path / "a"), world.home) as target:
        os.write(target.fd, b"archive")
        (tmp_path / "a").write_bytes(b"mine")
        with pytest.raises(errors.FileExists):
            target.publish()
    assert (tmp_path / "a").read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("relative", errors.SpecError), ("/", errors.SpecError), ("/tmp/x/..", errors.SpecError),
        ("/tmp/a\0b", errors.SpecError), ("{home}/snapshots/a", errors.SpecError),
        ("{home}/images/../run/a", errors.SpecError), ("{tmp}/nowhere/a", errors.SaveFailed),
        ("{tmp}/" + "x" * 300, errors.SaveFailed), ("{tmp}/file/a", errors.SaveFailed), ("/proc/a", errors.SaveFailed),
    ],
)  # fmt: skip
def test_where_it_cannot_go(world: World, tmp_path: Path, path: str, error: type[Exception]) -> None:
    world.home.open()
    (tmp_path / "file").touch()
    with pytest.raises(error):
        Target(path.format(home=world.home.path, tmp=tmp_path), world.home)
    assert sorted(os.listdir(tmp_path)) == ["file", "home"]


def test_a_long_name(world: World, tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    export(world, path)
    assert set(os.listdir(tmp_path)) == {"home", path.name}


def test_a_full_disk(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [200_000]

    def write_all(fd: int, data: bytes) -> None:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing, "write_all", write_all)
    with pytest.raises(errors.SaveFailed, match=r"No space left.*free some space"):
        export(world, tmp_path / "a", files=BIG)
    assert os.listdir(tmp_path) == ["home"]


def test_a_full_disk_where_it_comes_to(
    world: World, other: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(world, tmp_path / "a", files=BIG)

    def write_all(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(reading, "write_all", write_all)
        with pytest.raises(errors.StateUnwritable, match="space"):
            receive(other, tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(reading, "_RESERVE", 2**62)
        with pytest.raises(errors.StateUnwritable, match="room for"):
            receive(other, tmp_path / "a")
    assert receive(other, tmp_path / "a")[0] == BIG


def test_given_up(world: World, other: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(world, tmp_path / "a", files=BIG)
    work = Work("import", lambda done, total: work.give_up())
    with pytest.raises(errors.SnapshotError, match="given up"):
        receive(other, tmp_path / "a", work)
    gone = Work("export")
    gone.give_up()
    monkeypatch.setattr("archive_helpers.Work", lambda what: gone)
    with pytest.raises(errors.SnapshotError, match="given up"):
        export(world, tmp_path / "b", files=BIG, name="second")
    assert "b" not in os.listdir(tmp_path)


def test_a_state_that_is_damaged_is_not_exported(world: World, tmp_path: Path, monkeypatch: Any) -> None:
    pieces = writing._pieces
    monkeypatch.setattr(writing, "_pieces", lambda *a: (piece.replace(b"memory", b"Memory") for piece in pieces(*a)))
    with pytest.raises(errors.SnapshotDamaged, match=r"pages\.img"):
        export(world, tmp_path / "a")
    assert os.listdir(tmp_path) == ["home"]


# -- refusals by what it says of itself ------------------------------------------------------------


def craft(whole: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    made = Crafted().like(whole)
    change(made.manifest)
    return made.write(whole.parent / "crafted")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda m: m["format"].update(version="runsc release-2"), "another version"),
        (lambda m: m["format"].update(arch="riscv64"), "another arch"),
        (lambda m: m["format"].update(platform="kvm"), "another platform"),
        (lambda m: m["format"].update(cpu=["avx2", "amx", "sse2"]), "lacks amx"),
        (lambda m: m.update(engine="warp"), "'warp'"),
        (lambda m: m.update(version=2), "layout 2"),
        (lambda m: m.update(state_version=9), "layout 1, 9"),
    ],
)
def test_made_elsewhere(whole: Path, monkeypatch: Any, change: Callable[[dict[str, Any]], object], word: str) -> None:
    """Refused from the manifest: nothing else is read."""
    from snapshot_helpers import FORMAT

    from sloplet.engines import registry
    from sloplet.engines.base import Capabilities, Probe

    class Engine:
        name = rung = "gvisor"

        def probe(self) -> Probe:
            return Probe("gvisor", "gvisor", True, capabilities=Capabilities(live_snapshots=True))

        def state_format(self) -> Any:
            return FORMAT

    monkeypatch.setitem(registry._loaded, "gvisor", Engine())

    def choose(path: Path) -> object:
        with Archive(str(path)) as archive:
            return moving._engine(archive.manifest, archive.manifest.spec)

    assert choose(craft(whole, lambda m: None))
    with pytest.raises(errors.SnapshotIncompatible, match=word):
        choose(craft(whole, change))


def test_another_version(whole: Path) -> None:
    crafted = Crafted().like(whole)
    for version in (0, 2, 10, 99):
        crafted.version = version
        with pytest.raises(errors.SnapshotIncompatible, match="version"):
            Archive(str(crafted.write(whole.parent / "crafted")))


def test_a_sandbox_from_elsewhere_reaches_nothing() -> None:
    """Its author's rules are not this user's; what was denied and what has limits stays so."""
    spec = SandboxSpec.make(
        "dev", network=Network(["*:*", "10.0.0.0/8"], ["x.org"], ask=True, inspect=True, budget="1g"),
        secrets={"A": Secret("a", hosts=["x.org"])}, ports={80: 8080}, links={"db": "mine"},
    )  # fmt: skip
    assert layout.checked_spec(spec.to_dict()) == spec
    here = moving.arrived(spec, "new")
    assert here == SandboxSpec.make(
        "new", network=Network([], ["x.org"], inspect=True, budget="1g"),
        secrets={"A": Secret("a", hosts=["x.org"])}, ports=[80]
    )  # fmt: skip
    assert policy_of(here.network).judge("y.org", 443).allow is False
    assert moving.arrived(SandboxSpec.make(network=Network(learn=True)), None).network == Network().spec
    assert moving.arrived(SandboxSpec.make("a"), "b") == SandboxSpec.make("b")


def test_a_spec_goes_through_the_same_checks() -> None:
    spec = SandboxSpec.make("dev", memory="64m", ttl=5, env={"A": "b"}, at_least="process", undo=3, idle=9)
    assert layout.checked_spec(spec.to_dict()) == spec
    plain = SandboxSpec.make()
    assert layout.checked_spec(plain.to_dict()) == plain


@pytest.mark.parametrize("size", [0, 1, 511, 512, 2**33 - 1, 2**33, 2**40])
@pytest.mark.parametrize("mtime_ns", [0, 1, -1, 1_700_000_000_123_456_789, 2**60, -(10**18)])
def test_headers(size: int, mtime_ns: int) -> None:
    class Source:
        def __init__(self, data: bytes) -> None:
            self.data = data

        def read(self, size: int, /) -> bytes:
            data, self.data = self.data[:size], self.data[size:]
            return data

    name, link = b"n" * (size % 300 + 1), b"l" * (size % 250)
    made = tarwrite.header(name, size=size, mtime_ns=mtime_ns, uid=2**31, gid=5, link=link, mode=0o750)
    entry = next(iter(TarReader(Source(made))))
    assert (entry.name, entry.size, entry.mtime_ns, entry.uid, entry.gid, entry.link, entry.mode) == (
        name, size, mtime_ns, 2**31, 5, link, 0o750,
    )  # fmt: skip


def test_home_is_not_needed(tmp_path: Path) -> None:
    """A target in a home that does not exist yet."""
    with Target(str(tmp_path / "a"), Home(tmp_path / "never")):
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []
