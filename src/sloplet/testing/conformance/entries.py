"""Conformance: writing a file itself, names of owners, where links lead, extended attributes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest

from ...engines.base import Capabilities
from ...errors import FileError, SpecError
from ...results import LinkTarget
from ...sync import Sandbox
from .support import needs, read_until


def _set(box: Sandbox, path: str, attributes: dict[str, Any], **options: Any) -> None:
    try:
        box.files.set_attributes(path, attributes, **options)
    except FileError as error:
        needs(error.errno != errno.ENOTSUP, "this disk has no extended attributes")
        raise


class TestInPlace:
    def test_is_the_same_file(self, box: Sandbox) -> None:
        box.files.write("f", "something longer")
        process = box.spawn("exec 3<f; echo open; read x; cat <&3", stdin=True)
        read_until(process, "open\n")
        assert box.files.write("f", "new", in_place=True) == 3
        process.send("\n")
        assert process.wait().stdout == "open\nnew"
        assert [info.name for info in box.files.list()] == ["f"]

    def test_modes(self, box: Sandbox) -> None:
        box.files.write("f", "1", in_place=True)
        assert box.files.stat("f").mode == 0o644
        box.files.chmod("f", 0o751)
        box.files.write("f", "2", in_place=True)
        assert box.files.stat("f").mode == 0o751
        box.files.write("f", "3", in_place=True, mode=0o600)
        assert box.files.stat("f").mode == 0o600
        box.files.write("g", "4", in_place=True, mode=0o666)
        assert box.files.stat("g").mode == 0o666

    def test_given_to_another(self, box: Sandbox, capabilities: Capabilities) -> None:
        """By root: what was missing above it, too."""
        needs(capabilities.users, "one user only")
        mine = box.files.stat(".").uid
        box.files.write("/given/deep/in-place", "x", in_place=True, user="root", owner=str(mine))
        box.files.write("/given/replaced", "x", user="root", owner=str(mine))
        box.files.mkdir("/made/deep", user="root", owner=str(mine))
        for path in ("given", "given/deep", "given/deep/in-place", "given/replaced", "made", "made/deep"):
            assert box.files.stat(f"/{path}").uid == mine, path
        box.files.write("/given/roots", "x", user="root", in_place=True)
        assert box.files.stat("/given/roots").uid != mine
        with pytest.raises(PermissionError):
            box.files.write("away", "x", owner="root", in_place=True)

    def test_nobody_is_led_astray(self, box: Sandbox, capabilities: Capabilities) -> None:
        """Root writes for a user what the user may not, but not where the user's links lead."""
        needs(capabilities.users, "one user only")
        mine = str(box.files.stat(".").uid)
        box.files.write("/roots", "precious", user="root", mode=0o600)
        box.files.symlink("link", "/roots")
        with pytest.raises(OSError, match=r"."):
            box.files.write("link", "x", in_place=True, user="root", owner=mine)
        assert box.files.read("/roots", user="root") == b"precious"
        box.files.write("/roots", "new", in_place=True, user="root", owner=mine)  # by its name it may
        assert (box.files.read("/roots", user="root"), box.files.stat("/roots").uid) == (b"new", 0)
        box.files.write("target", "old")
        box.files.symlink("own", "target")
        box.files.write("own", "new", in_place=True, user="root", owner=mine)  # his own links lead where he may go
        assert box.files.read("target") == b"new"

    def test_nobody_is_led_astray_on_the_way(self, box: Sandbox, capabilities: Capabilities) -> None:
        """A user's link in the middle of a path leads himself, but not root who acts for him; root's own does."""
        needs(capabilities.users, "one user only")
        mine = box.files.stat(".").uid
        box.files.write("/roots/conf", "precious", user="root", mode=0o600)
        box.files.chmod("/roots", 0o700, user="root")
        box.files.symlink("link", "/roots")
        box.files.symlink("/way", "roots", user="root")
        for name, in_place in (("conf", True), ("conf", False), ("new", True), ("new", False), ("d/new", True)):
            with pytest.raises(OSError, match=r".") as refused:
                box.files.write(f"link/{name}", "x", in_place=in_place, user="root", owner=str(mine))
            assert refused.value.errno == errno.ELOOP, name
        for parents in (True, False):
            with pytest.raises(OSError, match=r".") as refused:
                box.files.mkdir("link/sub", parents=parents, user="root", owner=str(mine))
            assert refused.value.errno == errno.ELOOP
        assert [info.name for info in box.files.list("/roots", user="root")] == ["conf"]
        assert box.files.read("/roots/conf", user="root") == b"precious"
        box.files.write("/way/new", "x", in_place=True, user="root", owner=str(mine))
        box.files.mkdir("/way/deep/sub", user="root", owner=str(mine))
        box.files.mkdir("/way/one", parents=False, user="root", owner=str(mine))
        for made in ("new", "deep", "deep/sub", "one"):
            assert box.files.stat(f"/roots/{made}", user="root").uid == mine, made
        box.files.mkdir("folder")
        box.files.symlink("own", "folder")
        box.files.write("own/f", "new", in_place=True, user="root", owner=str(mine))
        assert box.files.read("folder/f") == b"new"

    def test_what_is_refused_changes_nothing(self, box: Sandbox, capabilities: Capabilities) -> None:
        needs(capabilities.users, "one user only")
        box.files.write("/tmp/a", "precious", user="root", mode=0o666)
        with pytest.raises(PermissionError):
            box.files.write("/tmp/a", "x", in_place=True, mode=0o600)
        assert box.files.read("/tmp/a") == b"precious"

    def test_follows_links(self, box: Sandbox) -> None:
        box.files.write("sub/target", "old")
        box.files.symlink("link", "sub/target")
        box.files.write("link", "new", in_place=True)
        assert box.files.read("sub/target") == b"new"
        box.files.symlink("dangling", "sub/made")
        box.files.write("dangling", "made", in_place=True)
        assert box.files.read("sub/made") == b"made"

    def test_with_other_flags(self, box: Sandbox) -> None:
        box.files.write("deep/er/f", "1", in_place=True, exclusive=True)
        with pytest.raises(FileExistsError):
            box.files.write("deep/er/f", "2", in_place=True, exclusive=True)
        box.files.write("deep/er/f", "2", in_place=True, append=True)
        assert box.files.read("deep/er/f") == b"12"
        with pytest.raises(IsADirectoryError):
            box.files.write("deep", "x", in_place=True)
        with pytest.raises(FileNotFoundError):
            box.files.write("no/f", "x", in_place=True, parents=False)
        assert box.files.write("/dev/null", "x", in_place=True) == 1

    def test_what_is_made_is_the_users(self, box: Sandbox, capabilities: Capabilities) -> None:
        needs(capabilities.users, "one user only")
        box.run("chmod 777 .")
        box.files.write("new/folder/f", "x", in_place=True, user="root")
        box.files.write("mine/f", "x", in_place=True)
        me = int(box.run("id -u").stdout)
        assert [box.files.stat(path).uid for path in ("new", "new/folder", "new/folder/f")] == [0, 0, 0]
        assert [box.files.stat(path).uid for path in ("mine", "mine/f")] == [me, me]
        box.files.write("mine/f", "y", in_place=True, user="root")
        assert box.files.stat("mine/f").uid == 0
        with pytest.raises(PermissionError):
            box.files.write("mine/f", "z", in_place=True)
        box.files.chmod("mine/f", 0o666, user="root")
        box.files.write("mine/f", "z", in_place=True)
        assert (box.files.read("mine/f"), box.files.stat("mine/f").uid) == (b"z", 0)

    def test_given_up_leaves_what_was_written(self, box: Sandbox) -> None:
        box.files.write("f", "the old content")

        def broken() -> Iterator[bytes]:
            yield b"begun"
            raise RuntimeError("no more")

        with pytest.raises(RuntimeError):
            box.files.write("f", broken(), in_place=True)
        assert b"begun".startswith(box.files.read("f"))  # a RESET may overtake what had not left yet
        with pytest.raises(RuntimeError):
            box.files.write("g", broken())
        assert not box.files.exists("g")


class TestEntries:
    def test_owners_have_names(self, box: Sandbox, capabilities: Capabilities) -> None:
        box.files.write("f", "x")
        assert box.files.stat("f").owner is None
        info = box.files.stat("f", owners=True)
        listed = box.files.list(".", owners=True)[0]
        assert (info.owner, info.group) == (listed.owner, listed.group)
        needs(capabilities.users, "one user only")
        assert info.owner == box.run("id -un").stdout.strip()
        root = box.files.stat("/", owners=True)
        assert (root.owner, root.group) == ("root", "root")
        box.files.chown("f", "4321:8765", user="root")
        info = box.files.stat("f", owners=True)
        assert (info.owner, info.group) == ("4321", "8765")

    def test_links_lead_somewhere(self, box: Sandbox) -> None:
        here = box.files.stat(".", targets=True)
        assert here.leads_to is None
        box.files.write("d/file", "12345", mode=0o640)
        box.files.symlink("d/hop", "file")
        box.files.symlink("link", "d/hop")
        box.files.symlink("folder", "./d")
        box.files.symlink("nowhere", "gone")
        box.files.symlink("loop", "loop")
        file = LinkTarget("file", 5, 0o640, f"{box.workdir}/d/file")
        link = box.files.stat("link", follow=False, targets=True)
        assert (link.type, link.target, link.leads_to) == ("symlink", "d/hop", file)
        assert box.files.stat("link", targets=True).leads_to is None, "that is the file itself"
        assert box.files.stat("link", follow=False).leads_to is None
        found = {info.name: info.leads_to for info in box.files.list(".", recursive=True, targets=True)}
        assert found["link"] == found["d/hop"] == file
        leads = found["folder"]
        assert leads is not None
        assert (leads.type, leads.path) == ("dir", f"{box.workdir}/d")
        assert [found[name] for name in ("nowhere", "loop", "d", "d/file")] == [None] * 4
        deep = {info.name: info.leads_to for info in box.files.list("folder", targets=True)}
        assert deep == {"file": None, "hop": file}

    def test_depth(self, box: Sandbox) -> None:
        box.files.write("a/b/c/d", "x")
        for depth in (1, 2, 3, 4, 9):
            found = [info.name for info in box.files.list(".", recursive=True, depth=depth)]
            assert found == ["a", "a/b", "a/b/c", "a/b/c/d"][:depth]


class TestAttributes:
    def test_set_and_read(self, box: Sandbox) -> None:
        box.files.write("f", "x")
        box.files.mkdir("d")
        for path in ("f", "d"):
            assert box.files.attributes(path) == {}
            _set(box, path, {"user.one": b"1\0\xff", "user.two": "zwölf", "user.three": b"\0"})
            expected = {"user.one": b"1\0\xff", "user.two": "zwölf".encode(), "user.three": b"\0"}
            assert box.files.attributes(path) == expected
            assert box.files.attributes(path, prefix="user.tw") == {"user.two": "zwölf".encode()}
            _set(box, path, {"user.one": None, "user.missing": None})
            assert set(box.files.attributes(path)) == {"user.two", "user.three"}

    def test_without_a_value(self, box: Sandbox) -> None:
        box.files.write("f", "x")
        _set(box, "f", {"user.a": "1"})
        refused = 0
        try:
            box.files.set_attributes("f", {"user.none": b""})
        except FileError as error:
            refused = error.errno or 0
        assert refused in (0, errno.ENOTSUP)
        assert box.files.attributes("f") == {"user.a": b"1"} | ({} if refused else {"user.none": b""})

    def test_replaced_below_a_prefix(self, box: Sandbox) -> None:
        box.files.write("f", "x")
        _set(box, "f", {"user.app.a": "1", "user.app.b": "2", "user.other": "3"})
        _set(box, "f", {"user.app.b": "4", "user.app.c": "5"}, prefix="user.app.", replace=True)
        assert box.files.attributes("f") == {"user.app.b": b"4", "user.app.c": b"5", "user.other": b"3"}
        _set(box, "f", {}, prefix="user.app.", replace=True)
        assert box.files.attributes("f") == {"user.other": b"3"}

    def test_beside_other_facts(self, box: Sandbox) -> None:
        box.files.write("d/f", "x")
        box.files.write("d/plain", "x")
        box.files.mkdir("d/sub")
        box.files.symlink("d/link", "f")
        _set(box, "d/f", {"user.app.a": "1", "user.other": "2"})
        _set(box, "d/sub", {"user.app.a": "3"})
        assert box.files.stat("d/f").attributes == {}
        assert box.files.stat("d/f", attributes="user.app.").attributes == {"user.app.a": b"1"}
        found = {info.name: info.attributes for info in box.files.list("d", attributes="user.app.")}
        assert found == {"f": {"user.app.a": b"1"}, "plain": {}, "link": {}, "sub": {"user.app.a": b"3"}}
        assert {info.name for info in box.files.list(".")} == {"d"}
        assert box.files.stat("/dev/null", attributes="user.").attributes == {}

    def test_of_the_same_file_through_a_link_and_in_a_rename(self, box: Sandbox) -> None:
        box.files.write("f", "x")
        box.files.symlink("link", "f")
        _set(box, "link", {"user.a": "1"})
        box.files.move("f", "g")
        assert box.files.attributes("g") == {"user.a": b"1"}
        box.files.write("g", "y", in_place=True)
        assert box.files.attributes("g") == {"user.a": b"1"}

    def test_errors(self, box: Sandbox, capabilities: Capabilities) -> None:
        box.files.write("f", "x")
        with pytest.raises(FileNotFoundError):
            box.files.attributes("missing")
        with pytest.raises(FileNotFoundError):
            box.files.set_attributes("missing", {"user.a": "1"})
        with pytest.raises(FileError):
            box.files.set_attributes("/dev/null", {"user.a": "1"})
        bad: list[dict[Any, Any]] = [
            {"security.a": "1"}, {"user.": "1"}, {"user." + "n" * 251: "1"}, {"user.a": 7}, {7: "1"},
            {"user.a": b"x" * 61441}, {"user.a\0b": "1"}, {"user.\ud800": "1"}, {"user.a": "\ud800"},
            {"trusted.overlay.opaque": "y"},
        ]  # fmt: skip
        for attributes in bad:
            with pytest.raises(SpecError):
                box.files.set_attributes("f", attributes)
        with pytest.raises(SpecError):
            box.files.set_attributes("f", {"user.b": "1"}, prefix="user.a")
        for prefix in ("", "security.", "user", 7, "user." + "n" * 251):
            with pytest.raises(SpecError):
                box.files.attributes("f", prefix=prefix)  # type: ignore[arg-type]
        needs(capabilities.users, "one user only")
        box.files.chown("f", "0:0", user="root")
        with pytest.raises(PermissionError):
            box.files.set_attributes("f", {"user.a": "1"})
