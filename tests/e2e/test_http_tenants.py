"""A key sees and touches nothing of another tenant's: every route, every WebSocket, MCP and the tunnel, in one table.

For each route tenant_table.py has what could name something of A's; a route without a row fails. With key B,
what is A's is answered as what never was: the same status, the same words. With key A, as a positive control, it is
not; and an admin who names A's tenant gets what A gets.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any

import httpx
import pytest
from tenant_table import ARCHIVE, INIT, MCP, TABLE, Refs, Row
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from layer_kit import member, tar
from routes_kit import Route, routes
from server_kit import Served, need_container, served
from sloplet.errors import SlopletError
from sloplet.process import collect, exec_request, make_capture
from sloplet.remote import place
from sloplet.remote.controller import RemoteController
from sloplet.server.keys import Keys
from sloplet.state.home import Home

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(240)]


def _name_in(route: Route) -> str:
    """What {name} and {ref} of a path are."""
    kinds = {"contexts": "context", "secrets": "secret", "templates": "template", "volumes": "volume", "keys": "key"}
    return next((ref for word, ref in kinds.items() if f"/{word}/" in route.path), "snapshot")


def _filled(value: Any, refs: Refs) -> Any:
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda match: refs.get(match[1], match[0]), value)
    if isinstance(value, dict):
        return {_filled(key, refs): _filled(each, refs) for key, each in value.items()}
    return [_filled(each, refs) for each in value] if isinstance(value, list) else value


@dataclass
class World:
    """Two tenants and what A has."""

    server: Served
    keys: dict[str, str]
    a: Refs
    ghost: Refs
    canaries: tuple[str, ...]  #: what only A's things are called

    clients: dict[str, httpx.Client] = field(default_factory=dict)

    def client(self, who: str) -> httpx.Client:
        if who not in self.clients:
            self.clients[who] = self.server.client(self.keys[who])
        return self.clients[who]

    def ask(self, who: str, route: Route, row: Row, refs: Refs) -> tuple[int, str]:
        """The status, and all that was said, with what was named made the same."""
        status, text = self.raw(who, route, row, refs)
        return status, _alike(text, refs)

    def raw(self, who: str, route: Route, row: Row, refs: Refs) -> tuple[int, str]:
        given = {**refs, "name": refs["name"]}
        path_refs = {**given, "name": refs[_name_in(route)], "ref": refs[_name_in(route)], "snapshot": refs["vsnap"]}
        if "/snapshots/{ref}" in route.path:
            path_refs["ref"] = refs["snapshot"]
        path = route.at(**path_refs)
        headers = _filled(row.headers, given)
        if who == "admin":
            headers["Sloplet-Tenant"] = self.a["tenant"]
        if route.method == "WS":
            return self._socket(who, path, row, given, headers)
        return self._http(who, route, path, row, given, headers)

    def _http(
        self, who: str, route: Route, path: str, row: Row, refs: Refs, headers: dict[str, str]
    ) -> tuple[int, str]:
        client = self.client(who)
        body: dict[str, Any] = {}
        if row.json is not None:
            body = {"json": _filled(row.json, refs)}
        elif row.content is not None:
            body = {"content": row.content(refs) if callable(row.content) else row.content}
        query = _filled(row.query, refs)
        with client.stream(route.method, path, params=query, headers=headers, **body) as answer:
            events = answer.headers.get("content-type", "").startswith("text/event-stream")
            text = "" if events and route.method == "GET" else answer.read().decode("latin-1")
        for undo in row.undo if answer.status_code < 300 else ():
            method, _, where = str(_filled(undo, refs)).partition(" ")
            assert client.request(method, where).status_code < 300
        return answer.status_code, text

    def _socket(self, who: str, path: str, row: Row, refs: Refs, headers: dict[str, str]) -> tuple[int, str]:
        url = httpx.URL(self.server.url + path, params=_filled(row.query, refs) or None)
        headers = {**headers, "Authorization": f"Bearer {self.keys[who]}"}
        heard: list[str] = []
        try:
            with connect(
                str(url.copy_with(scheme="ws")), additional_headers=headers, open_timeout=20, proxy=None
            ) as socket:
                if row.json is not None:
                    socket.send(json.dumps(_filled(row.json, refs)))
                try:
                    while len(heard) < 5:
                        message = socket.recv(timeout=0.3)
                        heard.append(message if isinstance(message, str) else "bytes")
                except ConnectionClosed as closed:
                    heard.append(f"closed {closed.rcvd.code if closed.rcvd else None}")
                except TimeoutError:
                    heard.append("open")
        except InvalidStatus as refused:
            return refused.response.status_code, (refused.response.body or b"").decode()
        return 101, "\n".join(heard)


def _alike(text: str, refs: Refs) -> str:
    """Without what differs for everybody: what was named, ids of requests, times."""
    for word in sorted((word for word in refs if len(refs[word]) > 5), key=lambda each: -len(refs[each])):
        text = text.replace(refs[word], f"<{word}>")
    text = re.sub(
        r'"(request_id|id|head|session|created_at|started_at|time|placeholder|digest)": ?("[^"]*"|[0-9.]+)', "", text
    )
    return re.sub(r"[0-9a-f]{16}", "", text)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    need_container()
    with served(tmp_path_factory.mktemp("tenants") / "home") as server, ExitStack() as held:
        keys = {
            "a": server.new_key("alphakey", "--tenant", "alphaco"),
            "b": server.new_key("betakey", "--tenant", "betaco"),
        }
        keys["admin"] = server.key
        made = _furnish(server, keys, held)
        yield made
        for client in made.clients.values():
            client.close()


def _never(like: str) -> str:
    """Something of that form that never was."""
    return "".join(random.choice("abcdef0123456789") for _ in like)


def _furnish(server: Served, keys: dict[str, str], held: ExitStack) -> World:
    spec = {
        "engine": "container", "name": "alphabox", "labels": {"of": "alphalabel"}, "undo": 2,
        "network": {"allow": ["alpha.test"], "ask": True},
        "secrets": {"ALPHA_TOKEN": {"hosts": ["alpha.test"], "value": "alphacanary-secret"}},
    }  # fmt: skip
    ours = {"tenant": "alphaco", "name": "alphabox", "label": "alphalabel", "secret": "ALPHA_TOKEN", "port": "8123"}
    with server.client(keys["a"]) as a, server.client(keys["b"]) as b:

        def made(method: str, path: str, **options: Any) -> Any:
            answer = a.request(method, path, **options)
            assert answer.status_code < 300, f"{method} {path}: {answer.text}"
            return answer.json() if answer.content else {}

        box = made("POST", "/v1/sandboxes", json=spec)["id"]
        made("PUT", f"/v1/sandboxes/{box}/files?path=kept", content=b"alphacanary-file")
        pid = made("POST", f"/v1/sandboxes/{box}/processes", json={"command": "echo alphacanary; exec sleep 600"})[
            "pid"
        ]
        made("POST", f"/v1/sandboxes/{box}/contexts", json={"language": "shell", "name": "alphactx"})
        snapshot = made("POST", f"/v1/sandboxes/{box}/snapshots", json={"name": "alphasnap"})["id"]
        made("POST", "/v1/templates", json={"sandbox": box, "name": "alphatemplate"})
        made("POST", "/v1/volumes", json={"name": "alphavolume"})
        made("POST", "/v1/volumes/alphavolume/snapshots", json={"name": "alphavsnap"})
        token = made("PUT", f"/v1/sandboxes/{box}/ports/8123", json={})["token"]
        image = made(
            "POST", "/v1/images/import", params={"name": "127.0.0.1:9/alpha:1"}, headers=ARCHIVE,
            content=tar(member("bin/alphacanary", b"x")),
        )  # fmt: skip
        public = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJhsGmFsDkmKsDBBMdUqTyT5iG5OjM2HHRmx7nWNDPhc alphassh"
        fingerprint = made("POST", "/v1/me/ssh-keys", json={"public": public})["fingerprint"]
        key = made("GET", "/v1/me")["id"]
        mcp = a.post("/mcp", json=INIT, headers=MCP)
        assert mcp.status_code == 200, mcp.text
        found = {
            "box": box, "pid": str(pid), "context": "alphactx", "snapshot": snapshot, "snapshot_name": "alphasnap",
            "template": "alphatemplate", "volume": "alphavolume", "vsnap": "alphavsnap", "image": "127.0.0.1:9/alpha:1",
            "image_digest": image["id"], "fingerprint": fingerprint, "key": key, "ask": "1",
            "mcp": mcp.headers["mcp-session-id"], "wire": "", "pool": "alphacanary-pool",
        }  # fmt: skip
        address = server.url.replace("http", "ws", 1) + "/v1/wire"
        headers = {"Authorization": f"Bearer {keys['a']}"}
        tunnel = held.enter_context(connect(address, additional_headers=headers, proxy=None))  # it stays open
        found["wire"] = json.loads(tunnel.recv(timeout=20))["session"]
        pool = {"engine": "fake", "pool": 1, "env": {"ALPHA": "alphacanary-pool"}}
        made("DELETE", f"/v1/sandboxes/{made('POST', '/v1/sandboxes', json=pool)['id']}")
        own = b.post("/v1/sandboxes", json={"engine": "container", "name": "betabox"})
        assert own.status_code == 201, own.text
    ours |= found | {"own": "betabox"}
    ghost = {
        "tenant": "ghostco", "name": "ghostbox", "label": "ghostlabel", "secret": "GHOST_TOKEN", "port": "8123",
        "box": _never(box), "pid": ours["pid"], "context": "ghostctx", "snapshot": _never(snapshot),
        "snapshot_name": "ghostsnap", "template": "ghosttemplate", "volume": "ghostvolume", "vsnap": "ghostvsnap",
        "image": "127.0.0.1:9/ghost:1", "image_digest": "sha256:" + "0" * 64, "fingerprint": "SHA256:" + "x" * 43,
        "key": _never(key), "ask": "1", "mcp": _never(ours["mcp"]), "wire": _never(ours["wire"]), "pool": "ghost",
        "own": "betabox",
    }  # fmt: skip
    canaries = (
        *(value for name, value in ours.items() if name not in ("pid", "port", "ask", "own", "wire", "pool")),
        "alphacanary", token, "alphakey", "alphassh",
    )  # fmt: skip
    return World(server, keys, ours, ghost, canaries)


def _by_id_and_name(route: Route, refs: Refs) -> list[Refs]:
    return [refs, {**refs, "box": refs["name"]}] if "{box}" in route.path else [refs]


def _foreign(text: str, world: World, *said: str) -> list[str]:
    """What of A's is in a text, though it was not said before."""
    return [canary for canary in world.canaries if canary in text and not any(canary in each for each in said)]


LABELS = sorted(TABLE)
ROUTES = {str(route): route for route in routes()}


def test_every_route_has_a_row() -> None:
    assert set(ROUTES) - set(TABLE) == set(), "say in TABLE what of another tenant's the new route could name"
    assert set(TABLE) - set(ROUTES) == set()


@pytest.mark.parametrize("label", LABELS)
def test_what_is_anothers_is_answered_as_what_never_was(world: World, label: str) -> None:
    route = ROUTES[label]
    for row in TABLE[label]:
        if row.listed or row.plain:
            _, text = world.raw("b", route, row, world.a)
            assert not _foreign(text, world, *(world.a.values() if row.said else ())), f"{row}: {text}"
            continue
        for theirs, nobodys in zip(_by_id_and_name(route, world.a), _by_id_and_name(route, world.ghost), strict=True):
            foreign, ghost = world.ask("b", route, row, theirs), world.ask("b", route, row, nobodys)
            assert foreign == ghost, row
            assert not _foreign(foreign[1], world)


def test_nothing_was_touched_by_that(world: World) -> None:
    refs = world.a
    a, at = world.client("a"), f"/v1/sandboxes/{refs['box']}"
    assert a.get(at).json()["state"] == "running"
    assert a.get(f"{at}/files?path=kept").text == "alphacanary-file"
    assert a.get(f"{at}/processes/{refs['pid']}").json()["running"]
    assert [each["name"] for each in a.get(f"{at}/snapshots").json()["items"]] == ["alphasnap"]
    assert a.get(f"{at}/network").json()["allow"] == ["alpha.test"]
    assert [each["name"] for each in a.get(f"{at}/secrets").json()["items"]] == ["ALPHA_TOKEN"]
    ports = a.get(f"{at}/ports").json()["items"]
    assert [(each["port"], each["public"]) for each in ports] == [(8123, False)]
    assert {each["name"] for each in a.get(f"{at}/contexts").json()["items"]} == {"alphactx"}
    for path in ("/v1/templates/alphatemplate", "/v1/volumes/alphavolume"):
        assert a.get(path).status_code == 200
    assert len(a.get("/v1/volumes/alphavolume/snapshots").json()["items"]) == 1
    assert a.get("/v1/images/item", params={"ref": refs["image"]}).status_code == 200
    assert len(a.get("/v1/me/ssh-keys").json()["items"]) == 1
    assert len(a.get("/v1/sandboxes").json()["items"]) == 1


#: Those that end something come last, and of these what is inside of other things first.
CONTROLS = sorted(
    (row.last, -label.count("/") if row.last else 0, label, at)
    for label, rows in TABLE.items()
    for at, row in enumerate(rows)
    if row.control
)


@pytest.mark.parametrize(("label", "at"), [(label, at) for _, _, label, at in CONTROLS])
def test_positive_control(world: World, label: str, at: int) -> None:
    """The same request of A's own key finds it; and so does an admin's who names the tenant."""
    route, row = ROUTES[label], TABLE[label][at]
    if row.plain:
        return
    if row.listed:
        for who in ("a", "admin") if label not in ("GET /v1/me", "GET /v1/me/ssh-keys", "GET /v1/audit") else ("a",):
            assert world.a[row.listed] in world.raw(who, route, row, world.a)[1], who
        return
    for theirs, nobodys in zip(_by_id_and_name(route, world.a), _by_id_and_name(route, world.ghost), strict=True):
        if route.method in ("GET", "HEAD", "WS") and label != "GET /mcp":
            assert world.ask("admin", route, row, theirs)[0] == world.ask("a", route, row, theirs)[0]
        found = world.ask("a", route, row, theirs)
        assert found != world.ask("a", route, row, nobodys), found
        if row.last:
            return  # it is gone now, by whichever name


@pytest.mark.parametrize("label", [label for label in LABELS if ROUTES[label].path not in ("/healthz", "/readyz")])
def test_only_an_admin_may_name_a_tenant(world: World, label: str) -> None:
    route = ROUTES[label]
    for name in ("alphaco", "ghostco", "main"):
        row = Row(headers={"Sloplet-Tenant": name}, json=TABLE[label][0].json)
        status, text = world.ask("b", route, row, {**world.a, "own": "betabox"})
        assert status == 403, text


# -- what is no single request ---------------------------------------------------------------------------------------


def test_events_are_ones_own(world: World) -> None:
    """Who listens to all sandboxes hears of his own: A works, then B does, and B has heard only of B."""
    b, a = world.client("b"), world.client("a")
    for route in (Route("GET", "/v1/events"), Route("WS", "/v1/events")):
        assert str(route) in TABLE
    mine = b.post("/v1/sandboxes", json={"engine": "fake", "name": "listener"}).json()["id"]
    theirs = a.post("/v1/sandboxes", json={"engine": "fake", "name": "alphatalker"}).json()["id"]
    address = world.server.url.replace("http", "ws", 1) + "/v1/events"
    headers = {"Authorization": f"Bearer {world.keys['b']}"}
    heard: list[str] = []
    with (
        world.server.client(world.keys["b"]) as listening,
        listening.stream("GET", "/v1/events") as events,
        connect(address, additional_headers=headers, proxy=None) as socket,
    ):
        assert a.post(f"/v1/sandboxes/{theirs}/exec", json={"command": "true"}).status_code == 200
        assert b.post(f"/v1/sandboxes/{mine}/exec", json={"command": "true"}).status_code == 200
        for line in events.iter_lines():
            if line.startswith("data:"):
                heard.append(line)
            if "command.exited" in line:
                break
        while "command.exited" not in heard[-1] or heard[-1].startswith("data:"):
            heard.append(str(socket.recv(timeout=20)))
    assert len(heard) >= 2
    assert all(mine in each and theirs not in each for each in heard if "sandbox" in each)
    for client, box in ((a, theirs), (b, mine)):
        client.delete(f"/v1/sandboxes/{box}")


def test_an_idempotency_key_is_its_tenants(world: World) -> None:
    headers, body = {"Idempotency-Key": "alpha-create-1"}, {"engine": "fake"}
    answers = {
        who: [world.client(who).post("/v1/sandboxes", json=body, headers=headers) for _ in range(2)]
        for who in ("a", "b")
    }
    for first, second in answers.values():
        assert first.status_code == 201
        assert "idempotent-replayed" not in first.headers
        assert second.json()["id"] == first.json()["id"]
        assert second.headers["idempotent-replayed"] == "true"
    assert answers["a"][0].json()["id"] != answers["b"][0].json()["id"]
    for who, (made, _) in answers.items():
        world.client(who).delete(f"/v1/sandboxes/{made.json()['id']}")


def test_a_tunnel_is_its_keys_own(world: World) -> None:
    """Another key that names the session gets a new one, as if there were none; and opens nothing of the first's."""
    address = world.server.url.replace("http", "ws", 1) + "/v1/wire"
    first = {"Authorization": f"Bearer {world.keys['a']}"}
    with connect(address, additional_headers=first, proxy=None) as broken:
        session = json.loads(broken.recv(timeout=20))["session"]
        broken.socket.shutdown(SHUT_RDWR)  # without a goodbye: it can be taken up for a minute
    for who, same in (("b", False), ("admin", False), ("a", True)):
        headers = {"Authorization": f"Bearer {world.keys[who]}"}
        with connect(f"{address}?session={session}&attempt=1", additional_headers=headers, proxy=None) as socket:
            assert (json.loads(socket.recv(timeout=20))["session"] == session) is same, who

    async def opened(who: str, box: str) -> str:
        controller = RemoteController(place.find(world.server.url, world.keys[who], None))
        try:
            stream = await controller.open(box, exec_request("echo reached"))
            return (await collect(stream, make_capture(1000, True, None, None))).stdout
        except SlopletError as error:
            return f"{type(error).__name__}: {error.message}".replace(box, "BOX")

    async def all_three() -> tuple[str, str, str]:
        box = world.client("a").post("/v1/sandboxes", json={"engine": "container", "name": "alphatunnel"}).json()["id"]
        return await opened("a", box), await opened("b", box), await opened("b", world.ghost["box"])

    own, foreign, ghost = asyncio.run(all_three())
    assert own == "reached\n"
    assert foreign == ghost
    assert foreign.startswith("SandboxNotFound")
    world.client("a").delete("/v1/sandboxes/alphatunnel")


def test_the_name_of_a_port_and_its_token(world: World) -> None:
    """B's token opens no port of A's, and B's sandbox has A's port's name nowhere."""
    made = world.client("a").post("/v1/sandboxes", json={"engine": "fake", "name": "alphaport"}).json()["id"]
    theirs = world.client("a").put(f"/v1/sandboxes/{made}/ports/8000", json={}).json()
    mine = world.client("b").put("/v1/sandboxes/betabox/ports/8000", json={}).json()
    host = httpx.URL(theirs["url"]).netloc.decode()
    foreign = httpx.get(world.server.url, headers={"Host": host, "Sloplet-Token": mine["token"]})
    never = httpx.get(world.server.url, headers={"Host": host.replace(made, world.ghost["box"])})
    own = httpx.get(world.server.url, headers={"Host": host, "Sloplet-Token": theirs["token"]})
    assert foreign.status_code == never.status_code == 404
    assert own.status_code != 404
    world.client("a").delete(f"/v1/sandboxes/{made}")


@pytest.mark.parametrize("how", ["revoked", "expired", "of another server", "of another server, by name"])
def test_keys_that_are_no_more_or_never_were(world: World, how: str, tmp_path: Path) -> None:
    """401 on every route that needs a key; what it had said before does not matter."""
    server = world.server
    if how == "revoked":
        key = server.new_key("goes")
        with server.client(key) as client:
            assert client.get("/v1/me").status_code == 200
        assert world.client("admin").delete("/v1/keys/goes").status_code in (200, 204)
    elif how == "expired":
        key = server.new_key("ends", "--expires", "1s")
    else:
        other = Keys(Home(tmp_path / "other").open())
        _, key = other.create("admin" if how.endswith("name") else "stranger", admin=True)
        other.close()
    with server.client(key) as client:
        until = time.monotonic() + 10  # a key that ends is known to have ended within a second
        while client.get("/v1/me").status_code == 200 and time.monotonic() < until:
            pass
        refused = [
            str(route)
            for route in ROUTES.values()
            if route.method != "WS" and route.path not in ("/healthz", "/readyz")
            if client.request(route.method, route.at(box=world.a["box"])).status_code not in (401, 429)
        ]
    assert refused == []
