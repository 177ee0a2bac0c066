"""Conformance: upload() and download()."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ...errors import FileError, SpecError
from ...results import Progress
from ...sync import Sandbox

DATA = os.urandom(300_000)


def _tree(root: Path) -> dict[str, tuple[int, bytes | str]]:
    """Everything below a host's directory: mode and content."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = (0, os.readlink(path))
        elif path.is_file():
            found[name] = (path.stat().st_mode & 0o7777, path.read_bytes())
        else:
            found[name] = (path.stat().st_mode & 0o7777, "")
    return found


class TestUpload:
    def test_file(self, box: Sandbox, tmp_path: Path) -> None:
        source = tmp_path / "a.bin"
        source.write_bytes(DATA)
        source.chmod(0o4751)
        progress = box.upload(source, "renamed.bin")
        assert (progress.files, progress.bytes, progress.total_files) == (1, len(DATA), 1)
        assert box.files.read("renamed.bin") == DATA
        assert box.files.stat("renamed.bin").mode == 0o751, "permission bits are kept, setuid is not"
        box.upload(str(source))
        assert box.files.stat("a.bin").size == len(DATA)
        box.files.mkdir("dir")
        box.upload(source, "dir")
        assert box.files.read("dir/a.bin") == DATA

    def test_tree_there_and_back(self, box: Sandbox, tmp_path: Path) -> None:
        source = tmp_path / "src"
        (source / "sub" / "deep").mkdir(parents=True)
        (source / "empty").mkdir()
        (source / "sub" / "f.txt").write_text("text")
        (source / "sub" / "deep" / "run.sh").write_text("#!/bin/sh\n")
        (source / "sub" / "deep" / "run.sh").chmod(0o755)
        (source / "new\nline \x1b[1m").write_bytes(DATA)
        (source / "link").symlink_to("sub/f.txt")
        (source / "sub" / "up").symlink_to("../link")
        for number in range(40):
            (source / "sub" / f"{number}").write_bytes(DATA[: number * 1000])
        seen: list[Progress] = []
        progress = box.upload(source, "dst", on_progress=seen.append)
        assert progress.files == progress.total_files == 43
        assert progress.bytes == progress.total_bytes
        assert [item.files for item in seen] == sorted(item.files for item in seen)
        assert seen[-1].files == 43
        back = tmp_path / "back"
        result = box.download("dst", back)
        assert (result.files, result.skipped) == (43, ())
        assert _tree(back) == _tree(source)

    def test_again_over_itself(self, box: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / "f").write_text("one")
        (tmp_path / "s" / "l").symlink_to("f")
        box.upload(tmp_path / "s", "t")
        (tmp_path / "s" / "f").write_text("two")
        box.upload(tmp_path / "s", "t")
        assert box.files.read_text("t/f") == "two"

    @pytest.mark.parametrize("text", ["/etc/passwd", "../outside", "sub/../../outside", "."])
    def test_links_that_lead_out(self, box: Sandbox, tmp_path: Path, text: str) -> None:
        source = tmp_path / "src"
        source.mkdir()
        (source / "fine").write_text("x")
        (source / "bad").symlink_to(text)
        if text == ".":
            box.upload(source, "dst")
            assert box.files.stat("dst/bad", follow=False).target == "."
            return
        with pytest.raises(FileError, match="bad"):
            box.upload(source, "dst")
        assert not box.files.exists("dst"), "nothing was copied"

    def test_special_files_are_left_out(self, box: Sandbox, tmp_path: Path) -> None:
        source = tmp_path / "src"
        source.mkdir()
        os.mkfifo(source / "pipe")
        (source / "file").write_text("x")
        progress = box.upload(source, "dst")
        assert (progress.files, progress.skipped) == (1, ("pipe",))
        with pytest.raises(FileError):
            box.upload(source / "pipe", "p")

    def test_errors(self, box: Sandbox, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="this machine"):
            box.upload(tmp_path / "missing")
        (tmp_path / "f").write_text("x")
        box.files.mkdir("d/f")
        with pytest.raises(IsADirectoryError):
            box.upload(tmp_path, "d")
        with pytest.raises(SpecError):
            box.upload("nul\0")


class TestDownload:
    def test_file(self, box: Sandbox, tmp_path: Path) -> None:
        box.files.write("a.bin", DATA, mode=0o640)
        seen: list[Progress] = []
        box.download("a.bin", tmp_path / "b.bin", on_progress=seen.append)
        assert (tmp_path / "b.bin").read_bytes() == DATA
        assert (tmp_path / "b.bin").stat().st_mode & 0o7777 == 0o640
        box.download("a.bin", tmp_path)
        assert (tmp_path / "a.bin").read_bytes() == DATA
        assert (seen[-1].files, seen[-1].bytes) == (1, len(DATA))

    def test_setuid_is_dropped(self, box: Sandbox, tmp_path: Path) -> None:
        box.files.write("tree/suid", "x", mode=0o755)
        if not box.run("chmod 4755 tree/suid").ok:
            pytest.skip("capability: the sandbox refuses to set the bit")
        box.download("tree", tmp_path / "t")
        assert (tmp_path / "t" / "suid").stat().st_mode & 0o7777 == 0o755

    def test_links_that_lead_out_are_left_out(self, box: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "canary").write_text("safe")
        box.files.write("tree/sub/f", "x")
        for name, text in {
            "absolute": "/etc/passwd", "up": "../canary", "sneaky": "sub/../../canary", "self": ".", "good": "sub/f",
            "sub/back": "..", "sub/far": "../../canary",
        }.items():  # fmt: skip
            box.files.symlink(f"tree/{name}", text)
        result = box.download("tree", tmp_path / "out")
        assert set(result.skipped) == {"absolute", "up", "sneaky", "sub/far"}
        assert {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_symlink()} == {
            "self", "good", "sub/back",
        }  # fmt: skip
        assert (tmp_path / "canary").read_text() == "safe"

    def test_never_through_a_link_of_the_host(self, box: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "precious").mkdir()
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "sub").symlink_to(tmp_path / "precious")
        box.files.write("tree/sub/f", "evil")
        with pytest.raises(NotADirectoryError):
            box.download("tree", tmp_path / "out")
        assert list((tmp_path / "precious").iterdir()) == []
        (tmp_path / "file-link").symlink_to(tmp_path / "elsewhere")
        box.download("tree/sub/f", tmp_path / "file-link")
        assert not (tmp_path / "elsewhere").exists()

    def test_nothing_becomes_of_another_kind(self, box: Sandbox, tmp_path: Path) -> None:
        out = tmp_path / "out"
        (out / "a").mkdir(parents=True)
        (out / "b").write_text("mine")
        box.files.write("one/a", "file over directory")
        box.files.write("two/b/c", "directory over file")
        with pytest.raises(IsADirectoryError, match="'a'"):
            box.download("one", out)
        with pytest.raises(NotADirectoryError, match="'b'"):
            box.download("two", out)
        assert (out / "b").read_text() == "mine"
        assert sorted(os.listdir(out)) == ["a", "b"], "nothing half is left"

    def test_odd_names(self, box: Sandbox, tmp_path: Path) -> None:
        names = ["new\nline", "esc\x1b[2J", "..x", "x..", " ", "Case", "case", "\udcff"]
        for name in names:
            box.files.write(f"odd/{name}", name.encode("utf-8", "surrogateescape"))
        box.download("odd", tmp_path / "o")
        assert sorted(os.listdir(tmp_path / "o")) == sorted(names)

    def test_errors(self, box: Sandbox, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            box.download("missing", tmp_path)
        with pytest.raises(FileError):
            box.download("/dev/zero", tmp_path / "zero")
        box.files.write("f", "x")
        with pytest.raises(FileNotFoundError, match="this machine"):
            box.download("f", tmp_path / "no" / "such" / "place")
        assert list(tmp_path.iterdir()) == []

    def test_special_files_are_left_out(self, box: Sandbox, tmp_path: Path) -> None:
        box.files.write("tree/f", "x")
        if not box.run("command -v mkfifo && mkfifo tree/pipe").ok:
            pytest.skip("capability: the image has no mkfifo")
        result = box.download("tree", tmp_path / "t")
        assert (result.files, result.skipped) == (1, ("pipe",))

    def test_a_failing_callback_leaves_no_half_file(self, box: Sandbox, tmp_path: Path) -> None:
        box.files.write("big", DATA * 10)

        def fail(progress: Progress) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError):
            box.download("big", tmp_path / "big", on_progress=fail)
        assert list(tmp_path.iterdir()) == []
