"""The CA in a sandbox's trust stores: every usual place, again and again, and a failure that says where."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
from collections.abc import Coroutine
from pathlib import Path

import pytest

from sloplet import AsyncSandbox
from sloplet.errors import StartFailed
from sloplet.network import trust
from sloplet.network.authority import Authority

pytestmark = pytest.mark.anyone

CA = Authority(b"k" * 32, "one").ca_pem
OTHER = Authority(b"k" * 32, "two").ca_pem
OLD = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"


def run(main: Coroutine[None, None, None]) -> None:
    asyncio.run(main)


def test_it_is_added_to_the_bundles_that_are_there() -> None:
    async def main() -> None:
        async with AsyncSandbox(engine="fake") as box:
            await box.files.write("/etc/ssl/cert.pem", OLD, user="root")
            await box.files.write("/etc/pki/tls/certs/ca-bundle.crt", OLD + b"\n", user="root", mode=0o640)
            for _ in range(2):
                await trust.install(box._open, CA, single_user=False)
                for path in ("/etc/ssl/cert.pem", "/etc/pki/tls/certs/ca-bundle.crt", trust.BUNDLES[0]):
                    text = await box.files.read(path, user="root")
                    assert text.startswith(OLD + b"\n")
                    assert text.count(CA.strip()) == 1
                assert not await box.files.exists("/etc/ssl/ca-bundle.pem")
            assert (await box.files.stat("/etc/pki/tls/certs/ca-bundle.crt", user="root")).mode == 0o640
            assert (await box.files.stat(trust.BUNDLES[0])).mode == 0o644
            for path in trust.env(single_user=False).values():
                assert CA.strip() in await box.files.read(path)
            assert await box.files.read(f"/etc/ssl/certs/{trust.name_hash(CA)}.0") == CA

    run(main())


def test_the_second_time_nothing_is_written() -> None:
    async def main() -> None:
        async with AsyncSandbox(engine="fake") as box:
            await trust.install(box._open, CA, single_user=False)
            before = {
                path: await box.files.stat(path)
                for path in (trust.BUNDLES[0], "/usr/local/share/ca-certificates/sloplet.crt")
            }
            await trust.install(box._open, CA, single_user=False)
            assert {path: await box.files.stat(path) for path in before} == before

    run(main())


def test_an_image_without_any_bundle_gets_one() -> None:
    async def main() -> None:
        async with AsyncSandbox(engine="fake") as box:
            await trust.install(box._open, CA, single_user=False)
            assert CA.strip() in await box.files.read(trust.BUNDLES[0])

    run(main())


def test_another_sandboxs_ca_is_replaced() -> None:
    assert OTHER.strip() not in trust.with_ca(trust.with_ca(OLD, OTHER), CA)
    assert trust.with_ca(trust.with_ca(OLD, OTHER), CA) == trust.with_ca(OLD, CA)
    assert trust.with_ca(b"", CA).count(b"BEGIN CERTIFICATE") == 1


def test_whatever_is_in_it_only_whole_blocks_go() -> None:
    """As a regular expression says it, which is quadratic where a block has no end."""
    begin, end = trust._BEGIN, trust._END
    block = re.compile(rb"\n?" + re.escape(begin) + rb".*?" + re.escape(end), re.DOTALL)
    for pieces in itertools.product((begin, end, b"\n", b"x"), repeat=6):
        bundle = b"".join(pieces)
        assert trust.without_ours(bundle) == block.sub(b"", bundle)


def test_a_hostile_bundle_takes_no_longer_than_another_of_its_size() -> None:
    """The largest that is read: with work in the square of its size this would take days."""
    bundle = trust._BEGIN * (trust._MAX_BUNDLE // len(trust._BEGIN))
    assert trust.with_ca(bundle, CA).startswith(bundle)
    assert trust.with_ca(bundle + trust._END, CA) == trust.with_ca(b"", CA)


@pytest.mark.parametrize("path", trust.BUNDLES[1:])
def test_what_is_no_file_is_no_bundle(path: str) -> None:
    async def main() -> None:
        async with AsyncSandbox(engine="fake") as box:
            await box.files.mkdir(path, user="root")
            await trust.install(box._open, CA, single_user=False)
            assert CA.strip() in await box.files.read(trust.BUNDLES[0])
            assert (await box.files.stat(path)).is_dir

    run(main())


def test_where_nobody_is_root_the_users_own_bundle_counts() -> None:
    async def main() -> None:
        async with AsyncSandbox(engine="fake") as box:
            await box.files.write("/etc/ssl/cert.pem", OLD, user="root", mode=0o644)
            await box.files.mkdir("/home/agent", user="root")
            await trust.install(box._open, CA, single_user=True)
            variables = trust.env(single_user=True)
            assert OLD in await box.files.read(variables["SSL_CERT_FILE"])
            for path in variables.values():
                assert CA.strip() in await box.files.read(path)

    run(main())


@pytest.mark.parametrize("path", [trust.BUNDLES[0], "/etc/ssl/certs/sloplet.pem"])
def test_a_place_that_cannot_be_written_is_named(path: str) -> None:
    async def main() -> None:
        async with AsyncSandbox(engine="fake") as box:
            await box.files.mkdir(path, user="root")
            with pytest.raises(StartFailed, match=path):
                await trust.install(box._open, CA, single_user=False)

    run(main())


def test_openssl_finds_it_by_its_hash(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(CA)
    command = ["openssl", "x509", "-noout", "-subject_hash", "-in", str(tmp_path / "ca.pem")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == trust.name_hash(CA)


def test_all_who_are_asked_for_are_told() -> None:
    names = (
        "SSL_CERT_FILE REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS PIP_CERT GIT_SSL_CAINFO AWS_CA_BUNDLE "
        "CARGO_HTTP_CAINFO DENO_CERT"
    )
    assert set(names.split()) <= set(trust.env(single_user=False))
