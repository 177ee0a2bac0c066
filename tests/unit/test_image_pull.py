"""Pulls from a registry that misbehaves: each a typed error, nothing half there, and the next pull works."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rude_registry import Made, Reply, Request, RudeRegistry, digest, layer_tar, make_image
from sloplet.errors import (
    ImageInvalid,
    ImageNotFound,
    ImagePlatform,
    RegistryDenied,
    RegistryError,
    RegistryUnavailable,
    SlopletError,
    StateUnwritable,
)
from sloplet.images.media import OCI_INDEX, host_platform
from sloplet.images.patience import Patience
from sloplet.images.progress import ImageProgress
from sloplet.images.pull import pull
from sloplet.images.reference import Reference, parse
from sloplet.images.registries import Endpoint, Registries, Registry
from sloplet.images.registry import RegistryClient
from sloplet.images.store import ImageStore, StoredImage
from sloplet.images.threads import Abandoned, Patient, kept
from sloplet.runtime import Runtime
from sloplet.spec import SandboxSpec
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone

QUICK = Patience(connect=5, silence=0.3, small=5, pause=0.001, tries=3, longest=2)
BIG = os.urandom(3 << 20)  # does not compress: a layer of three megabytes


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    return ImageStore(Home(tmp_path / "home"))


class Pulling:
    """A registry, a store, and pulls from the one into the other."""

    def __init__(self, store: ImageStore) -> None:
        self.store = store
        self.registry = RudeRegistry()
        self.seen: list[ImageProgress] = []
        self.whole: dict[str, bytes] = {}  #: blobs as they should be

    def reference(self, name: str = "team/app:v1") -> Reference:
        return parse(f"{self.registry.host}/{name}")

    async def pull(self, name: str = "team/app:v1", **options: Any) -> StoredImage:
        options.setdefault("patience", QUICK)
        options.setdefault("registries", Registries({self.registry.host: Registry(insecure=True)}))
        return await pull(self.reference(name), self.store, progress=self.seen.append, **options)

    def nothing_is_here(self, *allowed: str) -> None:
        assert self.store.list() == []
        assert set(self.store.blobs.digests()) <= set(allowed)
        for path in self.store.blobs.partial.iterdir() if self.store.blobs.partial.exists() else []:
            right = self.whole[path.name.replace("-", ":")]  # of a blob that was on its way beside the wrong one
            assert right.startswith(path.read_bytes())


def run(store: ImageStore, work: Callable[[Pulling], Awaitable[None]]) -> None:
    async def inside() -> None:
        pulling = Pulling(store)
        async with pulling.registry:
            await work(pulling)

    asyncio.run(inside())
    store.close()


def test_an_image_comes_with_all_its_blobs_and_progress(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(layer_tar({"bin/sh": BIG}), layer_tar({"etc/x": b"y"})), "v1")
        image = await this.pull()
        assert (image.id, image.manifest) == (made.config, made.digest)
        assert image.references == (str(this.reference()),)
        assert set(made.blobs) | {made.digest} == set(store.blobs.digests())
        for key in (made.config, *made.layers):
            steps = [step for step in this.seen if step.key == key and step.stage == "download"]
            assert steps[0].done == 0
            assert steps[-1].done == steps[-1].total == len(made.blobs[key])
        assert this.seen[-1].stage == "done"

        this.registry.requests.clear()
        assert (await this.pull()).id == made.config
        assert [request.path for request in this.registry.requests] == ["/v2/team/app/manifests/v1"]

    run(store, work)


def test_a_layer_that_is_named_twice_comes_once(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        tar = layer_tar({"bin/sh": b"x"})
        made = this.registry.add(make_image(tar, tar), "v1")
        assert len((await this.pull()).layers) == 2
        assert len(this.registry.asked(made.layers[0])) == 1

    run(store, work)


def _child(entries: list[Any]) -> bytes:
    return json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}).encode()


Break = Callable[[RudeRegistry, Made], None]


def _answers(end: Callable[[Made], str], *replies: Reply) -> Break:
    return lambda registry, made: registry.will(end(made), *replies)


def _tag(_: Made) -> str:
    return "/v1"


def _layer(made: Made) -> str:
    return made.layers[0]


def _config(made: Made) -> str:
    return made.config


def _served(document: dict[str, Any]) -> Break:
    raw = json.dumps(document).encode()
    return lambda registry, made: registry.manifests.__setitem__("v1", (raw, ""))


def _replaced(**manifest: Any) -> Break:
    return lambda registry, made: registry.will(
        "/v1", Reply(200, json.dumps({**json.loads(made.manifest), **manifest}).encode())
    )


def _described(which: str, **changes: Any) -> Break:
    def apply(registry: RudeRegistry, made: Made) -> None:
        document = json.loads(made.manifest)
        item = document["config"] if which == "config" else document["layers"][0]
        item.update(changes)
        registry.will("/v1", Reply(200, json.dumps(document).encode()))

    return apply


def _loop(registry: RudeRegistry, made: Made) -> None:
    """An index that says of itself, under another digest, that it is its own image."""
    entry = {"mediaType": OCI_INDEX, "digest": "sha256:" + "0" * 64, "size": 10}
    raw = _child([entry])
    registry.will("/v1", Reply(200, raw))
    registry.will("0" * 64, Reply(200, raw))


def _tower(registry: RudeRegistry, made: Made) -> None:
    """Indexes inside of indexes, each of them right."""
    below, kind = made.manifest, "application/vnd.oci.image.manifest.v1+json"
    for level in range(7):
        below = registry.add_index((below, None), name=f"level{level}", kind=kind)
        kind = OCI_INDEX
    registry.will("/v1", Reply(200, below))


def _platforms(*names: str) -> Break:
    def apply(registry: RudeRegistry, made: Made) -> None:
        kind, size = "application/vnd.oci.image.manifest.v1+json", len(made.manifest)
        entries = []
        for name in names:
            os_name, _, architecture = name.partition("/")
            platform = {"os": os_name, "architecture": architecture}
            entries.append({"mediaType": kind, "digest": made.digest, "size": size, "platform": platform})
        registry.will("/v1", Reply(200, _child(entries)))

    return apply


def _other_config(settings: dict[str, Any]) -> Break:
    def apply(registry: RudeRegistry, made: Made) -> None:
        other = make_image(config=settings)
        registry.blobs.update(other.blobs)
        registry.will("/v1", Reply(200, other.manifest))

    return apply


def _garbled(data: bytes) -> bytes:
    return data[:50] + b"!" + data[51:]


def _wrong_layer(registry: RudeRegistry, made: Made) -> None:
    registry.will(made.layers[0], Reply(200, _garbled(made.blobs[made.layers[0]])))


def _said_nothing(registry: RudeRegistry, made: Made) -> None:
    registry.blobs[digest(b"{}")] = b"{}"
    _described("config", size=2, digest=digest(b"{}"))(registry, made)


def _stalled_layer(registry: RudeRegistry, made: Made) -> None:
    reply = Reply(200, stall=True, length=len(made.blobs[made.layers[0]]))
    registry.will(made.layers[0], *[reply] * 9)


def _layer_gone(registry: RudeRegistry, made: Made) -> None:
    del registry.blobs[made.layers[0]]


def _endless_config(registry: RudeRegistry, made: Made) -> None:
    registry.will(made.config, Reply(200, b"{" * (len(made.blobs[made.config]) + 5000), chunked=True))


V1 = "application/vnd.docker.distribution.manifest.v1+prettyjws"
FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
NOWHERE = Reply(302, headers={"Location": "/v2/team/app/manifests/v1"})

WRONG: list[tuple[str, Break, type[SlopletError], str]] = [
    ("unauthorized", _answers(_tag, *[Reply(401)] * 9), RegistryDenied, "wants credentials"),
    ("forbidden", _answers(_tag, Reply(403, b'{"errors":[{"message":"no entry\\u001b[31m"}]}')), RegistryDenied,
     r"no entry\?\[31m"),
    ("not found", _answers(_tag, Reply(404)), ImageNotFound, "has no team/app v1"),
    ("teapot", _answers(_tag, Reply(418)), RegistryError, "418"),
    ("busy for ever", _answers(_tag, *[Reply(429, headers={"Retry-After": "0"})] * 9), RegistryUnavailable, "429"),
    ("busy for long", _answers(_tag, Reply(429, headers={"Retry-After": "3600"})), RegistryUnavailable, "3600 s"),
    ("failing", _answers(_tag, *[Reply(500)] * 9), RegistryUnavailable, "500"),
    ("failing blob", _answers(_layer, *[Reply(503)] * 9), RegistryUnavailable, "503"),
    ("stalled manifest", _answers(_tag, *[Reply(200, b"{", length=9, stall=True)] * 9), RegistryUnavailable, "stalls"),
    ("stalled blob", _stalled_layer, RegistryUnavailable, "stalls"),
    ("manifest cut", _answers(_tag, *[Reply(200, b"{}", length=100, cut=1)] * 9), RegistryUnavailable, "cut"),
    ("endless manifest", _answers(_tag, Reply(200, b"[" * (5 << 20))), ImageInvalid, "more than 4194304 bytes"),
    ("manifest is no json", _answers(_tag, Reply(200, b"<html>")), ImageInvalid, "no JSON"),
    ("nested to death", _answers(_tag, Reply(200, b"[" * 100_000)), ImageInvalid, "no JSON"),
    ("told another digest", _answers(_tag, Reply(200, b"{}", {"Docker-Content-Digest": "sha256:" + "0" * 64})),
     ImageInvalid, "not what the registry says"),
    ("packed again", _answers(_tag, Reply(200, b"{}", {"Content-Encoding": "gzip"})), RegistryError, "packed"),
    ("redirect loop", _answers(_tag, *[NOWHERE] * 99), RegistryError, "more than 5 times"),
    ("redirect nowhere", _answers(_tag, Reply(302, headers={"Location": "ftp://x/y"})), RegistryError, "no address"),
    ("schema 1", _served({"schemaVersion": 1, "fsLayers": []}), ImageInvalid, "schema 1"),
    ("schema 1 by type", _replaced(mediaType=V1), ImageInvalid, "schema 1"),
    ("schema 9", _replaced(schemaVersion=9), ImageInvalid, "schemaVersion 9"),
    ("two faces", _replaced(manifests=[]), ImageInvalid, "both an index and a manifest"),
    ("unknown type", _replaced(mediaType="text/plain"), ImageInvalid, "not known"),
    ("artifact", _described("config", mediaType="application/vnd.cncf.helm.config.v1+json"), ImageInvalid, "helm"),
    ("no layers", _replaced(layers=[]), ImageInvalid, "no layers"),
    ("layers missing", _replaced(layers=None), ImageInvalid, "no list 'layers'"),
    ("too many layers", _replaced(layers=[{}] * 100_000), ImageInvalid, "at most 1024"),
    ("foreign layer", _described("layer", mediaType=FOREIGN), ImageInvalid, "foreign"),
    ("layer by address", _described("layer", urls=["https://example.com/x"]), ImageInvalid, "foreign"),
    ("encrypted layer", _described("layer", mediaType="application/vnd.oci.image.layer.v1.tar+gzip+encrypted"),
     ImageInvalid, "not known"),
    ("negative size", _described("layer", size=-1), ImageInvalid, "claims to have -1"),
    ("size is true", _described("layer", size=True), ImageInvalid, "lacks"),
    ("digest leads out", _described("layer", digest="sha256:../../x"), ImageInvalid, "named by"),
    ("manifest loop", _loop, ImageInvalid, "not what its digest says"),
    ("tower of indexes", _tower, ImageInvalid, "more than 4 deep"),
    ("foreign architecture", _platforms("linux/s390x", "windows/amd64"), ImagePlatform, "linux/s390x, windows/amd64"),
    ("config of another", _other_config({"architecture": "s390x"}), ImagePlatform, "made for linux/s390x"),
    ("config without layers", _other_config({"rootfs": {}}), ImageInvalid, "do not belong together"),
    ("config with NUL", _other_config({"config": {"Env": ["A=\0"]}}), ImageInvalid, "NUL"),
    ("config is no object", _other_config({"config": []}), ImageInvalid, "no object"),
    ("empty config", _described("config", size=0, digest=digest(b"")), ImageInvalid, "no JSON"),
    ("config says nothing", _said_nothing, ImageInvalid, "do not belong together"),
    ("config of 100 MB", _described("config", size=100_000_000), ImageInvalid, "100000000 bytes"),
    ("config without end", _endless_config, ImageInvalid, "more than the"),
    ("wrong digest", _wrong_layer, ImageInvalid, "its digest is"),
    ("wrong size", _described("layer", size=7), ImageInvalid, "manifest says 7"),
    ("lying length", _answers(_layer, Reply(200, b"x" * 9, length=9)), ImageInvalid, "manifest says"),
    ("blob is gone", _layer_gone, RegistryError, "no longer"),
]  # fmt: skip


@pytest.mark.parametrize(("breaks", "error", "text"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_goes_wrong_is_told_and_leaves_nothing(
    breaks: Break, error: type[SlopletError], text: str, store: ImageStore
) -> None:
    async def work(this: Pulling) -> None:
        made = make_image(layer_tar({"bin/sh": b"first" * 99}), layer_tar({"etc/y": b"second" * 99}))
        this.registry.add(made, "v1")
        before = dict(this.registry.manifests), dict(this.registry.blobs)
        this.whole = before[1]
        breaks(this.registry, made)
        with pytest.raises(error, match=text) as caught:
            await this.pull()
        assert type(caught.value) is error
        this.nothing_is_here(*before[1], *this.registry.blobs, digest(b""))

        this.registry.script.clear()
        this.registry.manifests, this.registry.blobs = before
        assert (await this.pull()).id == made.config

    run(store, work)


@pytest.mark.parametrize("problem", [Reply(429, headers={"Retry-After": "0"}), Reply(500), Reply(200, cut=0, length=5)])
def test_what_passes_is_tried_again(problem: Reply, store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(), "v1")
        this.registry.will("/v1", problem)
        if problem.status != 200:
            this.registry.will(made.layers[0], problem, problem)
        await this.pull()
        assert len(this.registry.asked("/v1")) == 2

    run(store, work)


def test_retry_after_is_waited_for(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    async def work(this: Pulling) -> None:
        this.registry.add(make_image(), "v1")
        this.registry.will("/v1", Reply(429, headers={"Retry-After": "2"}), Reply(500))
        monkeypatch.setattr("sloplet.images.patience.asyncio.sleep", sleep)
        await this.pull()
        monkeypatch.undo()

    run(store, work)
    assert waits[0] == 2
    assert 0.001 < waits[1] < 0.003  # the second pause is twice the first


def test_a_cut_download_goes_on_where_it_was_cut(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(layer_tar({"bin/sh": BIG})), "v1")
        data = made.blobs[made.layers[0]]
        this.registry.will(made.layers[0], Reply(200, data, cut=2 << 20))
        await this.pull()
        first, second = this.registry.asked(made.layers[0])
        assert "range" not in first.headers
        assert second.headers["range"] == f"bytes={2 << 20}-"

    run(store, work)


def test_a_stalled_download_goes_on_where_it_stalled(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(layer_tar({"bin/sh": BIG})), "v1")
        data = made.blobs[made.layers[0]]
        this.registry.will(made.layers[0], Reply(200, data[: 1 << 20], length=len(data), stall=True))
        await this.pull()
        assert this.registry.asked(made.layers[0])[1].headers["range"] == f"bytes={1 << 20}-"

    run(store, work)


def test_a_pull_goes_on_with_what_the_one_before_left(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(layer_tar({"bin/sh": BIG})), "v1")
        data = made.blobs[made.layers[0]]
        this.registry.will(made.layers[0], Reply(200, data, cut=2 << 20), *[Reply(503)] * 9)
        with pytest.raises(RegistryUnavailable):
            await this.pull()
        assert store.list() == []
        this.registry.script.clear()
        this.registry.requests.clear()
        await this.pull()
        assert this.registry.asked(made.layers[0])[0].headers["range"] == f"bytes={2 << 20}-"

    run(store, work)


@pytest.mark.parametrize("how", ["ignored", "another place", "beyond the end"])
def test_a_server_that_cannot_go_on_sends_it_again(how: str, store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(layer_tar({"bin/sh": BIG})), "v1")
        data = made.blobs[made.layers[0]]
        this.registry.will(made.layers[0], Reply(200, data, cut=1 << 20))
        if how == "another place":
            this.registry.will(
                made.layers[0], Reply(206, data[5:], {"Content-Range": f"bytes 5-{len(data)}/{len(data)}"})
            )
        elif how == "beyond the end":
            this.registry.will(made.layers[0], Reply(416))
        this.registry.ranges = False
        assert (await this.pull()).id == made.config

    run(store, work)


def test_a_partial_that_was_wrong_is_thrown_away(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(layer_tar({"bin/sh": BIG})), "v1")
        data = made.blobs[made.layers[0]]
        this.registry.will(made.layers[0], Reply(200, _garbled(data), cut=2 << 20))
        with pytest.raises(ImageInvalid, match="its digest is"):
            await this.pull()
        this.nothing_is_here(made.config)
        assert (await this.pull()).id == made.config

    run(store, work)


def test_what_the_disk_has_no_room_for_is_not_begun(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(layer_tar({"bin/sh": BIG})), "v1")
        data = made.blobs[made.layers[0]]
        with store.blobs.writer(made.layers[0]) as writer:
            writer.write(data[: 2 << 20])
        needed = len(data) - (2 << 20)
        facts = list(os.statvfs("/"))
        facts[1], facts[4] = 1, needed - 1  # the size of a block, and how many are free
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(facts))
        with pytest.raises(StateUnwritable, match=f"{needed} bytes are still to come, and {needed - 1} are free"):
            await this.pull()
        assert this.registry.asked(made.layers[0]) == []
        facts[4] = needed  # what is here already needs no room
        assert (await this.pull()).id == made.config

    run(store, work)


def test_a_blob_that_always_ends_early_is_given_up(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(), "v1")
        data = made.blobs[made.layers[0]]

        def one_more(request: Request) -> Reply:
            start = int(request.headers.get("range", "bytes=0-")[6:-1])
            headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
            return Reply(206 if start else 200, data[start:], headers, cut=1)

        this.registry.will(made.layers[0], *[one_more] * 99)
        with pytest.raises(RegistryUnavailable):
            await this.pull()
        assert len(this.registry.asked(made.layers[0])) == QUICK.tries

    run(store, work)


def test_a_drip_counts_as_a_stall(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(layer_tar({"bin/sh": BIG})), "v1")
        impatient = Patience(pause=0.001, tries=2, window=0.0, slowest=1e15)
        with pytest.raises(RegistryUnavailable, match="too slowly"):
            await this.pull(patience=impatient)
        assert this.registry.asked(made.layers[0])

    run(store, work)


@pytest.mark.parametrize(("status", "what"), [(200, "headers"), (500, "body")])
def test_an_answer_that_never_comes_to_its_end_is_given_up(status: int, what: str, store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(), "v1")
        this.registry.will(made.layers[0], *[Reply(status, length=16000, drip=what)] * 9)
        with pytest.raises(RegistryUnavailable):
            await this.pull(patience=Patience(silence=5, small=0.2, pause=0.001, tries=2))
        assert len(this.registry.asked(made.layers[0])) == 2
        this.registry.script.clear()
        assert (await this.pull()).id == made.config

    run(store, work)


def test_a_redirect_to_a_name_that_is_none(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(), "v1")
        this.registry.will(made.layers[0], Reply(307, headers={"Location": "http://xn--zz.test/x"}))
        with pytest.raises(RegistryError, match="nothing that can be asked"):
            await this.pull()

    run(store, work)


def test_what_another_process_left_wrong_comes_once_more(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(layer_tar({"bin/sh": BIG})), "v1")
        with store.blobs.writer(made.layers[0]) as writer:
            writer.write(_garbled(made.blobs[made.layers[0]])[: 2 << 20])
        assert (await this.pull()).id == made.config
        ranges = [request.headers.get("range") for request in this.registry.asked(made.layers[0])]
        assert ranges == [f"bytes={2 << 20}-", None]

    run(store, work)


def test_a_tag_that_moves_while_it_is_pulled(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        old = make_image(layer_tar({"bin/sh": b"old" * 50}))
        new = this.registry.add(make_image(layer_tar({"bin/sh": b"new" * 50})), "v1")
        this.registry.will("/v1", Reply(200, old.manifest))  # its blobs were removed since
        this.registry.blobs[old.config] = old.blobs[old.config]
        image = await this.pull()
        assert image.manifest == new.digest
        this.registry.manifests[old.digest] = (old.manifest, "")
        with pytest.raises(RegistryError, match="no longer"):
            await this.pull(f"team/app@{old.digest}")

    run(store, work)


def test_an_index_gives_the_image_for_this_machine(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        here = host_platform()
        mine, other = make_image(), make_image(layer_tar({"bin/sh": b"z"}), config={"architecture": "s390x"})
        this.registry.add(mine)
        this.registry.add(other)
        raw = this.registry.add_index(
            (other.manifest, {"os": "linux", "architecture": "s390x"}),
            (mine.manifest, {"os": here.os, "architecture": here.architecture}), name="v1",
        )  # fmt: skip
        assert (await this.pull()).manifest == mine.digest
        assert (await this.pull(platform="linux/s390x")).manifest == other.digest
        assert (await this.pull(f"team/app@{digest(raw)}")).manifest == mine.digest

    run(store, work)


def test_by_digest_nothing_else_is_taken(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image())
        this.registry.will(made.digest, Reply(200, make_image(layer_tar({"bin/sh": b"evil"})).manifest))
        with pytest.raises(ImageInvalid, match="not what its digest says"):
            await this.pull(f"team/app@{made.digest}")
        this.nothing_is_here()
        assert (await this.pull(f"team/app@{made.digest}")).manifest == made.digest

    run(store, work)


@pytest.mark.parametrize("trouble", ["gone", "lies", "lies and hangs up", "denies", "fails"])
def test_mirrors_come_first_and_may_fail(trouble: str, store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(), "v1")
        async with RudeRegistry() as mirror:
            mirror.add(made, "v1")
            entries = {
                this.registry.host: Registry(insecure=True, mirrors=(f"{mirror.host}/cache",)),
                mirror.host: Registry(insecure=True),
            }
            answers = {"gone": Reply(404), "denies": Reply(403), "fails": Reply(500)}
            if trouble == "lies":
                mirror.blobs = {name: _garbled(data) for name, data in mirror.blobs.items()}
            elif trouble == "lies and hangs up":
                data = _garbled(made.blobs[made.layers[0]])
                mirror.will(made.layers[0], Reply(200, data, cut=len(data) - 1), Reply(404))
            else:
                mirror.before = lambda request: answers[trouble]
            assert (await this.pull(registries=Registries(entries))).id == made.config
            assert mirror.requests[0].path == "/v2/cache/team/app/manifests/v1"
            assert any("did not help" in step.text for step in this.seen)

            this.store = ImageStore(Home(store.home.path.with_name("another")))
            mirror.before, mirror.blobs = None, dict(this.registry.blobs)
            this.registry.requests.clear()
            assert (await this.pull(registries=Registries(entries))).id == made.config
            assert this.registry.requests == []  # all of it came from the mirror
            this.store.close()

    run(store, work)


def test_two_pulls_of_one_image_download_it_once(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(layer_tar({"bin/sh": BIG})), "v1", "v2")
        images = await asyncio.gather(this.pull(), this.pull("team/app:v2"))
        assert {image.id for image in images} == {made.config}
        assert len(this.registry.asked(made.layers[0])) == 1
        assert set(store.find(made.config).references) == {str(this.reference()), str(this.reference("team/app:v2"))}

    run(store, work)


def test_what_a_thread_makes_for_nobody_is_undone() -> None:
    """Also when the event loop ends meanwhile: a lock that stayed would block all later pulls of this process."""
    begun, go_on = threading.Event(), threading.Event()
    undone: list[str] = []

    def make() -> str:
        begun.set()
        go_on.wait()
        return "made"

    async def give_up() -> None:
        task = asyncio.ensure_future(kept(undone.append, make))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        asyncio.get_running_loop().call_soon(go_on.set)

    asyncio.run(give_up())
    assert undone == ["made"]
    assert asyncio.run(kept(undone.append, lambda: "kept")) == "kept"
    assert undone == ["made"]


@pytest.mark.parametrize(
    ("problem", "heard", "asked"),
    [
        (httpx.ConnectTimeout("late"), False, 2),
        (httpx.ConnectTimeout("late"), True, 6),
        (socket.gaierror(socket.EAI_AGAIN, "not now"), False, 2),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), False, 1),
    ],
)
def test_a_registry_that_may_not_be_there_is_tried_less_often(problem: Exception, heard: bool, asked: int) -> None:
    """Somebody waits for it; one that has answered before is worth more."""
    requests: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request.url.path)
        if heard and len(requests) == 1:
            return httpx.Response(503, stream=httpx.ByteStream(b""))
        if isinstance(problem, OSError):
            raise httpx.ConnectError("no") from problem
        raise problem

    async def work() -> None:
        endpoint = Endpoint("registry.test", "team/app", "https://registry.test/v2/team/app")
        async with RegistryClient(endpoint, patience=replace(QUICK, tries=6)) as client:
            await client.http.aclose()
            client.http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
            with pytest.raises(RegistryUnavailable, match=r"registry\.test (did not answer|cannot be reached)"):
                await client.manifest("v1")

    asyncio.run(work())
    assert len(requests) == asked


def test_a_sandbox_that_nobody_wants_any_more_ends_its_pull(store: ImageStore) -> None:
    """Its thread would else wait for the registry, and the program for its thread."""

    async def work(this: Pulling) -> None:
        this.registry.before = lambda request: Reply(stall=True, length=1)
        store.home.open()
        (store.home.path / "registries.toml").write_text(f'[registry."{this.registry.host}"]\ninsecure = true\n')
        runtime = Runtime(store.home)
        starting = asyncio.ensure_future(runtime.resolve(SandboxSpec.make(image=str(this.reference()))))
        while not this.registry.requests:
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        async with asyncio.timeout(Patience().silence / 2):
            while runtime._tasks:
                await asyncio.sleep(0.01)
        assert len(this.registry.requests) == 1

    run(store, work)


def test_work_that_is_given_up_before_it_begins() -> None:
    patient = Patient()
    assert patient.run(asyncio.sleep(0, "done")) == "done"
    patient.give_up()
    with pytest.raises(Abandoned):
        patient.run(asyncio.sleep(60))


def test_a_pull_that_is_cancelled_keeps_what_came(store: ImageStore) -> None:
    async def work(this: Pulling) -> None:
        made = this.registry.add(make_image(layer_tar({"bin/sh": BIG})), "v1")
        data = made.blobs[made.layers[0]]
        this.registry.will(made.layers[0], Reply(200, data[: 1 << 20], length=len(data), stall=True))
        pulling = asyncio.ensure_future(this.pull(patience=Patience(silence=60)))
        while not any(step.key == made.layers[0] and step.done for step in this.seen):
            await asyncio.sleep(0.01)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert (await this.pull()).id == made.config
        assert this.registry.asked(made.layers[0])[1].headers["range"] == f"bytes={1 << 20}-"

    run(store, work)
