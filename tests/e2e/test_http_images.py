"""Images over HTTP, on a real server with a real registry: pulls, pushes, archives, and whose is whose."""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_helpers import sloplet

from http_kit import parsed
from image_kit import busybox_image, needs_busybox
from registry_kit import PASSWORD, USER, RealRegistry, needs, real_registry
from server_kit import Served, served
from sloplet import Sandbox
from sloplet.engines import registry as engines
from sloplet.errors import ImageNotFound, NotAllowed
from sloplet.state.home import Home

pytestmark = [needs_busybox, pytest.mark.timeout(180)]


@dataclass
class World:
    """A server whose operator has ``busybox:test``, a registry that keys may use, and one that wants a login."""

    server: Served
    open: RealRegistry
    private: RealRegistry
    keys: dict[str, str]

    def client(self, name: str) -> httpx.Client:
        return self.server.client(self.keys[name])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    needs("docker-registry", "htpasswd")
    folder = tmp_path_factory.mktemp("world")
    with real_registry(folder / "open") as first, real_registry(folder / "private", private=True) as second:
        login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        (folder / "auth.json").write_text(json.dumps({"auths": {second.host: {"auth": login}}}))
        before = os.environ.get("REGISTRY_AUTH_FILE")
        os.environ["REGISTRY_AUTH_FILE"] = str(folder / "auth.json")  # the operator's own login
        home = folder / "home"
        home.mkdir(mode=0o700)
        (home / "registries.toml").write_text(first.settings + second.settings)
        try:
            with served(home, "--allow-registry", first.host, "--allow-registry", second.host) as running:
                busybox_image(Home(home), "busybox:test")
                keys = {name: running.new_key(name) for name in ("one", "two")}
                yield World(running, first, second, keys)
        finally:
            os.environ.pop("REGISTRY_AUTH_FILE")
            if before is not None:
                os.environ["REGISTRY_AUTH_FILE"] = before


def follow(client: httpx.Client, path: str, **body: Any) -> list[tuple[str, Any]]:
    """The events of an answer that ends well or not."""
    with client.stream("POST", f"/v1/images/{path}", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(parsed(answer.iter_lines()))


def names(client: httpx.Client) -> set[str]:
    return {name for item in client.get("/v1/images").json()["items"] for name in item["references"]}


@pytest.fixture(scope="module")
def pushed(world: World) -> str:
    """The operator's image in both registries: its name in the open one."""
    with world.server.client() as admin:
        for place in (world.open, world.private):
            name, done = follow(admin, "push", image="busybox:test", reference=f"{place.host}/team/app:1")[-1]
            assert name == "done", done
            assert done["reference"] == f"{place.host}/team/app:1"
    return f"{world.open.host}/team/app:1"


class TestPulls:
    def test_with_progress(self, world: World, pushed: str) -> None:
        with world.client("one") as one:
            events = follow(one, "pull", reference=pushed)
            kinds = [name for name, _ in events]
            assert set(kinds[:-1]) == {"progress"}
            assert kinds[-1] == "done"
            layer = next(data for _, data in events if data.get("stage") == "download")
            assert layer["total"] > 0
            image = events[-1][1]
            assert image["references"] == [pushed]
            assert one.get("/v1/images/item", params={"ref": pushed}).json()["id"] == image["id"]
            made = one.post("/v1/sandboxes", json={"image": pushed, "engine": _engine()}).json()
            result = one.post(f"/v1/sandboxes/{made['id']}/exec", json={"command": "cat /etc/passwd"}).json()
            assert "app:x:1000" in result["stdout"]
            refused = one.delete("/v1/images/item", params={"ref": pushed})
            assert (refused.status_code, refused.json()["error"]) == (409, "ImageInUse")
            one.delete(f"/v1/sandboxes/{made['id']}")
            assert one.delete("/v1/images/item", params={"ref": pushed}).json()["image"] == image["id"]
            assert one.get("/v1/images/item", params={"ref": pushed}).status_code == 404

    def test_a_sandbox_brings_its_own_image(self, world: World, pushed: str) -> None:
        with world.client("one") as one:
            made = one.post("/v1/sandboxes", json={"image": pushed, "engine": _engine()})
            assert made.status_code == 201, made.text
            one.delete(f"/v1/sandboxes/{made.json()['id']}")

    def test_what_is_not_there(self, world: World, pushed: str) -> None:
        with world.client("one") as one:
            name, problem = follow(one, "pull", reference=f"{world.open.host}/team/app:none")[-1]
            assert (name, problem["error"], problem["status"]) == ("error", "ImageNotFound", 404)
            wrong = one.post("/v1/images/pull", json={"reference": "Not A Name"})
            assert (wrong.status_code, wrong.json()["error"]) == (422, "SpecError")

    @pytest.mark.parametrize("where", ["127.0.0.1:1", "localhost:9", "169.254.169.254", "[::1]:5000", "0x7f000001:80"])
    def test_no_key_reaches_private_places(self, world: World, where: str) -> None:
        with world.client("one") as one:
            for body in ({"reference": f"{where}/app"}, {"reference": f"{where}/app", "insecure": True}):
                asked = one.post("/v1/images/pull", json=body)
                found = list(parsed(iter(asked.text.splitlines())))[-1][1] if asked.status_code == 200 else asked.json()
                assert found["error"] in ("NotAllowed", "SpecError"), found
            made = one.post("/v1/sandboxes", json={"image": f"{where}/app", "engine": _engine()})
            assert made.json()["error"] in ("NotAllowed", "ImageNotFound"), made.text
            pushed = follow(one, "push", image="busybox:test", reference=f"{where}/app")[-1][1]
            assert pushed["error"] == "NotAllowed", pushed

    def test_nor_does_one_that_shares_the_operators_home(self, world: World, pushed: str) -> None:
        with world.server.client(world.server.new_key("mate", "--tenant", "main")) as mate:
            assert follow(mate, "pull", reference="127.0.0.1:1/app", insecure=True)[-1][1]["error"] == "NotAllowed"
            refused = mate.post("/v1/sandboxes", json={"image": "127.0.0.1:1/app", "engine": _engine()})
            assert (refused.status_code, refused.json()["error"]) == (404, "ImageNotFound")
            private = f"{world.private.host}/team/app:1"
            assert follow(mate, "pull", reference=private)[-1][1]["error"] == "RegistryDenied"
            assert follow(mate, "pull", reference=pushed)[-1][0] == "done"
            made = mate.post("/v1/sandboxes", json={"image": pushed, "engine": _engine()})
            assert made.status_code == 201, made.text
            mate.delete(f"/v1/sandboxes/{made.json()['id']}")

    def test_an_admin_does(self, world: World) -> None:
        with world.server.client() as admin:
            name, problem = follow(admin, "pull", reference="127.0.0.1:1/app", insecure=True)[-1]
            assert (name, problem["error"]) == ("error", "RegistryUnavailable")

    def test_logins_are_whose_they_are(self, world: World, pushed: str) -> None:
        reference = f"{world.private.host}/team/app:1"
        with world.client("one") as one, world.server.client() as admin:
            name, problem = follow(one, "pull", reference=reference)[-1]
            assert (name, problem["error"]) == ("error", "RegistryDenied")
            assert PASSWORD not in json.dumps(problem)
            made = one.post("/v1/sandboxes", json={"image": reference, "engine": _engine()})
            assert made.json()["error"] == "RegistryDenied"
            wrong = follow(one, "pull", reference=reference, username=USER, password="wrong-one")[-1][1]
            assert wrong["error"] == "RegistryDenied"
            assert "wrong-one" not in json.dumps(wrong)
            assert follow(admin, "pull", reference=reference)[-1][0] == "done"  # by the operator's own
            admin.delete("/v1/images/item", params={"ref": reference})
            assert follow(one, "pull", reference=reference, username=USER, password=PASSWORD)[-1][0] == "done"
            assert follow(one, "push", image=reference)[-1][1]["error"] == "RegistryDenied"  # nothing was kept
            sent = follow(one, "push", image=reference, username=USER, password=PASSWORD)
            assert sent[-1][0] == "done"
        kept = [path for path in world.server.home.rglob("*") if path.is_file() and os.access(path, os.R_OK)]
        for path in (path for path in kept if path.stat().st_size < 1 << 24):
            assert PASSWORD.encode() not in path.read_bytes(), path
            assert b"wrong-one" not in path.read_bytes(), path


class TestTheOperators:
    def test_are_everybodys_by_name(self, world: World) -> None:
        with world.client("one") as one, world.client("two") as two, world.server.client() as admin:
            asked = one.post("/v1/images/tag", json={"image": "busybox:test", "reference": "mine:1"})
            assert asked.status_code == 200
            assert {"docker.io/library/busybox:test", "docker.io/library/mine:1"} <= names(one)
            assert "docker.io/library/mine:1" not in names(two) | names(admin)
            assert two.get("/v1/images/item", params={"ref": "mine:1"}).status_code == 404
            assert two.post("/v1/images/tag", json={"image": "mine:1", "reference": "x"}).status_code == 404
            assert follow(two, "pull", reference="busybox:test", if_missing=True) == [
                ("done", follow(two, "pull", reference="busybox:test", if_missing=True)[0][1])
            ]

    def test_standard_images(self, world: World) -> None:
        with world.client("one") as one:
            missing = one.post("/v1/images/pull", json={"reference": "sloplet/code"})
            assert (missing.status_code, missing.json()["error"]) == (404, "ImageNotFound")
            busybox_image(Home(world.server.home), "sloplet/code", files={"etc/standard": "yes"})
            assert follow(one, "pull", reference="sloplet/code")[-1][1]["references"] == [
                "docker.io/sloplet/code:latest"
            ]

    def test_what_the_operator_removes_stays_the_tenants(self, world: World) -> None:
        home = Home(world.server.home)
        busybox_image(home, "passing:1", files={"etc/passing": "by"})
        with world.client("one") as one, world.server.client() as admin:
            made = one.post("/v1/sandboxes", json={"image": "passing:1", "engine": _engine()}).json()
            assert admin.delete("/v1/images/item", params={"ref": "passing:1"}).json()["image"]
            again = one.post("/v1/sandboxes", json={"image": "passing:1", "engine": _engine()}).json()
            for box in (made, again):
                done = one.post(f"/v1/sandboxes/{box['id']}/exec", json={"command": "cat /etc/passing"}).json()
                assert done["stdout"] == "by"
                one.delete(f"/v1/sandboxes/{box['id']}")


class TestArchives:
    def test_out_and_in(self, world: World) -> None:
        with world.client("one") as one, world.client("two") as two:
            archive = one.get("/v1/images/export", params={"ref": "busybox:test"})
            assert archive.headers["content-type"] == "application/x-tar"
            assert archive.content == one.get("/v1/images/export", params={"ref": "busybox:test"}).content
            with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
                assert {"oci-layout", "index.json", "manifest.json"} <= set(tar.getnames())
            taken = two.post("/v1/images/import", params={"name": "brought:1"}, content=archive.content)
            assert taken.status_code == 201
            found = one.get("/v1/images/item", params={"ref": "busybox:test"}).json()
            assert taken.json()["id"] == found["id"]
            assert "docker.io/library/brought:1" in names(two)
            assert two.get("/v1/images/export", params={"ref": "nothing"}).status_code == 404

    def test_a_root_filesystem(self, world: World) -> None:
        body = io.BytesIO()
        with tarfile.open(fileobj=body, mode="w:gz") as tar:
            info = tarfile.TarInfo("bin/tool")
            info.mode, info.size = 0o755, 4
            tar.addfile(info, io.BytesIO(b"tool"))
        with world.client("one") as one:
            taken = one.post("/v1/images/import", params={"name": "root:1"}, content=body.getvalue())
            assert (taken.status_code, len(taken.json()["layers"])) == (201, 1)

    def test_what_is_none(self, world: World) -> None:
        with world.client("one") as one:
            for body in (b"", b"nothing" * 1000, b"\0" * 10240):
                refused = one.post("/v1/images/import", content=body)
                assert (refused.status_code, refused.json()["error"]) == (422, "ImageInvalid"), refused.text
                assert str(world.server.home) not in refused.text
            assert one.post("/v1/images/import", params={"name": "A B"}, content=b"x").status_code == 422

    def test_a_body_that_breaks_off_leaves_nothing(self, world: World) -> None:
        with world.client("one") as one:
            before = one.get("/v1/images", params={"all": True}).json()
            archive = one.get("/v1/images/export", params={"ref": "busybox:test"}).content

        def half() -> Iterator[bytes]:
            yield archive[: len(archive) // 2]
            raise ConnectionError

        with world.client("one") as one:
            with pytest.raises(ConnectionError):
                one.post("/v1/images/import", params={"name": "half:1"}, content=half())
            after = one.get("/v1/images", params={"all": True}).json()
            assert {item["id"] for item in after["items"]} == {item["id"] for item in before["items"]}
        assert not list((world.server.home / "tenants" / "one" / "cache").glob("tmp*"))


class TestTheRest:
    def test_lists_and_pages(self, world: World) -> None:
        with world.client("one") as one:
            found = one.get("/v1/images/item", params={"ref": "busybox:test"}).json()
            assert found["config"]["cmd"] == ["sh"]
            assert found["disk"]["blobs"] == found["size"]
            assert one.get("/v1/images/item").status_code == 422
            assert one.post("/v1/images/prune", json={"older_than": "never"}).status_code == 422
            assert one.post("/v1/images/prune", json={"unknown": 1}).status_code == 422
            assert set(one.post("/v1/images/prune", json={}).json()) >= {"images", "bytes", "later"}
            assert "busybox:test" in {name.rpartition("/")[2] for name in names(one)}

    def test_no_path_of_the_host_is_told(self, world: World) -> None:
        with world.client("one") as one:
            for path in ("/v1/images", "/v1/images/item?ref=busybox:test", "/v1/images/item?ref=none"):
                assert str(world.server.home) not in one.get(path).text


class TestTheLibraryAndTheCli:
    def test_sandboxes(self, world: World, pushed: str) -> None:
        with Sandbox(image=pushed, engine=_engine(), server=world.server.url, key=world.keys["two"]) as box:
            assert box.run("id -u app").stdout == "1000\n"
        with pytest.raises((NotAllowed, ImageNotFound)):
            Sandbox(image="127.0.0.1:1/app", server=world.server.url, key=world.keys["two"]).__enter__()

    def test_verbs(self, world: World, pushed: str, tmp_path: Path) -> None:
        two = {"SLOPLET_KEY": world.keys["two"], "SLOPLET_HOME": str(tmp_path / "none")}

        def said(*words: str, code: int = 0) -> str:
            done = sloplet("--server", world.server.url, "image", *words, env=two)
            assert done.returncode == code, done
            return (done.stdout if code == 0 else done.stderr).decode()

        image = json.loads(said("pull", pushed, "--json"))
        assert image["reference"] == pushed
        assert said("tag", pushed, "short:1").startswith("short:1: ")
        assert "short:1" in said("ls")
        assert json.loads(said("inspect", "short:1", "--json"))["disk"]["unpacked"] >= 0
        assert "short:1" in said("inspect", "short:1")
        said("export", "short:1", str(tmp_path / "short.tar"))
        assert "archives" in said("export", "short:1", str(tmp_path / "folder"), code=125)
        assert (tmp_path / "short.tar").stat().st_size > image["size"]
        assert json.loads(said("import", str(tmp_path / "short.tar"), "again:1", "--json"))["id"] == image["id"]
        root = tmp_path / "root"
        (root / "bin").mkdir(parents=True)
        (root / "bin" / "x").write_text("x")
        assert len(json.loads(said("import", str(root), "folder:1", "--json"))["layers"]) == 1
        assert json.loads(said("push", "short:1", f"{world.open.host}/team/app:2", "--json"))["digest"]
        assert "removed" in said("rm", "folder:1")
        said("rm", "folder:1", code=125)
        said("prune")
        assert "operator" in said("build", "sloplet/code", code=125)
        assert "login" in said("pull", pushed, "--login", code=125)
        login = {"auths": {world.private.host: {"username": USER, "password": PASSWORD}}}
        (tmp_path / "auth.json").write_text(json.dumps(login))
        two["REGISTRY_AUTH_FILE"] = str(tmp_path / "auth.json")
        said("pull", f"{world.private.host}/team/app:1", code=125)  # not sent unless that is said
        assert said("pull", f"{world.private.host}/team/app:1", "--login", "-q").startswith("sha256:")
        assert not (tmp_path / "none").exists()


def _engine() -> str:
    """With several users inside: what images need here."""
    from sloplet.engines import jail
    from sloplet.engines.machine import machine

    name = "gvisor" if jail.mode(machine()) == "single" else "container"
    if name == "gvisor" and os.environ.get("SLOPLET_TEST_RUNSC"):
        return name  # which the server is given
    probe = engines.load(name).probe()
    if not probe.available:
        pytest.skip(f"{name}: {probe.reason}")
    return name
