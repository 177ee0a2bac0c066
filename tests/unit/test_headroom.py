"""The memory limit of what is saved: lifted by a bounded amount, and set again once what is held fits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sloplet.engines import headroom
from sloplet.engines.cgroups import GroupPlan
from sloplet.engines.headroom import Headroom

pytestmark = pytest.mark.anyone

LIMIT = 512 << 20


class Group:
    """A cgroup's files in an ordinary folder."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder, self.version = folder, version
        limits = ["memory.max"] if version == 2 else ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
        self.plan = GroupPlan(
            version, (str(folder),), writes=tuple((str(folder / name), str(LIMIT)) for name in (*limits, "pids.max"))
        )
        for path, text in self.plan.writes:
            Path(path).write_text(text)
        self.hold(LIMIT // 2)

    def hold(self, size: int) -> None:
        words = ("anon", "shmem") if self.version == 2 else ("rss", "shmem")
        new = self.folder / "new"
        new.write_text(f"cache {9 * LIMIT}\n{words[0]} {size // 2}\n{words[1]} {size // 2}\n")
        new.rename(self.folder / "memory.stat")

    def limits(self) -> set[int]:
        return {int(Path(path).read_text() or 0) for path, _ in self.plan.writes if "memory" in path}


@pytest.fixture(params=[1, 2])
def group(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setattr(headroom, "_FIRST_LOOK", 0.001)
    monkeypatch.setattr(headroom, "_LAST_LOOK", 0.001)
    return Group(tmp_path, request.param)


async def _until(group: Group, limit: int) -> None:
    async with asyncio.timeout(10):
        while group.limits() != {limit}:
            await asyncio.sleep(0)


def test_lifted_and_set_again(group: Group) -> None:
    async def main() -> None:
        room = Headroom(group.plan)
        await room.lift()
        (lifted,) = group.limits()
        assert LIMIT < lifted <= LIMIT + headroom.MOST
        assert (group.folder / "pids.max").read_text() == str(LIMIT)
        room.lower()
        await _until(group, LIMIT)

    asyncio.run(main())


def test_not_set_before_what_is_held_fits(group: Group) -> None:
    """Version 2 would kill for it, and version 1 refuse."""

    async def main() -> None:
        room = Headroom(group.plan)
        await room.lift()
        (lifted,) = group.limits()
        group.hold(2 * LIMIT)
        room.lower()
        assert room._lowering is not None
        for _ in range(20):  # looks: it is known at each that it does not fit
            assert not await asyncio.to_thread(room._try_to_lower)
        assert group.limits() == {lifted}
        group.hold(LIMIT // 2)
        await _until(group, LIMIT)

    asyncio.run(main())


def test_saved_again_meanwhile(group: Group) -> None:
    async def main() -> None:
        room = Headroom(group.plan)
        await room.lift()
        room.lower()
        await room.lift()
        assert room._try_to_lower()  # a look that had begun before
        (lifted,) = group.limits()
        assert lifted > LIMIT
        room.close()

    asyncio.run(main())


def test_it_is_bounded_by_what_the_machine_has(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "_room", lambda: 7)

    async def main() -> None:
        await Headroom(group.plan).lift()
        assert group.limits() == {LIMIT + 7}

    asyncio.run(main())
    monkeypatch.undo()
    assert 0 < headroom._room() <= headroom.MOST


def test_without_a_group_nothing_happens() -> None:
    async def main() -> None:
        room = Headroom(GroupPlan())
        await room.lift()
        room.lower()
        assert room._lowering is None

    asyncio.run(main())


def test_a_group_that_is_gone(group: Group) -> None:
    async def main() -> None:
        room = Headroom(group.plan)
        for path in list(group.folder.iterdir()):
            path.unlink()
        await room.lift()
        room.lower()
        assert room._lowering is not None
        await asyncio.wait_for(room._lowering, 10)

    asyncio.run(main())
