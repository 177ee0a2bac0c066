"""The engine under test, by the name that each file's ``engine_name`` gives."""

from __future__ import annotations

import os

import pytest

from sloplet.engines import registry


@pytest.fixture
def engine(engine_name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    # For gvisor's tests alone: in all others "auto" is what it is on a machine without runsc.
    if engine_name == "gvisor" and "SLOPLET_TEST_RUNSC" in os.environ:
        monkeypatch.setenv("SLOPLET_RUNSC", os.environ["SLOPLET_TEST_RUNSC"])
    probe = registry.load(engine_name).probe()
    if not probe.available:
        pytest.skip(f"capability: {engine_name} cannot run here: {probe.reason}")
    return engine_name
