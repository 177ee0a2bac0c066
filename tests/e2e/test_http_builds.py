"""Builds over HTTP, on a real server: contexts, logs, cancelling, what a key may; and the same from the library."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_helpers import sloplet

from http_kit import parsed
from image_kit import busybox_image, needs_busybox
from server_kit import Served, need_container, served
from sloplet import Image, Sandbox
from sloplet.build.contexttar import RESERVED
from sloplet.engines import jail
from sloplet.engines.machine import machine
from sloplet.errors import BuildFailed, NotAllowed, RecipeInvalid
from sloplet.netspec import Network
from sloplet.state.home import Home

pytestmark = [
    needs_busybox,
    pytest.mark.timeout(180),
    pytest.mark.skipif(jail.mode(machine()) == "single", reason="steps need several users inside"),
]
FROM = "FROM busybox:test\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need_container()
    folder = tmp_path_factory.mktemp("served")
    with served(folder / "home") as running:
        busybox_image(Home(running.home), "busybox:test")
        yield running


@pytest.fixture(scope="module")
def key(server: Served) -> str:
    return server.new_key("one")


@pytest.fixture(scope="module")
def client(server: Served, key: str) -> Iterator[httpx.Client]:
    with server.client(key) as made:
        yield made


def tar(files: dict[str, str | bytes], links: dict[str, str] | None = None) -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as made:
        for name, text in files.items():
            data = text.encode() if isinstance(text, str) else text
            info = tarfile.TarInfo(name)
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            made.addfile(info)
    return body.getvalue()


def build(client: httpx.Client, context: bytes, **params: Any) -> list[tuple[str, Any]]:
    with client.stream("POST", "/v1/images/build", params=params, content=context) as answer:
        assert answer.status_code == 200, answer.read()
        return list(parsed(answer.iter_lines()))


def logs(events: list[tuple[str, Any]]) -> list[str]:
    return [data["text"] for name, data in events if name == "log"]


def cache(server: Served, tenant: str = "one") -> list[str]:
    """What builds have on the disk just now."""
    folder = server.home / "tenants" / tenant / "cache"
    return [path.name for path in folder.iterdir() if path.name.startswith(("context-", "tmp"))]


class TestBuilding:
    def test_a_dockerfile_with_its_context(self, client: httpx.Client) -> None:
        context = tar({
            "docker/Dockerfile": FROM + "ARG V=1\nCOPY --chown=1000 src /app\nRUN echo v$V; ls /app; id -u\nUSER app\n",
            "src/main": "text", "src/left.log": "", ".dockerignore": "**/*.log\n",
        })  # fmt: skip
        asked: dict[str, Any] = {"dockerfile": "docker/Dockerfile", "build_arg": "V=7", "tag": ["app:1", "app:2"]}
        events = build(client, gzip.compress(context), label=["a=b", "c=d"], **asked)
        assert events[-1][0] == "done", events[-1]
        image = events[-1][1]
        assert image["references"] == ["docker.io/library/app:1", "docker.io/library/app:2"]
        assert image["config"]["labels"] == {"a": "b", "c": "d"}
        assert image["config"]["user"] == "app"
        assert logs(events)[1:] == ["v7", "main", "0"]
        ends = [data for name, data in events if name == "end"]
        assert len(ends) == ends[0]["total"] == 5
        again = build(client, context, **asked)
        assert [data["cached"] for name, data in again if name == "end"][-2:] == [True, False]  # RUN; USER is none
        assert again[-1][1]["layers"] == image["layers"]

    def test_in_a_sandbox(self, client: httpx.Client) -> None:
        image = build(client, tar({"Dockerfile": FROM + "RUN echo made > /made\n"}))[-1][1]
        box = client.post("/v1/sandboxes", json={"image": image["id"], "engine": "container"}).json()
        done = client.post(f"/v1/sandboxes/{box['id']}/exec", json={"command": "cat /made"}).json()
        assert done["stdout"] == "made\n"
        client.delete(f"/v1/sandboxes/{box['id']}")

    def test_nothing_is_left(self, server: Served, client: httpx.Client) -> None:
        build(client, tar({"Dockerfile": FROM + "RUN true\n"}), no_cache=True)
        assert cache(server) == []
        assert not [item for item in client.get("/v1/sandboxes").json()["items"] if item["holder"] != "keeper"]

    def test_stages_and_targets(self, client: httpx.Client) -> None:
        text = (
            FROM.rstrip() + " AS one\nRUN echo one > /x\nFROM busybox:test AS two\nCOPY --from=one /x /y\nRUN cat /y\n"
        )
        assert logs(build(client, tar({"Dockerfile": text})))[-1] == "one"
        assert len(build(client, tar({"Dockerfile": text}), target="one")[-1][1]["layers"]) == 2

    def test_curl(self, server: Served, key: str, tmp_path: Path) -> None:
        (tmp_path / "Dockerfile").write_text(FROM + "RUN echo by curl\n")
        packed = subprocess.run(["tar", "-C", str(tmp_path), "-cz", "."], capture_output=True, check=True).stdout
        command = ["curl", "-sSN", "--max-time", "60", "-H", f"Authorization: Bearer {key}", "--data-binary", "@-"]
        done = subprocess.run(
            [*command, f"{server.url}/v1/images/build?tag=curl"], input=packed, capture_output=True, check=True
        )
        events = list(parsed(iter(done.stdout.decode().splitlines())))
        assert "by curl" in logs(events)
        assert events[-1][0] == "done"


class TestFailing:
    def test_a_step(self, client: httpx.Client) -> None:
        events = build(client, tar({"Dockerfile": FROM + "RUN echo last words; exit 3\n"}), tag="never:1")
        name, problem = events[-1]
        assert (name, problem["error"], problem["status"]) == ("error", "BuildFailed", 422)
        assert "exit code 3" in problem["detail"]
        assert "last words" in problem["detail"]
        assert client.get("/v1/images/item", params={"ref": "never:1"}).status_code == 404

    @pytest.mark.parametrize(
        ("context", "status", "error"),
        [
            (tar({"Dockerfile": "FORM x\n"}), 422, "RecipeInvalid"),
            (tar({"Dockerfile": ""}), 422, "RecipeInvalid"),
            (tar({"other": "x"}), 422, "RecipeInvalid"),
            (tar({"Dockerfile": b"\xff\xfe"}), 422, "RecipeInvalid"),
            (b"", 400, "RequestInvalid"),
            (b"no tar" * 500, 400, "RequestInvalid"),
            (tar({"Dockerfile": FROM})[:700], 400, "RequestInvalid"),
            (tar({"../Dockerfile": FROM}), 400, "RequestInvalid"),
            (tar({"Dockerfile": FROM, ".dockerignore": "[\n"}), 422, "RecipeInvalid"),
        ],
    )
    def test_what_makes_no_sense(self, client: httpx.Client, context: bytes, status: int, error: str) -> None:
        answer = client.post("/v1/images/build", content=context)
        assert (answer.status_code, answer.json()["error"]) == (status, error), answer.text

    def test_parameters(self, client: httpx.Client) -> None:
        context = tar({"Dockerfile": FROM})
        for params in (
            {"tag": "A B"}, {"build_arg": "novalue"}, {"label": "=x"}, {"engine": "Not One"}, {"network": "bridge"},
            {"allow": "not a host!"}, {"memory": "much"}, {"at_least": "paper"},
        ):  # fmt: skip
            answer = client.post("/v1/images/build", params=params, content=context)
            found = answer.json() if answer.status_code != 200 else list(parsed(iter(answer.text.splitlines())))[-1][1]
            assert found["status"] in (422, 400), (params, answer.text)

    def test_bases_obey_what_pulls_do(self, client: httpx.Client) -> None:
        for base in ("127.0.0.1:1/app", "169.254.169.254/app"):
            for text in (f"FROM {base}\nRUN true\n", f"FROM busybox:test\nCOPY --from={base} /x /y\n"):
                name, problem = build(client, tar({"Dockerfile": text}))[-1]
                assert (name, problem["error"]) == ("error", "NotAllowed"), problem


class TestHostileContexts:
    def test_links_lead_nowhere(self, client: httpx.Client) -> None:
        secret = Path("/etc/passwd").read_text().splitlines()[1]
        for context in (
            tar({"x": ""}, {"Dockerfile": "/etc/passwd"}),
            tar({"Dockerfile": FROM}, {".dockerignore": "/etc/passwd"}),
            tar({"Dockerfile": FROM + "COPY up/passwd /stolen\nRUN cat /stolen\n"}, {"up": "/etc"}),
            tar({"Dockerfile": FROM + "COPY . /all\nRUN cat /all/up\n"}, {"up": "../../../../../../etc/passwd"}),
            tar({"Dockerfile": FROM}, {RESERVED: "/etc"}),
            tar({"Dockerfile": FROM, f"{RESERVED}/x": ""}, {f"{RESERVED}/request.json": "/etc/passwd"}),
            tar(
                {"Dockerfile": FROM, f"{RESERVED}/request.json": json.dumps({"version": 1, "recipe": _recipe(0)})},
                {f"{RESERVED}/folders/0": "/etc"},
            ),
            tar(
                {f"{RESERVED}/request.json": json.dumps({"version": 1, "recipe": _recipe(0)})},
                {f"{RESERVED}/folders/0/passwd": "/etc/passwd", f"{RESERVED}/secrets": "/etc"},
            ),
        ):  # fmt: skip
            answer = client.post("/v1/images/build", content=context)
            assert answer.status_code < 500, answer.text
            assert secret not in answer.text

    @pytest.mark.parametrize(
        "request_json",
        [
            b"", b"[]", b"{}", b"[" * 100_000, b'{"version": 1}', b'{"version": 2, "recipe": {}}',
            b'{"version": 1, "recipe": 7}', b'{"version": 1, "recipe": {"version": 1, "name": "x", "stages": []}}',
            b'{"version": 1, "recipe": {"version": 1, "name": "x", "stages": [{"base": {}, "steps": []}]}}',
        ],
    )  # fmt: skip
    def test_requests_that_make_no_sense(self, client: httpx.Client, request_json: bytes) -> None:
        answer = client.post("/v1/images/build", content=tar({f"{RESERVED}/request.json": request_json}))
        assert answer.status_code in (400, 422), answer.text

    def test_recipes_name_no_paths(self, client: httpx.Client) -> None:
        for folder in ("/etc", "0/../..", -1, 1, True, 0.5, {}):
            request = {"version": 1, "recipe": _recipe(folder)}
            sent = tar({f"{RESERVED}/request.json": json.dumps(request), f"{RESERVED}/folders/0/x": "x"})
            answer = client.post("/v1/images/build", content=sent)
            assert answer.status_code in (400, 422), (folder, answer.text)


def _recipe(folder: Any) -> dict[str, Any]:
    def line(number: int, keyword: str, rest: str) -> dict[str, Any]:
        return {"number": number, "keyword": keyword, "rest": rest, "escape": "\\", "name": "x", "heredocs": []}

    copy = {"line": line(2, "COPY", "x"), "kind": "Copy", "sources": ["passwd"], "target": "/x", "folder": folder}
    run = {"line": line(3, "RUN", "cat /x")}
    return {
        "version": 1, "name": "x", "arguments": [],
        "stages": [{"base": {"line": line(1, "FROM", "busybox:test")}, "steps": [copy, run]}],
    }  # fmt: skip


class TestWhatAKeyMay:
    def test_no_network_unless_asked_for(self, client: httpx.Client) -> None:
        text = FROM + "RUN wget -T 2 -q -O- http://example.com/ || echo none\n"
        assert "none" in logs(build(client, tar({"Dockerfile": text})))
        for rule in ("127.0.0.1", "10.0.0.0/8", "169.254.169.254", "host.sloplet:80"):
            name, problem = build(client, tar({"Dockerfile": text}), allow=rule, no_cache=True)[-1]
            assert (name, problem["error"], problem["status"]) == ("error", "NotAllowed", 403), problem

    def test_limits_and_engines(self, server: Served) -> None:
        small = server.new_key("small", "--max-memory", "128m", "--max-sandboxes", "1")
        context = tar({"Dockerfile": FROM + "RUN true\n"})
        with server.client(small) as one:
            name, found = build(one, context)[-1]  # what is not said is lowered, and enforced or refused
            assert name == "done" or (os.geteuid() != 0 and found["error"] == "ControlUnavailable"), found
            problem = build(one, context, memory="1g", no_cache=True)[-1][1]
            assert (problem["error"], problem["status"]) == ("QuotaExceeded", 429)
        strong = server.new_key("strong", "--at-least", "microvm")
        with server.client(strong) as one:
            name, problem = build(one, context)[-1]
            assert name == "error", "a step ran below what the key needs"
            refused = build(one, context, engine="container")[-1][1]
            assert refused["error"] == "NotAllowed"
            assert build(one, tar({"Dockerfile": FROM + "LABEL a=b\n"}))[-1][0] == "done"  # nothing runs

    def test_gvisor_for_who_needs_it(self, server: Served) -> None:
        if not os.environ.get("SLOPLET_TEST_RUNSC"):
            pytest.skip("runsc is not here: SLOPLET_TEST_RUNSC names one")
        with server.client(server.new_key("sure", "--engines", "gvisor")) as one:
            events = build(one, tar({"Dockerfile": FROM + "RUN cat /proc/version\n"}))
            assert events[-1][0] == "done", events[-1]
            assert "gvisor" in logs(events)[-1].lower() or "4.4.0" in logs(events)[-1]

    def test_whose_images_are_whose(self, server: Served, client: httpx.Client) -> None:
        build(client, tar({"Dockerfile": FROM + "RUN echo mine\n"}), tag="private:1")
        with server.client(server.new_key("other")) as other:
            missing = build(other, tar({"Dockerfile": "FROM 127.0.0.1:1/x\nRUN true\n"}))[-1]
            assert missing[0] == "error"
            assert other.get("/v1/images/item", params={"ref": "private:1"}).status_code == 404
            theirs = build(other, tar({"Dockerfile": FROM + "RUN echo mine\n"}))
            assert not any(data.get("cached") for name, data in theirs if name == "end")  # nor is the cache shared


class TestAtATime:
    def test_who_goes_away_ends_it(self, server: Served) -> None:
        text = FROM + "RUN echo begun; sleep 1000\n"
        with server.client(server.new_key("leaver")) as one:
            for _ in range(3):  # more than may be at a time
                until = time.monotonic() + 30
                while True:
                    with one.stream("POST", "/v1/images/build", content=tar({"Dockerfile": text})) as answer:
                        if answer.status_code == 503:  # the one before is still ending
                            assert time.monotonic() < until
                            continue
                        told = parsed(answer.iter_lines())
                        assert any(data.get("text") == "begun" for name, data in told if name == "log")
                        break
            until = time.monotonic() + 30
            while cache(server, "leaver") or one.get("/v1/sandboxes").json()["items"]:
                assert time.monotonic() < until, "something of the build is left"

    def test_no_more_than_few(self, server: Served) -> None:
        text = FROM + "RUN echo begun; sleep 1000\n"
        with server.client(server.new_key("greedy")) as one, ThreadPoolExecutor(2) as threads:
            streams = [one.stream("POST", "/v1/images/build", content=tar({"Dockerfile": text})) for _ in range(2)]
            try:
                answers = list(threads.map(lambda each: each.__enter__(), streams))
                for answer in answers:
                    assert answer.status_code == 200
                    next(iter(answer.iter_bytes()))
                refused = one.post("/v1/images/build", content=tar({"Dockerfile": text}))
                assert (refused.status_code, refused.json()["error"]) == (503, "ServerBusy")
                assert int(refused.headers["retry-after"]) >= 1
            finally:
                for each in streams:
                    each.__exit__(None, None, None)

    def test_a_log_that_nobody_reads(self, server: Served, key: str, client: httpx.Client) -> None:
        """The build is not held up; lines are left out, and it is said how many; the end is there."""
        count = 100_000
        text = FROM + f"RUN yes 0123456789012345678901234567890123456789 | head -n {count}; echo the end\n"
        with client.stream(
            "POST", "/v1/images/build", params={"tag": "talkative"}, content=tar({"Dockerfile": text})
        ) as answer:
            lines = answer.iter_lines()
            assert next(parsed(lines))[0] == "begin"
            until = time.monotonic() + 60
            with server.client(key) as other:
                while other.get("/v1/images/item", params={"ref": "talkative"}).status_code != 200:
                    assert time.monotonic() < until
            events = list(parsed(lines))
        assert events[-1][0] == "done"
        said = logs(events)
        missed = [int(line.split()[1]) for line in said if line.startswith("... ")]
        assert missed, "it was read as fast as it came"
        assert sum(line.startswith("0123") for line in said) + sum(missed) + said.count("the end") == count + 1


class TestFromTheLibrary:
    def test_the_same_image_as_here(self, server: Served, key: str, tmp_path: Path) -> None:
        """All that ``Image`` can say gives the same digests there as on this machine."""
        source = tmp_path / "source"
        (source / "deep" / "er").mkdir(parents=True)
        (source / "a$b 'c\".txt").write_text("odd")
        (source / "deep" / "er" / "x").write_text("x")
        (source / "deep" / "link").symlink_to("er/x")
        (source / "set").write_text("id")
        (source / "set").chmod(0o4755)
        (source / "no.log").write_text("no")
        (source / ".dockerignore").write_text("*.log\n")
        (tmp_path / "Dockerfile").write_text(
            FROM
            + "ARG V\nRUN <<EOF\necho here $V\nEOF\nCOPY source/deep /deep\nONBUILD RUN true\nHEALTHCHECK CMD true\n"
        )
        other = Image("busybox:test").run("echo other > /other")
        images = [
            Image("busybox:test")
            .env(A="$x 'y'", B='"')
            .copy(source, "/all", exclude=["deep"])
            .copy(source / "a$b 'c\".txt", "/one", chmod=0o600, chown="1000:1001")
            .copy(source / "deep" / "link", "/linked")
            .run("echo $A\nls -l /all", network=Network(allow=["a.example"]))
            .run(["sh", "-c", 'echo "$1"', "sh", "$A"])
            .copy("/other", "/o", image=other)
            .label({"x.y": "$z"})
            .workdir("/w d")
            .user("app")
            .entrypoint("a", "$b")
            .cmd("c")
            .shell("/bin/sh", "-ec")
            .expose(80, "53/udp")
            .volume("/data"),
            Image.dockerfile(tmp_path, build_args={"V": "1"}).run("echo more > /tmp/more"),
        ]
        busybox_image(Home(os.environ["SLOPLET_HOME"]), "busybox:test")
        for image in images:
            there = image.build("same:1", server=server.url, key=key)
            here = image.build("same:1", server="")
            assert there.id == here.id
            assert there.layers == here.layers
            assert there.config.env == here.config.env

    def test_sandboxes(self, server: Served, key: str, tmp_path: Path) -> None:
        (tmp_path / "hello").write_text("hello")
        image = Image("busybox:test").copy(tmp_path / "hello", "/hello").run("cp /hello /again")
        with Sandbox(image=image, engine="container", server=server.url, key=key) as box:
            assert box.run("cat /again").stdout == "hello"
            assert box.info().spec.image.startswith("sha256:")

    def test_errors_are_the_same(self, server: Served, key: str) -> None:
        there: dict[str, Any] = {"server": server.url, "key": key}
        with pytest.raises(BuildFailed, match="exit code 3"):
            Image("busybox:test").run("exit 3").build(**there)
        with pytest.raises(RecipeInvalid, match="declares no build argument"):
            Image("busybox:test").run("true").build(build_args={"X": "1"}, **there)
        with pytest.raises(NotAllowed):
            Image("127.0.0.1:1/app").run("true").build(**there)
        with pytest.raises(NotAllowed):
            Image("busybox:test").run("true", network=Network(allow=["10.0.0.1"])).build(**there)

    def test_secrets_are_seen_and_not_kept(self, server: Served, key: str, tmp_path: Path) -> None:
        value = "the-secret-value-of-this-test"
        (tmp_path / "Dockerfile").write_text(FROM + "RUN --mount=type=secret,id=token md5sum < /run/secrets/token\n")
        told: list[str] = []
        Image.dockerfile(tmp_path).build(
            secrets={"token": value}, server=server.url, key=key, on_event=lambda event: told.append(event.text)
        )
        assert any(line.endswith("  -") for line in told)
        for path in (path for path in server.home.rglob("*") if path.is_file() and not path.is_symlink()):
            if path.stat().st_size < 1 << 24 and os.access(path, os.R_OK):
                assert value.encode() not in path.read_bytes(), path

    def test_a_root_filesystem_made_here(self, server: Served, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """``Image.bootstrap`` is made on this machine, and brought."""
        from sloplet.build import bootstrap

        home = Home(os.environ["SLOPLET_HOME"])

        async def make(*_: Any, **__: Any) -> Any:
            return busybox_image(home, None, files={"etc/boot": "strapped"})

        monkeypatch.setattr(bootstrap, "make", make)
        image = Image.bootstrap("debian:bookworm").run("cat /etc/boot > /copy")
        with Sandbox(image=image, engine="container", server=server.url, key=key) as box:
            assert box.run("cat /copy").stdout == "strapped"

    def test_the_cli(self, server: Served, key: str, tmp_path: Path) -> None:
        (tmp_path / "Dockerfile").write_text(FROM + "ARG V=0\nCOPY x /x\nRUN cat /x; echo v$V\n")
        (tmp_path / "x").write_text("from here\n")
        env = {"SLOPLET_URL": server.url, "SLOPLET_KEY": key, "SLOPLET_HOME": str(tmp_path / "none")}
        words = ["image", "build", "-t", "cli:1", "--build-arg", "V=5", "--label", "a=b", str(tmp_path)]
        done = sloplet(*words, "--output", str(tmp_path / "out.tar"), env=env)
        assert done.returncode == 0, done
        assert b"| from here" in done.stderr
        assert b"| v5" in done.stderr
        assert b"(cli:1): 2 layers" in done.stdout
        assert tarfile.is_tarfile(tmp_path / "out.tar")
        again = json.loads(sloplet(*words, "--json", env=env).stdout)
        assert again["config"]["labels"] == {"a": "b"}
        assert again["steps"][-1]["cached"] is True
        assert not (tmp_path / "none").exists()
        ran = sloplet("run", "--image", "cli:1", "--engine", "container", "--", "cat", "/x", env=env)
        assert (ran.returncode, ran.stdout) == (0, b"from here\n"), ran
