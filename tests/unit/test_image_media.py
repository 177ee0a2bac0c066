"""Manifests, indexes and platforms as values. What is refused, a pull shows as well (test_image_pull.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloplet.errors import ImageInvalid, ImagePlatform, SpecError
from sloplet.images import media
from sloplet.images.media import Descriptor, Index, Manifest, Platform, choose, parse, parse_platform

pytestmark = pytest.mark.anyone

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def manifest(**changes: Any) -> bytes:
    return json.dumps({
        "schemaVersion": 2,
        "config": {"mediaType": media.OCI_CONFIG, "digest": A, "size": 1},
        "layers": [{"mediaType": f"{media.OCI_LAYER}+zstd", "digest": B, "size": 2, "annotations": {"a": "b"}}],
        **changes,
    }).encode()  # fmt: skip


def test_a_manifest_of_either_family() -> None:
    found = parse(manifest())
    assert isinstance(found, Manifest)
    assert found.media_type == media.OCI_MANIFEST
    assert found.layers[0].packing == "zstd"
    assert found.layers[0].annotations == {"a": "b"}
    assert found.digest == media.digest_of(found.raw)
    layers = [{"mediaType": f"{media.DOCKER_LAYER}.gzip", "digest": B, "size": 2}]
    config = {"mediaType": media.DOCKER_CONFIG, "digest": A, "size": 1}
    docker = parse(manifest(mediaType=media.DOCKER_MANIFEST, config=config, layers=layers))
    assert isinstance(docker, Manifest)
    assert (docker.media_type, docker.layers[0].packing) == (media.DOCKER_MANIFEST, "gzip")


def test_what_it_is_served_as_has_to_agree() -> None:
    parse(manifest(), f"{media.OCI_MANIFEST}; charset=utf-8")
    parse(manifest(mediaType=media.OCI_MANIFEST), "text/plain")  # some servers say nothing better
    with pytest.raises(ImageInvalid, match="was given as"):
        parse(manifest(mediaType=media.OCI_MANIFEST), media.OCI_INDEX)
    with pytest.raises(ImageInvalid, match="no list 'manifests'"):
        parse(manifest(), media.OCI_INDEX)
    with pytest.raises(ImageInvalid, match="index of several"):
        media.parse_manifest(b'{"schemaVersion": 2, "manifests": []}')


def test_what_we_make_we_can_read() -> None:
    layer = Descriptor(f"{media.OCI_LAYER}+gzip", B, 5, {"x": "y"})
    made = media.make_manifest(Descriptor(media.OCI_CONFIG, A, 3), (layer,), {"note": "ü"})
    again = parse(made.raw, media.OCI_MANIFEST)
    assert again == made
    assert media.make_manifest(made.config, made.layers, {"note": "ü"}).raw == made.raw


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("linux/amd64", "linux/amd64"), ("arm64", "linux/arm64"), ("linux/arm/v7", "linux/arm/v7"),
        ("Linux/x86_64", "linux/amd64"), ("aarch64", "linux/arm64"), ("windows/amd64", "windows/amd64"),
    ],
)  # fmt: skip
def test_platforms(text: str, found: str) -> None:
    assert str(parse_platform(text)) == found


@pytest.mark.parametrize("text", ["", "/", "linux/", "a/b/c/d", "linux/ämd64", "linux/amd64 "])
def test_what_is_no_platform(text: str) -> None:
    with pytest.raises(SpecError, match="no platform"):
        parse_platform(text)


def index(*names: str | None) -> Index:
    entries = tuple(
        Descriptor(media.OCI_MANIFEST, f"sha256:{number:064x}", 9, {}, Platform(*name.split("/")) if name else None)
        for number, name in enumerate(names)
    )
    return Index(media.OCI_INDEX, entries, b"")


@pytest.mark.parametrize(
    ("names", "wanted", "chosen"),
    [
        (("linux/s390x", "linux/amd64"), "linux/amd64", 1),
        (("linux/amd64/v3", "linux/amd64"), "linux/amd64", 1),
        (("linux/amd64/v3", "linux/amd64"), "linux/amd64/v3", 0),
        (("linux/arm64", "linux/arm64/v8"), "linux/arm64", 1),
        (("linux/arm/v5", "linux/arm/v6", "linux/arm/v7"), "linux/arm", 2),
        (("linux/arm/v5", "linux/arm/v6", "linux/arm/v7"), "linux/arm/v6", 1),
        (("windows/amd64", "unknown/unknown", "linux/amd64"), "linux/amd64", 2),
        ((None,), "linux/amd64", 0),
        ((None, "linux/amd64"), "linux/amd64", 1),
        (("linux/amd64", "linux/amd64"), "linux/amd64", 0),
    ],
)
def test_the_image_for_a_platform(names: tuple[str | None, ...], wanted: str, chosen: int) -> None:
    assert choose(index(*names), parse_platform(wanted)).digest == f"sha256:{chosen:064x}"


def test_no_image_for_a_platform() -> None:
    with pytest.raises(ImagePlatform, match=r"not made for linux/amd64, but for linux/arm64, windows/amd64"):
        choose(index("windows/amd64", "linux/arm64", "unknown/unknown"), parse_platform("linux/amd64"))
    with pytest.raises(ImagePlatform, match="amd64/v3"):
        choose(index("linux/amd64/v3"), parse_platform("linux/amd64"))
    with pytest.raises(ImagePlatform):
        choose(index(None, None), parse_platform("linux/amd64"))
    with pytest.raises(ImageInvalid, match="names no image"):
        choose(index(), parse_platform("linux/amd64"))


def test_a_config_that_says_nothing_is_believed() -> None:
    media.check_platform(Platform("linux", ""), Platform("linux", "amd64"))
    with pytest.raises(ImagePlatform, match=r"--platform linux/arm64"):
        media.check_platform(Platform("linux", "arm64"), Platform("linux", "amd64"))


def test_digests_of_both_kinds_are_verified() -> None:
    import hashlib

    media.verify(b"x", "sha512:" + hashlib.sha512(b"x").hexdigest(), "it")
    with pytest.raises(ImageInvalid, match="it is not what its digest says"):
        media.verify(b"y", "sha512:" + hashlib.sha512(b"x").hexdigest(), "it")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from([A, B, media.OCI_CONFIG, media.OCI_INDEX]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {"schemaVersion": st.just(2) | _JSON},
        optional=dict.fromkeys(("mediaType", "config", "layers", "manifests", "annotations"), _JSON),
    )
)
def test_any_document_is_read_or_refused(document: dict[str, Any]) -> None:
    try:
        parse(json.dumps(document).encode())
    except ImageInvalid:
        pass
