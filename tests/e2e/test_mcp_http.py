"""/mcp of a real server: the official client over streamable HTTP, keys that share nothing, sessions that end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp.shared.exceptions import MCPError

from mcp_kit import http, stdio
from server_kit import Served, need_container, served, start

pytestmark = pytest.mark.anyone

BOX = "?engine=container"
HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
MODERN = "2026-07-28"
HELLO = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"},
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def container() -> None:
    need_container()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("mcp") / "home") as found:
        yield found


@pytest.fixture(scope="module")
def one(server: Served) -> str:
    return server.new_key("one")


@pytest.fixture(scope="module")
def two(server: Served) -> str:
    return server.new_key("two")


def boxes(server: Served, key: str) -> list[str]:
    with server.client(key) as client:
        return [each["id"] for each in client.get("/v1/sandboxes").json()["items"] if each["state"] == "running"]


def gone(server: Served, key: str, seconds: float = 20) -> bool:
    """Whether the key has no sandbox any more, after a while."""
    until = time.monotonic() + seconds
    while boxes(server, key):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


# -- a session -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_session_has_a_sandbox_that_ends_with_it(server: Served, one: str, mode: str) -> None:
    with http(server.url, one, BOX, mode=mode) as talk:
        assert talk.client.protocol_version == "2025-11-25"  # the newest that has sessions over HTTP
        assert boxes(server, one) == []
        talk.data("write_file", path="a.txt", content="kept between calls")
        assert talk.text("read_file", path="a.txt") == "kept between calls"
        assert talk.data("run_code", code="6 * 7")["result"] == "42"
        assert len(boxes(server, one)) == 1
        talk.data("fork")
        assert len(boxes(server, one)) == 2
        assert "may have 5" in talk.refused("fork", count=4)
        assert talk.run("list_resources").resources
    assert boxes(server, one) == []


def test_progress_comes_while_it_runs(server: Served, one: str) -> None:
    with http(server.url, one, BOX) as talk:
        talk.data("run", command="for i in 1 2; do echo step $i; sleep 0.7; done")
        assert [message for _, message in talk.progress if message in ("step 1", "step 2")] == ["step 1", "step 2"]


def test_the_url_of_a_port_is_its_public_name(server: Served, one: str) -> None:
    with http(server.url, one, BOX) as talk:
        talk.data("write_file", path="index.html", content="from inside")
        started = talk.data("start_process", command="exec python3 -u -m http.server 8000", wait=0)
        for _ in range(200):
            if "Serving" in talk.data("process_output", pid=started["pid"], wait=0.1)["process"]["stdout"]:
                break
        url = httpx.URL(talk.data("open_url", port=8000)["url"])
        assert re.fullmatch(r"8000-[a-z0-9]+\.localhost", url.host)
        base = server.url  # names below localhost need not resolve here
        with httpx.Client(base_url=base, headers={"Host": f"{url.host}:{url.port}"}, trust_env=False) as visitor:
            assert visitor.get("/index.html").status_code in (401, 403, 404)
            token = url.params["sloplet_token"]
            assert visitor.get("/index.html", headers={"Sloplet-Token": token}).text == "from inside"


# -- keys ----------------------------------------------------------------------------------------------------------


def raw(server: Served, key: str) -> httpx.Client:
    client = server.client(key)
    client.headers.update(HEADERS)
    return client


def opened(client: httpx.Client, query: str = BOX) -> str:
    """A session, by hand; its id."""
    answer = client.post(f"/mcp{query}", json=HELLO)
    assert answer.status_code == 200, answer.text
    found = answer.headers["mcp-session-id"]
    client.post(f"/mcp{query}", json={"jsonrpc": "2.0", "method": "notifications/initialized"},
                headers={"mcp-session-id": found})  # fmt: skip
    return str(found)


def asked(client: httpx.Client, session: str | None, tool: str, query: str = BOX, **arguments: Any) -> httpx.Response:
    message = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}
    return client.post(f"/mcp{query}", json=message, headers={"mcp-session-id": session} if session else {})


def result_of(answer: httpx.Response) -> Any:
    data = [line[5:] for line in answer.text.splitlines() if line.startswith("data:")]
    return json.loads(data[-1] if data else answer.text)["result"]


def test_nobody_comes_in_without_a_key(server: Served) -> None:
    with raw(server, "") as client:
        for method in ("GET", "POST", "DELETE"):
            assert client.request(method, "/mcp", json=HELLO).status_code == 401
    with raw(server, "slp_aaaaaaaaaaaa_" + "x" * 43) as client:
        assert client.post("/mcp", json=HELLO).status_code == 401


def test_a_web_page_may_not_call(server: Served, one: str) -> None:
    with raw(server, one) as client:
        assert client.post("/mcp", json=HELLO, headers={"Origin": "https://evil.test"}).status_code == 403
        assert client.post("/mcp", json=HELLO, headers={"Host": "evil.test"}).status_code == 403


def test_a_session_is_nobody_elses(server: Served, one: str, two: str) -> None:
    """Another key is told what it would be told of a session that never was, and touches nothing."""
    with raw(server, one) as mine, raw(server, two) as other, raw(server, server.key) as admin:
        session = opened(mine)
        made = result_of(asked(mine, session, "write_file", path="secret.txt", content="of one"))
        assert not made.get("isError")
        box = boxes(server, one)[0]
        never = asked(other, "0" * 32, "run", command="id")
        for stranger in (other, admin):
            for answer in (
                asked(stranger, session, "run", command="cat secret.txt"),
                stranger.get("/mcp", headers={"mcp-session-id": session, "Accept": "text/event-stream"}),
                stranger.delete("/mcp", headers={"mcp-session-id": session}),
            ):
                assert (answer.status_code, answer.text) == (404, never.text)
        assert never.status_code == 404
        # nor by a session of its own, nor without one
        own = opened(other)
        for ref in (box, "main"):
            told = result_of(asked(other, own, "read_file", path="secret.txt", sandbox=ref))
            assert told["isError"]
            assert "of one" not in json.dumps(told)
        message = {"jsonrpc": "2.0", "id": 1, "method": "resources/read",
                   "params": {"uri": f"sloplet://{box}/files/workspace/secret.txt"}}  # fmt: skip
        answer = other.post(f"/mcp{BOX}", json=message, headers={"mcp-session-id": own})
        assert "no sandbox" in answer.text
        assert "of one" not in answer.text
        assert "of one" in text(asked(mine, session, "read_file", path="secret.txt"))
        for client, each in ((mine, session), (other, own)):
            assert client.delete("/mcp", headers={"mcp-session-id": each}).status_code == 200
            assert asked(client, each, "run", command="id").status_code == 404
    assert boxes(server, one) == boxes(server, two) == []


def text(answer: httpx.Response) -> str:
    return "".join(block["text"] for block in result_of(answer)["content"])


def test_named_sessions_of_two_keys_are_two(server: Served, one: str, two: str) -> None:
    query = f"{BOX}&session=work&idle=2s"
    with http(server.url, one, query) as mine, http(server.url, two, query) as other:
        assert mine.client.protocol_version == MODERN
        mine.data("write_file", path="a.txt", content="of one")
        assert "No such file" in other.refused("read_file", path="a.txt")
        with http(server.url, one, query) as again:  # the same session: it has no other end than idleness
            assert again.text("read_file", path="a.txt") == "of one"
    assert gone(server, one)
    assert gone(server, two)


def test_without_a_session_sandboxes_are_named_in_each_call(server: Served, one: str, two: str) -> None:
    with http(server.url, one, f"{BOX}&idle=2s", mode=MODERN) as mine, http(server.url, two, BOX, mode=MODERN) as other:
        assert "call create_sandbox" in mine.refused("run", command="id")
        box = mine.data("create_sandbox")["sandbox"]["id"]
        mine.data("write_file", path="a.txt", content="of one", sandbox=box)
        assert mine.text("read_file", path="a.txt", sandbox=box) == "of one"
        assert "no sandbox" in other.refused("read_file", path="a.txt", sandbox=box)
    assert gone(server, one)


# -- what keys and operators allow ---------------------------------------------------------------------------------


def test_calls_are_in_the_audit_log(server: Served) -> None:
    key = server.new_key("audited", "--max-sandboxes", "1")
    with http(server.url, key, BOX) as talk:
        talk.data("run", command="echo of-nobodys-business")
        talk.refused("create_sandbox")
    with server.client(key) as client:
        rows = client.get("/v1/audit").json()["items"]
    by_action = {row["action"]: row for row in rows}
    assert by_action["mcp.run"]["detail"] == "echo"
    assert by_action["mcp.run"]["sandbox"]
    assert (by_action["mcp.create_sandbox"]["verdict"], by_action["mcp.create_sandbox"]["error"]) == (
        "refused", "QuotaExceeded",
    )  # fmt: skip
    assert "of-nobodys-business" not in json.dumps(rows)


def test_the_limits_of_a_key_hold(server: Served) -> None:
    key = server.new_key("small", "--max-sandboxes", "1")
    with http(server.url, key, BOX) as talk:
        talk.data("run", command="true")
        assert "QuotaExceeded" in talk.refused("create_sandbox")
    strict = server.new_key("strict", "--engines", "gvisor")
    with http(server.url, strict, BOX) as talk:
        assert "may not use the engine 'container'" in talk.refused("run", command="true")


@pytest.mark.parametrize(
    ("query", "word"),
    [("&volume=/etc:/x:ro", "operator does not allow"), ("&image=/", "operator does not allow"),
     ("&allow=169.254.169.254", "would open")],
)  # fmt: skip
def test_what_the_operator_did_not_allow(server: Served, one: str, query: str, word: str) -> None:
    with http(server.url, one, BOX + query) as talk:
        told = talk.refused("run", command="cat /x/passwd")
        assert word in told
        assert "/root" not in told
    assert boxes(server, one) == []


def test_settings_that_are_not_known_are_refused(server: Served, one: str) -> None:
    with raw(server, one) as client:
        for query in ("?imag=x", "?cpus=many", "?secret=x", "?image=a&image=b"):
            answer = client.post(f"/mcp{query}", json=HELLO)
            assert answer.status_code in (400, 422)
            assert answer.headers["content-type"] == "application/problem+json"


def test_settings_of_the_url_are_the_sandboxs(server: Served, one: str) -> None:
    with http(
        server.url, one, f"{BOX}&open_files=300&env=WORD=given&workdir=/srv/x&allow=pypi.org&max_output=1000"
    ) as talk:
        ran = talk.data("run", command="echo $WORD; pwd; ulimit -n")
        assert ran["stdout"] == "given\n/srv/x\n300\n"
        assert "may reach pypi.org" in talk.text("network_log")
        assert len(talk.text("run", command="seq 1 5000")) < 1200
        with server.client(one) as client:
            spec = client.get("/v1/sandboxes").json()["items"][0]["spec"]
        assert spec["labels"]["mcp"].startswith("mcp-")
        assert spec["ttl"] == 86_400  # whatever becomes of the server


def test_named_and_kept_sandboxes_stay(server: Served, one: str) -> None:
    with http(server.url, one, f"{BOX}&sandbox=dev") as talk:
        talk.data("write_file", path="a.txt", content="kept")
    with http(server.url, one, "?sandbox=dev") as talk:
        assert talk.text("read_file", path="a.txt") == "kept"
        talk.data("create_sandbox")
    with http(server.url, one, f"{BOX}&keep=true") as talk:
        talk.data("run", command="true")
    with server.client(one) as client:
        left = client.get("/v1/sandboxes").json()["items"]
        assert len(left) == 2
        assert {each["name"] == "dev" or each["name"].startswith("mcp-") for each in left} == {True}
        for each in left:
            client.delete(f"/v1/sandboxes/{each['id']}")


# -- ends ----------------------------------------------------------------------------------------------------------


def test_a_session_that_nobody_uses_ends(server: Served, one: str) -> None:
    with raw(server, one) as client:
        session = opened(client, f"{BOX}&idle=1s")
        assert not result_of(asked(client, session, "run", command="true")).get("isError")
        assert gone(server, one)
        assert asked(client, session, "run", command="true").status_code == 404


def test_a_long_call_is_no_idleness(server: Served, one: str) -> None:
    with raw(server, one) as client:
        session = opened(client, f"{BOX}&idle=1s")
        found = result_of(asked(client, session, "run", command="sleep 3; echo done"))
        assert found["structuredContent"]["stdout"] == "done\n"
        client.delete("/mcp", headers={"mcp-session-id": session})


def test_a_key_cannot_open_sessions_without_end(server: Served) -> None:
    key = server.new_key("many")
    with raw(server, key) as client:
        answers = [client.post("/mcp", json=HELLO) for _ in range(101)]
        assert [answer.status_code for answer in answers[:100]] == [200] * 100
        assert answers[100].status_code == 429
        for answer in answers[:100]:
            client.delete("/mcp", headers={"mcp-session-id": answer.headers["mcp-session-id"]})
        assert client.post("/mcp", json=HELLO).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"jsonrpc":"2.0"}', b"[" * 20_000, b'{"id":1e400}', b"\xff\xfe",
     b'{"jsonrpc":"2.0","id":1,"method":"tools/call"}', b'{"jsonrpc":"2.0","id":1,"method":7}'],
)  # fmt: skip
@pytest.mark.parametrize("version", ["", "2025-06-18", MODERN, "1999-01-01", "\x7f"])
def test_garbage_is_answered_with_4xx(server: Served, one: str, body: bytes, version: str) -> None:
    with raw(server, one) as client:
        answer = client.post("/mcp", content=body, headers={"mcp-protocol-version": version} if version else {})
        assert 400 <= answer.status_code < 500, answer.text
        assert "Traceback" not in answer.text
        assert "site-packages" not in answer.text
        for method in ("PUT", "PATCH"):
            assert client.request(method, "/mcp").status_code == 405


def test_the_servers_end_is_the_sessions(tmp_path: Path) -> None:
    """TERM ends their sandboxes; after KILL the next server does."""
    home = tmp_path / "home"
    with served(home) as first:
        key = first.new_key("one")
        with raw(first, key) as client:
            session = opened(client)
            assert not result_of(asked(client, session, "run", command="true")).get("isError")
            assert len(boxes(first, key)) == 1
        first.stop()
        second = start(home, key=first.key)
        try:
            assert boxes(second, key) == []
            with raw(second, key) as client:
                session = opened(client)
                assert not result_of(asked(client, session, "run", command="true")).get("isError")
            left = boxes(second, key)
        finally:
            second.stop(9)
            assert second.process.stdout is not None
            second.process.stdout.close()
        third = start(home, key=first.key)
        try:
            assert boxes(third, key) == left  # everybody has a minute to come back: see leases
        finally:
            third.stop()
            assert third.process.stdout is not None
            third.process.stdout.close()


def test_unknown_tools_and_resources(server: Served, one: str) -> None:
    with http(server.url, one, BOX) as talk:
        with pytest.raises(MCPError):
            talk.call("nothing")
        with pytest.raises(MCPError):
            talk.run("read_resource", "file:///etc/passwd")
        assert talk.data("run", command="echo on")["stdout"] == "on\n"


def test_sloplet_mcp_for_a_servers_sandboxes(server: Served, one: str, tmp_path: Path) -> None:
    """Over stdio here, the sandbox there."""
    with stdio(tmp_path / "home", "--engine", "container", env={"SLOPLET_URL": server.url, "SLOPLET_KEY": one}) as talk:
        talk.data("write_file", path="index.html", content="from there")
        assert talk.data("run_code", code="6 * 7")["result"] == "42"
        assert len(boxes(server, one)) == 1
        started = talk.data("start_process", command="exec python3 -u -m http.server 8000", wait=0)
        for _ in range(200):
            if "Serving" in talk.data("process_output", pid=started["pid"], wait=0.1)["process"]["stdout"]:
                break
        url = talk.data("open_url", port=8000)["url"]
        assert httpx.get(f"{url}/index.html", trust_env=False).text == "from there"
        copy = talk.data("fork")["sandboxes"][0]["name"]
        assert talk.text("read_file", path="index.html", sandbox=copy) == "from there"
    assert boxes(server, one) == []
    assert not (tmp_path / "home" / "sandboxes").exists()
    wrong = {"SLOPLET_URL": server.url, "SLOPLET_KEY": "slp_aaaaaaaaaaaa_" + "x" * 43}
    with stdio(tmp_path / "home", "--engine", "container", env=wrong) as talk:
        assert "KeyRefused" in talk.refused("run", command="true")
