"""Conformance: files - reading, writing, listing, changing, errors, links."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from ...engines.base import Capabilities
from ...errors import FileError, SpecError
from ...sync import Sandbox
from .support import inner, needs, run_async

DATA = bytes(range(256)) * 3000


class TestFiles:
    def test_write_and_read(self, box: Sandbox) -> None:
        assert box.files.write("a.bin", DATA) == len(DATA)
        assert box.files.read("a.bin") == DATA
        assert box.files.write("a.txt", "grüße") == len("grüße".encode())
        assert box.files.read_text("a.txt") == "grüße"
        assert box.files.read("a.txt") == "grüße".encode()
        assert box.files.write("empty", b"") == 0
        assert box.files.read("empty") == b""

    def test_the_same_files_as_commands_see(self, box: Sandbox) -> None:
        box.files.write("from-api", "api\n")
        assert box.run("cat from-api; echo shell > from-shell").stdout == "api\n"
        assert box.files.read_text("from-shell") == "shell\n"
        assert box.files.read_text(f"{box.workdir}/from-shell") == "shell\n"

    def test_belongs_to_the_user(self, box: Sandbox) -> None:
        box.files.write("mine", "x")
        assert box.run("echo more >> mine").exit_code == 0
        assert str(box.files.stat("mine").uid) == box.run("id -u").stdout.strip()

    def test_parts(self, box: Sandbox) -> None:
        box.files.write("part", DATA)
        assert box.files.read("part", offset=1000, length=70_000) == DATA[1000:71_000]
        assert box.files.read("part", offset=len(DATA) - 3) == DATA[-3:]
        assert box.files.read("part", offset=len(DATA) + 10) == b""
        assert box.files.read("part", length=0) == b""

    def test_streams(self, box: Sandbox) -> None:
        pieces = [DATA[at : at + 50_000] for at in range(0, len(DATA), 50_000)]
        box.files.write("s", iter(pieces))
        assert b"".join(box.files.stream("s")) == DATA

        async def source() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        assert run_async(inner(box).files.write("t", source())) == len(DATA)
        assert box.files.read("t") == DATA

    def test_a_stream_that_is_left(self, box: Sandbox) -> None:
        box.files.write("s", DATA * 4)
        for piece in box.files.stream("s"):
            assert DATA.startswith(piece[:10])
            break
        assert box.files.read("s", length=10) == DATA[:10]

    def test_bounded_read(self, box: Sandbox) -> None:
        box.files.write("big", DATA)
        with pytest.raises(FileError, match="larger than 1000"):
            box.files.read("big", max_bytes=1000)

    def test_replaces_at_once(self, box: Sandbox) -> None:
        box.files.write("f", "old content", mode=0o600)
        process = box.spawn("exec 3<f; echo open; read x; cat <&3", stdin=True)
        for _, piece in process:
            assert piece == "open\n"
            break
        box.files.write("f", "new")
        process.send("\n")
        assert process.wait().stdout == "open\nold content", "who has the old file open still reads the old one"
        assert box.files.read("f") == b"new"
        assert [info.name for info in box.files.list()] == ["f"]

    def test_append_and_exclusive(self, box: Sandbox) -> None:
        box.files.write("log", "a", append=True)
        box.files.write("log", "b", append=True)
        assert box.files.read("log") == b"ab"
        box.files.write("once", "1", exclusive=True)
        with pytest.raises(FileExistsError):
            box.files.write("once", "2", exclusive=True)
        assert box.files.read("once") == b"1"

    def test_a_name_is_free_when_its_file_was_removed(self, box: Sandbox) -> None:
        for _ in range(2):
            box.files.write("again", "1", exclusive=True)
            box.files.mkdir("folder")
            box.files.move("folder", "moved")
            box.files.move("again", "elsewhere")
            assert box.files.read("elsewhere") == b"1"
            box.files.remove("elsewhere")
            box.files.remove("moved")

    def test_modes(self, box: Sandbox) -> None:
        box.files.write("f", "", mode=0o640)
        assert box.files.stat("f").mode == 0o640
        box.files.chmod("f", 0o751)
        assert box.run("stat -c %a f").stdout == "751\n"
        box.files.mkdir("d", mode=0o700)
        assert box.files.stat("d").mode == 0o700

    def test_parents(self, box: Sandbox) -> None:
        box.files.write("deep/er/file", "x")
        assert box.files.read("deep/er/file") == b"x"
        with pytest.raises(FileNotFoundError):
            box.files.write("other/file", "x", parents=False)
        box.files.mkdir("p/q/r")
        box.files.mkdir("p/q/r")
        with pytest.raises(FileNotFoundError):
            box.files.mkdir("no/parents", parents=False)
        with pytest.raises(FileExistsError):
            box.files.mkdir("p", parents=False)

    def test_list_and_stat(self, box: Sandbox) -> None:
        box.files.write("tree/b.txt", "12345")
        box.files.write("tree/a/c.txt", "1")
        box.files.symlink("tree/link", "b.txt")
        types = {info.name: info.type for info in box.files.list("tree")}
        assert types == {"a": "dir", "b.txt": "file", "link": "symlink"}
        names = [info.name for info in box.files.list("tree", recursive=True)]
        assert names == ["a", "a/c.txt", "b.txt", "link"]
        assert [info.name for info in box.files.list("tree", recursive=True, depth=1)] == ["a", "b.txt", "link"]
        info = box.files.stat("tree/b.txt")
        assert (info.name, info.type, info.size, info.is_file, info.is_dir) == ("b.txt", "file", 5, True, False)
        assert abs(info.modified - time.time()) < 3600
        assert box.files.stat("tree").is_dir
        assert box.files.list("tree/a/..")
        assert box.files.exists("tree/b.txt")
        assert not box.files.exists("tree/none")
        assert not box.files.exists("tree/b.txt/none")

    def test_many_entries(self, box: Sandbox) -> None:
        box.run("mkdir many; i=0; while [ $i -lt 3000 ]; do echo > many/file-number-$i; i=$((i+1)); done", check=True)
        assert len(box.files.list("many")) == 3000

    def test_odd_names(self, box: Sandbox) -> None:
        names = ["new\nline", "esc\x1b[31m", " blank ", "-rf", "*", "ünï", "quote'\"", "\udcff\udcfe", "a" * 255, "..."]
        for name in names:
            box.files.write(f"odd/{name}", name.encode("utf-8", "surrogateescape"))
        assert sorted(info.name for info in box.files.list("odd")) == sorted(names)
        for name in names:
            assert box.files.read(f"odd/{name}") == name.encode("utf-8", "surrogateescape")

    def test_remove_and_move(self, box: Sandbox) -> None:
        box.files.write("d/e/f", "x")
        box.files.remove("d/e/f")
        with pytest.raises(FileNotFoundError):
            box.files.remove("d/e/f")
        box.files.remove("d/e/f", missing_ok=True)
        box.files.write("d/e/f", "x")
        with pytest.raises(OSError, match=r".") as caught:
            box.files.remove("d")
        assert isinstance(caught.value, FileExistsError)
        box.files.remove("d", recursive=True)
        assert not box.files.exists("d")
        box.files.write("one", "1")
        box.files.write("two", "2")
        with pytest.raises(FileExistsError):
            box.files.move("one", "two")
        box.files.move("one", "two", replace=True)
        assert (box.files.read("two"), box.files.exists("one")) == (b"1", False)
        box.files.mkdir("into")
        box.files.move("two", "into/three")
        assert box.files.read("into/three") == b"1"

    def test_owners(self, box: Sandbox, capabilities: Capabilities) -> None:
        needs(capabilities.users, "one user only")
        box.files.write("mine", "x", mode=0o600)
        box.files.chown("mine", "4321:8765", user="root")
        info = box.files.stat("mine")
        assert (info.uid, info.gid) == (4321, 8765)
        with pytest.raises(PermissionError):
            box.files.read("mine")
        assert box.files.read("mine", user="root") == b"x"
        with pytest.raises(PermissionError):
            box.files.chown("mine", "agent")
        with pytest.raises((OSError, LookupError)):
            box.files.chown("mine", "nobody-here", user="root")


class TestFileErrors:
    @pytest.mark.parametrize(
        ("call", "kind"),
        [
            (lambda f: f.read("missing"), FileNotFoundError),
            (lambda f: f.stat("missing"), FileNotFoundError),
            (lambda f: f.list("missing"), FileNotFoundError),
            (lambda f: f.chmod("missing", 0o600), FileNotFoundError),
            (lambda f: f.move("missing", "x"), FileNotFoundError),
            (lambda f: list(f.watch("missing")), FileNotFoundError),
            (lambda f: f.read("dir"), IsADirectoryError),
            (lambda f: f.write("dir", "x"), IsADirectoryError),
            (lambda f: f.write("dir/", "x"), OSError),
            (lambda f: f.list("file"), NotADirectoryError),
            (lambda f: f.read("file/x"), NotADirectoryError),
            (lambda f: f.read("file/"), OSError),
            (lambda f: f.write("file/x", "x"), OSError),
            (lambda f: f.mkdir("file"), FileExistsError),
            (lambda f: f.mkdir("file/x"), OSError),
            (lambda f: f.symlink("file", "x"), FileExistsError),
            (lambda f: f.write("n" * 256, "x"), OSError),
            (lambda f: f.read("loop"), OSError),
            (lambda f: f.read("a/" * 2100), (OSError, SpecError)),
            (lambda f: f.write("/proc/version", "x"), OSError),
            (lambda f: f.move("dir", "dir/inside"), OSError),
            (lambda f: f.remove("/"), OSError),
        ],
    )
    def test_are_builtin_classes(self, box: Sandbox, call: Callable[[Any], Any], kind: type[BaseException]) -> None:
        box.files.mkdir("dir")
        box.files.write("file", "kept")
        box.files.symlink("loop", "loop")
        with pytest.raises(kind) as caught:
            call(box.files)
        assert isinstance(caught.value, (FileError, SpecError))
        assert str(caught.value)
        assert box.files.read("file") == b"kept"

    def test_permission(self, box: Sandbox, capabilities: Capabilities) -> None:
        needs(capabilities.users, "one user only")
        box.files.write("secret", "x", mode=0o600)
        box.files.chown("secret", "0:0", user="root")
        with pytest.raises(PermissionError):
            box.files.read("secret")
        with pytest.raises(PermissionError):
            box.files.write("/root/x" if box.files.exists("/root") else "/x", "x", parents=False)

    @pytest.mark.parametrize("path", ["", "nul\0", 7, None, b"bytes", "x" * 5000])
    def test_nonsense_paths(self, box: Sandbox, path: Any) -> None:
        for call in (box.files.read, box.files.stat, box.files.list, box.files.remove, box.files.mkdir):
            with pytest.raises(SpecError):
                call(path)
        with pytest.raises(SpecError):
            box.files.write(path, "x")

    @pytest.mark.parametrize("number", [-1, True, 1.5, "1", 2**70])
    def test_nonsense_numbers(self, box: Sandbox, number: Any) -> None:
        box.files.write("f", "x")
        with pytest.raises(SpecError):
            box.files.read("f", offset=number)
        with pytest.raises(SpecError):
            box.files.chmod("f", number)

    def test_devices(self, box: Sandbox) -> None:
        assert box.files.stat("/dev/null").type == "other"
        for path in ("/dev/null", "/dev/zero", "/dev/tty"):  # they may never end, or never begin
            with pytest.raises(FileError):
                box.files.read(path)
        assert box.files.write("/dev/null", DATA) == len(DATA)


class TestLinks:
    def test_are_shown(self, box: Sandbox) -> None:
        box.files.write("target", "content")
        box.files.symlink("link", "target")
        assert box.files.read("link") == b"content"
        link = box.files.stat("link", follow=False)
        assert (link.type, link.target) == ("symlink", "target")
        assert box.files.stat("link").type == "file"
        box.files.symlink("dangling", "nowhere")
        assert box.files.exists("dangling")
        with pytest.raises(FileNotFoundError):
            box.files.read("dangling")

    def test_writing_goes_to_the_target(self, box: Sandbox) -> None:
        box.files.write("sub/target", "old")
        box.files.symlink("link", "sub/target")
        box.files.write("link", "new")
        assert box.files.read("sub/target") == b"new"
        assert box.files.stat("link", follow=False).type == "symlink"

    def test_removing_takes_the_link_only(self, box: Sandbox) -> None:
        box.files.write("keep/file", "x")
        box.files.symlink("link", "keep")
        box.files.remove("link", recursive=True)
        assert box.files.read("keep/file") == b"x"
        box.files.mkdir("tree")
        box.files.symlink("tree/up", "../keep")
        box.files.remove("tree", recursive=True)
        assert box.files.read("keep/file") == b"x"

    def test_listing_does_not_follow(self, box: Sandbox) -> None:
        box.files.write("top/file", "x")
        box.files.symlink("top/self", ".")
        assert [info.name for info in box.files.list("top", recursive=True)] == ["file", "self"]

    def test_inside_only(self, box: Sandbox, capabilities: Capabilities) -> None:
        needs(capabilities.private_filesystem, "no filesystem of its own")
        here = os.path.realpath(__file__)
        with pytest.raises(FileNotFoundError):
            box.files.read(here if here.startswith(("/home", "/root", "/work", "/tmp")) else "/no" + here)
        for path in ("../../../../../../" + box.workdir + "/x", "/proc/self/root" + box.workdir + "/x"):
            with pytest.raises(OSError, match=r"."):
                box.files.read(path)
