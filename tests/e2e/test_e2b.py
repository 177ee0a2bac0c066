"""E2B's own clients, unchanged, against a server: old and new, by URL and by name over TLS, on each engine.

What they do is in tests/e2b: programs as E2B's users write them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2b_kit import HERE, E2BServer, e2b_server
from sloplet.server.e2b.keys import to_e2b

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BServer]:
    with e2b_server(Path(tmp_path_factory.mktemp("e2b")) / "home") as found:
        yield found


def need(server: E2BServer, engine: str) -> None:
    if engine not in server.keys:
        pytest.skip(f"{engine} cannot run here")


_ANYONE = pytest.mark.anyone  # where it makes no difference who the server is, one half of the tests does


@pytest.mark.parametrize(
    ("version", "mode"),
    [
        ("new", "domain"),
        *(pytest.param(*each, marks=_ANYONE) for each in (("new", "url"), ("old", "url"), ("old", "domain"))),
    ],
)
def test_python(server: E2BServer, version: str, mode: str) -> None:
    server.pytest(version, mode, "container")


@pytest.mark.parametrize(("version", "mode"), [("new", "domain"), pytest.param("old", "url", marks=_ANYONE)])
def test_python_on_gvisor(server: E2BServer, version: str, mode: str) -> None:
    need(server, "gvisor")
    server.pytest(version, mode, "gvisor")


@pytest.mark.parametrize(("version", "mode"), [("new", "url"), ("new", "domain"), ("old", "url")])
@_ANYONE
@pytest.mark.parametrize("program", sorted(path.name for path in (HERE / "js").glob("*.test.cjs")))
def test_javascript(server: E2BServer, program: str, version: str, mode: str) -> None:
    engine = "gvisor" if mode == "domain" and "gvisor" in server.keys else "container"
    server.node(version, HERE / "js" / program, mode, engine)


@pytest.fixture
def api(server: E2BServer) -> Iterator[httpx.Client]:
    """What clients do not show: older paths, errors' documents."""
    headers = {"X-API-Key": to_e2b(server.keys["container"])}
    with httpx.Client(base_url=server.served.url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


def test_what_is_asked_twice_is_done_once(api: httpx.Client) -> None:
    key = {"Idempotency-Key": str(uuid.uuid4())}
    first, again = (api.post("/v2/sandboxes", json={"templateID": "base"}, headers=key) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    other = api.post("/v2/sandboxes", json={"templateID": "base", "timeout": 7}, headers=key)
    assert (other.status_code, other.json()["error_code"]) == (422, "idempotency_request_mismatch")
    assert api.delete(f"/sandboxes/{first.json()['sandboxID']}").status_code == 204


def test_the_first_versions_paths(api: httpx.Client) -> None:
    made = api.post("/sandboxes", json={"templateID": "base", "secure": False, "timeout": 60}).json()
    assert "envdAccessToken" not in made
    path = f"/sandboxes/{made['sandboxID']}"
    assert made["sandboxID"] in [each["sandboxID"] for each in api.get("/sandboxes").json()]
    assert api.post(f"{path}/refreshes", json={"duration": 120}).status_code == 204
    headers = {"E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": "49983"}
    assert httpx.get(f"{api.base_url}/health", headers=headers, trust_env=False).status_code == 204
    assert httpx.get(f"{api.base_url}/files?path=/etc/hostname", headers=headers, trust_env=False).status_code == 200
    assert api.post(f"{path}/pause", json={"memory": False}).status_code == 204
    assert api.post(f"{path}/pause").status_code == 409
    assert httpx.get(f"{api.base_url}/health", headers=headers, trust_env=False).status_code == 502
    assert api.post(f"{path}/resume", json={"timeout": 60}).status_code == 201
    assert api.post(f"{path}/resume", json={}).status_code == 409
    assert api.delete(path).status_code == 204
    gone = api.get(path)
    assert (gone.status_code, gone.json()["code"], gone.headers["should-retry"]) == (404, 404, "false")


def test_errors_are_documents_of_e2bs(api: httpx.Client) -> None:
    for answer, status in (
        (api.post("/v2/sandboxes", json={"templateID": ""}), 400),
        (api.post("/v2/sandboxes", json={"templateID": "base", "timeout": "soon"}), 400),
        (api.post("/v2/sandboxes", content=b"{", headers={"Content-Type": "application/json"}), 400),
        (api.post("/v2/sandboxes", content=b"a=b"), 415),
        (api.get("/v2/sandboxes?limit=0"), 400),
        (api.get("/v2/sandboxes?nextToken=x"), 400),
        (api.patch("/sandboxes/nothing"), 405),
        (api.get("/sandboxes/nothing/here"), 404),
        (api.get("/sandboxes", headers={"X-API-Key": "e2b_00"}), 401),
    ):
        assert answer.status_code == status, answer.text
        assert answer.json()["code"] == status
        assert answer.json()["message"]


def test_what_ended_by_itself_is_forgotten(server: E2BServer, api: httpx.Client) -> None:
    """And nobody is told otherwise before."""
    made = api.post("/v2/sandboxes", json={"templateID": "base", "timeout": 1}).json()
    headers = {"E2b-Sandbox-Id": made["sandboxID"], "X-Access-Token": made["envdAccessToken"]}
    with httpx.Client(base_url=api.base_url, headers=headers, timeout=60, trust_env=False) as data:
        while (answer := data.get("/health")).status_code == 204:
            pass
    assert answer.status_code == 502
    assert answer.json() == {"sandboxId": made["sandboxID"], "message": "The sandbox was not found", "code": 502}
