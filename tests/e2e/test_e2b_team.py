"""What E2B's clients ask of a team besides its sandboxes: secrets, metrics, who it is."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from e2b_kit import E2BServer, e2b_server
from server_kit import need_container

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(300)]
VALUE = "a-value-that-nobody-sees"


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BServer]:
    need_container()
    with e2b_server(tmp_path_factory.mktemp("e2b") / "home") as running:
        yield running


@pytest.fixture
def http(doors: E2BServer) -> Iterator[httpx.Client]:
    with doors.served.client("") as made:
        made.headers["X-API-KEY"] = doors.served.key
        yield made


@pytest.fixture
def others(doors: E2BServer) -> Iterator[httpx.Client]:
    """Another tenant's."""
    name = f"other-{time.monotonic_ns()}"
    with doors.served.client("") as made:
        made.headers["X-API-KEY"] = doors.served.new_key(name, "--tenant", "other")
        yield made


def error(answer: httpx.Response) -> int:
    found = answer.json()
    assert found["code"] == answer.status_code, found
    assert VALUE not in answer.text
    return answer.status_code


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_secrets_by_the_client(doors: E2BServer) -> None:
    found = doors.run_python("new", """
from e2b import Secret
def failure(work):
    try:
        work()
    except Exception as error:
        return type(error).__name__
made = Secret.create("My_Key", value, metadata={"a": "b"})
found = {"made": [made.name, made.version, made.metadata, made.secret_id[:4]]}
found["twice"] = failure(lambda: Secret.create("my_key", value))
changed = Secret.update("my_key", value + "2")
found["changed"] = [changed.version, changed.metadata, changed.secret_id == made.secret_id]
found["again"] = [Secret.update(made.secret_id, value, metadata={}).metadata, Secret.get_info("MY_KEY").version]
Secret.create("second", value)
pages = Secret.list(limit=1)
first = pages.next_items()
found["pages"] = [first[0].name, pages.has_next, pages.next_items()[0].name, pages.has_next]
found["gone"] = [Secret.destroy("my_key"), Secret.destroy(made.secret_id), Secret.destroy("second")]
found["unknown"] = [failure(lambda: Secret.get_info("my_key")), failure(lambda: Secret.update("my_key", "x"))]
print(json.dumps(found))
""", value=VALUE)  # fmt: skip
    assert found == {
        "made": ["my_key", 1, {"a": "b"}, "sec_"], "twice": "SecretException", "changed": [2, {"a": "b"}, True],
        "again": [{}, 3], "pages": ["second", True, "my_key", False], "gone": [True, False, True],
        "unknown": ["SecretNotFoundException"] * 2,
    }  # fmt: skip


def test_secrets_are_a_tenants_own_told_to_nobody(doors: E2BServer, http: httpx.Client, others: httpx.Client) -> None:
    made = http.post("/secrets", json={"name": "shared-name", "value": VALUE, "metadata": {"k": "v"}})
    assert made.status_code == 201
    ours = made.json()["secretID"]
    assert others.get("/secrets").json() == []
    for ref in (ours, "shared-name"):
        assert error(others.get(f"/secrets/{ref}")) == 404
        assert error(others.post(f"/secrets/{ref}", json={"value": "x"})) == 404
        assert error(others.delete(f"/secrets/{ref}")) == 404
    assert others.post("/secrets", json={"name": "shared-name", "value": "theirs"}).status_code == 201
    assert others.delete("/secrets/shared-name").status_code == 204
    told = [made, http.get("/secrets"), http.get(f"/secrets/{ours}"), http.get("/secrets/SHARED-NAME")]
    assert [answer.status_code for answer in told] == [201, 200, 200, 200]
    assert not any(VALUE in answer.text for answer in told)
    files = [path for path in doors.home.rglob("*") if path.is_file() and "images" not in path.parts]
    assert any(b"shared-name" in path.read_bytes() for path in files)  # it is there that one would look
    assert not [path for path in files if VALUE.encode() in path.read_bytes()]
    assert http.delete(f"/secrets/{ours}").status_code == 204


def test_secrets_that_make_no_sense(http: httpx.Client) -> None:
    long = "v" * 70_000
    for body in (
        {}, {"name": "a"}, {"value": VALUE}, {"name": "", "value": VALUE}, {"name": "a{b}", "value": VALUE},
        {"name": "a\nb", "value": VALUE}, {"name": "a/b", "value": VALUE}, {"name": "sec_a", "value": VALUE},
        {"name": "n" * 200, "value": VALUE}, {"name": "a", "value": ""}, {"name": "a", "value": 5},
        {"name": "a", "value": long}, {"name": "a", "value": VALUE, "metadata": {"a": 1}},
        {"name": "a", "value": VALUE, "metadata": {str(each): "" for each in range(33)}},
        {"name": "a", "value": VALUE, "metadata": {"a": "v" * 1025}}, {"name": 5, "value": VALUE},
    ):  # fmt: skip
        assert error(http.post("/secrets", json=body)) == 400
    for query in ("limit=0", "limit=101", "limit=x", "nextToken=%00"):
        assert error(http.get(f"/secrets?{query}")) == 400
    assert http.get("/secrets").json() == []


# -- metrics and the rest ----------------------------------------------------------------------------------------------


def test_metrics(doors: E2BServer, http: httpx.Client, others: httpx.Client) -> None:
    made = http.post("/v2/sandboxes", json={"templateID": "base", "envVars": {"MINE": "1"}, "timeout": 300}).json()
    box, inside = made["sandboxID"], {"E2b-Sandbox-Id": made["sandboxID"], "X-Access-Token": made["envdAccessToken"]}
    first = http.get(f"/sandboxes/{box}/metrics").json()
    assert len(first) == 1
    fields = {"timestamp", "timestampUnix", "cpuCount", "cpuUsedPct", "memUsed", "memTotal", "memCache", "diskUsed",
              "diskTotal"}  # fmt: skip
    assert set(first[0]) == fields
    assert (first[0]["cpuCount"], first[0]["memTotal"]) == (2, 1024 << 20)
    assert 0 < first[0]["memUsed"] < first[0]["memTotal"]
    second = first[0]["timestampUnix"]
    assert http.get(f"/sandboxes/{box}/metrics?start={second}&end={second}").json() == first
    assert http.get(f"/sandboxes/{box}/metrics?end={second - 1}").json() == []
    assert error(http.get(f"/sandboxes/{box}/metrics?start=5&end=1")) == 400
    assert error(http.get(f"/sandboxes/{box}/metrics?start=now")) == 400
    assert http.get(f"/sandboxes/metrics?sandbox_ids={box},none").json() == {"sandboxes": {box: first[0]}}
    assert error(others.get(f"/sandboxes/{box}/metrics")) == 404
    assert others.get(f"/sandboxes/metrics?sandbox_ids={box}").json() == {"sandboxes": {}}
    assert error(http.get(f"/sandboxes/metrics?sandbox_ids={','.join(map(str, range(101)))}")) == 400
    # what envd says of itself
    told = http.get("/metrics", headers=inside).json()
    assert told["ts"] >= second
    assert {"cpu_count", "cpu_used_pct", "mem_used", "mem_total", "disk_used", "disk_total"} <= set(told)
    assert http.get("/envs", headers=inside).json() | {"E2B_TEMPLATE_ID": ""} == {
        "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": box, "E2B_TEMPLATE_ID": "", "MINE": "1",
    }  # fmt: skip
    for path in ("/metrics", "/envs"):
        assert error(http.get(path, headers={"E2b-Sandbox-Id": box})) == 401
    # more comes by itself
    until = time.monotonic() + 30
    while len(found := http.get(f"/sandboxes/metrics?sandbox_ids={box}").json()["sandboxes"]) == 1:
        if found[box]["timestamp"] != first[0]["timestamp"] or time.monotonic() > until:
            break
        time.sleep(0.2)
    assert found[box]["timestamp"] != first[0]["timestamp"]
    assert len(http.get(f"/sandboxes/{box}/metrics").json()) > 1
    assert http.get(f"/sandboxes/{box}/logs").json() == {"logs": [], "logEntries": []}
    assert http.get(f"/v2/sandboxes/{box}/logs").json() == {"logs": []}
    assert error(others.get(f"/v2/sandboxes/{box}/logs")) == 404
    assert http.delete(f"/sandboxes/{box}").status_code == 204
    for path in ("metrics", "logs"):
        assert error(http.get(f"/sandboxes/{box}/{path}")) == 404


def test_who_sleeps_is_let_sleep(doors: E2BServer, http: httpx.Client) -> None:
    made = http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 300}).json()
    box = made["sandboxID"]
    assert len(http.get(f"/sandboxes/{box}/metrics").json()) == 1
    with doors.served.client() as own:
        paused = own.post(f"/v1/sandboxes/{box}/pause")
        if paused.status_code != 200:
            http.delete(f"/sandboxes/{box}")
            pytest.skip(f"the engine here cannot pause: {paused.text}")
        for _ in range(3):
            assert http.get(f"/sandboxes/{box}/metrics").json()  # what it was
        assert own.get(f"/v1/sandboxes/{box}").json()["state"] == "paused"
    assert http.delete(f"/sandboxes/{box}").status_code == 204


def test_teams(http: httpx.Client, others: httpx.Client) -> None:
    (ours,), (theirs,) = http.get("/teams").json(), others.get("/teams").json()
    assert (set(ours), ours["isDefault"], ours["apiKey"]) == ({"teamID", "name", "apiKey", "isDefault"}, True, "")
    assert ours["teamID"] != theirs["teamID"]
    (now,) = http.get(f"/teams/{ours['teamID']}/metrics").json()
    assert now["concurrentSandboxes"] == 0
    assert http.get(f"/teams/{ours['teamID']}/metrics/max?metric=concurrent_sandboxes").json()["value"] == 0
    assert error(http.get(f"/teams/{theirs['teamID']}/metrics")) == 403
