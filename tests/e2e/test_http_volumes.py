"""Volumes over HTTP, on a real server: made, copied, kept, removed; by whom they are had, and whose they are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cli_helpers import sloplet

from server_kit import Served, need_container, served
from sloplet import Sandbox

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need_container()
    with served(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="module")
def key(server: Served) -> str:
    return server.new_key("one")


@pytest.fixture
def client(server: Served, key: str) -> Iterator[httpx.Client]:
    with server.client(key) as made:
        yield made
        for item in made.get("/v1/volumes").json()["items"]:
            made.delete(f"/v1/volumes/{item['name']}")


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]


def test_a_volume_and_its_copies(server: Served, key: str, client: httpx.Client) -> None:
    made = client.post("/v1/volumes", json={"name": "data"})
    assert made.status_code == 201
    assert made.json()["name"] == "data"
    assert error(client.post("/v1/volumes", json={"name": "data"})) == (409, "VolumeExists")
    with Sandbox(engine="container", volumes={"/data": "data"}, server=server.url, key=key) as box:
        box.run("echo first > /data/file", check=True)
        users = client.get("/v1/volumes/data").json()["users"]
        assert [(use["sandbox"], use["mode"]) for use in users] == [(box.id, "rw")]
        assert "pid" not in users[0]
        assert error(client.delete("/v1/volumes/data")) == (409, "VolumeInUse")
        assert error(client.post("/v1/volumes/data/snapshots", json={"name": "s"})) == (409, "VolumeInUse")
    assert client.post("/v1/volumes/data/snapshots", json={"name": "s"}).status_code == 201
    assert error(client.post("/v1/volumes/data/snapshots", json={"name": "s"})) == (409, "VolumeExists")
    assert [item["name"] for item in client.get("/v1/volumes/data/snapshots").json()["items"]] == ["s"]
    cloned = client.post("/v1/volumes/data/clone", json={"name": "copy", "snapshot": "s"})
    assert (cloned.status_code, cloned.json()["source"]) == (201, "data:s")
    with Sandbox(engine="container", volumes={"/data": "copy"}, server=server.url, key=key) as box:
        assert box.run("cat /data/file").stdout == "first\n"
    assert [item["name"] for item in client.get("/v1/volumes").json()["items"]] == ["copy", "data"]
    assert client.delete("/v1/volumes/data/snapshots/s").status_code == 204
    assert error(client.delete("/v1/volumes/data/snapshots/s")) == (404, "VolumeNotFound")
    assert client.delete("/v1/volumes/data").status_code == 204
    assert error(client.delete("/v1/volumes/data")) == (404, "VolumeNotFound")


def test_what_is_asked_for_is_looked_at(client: httpx.Client) -> None:
    for body in ({}, {"name": ""}, {"name": "../x"}, {"name": ".tmp-x"}, {"name": "a/b"}, {"name": "x", "size": -1},
                 {"name": "x", "size": "much"}, {"name": "x", "more": 1}, {"name": 7}):  # fmt: skip
        assert client.post("/v1/volumes", json=body).status_code == 422, body
    for path in ("/v1/volumes/..%2f..%2fstate.db", "/v1/volumes/.tmp-x", "/v1/volumes/none", "/v1/volumes/a%00b"):
        assert client.get(path).status_code in (404, 422), path
    assert error(client.post("/v1/volumes/none/clone", json={"name": "x"})) == (404, "VolumeNotFound")


def test_sizes(client: httpx.Client) -> None:
    answer = client.post("/v1/volumes", json={"name": "small", "size": "16m"})
    if os.geteuid() == 0 and answer.status_code == 201:
        assert answer.json()["size"] == 16 << 20
    else:
        assert error(answer) == (422, "ControlUnavailable")


def test_no_path_of_the_host_is_told(server: Served, client: httpx.Client) -> None:
    client.post("/v1/volumes", json={"name": "data"})
    for path in ("/v1/volumes", "/v1/volumes/data"):
        assert str(server.home) not in client.get(path).text


def test_whose_is_whose(server: Served, client: httpx.Client) -> None:
    client.post("/v1/volumes", json={"name": "data"})
    with server.client(server.new_key("two")) as two, server.client() as admin:
        assert two.get("/v1/volumes").json()["items"] == []
        assert two.get("/v1/volumes/data").status_code == 404
        assert two.delete("/v1/volumes/data").status_code == 404
        assert two.post("/v1/volumes/data/clone", json={"name": "mine"}).status_code == 404
        assert two.post("/v1/volumes", json={"name": "data"}).status_code == 201  # another one
        assert admin.get("/v1/volumes").json()["items"] == []
        seen = admin.get("/v1/volumes", headers={"Sloplet-Tenant": "one"}).json()["items"]
        assert [item["name"] for item in seen] == ["data"]


def test_the_cli(server: Served, key: str, client: httpx.Client, tmp_path: Path) -> None:
    env = {"SLOPLET_URL": server.url, "SLOPLET_KEY": key, "SLOPLET_HOME": str(tmp_path / "none")}

    def said(*words: str, code: int = 0) -> str:
        done = sloplet("volume", *words, env=env)
        assert done.returncode == code, done
        return (done.stdout if code == 0 else done.stderr).decode()

    assert said("create", "data") == "data\n"
    said("snapshot", "data", "before")
    said("clone", "data:before", "again")
    assert said("ls", "-q") == "again\ndata\n"
    assert [each["name"] for each in json.loads(said("inspect", "data", "--json"))["snapshots"]] == ["before"]
    assert "snapshot:  before" in said("inspect", "data")
    said("rm", "data:before", "data", "again")
    assert "no volume 'data'" in said("rm", "data", code=125)
    assert not (tmp_path / "none").exists()
