"""The shipped conformance suite, on every engine of this machine."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("sloplet.testing.conformance")

from sloplet.engines import registry  # noqa: E402
from sloplet.testing.conformance import *  # noqa: E402, F403


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.anyone if name == "fake" else ()) for name in registry.all_names()]
)
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
