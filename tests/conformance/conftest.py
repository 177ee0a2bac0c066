"""The engine under test, by the name that each file's ``engine_name`` gives."""

from __future__ import annotations

import pytest

from sloplet.engines import registry


@pytest.fixture
def engine(engine_name: str) -> str:
    probe = registry.load(engine_name).probe()
    if not probe.available:
        pytest.skip(f"capability: {engine_name} cannot run here: {probe.reason}")
    return engine_name
