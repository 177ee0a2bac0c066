"""What an image says of how it wants to be run counts: for the library, the keeper's sandboxes and the CLI."""

from __future__ import annotations

import json
import urllib.request
import uuid
from collections.abc import Iterator

import cli_helpers
import pytest

from image_kit import busybox_image, default_home, needs_busybox
from sloplet import Sandbox
from sloplet.engines import registry
from sloplet.errors import CommandFailed, ImageNotFound, SpecError
from sloplet.images.config import Healthcheck
from sloplet.images.store import ImageStore

pytestmark = [needs_busybox]

SERVER = "mkdir -p /www && echo served > /www/index.html && touch /tmp/up && exec busybox httpd -f -p 8080 -h /www"


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    name = f"config{uuid.uuid4().hex[:8]}"
    found = busybox_image(
        default_home(), name, env=(("PATH", "/usr/bin"), ("GREETING", "from the image")), workdir="/srv/app",
        entrypoint=("sh", "-c"), cmd=(SERVER,), ports=("8080/tcp", "53/udp"), volumes=("/data/deep",),
        stop_signal="SIGUSR1", healthcheck=Healthcheck(("CMD-SHELL", "test -e /tmp/up"), interval=0.05, retries=200),
    )  # fmt: skip
    yield name
    store = ImageStore(default_home())
    try:
        store.remove(found.id)
    except ImageNotFound:
        pass
    finally:
        store.close()


def test_everything_it_says(image: str) -> None:
    several = registry.load("container").probe().capabilities.users
    with Sandbox(image=image, engine="container") as box:
        config = box.image_config()
        assert config is not None
        assert config.stop_signal == "SIGUSR1"
        assert box.workdir == "/srv/app"
        assert box.run("echo $GREETING; pwd; id -u; ls -d /data/deep").stdout.split("\n") == [
            "from the image", "/srv/app", "0" if several else "1000", "/data/deep", "",
        ]  # fmt: skip
        assert not box.health().ok
        server = box.spawn(detached=True)  # its own command
        assert box.wait_healthy(20).ok
        port = box.expose_image_ports()
        assert [each.inside for each in port] == [8080]
        with urllib.request.urlopen(port[0].url, timeout=10) as answer:
            assert answer.read() == b"served\n"
        box.stop(server.pid, grace=10)
        ended = next(info for info in box.processes() if info.pid == server.pid)
        assert ended.exit_code == 128 + 10
        box.stop(server.pid)  # again: nothing to do
        box.stop(999_999)


def test_what_resists_is_killed(image: str) -> None:
    with Sandbox(image=image, engine="container") as box:
        deaf = box.spawn("trap '' USR1; touch /tmp/deaf; while :; do sleep 0.05; done")
        assert box.run("until test -e /tmp/deaf; do sleep 0.02; done", timeout=20).ok
        box.stop(deaf.pid, grace=0.3)
        assert deaf.wait().exit_code == 128 + 9


def test_asked_for_otherwise(image: str) -> None:
    with Sandbox(image=image, engine="container", env={"GREETING": "mine"}, workdir="/tmp", user="agent") as box:
        assert box.run("echo $GREETING; pwd; id -un").stdout == "mine\n/tmp\nagent\n"


def test_never_healthy(image: str) -> None:
    with Sandbox(image=image, engine="container") as box, pytest.raises(CommandFailed, match="not healthy"):
        box.wait_healthy(0.3)


def test_an_image_that_says_nothing() -> None:
    with Sandbox(engine="container") as box:
        assert box.image_config() is None
        assert box.health().status == "none"
        assert box.expose_image_ports() == []
        with pytest.raises(SpecError, match="no command"):
            box.run()


def test_through_the_keeper_and_the_cli(image: str) -> None:
    name = f"k{uuid.uuid4().hex[:8]}"
    with Sandbox(name, image=image, engine="container") as box:
        try:
            config = box.image_config()
            assert config is not None
            assert dict(config.env)["GREETING"] == "from the image"
            assert box.run("echo $GREETING").stdout == "from the image\n"
        finally:
            box.kill()
    done = cli_helpers.sloplet(
        "run", "--image", image, "--engine", "container", "--entrypoint", "--", "echo as arguments"
    )
    assert (done.returncode, done.stdout) == (0, b"as arguments\n"), done.stderr
    done = cli_helpers.sloplet(
        "run", "--image", image, "--engine", "container", "--json", "--timeout", "0.5", "--publish-image-ports"
    )
    assert json.loads(done.stdout)["command"] == ["sh", "-c", SERVER]
    assert b"port 8080 at http://127.0.0.1:" in done.stderr
