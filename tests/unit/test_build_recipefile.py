"""Recipes as JSON, and contexts as tars: what a server gets is what was meant, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloplet.build.context import Folder, read_ignore
from sloplet.build.contexttar import RESERVED, ContextTar
from sloplet.build.dockerfile import Dockerfile, parse
from sloplet.build.image import Image, for_index
from sloplet.build.instructions import Copy, Run
from sloplet.build.recipefile import from_document, to_document
from sloplet.errors import BuildFailed, RecipeInvalid, SpecError
from sloplet.netspec import Network

pytestmark = pytest.mark.anyone

TEXT = """# escape=`
ARG BASE=debian
FROM --platform=linux/amd64 ${BASE}:12 AS one
ENV A=1 B="two words"
LABEL x=y
RUN --mount=type=cache,target=/c --network=none make `
    all
RUN ["a", "b c"]
RUN <<EOF
#!/bin/sh
echo $A
EOF
COPY --chown=1:2 --exclude=*.log a b* /c/
COPY <<"X" <<Y /d/
x
X
y $A
Y
ADD t.tar /t
WORKDIR /w
USER u
SHELL ["/bin/bash", "-c"]
ENTRYPOINT ["e"]
CMD text
EXPOSE 80 81/udp
VOLUME /v
STOPSIGNAL 9
HEALTHCHECK --interval=5s CMD true
ONBUILD COPY . /x
FROM one
COPY --from=one /w /w
"""


def again(recipe: Dockerfile, folders: list[str] | None = None) -> Dockerfile:
    found: list[str] = [] if folders is None else folders
    document = json.loads(json.dumps(to_document(recipe, found)))
    return from_document(document, {str(number) for number in range(len(found))}, for_index)


def whole(image: Image) -> Dockerfile:
    return asyncio.run(image._whole({}, False, None, None))


def told(recipe: Dockerfile) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = to_document(recipe, [])["stages"][0]["steps"]
    return found


def test_a_dockerfile_comes_back_as_it_was() -> None:
    recipe = parse(TEXT, "Some.Dockerfile")
    assert again(recipe) == recipe


def test_so_does_what_python_says() -> None:
    image = (
        Image("debian:12").env(A="$b 'c'").run("one\ntwo").run(["a", "$b"]).run("x", network="none")
        .run("y", network=Network(allow=["a.example"], bandwidth=10_000)).label({"a": "$b"}).workdir("/a b").user("$x")
        .entrypoint("a", "b").cmd("[c]").shell("sh").expose(1, "2/udp").volume("/v w")
        .copy("/x", "/y", image="other:1", chmod=0o600, exclude=["a$b"])
    )  # fmt: skip
    recipe = whole(image)
    found = again(recipe)
    for one, other in zip(recipe.stages[0].steps, found.stages[0].steps, strict=True):
        if isinstance(one, Run) and isinstance(one.policy, Network):
            assert isinstance(other, Run)
            assert other.policy == one.policy.spec
        else:
            assert other == one
    assert found.stages[0].base == recipe.stages[0].base


def test_folders_go_by_number(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("")
    recipe = whole(Image("x").copy(tmp_path / "a", "/a").copy(tmp_path / "b", "/b").copy(tmp_path / "a", "/c"))
    folders: list[str] = []
    found = again(recipe, folders)
    assert folders == [str(tmp_path / "a"), str(tmp_path)]
    assert [step.folder for step in found.stages[0].steps if isinstance(step, Copy)] == ["0", "1", "0"]
    assert [step["folder"] for step in told(recipe)] == [0, 1, 0]


def test_indexes_are_those_of_the_machine_that_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://here.example/simple")
    recipe = whole(Image("x").pip("numpy").apt("git").npm("left-pad"))
    assert [step["index"] for step in told(recipe)] == ["pip", "apt", "npm"]
    assert "here.example" not in json.dumps(to_document(recipe, []))
    monkeypatch.setenv("PIP_INDEX_URL", "https://there.example/simple")
    first = again(recipe).stages[0].steps[0]
    assert isinstance(first, Run)
    assert dict(first.env)["PIP_INDEX_URL"] == "https://there.example/simple"


def test_what_cannot_leave_this_program() -> None:
    with pytest.raises(SpecError, match="asks"):
        to_document(whole(Image("x").run("y", network=Network(ask=lambda question: "allow"))), [])


_LINE = {"number": 1, "keyword": "RUN", "rest": "x", "escape": "\\", "name": "x", "heredocs": []}
_COPY = {"line": {**_LINE, "keyword": "COPY"}, "kind": "Copy", "sources": ["a"], "target": "b"}
_FROM = {"line": {**_LINE, "keyword": "FROM", "rest": "debian"}}
_RUN = {"line": _LINE, "kind": "Run"}


def line(**values: Any) -> dict[str, Any]:
    return {"line": {**_LINE, **values}}


def document(*steps: Any, **more: Any) -> dict[str, Any]:
    return {"version": 1, "name": "x", "arguments": [], "stages": [{"base": _FROM, "steps": list(steps)}], **more}


@pytest.mark.parametrize(
    "hostile",
    [
        None, [], 7, "x", {}, document(version=2), document(stages=[]), document(stages={}), document(name=7),
        document(name="x" * 2000), document(arguments=[line()]), document({}), document(7), document({"line": {}}),
        document(line(number=True)), document(line(number=-1)), document(line(escape="x")),
        document(line(rest="a\0b")), document(line(rest="\ud800")), document(line(keyword="EVAL")),
        document(line(heredocs=[["a", "b"]])), document(line(heredocs=7)), document(line(name=7)),
        document({"line": _LINE, "kind": "Health"}), document({"line": _LINE, "kind": "Instruction"}),
        document({"line": _LINE, "kind": "__class__"}), document({"line": _LINE, "kind": "Env", "pairs": [["a", "b"]]}),
        document(_RUN), document({**_RUN, "argv": [""]}), document({**_RUN, "argv": ["a"], "text": "b"}),
        document({**_RUN, "text": "a", "mounts": [["bind", []]]}), document({**_RUN, "text": "a", "index": "evil"}),
        document({**_RUN, "text": "a", "policy": {"allow": 7}}), document({**_RUN, "text": "a", "policy": "host"}),
        document({**_RUN, "text": "a", "unknown": 1}), document(_COPY), document({**_COPY, "sources": [], "folder": 0}),
        document({**_COPY, "folder": 9}), document({**_COPY, "folder": "/etc"}), document({**_COPY, "folder": "0"}),
        document({**_COPY, "folder": True}), document({**_COPY, "folder": 0, "origin": "x"}),
        document({**line(keyword="SHELL"), "kind": "Command", "argv": []}),
        document({**line(keyword="STOPSIGNAL"), "kind": "Text", "value": "x"}),
        document(*[line()] * 10_001), document(*[line(rest="x" * 2**20)] * 5),
        document(stages=[{"base": _FROM, "steps": []}] * 501), document(stages=[{"base": line(), "steps": []}]),
    ],
    ids=lambda hostile: repr(hostile)[-60:],
)  # fmt: skip
def test_hostile_documents(hostile: Any) -> None:
    with pytest.raises((RecipeInvalid, SpecError)):
        from_document(hostile, {"0"}, for_index)


_KEYS = ["line", "kind", "argv", "text", "sources", "target", "folder", "pairs", "policy", "value", "words", "image"]
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4),
    max_leaves=12,
)
_KEYWORDS = {"Run": "RUN", "Copy": "COPY", "Text": "USER", "Command": "CMD", "Names": "EXPOSE", "Env": "ENV"}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*_KEYWORDS.items()]), st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=4))
def test_whatever_comes_is_a_recipe_or_refused(kind: tuple[str, str], values: dict[str, Any]) -> None:
    try:
        found = from_document(document({**values, **line(keyword=kind[1]), "kind": kind[0]}), {"0"}, for_index)
    except (RecipeInvalid, SpecError):
        return
    assert isinstance(found, Dockerfile)


# Contexts


def members(tar: ContextTar) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(b"".join(tar.pieces()))) as read:
        return {info.name: info for info in read.getmembers()}


def test_a_context_without_what_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name in ("src/a", "src/b.log", "c"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("c")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "c").chmod(0o4755)
    (tmp_path / os.fsdecode(b"odd\xff")).write_text("")
    (tmp_path / ".dockerignore").write_text("**/*.log\n")
    with Folder(tmp_path, ignore=read_ignore(tmp_path, tmp_path / "Dockerfile")) as folder:
        data = b"".join(ContextTar({"recipe": 1}, folder, (), {"token": b"value"}).pieces())
    with tarfile.open(fileobj=io.BytesIO(data)) as read:
        found = {info.name: info for info in read.getmembers()}
        request = json.load(read.extractfile(f"{RESERVED}/request.json"))  # type: ignore[arg-type]
        assert read.extractfile(f"{RESERVED}/secrets/token").read() == b"value"  # type: ignore[union-attr]
    assert {name for name in found if not name.startswith(RESERVED)} == {
        "src", "src/a", "c", "link", ".dockerignore", os.fsdecode(b"odd\xff"),
    }  # fmt: skip
    assert found["link"].linkname == "c"
    assert all(info.uid == info.gid == info.mtime == 0 for info in found.values())
    assert request == {"version": 1, "recipe": 1, "modes": {"context": {"c": 0o4755}}}


def test_of_other_folders_what_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("deep/x", "other", "far"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("deep")
    with Folder(tmp_path) as folder:
        found = members(ContextTar({}, None, [(folder, ("link", "missing")), (folder, ("other",))]))
    inside = {name.removeprefix(f"{RESERVED}/folders/") for name in found if name.startswith(f"{RESERVED}/folders/")}
    assert inside == {"0", "0/link", "0/deep", "0/deep/x", "1", "1/other"}


def test_what_changes_meanwhile_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    with Folder(tmp_path) as folder:
        pieces = ContextTar({}, folder).pieces()
        next(pieces)
        (tmp_path / "file").write_bytes(b"short")
        with pytest.raises(BuildFailed, match="changed"):
            list(pieces)


def test_the_reserved_name(tmp_path: Path) -> None:
    (tmp_path / RESERVED).mkdir()
    with Folder(tmp_path) as folder, pytest.raises(BuildFailed, match="used for something else"):
        list(ContextTar({}, folder).pieces())
