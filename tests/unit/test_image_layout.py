"""Images from files and to files: what comes in is checked, what goes out comes in again as the same image."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rude_registry import Made, digest, layer_tar, make_image
from sloplet.errors import FileError, FileExists, FileMissing, ImageInvalid, ImagePlatform, SlopletError, SpecError
from sloplet.images import layout
from sloplet.images.export import export_image, write_archive
from sloplet.images.layout import FULL_NAME, REF_NAME, import_image
from sloplet.images.media import OCI_INDEX, OCI_MANIFEST
from sloplet.images.progress import ImageProgress
from sloplet.images.reference import parse
from sloplet.images.store import ImageStore
from sloplet.images.tarstream import TarReader
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone

Members = dict[str, bytes]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    made = ImageStore(Home(tmp_path / "home"))
    yield made
    made.close()


def tar(members: Members, links: dict[str, str] | None = None) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return made.getvalue()


def entry(data: bytes, name: str | None = None, **more: Any) -> dict[str, Any]:
    found = {"mediaType": OCI_MANIFEST, "digest": digest(data), "size": len(data), **more}
    return {**found, "annotations": {"org.opencontainers.image.ref.name": name}} if name else found


def oci(*images: Made, entries: list[dict[str, Any]] | None = None) -> Members:
    """The files of an OCI layout."""
    listed = [entry(image.manifest) for image in images] if entries is None else entries
    members = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
    members["index.json"] = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": listed}).encode()
    for image in images:
        for data in (image.manifest, *image.blobs.values()):
            members[f"blobs/sha256/{digest(data)[7:]}"] = data
    return members


def docker(image: Made, tags: list[str] | None, **more: Any) -> Members:
    """What docker save wrote until version 24."""
    members = {f"{image.config[7:]}.json": image.blobs[image.config]}
    names = []
    for number, name in enumerate(image.layers):
        members[f"layer{number}/layer.tar"] = gzip.decompress(image.blobs[name])
        names.append(f"layer{number}/layer.tar")
    facts = {"Config": f"{image.config[7:]}.json", "RepoTags": tags, "Layers": names, **more}
    return {**members, "manifest.json": json.dumps([facts]).encode(), "repositories": b"{}"}


def written(folder: Path, members: Members, name: str = "image.tar") -> Path:
    path = folder / name
    path.write_bytes(tar(members))
    return path


def unpacked(folder: Path, members: Members) -> Path:
    for name, data in members.items():
        path = folder / "layout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder / "layout"


TWO = (layer_tar({"bin/sh": b"first" * 99}), layer_tar({"etc/y": b"second" * 99}))


@pytest.mark.parametrize("form", ["folder", "tar", "tar.gz", "tar.zst", "backwards"])
def test_an_oci_layout(form: str, store: ImageStore, tmp_path: Path) -> None:
    made = make_image(*TWO)
    members = oci(made, entries=[entry(made.manifest, "registry.test/team/app:v1")])
    if form == "folder":
        path = unpacked(tmp_path, members)
    else:
        data = tar(dict(reversed(members.items())) if form == "backwards" else members)
        packers: dict[str, Callable[[bytes], bytes]] = {"tar.gz": gzip.compress, "tar.zst": zstandard.compress}
        path = tmp_path / "image"
        path.write_bytes(packers.get(form, bytes)(data))
    seen: list[ImageProgress] = []
    image = import_image(path, store, progress=seen.append)
    assert (image.id, image.manifest) == (made.config, made.digest)
    assert image.references == ("registry.test/team/app:v1",)
    assert set(store.blobs.digests()) == {made.digest, *made.blobs}
    assert seen[-1].stage == "done"
    assert os.listdir(store.home.cache) == []
    assert import_image(path, store, parse("mine:2")).references == (
        "docker.io/library/mine:2",
        "registry.test/team/app:v1",
    )


@pytest.mark.parametrize("form", ["plain", "links", "gzip"])
def test_what_docker_save_writes(form: str, store: ImageStore, tmp_path: Path) -> None:
    made = make_image(*TWO)
    members = docker(made, ["app:latest"])
    links = {}
    if form == "links":  # as skopeo and older versions write it
        members["aa/real.tar"] = members.pop("layer0/layer.tar")
        links = {"layer0/layer.tar": "../aa/real.tar"}
    if form == "gzip":
        members["layer1/layer.tar"] = gzip.compress(members["layer1/layer.tar"])
    path = tmp_path / "saved.tar"
    path.write_bytes(tar(members, links))
    image = import_image(path, store)
    assert image.id == made.config
    assert image.references == ("docker.io/library/app:latest",)
    assert [layer.packing for layer in image.layers] == ["tar", "gzip" if form == "gzip" else "tar"]


def test_a_layer_that_docker_names_often_is_read_once(store: ImageStore, tmp_path: Path) -> None:
    made = make_image(*[TWO[0]] * 50)
    seen: list[ImageProgress] = []
    image = import_image(
        written(tmp_path, docker(made, None, Layers=["layer0/layer.tar"] * 50)), store, progress=seen.append
    )
    assert len(image.layers) == 50
    assert len({layer.digest for layer in image.layers}) == 1
    assert len([step for step in seen if step.stage == "download"]) == 1


def test_an_archive_of_both_kinds_is_taken_as_oci(store: ImageStore, tmp_path: Path) -> None:
    made = make_image(*TWO)
    path = written(tmp_path, {**docker(make_image(), ["other:1"]), **oci(made)})
    image = import_image(path, store)
    assert image.manifest == made.digest
    assert image.references == ()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "tar": bytes, "gzip": gzip.compress, "zstd": zstandard.compress, "xz": lzma.compress, "bzip2": bz2.compress,
}  # fmt: skip


@pytest.mark.parametrize("packing", PACKERS)
def test_a_tar_of_a_root_filesystem(packing: str, store: ImageStore, tmp_path: Path) -> None:
    data = tar({"./bin/sh": b"x" * 5000, "./etc/passwd": b"root:x:0:0::/:/bin/sh\n"})
    path = tmp_path / "rootfs"
    path.write_bytes(PACKERS[packing](data))
    image = import_image(path, store, parse("mine:1"))
    assert image.config.diff_ids == (digest(data),)
    assert [layer.packing for layer in image.layers] == [packing if packing in ("tar", "gzip", "zstd") else "gzip"]
    if packing in ("tar", "gzip", "zstd"):
        assert image.layers[0].digest == digest(path.read_bytes())  # kept as it is
    assert import_image(path, store, parse("mine:2")).id == image.id


def test_a_folder_of_a_root_filesystem(store: ImageStore, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "sh").write_text("x")
    (root / "bin" / "bash").symlink_to("/bin/sh")
    image = import_image(root, store, parse("mine"))
    assert import_image(root, store).id == image.id  # the same files, the same image
    with store.blobs.open(image.layers[0].digest) as file, tarfile.open(fileobj=gzip.GzipFile(fileobj=file)) as archive:
        assert set(archive.getnames()) == {".", "bin", "bin/sh", "bin/bash"}
    (root / "bin" / "sh").write_text("y")
    assert import_image(root, store).id != image.id


def test_one_of_several(store: ImageStore, tmp_path: Path) -> None:
    one, two = make_image(TWO[0]), make_image(TWO[1])
    path = written(tmp_path, oci(one, two, entries=[entry(one.manifest, "one"), entry(two.manifest, "two")]))
    with pytest.raises(SpecError, match="several images in it: one, two"):
        import_image(path, store)
    with pytest.raises(ImageInvalid, match="no image 'three' in it, but one, two"):
        import_image(path, store, pick="three")
    assert import_image(path, store, pick="two").id == two.config
    saved = docker(one, ["a:1"])
    both = json.loads(saved["manifest.json"]) + json.loads(docker(one, ["b:1"])["manifest.json"])
    path = written(tmp_path, {**saved, "manifest.json": json.dumps(both).encode()})
    with pytest.raises(SpecError, match="a:1, b:1"):
        import_image(path, store)
    assert "docker.io/library/b:1" in import_image(path, store, pick="b:1").references


def test_one_image_of_several_names(store: ImageStore, tmp_path: Path) -> None:
    """As docker save writes it for ``app:1 app:latest``."""
    names = [{FULL_NAME: f"docker.io/library/app:{tag}", REF_NAME: tag} for tag in ("1", "latest")]
    path = written(tmp_path, oci(MADE, entries=[entry(MADE.manifest, annotations=each) for each in names]))
    assert import_image(path, store).references == ("docker.io/library/app:1",)
    image = import_image(path, store, pick="latest")
    assert set(image.references) == {"docker.io/library/app:1", "docker.io/library/app:latest"}


def test_the_image_for_this_machine(store: ImageStore, tmp_path: Path) -> None:
    mine, other = make_image(TWO[0]), make_image(TWO[1], config={"architecture": "s390x"})
    foreign = {"os": "linux", "architecture": "s390x"}
    own = {"os": "linux", "architecture": json.loads(mine.blobs[mine.config])["architecture"]}
    listed = [entry(other.manifest, platform=foreign), entry(mine.manifest, platform=own)]
    path = written(tmp_path, oci(mine, other, entries=listed))
    assert import_image(path, store).id == mine.config
    assert import_image(path, store, platform="linux/s390x").id == other.config
    with pytest.raises(ImagePlatform, match="s390x"):
        import_image(written(tmp_path, oci(other)), store)


def _without(members: Members, end: str) -> Members:
    return {name: data for name, data in members.items() if not name.endswith(end)}


def _changed(members: Members, end: str, data: bytes) -> Members:
    return {name: data if name.endswith(end) else kept for name, kept in members.items()}


MADE = make_image(*TWO)
LAYER, CONFIG = MADE.layers[0][7:], MADE.config[7:]
SAVED = docker(MADE, ["a:1"])


def _saved(**facts: Any) -> Members:
    return {**SAVED, "manifest.json": json.dumps([{**json.loads(SAVED["manifest.json"])[0], **facts}]).encode()}


WRONG: list[tuple[str, Members, str]] = [
    ("nothing", {}, "empty"),
    ("no image", {"notes.txt": b"x"}, "no root filesystem"),
    ("no index", {"oci-layout": b"{}"}, "without an index.json"),
    ("empty index", oci(entries=[]), "no image in it"),
    ("index is no json", {**oci(MADE), "index.json": b"{"}, "no JSON"),
    ("index is a manifest", {**oci(MADE), "index.json": MADE.manifest}, "no index"),
    ("index is large", {**oci(MADE), "index.json": b" " * (5 << 20)}, "at most 4194304"),
    ("manifest missing", _without(oci(MADE), MADE.digest[7:]), "is missing"),
    ("manifest changed", _changed(oci(MADE), MADE.digest[7:], MADE.manifest + b" "), "not what its digest says"),
    ("manifest said to be large", oci(MADE, entries=[entry(MADE.manifest, size=10**9)]), "1000000000 bytes"),
    ("layer missing", _without(oci(MADE), LAYER), "not whole"),
    ("layer cut", _changed(oci(MADE), LAYER, MADE.blobs[MADE.layers[0]][:-1]), "has 103 bytes in it"),
    ("layer changed", _changed(oci(MADE), LAYER, MADE.blobs[MADE.layers[0]][:-1] + b"!"), "its digest is"),
    ("config changed", _changed(oci(MADE), CONFIG, MADE.blobs[MADE.config].replace(b"A=1", b"A=2")), "its digest is"),
    ("no layers", oci(make_image(manifest={"layers": []})), "no layers"),
    ("name leads out", {"../x": b"", **oci(MADE)}, "leads out"),
    ("docker: no list", {**SAVED, "manifest.json": b'{"a": 1}'}, "not what docker save writes"),
    ("docker: empty", {**SAVED, "manifest.json": b"[]"}, "no image in it"),
    ("docker: many", {**SAVED, "manifest.json": json.dumps([{"Config": "", "Layers": []}] * 2000).encode()}, "1024"),
    ("docker: config missing", _without(SAVED, f"{CONFIG}.json"), "is missing"),
    ("docker: config elsewhere", _saved(Config="../../etc/passwd"), "is missing"),
    ("docker: config is no text", _saved(Config="\ud800"), "not what docker save writes"),
    ("docker: layer is no text", _saved(Layers=["\ud800", "x"]), "not what docker save writes"),
    ("docker: another platform", docker(make_image(config={"os": "\x1b[2J"}), None), r"x1b\[2J.*no platform"),
    ("docker: layer missing", _without(SAVED, "layer1/layer.tar"), "not whole"),
    ("docker: layers are none", _saved(Layers="x"), "no list"),
    ("docker: fewer layers", _saved(Layers=["layer0/layer.tar"]), "has 1 layers, and its config 2"),
    ("docker: layers swapped", _saved(Layers=["layer1/layer.tar", "layer0/layer.tar"]), "not what the config says"),
    ("docker: layer in xz", {**SAVED, "layer0/layer.tar": lzma.compress(TWO[0])}, "packed with xz"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "text"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_wrong_is_told_and_leaves_nothing(
    members: Members, text: str, store: ImageStore, tmp_path: Path
) -> None:
    with pytest.raises(ImageInvalid, match=text) as caught:
        import_image(written(tmp_path, members), store)
    assert "image.tar" in str(caught.value)
    assert store.list() == []
    assert set(store.blobs.digests()) <= {MADE.digest, *MADE.blobs, *(digest(data) for data in TWO)}
    if store.blobs.partial.exists():
        assert os.listdir(store.blobs.partial) == []
    assert import_image(written(tmp_path, oci(MADE)), store).id == MADE.config


ARCHIVES = [tar(oci(MADE)), tar(SAVED)]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_damage_is_refused_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = data.draw(st.sampled_from(ARCHIVES))
    at = data.draw(st.integers(0, len(whole) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=8))
    folder = tmp_path_factory.mktemp("damage")
    (folder / "x.tar").write_bytes(whole[:at] + damage + whole[at + len(damage) :])
    store = ImageStore(Home(folder / "home"))
    try:
        image = import_image(folder / "x.tar", store)
        assert image.config.diff_ids == tuple(digest(layer) for layer in TWO)
    except (ImageInvalid, SpecError):
        assert store.list() == []
    finally:
        store.close()


def test_links_in_archives_lead_nowhere_else(store: ImageStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    for target in (str(secret), "../../../../../../../.." + str(secret), "layer0/layer.tar"):
        path = tmp_path / "links.tar"
        path.write_bytes(tar(_without(SAVED, "layer0/layer.tar"), {"layer0/layer.tar": target}))
        with pytest.raises(ImageInvalid, match="not whole"):
            import_image(path, store)


def test_links_in_folders_are_not_followed(store: ImageStore, tmp_path: Path) -> None:
    folder = unpacked(tmp_path, oci(MADE))
    blob = folder / "blobs" / "sha256" / LAYER
    elsewhere = tmp_path / "elsewhere"
    blob.rename(elsewhere)
    blob.symlink_to(elsewhere)
    with pytest.raises(ImageInvalid, match="not whole"):
        import_image(folder, store)


@pytest.mark.parametrize("cut", [1, 511, 700, -600])
@pytest.mark.parametrize("packing", ["tar", "gzip", "zstd"])
def test_archives_that_are_cut(cut: int, packing: str, store: ImageStore, tmp_path: Path) -> None:
    path = tmp_path / "cut.tar"
    whole = tar(oci(MADE))
    data = PACKERS[packing](whole.rstrip(b"\0"))
    path.write_bytes(data[: cut % len(data)])
    with pytest.raises(ImageInvalid):
        import_image(path, store)
    assert store.list() == []


@pytest.mark.parametrize("cut", ["marks", "padding", "data", "header"])
def test_a_tar_may_lack_its_end_where_its_digest_is_known(cut: str) -> None:
    """Layers of ``umoci insert`` end with the last file's data."""
    whole = tar({"bin/sh": b"x" * 700, "etc/passwd": b"y" * 100})
    data = whole.rstrip(b"\0")
    if cut == "marks":
        data += bytes(-len(data) % 512)
    elif cut == "data":
        data = data[:-1]
    elif cut == "header":
        data = data[: 512 + 1024 + 200]
    if cut in ("data", "header"):
        with pytest.raises(ImageInvalid, match="cut short"):
            list(TarReader(io.BytesIO(data), may_end=True))
    else:
        assert [entry.name for entry in TarReader(io.BytesIO(data), may_end=True)] == [b"bin/sh", b"etc/passwd"]
    with pytest.raises(ImageInvalid, match="cut short"):
        list(TarReader(io.BytesIO(data)))


def test_a_bomb(store: ImageStore, tmp_path: Path) -> None:
    path = tmp_path / "bomb.tar.gz"
    head = tarfile.TarInfo("bin/zeros")
    head.size = 1 << 30
    path.write_bytes(gzip.compress(head.tobuf()) + gzip.compress(bytes(1 << 20)) * 300)
    with pytest.raises(ImageInvalid, match="200 times its size"):
        import_image(path, store)
    assert store.blobs.digests() == []


def test_what_is_no_file(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match="there is no"):
        import_image(tmp_path / "nothing", store)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ImageInvalid, match="neither a folder nor a file"):
        import_image(tmp_path / "fifo", store)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageInvalid, match="no root filesystem"):
        import_image(tmp_path / "empty", store)


def test_a_name_that_is_none_is_left_out(store: ImageStore, tmp_path: Path) -> None:
    for name in ("latest", "app:ta/gs:x", "a b"):
        path = written(tmp_path, oci(MADE, entries=[entry(MADE.manifest, name)]))
        assert import_image(path, store).references == ()


@pytest.fixture
def image(store: ImageStore, tmp_path: Path) -> Any:
    return import_image(written(tmp_path, oci(MADE), "source.tar"), store, parse("team/app:v1"))


@pytest.mark.parametrize("name", ["out.tar", "out"])
def test_what_goes_out_comes_in_again(name: str, image: Any, store: ImageStore, tmp_path: Path) -> None:
    seen: list[ImageProgress] = []
    export_image(image, store, tmp_path / name, reference=parse("team/app:v1"), progress=seen.append)
    assert {step.key for step in seen} == {MADE.digest, *MADE.blobs}
    other = ImageStore(Home(tmp_path / "other"))
    again = import_image(tmp_path / name, other)
    assert (again.id, again.manifest, again.references) == (image.id, image.manifest, image.references)
    other.close()
    with pytest.raises(FileExists):
        export_image(image, store, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_archives_are_the_same_every_time_and_docker_reads_them(image: Any, store: ImageStore, tmp_path: Path) -> None:
    export_image(image, store, tmp_path / "out.tar", reference=parse("team/app:v1"))
    stream = io.BytesIO()
    write_archive(image, store, stream, reference=parse("team/app:v1"))
    assert stream.getvalue() == (tmp_path / "out.tar").read_bytes()
    other = ImageStore(Home(tmp_path / "other"))
    with tarfile.open(tmp_path / "out.tar") as archive:
        members = {info.name: archive.extractfile(info).read() for info in archive if info.isfile()}  # type: ignore[union-attr]
    again = import_image(written(tmp_path, _without(members, "oci-layout")), other)  # by its manifest.json alone
    assert (again.id, again.references) == (image.id, image.references)
    other.close()


def test_an_empty_folder_may_be_filled(image: Any, store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_image(image, store, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["blobs", "index.json", "oci-layout"]


@pytest.mark.parametrize("name", ["out.tar", "out"])
def test_what_is_damaged_here_does_not_go_out(name: str, image: Any, store: ImageStore, tmp_path: Path) -> None:
    path = store.blobs.path_of(MADE.layers[0])
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ImageInvalid, match="damaged"):
        export_image(image, store, tmp_path / name)
    assert not (tmp_path / name).exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["x.tar.gz", "x.TGZ", "x.tar.zst"])
def test_what_sounds_packed_is_not_made_a_folder(name: str, image: Any, store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="sounds packed"):
        export_image(image, store, tmp_path / name)
    assert not (tmp_path / name).exists()
    export_image(image, store, tmp_path / name, folder=False)
    assert (tmp_path / name).is_file()


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path(
    path: str, image: Any, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "bin").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(SpecError, match="is no path"):
        import_image(path, store)
    with pytest.raises(SpecError, match="is no path"):
        export_image(image, store, path)


@pytest.mark.parametrize("folder", [True, False])
def test_a_link_is_not_written_over(folder: bool, image: Any, store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in ("nowhere", "empty"):
        (tmp_path / f"to-{target}").symlink_to(target)
        with pytest.raises(FileExists):
            export_image(image, store, tmp_path / f"to-{target}", folder=folder)


def test_where_nothing_can_be_written(image: Any, store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught:
        export_image(image, store, tmp_path / "nowhere" / "out.tar")
    assert isinstance(caught.value, SlopletError)
    assert layout.REF_NAME
