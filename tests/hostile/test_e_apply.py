"""A sandbox's files come to the host by ``apply`` without bringing anything else: no way out of the folder, no
rights, nothing special, no more than was announced. Each attack has a harmless twin that must arrive."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_kit import Target

from sloplet import Sandbox
from sloplet.changes import apply as module
from sloplet.changes.apply import Applied, apply
from sloplet.controller import Diff
from sloplet.errors import FileError
from sloplet.portal import portal


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A target with canaries beside it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_text("safe")
    yield tmp_path / "target"
    assert os.listdir(outside) == ["canary"]
    assert (outside / "canary").read_text() == "safe"
    assert set(os.listdir(tmp_path)) <= {"outside", "target"}


def bring(box: Sandbox, diff: Diff, to: Path, **options: Any) -> Applied:
    return portal().call(apply(box._inner.files, diff, [box.workdir], to, **options))


def skipped(done: Applied) -> set[str]:
    return {path for path, _ in done.skipped}


def test_apply_links_cannot_lead_out(box: Sandbox, place: Path) -> None:
    box.run(
        "ln -s /etc/passwd absolute; ln -s ../outside up; ln -s .. parent; mkdir -p a/b;"
        " ln -s ../../../outside/canary a/b/deep; ln -s b/../../../outside a/twisted; ln -s / a/root;"
        " echo good > file; ln -s file near; ln -s ../../file a/b/far",
        check=True,
    )
    done = bring(box, box.diff(text=False), place)
    assert skipped(done) == {"absolute", "up", "parent", "a/b/deep", "a/twisted", "a/root"}
    assert (place / "near").read_text() == (place / "a/b/far").read_text() == "good\n"
    assert [path for path in place.rglob("*") if not path.resolve().is_relative_to(place.resolve())] == []


def test_apply_links_of_the_target_lead_nowhere(box: Sandbox, place: Path) -> None:
    place.mkdir()
    (place / "folder").symlink_to("../outside")
    (place / "canary").symlink_to("../outside/canary")
    box.run("mkdir folder && echo evil > folder/canary && echo evil > folder/new && echo evil > canary", check=True)
    done = bring(box, box.diff(text=False), place)
    assert skipped(done) == {"folder", "folder/canary", "folder/new"}
    assert (place / "canary").read_text() == "evil\n"
    assert not (place / "canary").is_symlink()


def test_apply_no_rights_and_nothing_special_comes_along(target: Target, box: Sandbox, place: Path) -> None:
    made = "mkdir d && echo x > d/plain && echo x > d/su && mkfifo d/pipe && chmod 6777 d/su && chmod 3777 d"
    if not box.run(made).ok:  # where modes cannot be set by name there is nothing to keep
        pytest.skip(f"{target.label} lets nobody change modes")
    done = bring(box, box.diff(text=False), place)
    assert skipped(done) == {"d/pipe"}
    for path in place.rglob("*"):
        assert stat.S_IMODE(path.lstat().st_mode) & 0o7000 == 0, path
    assert (place / "d/su").lstat().st_uid == os.geteuid()
    assert (place / "d/plain").read_text() == "x\n"


def test_apply_odd_names_arrive_as_they_are(box: Sandbox, place: Path) -> None:
    names = ["...", "-rf", "a\\b", "new\nline", "\x1b[31m", "x" * 255, "ü", "bad\udcff", "~", "$(id)"]
    for name in names:
        box.files.write(f"odd/{name}", "x")
    bring(box, box.diff(text=False), place)
    assert sorted(os.listdir(place / "odd")) == sorted(names)


def test_apply_more_than_was_announced_does_not_come(
    box: Sandbox, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROWTH", 100_000)
    box.run("echo small > grows; echo small > stays; truncate -s 100M huge", check=True)
    found = box.diff(text=False)
    box.run("head -c 300000 /dev/zero >> grows", check=True)
    with pytest.raises(FileError, match="larger than"):
        bring(box, found, place, max_bytes=2_000_000)
    without = Diff("image", tuple(change for change in found.changes if not change.path.endswith("huge")))
    done = bring(box, without, place)
    assert skipped(done) == {"grows"}
    assert os.listdir(place) == ["stays"]


SWAPS = """
echo good > f
while :; do
    ln -sf /etc/passwd l && mv -f l f
    rm -f f; mkdir f && rmdir f
    echo good > t && mv -f t f
    mv d e; ln -s / d; rm d; mv e d
done
"""


def test_apply_files_that_are_swapped_meanwhile(box: Sandbox, place: Path) -> None:
    box.run("mkdir d && echo good > d/f && echo good > f && echo good > calm", check=True)
    found = box.diff(text=False)
    attacker = box.spawn(["sh", "-c", SWAPS])
    passwd = box.run("cat /etc/passwd").stdout_raw
    seen, noticed = set(), 0
    for number in range(300):
        to = place / str(number)
        done = bring(box, found, to)
        assert (to / "calm").read_text() == "good\n"
        for path in to.rglob("*"):
            info = path.lstat()
            assert stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode), path
            if path.name == "f":
                seen.add(path.read_bytes())
        noticed += bool(done.skipped) or passwd in seen
        if noticed >= 5:
            break
    attacker.kill()
    assert noticed >= 5, "nothing was swapped at the right moment: this has shown nothing"
    assert seen <= {b"good\n", passwd, b""}
