"""Hatchling's build hook: the wheel carries the agent, compiled for the machine it is built on.

The agent is static, so one wheel runs on every Linux of that architecture, glibc or musl. Where there is no C
compiler the build asks pip for the ziglang wheel, which holds one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compile_agent import OUTPUT, ROOT, candidates, compile_agent, machine


class AgentBuildHook(BuildHookInterface[Any]):
    """Compiles before the wheel is put together; in an editable install the program stays in the source tree."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return [] if candidates() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if not sys.platform.startswith("linux"):
            raise RuntimeError("Sloplet runs on Linux only: build it there, or in a Linux VM")
        compiler = compile_agent()
        self.app.display_info(f"sloplet: the agent was compiled with {compiler}")
        build_data["pure_python"] = False
        build_data["tag"] = wheel_tag(machine())
        build_data["artifacts"].append("/" + str(OUTPUT.relative_to(ROOT)))


def wheel_tag(arch: str) -> str:
    """Static code needs no libc: the wheel may say that it fits every one there is."""
    platforms = (f"manylinux2014_{arch}", f"manylinux_2_17_{arch}", f"musllinux_1_1_{arch}")
    return f"py3-none-{'.'.join(platforms)}"
