"""References and configs of images: what is written becomes a value, or is told why not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloplet.engines.base import ResolvedImage
from sloplet.engines.fake import FakeEngine
from sloplet.errors import ImageInvalid, SpecError
from sloplet.imaged import exposed
from sloplet.images.config import MAX_CONFIG, Healthcheck, ImageConfig, parse_config
from sloplet.images.reference import Reference, parse
from sloplet.spec import SandboxSpec
from sloplet.timeline.origins import settled

pytestmark = pytest.mark.anyone

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "full", "familiar"),
    [
        ("debian", "docker.io/library/debian:latest", "debian:latest"),
        ("python:3.12-slim", "docker.io/library/python:3.12-slim", "python:3.12-slim"),
        ("sloplet/base", "docker.io/sloplet/base:latest", "sloplet/base:latest"),
        ("docker.io/debian", "docker.io/library/debian:latest", "debian:latest"),
        ("index.docker.io/library/debian", "docker.io/library/debian:latest", "debian:latest"),
        ("localhost/app", "localhost/app:latest", "localhost/app:latest"),
        ("localhost:5000/a/b:1", "localhost:5000/a/b:1", "localhost:5000/a/b:1"),
        ("[::1]:5000/app", "[::1]:5000/app:latest", "[::1]:5000/app:latest"),
        ("REGISTRY/app", "REGISTRY/app:latest", "REGISTRY/app:latest"),
        (f"debian@{DIGEST}", f"docker.io/library/debian@{DIGEST}", f"debian@{DIGEST}"),
        (f"ghcr.io/o/a:1@{DIGEST}", f"ghcr.io/o/a:1@{DIGEST}", f"ghcr.io/o/a:1@{DIGEST}"),
        ("a__b/c.d-e", "docker.io/a__b/c.d-e:latest", "a__b/c.d-e:latest"),
    ],
)
def test_references(text: str, full: str, familiar: str) -> None:
    found = parse(text)
    assert (str(found), found.familiar) == (full, familiar)
    assert parse(str(found)) == found
    assert parse(found.familiar) == found


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "@", "/", "a//b", "a/", "/a", "Debian", "a:b:c", "a: b", "a b", "a@sha256:12", f"a@md5:{'0' * 32}",
        "a:" + "t" * 129, "-a", "a-", "a..b", "a___b", "../a", "a/../b", "host:99999999/x", "http://x/y", "a\n", "a\0",
        "é", "a:é", "x" * 300, f"a@{DIGEST}x", "a.b/", "[::1/x", "localhost:5000",
        "localhost:65536/x", "[::::]:5000/x", "[1.2.3.4]/x", "localhost:\u0665\u0660/x",
    ],
)  # fmt: skip
def test_what_is_no_reference(text: str) -> None:
    if text == "localhost:5000":  # a repository with a tag: as Docker reads it
        assert parse(text) == Reference("docker.io", "library/localhost", "5000")
        return
    with pytest.raises(SpecError):
        parse(text)


@given(st.text(max_size=40))
def test_any_text_is_a_reference_or_an_error(text: str) -> None:
    try:
        found = parse(text)
    except SpecError:
        return
    assert parse(str(found)) == found


CONFIG = ImageConfig(
    env=(("PATH", "/bin"), ("A", "b=c")), user="1000:50", workdir="/srv", entrypoint=("/init",), cmd=("-x", ""),
    volumes=("/data",), ports=("80/tcp", "90/udp"), stop_signal="SIGQUIT",
    healthcheck=Healthcheck(("CMD", "true"), 5, 2, 1, 4), shell=("/bin/bash", "-c"), labels=(("k", "v"),),
    on_build=("RUN x",), architecture="amd64", created="2026-01-01T00:00:00Z", author="me", diff_ids=(DIGEST,),
    history=({"created_by": "x"},),
)  # fmt: skip


def test_a_config_goes_to_json_and_back() -> None:
    assert parse_config(CONFIG.to_json()) == CONFIG
    assert parse_config(ImageConfig().to_json()) == ImageConfig()
    assert CONFIG.to_json() == parse_config(CONFIG.to_json()).to_json()
    assert CONFIG.command == ("/init", "-x", "")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (b"", "no JSON"),
        (b"[]", "no JSON object"),
        (b"[" * 100_000, "no JSON"),
        (b'"x"', "no JSON object"),
        (b" " * (MAX_CONFIG + 1), "at most"),
        ({"config": []}, "config"),
        ({"config": {"Env": "A=b"}}, "Env"),
        ({"config": {"Env": ["A=b\0"]}}, "NUL"),
        ({"config": {"Env": ["=b"]}}, "without a name"),
        ({"config": {"Env": [1]}}, "no text"),
        ({"config": {"User": 5}}, "no text"),
        ({"config": {"Cmd": {}}}, "no list"),
        ({"config": {"WorkingDir": "/\0"}}, "NUL"),
        ({"config": {"Env": ["A=b"] * 5000}}, "more than"),
        ({"config": {"Volumes": ["/x"]}}, "no object"),
        ({"rootfs": {"diff_ids": ["x"] * 2000}}, "more than"),
        ({"rootfs": 1}, "rootfs"),
        ({"config": {"Env": ["A=\ud800"]}}, "no JSON"),
        ({"config": {"Labels": {"\udc80": "x"}}}, "no JSON"),
        (b'{"author": "\xed\xa0\x80"}', "no JSON"),
        ('{"author": "x"}'.encode("utf-16"), "no JSON"),
        (b'{"config": {"Healthcheck": {"Test": ["CMD", "x"], "Interval": Infinity}}}', "Infinity is no number"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_bad_configs(document: object, words: str) -> None:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(ImageInvalid, match=words):
        parse_config(data)


def test_what_docker_leaves_out_or_null() -> None:
    found = parse_config(b'{"config": {"Env": null, "Cmd": null, "Healthcheck": {"Test": ["NONE"]}}, "history": null}')
    assert found.healthcheck == Healthcheck(("NONE",))
    assert found.command == ()
    odd = parse_config(b'{"config": {"Healthcheck": {"Test": ["CMD", "x"], "Interval": -5, "Retries": "many"}}}')
    assert odd.healthcheck == Healthcheck(("CMD", "x"))
    for text in ("9" * 4000, "1e999"):
        long = parse_config(b'{"config": {"Healthcheck": {"Test": ["CMD", "x"], "Interval": %s}}}' % text.encode())
        assert parse_config(long.to_json()) == long


def test_ports_of_an_image() -> None:
    found = ("80/tcp", "443", "53/udp", "8000-8002/tcp", "x", "0/tcp", "70000", "1-60000", "")
    assert exposed(found) == [80, 443, 8000, 8001, 8002]


def _settled(spec: SandboxSpec, config: ImageConfig | None) -> SandboxSpec:
    return settled(spec, ResolvedImage("rootfs", config=config), FakeEngine())


def test_what_a_sandbox_runs_as() -> None:
    plain = _settled(SandboxSpec.make(), None)
    assert (plain.user, plain.workdir, plain.sudo, plain.env) == ("agent", "/workspace", False, ())
    found = _settled(SandboxSpec.make(), CONFIG)
    assert (found.user, found.workdir, found.sudo) == ("1000:50", "/srv", True)
    assert dict(found.env) == {"PATH": "/bin", "A": "b=c"}
    asked = _settled(SandboxSpec.make(user="me", workdir="/x", sudo=False, env={"A": "mine"}), CONFIG)
    assert (asked.user, asked.workdir, asked.sudo, dict(asked.env)["A"]) == ("me", "/x", False, "mine")
    bare = _settled(SandboxSpec.make(), ImageConfig(workdir="relative/../../x"))
    assert (bare.user, bare.workdir) == ("root", "/x"), "root, as everywhere, and never above the root"
    assert _settled(SandboxSpec.make(), ImageConfig(workdir="/")).workdir == "/workspace"
