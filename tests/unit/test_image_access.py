"""What tenants of a server may ask registries for: with whose credentials, and at which addresses."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpcore
import httpx
import pytest

from rude_registry import Reply, Request, RudeRegistry, layer_tar, make_image
from sloplet.errors import ImageError, NotAllowed, RegistryDenied, RegistryUnavailable
from sloplet.images import reach, registries
from sloplet.images.access import Access, access_of, publish
from sloplet.images.patience import Patience
from sloplet.images.pull import pull
from sloplet.images.push import push
from sloplet.images.reach import Reach
from sloplet.images.reference import parse
from sloplet.images.registries import Endpoint, Registries, Registry
from sloplet.images.registry import RegistryClient
from sloplet.images.resolve import find_or_pull
from sloplet.images.store import ImageStore
from sloplet.images.threads import Patient
from sloplet.network import upstream
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone

QUICK = Patience(connect=5, silence=2, small=5, pause=0.001, tries=2)
DENIED = Reply(401, headers={"WWW-Authenticate": 'Basic realm="x"'})


def basic(text: bytes) -> str:
    return "Basic " + base64.b64encode(text).decode()


class Place:
    """A server's home, a tenant's, and a registry on loopback."""

    def __init__(self, folder: Path, registry: RudeRegistry) -> None:
        self.main = Home(folder / "home").open()
        (self.main.path / "server").mkdir()
        self.store = ImageStore(self.main.tenant("one"))
        self.own = ImageStore(self.main)
        self.registry = registry
        self.name = parse(f"{registry.host}/team/app:v1")
        self.insecure = Registries({registry.host: Registry(insecure=True)})

    def shown(self) -> set[str | None]:
        return {request.headers.get("authorization") for request in self.registry.requests}


def run(tmp_path: Path, work: Callable[[Place], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))

    async def inside() -> None:
        async with RudeRegistry() as registry:
            registry.add(make_image(layer_tar({"bin/sh": b"x" * 500})), "v1")
            place = Place(tmp_path, registry)
            auth = {"auths": {registry.host: {"username": "operator", "password": "his"}}}
            (tmp_path / "auth.json").write_text(json.dumps(auth))
            await work(place)
            place.store.close()
            place.own.close()

    asyncio.run(inside())


def test_a_tenant_reaches_no_private_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Place) -> None:
        with pytest.raises(NotAllowed, match="not at a public address") as caught:
            await pull(this.name, this.store, registries=this.insecure, patience=QUICK)
        assert f"--allow-registry {this.registry.host}" in str(caught.value)
        assert this.registry.requests == []
        await pull(this.name, this.own, registries=this.insecure, patience=QUICK)  # the operator does
        publish(this.main, [this.registry.host], [])
        image = await pull(this.name, this.store, registries=this.insecure, patience=QUICK)
        assert image.references == (str(this.name),)
        publish(this.main, ["127.0.0.1"], [])  # any port of it
        await pull(this.name, this.store, registries=this.insecure, patience=QUICK)
        publish(this.main, ["127.0.0.1:1"], [])
        with pytest.raises(NotAllowed):
            await pull(this.name, this.store, registries=this.insecure, patience=QUICK)
        with pytest.raises(NotAllowed):
            await push(image, this.name, this.store, registries=this.insecure, patience=QUICK)

    run(tmp_path, work, monkeypatch)


def test_nor_does_its_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``Sandbox(image=...)`` does in there."""

    async def work(this: Place) -> None:
        (this.main.path / "registries.toml").write_text(f'[registry."{this.registry.host}"]\ninsecure = true\n')
        with pytest.raises(NotAllowed):
            await asyncio.to_thread(find_or_pull, str(this.name), this.store, lambda _: None, Patient())
        publish(this.main, [this.registry.host], [])
        found = await asyncio.to_thread(find_or_pull, str(this.name), this.store, lambda _: None, Patient())
        assert found.references == (str(this.name),)

    run(tmp_path, work, monkeypatch)


def test_what_the_operator_wrote_of_registries_holds_for_tenants(tmp_path: Path) -> None:
    main = Home(tmp_path / "home").open()
    (main.path / "server").mkdir()
    (main.path / "registries.toml").write_text('[registry."docker.io"]\nmirrors = ["cache.example:5000"]\n')
    tenant = main.tenant("one").open()
    (tenant.path / "registries.toml").write_text('[registry."docker.io"]\nmirrors = ["evil.example"]\n')
    found = registries.load(tenant, {}).pull(parse("debian:12"))
    assert [endpoint.host for endpoint in found] == ["cache.example:5000", "docker.io"]


def test_a_mirror_may_be_anywhere_and_only_as_a_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Place) -> None:
        mirrored = Registries(
            {"public.example": Registry(mirrors=(this.registry.host,)), this.registry.host: Registry(insecure=True)}
        )
        name = parse("public.example/team/app:v1")
        await pull(name, this.store, registries=mirrored, patience=QUICK)
        with pytest.raises(NotAllowed):
            await pull(this.name, this.store, registries=mirrored, patience=QUICK)
        async with RudeRegistry() as inner:  # where it leads to is another matter
            (layer,) = make_image(layer_tar({"bin/sh": b"x" * 500})).layers
            fresh = ImageStore(this.main.tenant("two"))
            this.registry.will(layer, Reply(307, headers={"Location": f"http://{inner.host}/secret"}))
            with pytest.raises(NotAllowed):
                await pull(name, fresh, registries=Registries({
                    "public.example": Registry(mirrors=(this.registry.host,)),
                    this.registry.host: Registry(insecure=True),
                }), patience=QUICK)  # fmt: skip
            assert inner.requests == []
            fresh.close()

    run(tmp_path, work, monkeypatch)


def test_nobody_is_sent_to_a_private_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a redirect, by the name of a token server, by where to upload."""

    async def work(this: Place) -> None:
        publish(this.main, [this.registry.host], [])
        async with RudeRegistry() as inner:
            inside = f"http://{inner.host}/latest/meta-data"
            this.registry.will("/v1", Reply(302, headers={"Location": inside}))
            with pytest.raises(NotAllowed):
                await pull(this.name, this.store, registries=this.insecure, patience=QUICK)
            challenge = f'Bearer realm="{inside}",service="x"'
            this.registry.will("/v1", Reply(401, headers={"WWW-Authenticate": challenge}))
            with pytest.raises(NotAllowed):
                await pull(this.name, this.store, registries=this.insecure, patience=QUICK)
            image = await pull(this.name, this.store, registries=this.insecure, patience=QUICK)
            this.registry.blobs.clear()
            this.registry.will("/blobs/uploads/", *[Reply(202, headers={"Location": inside})] * 4)
            with pytest.raises(NotAllowed):
                await push(image, this.name, this.store, registries=this.insecure, patience=QUICK)
            assert inner.requests == []

    run(tmp_path, work, monkeypatch)


def test_the_operators_logins_stay_his(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Place) -> None:
        def wants_his(request: Request) -> Reply | None:
            return None if request.headers.get("authorization") == basic(b"operator:his") else DENIED

        this.registry.before = wants_his
        publish(this.main, [this.registry.host], [])
        with pytest.raises(RegistryDenied):
            await pull(this.name, this.store, registries=this.insecure, patience=QUICK)
        assert this.shown() == {None}
        publish(this.main, [this.registry.host], ["elsewhere.example"])
        with pytest.raises(RegistryDenied):
            await pull(this.name, this.store, registries=this.insecure, patience=QUICK)
        assert this.shown() == {None}
        publish(this.main, [this.registry.host], [this.registry.host])
        await pull(this.name, this.store, registries=this.insecure, patience=QUICK)
        assert basic(b"operator:his") in this.shown()

    run(tmp_path, work, monkeypatch)


def test_what_comes_with_a_request_is_for_that_registry_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Place) -> None:
        publish(this.main, [this.registry.host], [])
        access = access_of(this.store.home).with_login("me", "mine")
        assert "mine" not in repr(access)
        async with RudeRegistry() as mirror:
            for each in (mirror, this.registry):
                each.before = lambda request: (
                    None if request.headers.get("authorization") == basic(b"me:mine") else DENIED
                )
            mirrored = Registries(
                {
                    this.registry.host: Registry(mirrors=(mirror.host,), insecure=True),
                    mirror.host: Registry(insecure=True),
                }
            )
            await pull(this.name, this.store, registries=mirrored, patience=QUICK, access=access)
            assert {request.headers.get("authorization") for request in mirror.requests} == {None}
            assert this.shown() == {None, basic(b"me:mine")}
        this.registry.before = lambda request: DENIED
        with pytest.raises(RegistryDenied) as caught:
            await pull(this.name, this.store, registries=this.insecure, patience=QUICK, access=access)
        assert "mine" not in str(caught.value)
        assert "this request" in str(caught.value)
        kept = [path for path in this.main.path.rglob("*") if path.is_file() and b"mine" in path.read_bytes()]
        assert kept == []

    run(tmp_path, work, monkeypatch)


def test_without_a_word_of_the_operators_nothing_is_allowed(tmp_path: Path) -> None:
    main = Home(tmp_path / "home").open()
    (main.path / "server").mkdir()
    tenant = main.tenant("one")
    for text in (None, "{}", "[", '{"allow": 7, "logins": []}'):
        if text is not None:
            (main.path / "server" / "registries.json").write_text(text)
        access = access_of(tenant)
        assert access.logins == frozenset()
        assert access.reach is not None
        assert not access.reach.allows("127.0.0.1", 5000)
    assert access_of(main) == Access()
    assert access_of(main, tenant=True).reach is not None
    assert access_of(tenant, tenant=False) == Access()
    publish(main, ["a"], ["b"])
    assert os.stat(main.path / "server" / "registries.json").st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("registry.lan", "registry.lan", 443, True),
        ("registry.lan", "REGISTRY.lan.", 5000, True),
        ("registry.lan:5000", "registry.lan", 5000, True),
        ("registry.lan:5000", "registry.lan", 443, False),
        ("registry.lan", "evil.registry.lan", 443, False),
        ("registry.lan", "registry.lan.evil", 443, False),
        ("[::1]:5000", "::1", 5000, True),
        ("[::1]:5000", "[::1]", 5000, True),
        ("[::1]:5000", "::1", 5001, False),
        ("::1", "::1", 1, True),
    ],
)
def test_entries(entry: str, host: str, port: int, allowed: bool) -> None:
    assert Reach([entry]).allows(host, port) is allowed


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "0x7f000001", "2130706433", "0", "[::1]", "[::ffff:127.0.0.1]", "[::]", "169.254.169.254",
     "10.0.0.7", "192.168.1.1", "[fd00::1]", "[fe80::1]", "[64:ff9b::7f00:1]", "100.64.0.1", "localhost",
     "a.localhost"],
)  # fmt: skip
def test_every_spelling_of_a_private_address(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def work() -> None:
        endpoint = Endpoint(host, "app", f"https://{host}/v2/app")
        async with RegistryClient(endpoint, patience=QUICK, reach=Reach()) as client:
            with pytest.raises((NotAllowed, RegistryUnavailable)) as caught:
                await client.manifest("latest")
            if host != "a.localhost":  # which not every resolver knows
                assert isinstance(caught.value, NotAllowed)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("code", "said", "tries"), [(socket.EAI_NONAME, "there is no such name", 1), (socket.EAI_AGAIN, "not now", 2)]
)
def test_a_name_that_leads_nowhere_is_not_asked_for_long(
    code: int, said: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As little as where everything may be reached."""
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    asked: list[str] = []
    look = reach._Judge.look

    async def counted(judge: reach._Judge, request: httpx.Request) -> None:
        asked.append(request.url.host)
        await look(judge, request)

    def fail(name: str) -> list[str]:
        raise socket.gaierror(code, said)

    monkeypatch.setattr(reach._Judge, "look", counted)
    monkeypatch.setattr(upstream, "_look_up", fail)

    async def work() -> None:
        endpoint = Endpoint("public.example", "app", "https://public.example/v2/app")
        async with RegistryClient(endpoint, patience=Patience(pause=0.001), reach=Reach()) as client:
            await client.manifest("latest")

    with pytest.raises(RegistryUnavailable, match=f"public.example cannot be reached: .*{said}"):
        asyncio.run(work())
    assert asked == ["public.example"] * tries


def asked(answers: list[list[str]], monkeypatch: pytest.MonkeyPatch, proxy: str | None = None) -> list[str]:
    """Ask ``public.example`` for a manifest, whose name leads to these addresses in turn: who was dialled."""
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    if proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
    dialled: list[str] = []

    async def dial(self: object, host: str, port: int, *_: object, **__: object) -> httpcore.AsyncNetworkStream:
        dialled.append(host)
        raise httpcore.ConnectError("nobody is there")

    monkeypatch.setattr(upstream, "_look_up", lambda name: answers.pop(0) if len(answers) > 1 else answers[0])
    monkeypatch.setattr(reach.httpcore.AnyIOBackend, "connect_tcp", dial)

    async def work() -> None:
        endpoint = Endpoint("public.example", "app", "https://public.example/v2/app")
        async with RegistryClient(endpoint, patience=QUICK, reach=Reach()) as client:
            await client.manifest("latest")

    with pytest.raises((ImageError, NotAllowed)) as caught:
        asyncio.run(work())
    return dialled if not isinstance(caught.value, NotAllowed) else [*dialled, "refused"]


def test_a_name_is_dialled_where_it_was_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(asked([["93.184.215.14"], ["127.0.0.1"]], monkeypatch)) == {"93.184.215.14"}  # no second look
    assert set(asked([["10.0.0.1", "93.184.215.14", "::1"]], monkeypatch)) == {"93.184.215.14"}
    assert asked([["10.0.0.1"]], monkeypatch) == ["refused"]
    assert asked([["::ffff:10.0.0.1"]], monkeypatch) == ["refused"]


def test_this_machines_own_addresses_are_private_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream.System, "is_own", lambda self, address: address == "93.184.215.14")
    assert asked([["93.184.215.14"]], monkeypatch) == ["refused"]


def test_behind_a_proxy_names_are_looked_at_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked([["10.0.0.1"]], monkeypatch, "http://proxy.example:3128") == ["refused"]
    # Nothing is known of it here: it is the proxy's to say.
    assert set(asked([[]], monkeypatch, "http://proxy.example:3128")) == {"proxy.example"}
