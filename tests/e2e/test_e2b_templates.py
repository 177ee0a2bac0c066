"""E2B's templates by its own clients on each engine; and what no client of E2B's does."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import httpx
import pytest

from e2b_kit import HERE, E2BServer, e2b_server
from image_kit import busybox_image, needs_busybox
from remote_kit import until
from server_kit import environment
from sloplet.state.home import Home

pytestmark = [needs_busybox, pytest.mark.timeout(900)]
OTHER = """FROM busybox:test
ENV FROM_IMAGE=yes
COPY --chmod=755 <<END /usr/bin/bash
#!/bin/sh
exec /bin/sh "$@"
END
"""
HASH = "ab" * 32
_ANYONE = pytest.mark.anyone  # where it makes no difference who the server is


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BServer]:
    with e2b_server(Path(tmp_path_factory.mktemp("e2b")) / "home") as found:
        home = found.served.home
        busybox_image(Home(home), "busybox:test")
        empty = tmp_path_factory.mktemp("empty")
        command = [sys.executable, "-m", "sloplet.cli", "image", "build", "-q", "-t", "other:image", "-f", "-", empty]
        subprocess.run(command, env=environment(home), input=OTHER.encode(), check=True, capture_output=True)
        yield found


@pytest.mark.parametrize(
    ("version", "mode", "engine"),
    [("new", "url", "container"), ("new", "domain", "gvisor"), pytest.param("old", "url", "gvisor", marks=_ANYONE)],
)
def test_python(server: E2BServer, version: str, mode: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine not in server.keys:
        pytest.skip(f"{engine} cannot run here")
    known = {**server.environment(mode, engine), "SLOPLET_TEST_IMAGE": "other:image"}
    monkeypatch.setattr(server, "environment", lambda mode, engine: known)
    server.pytest(version, mode, engine, "templates.py")


@_ANYONE
@pytest.mark.parametrize(("version", "mode"), [("new", "domain"), ("old", "url")])
def test_javascript(server: E2BServer, version: str, mode: str) -> None:
    engine = "gvisor" if mode == "domain" and "gvisor" in server.keys else "container"
    server.node(version, HERE / "js" / "templates.cjs", mode, engine)


WARM = """
import time
from e2b_code_interpreter import Sandbox

def kernels(box):
    return int(box.commands.run("pgrep -c -u user python3 || true").stdout)

def first(**options):
    box = Sandbox.create(timeout=100, **options)
    try:
        before = kernels(box)
        cell = box.run_code("import os; os.environ.get('A')")
        return before, cell.text, cell.execution_count, kernels(box)
    finally:
        box.kill()

cold = first()
deadline = time.monotonic() + 120
while (warm := first(envs={"A": "of the sandbox"}))[0] == 0:
    assert time.monotonic() < deadline
    time.sleep(0.5)
print(json.dumps([cold, warm]))
"""


def test_the_code_interpreter_is_warm_after_its_first_use(server: E2BServer) -> None:
    """A kernel runs in it from the beginning, and knows the variables of its sandbox."""
    if "gvisor" not in server.keys:
        pytest.skip("gvisor cannot run here")
    cold, warm = server.run_python("new", WARM, engine="gvisor")
    assert warm == [1, "of the sandbox", 1, 1]
    assert cold in ([0, None, 1, 1], [1, None, 1, 1])  # another test may have been first


@pytest.fixture
def client(server: E2BServer) -> Iterator[httpx.Client]:
    with server.served.client(server.keys["container"]) as made:
        yield made


def announced(client: httpx.Client, name: str) -> tuple[str, str]:
    answer = client.post("/v3/templates", json={"name": name}).raise_for_status()
    assert answer.status_code == 202
    return answer.json()["templateID"], answer.json()["buildID"]


def built(client: httpx.Client, template: str, build: str, **body: object) -> dict[str, object]:
    asked = {"fromTemplate": "base", "steps": [], **body}
    client.post(f"/v2/templates/{template}/builds/{build}", json=asked).raise_for_status()
    for _ in range(600):
        found: dict[str, object] = client.get(f"/templates/{template}/builds/{build}/status").json()
        if found["status"] != "building":
            return found
        time.sleep(0.1)
    raise AssertionError("the build does not end")


def copy_step(target: str = "there") -> dict[str, object]:
    return {"type": "COPY", "args": ["files", target, "", ""], "filesHash": HASH, "force": False}


@_ANYONE
def test_what_is_only_waited_for_takes_no_place(client: httpx.Client) -> None:
    """A tenant has two places for builds; what gets ready slowly is a sandbox like any other."""
    slow = [announced(client, f"slow-{number}") for number in range(2)]
    for template, build in slow:
        body = {"fromTemplate": "base", "steps": [], "startCmd": "sleep 100", "readyCmd": "sleep 30"}
        client.post(f"/v2/templates/{template}/builds/{build}", json=body).raise_for_status()
    template, build = announced(client, "quick")
    assert built(client, template, build)["status"] == "ready"
    for each, number in slow:
        assert client.get(f"/templates/{each}/builds/{number}/status").json()["status"] == "building"
    for each in (template, slow[0][0], slow[1][0]):
        assert client.delete(f"/templates/{each}").status_code == 204


@_ANYONE
def test_addresses_of_uploads(server: E2BServer, client: httpx.Client) -> None:
    """They are good for one archive of one template, and nothing else is opened by them."""
    template, build = announced(client, "uploads")
    answer = client.get(f"/templates/{template}/files/{HASH}")
    assert answer.status_code == 201
    assert answer.json()["present"] is False
    url = answer.json()["url"]
    data = archive({"files/a": b"1"})
    with httpx.Client(trust_env=False) as anybody:
        for wrong in (
            url.replace(HASH, "cd" * 32), url.replace(template, "a" * 20), changed(url, expires="9999999999"),
            changed(url, tenant="other"), changed(url, token="0" * 64), url.partition("?")[0],
        ):  # fmt: skip
            refused = anybody.put(wrong, content=data)
            assert refused.status_code == 401, wrong
            assert refused.json()["code"] == 401
        assert anybody.get(f"{server.served.url}/templates?{urlsplit(url).query}").status_code == 401
        anybody.put(url, content=data).raise_for_status()
        anybody.put(url, content=archive({"files/a": b"2"})).raise_for_status()  # again: the last one counts
    assert client.get(f"/templates/{template}/files/{HASH}").json()["present"] is True
    assert built(client, template, build, steps=[copy_step()])["status"] == "ready"
    other, second = announced(client, "uploads-of-another")
    assert client.get(f"/templates/{other}/files/{HASH}").json()["present"] is False
    found = built(client, other, second, steps=[copy_step()])
    assert found["reason"] == {"message": "failed to copy: the files of 'files' were not uploaded", "step": "1"}
    for each in (template, other):
        assert client.delete(f"/templates/{each}").status_code == 204


@pytest.mark.parametrize("kind", ["noise", "cut", "outside", "through a link", "device", "bomb"])
def test_hostile_archives(server: E2BServer, client: httpx.Client, kind: str) -> None:
    """What is in them stays in the step's own folder, or the step fails."""
    template, build = announced(client, f"hostile-{kind.replace(' ', '-')}")
    url = client.get(f"/templates/{template}/files/{HASH}").json()["url"]
    httpx.put(url, content=hostile(kind, server.served.home), trust_env=False).raise_for_status()
    found = built(client, template, build, steps=[copy_step()])
    if kind != "through a link":  # which is a link in the image, or a folder there: nothing of this machine's
        assert found["status"] == "error", found
        assert found["reason"]["step"] == "1"  # type: ignore[index]
    assert not (server.served.home / "escaped").exists()
    client.delete(f"/templates/{template}")


@_ANYONE
def test_builds_once(client: httpx.Client) -> None:
    template, build = announced(client, "once")
    path = f"/v2/templates/{template}/builds/{build}"
    copy = {"type": "COPY", "args": ["a", "b"], "filesHash": "../x"}
    for bad in ({}, {"fromImage": "a", "fromTemplate": "b"}, {"fromTemplate": "base", "steps": [copy]}):
        assert client.post(path, json=bad).status_code == 400
    assert built(client, template, build)["status"] == "ready"
    again = client.post(path, json={"fromTemplate": "base"})
    assert (again.status_code, again.json()["message"]) == (400, "build is not in waiting state")
    assert client.post(f"/v2/templates/{template}/builds/{HASH}", json={"fromTemplate": "base"}).status_code == 404
    listed = client.get("/templates").json()
    assert template in [each["templateID"] for each in listed]
    first = client.get("/v2/templates?limit=1")
    assert len(first.json()) == 1
    assert client.get(f"/templates/{template}").json()["builds"][0]["status"] == "ready"
    logs = client.get(f"/templates/{template}/builds/{build}/logs").json()["logs"]
    assert logs[0]["message"] == "[base] FROM TEMPLATE base"
    assert client.patch(f"/v2/templates/{template}", json={"public": False}).status_code == 200
    client.delete(f"/templates/{template}")
    assert client.get(f"/templates/{template}").status_code == 404


def test_templates_are_their_tenant_s(server: E2BServer, client: httpx.Client) -> None:
    template, build = announced(client, "mine")
    built(client, template, build)
    with server.served.client(server.served.new_key("stranger", "--tenant", "stranger")) as stranger:
        for path in (f"/templates/{template}", "/templates/mine/tags", f"/templates/{template}/builds/{build}/status",
                     "/templates/aliases/mine", f"/templates/{template}/files/{HASH}"):  # fmt: skip
            assert stranger.get(path).status_code == 404, path
        for reference in ("mine", template, f"{template}:default", "main/mine"):
            assert stranger.post("/sandboxes", json={"templateID": reference}).status_code == 404
        assert stranger.delete(f"/templates/{template}").status_code == 404
        assert stranger.get("/templates").json() == []
        theirs, other = announced(stranger, "mine")  # a name of their own
        assert theirs != template
        found = built(stranger, theirs, other, fromTemplate="main/mine")
        assert found["reason"]["step"] == "base"  # type: ignore[index]
        assert built(stranger, *announced(stranger, "linked"))["status"] == "ready"  # of an image of the operator's
    assert client.get(f"/templates/{template}").status_code == 200
    client.delete(f"/templates/{template}")


def test_images_go_with_their_templates(server: E2BServer, client: httpx.Client) -> None:
    def images() -> list[str]:
        found = client.get("/v1/images").raise_for_status().json()
        return [each for image in found["items"] for each in image["references"] if f"e2b/{template}" in each]

    template, build = announced(client, "goes")
    run = [{"type": "RUN", "args": ["echo 1 > a"], "force": False}]
    assert built(client, template, build, steps=run)["status"] == "ready"
    assert images() == [f"docker.io/e2b/{template}:{build}"]
    _, second = announced(client, "goes")
    assert built(client, template, second, steps=run * 2)["status"] == "ready"
    until(lambda: images() == [f"docker.io/e2b/{template}:{second}"])  # what is told first, and cleared away then
    _, third = announced(client, "goes")
    assert built(client, template, third, steps=run, startCmd="false", readyCmd="true")["status"] == "error"
    until(lambda: images() == [f"docker.io/e2b/{template}:{second}"])
    assert client.delete(f"/templates/{template}").status_code == 204
    assert images() == []


def archive(files: dict[str, bytes], *, compress: bool = True) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz" if compress else "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def hostile(kind: str, home: Path) -> bytes:
    if kind == "noise":
        return b"this is no tar" * 1000
    if kind == "cut":
        return archive({"files/a": bytes(100_000)}, compress=False)[:50_000]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        if kind == "outside":
            member = tarfile.TarInfo("../../../escaped")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
        elif kind == "through a link":
            link = tarfile.TarInfo("files")
            link.type, link.linkname = tarfile.SYMTYPE, str(home)
            tar.addfile(link)
            member = tarfile.TarInfo("files/escaped")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
        elif kind == "device":
            device = tarfile.TarInfo("files")
            device.type = tarfile.CHRTYPE
            tar.addfile(device)
        else:
            member = tarfile.TarInfo("files/zeros")
            member.size = 20 << 30
            header = member.tobuf()
            return header  # and none of what it promises
    return buffer.getvalue()


def changed(url: str, **values: str) -> str:
    parts = urlsplit(url)
    query = {name: found[-1] for name, found in parse_qs(parts.query).items()} | values
    return urlunsplit(parts._replace(query=urlencode(query)))
