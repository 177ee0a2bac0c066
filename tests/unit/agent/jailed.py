"""The agent in a container as the engine makes it, spoken to byte by byte."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Any

from agentclient import Pairs, WireClient
from sloplet.engines.base import Engine, ResolvedImage, StartRequest
from sloplet.live import hello_fields
from sloplet.spec import SandboxSpec
from sloplet.wire.schema import Tag

_TOOLS = (
    "sh", "cat", "cp", "mv", "rm", "mkdir", "rmdir", "ln", "chmod", "touch", "truncate", "dd", "ls", "find", "stat",
    "sha256sum", "mkfifo", "sleep",
)  # fmt: skip


def small_root(folder: Path) -> ResolvedImage:
    """A root of the host's own tools, and some files to change."""
    tools = {tool: Path(shutil.which(tool) or "").resolve() for tool in _TOOLS}
    env = {"LD_TRACE_LOADED_OBJECTS": "1"}  # what ldd does, without its shell
    words = "".join(subprocess.run([path], env=env, capture_output=True, text=True).stdout for path in tools.values())
    parts = {f"bin/{tool}": path for tool, path in tools.items()}
    parts |= {path[1:]: Path(path) for path in re.findall(r"(/\S+) \(0x", words)}
    for name, path in parts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name)
        (folder / name).chmod(0o755)
    for name in ("etc", "data/deep/deeper", "data/gone", "data/remade"):
        (folder / name).mkdir(parents=True)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    for name in ("plain", "edited", "removed", "moded", "deep/one", "deep/deeper/two", "gone/x", "remade/old", "typed"):
        (folder / "data" / name).write_text(f"the image's {name}\n" * 50)
    (folder / "data/link").symlink_to("plain")
    for above in (folder, *list(folder.parents)[:2]):
        above.chmod(0o755)
    return ResolvedImage("rootfs", folder)


class Jail(WireClient):
    """A sandbox. Its engine's loop runs only while it starts and ends."""

    def __init__(self, engine: Engine, image: ResolvedImage, place: Path, **spec: Any) -> None:
        place.mkdir()
        name = "t" + uuid.uuid4().hex[:8]
        request = StartRequest(name, SandboxSpec(**{"user": "root", **spec}), image, place)
        self._runner = asyncio.Runner()
        self.instance = self._runner.run(engine.start(request))
        self.fields = list(hello_fields(self.instance, name))
        super().__init__(self.instance.write_fd, self.instance.read_fd, self.fields)

    def again(self, *pairs: tuple[Tag, int | bytes | str]) -> None:
        """HELLO once more, with these instead of what it said before."""
        from agentclient import encode, frame
        from sloplet.wire.schema import VERSION, FrameType

        replaced = {tag for tag, _ in pairs}
        fields: Pairs = [(Tag.VERSION, VERSION), *(p for p in self.fields if p[0] not in replaced), *pairs]
        self.hello, self.next = None, 1
        self.streams.clear()
        self.send(frame(FrameType.HELLO, 0, encode(fields)))
        self.until(lambda: self.hello is not None)

    def close(self) -> None:
        os.close(self.to)
        if self.fro != self.to:
            os.close(self.fro)
        self._runner.run(self.instance.wait())
        self.instance.cleanup()
        self._runner.close()
