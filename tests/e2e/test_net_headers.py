"""Headers that a sandbox's requests get on their way, with real clients and servers: nothing of them is inside."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from netkit import Internet
from sloplet import Network, Sandbox
from sloplet.engines import registry
from sloplet.errors import SpecError
from sloplet.portal import portal
from sloplet.runtime import embedded_runtime

WEB, OTHER = "web.headers.example", "other.headers.example"
CA = "/workspace/servers-ca.pem"
VALUE = "v4lue-that-is-nowhere-inside"


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with Internet() as net:
        net.name(WEB)
        net.name(OTHER)
        with net.serves(portal().call(embedded_runtime())):
            yield net


@pytest.fixture(scope="module", params=["container", pytest.param("gvisor", marks=pytest.mark.anyone)])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    if shutil.which("curl", path="/usr/bin:/bin") is None:
        pytest.skip("capability: no curl on this machine for the sandbox to run")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gvisor" and "SLOPLET_TEST_RUNSC" in os.environ:
            patch.setenv("SLOPLET_RUNSC", os.environ["SLOPLET_TEST_RUNSC"])
        probe = registry.load(request.param).probe()
        if not probe.available or not probe.capabilities.egress:
            pytest.skip(f"capability: {request.param} has no egress here: {probe.reason}")
        yield request.param


def headers(box: Sandbox, url: str, *options: str) -> dict[str, str]:
    """What a server sees of a request of curl's."""
    result = box.run(["curl", "-sS", "-m", "20", *options, f"{url}/echo"], timeout=60)
    assert result.ok, f"{result.stderr} {result.denied}"
    return {name.lower(): value for name, value in json.loads(result.stdout)["headers"]}


def network(**more: object) -> Network:
    return Network(allow=["*:*"], inspect="on-demand", **more)  # type: ignore[arg-type]


def test_they_come_and_go_while_it_runs(engine: str, internet: Internet) -> None:
    with Sandbox(engine=engine, network=network(), allow_weaker=True) as box:
        box.files.write(CA, internet.ca_file.read_bytes())
        told = ("--cacert", CA)
        assert "x-token" not in headers(box, f"https://{WEB}", *told), "its TLS is not opened"
        changed = box.network.set(network(headers={WEB: {"X-Token": VALUE}}))
        assert changed.headers == ((WEB, ("X-Token",)),)
        for scheme in ("https", "http"):
            seen = headers(box, f"{scheme}://{WEB}", "-H", "x-token: mine")
            assert seen["x-token"] == VALUE
        assert "x-token" not in headers(box, f"https://{OTHER}", *told), "its TLS is not opened now either"
        assert "x-token" not in headers(box, f"http://{OTHER}")
        box.network.allow("more.example")
        assert headers(box, f"https://{WEB}")["x-token"] == VALUE, "another change leaves them"
        box.network.set_secret(f"x-token@{WEB}", "another")
        assert headers(box, f"https://{WEB}")["x-token"] == "another"
        box.network.set_secret(f"x-token@{WEB}", None)
        refused = box.run(["curl", "-sS", "-f", f"https://{WEB}/echo"], timeout=60)
        assert not refused.ok
        assert any("X-Token" in reason for reason in refused.denied)
        box.network.set(network())
        assert "x-token" not in headers(box, f"https://{WEB}", *told)
        assert not box.run(f"grep -r {VALUE} /etc /workspace /tmp /proc/self/environ", timeout=60).ok
        assert VALUE not in str(box.network.log())
        assert any(one.control == "inspection" and "needs" in str(one.value) for one in box.guarantees())


def test_from_the_start_and_in_copies(engine: str, internet: Internet) -> None:
    internet.forget()
    asked = network(headers={"*.headers.example": {"Authorization": f"Bearer {VALUE}"}})
    with Sandbox(engine=engine, network=asked, allow_weaker=True) as box:
        assert not internet.heard(VALUE)
        assert box.run(["curl", "-sS", f"https://{WEB}/"], timeout=60).stdout == f"hello from {WEB}\n"
        assert internet.heard(VALUE), "it was sent, and not sent back"
        saved = box.snapshot()
        home = Path(os.environ["SLOPLET_HOME"])
        files = [path for path in home.rglob("*") if path.is_file() and path.stat().st_size < 2**26]
        # images of other tests have files that only their own users may read
        kept = b"".join(path.read_bytes() for path in files if "images" not in path.relative_to(home).parts)
        assert b"*.headers.example" in kept, "the positive control"
        assert VALUE.encode() not in kept
        for child in box.fork(1, snapshot=saved):
            with child:
                assert headers(child, f"https://{OTHER}")["authorization"] == f"Bearer {VALUE}"


def test_one_that_was_not_made_for_it_is_told(engine: str, internet: Internet) -> None:
    with Sandbox(engine=engine, network=Network(allow=["*"]), allow_weaker=True) as box:
        with pytest.raises(SpecError, match="not made for that") as caught:
            box.network.set(Network(allow=["*"], headers={WEB: {"X-Token": VALUE}}))
        assert VALUE not in str(caught.value)
        assert box.network.policy().headers == ()
