"""Labels: bounded words to find a sandbox by, that decide nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cli_controller import Records, Said
from live_fake import World, in_world

from sloplet.archive.layout import checked_spec
from sloplet.errors import SpecError
from sloplet.labels import check_labels, matches, parse_labels, parse_wanted
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

BAD = [
    [("a", "b")],
    "a=b",
    {"": "x"},
    {"-a": "x"},
    {"a b": "x"},
    {"a" * 64: "x"},
    {"ä": "x"},
    {1: "x"},
    {"a": 1},
    {"a": None},
    {"a": "x" * 257},
    {"a": "x\n"},
    {"a": "\x1b[31m"},
    {"a\n": "x"},
    {f"k{n}": "" for n in range(65)},
]


@pytest.mark.parametrize("labels", BAD)
def test_bad_labels_are_refused(labels: Any) -> None:
    with pytest.raises(SpecError):
        check_labels(labels)


def test_labels_go_to_json_and_back_and_old_records_have_none() -> None:
    spec = SandboxSpec.make("dev", labels={"b": "2", "a/x.y-z_": "ü " * 128, "empty": ""})
    assert spec.labels == (("a/x.y-z_", "ü " * 128), ("b", "2"), ("empty", ""))
    data = spec.to_dict()
    assert data["labels"] == {"a/x.y-z_": "ü " * 128, "b": "2", "empty": ""}
    assert SandboxSpec.from_dict(data) == spec
    del data["labels"]
    assert SandboxSpec.from_dict(data).labels == ()


def test_archives_bring_their_labels_and_no_bad_ones() -> None:
    data = SandboxSpec.make("dev", labels={"a": "1"}).to_dict()
    assert checked_spec(data).labels == (("a", "1"),)
    with pytest.raises(SpecError):
        checked_spec({**data, "labels": {"a": "x" * 300}})


@pytest.mark.parametrize("texts", [["a"], ["=b"], ["a=1", "a=2"], ["a b=c"]])
def test_bad_options(texts: list[str]) -> None:
    with pytest.raises(SpecError):
        parse_labels(texts)


def test_options_and_what_is_looked_for() -> None:
    labels = check_labels(parse_labels(["team=search", "job=7=8", "team=search"]))
    assert labels == (("job", "7=8"), ("team", "search"))
    assert matches(labels, parse_wanted(["team=search", "job"]))
    assert not matches(labels, parse_wanted(["team=ads"]))
    assert not matches(labels, parse_wanted(["nope"]))
    assert matches((), ())
    with pytest.raises(SpecError):
        parse_wanted(["=x"])


def test_forks_inherit_and_reopening_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        box = await world.box("dev", labels={"team": "search"})
        again = await world.box("dev", labels={"team": "ads"})
        assert dict((await again.info()).spec.labels) == {"team": "search"}
        (child,) = await box.fork(1)
        assert dict(child.spec.labels) == {"team": "search"}
        await box.template("warm")
        assert (await (await world.box("other", template="warm")).info()).spec.labels == ()

    in_world(tmp_path, monkeypatch, work)


def test_one_of_a_pool_has_the_labels_of_who_claims_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        first = await world.box(pool=1, labels={"n": "1"})
        async with asyncio.timeout(20):
            while not world.runtime.pools.count(first.spec):
                await asyncio.sleep(0.001)
        ready = set(world.engine.running) - {first.id}
        second = await world.box(pool=1, labels={"n": "2"})
        assert second.id in ready, "control: it was ready before"
        assert dict((await second.info()).spec.labels) == {"n": "2"}

    in_world(tmp_path, monkeypatch, work)


def test_on_the_command_line(records: Records, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said("create", "new", "--label", "team=search", "--label", "job=7")[:2] == (0, "new\n")
    assert records.boxes["id-new"].spec.labels == (("job", "7"), ("team", "search"))
    records.put(records.boxes["id-new"], state="dead", reason="killed")
    assert "label:       team=search\n" in said("info", "new")[1]
    for bad in ("team", "=x", "a b=c"):
        assert said("create", "other", "--label", bad)[0] == 125
    found = list(records.boxes.values())
    monkeypatch.setattr("sloplet.cli.local.known_sandboxes", lambda: found)
    assert said("ls", "-q", "--label", "team=search")[1] == "new\n"
    assert said("ls", "-q", "--label", "team", "--label", "job=7")[1] == "new\n"
    code, out, err = said("ls", "--label", "team=ads")
    assert (code, out) == (0, "")
    assert "no sandboxes with these labels" in err
    document = json.loads(said("ls", "--json", "--label", "team")[1])
    assert [item["spec"]["labels"] for item in document] == [{"job": "7", "team": "search"}]
