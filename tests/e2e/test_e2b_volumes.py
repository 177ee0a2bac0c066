"""E2B's volumes: by its own clients, in sandboxes, and by whoever comes with a token and bad intentions."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest

from e2b_kit import E2BServer, e2b_server
from server_kit import need_container

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BServer]:
    need_container()
    with e2b_server(tmp_path_factory.mktemp("e2b") / "home", ["--max-upload", "8m"]) as running:
        yield running


@pytest.fixture(scope="module")
def other(doors: E2BServer) -> str:
    """The key of another tenant."""
    return doors.served.new_key("other", "--tenant", "other")


_clients: list[httpx.Client] = []


@pytest.fixture(autouse=True)
def clients_are_closed() -> Iterator[None]:
    yield
    while _clients:
        _clients.pop().close()


def client(doors: E2BServer, key: str | None = None) -> httpx.Client:
    _clients.append(doors.served.client(key))
    return _clients[-1]


class Team:
    """A key, and its volumes."""

    def __init__(self, doors: E2BServer, key: str | None = None) -> None:
        self.doors = doors
        self.http = client(doors, "")
        self.http.headers["X-API-KEY"] = key or doors.served.key

    def make(self, name: str) -> Vol:
        made = self.http.post("/volumes", json={"name": name})
        assert made.status_code == 201, made.text
        return Vol(self, made.json())


class Vol:
    def __init__(self, team: Team, document: dict[str, Any]) -> None:
        self.team, self.id, self.name, self.token = team, document["volumeID"], document["name"], document["token"]
        self.http = client(team.doors, self.token)

    def ask(self, method: str, kind: str, path: str | None, **options: Any) -> httpx.Response:
        query = {**options.pop("params", {}), **({} if path is None else {"path": path})}
        return self.http.request(method, f"/volumecontent/{self.id}/{kind}", params=query, **options)

    def put(self, path: str, content: Any = b"text", **query: Any) -> httpx.Response:
        return self.ask("PUT", "file", path, params=query, content=content)

    def get(self, path: str) -> httpx.Response:
        return self.ask("GET", "file", path)

    def stat(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", "path", path).json()
        return found

    @property
    def folder(self) -> Path:
        return self.team.doors.home / "volumes" / self.name / "data"

    def names(self) -> list[str]:
        return [each["name"] for each in self.ask("GET", "dir", "/").json()]


@pytest.fixture
def team(doors: E2BServer, clients_are_closed: None) -> Iterator[Team]:
    made = Team(doors)
    yield made
    for volume in made.http.get("/volumes").json():
        assert made.http.delete(f"/volumes/{volume['volumeID']}").status_code == 204


def error(answer: httpx.Response) -> int:
    """The status of a refusal, which must be a document that clients can read."""
    found = answer.json()
    assert found["code"] == answer.status_code, found
    assert found["message"]
    return answer.status_code


# -- clients -----------------------------------------------------------------------------------------------------------

SCRIPT = """
from e2b import Sandbox, Volume
def failure(work):
    try:
        work()
    except Exception as error:
        return type(error).__name__
volume = Volume.create("client-" + which)
found = {"twice": failure(lambda: Volume.create(volume.name))}
found["listed"] = volume.volume_id in [each.volume_id for each in Volume.list()]
found["id"] = Volume.connect(volume.volume_id).name == volume.name
stat = volume.write_file("/a.txt", "hello", mode=0o600, uid=0, gid=5)
found["stat"] = [stat.name, stat.path, stat.size, stat.mode, stat.uid, stat.gid]
found["read"] = [volume.read_file("a.txt"), bytes(volume.read_file("/a.txt", format="bytes")).decode()]
volume.write_file("/big", b"x" * 3_000_000)
found["big"] = sum(len(piece) for piece in volume.read_file("/big", format="stream"))
found["again"] = failure(lambda: volume.write_file("/a.txt", "x", force=False))
volume.write_file("/a.txt", "forced", force=True)
found["forced"] = volume.read_file("/a.txt")
found["parent"] = failure(lambda: volume.write_file("/no/such/file", "x", force=False))
volume.make_dir("/d/e", force=True)
found["dir"] = [failure(lambda: volume.make_dir("/d")), volume.exists("/d/e"), volume.exists("/none")]
found["names"] = [entry.path for entry in volume.list("/")]
found["changed"] = [volume.update_metadata("/d", uid=1001, mode=0o700).uid, volume.get_info("/d").mode & 0o777]
calls = (volume.list, volume.remove, volume.get_info, volume.read_file)
found["missing"] = [failure(lambda: call("/missing")) for call in calls]
volume.remove("/d")
found["removed"] = volume.exists("/d")
found["bad mount"] = failure(lambda: Sandbox.create(volume_mounts={"/mnt/x": "no-such-volume"}))

with Sandbox.create(volume_mounts={"/mnt/data": volume}) as first:
    found["info"] = first.get_info().volume_mounts
    first.commands.run("echo by-user > /mnt/data/hello.txt; sudo sh -c 'echo by-root > /mnt/data/root.txt'")
    found["owners"] = [volume.get_info(name).uid for name in ("/hello.txt", "/root.txt")]
    volume.write_file("/later.txt", "from outside")
    found["later"] = first.commands.run("cd /mnt/data; cat later.txt; stat -c %u later.txt; rm later.txt").stdout
    first.commands.run("ln -s /etc/passwd /mnt/data/evil; ln -s ../../../../../../etc /mnt/data/up")
    found["evil"] = [failure(lambda: volume.read_file(path)) for path in ("/evil", "/up/passwd")]
    found["in use"] = failure(lambda: Volume.destroy(volume.volume_id))
    first.kill()
with Sandbox.create(volume_mounts={"/mnt/data": volume.name}) as second:
    found["kept"] = second.commands.run("cat /mnt/data/hello.txt /mnt/data/root.txt").stdout
    second.kill()
found["destroyed"] = [Volume.destroy(volume.volume_id), Volume.destroy(volume.volume_id)]
found["gone"] = [failure(lambda: Volume.get_info(volume.volume_id)), failure(lambda: volume.read_file("/hello.txt"))]
print(json.dumps(found))
"""


@pytest.mark.parametrize("version", ["new", "old"])
def test_clients(doors: E2BServer, version: str) -> None:
    found = doors.run_python(version, SCRIPT, which=version)
    missing = "VolumePathNotFoundException"
    assert found == {
        "twice": "VolumeException", "listed": True, "id": True, "stat": ["a.txt", "/a.txt", 5, 0o600, 0, 5],
        "read": ["hello", "hello"], "big": 3_000_000, "again": "VolumeException", "forced": "forced",
        "parent": missing, "dir": ["VolumeException", True, False], "names": ["/a.txt", "/big", "/d"],
        "changed": [1001, 0o700], "missing": [missing] * 4, "removed": False, "bad mount": "SandboxException",
        "info": [{"name": f"client-{version}", "path": "/mnt/data"}], "owners": [1000, 0],
        "later": "from outside1000\n", "evil": [missing] * 2, "in use": "VolumeException", "kept": "by-user\nby-root\n",
        "destroyed": [True, False], "gone": ["VolumeNotFoundException", missing],
    }  # fmt: skip


def test_several_sandboxes_write_one(doors: E2BServer, team: Team) -> None:
    made = team.make("shared")
    found = doors.run_python("new", """
from e2b import Sandbox
boxes = [Sandbox.create(volume_mounts={"/v": "shared"}) for _ in range(2)]
for number, box in enumerate(boxes):
    box.commands.run(f"echo {number} > /v/{number}")
said = [box.commands.run("cat /v/0 /v/1").stdout for box in boxes]
[box.kill() for box in boxes]
print(json.dumps(said))
""")  # fmt: skip
    assert found == ["0\n1\n"] * 2
    assert made.names() == ["0", "1"]


def test_mounts_that_make_no_sense(team: Team) -> None:
    team.make("data")
    ways = [
        ({"name": "none", "path": "/a"}, "volume 'none' not found"), ({"name": "data", "path": ""}, "cannot be empty"),
        ({"name": "data", "path": "a"}, "path must be absolute"), ({"name": "../x", "path": "/a"}, "not found"),
        ({"name": "data", "path": "/a/../b"}, "must not contain any '.' or '..' components"),
        ({"name": "data", "path": "/proc/x"}, "/proc"), ("data", "cannot be empty"), ({}, "cannot be empty"),
    ]  # fmt: skip
    for mount, why in ways:
        answer = team.http.post("/v2/sandboxes", json={"templateID": "base", "volumeMounts": [mount]})
        assert error(answer) == 400
        assert why in answer.json()["message"]
    twice = [{"name": "data", "path": "/a"}, {"name": "data", "path": "/a/"}]
    answer = team.http.post("/v2/sandboxes", json={"templateID": "base", "volumeMounts": twice})
    assert answer.json()["message"] == "invalid mounts:\n\t- volume mount #1: path '/a/' is already used"


# -- whose it is -------------------------------------------------------------------------------------------------------


def test_names_and_ids(team: Team, doors: E2BServer, other: str) -> None:
    made, theirs = team.make("data"), Team(doors, other)
    for name in ("", "a b", "a.b", "a/b", "../a", "-a", "a" * 64, 5, None, "é"):
        assert error(team.http.post("/volumes", json={"name": name})) == 400
    assert team.http.get("/volumes").json() == [{"volumeID": made.id, "name": "data"}]
    assert theirs.http.get("/volumes").json() == []
    hers = theirs.make("data")  # names are a tenant's own
    assert hers.id != made.id
    for ours, their in ((made, theirs), (hers, team)):
        assert error(their.http.get(f"/volumes/{ours.id}")) == 404
        assert error(their.http.delete(f"/volumes/{ours.id}")) == 404
    assert error(team.http.get("/volumes/data")) == 404
    answer = theirs.http.post(
        "/v2/sandboxes", json={"templateID": "base", "volumeMounts": [{"name": "d", "path": "/a"}]}
    )
    assert error(answer) in (400, 404)
    assert theirs.http.delete(f"/volumes/{hers.id}").status_code == 204


def test_tokens(team: Team, doors: E2BServer, other: str) -> None:
    made, second, theirs = team.make("one"), team.make("two"), Team(doors, other)
    hers = theirs.make("one")
    assert made.put("/mine").status_code == 201
    assert made.get("/mine").text == "text"
    head, _, digest = made.token.partition(".")
    wrong = [
        "x", made.token[:-1], made.token + "0", f"{head}.", f".{digest}", hers.token, second.token,
        f"{hers.token.partition('.')[0]}.{digest}", doors.served.key, "\xff.\xff",
    ]  # fmt: skip
    url = f"{doors.served.url}/volumecontent/{made.id}/file"
    for token in wrong:
        headers = {"Authorization": f"Bearer {token}".encode("latin-1")}
        answer = httpx.get(url, params={"path": "/mine"}, headers=headers, trust_env=False)
        assert error(answer) in (401, 429), token
        assert "text" not in answer.text
    assert error(
        httpx.get(url, params={"path": "/mine"}, headers={"X-API-KEY": doors.served.key}, trust_env=False)
    ) in (401, 429)
    # a volume's token opens nothing else
    assert httpx.get(
        f"{doors.served.url}/volumes", headers={"Authorization": f"Bearer {made.token}"}, trust_env=False
    ).status_code in (401, 429)
    # one that is gone is gone, whoever has its name now
    assert team.http.delete(f"/volumes/{made.id}").status_code == 204
    again = team.make("one")
    assert again.put("/mine", b"new").status_code == 201
    assert error(made.get("/mine")) == 404
    answer = httpx.get(f"{doors.served.url}/volumecontent/{again.id}/file", params={"path": "/mine"},
                       headers={"Authorization": f"Bearer {made.token}"}, trust_env=False)  # fmt: skip
    assert error(answer) in (401, 429)
    assert theirs.http.delete(f"/volumes/{hers.id}").status_code == 204


def test_a_token_ends_with_its_key(doors: E2BServer) -> None:
    admin = client(doors)
    made = admin.post("/v1/keys", json={"name": "short", "tenant": "brief"})
    assert made.status_code == 201, made.text
    volume = Team(doors, made.json()["key"]).make("data")
    assert volume.put("/a").status_code == 201
    assert admin.delete(f"/v1/keys/{made.json()['id']}").status_code in (200, 204)
    assert error(volume.get("/a")) in (401, 429)


# -- hostile requests, hostile content ---------------------------------------------------------------------------------


def test_paths(team: Team) -> None:
    made = team.make("paths")
    for path, status in {
        "/a": 201, "b": 201, "/../../c": 201, "/d\0e": 400, "/" + "n" * 300: 400, "/" + "n/" * 3000: 400, "/": 400,
        "": 400, "/ü ñ/\n": 404, "/x/y": 404,
    }.items():  # fmt: skip
        answer = made.put(path)
        assert answer.status_code == status, (path[:20], answer.text)
        if status != 201:
            error(answer)
    assert made.names() == ["a", "b", "c"]
    assert made.stat("../../c")["path"] == "/c"
    for method, kind in (("GET", "path"), ("GET", "dir"), ("GET", "file"), ("PUT", "file"), ("DELETE", "path")):
        assert error(made.ask(method, kind, None)) == 400
    # bytes that are no text
    raw = made.http.put(f"/volumecontent/{made.id}/file?path=/caf%E9", content=b"x")
    assert raw.status_code == 201
    assert os.listdir(os.fsencode(made.folder)).count(b"caf\xe9") == 1
    assert made.http.get(f"/volumecontent/{made.id}/file?path=/caf%E9").text == "x"
    assert "caf�" in made.names()
    for query in ("mode=8", "mode=99999", "uid=-1", "uid=70000", "gid=x", "force=maybe", "uid=1e3"):
        answer = made.http.put(f"/volumecontent/{made.id}/file?path=/q&{query}", content=b"x")
        assert (answer.status_code == 201) == (query == "mode=8"), answer.text
    for body in ({"uid": "1"}, {"mode": -1}, {"mode": 1.5}, {"gid": True}, {"uid": 1 << 40}, []):
        assert error(made.ask("PATCH", "path", "/a", json=body)) == 400
    assert error(made.ask("POST", "path", "/a")) == 405
    assert error(made.ask("GET", "other", "/a")) == 404
    assert error(made.ask("DELETE", "path", "/")) == 400


def test_links_of_a_hostile_sandbox(team: Team, tmp_path: Path) -> None:
    made = team.make("links")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    os.mkfifo(made.folder / "pipe")
    (made.folder / "abs").symlink_to(secret)
    (made.folder / "up").symlink_to("../" * 30 + str(tmp_path))
    (made.folder / "record").symlink_to("../volume.json")
    (made.folder / "loop").symlink_to("loop")
    for path in ("/abs", "/up/secret", "/record", "/../volume.json", f"/..{secret}"):
        assert error(made.get(path)) == 404
        assert "secret" not in made.get(path).text
    assert error(made.get("/loop")) == 400
    assert error(made.get("/pipe")) == 400
    assert error(made.put("/up/new")) == 404
    assert error(made.ask("DELETE", "path", "/up/secret")) == 404
    assert error(made.ask("PATCH", "path", "/abs", json={"mode": 0o777, "uid": 0})) == 404
    assert error(made.ask("POST", "dir", "/up/new")) == 404
    assert error(made.ask("GET", "dir", "/up")) == 404
    assert made.ask("DELETE", "path", "/up").status_code == 204
    assert (secret.read_text(), os.listdir(tmp_path)) == ("secret", ["secret"])
    assert "up" not in made.names()


def test_streams(team: Team, doors: E2BServer) -> None:
    made = team.make("streams")

    def pieces() -> Iterator[bytes]:
        for number in range(60):
            yield bytes([number]) * 65536

    assert made.put("/chunked", pieces()).json()["size"] == 60 * 65536
    with made.http.stream("GET", f"/volumecontent/{made.id}/file", params={"path": "/chunked"}) as answer:
        assert answer.headers["content-length"] == str(60 * 65536)
        assert b"".join(answer.iter_bytes()) == b"".join(pieces())
    assert made.put("/empty", b"").json()["size"] == 0
    assert made.get("/empty").content == b""
    too_much = bytes(9 << 20)
    assert error(made.put("/too-much", too_much)) == 413
    answer = made.put("/too-much", (too_much[at : at + 65536] for at in range(0, len(too_much), 65536)))
    assert error(answer) == 413
    # one that breaks off in the middle: nothing of it is there, and what was there stays
    made.put("/kept", b"before")
    where = urlsplit(doors.served.url)
    for path in ("/kept", "/half"):
        with socket.create_connection((where.hostname, where.port), timeout=30) as raw:
            head = (
                f"PUT /volumecontent/{made.id}/file?path={quote(path)}&force=true HTTP/1.1\r\nHost: localhost\r\n"
                f"Authorization: Bearer {made.token}\r\nContent-Length: 1000000\r\n\r\n"
            )
            raw.sendall(head.encode() + bytes(500_000))
    assert made.get("/kept").text == "before"
    for _ in range(100):  # a volume can be removed when the last who writes it has let go
        if made.team.http.delete(f"/volumes/{made.id}").status_code == 204:
            break
    else:
        pytest.fail("somebody has it still")


def test_what_the_audit_log_tells(team: Team, doors: E2BServer) -> None:
    made = team.make("told")
    made.put("/a")
    deadline = time.monotonic() + 10
    while True:  # the books are kept after the answer
        lines = [json.loads(line) for line in (doors.home / "server" / "audit.jsonl").read_text().splitlines()]
        found = [line["action"] for line in lines if "volume" in line["action"]][-2:]
        if found == ["volumes.create", "volumecontent.write"]:
            break
        assert time.monotonic() < deadline, found
    assert made.token not in (doors.home / "server" / "audit.jsonl").read_text()
