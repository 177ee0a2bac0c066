"""Who is shown credentials, and who is not."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from rude_registry import Reply, Request, RudeRegistry, layer_tar, make_image
from sloplet.errors import ImageError, RegistryDenied, RegistryError, RegistryUnavailable
from sloplet.images.challenge import Challenge, content_range, origin, parse_challenges, retry_after
from sloplet.images.credentials import Credentials
from sloplet.images.patience import Patience
from sloplet.images.pull import pull
from sloplet.images.reference import parse
from sloplet.images.registries import Endpoint, Registries, Registry
from sloplet.images.registry import RegistryClient
from sloplet.images.store import ImageStore, StoredImage
from sloplet.images.tokens import Tokens
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone

QUICK = Patience(connect=5, silence=2, small=5, pause=0.001, tries=3)
BASIC = "Basic " + base64.b64encode(b"me:secret").decode()
DENIED = Reply(401, headers={"WWW-Authenticate": 'Basic realm="x"'})


class Asking:
    def __init__(self, registry: RudeRegistry, folder: Path) -> None:
        self.registry, self.folder = registry, folder
        self.store = ImageStore(Home(folder / "home"))

    def knows(self, entry: dict[str, str], host: str | None = None) -> None:
        (self.folder / "auth.json").write_text(json.dumps({"auths": {host or self.registry.host: entry}}))

    async def pull(self) -> StoredImage:
        registries = Registries({self.registry.host: Registry(insecure=True)})
        reference = parse(f"{self.registry.host}/team/app:v1")
        return await pull(reference, self.store, registries=registries, patience=QUICK)

    def shown(self) -> set[str | None]:
        return {request.headers.get("authorization") for request in self.registry.requests}


def run(tmp_path: Path, work: Callable[[Asking], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))

    async def inside() -> None:
        async with RudeRegistry() as registry:
            registry.add(make_image(layer_tar({"bin/sh": b"x" * 500})), "v1")
            asking = Asking(registry, tmp_path)
            await work(asking)
            asking.store.close()

    asyncio.run(inside())


def wants(value: str) -> Callable[[Request], Reply | None]:
    """A registry that wants exactly this header, and asks for basic credentials."""
    return lambda request: None if request.headers.get("authorization") == value else DENIED


def test_basic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Asking) -> None:
        this.registry.before = wants(BASIC)
        with pytest.raises(RegistryDenied, match="wants credentials") as caught:
            await this.pull()
        assert "docker login" in str(caught.value)
        this.knows({"auth": base64.b64encode(b"me:wrong").decode()})
        with pytest.raises(RegistryDenied, match="does not accept the credentials of") as caught:
            await this.pull()
        assert "wrong" not in str(caught.value)
        this.knows({"auth": base64.b64encode(b"me:secret").decode()})
        await this.pull()
        assert len(this.registry.asked("/v1")) == 2 + 1 + 2  # refused, and asked again with something to show

    run(tmp_path, work, monkeypatch)


def test_credentials_are_not_shown_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Asking) -> None:
        this.knows({"username": "me", "password": "secret"})
        await this.pull()
        assert this.shown() == {None}

    run(tmp_path, work, monkeypatch)


class TokenServer:
    """Gives out tokens one, two, ...; the registry accepts the last one only."""

    def __init__(self, registry: RudeRegistry, server: RudeRegistry) -> None:
        self.count = 0
        self.answer: Callable[[Request], Reply] | None = None
        self._realm = f"http://{server.host}/token?kind=x"
        registry.before = self._registry
        server.before = self._server
        self.requests = server.requests

    @property
    def token(self) -> str:
        return f"token-{self.count}"

    def _registry(self, request: Request) -> Reply | None:
        if request.headers.get("authorization") == f"Bearer {self.token}" and self.count:
            return None
        scope = 'scope="repository:team/app:pull"'
        return Reply(401, headers={"WWW-Authenticate": f'Bearer realm="{self._realm}",service="the one",{scope}'})

    def _server(self, request: Request) -> Reply:
        if self.answer:
            return self.answer(request)
        self.count += 1
        return Reply(200, json.dumps({"token": self.token, "expires_in": 60}).encode())


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Asking) -> None:
        async with RudeRegistry() as server:
            tokens = TokenServer(this.registry, server)
            await this.pull()
            assert tokens.count == 1
            (request,) = tokens.requests
            assert "authorization" not in request.headers
            query = parse_qs(urlsplit(request.path).query)
            assert query == {"kind": ["x"], "service": ["the one"], "scope": ["repository:team/app:pull"]}
            assert this.shown() == {None, "Bearer token-1"}

    run(tmp_path, work, monkeypatch)


def test_tokens_for_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Asking) -> None:
        this.knows({"username": "me", "password": "secret"})
        async with RudeRegistry() as server:
            tokens = TokenServer(this.registry, server)
            await this.pull()
            (request,) = tokens.requests
            assert request.headers["authorization"] == BASIC
            assert parse_qs(urlsplit(request.path).query)["account"] == ["me"]
            assert BASIC not in this.shown()  # the registry itself sees tokens only

    run(tmp_path, work, monkeypatch)


def test_tokens_for_an_identity_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Asking) -> None:
        this.knows({"identitytoken": "an-identity"})
        async with RudeRegistry() as server:
            tokens = TokenServer(this.registry, server)
            await this.pull()
            (request,) = tokens.requests
            assert request.method == "POST"
            form = parse_qs(request.body.decode())
            assert form["refresh_token"] == ["an-identity"]
            assert form["grant_type"] == ["refresh_token"]
            assert "an-identity" not in request.path

    run(tmp_path, work, monkeypatch)


def test_a_token_that_ends_meanwhile_is_renewed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Asking) -> None:
        async with RudeRegistry() as server:
            tokens = TokenServer(this.registry, server)
            made = make_image(layer_tar({"bin/sh": b"1" * 50}), layer_tar({"b": b"2"}), layer_tar({"c": b"3"}))
            this.registry.add(made, "v1")

            def expire(request: Request) -> Reply | None:
                if request.path.endswith(made.config) and tokens.count == 1:
                    tokens.count = 2  # the registry wants another one from now on; nobody was given it
                return tokens._registry(request)

            this.registry.before = expire
            assert (await this.pull()).id == made.config
            assert len(tokens.requests) == 2

    run(tmp_path, work, monkeypatch)


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (Reply(200, b"<html>"), RegistryError, "did not answer with a token"),
        (Reply(200, b"[]"), RegistryError, "did not answer with a token"),
        (Reply(200, b'{"token": 7}'), RegistryError, "did not answer with a token"),
        (Reply(200, b'{"token": "a\\r\\nX-Evil: b"}'), RegistryError, "did not answer with a token"),
        (Reply(200, b'{"token": "' + b"x" * 300_000 + b'"}'), RegistryError, "did not answer with a token"),
        (Reply(200, b"[" * 99_999), RegistryError, "did not answer with a token"),
        (Reply(401), RegistryDenied, "wants credentials"),
        (Reply(404), RegistryUnavailable, "answered 404"),
        (Reply(500), RegistryUnavailable, "answered 500"),
        (Reply(302, headers={"Location": "http://127.0.0.1:1/"}), RegistryUnavailable, "answered 302"),
        (Reply(200, b'{"token": "of-another"}'), RegistryDenied, "wants credentials"),
    ],
)
def test_a_token_server_that_lies(
    reply: Reply, error: type[ImageError], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(this: Asking) -> None:
        async with RudeRegistry() as server:
            tokens = TokenServer(this.registry, server)
            tokens.answer = lambda request: reply
            with pytest.raises(error, match=text):
                await this.pull()
            assert len(tokens.requests) <= QUICK.tries
            tokens.answer = None
            await this.pull()

    run(tmp_path, work, monkeypatch)


def test_a_redirect_takes_no_credentials_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Asking) -> None:
        this.knows({"username": "me", "password": "secret"})
        async with RudeRegistry() as elsewhere:
            elsewhere.blobs.update(this.registry.blobs)

            def redirect(request: Request) -> Reply | None:
                if request.headers.get("authorization") != BASIC:
                    return DENIED
                if "/blobs/" in request.path:
                    return Reply(307, headers={"Location": f"http://{elsewhere.host}{request.path}?signed=1"})
                return None

            this.registry.before = redirect
            await this.pull()
            assert len(elsewhere.requests) == 2
            assert not any("authorization" in request.headers for request in elsewhere.requests)

    run(tmp_path, work, monkeypatch)


def test_who_is_redirected_to_cannot_ask_for_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Asking) -> None:
        this.knows({"username": "me", "password": "secret"})
        async with RudeRegistry() as thief:
            thief.before = lambda request: Reply(401, b'{"errors":[{"message":"me too"}]}', DENIED.headers)
            target = f"http://{thief.host}/x"
            this.registry.before = lambda request: (
                Reply(307, headers={"Location": target}) if "/blobs/" in request.path else None
            )
            with pytest.raises(RegistryDenied, match=r"where .* redirected to") as caught:
                await this.pull()
            assert "me too" not in str(caught.value)
            assert [request.headers.get("authorization") for request in thief.requests] == [None]

    run(tmp_path, work, monkeypatch)


def endpoint(url: str, **options: Any) -> Endpoint:
    return Endpoint(urlsplit(url).netloc, "team/app", f"{url}/v2/team/app", **options)


Answers = Callable[[httpx.Request], httpx.Response]


def client_to(answers: Answers, where: Endpoint, known: Credentials) -> RegistryClient:
    made = RegistryClient(where, known, patience=QUICK)
    made.http = httpx.AsyncClient(transport=httpx.MockTransport(answers), follow_redirects=False)
    made._tokens = Tokens(where, known, made.http, [])
    return made


def asked(answers: Answers, where: Endpoint, known: Credentials) -> None:
    async def inside() -> None:
        async with client_to(answers, where, known) as client:
            await client.manifest("v1")

    asyncio.run(inside())


ME = Credentials("me", "secret", "", "a file")


def test_from_tls_nothing_goes_on_without_it() -> None:
    seen: list[httpx.URL] = []

    def answers(request: httpx.Request) -> httpx.Response:
        seen.append(request.url)
        return httpx.Response(302, headers={"Location": "http://registry.test/plain"})

    with pytest.raises(RegistryError, match="from TLS to plain HTTP"):
        asked(answers, endpoint("https://registry.test"), ME)
    assert [url.scheme for url in seen] == ["https"]


def test_a_token_server_without_tls_is_not_asked() -> None:
    seen: list[httpx.URL] = []

    def answers(request: httpx.Request) -> httpx.Response:
        seen.append(request.url)
        return httpx.Response(401, headers={"WWW-Authenticate": 'Bearer realm="http://tokens.test/x"'})

    with pytest.raises(RegistryError, match="token server without TLS"):
        asked(answers, endpoint("https://registry.test"), ME)
    assert [url.host for url in seen] == ["registry.test"]


def test_without_tls_credentials_stay_here() -> None:
    seen: list[str | None] = []

    def answers(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(401, headers={"WWW-Authenticate": 'Basic realm="x"'})

    with pytest.raises(RegistryDenied, match="not sent without TLS"):
        asked(answers, endpoint("http://registry.test", plain=True), ME)
    assert seen == [None]
    with pytest.raises(RegistryDenied, match="does not accept"):
        asked(answers, endpoint("http://localhost:5000", plain=True, loopback=True), ME)
    assert seen == [None, None, BASIC]


def test_a_proxy_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "gopher://proxy.test")
    with pytest.raises(RegistryUnavailable, match="proxy that the environment names"):
        RegistryClient(endpoint("https://registry.test"))
    RegistryClient(endpoint("https://localhost:5000", loopback=True))  # this machine's own needs none


def test_a_proxy_that_makes_no_sense_keeps_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:sec#ret@proxy.test:3128")
    with pytest.raises(RegistryUnavailable, match="is no address") as caught:
        RegistryClient(Endpoint("registry.test", "a", "https://registry.test/v2/a"))
    assert "sec" not in caught.value.message
    assert caught.value.__cause__ is None


def test_a_proxy_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def inside() -> None:
        async with RudeRegistry() as proxy:
            proxy.before = lambda request: Reply(407)
            monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@{proxy.host}")
            endpoint = Endpoint("registry.test", "a", "https://registry.test/v2/a")
            async with RegistryClient(endpoint, patience=QUICK) as client:
                with pytest.raises(RegistryUnavailable, match=r"the proxy does not let us through.* 407") as caught:
                    await client.manifest("v1")
            assert "HTTPS_PROXY" in (caught.value.hint or "")
            assert {request.method for request in proxy.requests} == {"CONNECT"}

    asyncio.run(inside())


def test_who_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(this: Asking) -> None:
        challenge = {"WWW-Authenticate": 'Bearer realm="http://localhost:1/token"'}
        this.registry.before = lambda request: Reply(401, headers=challenge)
        with pytest.raises(RegistryUnavailable, match=r"localhost, where 127\.0\.0\.1:\d+ sent us, cannot be reached"):
            await this.pull()

    run(tmp_path, work, monkeypatch)


def test_challenges() -> None:
    assert parse_challenges(['Bearer realm="https://a/t?x=1,2",service=s, scope="repository:a/b:pull,push"']) == [
        Challenge("bearer", {"realm": "https://a/t?x=1,2", "service": "s", "scope": "repository:a/b:pull,push"})
    ]
    both = parse_challenges(['Negotiate, Basic realm="a \\"b\\"", Bearer realm="r"'])
    assert [each.scheme for each in both] == ["negotiate", "basic", "bearer"]
    assert both[1].parameters == {"realm": 'a "b"'}
    assert parse_challenges(["", "=,=", '"', "Basic"]) == [Challenge("basic")]
    assert parse_challenges(["Bearer " + "a=b," * 100_000])[0].scheme == "bearer"


def test_a_challenge_of_spaces_is_soon_read() -> None:
    assert parse_challenges(["Basic" + " " * 16_000 + "("] * 100) == [Challenge("basic")] * 100


def test_retry_after() -> None:
    assert retry_after("7", 0) == 7
    assert retry_after("Thu, 01 Jan 1970 00:01:40 GMT", 90) == 10
    assert retry_after("Thu, 01 Jan 1970 00:01:40 GMT", 900) == 0
    assert [retry_after(text, 0) for text in (None, "", "soon", "-1", "1e9", "9" * 400)] == [None] * 6


def test_origins_and_ranges() -> None:
    assert origin("https://A.example/x") == ("https", "a.example", 443)
    assert origin("http://[::1]:5000/x") == ("http", "::1", 5000)
    for text in ("ftp://a/", "//a/", "https:///x", "x", "https://a:99999/", "https://[x/"):
        with pytest.raises(ValueError):  # noqa: PT011
            origin(text)
    assert content_range("bytes 5-9/10") == 5
    assert content_range("bytes 5-9/*") == 5
    assert [content_range(text) for text in (None, "", "bytes */10", "lines 5-9/10", "bytes 5-9")] == [None] * 5
