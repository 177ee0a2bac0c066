"""A holder that is killed in the middle of what it does with a sandbox's state, and who comes after it.

python live_crash.py hold HOME N     do all of it; at the N-th line that orders state, kill -9 (0: count the lines)
python live_crash.py judge HOME      clean up, look at all there is, use it, remove it; print what is broken
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from live_kit import CHAIN, Chain

from sloplet import AsyncSandbox
from sloplet.errors import SandboxDead, SandboxNotFound, SlopletError
from sloplet.runtime import Runtime
from sloplet.state.home import Home

#: Where files, rows and sandboxes are put in order.
WATCHED = (
    "/timeline/",
    "/state/snapshots.py",
    "/state/draft.py",
    "/state/layout.py",
    "/runtime.py",
    "/live.py",
    "/minder.py",
)
DONE = ("snapshot", "fork", "pause", "resume", "rollback", "template", "checkpoint", "undo", "delete")


class Fuse:
    """Counts lines in every thread; ends the process at one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.count, self.lit = at, 0, False

    def trace(self, frame: Any, event: str, arg: object) -> Any:
        return self.line if any(part in frame.f_code.co_filename for part in WATCHED) else None

    def line(self, frame: Any, event: str, arg: object) -> Any:
        if self.lit and event == "line":
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.line


async def _talk(box: AsyncSandbox, pid: int, line: str) -> str:
    process = await box.attach(pid, replay=False)
    await process.send(line + "\n")
    said = ""
    async for _, text in process:
        said += text
        if "\n" in said:
            break
    await process.detach()
    return said.strip()


async def _with_memory(runtime: Runtime, name: str, **settings: Any) -> tuple[AsyncSandbox, int]:
    box = AsyncSandbox(name, engine="gvisor", controller=runtime, **settings)
    process = await box.spawn(["python3", "-uc", CHAIN], stdin=True, detached=True)
    assert await _talk(box, process.pid, "a") == Chain().add("a")
    return box, process.pid


async def hold(home: Path, at: int) -> None:
    fuse = Fuse(at)
    sys.settrace(fuse.trace)
    threading.settrace(fuse.trace)
    runtime = Runtime(Home(home), holder="keeper")
    sleeper, _ = await _with_memory(runtime, "sleeper")
    await sleeper.pause()
    box, pid = await _with_memory(runtime, "dev", undo=1, checkpoint_every=3600)
    await box.snapshot("base")
    (home / "pid").write_text(str(pid))
    _say("ready")
    fuse.lit = True
    for what in DONE:
        await _do(runtime, box, what)
        _say(what)
    fuse.lit = False
    _say(f"count {fuse.count}")
    os.kill(os.getpid(), signal.SIGKILL)


async def _do(runtime: Runtime, box: AsyncSandbox, what: str) -> None:
    timeline = runtime.timeline
    if what == "snapshot":
        await box.snapshot("one")
    elif what == "fork":
        for child in await box.fork(2):
            await child.kill()
    elif what == "pause":
        await box.pause()
    elif what == "resume":
        await box.resume()
    elif what == "rollback":
        await box.rollback("base")
    elif what == "template":
        await box.template("warm")
    elif what == "checkpoint":
        live = runtime.find_live(box.id)
        assert live is not None
        await timeline._whole(timeline._checkpoint(live))
    elif what == "undo":
        await box.run("echo x > note")
        await box.undo()
    else:
        await box.delete_snapshot("base", force=True)


def _say(word: str) -> None:
    print(word, flush=True)


# -- afterwards ------------------------------------------------------------------------------------------


async def judge(home: Path, acknowledged: list[str]) -> list[str]:
    runtime = Runtime(Home(home), holder="keeper")
    pid = int((home / "pid").read_text())
    broken: list[str] = []
    try:
        runtime.owner()  # cleans up after the dead, once, as every start does
        broken += [f"state.db: {line}" for line in runtime.store.check()]
        broken += await _records(runtime, acknowledged, pid)
        broken += await _states(runtime, acknowledged, pid)
        for info in await runtime.list():
            await runtime.kill(info.id)
        for template in await runtime.snapshots(role="template"):
            await runtime.delete_snapshot(template.id)
    finally:
        await runtime.aclose()
    left = [*(home / "snapshots").iterdir(), *(home / "sandboxes").glob("*/*"), *(home / "run").glob("snapshot-*")]
    return broken + [f"left over: {path.relative_to(home)}" for path in left]


async def _records(runtime: Runtime, acknowledged: list[str], pid: int) -> list[str]:
    """One that slept sleeps; the other is paused, can be recovered, or is reported dead."""
    records = await runtime.list()
    found = {info.name: info for info in records if info.name is not None}
    if set(found) != {"sleeper", "dev"}:
        return [f"records: {sorted(found)}"]
    broken = [f"a copy is {info.state}" for info in records if info.name is None and info.state != "dead"]
    if found["sleeper"].state != "paused":
        broken.append(f"the sleeper is {found['sleeper'].state}")
    elif await _goes_on(runtime, "sleeper", pid) != "2":
        broken.append("the sleeper has lost its memory")
    dev = found["dev"]
    last = acknowledged[-1] if acknowledged else ""
    if last == "pause" and dev.state not in ("paused", "dead"):
        broken.append(f"it was paused, and is {dev.state}")
    if dev.state not in ("paused", "dead"):
        broken.append(f"it is {dev.state}")
    if "checkpoint" in acknowledged and dev.saved is None:
        broken.append("its checkpoint is gone")
    if dev.saved is None:
        try:
            await _goes_on(runtime, "dev", pid)
            broken.append("it is dead, and answers")
        except (SandboxDead, SandboxNotFound):
            pass
    elif await _goes_on(runtime, "dev", pid) != "2":
        broken.append("it has lost its memory")
    elif dev.state == "dead" and (await runtime.find("dev")).recovered_from is None:
        broken.append("it does not say that it was recovered")
    return broken


async def _goes_on(runtime: Runtime, name: str, pid: int) -> str:
    """Which answer the process in it gives next: it has heard one line so far."""
    box = await AsyncSandbox.connect(name, controller=runtime)
    return (await _talk(box, pid, "b")).split()[0]


async def _states(runtime: Runtime, acknowledged: list[str], pid: int) -> list[str]:
    """Everything that is listed opens, whole, and a sandbox goes on from it."""
    broken = []
    listed = await runtime.snapshots(role=None)
    names = {snapshot.name for snapshot in listed}
    for what, name in (("snapshot", "one"), ("template", "warm")):
        if what in acknowledged and name not in names:
            broken.append(f"{name} was acknowledged, and is not there")
    if "delete" in acknowledged and "base" in names:
        broken.append("what was deleted is there")
    if "delete" not in acknowledged and len(acknowledged) < len(DONE) - 1 and "base" not in names:
        broken.append("base is lost")
    for snapshot in listed:
        if snapshot.role in ("fork", "export"):
            broken.append(f"a passing {snapshot.role} was left")
        try:
            if snapshot.role == "template":
                info = await runtime.create(AsyncSandbox(template=snapshot.name).spec)
            elif snapshot.role == "snapshot":
                (info,) = await runtime.fork(snapshot.sandbox, 1, snapshot=snapshot.id)
            else:
                runtime.saved.open(snapshot.id).close()
                continue
            if await _goes_on(runtime, info.id, pid) != "2":
                broken.append(f"{snapshot.role} {snapshot.name}: not what was saved")
            await runtime.kill(info.id)
        except SlopletError as error:
            broken.append(f"{snapshot.role} {snapshot.name}: {type(error).__name__}: {error}")
    return broken


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        asyncio.run(hold(Path(sys.argv[2]), int(sys.argv[3])))
    else:
        print(json.dumps(asyncio.run(judge(Path(sys.argv[2]), sys.argv[3:]))))
