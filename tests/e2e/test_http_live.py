"""Live state over HTTP, on gVisor: what runs goes on where it was, after a pause, a fork, a rollback, a journey."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from http_kit import Box, made
from server_kit import Served, end_keepers, served, start
from sloplet.engines import registry

pytestmark = pytest.mark.timeout(240)

#: Holds a number in memory only; ``add`` makes it one more, ``cat answer`` tells it.
COUNTER = """
mkfifo ask; echo 0 > answer
nohup sh -c 'n=0; while read line < ask; do n=$((n+1)); echo $n > answer.new; mv answer.new answer; done' \
  > /dev/null 2>&1 &
"""
ADD = "before=$(cat answer); echo x > ask; while [ $(cat answer) = $before ]; do :; done; cat answer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    runsc = os.environ.get("SLOPLET_TEST_RUNSC", "")
    if not runsc:
        pytest.skip("capability: there is no runsc for tests here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOPLET_RUNSC", runsc)
        probe = registry.load("gvisor").probe()
    if not probe.available:
        pytest.skip(f"capability: gvisor cannot run here: {probe.reason}")
    with served(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="module")
def box(server: Served) -> Iterator[Box]:
    """One that counts."""
    with made(server, "live", engine="gvisor") as found:
        found.run(COUNTER)
        yield found


def add(http: httpx.Client, name: str) -> int:
    answer = http.post(f"/v1/sandboxes/{name}/exec", json={"command": ADD, "timeout": 30})
    assert answer.status_code == 200, answer.text
    assert answer.json()["exit_code"] == 0, answer.text
    return int(answer.json()["stdout"])


def ok(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


def test_pause_and_resume(box: Box) -> None:
    before = add(box.http, "live")
    assert ok(box.post("/pause"))["state"] == "paused"
    assert ok(box.post("/pause"))["state"] == "paused"  # idempotent
    assert ok(box.get(""))["saved"] is not None
    assert ok(box.post("/resume"))["state"] == "running"
    assert add(box.http, "live") == before + 1
    ok(box.post("/pause"))
    assert add(box.http, "live") == before + 2, "use wakes it"


def test_snapshot_fork_rollback(box: Box) -> None:
    at = add(box.http, "live")
    saved = ok(box.post("/snapshots", {"name": "here"}), 201)
    assert (saved["kind"], saved["role"], saved["name"]) == ("live", "snapshot", "here")
    add(box.http, "live")
    forks = ok(box.post("/fork", {"count": 2, "names": ["left", "right"]}), 201)["items"]
    try:
        assert [fork["name"] for fork in forks] == ["left", "right"]
        assert len({fork["id"] for fork in forks}) == 2
        assert add(box.http, "left") == at + 2
        assert add(box.http, "left") == at + 3
        assert add(box.http, "right") == at + 2, "each goes its own way"
        (old,) = ok(box.post("/fork", {"snapshot": "here"}), 201)["items"]
        assert add(box.http, old["id"]) == at + 1
        box.http.delete(f"/v1/sandboxes/{old['id']}")
        assert ok(box.post("/rollback", {"snapshot": "here"}))["head"] == saved["id"]
        assert add(box.http, "live") == at + 1
        assert box.post("/rollback", {"snapshot": "nowhere"}).status_code == 404
        assert [item["name"] for item in ok(box.get("/snapshots"))["items"]] == ["here"]
    finally:
        for name in ("left", "right"):
            box.http.delete(f"/v1/sandboxes/{name}")


def test_template(box: Box) -> None:
    at = add(box.http, "live")
    made = ok(box.http.post("/v1/templates", json={"sandbox": "live", "name": "counting"}), 201)
    assert (made["role"], made["kind"]) == ("template", "live")
    with made_of(box.server, "counting") as other:
        assert add(other.http, other.name) == at + 1
    assert [item["name"] for item in ok(box.http.get("/v1/templates"))["items"]] == ["counting"]
    ok(box.http.delete("/v1/templates/counting"), 204)
    assert ok(box.http.get("/v1/templates"))["items"] == []


def made_of(server: Served, template: str) -> Any:
    return made(server, "of-a-template", engine="auto", template=template)


def test_undo_and_diff(server: Served) -> None:
    with made(server, "careful", engine="gvisor", undo=3) as box:
        box.run("echo one > file")
        box.run("echo two > file")
        (change,) = [
            change for change in ok(box.get("/diff"))["changes"] if change["path"] == "/workspace/file"
        ]  # fmt: skip
        assert (change["kind"], change["type"]) == ("added", "file")
        assert "+two" in change["text"]
        point = ok(box.post("/undo", {}))
        assert (point["role"], point["note"]) == ("undo", "echo two > file")
        assert box.read("file").text == "one\n"
        assert ok(box.get("/snapshots", params={"role": "undo"}))["items"] != []
        ok(box.post("/snapshots", {"name": "now"}), 201)
        box.run("rm file")
        diff = ok(box.get("/diff", params={"against": "now", "text": "false"}))
        assert [(each["path"], each["kind"]) for each in diff["changes"]] == [("/workspace/file", "removed")]
        assert box.post("/undo", {"steps": 50}).status_code == 404


def test_names_that_are_no_text(server: Served) -> None:
    with made(server, "bytes", engine="gvisor") as box:
        box.run("touch \"$(printf 'caf\\351')\"")
        paths = [change["path"] for change in ok(box.get("/diff"))["changes"]]
        assert os.fsencode("/workspace/caf\udce9") in [os.fsencode(path) for path in paths]


def test_a_running_one_travels(server: Served, box: Box) -> None:
    at = add(box.http, "live")
    archive = box.get("/export", params={"image": "false"})
    assert archive.status_code == 200
    assert archive.headers["sloplet-snapshot-kind"] == "live"
    headers = {"Content-Type": "application/vnd.sloplet.archive"}
    with server.client(server.new_key("elsewhere")) as other:
        ok(other.post("/v1/sandboxes/import?name=arrived", content=archive.content, headers=headers), 201)
        assert add(other, "arrived") == at + 1
        other.delete("/v1/sandboxes/arrived")
    assert add(box.http, "live") == at + 1


def test_release_when_the_last_program_lets_go(server: Served) -> None:
    with made(server, "shared", engine="gvisor") as box, server.client() as one, server.client() as two:
        for client, word in ((one, "one"), (two, "two")):
            client.headers["Sloplet-Client"] = word
            ok(client.post("/v1/sandboxes/shared/resume"))
        ok(one.post("/v1/sandboxes/shared/release"), 204)
        assert ok(box.get(""))["state"] == "running", "the other one uses it"
        ok(two.post("/v1/sandboxes/shared/release"), 204)
        assert ok(box.get(""))["state"] == "paused"


def test_what_a_key_may_not_have(server: Served, box: Box) -> None:
    """Of gVisor's rung and no weaker: also by templates of others of the tenant."""
    key = server.new_key("strong", "--tenant", "main", "--at-least", "gvisor")
    with server.client(key) as http, made(server, "weaker") as weak:
        assert ok(http.post("/v1/sandboxes", json={"ttl": 60}), 201)["engine"] == "gvisor"
        ok(weak.post("/snapshots", {"name": "s"}), 201)
        ok(box.http.post("/v1/templates", json={"sandbox": "weaker", "name": "weak"}), 201)
        for answer in (
            http.post("/v1/sandboxes", json={"template": "weak"}),
            http.post("/v1/sandboxes", json={"engine": "container"}),
            http.post("/v1/sandboxes/weaker/fork", json={"snapshot": "s"}),
            http.post("/v1/sandboxes/weaker/rollback", json={"snapshot": "s"}),
        ):
            assert answer.status_code == 403, answer.text
            assert answer.json()["error"] == "NotAllowed"
        ok(box.http.delete("/v1/templates/weak"), 204)


def test_a_killed_server_loses_nothing(tmp_path_factory: pytest.TempPathFactory, server: Served) -> None:
    home = tmp_path_factory.mktemp("killed")
    first = start(home)
    try:
        with first.client() as http:
            ok(http.post("/v1/sandboxes", json={"name": "kept", "engine": "gvisor"}), 201)
            ok(http.post("/v1/sandboxes/kept/exec", json={"command": COUNTER}))
            at = add(http, "kept")
        first.stop(signal.SIGKILL)
        assert first.process.stdout is not None
        first.process.stdout.close()
        second = start(home, key=first.key)
        try:
            with second.client() as http:
                assert add(http, "kept") == at + 1
                events = json.dumps(ok(http.get("/v1/sandboxes/kept")))
                assert '"recovered_from": null' in events
        finally:
            second.stop()
            assert second.process.stdout is not None
            second.process.stdout.close()
    finally:
        first.stop()
        end_keepers(home)
