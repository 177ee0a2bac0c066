"""The shipped conformance suite, on every engine of this machine."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("sloplet.testing.conformance")

from sloplet.engines import registry  # noqa: E402
from sloplet.testing.conformance import *  # noqa: E402, F403


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.anyone if name == "fake" else ()) for name in registry.all_names()]
)
def engine(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    probe = registry.load(name).probe()
    if not probe.available:
        pytest.skip(f"capability: {name} cannot run here: {probe.reason}")
    return name
