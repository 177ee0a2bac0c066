"""The conformance suite over the keeper: the same sandboxes, held by another process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("sloplet.testing.conformance")

from sloplet.controller import Controller  # noqa: E402
from sloplet.keeper.client import keeper_controller  # noqa: E402
from sloplet.portal import portal  # noqa: E402
from sloplet.testing.conformance import *  # noqa: E402, F403


@pytest.fixture(params=[pytest.param("fake", marks=pytest.mark.anyone), "container"])
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def controller() -> Iterator[Controller]:
    return portal().call(keeper_controller())
