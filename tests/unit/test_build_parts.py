"""Parts of builds: what a sandbox tells, the cache, bootstrap, images in Python, and how a build is shown."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sloplet.build.bootstrap import Bootstrap, command, sources_for
from sloplet.build.cache import BuildCache, key_of
from sloplet.build.commit import Spool, items_of, read_changes
from sloplet.build.context import Found
from sloplet.build.distrust import without_traces
from sloplet.build.events import BuildEvent
from sloplet.build.image import Image, literal, source_date_epoch
from sloplet.build.indexes import npm_environment, pip_environment
from sloplet.build.layertar import DEFAULT_EPOCH, Item, Layer, text_data, write_layer
from sloplet.build.mounts import cache_name
from sloplet.build.running import Lines, RunSettings, default_limits, engine_of, is_offline, network_of
from sloplet.build.words import expand
from sloplet.cli.buildlog import BuildLog
from sloplet.errors import BuildError, BuildFailed, RecipeInvalid, SpecError, UnsupportedOperation
from sloplet.images.blobs import BlobStore
from sloplet.netspec import Network
from sloplet.network.configured import Machine
from sloplet.state.home import Home
from sloplet.volumespec import check_volume_name
from sloplet.wire.fields import Fields, encode_record
from sloplet.wire.schema import ChangeFlag, FileType, Tag

pytestmark = pytest.mark.anyone


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


# -- what a sandbox tells ------------------------------------------------------------------


def entry(name: str, kind: FileType = FileType.FILE, **more: Any) -> bytes:
    fields = Fields((Tag.NAME, name.encode()), (Tag.TYPE, int(kind)))
    if kind != FileType.REMOVED:
        facts = {"MODE": 0o644, "UID": 0, "GID": 0, "SIZE": 0, "MTIME_NS": 5, **more}
        for tag, value in facts.items():
            fields.add(Tag[tag], value if isinstance(value, int) else value.encode())
    return encode_record(fields)


def body(offset: int, data: bytes) -> bytes:
    return encode_record(Fields((Tag.OFFSET, offset), (Tag.BODY, data)))


def told(
    home: Home, *records: bytes, base: dict[str, Found] | None = None, complete: bool = True,
    contents_of_base: dict[str, list[bytes]] | None = None,
) -> dict[str, Item]:  # fmt: skip
    known = base or {}

    def read(found: Found) -> Callable[[], Iterator[bytes]]:
        return lambda: iter((contents_of_base or {})[found.path])

    def names(folder: str) -> list[str]:
        return sorted({path[len(folder) :].strip("/").split("/")[0] for path in known if path.startswith(f"{folder}/")})

    with Spool(home) as spool:
        for record in records:
            spool.write(record)
        listing, contents = read_changes(spool, complete)
        items = items_of(
            listing, contents, known.get, owners=True, names=names, read=None if contents_of_base is None else read
        )
        return {
            item.path: item if item.data is None else Item(**{**vars(item), "data": text_data(b"".join(item.data()))})
            for item in items
        }


def folder(path: str, mode: int = 0o755, uid: int = 0) -> dict[str, Found]:
    return {path: Found(path, "folder", mode, uid)}


def test_files_come_with_their_holes(home: Home) -> None:
    items = told(home, entry("f", SIZE=10), body(2, b"ab"), body(6, b"c"))
    data: Callable[[], Any] | None = items["f"].data
    assert data is not None
    assert b"".join(data()) == b"\0\0ab\0\0c\0\0\0"


def test_what_is_no_change_is_no_item(home: Home) -> None:
    items = told(
        home, entry(".", FileType.DIR), entry("same", FileType.DIR, MODE=0o755),
        entry("other", FileType.DIR, MODE=0o700),
        entry("owned", FileType.DIR, MODE=0o755, UID=7), entry("etc/hosts"), entry("dev/x"), entry("run/sloplet/y"),
        entry("pipe", FileType.OTHER), entry("never-there", FileType.REMOVED), entry("gone", FileType.REMOVED),
        base={**folder("same"), **folder("other"), **folder("owned"), **folder("gone")},
    )  # fmt: skip
    assert {path: item.kind for path, item in items.items()} == {
        "other": "folder", "owned": "folder", "gone": "whiteout",
    }  # fmt: skip


def test_a_replaced_folder_comes_as_what_it_lacks(home: Home) -> None:
    base = {**folder("d"), "d/a": Found("d/a", "file", 0o644), **folder("d/s"), "d/s/x": Found("d/s/x", "file", 0o644)}
    opaque = int(ChangeFlag.OPAQUE)
    items = told(
        home, entry("d", FileType.DIR, MODE=0o755, FLAGS=opaque), entry("d/s", FileType.DIR, MODE=0o755),
        entry("d/s/y"), entry("new", FileType.DIR, MODE=0o755, FLAGS=opaque), base=base,
    )  # fmt: skip
    assert {path: item.kind for path, item in items.items()} == {
        "d/a": "whiteout", "d/s/x": "whiteout", "d/s/y": "file", "new": "folder",
    }  # fmt: skip


def test_a_listing_tells_the_same(home: Home) -> None:
    base = {**folder("d"), "d/a": Found("d/a", "file", 0o644), "d/b": Found("d/b", "file", 0o644)}
    record = Fields((Tag.NAME, b"d"), (Tag.TYPE, int(FileType.DIR)), (Tag.MODE, 0o755), (Tag.ENTRY, b"b"))
    root = Fields((Tag.NAME, b"."), (Tag.TYPE, int(FileType.DIR)), (Tag.MODE, 0o755), (Tag.ENTRY, b"d"))
    run = Fields((Tag.NAME, b"run"), (Tag.TYPE, int(FileType.DIR)), (Tag.MODE, 0o755))
    items = told(home, encode_record(root), encode_record(run), encode_record(record), base=base, complete=False)
    assert {path: item.kind for path, item in items.items()} == {"d/a": "whiteout"}


def test_a_hard_link_to_what_is_not_kept_is_a_file(home: Home) -> None:
    linked = entry("copy", FLAGS=int(ChangeFlag.HARD_LINK), PATH2="etc/hosts", SIZE=2)
    items = told(home, entry("etc/hosts", SIZE=2), body(0, b"hi"), linked)
    assert list(items) == ["copy"]
    assert (items["copy"].kind, items["copy"].size) == ("file", 2)


@pytest.mark.parametrize(
    "records",
    [
        [entry("../x")],
        [entry("/x")],
        [entry("a//b")],
        [entry("a/./b")],
        [entry("x", SIZE=-1)],
        [entry("x", UID=-1)],
        [entry("x", GID=2**40)],
        [body(0, b"of nothing")],
        [entry("x", SIZE=5), body(3, b"ab"), body(0, b"ab")],
        [entry("x")[:-3]],
        [b"\xff\xff\xff\xff"],
        [entry("x", FLAGS=int(ChangeFlag.HARD_LINK), PATH2="unknown")],
        [entry("x", FileType.REMOVED)[:4] + b"\x00" * 20],
    ],
)
def test_a_sandbox_that_lies_makes_no_layer(home: Home, records: list[bytes]) -> None:
    with pytest.raises(BuildFailed):
        told(home, *records)


def test_a_file_that_is_as_it_was_is_no_change(home: Home) -> None:
    base = {name: Found(name, "file", 0o644, size=6) for name in ("same", "linked", "mode", "owner", "text", "size")}
    before = {name: [b"ab", b"cdef"] for name in base}
    found = told(
        home, entry("same", SIZE=6), body(0, b"abc"), body(3, b"def"), entry("mode", SIZE=6, MODE=0o600),
        body(0, b"abcdef"), entry("owner", SIZE=6, UID=7), body(0, b"abcdef"), entry("text", SIZE=6),
        body(0, b"abcdeF"), entry("size", SIZE=5), body(0, b"abcde"), entry("linked", SIZE=6), body(0, b"abcdef"),
        entry("other", PATH2="linked", FLAGS=int(ChangeFlag.HARD_LINK)), entry("new", SIZE=6), body(0, b"abcdef"),
        base=base, contents_of_base=before,
    )  # fmt: skip
    assert set(found) == {"mode", "owner", "text", "size", "linked", "other", "new"}


def test_traces_of_a_certificate_are_no_change(tmp_path: Path) -> None:
    from sloplet.build.tree import TreeFolder

    (tmp_path / "etc/ssl/certs").mkdir(parents=True)
    (tmp_path / "etc/ssl/certs/ca-certificates.crt").write_text("theirs\n")
    (tmp_path / "etc/ssl/certs/ca-certificates.crt").chmod(0o644)
    path = "etc/ssl/certs/ca-certificates.crt"
    with TreeFolder(tmp_path, None, mapped=False) as tree:
        changed = Item(path, "file", 0o644, size=7, data=text_data(b"others\n"))
        made = Item("usr/local/share/ca-certificates", "folder", 0o755)
        assert without_traces([made], tree) == []
        assert without_traces([changed], tree) == [changed]


# -- the cache -----------------------------------------------------------------------------


def test_the_cache_finds_what_is_really_there(home: Home) -> None:
    blobs = BlobStore(home)
    cache = BuildCache(home, blobs)
    layer = write_layer([Item("a", "folder")], blobs)
    key = key_of("", {"run": "x"})
    assert cache.get(key) is None
    cache.put(key, layer)
    hit = cache.get(key)
    assert hit is not None
    assert hit.layer == layer
    cache.put(key_of("", {"run": "y"}), None)
    nothing = cache.get(key_of("", {"run": "y"}))
    assert nothing is not None
    assert nothing.layer is None
    blobs.remove(layer.descriptor.digest)
    assert cache.get(key) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"layer": {}}', '{"layer": {"mediaType": "x", "digest": "y", "size": 1, "diff_id": "z"}}',
     '{"layer": 7}'],
)  # fmt: skip
def test_what_is_damaged_in_the_cache_is_not_there(home: Home, text: str) -> None:
    cache = BuildCache(home, BlobStore(home))
    cache.put("0" * 64, None)
    (home.cache / f"build-{'0' * 64}").write_text(text)
    assert cache.get("0" * 64) is None


def test_keys_tell_everything_apart() -> None:
    keys = {
        key_of(*each) for each in (("a", {"run": "x"}), ("b", {"run": "x"}), ("a", {"run": "y"}), ("a", {"env": "x"}))
    }
    assert len(keys) == 4


def test_old_steps_are_forgotten(home: Home) -> None:
    cache = BuildCache(home, BlobStore(home))
    for key in ("a" * 64, "b" * 64):
        cache.put(key, None)
    os.utime(home.cache / f"build-{'a' * 64}", (0, time.time() - 40 * 86400))
    (home.cache / "other").touch()
    os.utime(home.cache / "other", (0, 0))
    assert cache.tidy() == 1
    assert sorted(path.name for path in home.cache.iterdir()) == [f"build-{'b' * 64}", "other"]


# -- bootstrap ------------------------------------------------------------------------------

DEB822 = """
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security/
Suites: bookworm-security
Components: main

Types: deb
Enabled: no
URIs: http://off.example/debian
Suites: bookworm
Components: main

# Types: deb
# URIs: http://comment.example/debian
"""


def test_sources_of_this_machine() -> None:
    wanted = Bootstrap.make("debian:bookworm", ["b", "a", "b"])
    assert wanted.packages == ("a", "b")
    signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
    assert sources_for(wanted, DEB822).splitlines() == [
        f"deb {signed}http://mirror.example/debian bookworm main contrib",
        f"deb {signed}http://mirror.example/debian bookworm-updates main contrib",
        "deb http://mirror.example/debian-security/ bookworm-security main",
    ]
    other = sources_for(Bootstrap.make("debian:trixie"), DEB822)
    assert other.splitlines() == [f"deb {signed}http://mirror.example/debian trixie main contrib"]
    lines = "deb [arch=amd64] http://a.example/debian bookworm main # x\ndeb http://b.example/tools stable main\n"
    assert sources_for(wanted, lines) == "deb [arch=amd64] http://a.example/debian bookworm main\n"


def test_no_sources_of_a_distribution() -> None:
    with pytest.raises(BuildError, match="no source of ubuntu"):
        sources_for(Bootstrap.make("ubuntu:noble"), DEB822)


def test_the_command() -> None:
    argv = command(Bootstrap.make("debian:bookworm", ["git", "curl"]), "unshare")
    assert argv[:3] == ["mmdebstrap", "--mode=unshare", "--variant=minbase"]
    assert argv[-4:] == ["--include=curl,git", "bookworm", "-", "-"]


@pytest.mark.parametrize(
    ("distribution", "options"),
    [("fedora:40", {}), ("debian", {}), ("debian:--x", {}), ("debian:bookworm", {"variant": "huge"}),
     ("debian:bookworm", {"packages": ["-o"]}), ("debian:bookworm", {"packages": ["a,b"]}),
     ("debian:bookworm", {"mirror": "--setup-hook=x"}), ("debian:bookworm", {"mirror": "deb http://x ./\nx"})],
)  # fmt: skip
def test_what_cannot_be_bootstrapped(distribution: str, options: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        Image.bootstrap(distribution, **options)


# -- images in Python ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("programs", "ran"),
    [
        (["python3"], ["python3 -m pip --version", "python3 -m pip install six"]),
        (["apt-get", "rm"], ["apt-get update", "apt-get install python3-pip", "apt-get clean", "rm"]),
        (["apk"], ["apk add --no-cache py3-pip"]),
        (["dnf"], ["dnf -y install python3-pip", "dnf clean all"]),
        ([], []),
    ],
)
def test_pip_is_brought_where_there_is_none(tmp_path: Path, programs: list[str], ran: list[str]) -> None:
    """The command as a shell runs it that knows these programs only. What was installed is not there in the end, so
    that it fails: pip itself is still asked."""
    step: Any = Image("debian:12").pip("six")._steps[-1]
    for name in programs:
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/log\n')
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(["/bin/sh", "-c", step.text], env={"PATH": str(tmp_path)}, capture_output=True, check=False)
    log = tmp_path / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    assert len(lines) == len(ran)
    assert all(set(wanted.split()) <= set(line.split()) for line, wanted in zip(lines, ran, strict=True)), lines
    assert (done.returncode == 0) == (programs == ["python3"])
    assert step.line.text == "RUN python3 -m pip install six", "that is what is shown"


@pytest.mark.parametrize(
    "make",
    [
        lambda image: image.apt("-o"),
        lambda image: image.apt("a b"),
        lambda image: image.apt("a;b"),
        lambda image: image.apt(),
        lambda image: image.pip(),
        lambda image: image.npm(""),
        lambda image: image.run(""),
        lambda image: image.run([]),
        lambda image: image.env(A=1),
        lambda image: image.env(**{"a b": "c"}),
        lambda image: image.cmd("a", 1),
        lambda image: image.workdir(""),
    ],
)
def test_what_makes_no_image(make: Callable[[Image], Image]) -> None:
    with pytest.raises(SpecError):
        make(Image("debian:12"))


def test_images_are_values() -> None:
    image = Image("debian:12")
    assert image.run("a") == image.run("a")
    assert image.run("a") != image.run("b")
    assert image == Image("debian:12")


@pytest.mark.parametrize("text", ["plain", "a b", "$HOME ${x}", "'q' \"d\"", "back\\slash", "tab\tnew\nline", "é"])
def test_values_are_taken_as_they_are(text: str) -> None:
    assert expand(literal(text), {"HOME": "/x"}.get) == text


def test_the_time_of_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert source_date_epoch() == DEFAULT_EPOCH
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert source_date_epoch() == 1700000000
    for wrong in ("soon", "-1", "1e99", str(2**70)):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", wrong)
        with pytest.raises(RecipeInvalid):
            source_date_epoch()


def test_package_indexes_of_this_machine(tmp_path: Path) -> None:
    def machine(**env: str) -> Machine:
        return Machine(tmp_path, tmp_path, env, (), None)

    found = pip_environment(
        machine(PIP_INDEX_URL="http://127.0.0.1:8080/simple", PIP_EXTRA_INDEX_URL="https://b.example/s")
    )
    assert found["PIP_INDEX_URL"] == "http://host.sloplet:8080/simple"
    assert found["PIP_EXTRA_INDEX_URL"] == "https://b.example/s"
    assert found["PIP_TRUSTED_HOST"] == "host.sloplet:8080"
    assert "PIP_INDEX_URL" not in pip_environment(machine(PIP_INDEX_URL="https://user:token@c.example/simple"))
    assert (
        npm_environment(machine(npm_config_registry="https://n.example/"))["npm_config_registry"]
        == "https://n.example/"
    )


# -- running ---------------------------------------------------------------------------------


class _Work:
    def __init__(self, network: object) -> None:
        self.network = network


def test_which_network_a_step_has() -> None:
    mine, theirs = Network(allow=["a.example"]), Network(allow=["b.example"])
    offline, online = RunSettings("none"), RunSettings(theirs)
    assert network_of(_Work(None), offline) == "none"  # type: ignore[arg-type]
    assert network_of(_Work(mine), offline) is mine  # type: ignore[arg-type]
    assert network_of(_Work(mine), online) is theirs  # type: ignore[arg-type]
    assert network_of(_Work("none"), online) == "none"  # type: ignore[arg-type]
    assert network_of(_Work("default"), online) is theirs  # type: ignore[arg-type]
    assert is_offline("none")
    assert not is_offline(mine)


def test_output_comes_in_lines() -> None:
    seen: list[str] = []
    lines = Lines(seen.append)
    for channel, data in (
        (1, b"on"),
        (2, b"err\n"),
        (1, b"e\ntwo\r\n"),
        (1, b"10%\r20%\r100%\n"),
        (1, b"x" * 5000),
        (1, b"\xff"),
    ):
        lines.take(channel, data)
    lines.finish()
    assert seen[:4] == ["err", "one", "two", "100%"]
    assert "".join(seen[4:]) == "x" * 5000 + "\ufffd"


def test_limits_are_sane() -> None:
    found = default_limits()
    assert found["cpus"] >= 1
    assert 512 * 2**20 <= found["memory"] <= 8 * 2**30


def test_caches_are_volumes_with_names() -> None:
    names = {cache_name(text) for text in ("/root/.cache/pip", "/root/.cache/pi", "a b/ü", "..", "x" * 500)}
    assert len(names) == 5
    for name in names:
        check_volume_name(name)


# -- the log ---------------------------------------------------------------------------------


def test_the_log_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with BuildLog(live=False) as log:
        log(BuildEvent("begin", 1, 2, "one", "RUN a \\\n b"))
        log(BuildEvent("log", 1, 2, "one", "\x1b[31mred\x07"))
        log(BuildEvent("end", 1, 2, "one", cached=True))
        log(BuildEvent("begin", 2, 2, "one", "RUN c"))
        log(BuildEvent("end", 2, 2, "one", seconds=1.25))
        log(BuildEvent("done", 2, 2, text="sha256:0"))
    assert capsys.readouterr().err.splitlines() == [
        "[1/2 one] RUN a \\ b", "[1/2 one] | ?[31mred?", "[1/2 one] CACHED", "[2/2 one] RUN c",
        "[2/2 one] done in 1.2 s",
    ]  # fmt: skip
    assert [event["cached"] for event in log.events] == [True, False]
    json.dumps(log.events)


def test_layers_are_values() -> None:
    from sloplet.images.media import Descriptor

    assert Layer(Descriptor("a", "b", 1), "c") == Layer(Descriptor("a", "b", 1), "c")


@pytest.mark.parametrize(
    ("mode", "gvisor", "settings", "expected"),
    [
        ("range", True, RunSettings(), "container"),
        ("range", True, RunSettings(engine="gvisor"), "gvisor"),
        ("range", True, RunSettings(at_least="gvisor"), "auto"),
        ("single", True, RunSettings(), "auto"),
        ("single", False, RunSettings(engine="container"), "container"),
    ],
)
def test_what_steps_run_on(
    monkeypatch: pytest.MonkeyPatch, mode: str, gvisor: bool, settings: RunSettings, expected: str
) -> None:
    _pretend(monkeypatch, mode, gvisor)
    assert engine_of(settings) == expected


def test_steps_need_several_users(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "single", gvisor=False)
    with pytest.raises(UnsupportedOperation, match="several users inside") as caught:
        engine_of(RunSettings())
    assert "sloplet setup gvisor" in (caught.value.hint or "")


def _pretend(monkeypatch: pytest.MonkeyPatch, mode: str, gvisor: bool) -> None:
    class Engine:
        def __init__(self, available: bool) -> None:
            self.available = available

        def probe(self) -> Engine:
            return self

    monkeypatch.setattr("sloplet.build.running.jail.mode", lambda machine: mode)
    monkeypatch.setattr("sloplet.build.running.registry.load", lambda name: Engine(name == "container" or gvisor))


def test_owners_and_bits_that_the_disk_does_not_have(tmp_path: Path) -> None:
    """Of a user without subordinate ids all files are his; whom they belong to inside is on record."""
    from sloplet.build.tree import TreeFolder

    (tmp_path / "d").mkdir()
    for name in ("d/f", "g"):
        (tmp_path / name).write_text("x")
        (tmp_path / name).chmod(0o755)
    tree = TreeFolder(tmp_path, lambda uid, gid: (0, 0), False, recorded={"d/f": (7, 8)}, modes={"d/f": 0o4755})
    with tree:
        facts = [(found.path, found.mode, found.uid, found.gid) for found in tree.walk("") if found.kind == "file"]
        assert facts == [("g", 0o755, 0, 0), ("d/f", 0o4755, 7, 8)]
        seen = tree.lstat("d/f")
        assert seen is not None
        assert (seen.mode, seen.uid) == (0o755, 7)  # as a step sees it
