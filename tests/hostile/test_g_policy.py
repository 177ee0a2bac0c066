"""A-03, A-07, A-08 and R-08 over HTTP: what of the host's a request may not have, and what is promised or refused.

The server is told to allow two folders; canaries lie beside them. Each refusal has a positive control: what the
operator did allow is there, as he allowed it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from server_kit import Served, need_container, served
from sloplet.engines import registry

pytestmark = pytest.mark.anyone

CANARY = "canary-of-the-host"
INSIDE = "of the allowed folder"


@dataclass
class Place:
    """Folders of the host's, and a server that may use some of them."""

    server: Served
    client: httpx.Client
    root: Path

    @property
    def allowed(self) -> Path:
        return self.root / "allowed"

    @property
    def writable(self) -> Path:
        return self.root / "writable"

    @property
    def secret(self) -> Path:
        return self.root / "secret"

    def create(self, **asked: Any) -> httpx.Response:
        return self.client.post("/v1/sandboxes", json={"engine": "container", **asked})

    def refused(self, **asked: Any) -> dict[str, Any]:
        """The problem document of something that is not made."""
        before = self.ids()
        answer = self.create(**asked)
        assert answer.status_code in (400, 403, 422), f"{asked}: {answer.status_code} {answer.text}"
        assert CANARY not in answer.text
        assert self.ids() == before
        found: dict[str, Any] = answer.json()
        return found

    def ids(self) -> set[str]:
        return {each["id"] for each in self.client.get("/v1/sandboxes").json()["items"]}

    def run(self, box: str, command: str) -> dict[str, Any]:
        answer = self.client.post(f"/v1/sandboxes/{box}/exec", json={"command": command})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def kill(self, box: str) -> None:
        assert self.client.delete(f"/v1/sandboxes/{box}").status_code == 204


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    need_container()
    root = tmp_path_factory.mktemp("place")
    for name in ("allowed/inside", "writable/inside", "secret", "home"):
        (root / name).mkdir(parents=True)
    for folder in (root, *root.rglob("*")):
        folder.chmod(0o755)
    (root / "secret" / "canary").write_text(CANARY)
    (root / "home").chmod(0o700)
    for name in ("allowed", "writable"):
        (root / name / "inside" / "file").write_text(INSIDE)
        for link, to in (
            ("up", ".."), ("top", "/"), ("secret", "../secret"), ("home", root / "home"), ("proc", "/proc/self/root"),
            ("sock", "/var/run/docker.sock"), ("loop", "loop"), ("fine", "inside"), ("twice", "secret"),
        ):  # fmt: skip
            (root / name / link).symlink_to(to)
    (root / "writable" / "inside").chmod(0o777)
    with served(root / "home", "--allow-path", f"{root}/allowed", "--allow-path", f"{root}/writable:rw") as server:
        with server.client(server.new_key("tenant")) as client:
            yield Place(server, client, root)


# -- A-03 ----------------------------------------------------------------------------------------------------------

#: ``{root}``: the folder that the others are in.
PATHS = (
    "/", "/etc", "/root", "/home", "/var", "/var/run", "/run", "/var/run/docker.sock", "/proc", "/proc/1/root",
    "/proc/self/root", "/proc/self/cwd", "/proc/self/fd", "/sys", "/sys/fs/cgroup", "/dev", "/tmp", "/usr", "/boot",
    "/../etc", "//etc", "/etc/../etc", "/var/lib/docker", "{root}", "{root}/secret", "{root}/home",
    "{root}/home/tenants", "{root}/home/server", "{root}/allowed/..", "{root}/allowed/../secret",
    "{root}/allowed/up", "{root}/allowed/top", "{root}/allowed/top/etc", "{root}/allowed/secret",
    "{root}/allowed/twice", "{root}/allowed/home", "{root}/allowed/proc", "{root}/allowed/sock",
    "{root}/allowed/loop", "{root}/allowed/inside/../../secret", "{root}/allowedother", "{root}/allow",
    "{root}/writable/secret", "{root}/writable/up/secret", "{root}/secret/../allowed/secret",
)  # fmt: skip
#: What is no path of a server's at all.
ODD = ("~", "~/", ".", "..", "./x", "../x", "file:///etc", "\\etc", "/etc\0x", "", " /etc", "$HOME", "C:\\")


@pytest.mark.parametrize("mode", ["ro", "rw", "copy"])
def test_a03_folders_of_the_host(place: Place, mode: str) -> None:
    for path in PATHS:
        source = path.format(root=place.root)
        place.refused(volumes={"/data": {"source": source, "mode": mode}})
    for source in ODD:
        place.refused(volumes={"/data": {"source": source, "mode": mode}})


def test_a03_folders_as_images(place: Place) -> None:
    for path in (*PATHS, "/etc/passwd", "{root}/secret/canary", "{root}/writable/inside"):
        source = path.format(root=place.root)
        for image in (source, f"dir:{source}"):
            place.refused(image=image)
    for image in ("~", ".", "..", "./x", "../x.tar", "/x.tar", "x.tar", "dir:x"):
        place.refused(image=image)
    for image in ("oci:/etc", "file:///etc/passwd", "docker-archive:/etc/passwd"):  # names of images, and of none
        assert place.create(image=image).status_code in (404, 422), image


def _nowhere(text: str, path: str) -> str:
    return text.replace(path, "PATH").replace("<host>", "PATH")  # some folders are never told, there or not


def test_a03_nothing_is_told_of_what_there_is(place: Place) -> None:
    """The same words of a path that is there and of one that is not, and wherever a link leads."""
    said = set()
    for path in ("/root", "/nothing", "/etc/shadow", "/etc/nothing", f"{place.allowed}/top", f"{place.secret}/canary"):
        problem = place.refused(volumes={"/data": path})
        said.add((problem["status"], problem["error"], _nowhere(problem["detail"], path), problem["hint"]))
    assert len(said) == 1


def test_a03_a_writable_volume_of_what_is_for_reading(place: Place) -> None:
    problem = place.refused(volumes={"/data": {"source": str(place.allowed / "inside"), "mode": "rw"}})
    assert "read only" in problem["detail"]


def test_a03_positive_control(place: Place) -> None:
    """What was allowed is there: to be read, to be written, as a copy, and by a link that stays inside."""
    answer = place.create(
        volumes={
            "/ro": {"source": str(place.allowed / "inside"), "mode": "ro"},
            "/rw": {"source": str(place.writable / "inside"), "mode": "rw"},
            "/copy": {"source": str(place.allowed / "fine"), "mode": "copy"},
        }
    )
    assert answer.status_code == 201, answer.text
    box = answer.json()["id"]
    assert place.run(box, "cat /ro/file /copy/file")["stdout"] == INSIDE * 2
    assert place.run(box, "echo x > /ro/file")["exit_code"] != 0
    assert place.run(box, "echo new > /rw/new && echo x > /copy/file")["exit_code"] == 0
    assert (place.writable / "inside" / "new").read_text() == "new\n"
    assert (place.allowed / "inside" / "file").read_text() == INSIDE
    place.kill(box)


def test_a03_a_link_that_a_sandbox_made(place: Place) -> None:
    """Who can write in an allowed folder cannot make more of it allowed."""
    box = place.create(volumes={"/rw": {"source": str(place.writable / "inside"), "mode": "rw"}}).json()["id"]
    assert place.run(box, f"ln -s {place.secret} /rw/evil && ln -s / /rw/all")["exit_code"] == 0
    assert (place.writable / "inside" / "evil" / "canary").read_text() == CANARY  # it leads there, on the host
    for name in ("evil", "all", "all/etc", f"all{place.secret}"):
        place.refused(volumes={"/data": str(place.writable / "inside" / name)})
    assert CANARY not in place.run(box, "cat /rw/evil/canary 2>&1")["stdout"]
    place.kill(box)


def test_a03_a_link_that_is_swapped_while_it_is_opened(place: Place) -> None:
    """A folder that turns into a link and back as fast as can be: what is mounted is what was checked."""
    flip, kept, link = (place.writable / name for name in ("flip", "flip.folder", "flip.link"))
    flip.mkdir(mode=0o755)
    (flip / "canary").write_text(INSIDE)
    link.symlink_to(place.secret)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(flip, kept)
            os.rename(link, flip)
            os.rename(flip, link)
            os.rename(kept, flip)

    swapping = threading.Thread(target=swap)
    swapping.start()
    seen: list[str] = []
    try:
        for _ in range(200):
            answer = place.create(volumes={"/data": {"source": str(flip), "mode": "ro"}})
            if answer.status_code == 201:
                seen.append(place.run(answer.json()["id"], "cat /data/canary")["stdout"])
                place.kill(answer.json()["id"])
            else:
                # StartFailed: it was what was allowed when it was opened, and was gone when it was to be mounted.
                gone = answer.status_code == 503 and answer.json()["error"] == "StartFailed"
                assert gone or answer.status_code in (403, 404, 409, 422), answer.text
                seen.append("refused")
            if min(seen.count("refused"), seen.count(INSIDE)) >= 8:
                break
    finally:
        stop.set()
        swapping.join()
    assert set(seen) <= {INSIDE, "refused", ""}, seen
    assert {INSIDE, "refused"} <= set(seen), "it was never swapped at the right time"
    assert place.create(volumes={"/data": {"source": str(flip), "mode": "ro"}}).status_code == 201  # as it is now


def test_a03_a_link_that_is_swapped_before_a_template_is_used(place: Place) -> None:
    folder = place.allowed / "later"
    folder.mkdir(mode=0o755)
    (folder / "canary").write_text(INSIDE)
    made = place.create(name="later", volumes={"/data": {"source": str(folder), "mode": "ro"}})
    assert made.status_code == 201, made.text
    answer = place.client.post("/v1/templates", json={"sandbox": "later", "name": "later"})
    assert answer.status_code == 201, answer.text
    fine = place.create(template="later")
    assert fine.status_code == 201, fine.text
    assert place.run(fine.json()["id"], "cat /data/canary")["stdout"] == INSIDE
    folder.rename(place.allowed / "later.before")
    folder.symlink_to(place.secret)
    again = place.create(template="later")
    if again.status_code == 201:
        assert CANARY not in place.run(again.json()["id"], "cat /data/canary 2>&1")["stdout"]
    for ref in ("later", fine.json()["id"]):  # those that run have what they had
        assert place.run(ref, "cat /data/canary")["stdout"] == INSIDE
        place.kill(ref)


HOST = (
    {"network": "host"}, {"network": {"mode": "host"}}, {"privileged": True}, {"netns": "/proc/1/ns/net"},
    {"cap_add": ["SYS_ADMIN"]}, {"devices": ["/dev/mem"]}, {"pid": "host"}, {"runtime": "runc"}, {"home": "/"},
    {"ports": {"80": 22}}, {"ports": {"80": 8080}}, {"cloud_init": "/etc/passwd"}, {"cloud_init": "file:///etc/passwd"},
    {"network": {"allow": ["127.0.0.1:22"]}}, {"network": {"allow": ["169.254.169.254"]}},
    {"network": {"allow": ["host.sloplet"]}}, {"network": {"allow": ["10.0.0.0/8"]}},
    {"network": {"allow": ["[::1]:22"]}}, {"network": {"allow": ["[::ffff:127.0.0.1]:22"]}},
    {"network": {"allow": ["100.100.100.200"]}}, {"links": {"db": "127.0.0.1:22"}, "network": {"allow": ["x.test"]}},
    {"secrets": {"A": {"hosts": ["x.test"], "file": "/etc/shadow"}}, "network": {"allow": ["x.test"]}},
    {"secrets": {"A": {"hosts": ["x.test"], "env": "HOME"}}, "network": {"allow": ["x.test"]}},
    {"workdir": "/proc/self/fd/7"}, {"workdir": "../.."}, {"user": "root\nx"},
)  # fmt: skip


@pytest.mark.parametrize("asked", HOST, ids=str)
def test_a03_what_else_is_the_hosts(place: Place, asked: dict[str, Any]) -> None:
    if asked == {"workdir": "/proc/self/fd/7"}:  # a path inside: it starts in no folder of the host's, if it starts
        answer = place.create(**asked)
        if answer.status_code == 201:
            found = place.client.post(f"/v1/sandboxes/{answer.json()['id']}/exec", json={"command": "pwd -P; ls"}).text
            assert str(place.root) not in found
            place.kill(answer.json()["id"])
        return
    place.refused(**asked)


# -- A-07 ----------------------------------------------------------------------------------------------------------


def test_a07_a_name_is_not_reused_with_other_settings(place: Place) -> None:
    """What is there is answered only to who asks for just that; it is never changed, and never taken for more."""
    spec: dict[str, Any] = {
        "name": "posture", "env": {"A": "b"}, "network": {"allow": ["one.test"]},
        "secrets": {"KEY": {"hosts": ["one.test"]}},
        "volumes": {"/ro": {"source": str(place.allowed / "inside"), "mode": "ro"}},
    }  # fmt: skip
    first = place.create(**spec)
    assert first.status_code == 201, first.text
    same = place.create(**spec, reuse=True)
    assert (same.status_code, same.json()["id"]) == (201, first.json()["id"])
    assert place.create(**spec).status_code == 409
    others: tuple[dict[str, Any], ...] = (
        {"network": {"allow": ["one.test", "two.test"]}}, {"network": "none", "secrets": {}},
        {"network": {"learn": True}},
        {"network": {"allow": ["one.test"], "deny": ["one.test"]}}, {"env": {"A": "c"}}, {"env": {}}, {"volumes": {}},
        {"volumes": {"/ro": {"source": str(place.writable / "inside"), "mode": "rw"}}}, {"user": "root"},
        {"secrets": {}}, {"secrets": {"KEY": {"hosts": ["two.test"]}}}, {"sudo": True}, {"workdir": "/tmp"},
        {"pids": 99}, {"memory": "64m"}, {"ttl": 60}, {"at_least": "process"}, {"undo": 3},
    )  # fmt: skip
    for other in others:
        answer = place.create(**{**spec, **other}, reuse=True)
        assert answer.status_code == 409, f"{other}: {answer.text}"
        assert answer.json()["error"] == "SandboxMismatch"
    now = place.client.get("/v1/sandboxes/posture").json()
    assert now["spec"] == first.json()["spec"]
    assert place.client.get("/v1/sandboxes/posture/network").json()["allow"] == ["one.test"]
    place.kill("posture")


def test_a07_going_back_does_not_bring_back_a_wider_policy(place: Place) -> None:
    box = place.create(network={"allow": ["one.test", "two.test"]}).json()["id"]
    at = f"/v1/sandboxes/{box}"
    snapshot = place.client.post(f"{at}/snapshots", json={}).json()["id"]
    assert place.client.put(f"{at}/network", json={"allow": ["one.test"]}).status_code == 200
    assert place.client.post(f"{at}/rollback", json={"snapshot": snapshot}).status_code == 200
    assert place.client.get(f"{at}/network").json()["allow"] == ["one.test"]
    fork = place.client.post(f"{at}/fork", json={"count": 1, "snapshot": snapshot})
    assert fork.status_code == 201, fork.text
    child = fork.json()["items"][0]["id"]
    assert place.client.get(f"/v1/sandboxes/{child}/network").json()["allow"] == ["one.test"]
    for each in (child, box):
        place.kill(each)


# -- A-08 and R-08 -------------------------------------------------------------------------------------------------


def test_a08_a_control_that_cannot_be_had_is_named(place: Place) -> None:
    for asked, words in (
        ({"engine": "fake", "network": {"allow": ["x.test"]}}, ("network", "fake")),
        ({"engine": "process", "sudo": True}, ("sudo", "process")),
        ({"engine": "nonsense"}, ("nonsense",)),
        ({"engine": "container", "at_least": "microvm"}, ("microvm",)),
    ):
        problem = place.refused(**asked)
        assert problem["status"] == 422, problem
        assert all(word in f"{problem['detail']} {problem['hint']}" for word in words), problem


def test_a08_what_is_reported_is_what_is_enforced(place: Place) -> None:
    """A limit that this machine cannot enforce is refused when named; with allow_weaker it is told as not enforced."""
    controls = registry.load("container").probe().capabilities.controls
    limits: dict[str, Any] = {"memory": "64m", "pids": 64, "disk": "64m", "cpus": 0.5, "open_files": 64}
    for name, value in limits.items():
        answer = place.create(**{name: value})
        if name in controls:
            assert answer.status_code == 201, answer.text
            box = answer.json()["id"]
            told = {
                each["control"]: each for each in place.client.get(f"/v1/sandboxes/{box}/guarantees").json()["items"]
            }
            assert told[name]["enforced"], told[name]
            place.kill(box)
            continue
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"] == "ControlUnavailable"
        assert name in answer.json()["detail"]
        weaker = place.create(**{name: value}, allow_weaker=True)
        assert weaker.status_code == 201, weaker.text
        box = weaker.json()["id"]
        told = {each["control"]: each for each in place.client.get(f"/v1/sandboxes/{box}/guarantees").json()["items"]}
        assert not told[name]["enforced"]
        place.kill(box)


NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 10**18, 10**30, True, False, "0", "-1", "1", "1e999", "NaN", "inf", "-5m", "1 000", "0x10", "١",
    "5mm", "", " ", [], {}, "9" * 50, 1e308, 0.5, "1.5.5", "m",
)  # fmt: skip


@pytest.mark.parametrize("name", ["memory", "disk", "pids", "cpus", "open_files", "ttl", "idle", "undo", "pool"])
def test_r08_limits_that_make_no_sense(place: Place, name: str) -> None:
    fits: dict[str, Callable[[Any], bool]] = {  # of the list above: what is a limit after all
        "cpus": lambda value: value in (1, 0.5) and not isinstance(value, bool),
        "ttl": lambda value: value in (1, 0.5, "1") and not isinstance(value, bool),
        "idle": lambda value: value in (1, 0.5, "1") and not isinstance(value, bool),
        "undo": lambda value: value in (0, 1) and not isinstance(value, bool),
        "pool": lambda value: value in (0, 1) and not isinstance(value, bool),
    }
    for value in NUMBERS:
        if fits.get(name, lambda _: False)(value):
            continue
        problem = place.refused(**{name: value})
        assert problem["error"] in ("RequestInvalid", "InvalidLimit", "SpecError", "ControlUnavailable"), problem
    for text in (f'{{"{name}": NaN}}', f'{{"{name}": Infinity}}', f'{{"{name}": -Infinity}}', f'{{"{name}": 1e999}}'):
        answer = place.client.post("/v1/sandboxes", content=text.encode(), headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422), f"{text}: {answer.text}"


def test_r08_time_limits_and_output(place: Place) -> None:
    box = place.create().json()["id"]
    at = f"/v1/sandboxes/{box}/exec"
    for asked in ({"timeout": 0}, {"timeout": -1}, {"timeout": "1e999"}, {"max_output": 0}, {"max_output": 10**12}):
        answer = place.client.post(at, json={"command": "true", **asked})
        assert answer.status_code == 422, f"{asked}: {answer.text}"
    assert place.client.post(at, json={"command": "true", "timeout": 5, "max_output": 10}).status_code == 200
    place.kill(box)
