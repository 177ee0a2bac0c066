"""The sandbox of a name is given only to who asked for the same: of its network, for what it may reach now."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cli_controller import Records, info

from sloplet import AsyncSandbox, Network
from sloplet.errors import SandboxMismatch
from sloplet.netchange import NetworkChange
from sloplet.netspec import NetworkSpec
from sloplet.spec import SandboxSpec

pytestmark = pytest.mark.anyone

X = Network(allow=["x.org"])


def opened(made: dict[str, Any], asked: dict[str, Any], **change: Any) -> str:
    """Empty if who asks is given the sandbox that was made, and changed since; else what he is told."""
    held = Records(info("dev", spec=SandboxSpec.make("dev", **made)))

    async def work() -> None:
        if change:
            await held.change_network("id-dev", NetworkChange(**change))
        controller: Any = held
        assert (await AsyncSandbox("dev", controller=controller, **asked).start()).id == "id-dev"

    try:
        asyncio.run(work())
    except SandboxMismatch as error:
        return f"{error.message}; {error.hint}"
    return ""


@pytest.mark.parametrize(
    ("change", "asked", "given"),
    [
        ({}, X, True),
        ({"add_allow": ("evil.org",)}, X, False),
        ({"add_deny": ("x.org",)}, X, False),
        ({"add_allow": ("evil.org",)}, Network(allow=["x.org", "evil.org"]), True),
        ({"remove": ("x.org",)}, Network(), True),
        ({}, Network(allow=["x.org"], budget="1g"), False),
        ({}, "none", False),
    ],
)
def test_who_names_a_network_means_the_one_of_the_moment(change: Any, asked: Any, given: bool) -> None:
    told = opened({"network": X}, {"network": asked}, **change)
    assert bool(told) is not given
    if not given:
        assert told.startswith("the sandbox 'dev' exists with other settings: network; ")
        assert "`sloplet net set dev`" in told


def test_what_was_answered_since_is_no_other_setting() -> None:
    asking = {"network": Network(allow=["x.org"], ask=True)}
    assert opened(asking, asking, add_allow=("y.org:443", "[::1]:80"), add_deny=("z.org:22",)) == ""
    for more in ("y.org", "*.org:443", "GET https://y.org/", "@github", "10.0.0.0/8:80"):
        assert opened(asking, asking, add_allow=(more,)), more
    assert opened({"network": X}, {"network": X}, add_allow=("y.org:443",)), "nobody was asked"


def test_of_a_template() -> None:
    of = {"template": "warm"}
    none = {"template": "warm", "network": "none"}
    assert opened(of, of) == ""
    assert opened(none, none) == ""
    assert opened(none, of), "it has not what the template has"
    held = Records(info("dev", spec=SandboxSpec.make("dev", **none)))
    held.policies["id-dev"] = NetworkSpec("rules")

    async def work() -> None:
        controller: Any = held
        await AsyncSandbox("dev", controller=controller, **none).start()
        held.policies["id-dev"] = NetworkSpec("rules", ("x.org",))  # somebody has opened it since
        with pytest.raises(SandboxMismatch, match="network"):
            await AsyncSandbox("dev", controller=controller, **none).start()

    asyncio.run(work())
