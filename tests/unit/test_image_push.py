"""Pushes to a registry that misbehaves: what it has is not sent, what was cut goes on, and the manifest comes last."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from rude_registry import Made, Reply, Request, RudeRegistry, layer_tar, make_image
from sloplet.errors import RegistryDenied, RegistryError, RegistryUnavailable, SlopletError, SpecError
from sloplet.images import push as pushing
from sloplet.images.patience import Patience, Transient
from sloplet.images.progress import ImageProgress
from sloplet.images.push import push
from sloplet.images.reference import parse
from sloplet.images.registries import Endpoint, Registries
from sloplet.images.registry import RegistryClient
from sloplet.images.store import ImageStore
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone

QUICK = Patience(connect=5, silence=2, small=5, pause=0.001, tries=3)


class Sending:
    def __init__(self, registry: RudeRegistry, store: ImageStore) -> None:
        self.registry, self.store = registry, store
        self.made = make_image(layer_tar({"bin/sh": os.urandom(300_000)}), layer_tar({"etc/x": b"y"}))
        for data in (*self.made.blobs.values(), self.made.manifest):
            store.blobs.add_bytes(data)
        self.image = store.record(self.made.digest, reference=parse(f"{registry.host}/first/app:v1"))
        self.seen: list[ImageProgress] = []

    async def push(self, name: str = "team/app:v2", patience: Patience = QUICK) -> str:
        return await push(
            self.image, parse(f"{self.registry.host}/{name}"), self.store, progress=self.seen.append, insecure=True,
            registries=Registries(), patience=patience,
        )  # fmt: skip

    def methods(self) -> list[str]:
        return [request.method for request in self.registry.requests]

    def all_is_there(self, name: str = "v2") -> None:
        assert self.registry.manifests[name][0] == self.made.manifest
        assert set(self.made.blobs.items()) <= set(self.registry.blobs.items())


def run(tmp_path: Path, work: Callable[[Sending], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with RudeRegistry() as registry:
            sending = Sending(registry, ImageStore(Home(tmp_path / "home")))
            await work(sending)
            sending.store.close()

    asyncio.run(inside())


@pytest.fixture(autouse=True)
def anonymous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))


def test_all_of_it_is_sent_and_the_manifest_last(tmp_path: Path) -> None:
    async def work(this: Sending) -> None:
        assert await this.push() == this.made.digest
        this.all_is_there()
        last = this.registry.requests[-1]
        assert (last.method, last.path) == ("PUT", "/v2/team/app/manifests/v2")
        assert last.headers["content-type"] == "application/vnd.oci.image.manifest.v1+json"
        for key, data in this.made.blobs.items():
            steps = [step.done for step in this.seen if step.key == key]
            assert steps[0] == 0
            assert steps[-1] == len(data)

    run(tmp_path, work)


def test_what_is_there_is_not_sent(tmp_path: Path) -> None:
    async def work(this: Sending) -> None:
        this.registry.add(this.made)
        await this.push()
        assert sorted(this.methods()) == ["HEAD", "HEAD", "HEAD", "PUT"]

    run(tmp_path, work)


@pytest.mark.parametrize("lends", [True, False])
def test_another_repository_lends_its_blobs(lends: bool, tmp_path: Path) -> None:
    async def work(this: Sending) -> None:
        this.registry.lends = lends
        this.registry.before = lambda request: Reply(404) if request.method == "HEAD" else None
        this.registry.blobs.update(this.made.blobs)
        await this.push()
        mounts = [request.path for request in this.registry.requests if "mount=" in request.path]
        assert len(mounts) == 3
        assert all("from=first%2Fapp" in path for path in mounts)
        assert ("PUT" in this.methods()[:-1]) is not lends

    run(tmp_path, work)


def test_what_is_large_goes_in_pieces_and_on_from_where_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "_CHUNK", 100_000)

    async def work(this: Sending) -> None:
        this.registry.swallow = 60_000  # of the first piece
        await this.push()
        this.all_is_there()
        ranges = [request.headers["content-range"] for request in this.registry.requests if request.method == "PATCH"]
        assert ranges[:2] == ["0-99999", "60000-159999"]
        assert "GET" in this.methods()

    run(tmp_path, work)


def test_an_upload_whose_answer_is_lost_is_not_sent_again(tmp_path: Path) -> None:
    async def work(this: Sending) -> None:
        def taken_in_silence(request: Request) -> Reply:
            this.registry.blobs[parse_qs(urlsplit(request.path).query)["digest"][0]] = request.body
            return Reply(201, drip="headers")

        this.registry.lends = False
        this.registry.will("/u0", taken_in_silence)
        await this.push(patience=replace(QUICK, small=0.5))
        this.all_is_there()
        assert this.methods().count("POST") == len(this.made.blobs)

    run(tmp_path, work)


def test_a_cut_upload_in_one_piece_begins_again(tmp_path: Path) -> None:
    async def work(this: Sending) -> None:
        this.registry.swallow = 60_000
        await this.push()
        this.all_is_there()

    run(tmp_path, work)


def test_what_an_upload_reads_is_closed_with_it() -> None:
    closed: list[bool] = []

    async def body() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield bytes(1 << 20)
        finally:
            closed.append(True)

    async def inside() -> None:
        async with RudeRegistry() as registry:
            registry.swallow = 1  # and hangs up
            endpoint = Endpoint(registry.host, "app", f"http://{registry.host}/v2/app", plain=True, loopback=True)
            async with RegistryClient(endpoint, patience=QUICK) as client:
                with pytest.raises(Transient) as caught:
                    async with client.open("PUT", f"{endpoint.url}/x", headers={"Content-Length": "1" * 9}, body=body):
                        pass
                assert closed, caught  # which still holds all that the request was made of

    asyncio.run(inside())


@pytest.mark.parametrize(
    ("path", "reply", "error", "text"),
    [
        ("/uploads/", Reply(401), RegistryDenied, "wants credentials"),
        ("/uploads/", Reply(403, b'{"errors":[{"message":"read only"}]}'), RegistryDenied, "read only"),
        ("/uploads/", Reply(500), RegistryUnavailable, "500"),
        ("/uploads/", Reply(202), RegistryError, "where to upload"),
        ("/uploads/", Reply(202, headers={"Location": "gopher://x"}), RegistryError, "no address"),
        ("/u0", Reply(400, b'{"errors":[{"message":"digest invalid"}]}'), RegistryError, "digest invalid"),
        ("/u0", Reply(201, headers={"Docker-Content-Digest": "sha256:0"}), RegistryError, "for another"),
        ("/v2", Reply(400), RegistryError, "400"),
        ("/v2", Reply(201, headers={"Docker-Content-Digest": "sha256:0"}), RegistryError, "for another"),
    ],
)
def test_what_goes_wrong(path: str, reply: Reply, error: type[SlopletError], text: str, tmp_path: Path) -> None:
    async def work(this: Sending) -> None:
        this.registry.lends = False
        this.registry.will(path, *[reply] * 99)
        with pytest.raises(error, match=text):
            await this.push()
        assert "v2" not in this.registry.manifests
        this.registry.script.clear()
        await this.push()
        this.all_is_there()

    run(tmp_path, work)


@pytest.mark.parametrize("said", ["0-\xb2", "0-" + "9" * 5000, "0-x"])
def test_a_registry_that_forgets_what_it_took(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushing, "_CHUNK", 100_000)

    async def work(this: Sending) -> None:
        answers = {"PATCH": [Reply(202), Reply(500)] * 50, "GET": [Reply(204, headers={"Range": said})] * 50}
        this.registry.lends = False
        this.registry.will("/u0", *[lambda request: answers[request.method].pop(0)] * 99)
        with pytest.raises(RegistryUnavailable, match="500"):
            await this.push()
        assert this.methods().count("PATCH") < 20

    run(tmp_path, work)


def test_a_damaged_blob_does_not_become_an_image_there(tmp_path: Path) -> None:
    async def work(this: Sending) -> None:
        path = this.store.blobs.path_of(this.made.layers[0])
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        with pytest.raises(RegistryError, match="digest invalid"):
            await this.push()
        assert "v2" not in this.registry.manifests
        path.write_bytes(b"short")
        with pytest.raises(RegistryError, match="shorter on this disk"):
            await this.push()

    run(tmp_path, work)


def test_pushed_by_digest_it_has_to_be_that(tmp_path: Path) -> None:
    async def work(this: Sending) -> None:
        assert await this.push(f"team/app@{this.made.digest}") == this.made.digest
        this.all_is_there(this.made.digest)
        with pytest.raises(RegistryError, match="cannot be pushed as"):
            await this.push("team/app@sha256:" + "0" * 64)

    run(tmp_path, work)


def test_not_without_tls_to_another_machine(tmp_path: Path) -> None:
    async def work(this: Sending) -> None:
        with pytest.raises(SpecError, match="without TLS"):
            await push(this.image, parse("registry.test/app"), this.store, insecure=True)

    run(tmp_path, work)


def test_the_made_image_is_what_it_says() -> None:
    made = make_image()
    assert isinstance(made, Made)
    assert made.config in made.blobs
