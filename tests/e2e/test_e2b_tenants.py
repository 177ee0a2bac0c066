"""A key sees and touches nothing of another tenant's by E2B's API: every route of the control plane, in one table; and
tokens of the data plane open one sandbox, and no other.

A route without a row fails. With key B what is A's is answered as what never was: the same status, the same words. With
key A, as a positive control, it is not.
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from image_kit import BUSYBOX, busybox_image
from server_kit import Served, need_container, served
from sloplet.server.e2b.api import Route
from sloplet.server.e2b.envd import Envd
from sloplet.server.settings import ServeSettings
from sloplet.server.state import ServerState
from sloplet.state.home import Home

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(240)]

Refs = dict[str, str]


@dataclass(frozen=True)
class Row:
    """One request. ``{words}`` are filled in, in its path too: with what is A's, or with what never was."""

    json: Any = None
    query: dict[str, str] = field(default_factory=dict)
    content: bytes | None = None
    listed: bool = False  #: nothing is named: what A has is in A's answer, and nothing of A's in B's
    denied: tuple[int, ...] = (404,)  #: what B is answered
    token: bool = False  #: it is opened by a volume's token, not by a key
    control: bool = True  #: A's own answer can be told from the one about what never was
    last: bool = False  #: ends something: the control comes after all others


SHA = "a" * 64
TABLE: dict[str, tuple[Row, ...]] = {
    # -- sandboxes
    "POST /v2/sandboxes": (
        Row(json={"templateID": "{template}"}, denied=(400, 403, 404), control=False),
        Row(json={"templateID": "base", "volumeMounts": [{"name": "{volume_name}", "path": "/data"}]},
            denied=(400, 404)),
    ),
    "POST /sandboxes": (Row(json={"templateID": "{template}"}, denied=(400, 403, 404), control=False),),
    "GET /v2/sandboxes": (Row(listed=True), Row(query={"metadata": "of=a-canary"}, listed=True)),
    "GET /sandboxes": (Row(listed=True),),
    "GET /sandboxes/{sandbox}": (Row(),),
    "DELETE /sandboxes/{sandbox}": (Row(last=True),),
    "POST /v2/sandboxes/{sandbox}/connect": (Row(json={"timeout": 60}),),
    "POST /sandboxes/{sandbox}/connect": (Row(json={"timeout": 60}),),
    "POST /sandboxes/{sandbox}/resume": (Row(json={"timeout": 60}),),
    "POST /sandboxes/{sandbox}/timeout": (Row(json={"timeout": 200}),),
    "POST /sandboxes/{sandbox}/refreshes": (Row(json={"duration": 60}),),
    "POST /sandboxes/{sandbox}/pause": (Row(json={}, control=False),),
    "POST /sandboxes/{sandbox}/fork": (Row(json={"count": 1}, control=False),),
    "POST /sandboxes/{sandbox}/snapshots": (Row(json={}, control=False),),
    "PUT /sandboxes/{sandbox}/network": (Row(json={}),),
    "GET /sandboxes/metrics": (Row(query={"sandbox_ids": "{sandbox}"}, listed=True, control=False),),
    "GET /sandboxes/{sandbox}/metrics": (Row(),),
    "GET /sandboxes/{sandbox}/logs": (Row(),),
    "GET /v2/sandboxes/{sandbox}/logs": (Row(),),
    "GET /snapshots": (Row(query={"sandboxID": "{sandbox}"}, listed=True, control=False),),
    # -- volumes
    "GET /volumes": (Row(listed=True),),
    "POST /volumes": (Row(json={"name": "{volume_name}"}, denied=(201,), control=False),),  # a name of B's own
    "GET /volumes/{volume}": (Row(),),
    "DELETE /volumes/{volume}": (Row(last=True),),
    "GET /volumecontent/{volume}/path": (Row(query={"path": "/"}, token=True, denied=(401, 403, 404)),),
    "PATCH /volumecontent/{volume}/path": (
        Row(json={"mode": 448}, query={"path": "/"}, token=True, denied=(401, 403, 404)),
    ),
    "DELETE /volumecontent/{volume}/path": (
        Row(query={"path": "/x"}, token=True, denied=(401, 403, 404), control=False),
    ),
    "GET /volumecontent/{volume}/dir": (Row(query={"path": "/"}, token=True, denied=(401, 403, 404)),),
    "POST /volumecontent/{volume}/dir": (Row(query={"path": "/d"}, token=True, denied=(401, 403, 404)),),
    "GET /volumecontent/{volume}/file": (
        Row(query={"path": "/x"}, token=True, denied=(401, 403, 404), control=False),
    ),
    "PUT /volumecontent/{volume}/file": (
        Row(query={"path": "/x"}, content=b"x", token=True, denied=(401, 403, 404)),
    ),
    # -- secrets and teams
    "GET /secrets": (Row(listed=True),),
    "POST /secrets": (Row(json={"name": "{secret_name}", "value": "v"}, denied=(201,), control=False),),
    "GET /secrets/{secret}": (Row(),),
    "POST /secrets/{secret}": (Row(json={"value": "w"}),),
    "DELETE /secrets/{secret}": (Row(last=True),),
    "GET /teams": (Row(listed=True),),
    "GET /teams/{team}/metrics": (Row(denied=(403, 404)),),
    "GET /teams/{team}/metrics/max": (Row(query={"metric": "concurrent_sandboxes"}, denied=(403, 404)),),
    # -- templates
    "POST /v3/templates": (Row(json={"name": "b-own"}, denied=(202,), control=False),),
    "POST /v2/templates": (Row(json={"alias": "b-own2"}, denied=(202, 400), control=False),),
    "POST /templates": (Row(json={"alias": "b-own3"}, denied=(202, 400), control=False),),
    "GET /templates": (Row(listed=True, control=False),),
    "GET /v2/templates": (Row(listed=True, control=False),),
    "GET /templates/{template}": (Row(denied=(403, 404)),),
    "PATCH /templates/{template}": (Row(json={"public": False}, denied=(403, 404)),),
    "PATCH /v2/templates/{template}": (Row(json={"public": False}, denied=(403, 404)),),
    "DELETE /templates/{template}": (Row(denied=(403, 404), last=True),),
    "GET /templates/{template}/files/{hash}": (Row(denied=(403, 404)),),
    "PUT /templates/{template}/upload/{hash}": (Row(content=b"x", denied=(401, 403, 404), control=False),),
    "POST /v2/templates/{template}/builds/{build}": (
        Row(json={"fromTemplate": "base", "steps": []}, denied=(403, 404), control=False),
    ),
    "GET /templates/{template}/builds/{build}/status": (Row(denied=(403, 404)),),
    "GET /templates/{template}/builds/{build}/logs": (Row(denied=(403, 404)),),
    "GET /templates/aliases/{alias}": (Row(denied=(403, 404)),),
    "POST /templates/tags": (Row(json={"target": "{alias}:default", "tags": ["x"]}, denied=(403, 404), control=False),),
    "DELETE /templates/tags": (Row(json={"name": "{alias}", "tags": ["x"]}, denied=(403, 404), control=False),),
    "GET /templates/{template}/tags": (Row(denied=(403, 404)),),
}  # fmt: skip


def _routes() -> list[Route]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        facade = ServerState(Home(Path(folder) / "home"), ServeSettings()).e2b
        assert facade is not None
        return list(facade.api.routes)


ROUTES = {f"{route.method} {route.path}": route for route in _routes()}
CASES = [(label, row) for label in ROUTES for row in TABLE.get(label, ())]


def test_every_route_has_a_row() -> None:
    assert len(ROUTES) > 20
    assert [label for label in ROUTES if label not in TABLE] == []


@dataclass
class World:
    server: Served
    keys: dict[str, str]
    a: Refs
    ghost: Refs
    tokens: dict[str, str] = field(default_factory=dict)  #: of volumes, by who has them

    def ask(self, who: str, label: str, row: Row, refs: Refs) -> httpx.Response:
        route = ROUTES[label]
        headers = {"X-API-Key": self.keys[who]}
        if row.token:
            headers = {"Authorization": f"Bearer {self.tokens[who]}"}
        body: dict[str, Any] = {}
        if row.json is not None:
            body["json"] = _filled(row.json, refs)
        elif row.content is not None:
            body["content"] = row.content
            headers["Content-Type"] = "application/octet-stream"
        with self.server.client("") as client:
            return client.request(
                route.method, _filled(route.path, refs), params=_filled(row.query, refs), headers=headers, **body
            )


def _filled(value: Any, refs: Refs) -> Any:
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda match: refs[match[1]], value)
    if isinstance(value, dict):
        return {key: _filled(each, refs) for key, each in value.items()}
    return [_filled(each, refs) for each in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    need_container()
    if BUSYBOX is None:
        pytest.skip("busybox-static is not installed")
    home = tmp_path_factory.mktemp("e2b-tenants") / "home"
    passwd = "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
    home.mkdir(mode=0o700)
    busybox_image(Home(home), "sloplet/e2b-base", files={"etc/passwd": passwd, "home/user/.keep": ""})
    with served(home, "--e2b-engine", "container") as server:
        keys = {who: server.new_key(who) for who in ("a", "b")}
        found = World(server, keys, {}, {})
        _make_all(found)
        yield found


def _make_all(world: World) -> None:
    made: dict[str, dict[str, Any]] = {}
    for who in ("a", "b"):
        with world.server.client("") as client:
            client.headers["X-API-Key"] = world.keys[who]

            def ask(method: str, path: str, body: Any = None, client: httpx.Client = client) -> Any:
                answer = client.request(method, path, json=body)
                assert answer.status_code < 300, (path, answer.text)
                return answer.json()

            box = ask("POST", "/v2/sandboxes", {"templateID": "base", "metadata": {"of": f"{who}-canary"}})
            volume = ask("POST", "/volumes", {"name": f"{who}-volume"})
            secret = ask("POST", "/secrets", {"name": f"{who}-secret", "value": "v"})
            team = ask("GET", "/teams")[0]
            template: dict[str, Any] = {}
            if "POST /v3/templates" in ROUTES:
                template = ask("POST", "/v3/templates", {"name": f"{who}-template"})
            made[who] = {"box": box, "volume": volume, "secret": secret, "team": team, "template": template}
            world.tokens[who] = volume["token"]
    of = made["a"]
    world.a = {
        "sandbox": of["box"]["sandboxID"], "volume": of["volume"]["volumeID"], "volume_name": "a-volume",
        "secret": _id(of["secret"]), "secret_name": "a-secret", "team": of["team"]["teamID"],
        "template": of["template"].get("templateID", "none"), "build": of["template"].get("buildID", "none"),
        "alias": "a-template", "hash": SHA,
    }  # fmt: skip
    world.ghost = {
        "sandbox": "zzzzzzzzzzzz", "volume": str(uuid.uuid4()), "volume_name": "no-volume", "secret": str(uuid.uuid4()),
        "secret_name": "no-secret", "team": str(uuid.uuid4()), "template": "zzzzzzzzzzzzzzzzzzzz",
        "build": str(uuid.uuid4()), "alias": "no-template", "hash": SHA,
    }  # fmt: skip


def _id(secret: dict[str, Any]) -> str:
    return str(secret.get("secretID") or secret.get("id"))


def _alike(text: str, refs: Refs) -> str:
    for name in sorted(refs, key=lambda each: -len(refs[each])):
        text = text.replace(refs[name], f"<{name}>")
    return text


@pytest.mark.parametrize(("label", "row"), [case for case in CASES if not case[1].listed])
def test_what_is_as_is_to_b_as_if_it_never_was(world: World, label: str, row: Row) -> None:
    theirs = world.ask("b", label, row, world.a)
    never = world.ask("b", label, row, world.ghost)
    assert theirs.status_code in row.denied, theirs.text
    if row.denied[0] < 300:  # B's own, by a name that A has, too
        return
    assert theirs.status_code == never.status_code
    assert _alike(theirs.text, world.a) == _alike(never.text, world.ghost)
    assert isinstance(theirs.json()["message"], str)


@pytest.mark.parametrize(("label", "row"), [case for case in CASES if case[1].listed])
def test_lists_of_b_have_nothing_of_a(world: World, label: str, row: Row) -> None:
    answer = world.ask("b", label, row, world.a)
    assert answer.status_code < 500
    text = answer.text if answer.status_code == 200 else ""
    for name in ("sandbox", "volume", "secret", "team"):
        assert world.a[name] not in text
    assert "a-canary" not in text
    if row.control:
        own = world.ask("a", label, row, world.a)
        assert own.status_code == 200
        assert any(world.a[name] in own.text for name in ("sandbox", "volume", "secret", "team", "template"))


@pytest.mark.parametrize(
    ("label", "row"),
    sorted((case for case in CASES if case[1].control and not case[1].listed), key=lambda case: case[1].last),
)
def test_the_same_of_a_is_answered(world: World, label: str, row: Row) -> None:
    """After all that B has tried; what ends something comes last."""
    answer = world.ask("a", label, row, world.a)
    assert answer.status_code < 300 or answer.status_code == 409, answer.text
    if row.json and "volumeMounts" in row.json:
        with world.server.client("") as client:
            path = f"/sandboxes/{answer.json()['sandboxID']}"
            client.delete(path, headers={"X-API-Key": world.keys["a"]})


# -- tokens ---------------------------------------------------------------------------


@dataclass
class Two:
    """Two sandboxes, of A and of B, with their tokens."""

    server: Served
    ids: tuple[str, str]
    tokens: tuple[str, str]
    traffic: tuple[str, str]

    def client(self) -> httpx.Client:
        """From an address of its own: wrong tokens of one address are soon answered 429."""
        return stranger(self.server)


_ADDRESSES = itertools.count(2)


def stranger(server: Served) -> httpx.Client:
    number = next(_ADDRESSES)
    transport = httpx.HTTPTransport(local_address=f"127.9.{number >> 8}.{number & 255}")
    return httpx.Client(base_url=server.url, transport=transport, timeout=60)


@pytest.fixture(scope="module")
def two(world: World) -> Two:
    found = []
    for who in ("a", "b"):
        with world.server.client("") as client:
            asked = {"templateID": "base", "network": {"allowPublicTraffic": False}}
            answer = client.post("/v2/sandboxes", json=asked, headers={"X-API-Key": world.keys[who]})
            assert answer.status_code == 201, answer.text
            found.append(answer.json())
    first, second = found
    return Two(
        world.server, (first["sandboxID"], second["sandboxID"]), (first["envdAccessToken"], second["envdAccessToken"]),
        (first["trafficAccessToken"], second["trafficAccessToken"]),
    )  # fmt: skip


_ENVD = Envd()
RPCS = sorted({*_ENVD._unary, *_ENVD._streams})
PLAIN = sorted(_ENVD._plain)


def test_the_table_of_calls_is_the_servers() -> None:
    assert "/process.Process/Start" in RPCS
    assert ("GET", "/files") in PLAIN


@pytest.mark.parametrize("path", RPCS)
def test_a_call_needs_the_token_of_its_sandbox(two: Two, path: str) -> None:
    with two.client() as client:
        for shown in (None, "", "x", two.tokens[1], two.traffic[0], two.tokens[0][:-1], two.tokens[0].upper()):
            given = {} if shown is None else {"X-Access-Token": shown}
            answer = client.post(path, json={}, headers={"E2b-Sandbox-Id": two.ids[0], **given})
            assert answer.status_code == 401, (shown, answer.text)
            assert answer.json()["code"] == "unauthenticated"
        right = client.post(path, json={}, headers={"E2b-Sandbox-Id": two.ids[0], "X-Access-Token": two.tokens[0]})
        assert right.status_code != 401


@pytest.mark.parametrize(("method", "path"), [case for case in PLAIN if case[1] != "/health"])
def test_so_does_a_file(two: Two, method: str, path: str) -> None:
    with two.client() as client:
        for shown in (None, "x", two.tokens[1]):
            given = {} if shown is None else {"X-Access-Token": shown}
            answer = client.request(method, path, headers={"E2b-Sandbox-Id": two.ids[0], **given})
            assert answer.status_code == 401, answer.text
            assert answer.json()["code"] == 401


@pytest.mark.parametrize("path", ["/execute", "/contexts"])
def test_so_does_code(two: Two, path: str) -> None:
    with two.client() as client:
        for given in ({}, {"X-Access-Token": two.tokens[1]}, {"e2b-traffic-access-token": two.traffic[1]}):
            headers = {"E2b-Sandbox-Id": two.ids[0], "E2b-Sandbox-Port": "49999", **given}
            assert client.post(path, json={"code": "1"}, headers=headers).status_code in (401, 403)


def test_a_token_of_one_that_is_not_there_opens_nothing(two: Two) -> None:
    with two.client() as client:
        headers = {"E2b-Sandbox-Id": "zzzzzzzzzzzz", "X-Access-Token": two.tokens[0]}
        answer = client.post("/process.Process/List", json={}, headers=headers)
        assert answer.status_code == 502
        assert answer.json() == {"sandboxId": "zzzzzzzzzzzz", "message": "The sandbox was not found", "code": 502}


def test_a_key_is_no_token(world: World, two: Two) -> None:
    with two.client() as client:
        for key in world.keys.values():
            headers = {"E2b-Sandbox-Id": two.ids[0], "X-API-Key": key, "Authorization": f"Bearer {key}"}
            assert client.post("/process.Process/List", json={}, headers=headers).status_code == 401


def test_ports_that_are_not_public_need_their_own_token(two: Two) -> None:
    with two.client() as client:
        for shown, status in (
            (None, 403),
            ("x", 403),
            (two.traffic[1], 403),
            (two.tokens[0], 403),
            (two.traffic[0], 502),
        ):
            headers = {"E2b-Sandbox-Id": two.ids[0], "E2b-Sandbox-Port": "8000"}
            if shown is not None:
                headers["e2b-traffic-access-token"] = shown
            answer = client.get("/", headers=headers)
            assert answer.status_code == status, answer.text
            assert answer.json()["sandboxId"] == two.ids[0]


def test_a_key_that_is_revoked_opens_no_sandbox_of_its_own(world: World) -> None:
    server = world.server
    key = server.new_key("short")
    with server.client("") as client:
        made = client.post("/v2/sandboxes", json={"templateID": "base"}, headers={"X-API-Key": key}).json()
        headers = {"E2b-Sandbox-Id": made["sandboxID"], "X-Access-Token": made["envdAccessToken"]}
        assert client.post("/process.Process/List", json={}, headers=headers).status_code == 200
        with server.client() as admin:
            assert admin.delete("/v1/keys/short").status_code in (200, 204)
        answer = client.post("/process.Process/List", json={}, headers=headers)
        assert answer.status_code == 401, answer.text
        assert json.loads(answer.text)["code"] == "unauthenticated"


def test_who_guesses_tokens_is_held_up(two: Two) -> None:
    with two.client() as client:
        wrong = {"E2b-Sandbox-Id": two.ids[0], "X-Access-Token": "x" * 64}
        found = {client.post("/process.Process/List", json={}, headers=wrong).status_code for _ in range(30)}
        assert found == {401, 429}
        right = {"E2b-Sandbox-Id": two.ids[0], "X-Access-Token": two.tokens[0]}
        assert client.post("/process.Process/List", json={}, headers=right).status_code == 200
