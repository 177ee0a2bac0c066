"""Every hostile test runs on every engine of this machine; nothing may be left over after any of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_kit import Target, make_rootfs, runtime, targets
from live_kit import gvisor_in_use
from net_kit import Rung, connected, furnish, rungs, set_network

from netkit import Internet
from sloplet import Network, Sandbox


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        found = targets()
        metafunc.parametrize("target", found, ids=[target.label for target in found])
    if "rung" in metafunc.fixturenames:
        chosen = rungs(each_mapping=getattr(metafunc.module, "EACH_MAPPING", False))
        metafunc.parametrize("rung", chosen, ids=[rung.label for rung in chosen], scope="module")


@pytest.fixture
def box(target: Target) -> Iterator[Sandbox]:
    """A sandbox as users get it."""
    with target.box() as made:
        yield made


@pytest.fixture
def neighbour(target: Target) -> Iterator[Sandbox]:
    """A second sandbox, which must feel nothing."""
    with target.box() as made:
        made.files.write("mine", "untouched")
        yield made
        assert made.run("cat mine").stdout == "untouched", "the neighbour was harmed"


@pytest.fixture(scope="module")
def gvisor() -> Iterator[None]:
    """The gvisor engine is here, for this file's tests alone."""
    with gvisor_in_use():
        yield


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    before = runtime().held
    yield
    assert runtime().held <= before, "a test left a sandbox running"  # less: one that another file shared is gone


@pytest.fixture(scope="session")
def busybox() -> Path:
    """One program that is a whole system; the kind that needs the host's libraries would not run in an image."""
    found = shutil.which("busybox")
    if found is None or b"ld-linux" in Path(found).read_bytes()[:4096]:
        pytest.skip("no static busybox here (apt-get install busybox-static)")
    return Path(found)


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory, busybox: Path) -> Path:
    """A small root file system of one static busybox."""
    folder = tmp_path_factory.mktemp("rootfs")
    make_rootfs(folder, busybox)
    return folder


# -- the network: tests that ask for ``rung`` run on each one that has a way out ---------------------------------


@pytest.fixture(scope="session")
def one_internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


@pytest.fixture(scope="module")
def whole_internet(one_internet: Internet) -> Iterator[Internet]:
    """What sandboxes of this file reach; those of other files reach what they reach."""
    with connected(one_internet):
        yield one_internet


@pytest.fixture
def net(whole_internet: Internet) -> Internet:
    """The fake internet, which has seen nothing yet."""
    furnish(whole_internet)
    return whole_internet


@pytest.fixture(scope="module")
def shared_box(rung: Rung, whole_internet: Internet) -> Iterator[Sandbox]:
    with rung.box() as made:
        yield made


@pytest.fixture
def shared(shared_box: Sandbox, net: Internet) -> Sandbox:
    """A sandbox that the file's tests of one rung share; each sets the policy that it needs."""
    set_network(shared_box, Network())
    net.forget()
    return shared_box
