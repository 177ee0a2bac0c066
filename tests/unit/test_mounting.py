"""Volumes in plans: who is who, in which order they are mounted, and what the launcher is handed."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import pytest

from sloplet.engines import insiders, jail, mounting, shell
from sloplet.engines.base import Mount, ResolvedImage
from sloplet.engines.controls import decide, decide_for_own_kernel
from sloplet.engines.machine import FIRST_RANGE, RANGE_SIZE, RANGES, Machine
from sloplet.engines.plan import MAX_SLOTS, Attr, Do, PlanFlag, Set, Step, encode_steps
from sloplet.errors import UnsupportedOperation
from sloplet.images import host
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

ROOT = Machine(uid=0, gid=0, root=True, drops=True, kernel=(6, 1))
RANGE = Machine(
    uid=1001, gid=1001, user="u", subuid=(100000, 65536), subgid=(200000, 65536), newuidmap="/a", newgidmap="/b"
)
DATA = Mount("/data", 40, False, (0, 0), "the volume cache", private=True)
REPO = Mount("/src", 41, False, (1234, 1235), "/home/x/repo")
SHOWN = Mount("/src/shown", 42, True, (0, 0), "/srv/shown")


def mapped(text: str, number: int) -> int | None:
    """Where an id map leads."""
    for line in text.splitlines():
        first, to, count = map(int, line.split())
        if first <= number < first + count:
            return to + number - first
    return None


def valid(text: str) -> bool:
    """As the kernel wants it: nothing is mapped twice, on either side."""
    lines = [tuple(map(int, line.split())) for line in text.splitlines()]
    for side in (0, 1):
        spans = sorted((line[side], line[side] + line[2]) for line in lines)
        if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
            return False
    return all(line[2] > 0 for line in lines) and 0 < len(lines) <= 340


#: Whom a folder belongs to that root inside made in one of the host's.
STRANGER = FIRST_RANGE + RANGES * RANGE_SIZE


@pytest.mark.parametrize(
    "owner", [0, 1, 33, 999, 1000, 1001, 65534, 65535, 70000, 2**31, STRANGER, STRANGER + 33, STRANGER + 65535]
)
@pytest.mark.parametrize("user", [0, 1, 33, 1000, 65535])
@pytest.mark.parametrize("private", [True, False])
def test_the_owner_outside_is_the_user_inside(owner: int, user: int, private: bool) -> None:
    first = FIRST_RANGE + 7 * RANGE_SIZE
    text = mounting.mount_map(owner, user, first, private=private)
    assert valid(text)
    assert mapped(text, owner) == first + user
    if not private and owner != 0:
        assert mapped(text, 0) is None, "root outside is nobody inside: nothing can be made root's"
    if private and owner < RANGE_SIZE:
        assert mapped(text, user) == first + owner
        assert all(mapped(text, number) == first + number for number in (2, 500, 40000) if number not in (owner, user))


def test_whoever_else_writes_a_folder_of_the_host_is_nobody_there() -> None:
    text = mounting.mount_map(1234, 1000, FIRST_RANGE, private=False)
    onto = {}
    for line in text.splitlines():
        disk, inside, count = map(int, line.split())
        onto[inside] = (disk, count)
    assert onto[FIRST_RANGE][0] >= FIRST_RANGE, "root inside does not write as root"
    assert sum(count for _, count in onto.values()) == RANGE_SIZE, "everybody inside can write"


@pytest.mark.parametrize("user", [0, 1, 2, 1000, 65535])
def test_without_root_the_caller_is_the_user(user: int) -> None:
    text = mounting.callers_map(1001, 100000, 65535, user)
    assert valid(text)
    assert mapped(text, user) == 1001
    assert mapped(text, 0) == (1001 if user == 0 else 100000 + user - 1)
    assert {mapped(text, number) for number in range(0, 65536)} == {1001, *range(100000, 165535)}


def test_ids_that_cannot_be() -> None:
    with pytest.raises(UnsupportedOperation):
        mounting.callers_map(1001, 100000, 500, 1000)
    with pytest.raises(UnsupportedOperation):
        mounting.mount_map(0, 70000, FIRST_RANGE, private=True)


def request(*volumes: Mount, held: tuple[int, ...] = (50,), user: tuple[int, int] = (1000, 1000)) -> jail.JailRequest:
    return jail.JailRequest("id", SandboxSpec(), ResolvedImage("host"), "/", 1, volumes=volumes, held=held, user=user)


def plan(machine: Machine, *volumes: Mount, user: tuple[int, int] = (1000, 1000)) -> tuple[Step, ...]:
    made = request(*volumes, user=user)
    return jail.container_plan(made, machine, host.look(), decide(made.spec, machine, "id", namespaces=True))


def test_a_plan_without_volumes_has_nothing_of_them() -> None:
    made = plan(ROOT)
    assert not {step.kind for step in made} & {Do.VOLUME, Do.PLACE}
    steps = jail.container_plan(
        jail.JailRequest("id", SandboxSpec(), ResolvedImage("host"), "/", 1), RANGE, host.look(),
        decide(SandboxSpec(), RANGE, "id", namespaces=True),
    )  # fmt: skip
    assert Set.GIVEN not in {step.kind for step in steps}
    assert ("0 1001 1\n1 100000 65535\n",) in [step.args for step in steps if step.kind is Set.UID_MAP]


def test_a_plan_with_volumes() -> None:
    made = plan(ROOT, DATA, REPO, SHOWN)
    kinds = [step.kind for step in made]
    assert [step.args for step in made if step.kind is Set.GIVEN] == [(4,)]
    volumes = [step.args for step in made if step.kind is Do.VOLUME]
    assert [args[3] for args in volumes] == [0, 1, 2]
    quiet = Attr.NOSUID | Attr.NODEV
    assert [args[2] for args in volumes] == [quiet, quiet, quiet | Attr.RDONLY]
    assert all(args[5] and args[6] for args in volumes), "as root each has a map of its own"
    placed = [step.args for step in made if step.kind is Do.PLACE]
    assert [path for _, path in placed] == ["data", "src", "src/shown"], "outer ones first"
    assert [slot for slot, _ in placed] == [args[0] for args in volumes]
    last = max(index for index, kind in enumerate(kinds) if kind in (Do.FILE, Do.MKDIR, Do.OVERLAY, Do.MOUNT))
    assert kinds.index(Do.PLACE) > last, "nothing of ours is written into a volume"
    assert kinds.index(Do.PIVOT) > kinds.index(Do.PLACE)
    taken = [step.args[0] for step in made if step.kind in (Do.TREE, Do.VOLUME, Do.EXT4, Do.TMPFS)]
    assert len(set(taken)) == len(taken)
    assert max(taken) < MAX_SLOTS  # type: ignore[type-var]
    encode_steps(made)


def test_without_root_the_map_is_the_sandboxs() -> None:
    made = plan(RANGE, DATA, user=(1000, 1000))
    (uids,) = [step.args[0] for step in made if step.kind is Set.UID_MAP]
    (gids,) = [step.args[0] for step in made if step.kind is Set.GID_MAP]
    assert mapped(str(uids), 1000) == 1001
    assert mapped(str(gids), 0) == 200999
    assert [step.args[5:] for step in made if step.kind is Do.VOLUME] == [("", "")]


@pytest.mark.parametrize(("volumes", "kept"), [((DATA,), False), ((REPO,), True), ((SHOWN,), False), ((), False)])
def test_setuid_is_kept_from_folders_of_the_host(volumes: tuple[Mount, ...], kept: bool) -> None:
    (flags,) = [step.args[0] for step in plan(ROOT, *volumes) if step.kind is Set.FLAGS]
    assert bool(int(flags) & PlanFlag.NO_SETID) == kept
    assert bool(int(flags) & PlanFlag.NO_LEASES) == bool({REPO, SHOWN} & set(volumes))
    assert ("nosetid" in mounting.guest_words(volumes)) == kept


def test_in_gvisor_they_lie_beside_the_image() -> None:
    made = request(DATA, REPO, SHOWN)
    steps = shell.last_steps(made, decide_for_own_kernel(made.spec, ROOT, "id"))
    kinds = [step.kind for step in steps]
    points = [step.args[1] for step in steps[: kinds.index(Do.WRAP)] if step.kind is Do.MKDIR]
    assert points == ["data", "src"], "runsc finds no folder to mount on in a read-only image"
    mounts = [step.args[1] for step in steps if step.kind is Do.MOUNT and str(step.args[1]).startswith("volumes/")]
    assert mounts == ["volumes/0", "volumes/1", "volumes/2"]
    config = next(step.args[2] for step in steps if step.kind is Do.FILE and str(step.args[1]).endswith("config.json"))
    assert b'"destination":"/src/shown","type":"bind","source":"/volumes/2","options":["bind","ro"' in bytes(config)  # type: ignore[arg-type]


def test_guarantees_tell_of_each() -> None:
    told = mounting.guarantees([DATA, REPO, SHOWN], shared_kernel=True)
    assert [("sockets" in each.how) for each in told] == [False, True, True], "who else reaches a named one"
    assert not any("sockets" in each.how for each in mounting.guarantees([DATA, REPO, SHOWN], shared_kernel=False))
    assert [(one.control, one.value, one.enforced) for one in told] == [
        ("volume", "/data", True), ("volume", "/src", True), ("volume", "/src/shown", True)
    ]  # fmt: skip
    assert "read-only" in told[2].how
    assert "setuid" in told[1].how


PASSWD = b"root:x:0:0::/root:/bin/sh\nwww:x:33:34::/:/bin/sh\nbroken\nodd:x:a:b::/:\nwww:x:99:99::/:/bin/sh\n"
GROUP = b"root:x:0:\nstaff:x:50:www\n"


@pytest.mark.parametrize(
    ("user", "ids"),
    [
        ("root", (0, 0)), ("www", (33, 34)), ("33", (33, 34)), ("7", (7, 0)), ("7:8", (7, 8)), ("www:staff", (33, 50)),
        ("www:50", (33, 50)), ("agent", (1000, 1000)), ("1000:1000", (1000, 1000)), ("nobody-knows", (0, 0)),
    ],
)  # fmt: skip
def test_who_the_user_is_inside(user: str, ids: tuple[int, int]) -> None:
    assert insiders.find(user, PASSWD, GROUP) == ids


def test_the_agent_gets_the_first_free_id() -> None:
    taken = PASSWD + b"me:x:1000:1000::/:/bin/sh\nyou:x:1001:1::/:/bin/sh\n"
    assert insiders.find("agent", taken, GROUP) == (1002, 1002)
    assert insiders.find("agent", b"agent:x:500:501::/:/bin/sh\n", GROUP) == (500, 501)
    assert insiders.ids_of("agent", ResolvedImage("host")) == (1000, 1000)


def test_an_images_files_are_read_inside_of_it(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").symlink_to("/etc/real")
    (tmp_path / "etc/real").write_bytes(b"www:x:77:78::/:/bin/sh\n")
    assert insiders.ids_of("www", ResolvedImage("rootfs", tmp_path)) == (77, 78)
    (tmp_path / "etc/passwd").unlink()
    (tmp_path / "etc/passwd").symlink_to("../../../../../../etc/passwd")
    (tmp_path / "etc/group").mkdir()
    assert insiders.ids_of("root:staff", ResolvedImage("rootfs", tmp_path)) == (0, 0)


def test_steps_are_encoded_as_the_launcher_reads_them() -> None:
    (first, *_) = mounting.tree_steps(request(DATA), ROOT)
    kind, size = struct.unpack_from("<II", encode_steps([first]))
    assert kind == Do.VOLUME
    assert size == len(encode_steps([first])) - 8
