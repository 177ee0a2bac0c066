"""Contexts, .dockerignore, where files of a COPY go, and layers that are the same for the same files."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from sloplet.build.commit import Spool
from sloplet.build.context import Folder, Found, digest_of, read_ignore, resolve
from sloplet.build.copying import Selection, select
from sloplet.build.dockerfile import parse
from sloplet.build.fromtar import is_tar, read_tar, tar_items
from sloplet.build.ignore import Ignore, pattern_expression
from sloplet.build.layertar import DEFAULT_EPOCH, Item, arranged, tar_pieces, text_data, write_layer
from sloplet.build.placing import Placing, View, owner_of
from sloplet.build.scope import CopyWork, Scope
from sloplet.errors import BuildFailed, ImageInvalid, RecipeInvalid
from sloplet.images.blobs import BlobStore
from sloplet.images.config import ImageConfig
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone


def make(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# -- .dockerignore -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "path", "ignored"),
    [
        (["a"], "a", True),
        (["a"], "a/b", True),
        (["a"], "b/a", False),
        (["/a/"], "a", True),
        (["./a"], "a", True),
        (["*.o"], "x.o", True),
        (["*.o"], "d/x.o", False),
        (["**/*.o"], "d/e/x.o", True),
        (["**/*.o"], "x.o", True),
        (["*/temp*"], "d/temporary", True),
        (["*/temp*"], "d/e/temp", False),
        (["a?"], "ab", True),
        (["a?"], "a", False),
        (["a/**"], "a/b/c", True),
        (["[ab].c"], "b.c", True),
        (["[^ab].c"], "c.c", True),
        (["[^ab].c"], "a.c", False),
        (["*.md", "!README.md"], "README.md", False),
        (["*.md", "!README.md"], "x.md", True),
        (["!README.md", "*.md"], "README.md", True),
        (["*", "!src"], "src/x", False),
        (["*", "!src", "src/*.o"], "src/x.o", True),
        (["# a", "", "  "], "# a", False),
        ([r"\*"], "*", True),
        ([r"\*"], "x", False),
        ([".."], "x", False),
    ],
)
def test_ignore(lines: list[str], path: str, ignored: bool) -> None:
    assert Ignore(lines).ignores(path) is ignored


def test_a_pattern_that_makes_no_sense_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("a\n[b\n")
    with pytest.raises(RecipeInvalid, match=r"\.dockerignore line 2: "):
        read_ignore(tmp_path, tmp_path / "Dockerfile")


def test_the_dockerfiles_own_ignore_file_wins(tmp_path: Path) -> None:
    make(tmp_path, **{".dockerignore": "a\n", "x.Dockerfile.dockerignore": "b\n"})
    found = read_ignore(tmp_path, tmp_path / "x.Dockerfile")
    assert (found.ignores("a"), found.ignores("b")) == (False, True)


def test_patterns_stop_at_slashes() -> None:
    assert pattern_expression("a/*").match("a/b")
    assert not pattern_expression("a/*").match("a/b/c")
    assert pattern_expression("a/**").match("a/b/c")


# -- folders ----------------------------------------------------------------------------


def test_walk_and_match(tmp_path: Path) -> None:
    make(tmp_path, a="1", d__b="2", d__e__c="3", x__y__z="4")
    with Folder(tmp_path, ignore=Ignore(["x", "d/e/c"])) as folder:
        assert [found.path for found in folder.walk("")] == ["a", "d", "d/b", "d/e"]
        assert folder.match("*") == ["a", "d"]
        assert folder.match("d/*") == ["d/b", "d/e"]
        assert folder.match("**/b") == ["d/b"]
        assert folder.match("none*") == []
        assert folder.lstat("x/y") is None
        assert folder.names("d") == ["b", "e"]
        assert folder.names("a") == []


def test_links_are_never_followed_out(tmp_path: Path) -> None:
    outside = make(tmp_path / "outside", secret="s")
    root = make(tmp_path / "root", file="f")
    (root / "abs").symlink_to(outside)
    (root / "up").symlink_to("../outside/secret")
    (root / "inner").symlink_to("/file")
    with Folder(root) as folder:
        assert folder.read("abs/secret", 100) is None
        assert folder.read("up", 100) is None
        assert folder.read("inner", 100) == b"f"
        assert resolve(folder.lstat, "up") == "outside/secret"
        assert [found.kind for found in folder.walk("")] == ["symlink", "file", "symlink", "symlink"]


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with Folder(tmp_path) as folder, pytest.raises(BuildFailed, match="loop"):
        resolve(folder.lstat, "a")


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    make(tmp_path, a="one")
    with Folder(tmp_path) as folder:
        found = folder.lstat("a")
        assert found is not None
        data = folder.data(found, folder.digest(found))
        (tmp_path / "a").write_text("two")
        with pytest.raises(BuildFailed, match="changed"):
            list(data())


def test_digests_tell_names_modes_links_and_contents_apart(tmp_path: Path) -> None:
    def digest() -> str:
        with Folder(tmp_path) as folder:
            return digest_of(folder, folder.walk(""), {})

    make(tmp_path, a="1")
    seen = [digest()]
    os.utime(tmp_path / "a", (1, 1))
    assert digest() == seen[0]  # times are no part of it
    (tmp_path / "a").write_text("2")
    seen.append(digest())
    (tmp_path / "a").chmod(0o755)
    seen.append(digest())
    (tmp_path / "l").symlink_to("a")
    seen.append(digest())
    (tmp_path / "a").rename(tmp_path / "b")
    seen.append(digest())
    assert len(set(seen)) == len(seen)


# -- layers -----------------------------------------------------------------------------


def text(path: str, content: str = "x", **facts: object) -> Item:
    data = content.encode()
    return Item(path, "file", size=len(data), data=text_data(data), **facts)  # type: ignore[arg-type]


def members(items: list[Item], epoch: int = 5) -> dict[str, tarfile.TarInfo]:
    raw = b"".join(tar_pieces(arranged(items), epoch))
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        return {info.name: info for info in tar}


def test_a_layer_is_the_same_whatever_the_order(tmp_path: Path) -> None:
    blobs = BlobStore(Home(tmp_path / "home"))
    items = [text("b/c", "1"), Item("b", "folder", 0o755, 1, 2), text("a"), Item("s", "symlink", link="a")]
    first = write_layer(items, blobs)
    assert write_layer(items[::-1], blobs) == first
    with blobs.open(first.descriptor.digest) as file:
        packed = file.read()
    assert packed[:10] == b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
    import hashlib

    assert first.diff_id == "sha256:" + hashlib.sha256(gzip.decompress(packed)).hexdigest()
    assert first.descriptor.size == len(packed)


def test_members() -> None:
    long = "d" * 90 + "/" + "e" * 200
    found = members(
        [
            text("a", "abc", mode=0o4755, uid=1, gid=2),
            Item("d", "folder", 0o1777),
            Item("gone", "whiteout"),
            Item("d/gone", "whiteout"),
            Item("big", "folder", uid=2**31, gid=3_000_000),
            text(long),
        ]
    )
    assert (found["a"].mode, found["a"].uid, found["a"].gid, found["a"].size) == (0o4755, 1, 2, 3)
    assert {info.mtime for info in found.values()} == {5}
    assert found["d"].isdir()
    assert {".wh.gone", "d/.wh.gone", long} <= set(found)
    assert (found["big"].uid, found["big"].gid) == (2**31, 3_000_000)


def test_the_first_name_of_a_file_has_its_content() -> None:
    found = members([text("z", "abc"), Item("a", "hardlink", link="z"), Item("m", "hardlink", link="z")])
    assert (found["a"].isreg(), found["a"].size) == (True, 3)
    assert (found["m"].linkname, found["z"].linkname) == ("a", "a")


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([text("a"), text("a/b")], "no folder"),
        ([Item("a", "symlink", link="/etc"), text("a/b/c")], "no folder"),
        ([text("../a")], "cannot be a path"),
        ([text("a//b")], "cannot be a path"),
        ([text("a/.wh.b")], "begin with .wh."),
        ([Item("a", "hardlink", link="none")], "no file of the same layer"),
    ],
)
def test_what_is_no_tree_is_no_layer(items: list[Item], words: str) -> None:
    with pytest.raises(BuildFailed, match=words):
        arranged(items)


def test_a_file_that_is_not_as_long_as_it_said(tmp_path: Path) -> None:
    for size in (2, 5):
        item = Item("a", "file", size=size, data=text_data(b"abc"))
        with pytest.raises(BuildFailed, match="changed"):
            list(tar_pieces([item], DEFAULT_EPOCH))


# -- where files go -----------------------------------------------------------------------


def copy(line: str, context: Path, tree: dict[str, Found] | None = None) -> dict[str, Item]:
    """The entries that a COPY makes, above a tree that is described."""
    scope = Scope(ImageConfig(workdir="/w"), build_args={}, leading={}, epoch=0)
    work = scope.take(parse(f"FROM scratch\n{line}").stages[0].steps[0])
    assert isinstance(work, CopyWork)
    known = {"": Found("", "folder", 0o755), **(tree or {})}
    with Folder(context) as folder:
        selection: Selection = select(work, folder, "the context")
        placing = Placing(View(known.get).lstat, mode=int(work.chmod, 8) if work.chmod else None)
        for picked in selection.picked:
            placing.put(picked, work.target, inside=work.parents)
    return placing.items


def folder(path: str) -> dict[str, Found]:
    return {path: Found(path, "folder", 0o755)}


def link(path: str, target: str) -> dict[str, Found]:
    return {path: Found(path, "symlink", 0o777, link=target)}


@pytest.fixture
def context(tmp_path: Path) -> Path:
    return make(tmp_path / "context", a="1", b="2", d__x="3", d__e__y="4", **{"f.txt": "5", "g.txt": "6"})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("COPY a /x", "x"),
        ("COPY a /p/q/x", "p p/q p/q/x"),
        ("COPY a /p/", "p p/a"),
        ("COPY a b /p/", "p p/a p/b"),
        ("COPY a .", "w w/a"),
        ("COPY a n", "w w/n"),
        ("COPY d /p", "p p/e p/e/y p/x"),
        ("COPY d /", "e e/y x"),
        ("COPY . /p", "p p/a p/b p/d p/d/e p/d/e/y p/d/x p/f.txt p/g.txt"),
        ("COPY *.txt /p/", "p p/f.txt p/g.txt"),
        ("COPY d/* /p/", "p p/x p/y"),
        ("COPY --parents d/e/y /p/", "p p/d p/d/e p/d/e/y"),
        ("COPY --parents d/./e/y /p/", "p p/e p/e/y"),
        ("COPY --exclude=e d /p/", "p p/x"),
        ("COPY <<one /p\nx\none", "p"),
        ("COPY <<one <<two /p/\nx\none\ny\ntwo", "p p/one p/two"),
    ],
)
def test_targets(context: Path, line: str, expected: str) -> None:
    assert " ".join(sorted(copy(line, context))) == expected


def test_a_target_that_is_a_folder_takes_files_in(context: Path) -> None:
    assert list(copy("COPY a /p", context, folder("p"))) == ["p/a"]


def test_links_of_the_tree_are_followed(context: Path) -> None:
    tree = {**folder("usr"), **folder("usr/bin"), **link("bin", "usr/bin"), **link("d", "/usr")}
    assert list(copy("COPY a /bin/a", context, tree)) == ["usr/bin/a"]
    assert list(copy("COPY a /bin/", context, tree)) == ["usr/bin/a"]
    assert list(copy("COPY a /d/bin/", context, tree)) == ["usr/bin/a"]
    # a folder that is copied over a link to one goes where that leads
    assert sorted(copy("COPY . /", context, tree)) == ["a", "b", "f.txt", "g.txt", "usr/e", "usr/e/y", "usr/x"]


def test_a_link_cannot_lead_out_of_the_tree(context: Path) -> None:
    assert sorted(copy("COPY a /up/x/y", context, link("up", "../../.."))) == ["x", "x/y"]


def test_modes(context: Path) -> None:
    (context / "a").chmod(0o751)
    assert copy("COPY a /a", context)["a"].mode == 0o751
    changed = copy("COPY --chmod=640 d /p/", context)
    assert {changed[path].mode for path in ("p/x", "p/e", "p/e/y")} == {0o640}
    assert changed["p"].mode == 0o755  # made on the way


def test_what_is_not_there(context: Path) -> None:
    (context / ".dockerignore").write_text("")
    for line in ("COPY none /x", "COPY none* /x/", "COPY ../a/../../etc/passwd /x"):
        with pytest.raises(BuildFailed, match="line 2: there is no"):
            copy(line, context)


def test_a_file_where_a_folder_should_be(context: Path) -> None:
    with pytest.raises(BuildFailed, match="/p is a file"):
        copy("COPY a /p/x/", context, {"p": Found("p", "file", 0o644)})


def test_layers_above_a_tree_hide_what_they_replace() -> None:
    view = View({**folder("a"), **folder("a/b")}.get)
    assert view.lstat("a/b") is not None
    view.add([Item("a/b", "whiteout"), Item("a/c", "folder")])
    assert view.lstat("a/b") is None
    assert view.lstat("a/b/x") is None
    assert view.lstat("/a/c") is not None
    view.add([Item("a", "whiteout")])
    assert view.lstat("a") is None
    assert view.lstat("a/c") is None


PASSWD = b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001::/:/bin/sh\n"
GROUP = b"root:x:0:\nstaff:x:50:\n"


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        ("0", (0, 0)),
        ("5", (5, 5)),
        ("5:6", (5, 6)),
        ("app", (1000, 1001)),
        ("app:staff", (1000, 50)),
        ("7:staff", (7, 50)),
    ],
)
def test_owners(owner: str, expected: tuple[int, int]) -> None:
    assert owner_of(owner, {"etc/passwd": PASSWD, "etc/group": GROUP}.get) == expected


@pytest.mark.parametrize("owner", ["nobody", "app:none", "99999999999", ""])
def test_owners_that_are_none(owner: str) -> None:
    with pytest.raises(BuildFailed):
        owner_of(owner, {"etc/passwd": PASSWD, "etc/group": GROUP}.get)


# -- archives ---------------------------------------------------------------------------


def tar_of(path: Path, packing: str = "gz", **files: str) -> Path:
    with tarfile.open(path, f"w:{packing}") as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size, info.uid, info.gid = len(content), 7, 8
            tar.addfile(info, io.BytesIO(content.encode()))
    return path


@pytest.mark.parametrize("packing", ["", "gz", "bz2", "xz"])
def test_tars_are_told_by_what_is_in_them(tmp_path: Path, packing: str) -> None:
    tar_of(tmp_path / "file", packing, a="1", d__b="22")
    (tmp_path / "gz").write_bytes(gzip.compress(b"no tar"))
    with Folder(tmp_path) as folder, Spool(Home(tmp_path / "home")) as spool:
        found, other = folder.lstat("file"), folder.lstat("gz")
        assert found is not None
        assert other is not None
        assert is_tar(folder, found)
        assert not is_tar(folder, other)
        items = {item.path: item for item in tar_items(folder, found, spool)}
        assert b"".join(items["d/b"].data()) == b"22"  # type: ignore[misc]
        assert (items["a"].uid, items["a"].gid) == (7, 8)


def test_names_of_an_archive_cannot_climb(tmp_path: Path) -> None:
    tar_of(tmp_path / "t", "", **{"a/../../x": "1"})
    with Spool(Home(tmp_path / "home")) as spool, open(tmp_path / "t", "rb") as file, pytest.raises(ImageInvalid):
        read_tar(file, spool)


def test_an_archive_is_merged_into_a_tree(tmp_path: Path) -> None:
    tar_of(tmp_path / "t", "", bin__x="1", new__y="2")
    tree = {**folder("usr"), **folder("usr/bin"), **link("bin", "usr/bin"), "": Found("", "folder", 0o755)}
    with Spool(Home(tmp_path / "home")) as spool, open(tmp_path / "t", "rb") as file:
        placing = Placing(View(tree.get).lstat)
        placing.merge(read_tar(file, spool), "")
        assert sorted(placing.items) == ["new", "new/y", "usr/bin/x"]


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*a*a*a*b", ("aaab", "xaaxab"), ("aab", "a/aab", "aaabc")),
        ("**/*a*/*b*", ("a/b", "x/y/zaz/b", "xa/xbx"), ("b/a", "a/x/b", "ab")),
        ("**/a/**/b/**/c", ("a/b/c", "x/a/y/z/b/c"), ("a/b/xc", "xa/b/c", "a/c")),
        ("*/*/*/*.p?", ("a/b/c/d.py",), ("a/b/c.py", "a/b/c/d/e.py", "a/b/c/d.p/")),
        ("a**b*c*[d-f]*", ("a/x/bcd", "abce1"), ("a/b/cd", "abcg")),
    ],
)
def test_patterns_with_many_stars(pattern: str, yes: tuple[str, ...], no: tuple[str, ...]) -> None:
    matcher = pattern_expression(pattern)
    assert [text for text in yes if not matcher.match(text)] == []
    assert [text for text in no if matcher.match(text)] == []


def test_a_pattern_that_tries_everything_ends() -> None:
    """By an expression that goes back it would take longer than the age of the world."""
    assert not pattern_expression("*a" * 40 + "b").match("a" * 250)
    assert not pattern_expression("**/a/" * 30 + "b").match("a/" * 1000 + "c")


def test_an_ignore_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / ".dockerignore"
    os.mkfifo(path)
    with pytest.raises(RecipeInvalid, match="it is no plain file"):
        read_ignore(tmp_path, tmp_path / "Dockerfile")
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(RecipeInvalid, match="it is no plain file"):
        read_ignore(tmp_path, tmp_path / "Dockerfile")
    path.unlink()
    path.write_bytes(b"x\n" * 2**20)
    with pytest.raises(RecipeInvalid, match="more than 1048576 bytes"):
        read_ignore(tmp_path, tmp_path / "Dockerfile")
