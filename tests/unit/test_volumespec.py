"""What can be asked for of volumes, and what is refused before anything is made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sloplet import Volume
from sloplet.cli.options import volumes as from_options
from sloplet.errors import InvalidName, SpecError
from sloplet.spec import SandboxSpec
from sloplet.volumespec import VolumeSpec, check_path, check_volumes, left_behind, parse_volume

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize(
    ("asked", "source", "mode", "shared"),
    [
        ("cache", "cache", "rw", False),
        (Volume("cache"), "cache", "rw", False),
        (Volume("cache", read_only=True), "cache", "ro", False),
        (Volume("cache", shared=True), "cache", "rw", True),
        (Volume("cache", shared=True, mode="ro"), "cache", "ro", True),
        ("./repo", "{cwd}/repo", "ro", False),
        ("repo/", "{cwd}/repo", "ro", False),
        (".", "{cwd}", "ro", False),
        ("a.b", "{cwd}/a.b", "ro", False),
        ("~", "{home}", "ro", False),
        ("~/x", "{home}/x", "ro", False),
        ("/srv/data", "/srv/data", "ro", False),
        (Path("repo"), "{cwd}/repo", "ro", False),
        (Volume("./repo", mode="rw"), "{cwd}/repo", "rw", False),
        (Volume("./repo", read_only=False), "{cwd}/repo", "rw", False),
        (Volume(Path("/srv"), mode="copy"), "/srv", "copy", False),
    ],
)
def test_a_word_is_a_name_and_the_rest_are_folders(asked: object, source: str, mode: str, shared: bool) -> None:
    (found,) = check_volumes({"/x": asked})
    expected = source.format(cwd=os.getcwd(), home=os.path.expanduser("~"))
    assert found == VolumeSpec("/x", expected, mode, shared)
    assert found.named == (not expected.startswith("/"))


@pytest.mark.parametrize("path", ["/", "/proc", "/proc/x", "/sys", "/dev", "/dev/shm", "/etc", "/etc/", "/run", "//"])
def test_what_the_sandbox_needs_itself_is_no_place(path: str) -> None:
    with pytest.raises(SpecError, match="the sandbox itself needs it"):
        check_path(path)


@pytest.mark.parametrize("path", ["data", "", "/a/../b", "/a\n", "/a\0b", "/" + "x" * 5000, 7, None, "../x"])
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(SpecError, match="not a path for a volume"):
        check_path(path)


def test_paths_are_made_normal_and_outer_ones_come_first() -> None:
    found = check_volumes({"/b/c/": "two", "/b-x": "four", "/b": Volume("one"), "//a//./z": "three"})
    assert [(one.path, one.source) for one in found] == [
        ("/a/z", "three"), ("/b", "one"), ("/b/c", "two"), ("/b-x", "four")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("volumes", "words"),
    [
        ({"/a": "one", "/a/": "two"}, "two volumes would be at /a"),
        ({"/a": "one", "/b": "one"}, "asked for twice"),
        ({"/a": Volume("./x", mode="copy"), "/a/b": "one"}, "lie in one another"),
        ({"/a": "one", "/a/b": Volume("./x", mode="copy")}, "lie in one another"),
        ({f"/v{n}": f"v{n}" for n in range(17)}, "too many"),
        ([("/a", "b")], "not a mapping"),
        ("cache", "not a mapping"),
        ({"/a": 7}, "not what a volume can be of"),
        ({"/a": ""}, "not what a volume can be of"),
        ({"/a": "x\0y/"}, "not what a volume can be of"),
    ],
)
def test_what_makes_no_sense_together(volumes: object, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        check_volumes(volumes)


def test_one_volume_may_be_at_two_places_if_it_is_shared() -> None:
    assert len(check_volumes({"/a": Volume("one", shared=True), "/b": Volume("one", read_only=True)})) == 2
    with pytest.raises(SpecError, match="asked for twice"):
        check_volumes({"/a": "one", "/b": Volume("one", read_only=True)})


@pytest.mark.parametrize("name", ["has space", "-x", "ü", "a" * 64, "x:y"])
def test_names(name: str) -> None:
    with pytest.raises(InvalidName):
        Volume(name)


def test_contradictions() -> None:
    for wrong in (
        lambda: Volume("cache", mode="copy"),
        lambda: Volume("./x", shared=True),
        lambda: Volume("./x", mode="rw", read_only=True),
        lambda: Volume("./x", mode="write"),
    ):
        with pytest.raises(SpecError):
            wrong()


@pytest.mark.parametrize(
    ("text", "path", "volume"),
    [
        ("cache:/data", "/data", Volume("cache")),
        ("cache:/data:ro", "/data", Volume("cache", mode="ro")),
        ("cache:/data:shared", "/data", Volume("cache", shared=True)),
        ("cache:/data:ro,shared", "/data", Volume("cache", mode="ro", shared=True)),
        ("./repo:/src:rw", "/src", Volume("./repo", mode="rw")),
        ("/srv/x:/src:copy", "/src", Volume("/srv/x", mode="copy")),
    ],
)
def test_the_command_lines_form(text: str, path: str, volume: Volume) -> None:
    assert parse_volume(text) == (path, volume)
    assert from_options([text]) == {path: volume}


def test_folders_with_colons() -> None:
    assert parse_volume("./a:b:/x:rw") == ("/x", Volume("./a:b", mode="rw"))
    assert parse_volume("/srv/1:2:3:/x") == ("/x", Volume("/srv/1:2:3"))
    with pytest.raises(SpecError, match="not a name"):
        parse_volume("a:b:/x")


@pytest.mark.parametrize("text", ["cache", ":/data", "cache:", "cache:/data:rx", "cache:/data:ro,rw", "./x:/y:shared"])
def test_the_command_lines_form_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_volume(text)


def test_one_path_twice_on_the_command_line() -> None:
    with pytest.raises(SpecError, match="already"):
        from_options(["a:/x", "b:/x"])


def test_they_are_part_of_a_spec_and_go_to_json_and_back() -> None:
    spec = SandboxSpec.make(volumes={"/data": "cache", "/src": Volume("./repo", mode="copy")})
    assert SandboxSpec.from_dict(spec.to_dict()) == spec
    assert SandboxSpec.make(volumes={}) == SandboxSpec.make()
    with pytest.raises(SpecError, match="exclude each other"):
        SandboxSpec.make(volumes={"/data": "cache"}, pool=2)


def test_nothing_of_them_goes_to_another_machine() -> None:
    asked = check_volumes({"/data": "cache", "/src": Volume("/home/me", mode="rw"), "/c": Volume("./c", mode="copy")})
    assert left_behind(asked, live=True) == (VolumeSpec("/data", "", "ro"), VolumeSpec("/src", "", "ro"))
    assert left_behind(asked, live=False) == ()
