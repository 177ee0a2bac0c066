"""Diff and apply on real sandboxes: what commands do to files is told exactly, and comes to the host as it is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sloplet import Sandbox
from sloplet.controller import Change
from sloplet.engines import registry

Shape = tuple[str, str, tuple[str, ...]]


def made(engine: str, **settings: Any) -> Iterator[Sandbox]:
    box = Sandbox(engine=engine, **settings)
    with box:
        yield box


@pytest.fixture
def box(engine: str) -> Iterator[Sandbox]:
    yield from made(engine)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root filesystem without any program: what is done in it is done by file operations."""
    root = tmp_path / "image"
    for name in ("bin", "data/sub/deep", "etc", "swap", "tree/one"):
        (root / name).mkdir(parents=True)
    files = {
        "data/text": "one\ntwo\nthree\n", "data/end": "no newline", "data/same": "same\n", "data/gone": "gone\n",
        "data/sub/deep/file": "deep\n", "swap/old": "old\n", "tree/one/f": "f\n", "data/mode": "mode\n",
    }  # fmt: skip
    for name, text in files.items():
        (root / name).write_text(text)
        (root / name).chmod(0o644)
    (root / "data/link").symlink_to("text")
    (root / "data/binary").write_bytes(bytes(range(256)))
    for path in (tmp_path.parent, tmp_path, root, *root.rglob("*")):
        if path.is_dir() and path.owner() and os.stat(path).st_uid == os.geteuid():
            path.chmod(0o755)
    return root


@pytest.fixture
def rooted(engine: str, image: Path) -> Iterator[Sandbox]:
    yield from made(engine, image=f"dir:{image}")


def as_root(box: Sandbox) -> dict[str, Any]:
    """Who may change an image's own files: root inside, or the one user that there is."""
    return {"user": "0"} if registry.load(box.info().engine).probe().capabilities.users else {}


def diff(box: Sandbox, **options: Any) -> dict[str, Change]:
    found = box.diff(**options).changes
    assert [change.path for change in found] == sorted(change.path for change in found)
    return {change.path: change for change in found}


def shapes(found: dict[str, Change]) -> dict[str, Shape]:
    return {path: (item.kind, item.type, item.what or item.below) for path, item in found.items()}


def test_a_fresh_sandbox_has_no_changes(box: Sandbox, rooted: Sandbox) -> None:
    assert diff(box) == {}
    assert diff(rooted) == {}
    box.run("true")
    assert diff(box) == {}


def test_what_commands_do_is_told(box: Sandbox) -> None:
    box.run(
        "mkdir -p src/deep && printf 'x\\0y' > src/deep/bin && echo hi > a.txt && : > empty && ln -s a.txt link &&"
        " mkfifo pipe && ln a.txt hard && printf 'no end' > 'with space' && echo ü > ünïcode &&"
        " echo 1 > \"$(printf 'odd\\377name')\"",
        check=True,
    )
    found = diff(box)
    here = {path.removeprefix("/workspace/"): shape for path, shape in shapes(found).items()}
    assert here == {
        "a.txt": ("added", "file", ()), "empty": ("added", "file", ()), "hard": ("added", "file", ()),
        "link": ("added", "symlink", ()), "odd\udcffname": ("added", "file", ()), "pipe": ("added", "other", ()),
        "src": ("added", "dir", ()), "src/deep": ("added", "dir", ()), "src/deep/bin": ("added", "file", ()),
        "with space": ("added", "file", ()), "ünïcode": ("added", "file", ()),
    }  # fmt: skip
    assert found["/workspace/src/deep/bin"].binary
    assert found["/workspace/empty"].text == ""
    assert found["/workspace/hard"].text == "--- /dev/null\n+++ b/workspace/hard\n@@ -0,0 +1 @@\n+hi\n"
    assert str(found["/workspace/with space"].text).endswith("+no end\n\\ No newline at end of file\n")
    box.run("rm -rf src a.txt empty hard link odd* pipe 'with space' ünï*", check=True)
    assert diff(box) == {}


def test_what_is_done_to_the_runtimes_own_files_is_told(box: Sandbox) -> None:
    box.run("echo bob:x:1001:1001::/: >> /etc/passwd && rm /etc/nsswitch.conf", check=True, **as_root(box))
    found = diff(box)
    assert shapes(found) == {
        "/etc/nsswitch.conf": ("removed", "file", ()),
        "/etc/passwd": ("changed", "file", ("content",)),
    }
    lines = str(found["/etc/passwd"].text).splitlines()
    assert [line for line in lines if line[0] == "+"][1:] == ["+bob:x:1001:1001::/:"]


def test_what_is_done_to_the_hosts_programs_is_told_and_was_done_to_none_of_them(box: Sandbox) -> None:
    if not box.run("test -w /usr/bin", **as_root(box)).ok:
        pytest.skip("the host's programs cannot be written in here: no ids are mapped")
    before = os.stat("/usr/bin/env")
    box.run(
        "mv /usr/bin/env /usr/bin/env2 && echo '#!/bin/sh' > /usr/bin/tool && chmod 755 /usr/bin/tool",
        check=True,
        **as_root(box),
    )
    found = diff(box)
    assert shapes(found) == {
        "/usr/bin/env": ("removed", "file", ()),
        "/usr/bin/env2": ("added", "file", ()),
        "/usr/bin/tool": ("added", "file", ()),
    }
    assert found["/usr/bin/env2"].size == before.st_size
    assert os.stat("/usr/bin/env") == before


def test_what_is_done_to_an_image_is_told(rooted: Sandbox, image: Path) -> None:
    files, root = rooted.files, as_root(rooted)
    files.write("/data/text", "one\n2\nthree\n", **root)
    files.write("/data/end", "no newline\n", **root)
    files.write("/data/same", "same\n", **root)
    files.write("/data/binary", bytes(reversed(range(256))), **root)
    files.chmod("/data/mode", 0o600, **root)
    files.remove("/data/gone", **root)
    files.remove("/data/sub", recursive=True, **root)
    files.remove("/swap", recursive=True, **root)
    files.mkdir("/swap", **root)
    files.write("/swap/new", "new\n", **root)
    files.remove("/data/link", **root)
    files.symlink("/data/link", "end", **root)
    files.remove("/tree", recursive=True, **root)
    files.write("/tree", "now a file\n", **root)
    found = diff(rooted)
    assert shapes(found) == {
        "/data/binary": ("changed", "file", ("content",)),
        "/data/end": ("changed", "file", ("content",)),
        "/data/gone": ("removed", "file", ()),
        "/data/link": ("changed", "symlink", ("target",)),
        "/data/mode": ("changed", "file", ("mode",)),
        "/data/sub": ("removed", "dir", ("deep", "deep/file")),
        "/data/text": ("changed", "file", ("content",)),
        "/swap/new": ("added", "file", ()),
        "/swap/old": ("removed", "file", ()),
        "/tree": ("changed", "file", ("type",)),
    }
    assert found["/data/text"].text == ("--- a/data/text\n+++ b/data/text\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n")
    assert found["/data/end"].text == (
        "--- a/data/end\n+++ b/data/end\n@@ -1 +1 @@\n-no newline\n\\ No newline at end of file\n+no newline\n"
    )
    assert found["/data/binary"].binary
    assert (image / "data/text").read_text() == "one\ntwo\nthree\n"


def test_a_file_that_only_root_may_read_is_read(rooted: Sandbox) -> None:
    if not as_root(rooted):
        pytest.skip("there is one user only")
    rooted.files.write("/secret", "for root\n", mode=0o600, **as_root(rooted))
    with pytest.raises(PermissionError):
        rooted.files.read("/secret")
    assert "+for root\n" in str(diff(rooted)["/secret"].text)


def test_a_diff_against_a_snapshot(box: Sandbox) -> None:
    box.run(
        "echo old > edited && echo same > kept && echo x > gone && truncate -s 1M sparse && echo tail >> sparse &&"
        " ln kept linked && mkdir d && echo y > d/f",
        check=True,
    )
    snapshot = box.snapshot("base")
    found = box.diff("base")
    assert (found.against, found.changes) == (snapshot.id, ())
    box.run("echo new > edited && rm -r gone d && cp sparse s2 && mv s2 sparse && chmod 700 kept", check=True)
    since = diff(box, against="base")
    assert shapes(since) == {
        "/workspace/d": ("removed", "dir", ("f",)),
        "/workspace/edited": ("changed", "file", ("content",)),
        "/workspace/gone": ("removed", "file", ()),
        "/workspace/kept": ("changed", "file", ("mode",)),
        "/workspace/linked": ("changed", "file", ("mode",)),
    }
    assert str(since["/workspace/edited"].text).endswith("-old\n+new\n")
    assert {change.kind for change in box.diff().changes} == {"added"}


@pytest.mark.parametrize("engine", ["container"], indirect=True)
def test_an_agents_work_comes_back_into_a_repository(box: Sandbox, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    (repo / "docs").mkdir(parents=True)
    (repo / "main.py").write_text("print(1)\n")
    (repo / "docs/old.md").write_text("old\n")
    (repo / "docs/new.md").write_text("untracked\n")
    (repo / "README").write_text("readme\n")
    box.upload(repo / "main.py", "/workspace/main.py")
    box.run("mkdir docs && echo old > docs/old.md && echo readme > README", check=True)
    box.snapshot("base")
    box.run(
        "echo 'print(2)' > main.py && mkdir -p pkg/sub && echo '#!/bin/sh' > pkg/sub/run && chmod 4755 pkg/sub/run &&"
        " ln -s sub/run pkg/latest && ln -s /etc/passwd pkg/out && rm -r docs README && mkfifo pkg/pipe",
        check=True,
    )
    done = box.apply("/workspace", to=repo, against="base", delete=True)
    assert done.written == ("main.py", "pkg", "pkg/latest", "pkg/sub", "pkg/sub/run")
    assert done.removed == ("README",)
    assert [path for path, _ in done.skipped] == ["docs", "pkg/out", "pkg/pipe"]
    assert (repo / "main.py").read_text() == "print(2)\n"
    assert stat.S_IMODE((repo / "pkg/sub/run").stat().st_mode) == 0o755
    assert (repo / "pkg/latest").read_text() == "#!/bin/sh\n"
    assert sorted(os.listdir(repo / "docs")) == ["new.md"]
    assert box.apply("/workspace", to=repo, against="base").written == ()
