"""What is different in the home of a server's tenant: nothing listens for it, and it uses the server's tools."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from sloplet.errors import PortUnavailable
from sloplet.runtime import Runtime
from sloplet.sandbox import AsyncSandbox
from sloplet.setup.tools import find_tool
from sloplet.state.home import Home

pytestmark = pytest.mark.anyone


def homes(tmp_path: Path) -> tuple[Home, Home]:
    main = Home(tmp_path / "main").open()
    (main.path / "server").mkdir()
    (main.path / "tenants").mkdir()
    return main, main.tenant("team").open()


def test_only_a_tenants_home_has_a_main_one(tmp_path: Path) -> None:
    main, tenant = homes(tmp_path)
    assert tenant.main is not None
    assert tenant.main.path == main.path
    assert main.main is None
    (tmp_path / "tenants").mkdir()
    assert Home(tmp_path / "tenants" / "x").main is None  # no server's


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".", "UP", "x" * 40, "-a", "a\n"])
def test_names_of_tenants_are_parts_of_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="tenant"):
        Home(tmp_path).tenant(name)


def test_nothing_listens_for_a_tenants_sandbox(tmp_path: Path) -> None:
    main, tenant = homes(tmp_path)

    async def listened(home: Home) -> int:
        runtime = Runtime(home)
        try:
            async with AsyncSandbox(engine="container", ports=[8000], controller=runtime) as box:
                if home is tenant:
                    with pytest.raises(PortUnavailable, match="names"):
                        await box.expose(8001)
                return len(await box.ports())
        finally:
            await runtime.aclose()

    assert asyncio.run(listened(main)) == 1  # the control
    assert asyncio.run(listened(tenant)) == 0


def test_a_tenant_uses_the_servers_programs(tmp_path: Path) -> None:
    main, tenant = homes(tmp_path)
    tool = main.path / "bin" / "runsc"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert find_tool("runsc", tenant) == tool
    own = tenant.path / "bin" / "runsc"
    own.parent.mkdir()
    os.link(tool, own)
    assert find_tool("runsc", tenant) == own
