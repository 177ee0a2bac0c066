"""Sandboxes over HTTP, on a real server: made, listed, ended; what keys and the operator allow; done once; archives."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from server_kit import Served, end_keepers, need_container, served, start
from sloplet.controller import SandboxInfo
from sloplet.spec import SandboxSpec

pytestmark = [pytest.mark.anyone, pytest.mark.timeout(180)]

ARCHIVE = {"Content-Type": "application/vnd.sloplet.archive"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the operator allows."""
    folder = tmp_path_factory.mktemp("shared")
    folder.chmod(0o777)
    (folder / "hello").write_text("from the host\n")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), "--allow-path", f"{shared}:rw", "--max-upload", "8m") as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def real(server: Served) -> str:
    """An engine with real processes."""
    need_container()
    return "container"


def create(http: httpx.Client, status: int = 201, /, *, headers: Any = None, **asked: Any) -> Any:
    answer = http.post("/v1/sandboxes", json={"engine": "fake", **asked}, headers=headers)
    assert answer.status_code == status, answer.text
    if status >= 400:
        check_problem(answer)
    return answer.json()


def check_problem(answer: httpx.Response) -> Any:
    """A problem document, and nothing that is nobody's business."""
    assert answer.headers["content-type"] == "application/problem+json"
    found = answer.json()
    assert found["status"] == answer.status_code
    assert found["request_id"] == answer.headers["sloplet-request-id"]
    assert "Traceback" not in answer.text
    assert os.environ.get("HOME", "/root") + "/" not in answer.text
    return found


def names(http: httpx.Client, **query: Any) -> list[str]:
    return [item["name"] for item in http.get("/v1/sandboxes", params=query).json()["items"]]


def run(http: httpx.Client, box: str, command: str) -> str:
    answer = http.post(f"/v1/sandboxes/{box}/exec", json={"command": command})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["exit_code"] == 0, found
    return str(found["stdout"])


class TestMade:
    def test_from_nothing_to_nothing(self, http: httpx.Client) -> None:
        made = create(http, name="dev", labels={"team": "search"}, env={"A": "1"}, memory="64m", ttl="1h")
        assert made["state"] == "running"
        assert made["expires_at"] == pytest.approx(made["created_at"] + 3600, abs=5)
        info = SandboxInfo.from_dict(made)  # what the library's own has
        expected = SandboxSpec.make(
            "dev", engine="fake", labels={"team": "search"}, env={"A": "1"}, memory="64m", ttl="1h"
        )
        assert info.spec == expected
        for ref in ("dev", "DEV", made["id"]):
            assert http.get(f"/v1/sandboxes/{ref}").json() == made
        assert check_problem(http.post("/v1/sandboxes", json={"engine": "fake", "name": "Dev"}))["status"] == 409
        assert http.delete(f"/v1/sandboxes/{made['id']}").status_code == 204
        assert http.delete(f"/v1/sandboxes/{made['id']}").status_code == 204
        assert check_problem(http.get("/v1/sandboxes/dev"))["error"] == "SandboxNotFound"

    def test_reuse(self, http: httpx.Client) -> None:
        first = create(http, name="again", undo=3, reuse=True)
        assert create(http, name="again", undo=3, reuse=True)["id"] == first["id"]
        assert create(http, 409, name="again", undo=4, reuse=True)["error"] == "SandboxMismatch"
        assert http.post("/v1/templates", json={"sandbox": "again", "name": "gone"}).status_code == 201
        of_it = create(http, name="of-it", template="gone", memory="99m", reuse=True)
        http.delete("/v1/templates/gone", params={"force": "true"})
        assert create(http, name="of-it", template="gone", memory="99m", reuse=True)["id"] == of_it["id"]
        assert create(http, 409, name="of-it", template="gone", memory="98m", reuse=True)["error"] == "SandboxMismatch"
        assert create(http, 404, name="new", template="gone", reuse=True)["error"] == "SnapshotNotFound"
        for name in ("again", "of-it"):
            http.delete(f"/v1/sandboxes/{name}")

    @pytest.mark.parametrize(
        "asked",
        [
            {"name": ""},
            {"name": "a b"},
            {"name": "x" * 64},
            {"nonsense": 1},
            {"engine": "nonsense"},
            {"at_least": "cardboard"},
            {"cpus": 0},
            {"cpus": "2"},
            {"cpus": True},
            {"memory": "lots"},
            {"memory": 1},
            {"pids": 1},
            {"ttl": -1},
            {"ttl": "soon"},
            {"undo": 101},
            {"pool": 65},
            {"env": {"A=B": "x"}},
            {"env": {"A": 1}},
            {"env": {"A": "\0"}},
            {"labels": {"": "x"}},
            {"labels": {"k": "x" * 257}},
            {"labels": {f"k{n}": "" for n in range(65)}},
            {"workdir": "relative"},
            {"workdir": "/../etc"},
            {"volumes": {"relative": "cache"}},
            {"volumes": {"/data": "./here"}},
            {"volumes": {"/data": "~"}},
            {"volumes": {"/proc": "cache"}},
            {"volumes": {"/data": {"source": "cache", "mode": "copy"}}},
            {"volumes": {"/data": {"source": "cache", "base": "x"}}},
            {"links": {"db": "../x"}},
            {"ports": [0]},
            {"ports": {"80": -1}},
            {"ports": {"x": 1}},
            {"network": {"allow": ["not a rule!"]}},
            {"network": {"allow": "pypi.org"}},
            {"network": {"mode": "none", "allow": ["x.org"]}},
            {"network": "all"},
            {"secrets": {"T": {"hosts": []}}},
            {"secrets": {"T": {"hosts": ["x.org"]}}},  # needs a network
            {"secrets": {"T": {"hosts": ["x.org"], "env": "HOME"}}, "network": {"allow": ["x.org"]}},
            {"secrets": {"T": {"hosts": ["x.org"], "command": "id"}}, "network": {"allow": ["x.org"]}},
            {"cloud_init": "/etc/passwd"},
            {"cloud_init": "#cloud-config\nnonsense: 1\n"},
            {"image": ""},
            {"template": "nowhere else"},
        ],
    )
    def test_nonsense(self, http: httpx.Client, asked: dict[str, Any]) -> None:
        answer = http.post("/v1/sandboxes", json={"engine": "fake", "name": "nonsense", **asked})
        assert answer.status_code == 422, answer.text
        check_problem(answer)
        assert http.get("/v1/sandboxes/nonsense").status_code == 404

    @pytest.mark.parametrize(
        "body",
        [b"", b"[]", b"null", b'"x"', b"{", b'{"name": "\\ud800"}', b'{"cpus": NaN}', b'{"cpus": 1e999}', b"\xff"],
    )
    def test_bodies_that_are_none(self, http: httpx.Client, body: bytes) -> None:
        answer = http.post("/v1/sandboxes", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422), answer.text
        check_problem(answer)

    def test_what_only_real_ones_have(self, http: httpx.Client, real: str) -> None:
        made = create(
            http, name="real", engine=real, env={"A": "b"}, workdir="/srv", volumes={"/cache": "cache"}, ports=[8000],
            cloud_init="#cloud-config\nwrite_files:\n- path: /etc/made\n  content: by cloud-init\n",
        )  # fmt: skip
        try:
            assert "text" not in (made["spec"]["cloud_init"] or {})
            assert run(http, "real", 'cat /etc/made; echo " $A"; pwd; touch /cache/x') == "by cloud-init b\n/srv\n"
            assert {item["control"] for item in http.get("/v1/sandboxes/real/guarantees").json()["items"]} > {"memory"}
            metrics = http.get("/v1/sandboxes/real/metrics").json()
            assert 0 < metrics["memory"] < metrics["memory_limit"]
            assert http.get("/v1/sandboxes/real/stats").status_code == 200
            assert http.get("/v1/sandboxes/real/health").json()["status"] == "none"
            assert http.get("/v1/sandboxes/real/image-config").json() is None
        finally:
            http.delete("/v1/sandboxes/real")

    def test_pools(self, http: httpx.Client) -> None:
        made = create(http, pool=1, memory="77m")
        (pool,) = [
            pool for pool in http.get("/v1/pools").json()["items"] if pool["spec"]["limits"]["memory"] == 77 << 20
        ]
        assert pool["wanted"] == 1
        http.delete(f"/v1/sandboxes/{made['id']}")


class TestSecrets:
    VALUE = "correct-horse-battery-staple"

    def asked(self, **more: Any) -> dict[str, Any]:
        return {
            "network": {"allow": ["api.example.com"]},
            "secrets": {"TOKEN": {"hosts": ["api.example.com"], "value": self.VALUE, **more}},
        }

    def test_a_value_is_never_seen_again(self, server: Served, http: httpx.Client, real: str) -> None:
        headers = {"Idempotency-Key": "with-a-secret"}
        answers = [
            http.post("/v1/sandboxes", json={"engine": real, "name": "keeps", **self.asked()}, headers=headers)
            for _ in range(2)
        ]
        answers += [http.get("/v1/sandboxes/keeps/secrets"), http.get("/v1/sandboxes"), http.get("/v1/sandboxes/keeps")]
        try:
            assert [answer.status_code for answer in answers] == [201, 201, 200, 200, 200]
            assert answers[1].headers["idempotent-replayed"] == "true"
            placeholder = run(http, "keeps", "echo $TOKEN").strip()
            assert placeholder == answers[2].json()["items"][0]["placeholder"]
            told = http.put("/v1/sandboxes/keeps/secrets", json={"values": {"TOKEN": self.VALUE + "\n"}})
            assert check_problem(told)["status"] == 422
            answers.append(told)
            assert all(self.VALUE not in answer.text for answer in answers)
            assert server.log is not None
            files = [server.log, *server.home.glob("state.db*"), *(server.home / "server").glob("*")]
            kept = b"".join(path.read_bytes() for path in files if path.is_file())
            assert b"keeps" in kept, "control: something is there"
            assert self.VALUE.encode() not in kept
        finally:
            http.delete("/v1/sandboxes/keeps")

    def test_what_cannot_be_a_value_makes_nothing(self, http: httpx.Client, real: str) -> None:
        found = create(http, 422, name="half", engine=real, **self.asked(value="two\nlines"))
        assert "two" not in json.dumps(found)
        # One that only the holder can refuse: the sandbox is there by then, and goes again.
        placeholder = "placeholder-of-mine"
        create(http, 422, name="half", engine=real, **self.asked(value=f"x{placeholder}x", placeholder=placeholder))
        assert http.get("/v1/sandboxes/half").status_code == 404


@pytest.fixture(scope="module")
def alice(server: Served) -> Iterator[httpx.Client]:
    with server.client(server.new_key("alice")) as client:
        for number in range(7):
            create(client, name=f"box-{number}", labels={"n": str(number), "even": str(number % 2 == 0)})
        yield client


class TestLists:
    def test_pages(self, alice: httpx.Client) -> None:
        seen: list[str] = []
        cursor: str | None = None
        for turn in range(10):
            query: dict[str, Any] = {"limit": 3, **({"cursor": cursor} if cursor else {})}
            page = alice.get("/v1/sandboxes", params=query).json()
            seen += [item["name"] for item in page["items"]]
            if turn == 0:  # what comes and goes meanwhile moves nothing else
                alice.delete("/v1/sandboxes/box-0")
                create(alice, name="box-9")
            cursor = page["next"]
            if cursor is None:
                break
        assert seen == [*(f"box-{number}" for number in range(7)), "box-9"]

    def test_filters(self, alice: httpx.Client) -> None:
        assert names(alice, label="n=3") == ["box-3"]
        assert names(alice, label=["even=True", "n"]) == ["box-2", "box-4", "box-6"]
        assert names(alice, label="n=") == []
        assert names(alice, name="BOX-4") == ["box-4"]
        assert names(alice, state="paused") == names(alice, engine="gvisor") == []
        assert len(names(alice, state="running", engine="fake", name="box")) == 7

    @pytest.mark.parametrize(
        "query",
        [{"limit": 0}, {"limit": 1001}, {"state": "tired"}, {"cursor": "%%"}, {"cursor": "bnVsbA"}, {"label": "=x"},
         {"cursor": "WzEsMl0"}, {"cursor": "W10"}],
    )  # fmt: skip
    def test_nonsense(self, alice: httpx.Client, query: dict[str, Any]) -> None:
        answer = alice.get("/v1/sandboxes", params=query)
        assert answer.status_code in (400, 422), answer.text
        check_problem(answer)

    def test_keys_see_their_own(self, server: Served, http: httpx.Client, alice: httpx.Client) -> None:
        with server.client(server.new_key("bob")) as bob:
            assert names(bob) == []
            assert bob.get("/v1/sandboxes/box-3").status_code == 404
            bob.delete("/v1/sandboxes/box-3")
            create(bob, name="box-3")  # a name of his own
            assert [alice.get("/v1/sandboxes/box-3").json()["id"]] != [bob.get("/v1/sandboxes/box-3").json()["id"]]
            for query in ({"tenant": "*"}, {"tenant": "alice"}):
                assert check_problem(bob.get("/v1/sandboxes", params=query))["status"] == 403
        everybody = http.get("/v1/sandboxes", params={"tenant": "*", "name": "box-3"}).json()["items"]
        assert sorted(item["tenant"] for item in everybody) == ["alice", "bob"]
        assert names(http, tenant="bob") == ["box-3"]
        assert http.get("/v1/sandboxes", params={"tenant": "nobody"}).status_code == 404
        assert "tenant" not in alice.get("/v1/sandboxes").json()["items"][0]


class TestAllowed:
    def test_limits_of_a_key(self, server: Served) -> None:
        key = server.new_key("limited", "--engines", "container", "--at-least", "container", "--max-ttl", "10m")
        with server.client(key) as http:
            assert create(http, 403)["error"] == "NotAllowed"
            assert create(http, 403, engine="process")["error"] == "NotAllowed"
            need_container()
            for asked in ({}, {"ttl": "1d"}):
                made = create(http, engine="auto", **asked)
                assert made["engine"] == "container"
                assert made["spec"]["ttl"] == 600
                assert made["spec"]["at_least"] == "container"
                http.delete(f"/v1/sandboxes/{made['id']}")

    def test_templates_and_forks_obey(self, server: Served, http: httpx.Client) -> None:
        """Keys of one tenant: what the one has made, the other may not copy."""
        strict = server.new_key("strict", "--tenant", "team", "--at-least", "container")
        with server.client(server.new_key("lax", "--tenant", "team")) as lax, server.client(strict) as http:
            create(lax, name="weak")
            saved = lax.post("/v1/sandboxes/weak/snapshots", json={"name": "s"})
            assert saved.status_code == 201
            assert lax.post("/v1/templates", json={"sandbox": "weak", "name": "t"}).status_code == 201
            assert create(http, 403, engine="auto", template="t")["error"] == "NotAllowed"
            for verb, body in (("fork", {"snapshot": "s"}), ("rollback", {"snapshot": "s"}), ("resume", None)):
                answer = http.post(f"/v1/sandboxes/weak/{verb}", json=body)
                assert check_problem(answer)["error"] == "NotAllowed", verb
            assert lax.post("/v1/sandboxes/weak/fork", json={"snapshot": "s"}).status_code == 201  # control

    def test_a_template_counts_with_its_own_limits(self, server: Served) -> None:
        with server.client(server.new_key("big", "--tenant", "sizes")) as big:
            create(big, name="big", memory="600m")
            big.post("/v1/templates", json={"sandbox": "big", "name": "t"})
            big.delete("/v1/sandboxes/big")
        with server.client(server.new_key("small", "--tenant", "sizes", "--max-memory", "512m")) as small:
            assert create(small, 429, engine="auto", template="t")["error"] == "QuotaExceeded"
            create(small)

    @pytest.mark.parametrize(
        "path", ["/", "/etc", "/proc", "/dev", "/run", "/nowhere", "{home}", "{home}/tenants", "{shared}/../"]
    )
    def test_paths_of_the_host(self, server: Served, http: httpx.Client, shared: Path, path: str) -> None:
        path = path.format(home=server.home, shared=shared)
        for asked in ({"volumes": {"/v": path}}, {"image": f"dir:{path}"}, {"image": path}):
            found = create(http, 403, engine="auto", **asked)
            assert found["error"] == "NotAllowed"

    def test_a_folder_that_is_allowed(self, http: httpx.Client, shared: Path, real: str) -> None:
        """And no link in it leads anywhere else, whoever made it when."""
        (shared / "sub").mkdir()
        (shared / "sub" / "inner").write_text("inside\n")
        volumes = {"/v": {"source": str(shared), "mode": "rw"}}
        create(http, name="writer", engine=real, volumes=volumes, user="root")
        try:
            assert run(http, "writer", "cat /v/hello") == "from the host\n"
            create(http, name="reader", engine=real, volumes={"/s": str(shared / "sub")})
            assert run(http, "reader", "cat /s/inner") == "inside\n"
            http.delete("/v1/sandboxes/reader")
            (shared / "away").symlink_to("/etc")
            create(http, 403, engine=real, volumes={"/s": str(shared / "away")})
            # Made by one inside: swapped in for what was allowed, while many ask.
            stop = threading.Event()

            def swap() -> None:
                while not stop.is_set():
                    os.rename(shared / "sub", shared / "was")
                    os.symlink("/etc", shared / "sub")
                    os.unlink(shared / "sub")
                    os.rename(shared / "was", shared / "sub")

            thread = threading.Thread(target=swap)
            thread.start()
            try:
                for _ in range(12):
                    answer = http.post(
                        "/v1/sandboxes", json={"name": "racer", "engine": real, "volumes": {"/s": str(shared / "sub")}}
                    )
                    if answer.status_code == 201:
                        assert "passwd" not in run(http, "racer", "ls /s")
                        http.delete("/v1/sandboxes/racer")
                    else:  # checked and found, and gone when it was to be mounted: 503
                        found = (answer.status_code, answer.json()["error"])
                        assert answer.status_code in (403, 404, 422) or found == (503, "StartFailed"), answer.text
            finally:
                stop.set()
                thread.join()
        finally:
            http.delete("/v1/sandboxes/writer")
            http.delete("/v1/sandboxes/reader")


class TestOnce:
    def test_the_same_answer(self, http: httpx.Client) -> None:
        def ask(key: str, **asked: Any) -> httpx.Response:
            return http.post("/v1/sandboxes", json={"engine": "fake", **asked}, headers={"Idempotency-Key": key})

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask("one"), range(8)))
        assert {answer.status_code for answer in answers} == {201}
        assert len({answer.text for answer in answers}) == 1
        assert sum("idempotent-replayed" in answer.headers for answer in answers) == 7
        assert check_problem(ask("one", memory="99m"))["status"] == 422
        assert ask("two").json()["id"] != answers[0].json()["id"]
        assert ask("a b").status_code in (400, 422)
        box = answers[0].json()["id"]
        saved = http.post(f"/v1/sandboxes/{box}/snapshots", json={}).json()["id"]
        forks = [
            http.post(
                f"/v1/sandboxes/{box}/fork", json={"count": 2, "snapshot": saved}, headers={"Idempotency-Key": "fork"}
            )
            for _ in range(2)
        ]
        assert forks[0].status_code == 201
        assert forks[0].json() == forks[1].json()
        assert len(forks[0].json()["items"]) == 2
        for box in [answers[0].json()["id"], *(item["id"] for item in forks[0].json()["items"])]:
            http.delete(f"/v1/sandboxes/{box}")

    @pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
    def test_a_server_that_is_killed_meanwhile(self, tmp_path: Path, named: bool) -> None:
        """Each is there once, and who asks again gets it, also by the id that was chosen for what has no name."""
        wanted = [f"n{number}" for number in range(8)]
        server = start(tmp_path / "home")
        try:
            answered = threading.Event()

            def ask(name: str) -> httpx.Response | None:
                try:
                    with server.client() as http:
                        body = {"engine": "fake", **({"name": name} if named else {})}
                        return http.post("/v1/sandboxes", json=body, headers={"Idempotency-Key": name})
                except httpx.TransportError:
                    return None
                finally:
                    answered.set()

            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(ask, name) for name in wanted]
                answered.wait(60)
                server.stop(signal.SIGKILL)
                first = [each.result() for each in asked]
            assert {answer.status_code for answer in first if answer is not None} <= {201}
            assert server.process.stdout is not None
            server.process.stdout.close()
            server = start(tmp_path / "home", key=server.key)
            again = [ask(name) for name in wanted]
            ids = [answer.json()["id"] for answer in again if answer is not None and answer.status_code == 201]
            assert len(set(ids)) == len(wanted)
            for before, made in zip(first, ids, strict=True):
                assert before is None or before.json()["id"] == made, "what was answered is what it is"
            with server.client() as http:
                assert sorted(item["id"] for item in http.get("/v1/sandboxes").json()["items"]) == sorted(ids)
        finally:
            server.stop()
            if server.process.stdout is not None:
                server.process.stdout.close()
            end_keepers(tmp_path / "home")


@pytest.fixture(scope="module")
def archive(http: httpx.Client) -> bytes:
    create(http, name="travels", labels={"a": "b"})
    http.post("/v1/sandboxes/travels/exec", json={"command": "echo kept > kept"})
    with http.stream("GET", "/v1/sandboxes/travels/export") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == ARCHIVE["Content-Type"]
        assert answer.headers["sloplet-snapshot-kind"] == "disk"
        data = answer.read()
    assert len(data) == int(answer.headers["content-length"])
    return data


class TestArchives:
    def test_there_and_back(self, server: Served, http: httpx.Client, archive: bytes) -> None:
        headers = {**ARCHIVE, "Idempotency-Key": "import"}
        with server.client(server.new_key("elsewhere")) as other:
            for _ in range(2):  # streamed, without saying how long it is
                pieces = (archive[at : at + 1000] for at in range(0, len(archive), 1000))
                answer = other.post("/v1/sandboxes/import?name=arrived", content=pieces, headers=headers)
                assert answer.status_code == 201, answer.text
            assert answer.headers["idempotent-replayed"] == "true"
            assert answer.json()["name"] == "arrived"
            assert answer.json()["spec"]["labels"] == {"a": "b"}
            assert run(other, "arrived", "cat kept") == "kept\n"
            assert names(other) == ["arrived"]
            again = other.post("/v1/sandboxes/import?name=arrived", content=archive, headers=ARCHIVE)
            assert check_problem(again)["error"] == "SandboxExists"

    @pytest.mark.parametrize("damage", ["empty", "nonsense", "cut", "flipped", "longer"])
    def test_damaged(self, server: Served, http: httpx.Client, archive: bytes, damage: str) -> None:
        bad = {
            "empty": b"", "nonsense": b"nonsense" * 100, "cut": archive[:-10], "longer": archive + b"x",
            "flipped": archive[:-100] + bytes([archive[-100] ^ 1]) + archive[-99:],
        }[damage]  # fmt: skip
        answer = http.post("/v1/sandboxes/import?name=bad", content=bad, headers=ARCHIVE)
        assert answer.status_code == 422, answer.text
        assert check_problem(answer)["error"] == "SnapshotDamaged"
        assert str(server.home) not in answer.text
        assert http.get("/v1/sandboxes/bad").status_code == 404
        assert list((server.home / "server" / "exchange").iterdir()) == []

    def test_too_large(self, server: Served, http: httpx.Client) -> None:
        for content in (bytes(9 << 20), (bytes(1 << 20) for _ in range(9))):
            answer = http.post("/v1/sandboxes/import", content=content, headers=ARCHIVE)
            assert check_problem(answer)["status"] == 413
        assert list((server.home / "server" / "exchange").iterdir()) == []

    def test_the_key_decides(self, server: Served, archive: bytes) -> None:
        for name, option in (("no-fakes", ("--at-least", "container")), ("short", ("--max-ttl", "60s"))):
            with server.client(server.new_key(name, *option)) as http:
                answer = http.post("/v1/sandboxes/import", content=archive, headers=ARCHIVE)
                assert check_problem(answer)["error"] == "NotAllowed"
                assert names(http) == []
        with server.client(server.new_key("little", "--max-memory", "256m")) as http:
            answer = http.post("/v1/sandboxes/import", content=archive, headers=ARCHIVE)
            assert check_problem(answer)["error"] == "QuotaExceeded"

    def test_who_goes_away(self, server: Served, archive: bytes) -> None:
        """Neither direction leaves anything behind."""

        def pieces() -> Iterator[bytes]:
            yield archive[:1000]
            raise RuntimeError("gone")

        with server.client() as http:
            with pytest.raises(RuntimeError):
                http.post("/v1/sandboxes/import?name=half", content=pieces(), headers=ARCHIVE)
        with server.client() as http:
            with http.stream("GET", "/v1/sandboxes/travels/export") as answer:
                next(answer.iter_raw(10))
            assert http.get("/v1/sandboxes/half").status_code == 404
            for _ in range(200):
                if not list((server.home / "server" / "exchange").iterdir()):
                    break
                http.get("/v1/me")
            assert list((server.home / "server" / "exchange").iterdir()) == []


class TestEvents:
    def test_both_ways(self, server: Served) -> None:
        key = server.new_key("listener")
        url = server.url.replace("http", "ws", 1)
        headers = {"Authorization": f"Bearer {key}"}
        with (
            server.client(key) as http,
            connect(f"{url}/v1/events", additional_headers=headers, proxy=None, open_timeout=30) as socket,
            http.stream("GET", "/v1/events") as stream,
        ):
            made = create(http, name="seen")
            with connect(f"{url}/v1/sandboxes/seen/events", additional_headers=headers, proxy=None) as own:
                http.get("/v1/sandboxes/seen/metrics")
                with server.client() as admin:
                    create(admin, name="unseen")  # of another tenant: nothing of it is heard
                    admin.delete("/v1/sandboxes/unseen")
                http.post("/v1/sandboxes/seen/exec", json={"command": ["echo", "/tmp/x"]})
                http.delete("/v1/sandboxes/seen")
                told = [json.loads(message) for message in own]  # ends with the sandbox
            assert [event["type"] for event in told] == ["command.started", "command.exited", "killed"]
            assert told[0]["data"]["command"] == ["echo", "/tmp/x"]
            heard: list[Any] = []
            while not heard or heard[-1]["type"] != "killed":
                heard.append(json.loads(socket.recv(30)))
            assert {event["sandbox"] for event in heard} == {made["id"]}
            assert [event["type"] for event in heard] == ["started", "command.started", "command.exited", "killed"]
            lines = [line for line in _until(stream.iter_lines(), "killed") if line.startswith(("id: ", "data: "))]
            assert [line for line in lines if line.startswith("id: ")] == [f"id: {number}" for number in range(1, 5)]
            assert [json.loads(line[6:]) for line in lines if line.startswith("data: ")] == heard

    def test_of_nobody(self, http: httpx.Client) -> None:
        assert check_problem(http.get("/v1/sandboxes/nobody/events"))["error"] == "SandboxNotFound"


def _until(lines: Iterator[str], word: str) -> Iterator[str]:
    for line in lines:
        yield line
        if line.startswith("data: ") and word in line:
            return
