"""What several of these files share."""

from __future__ import annotations

import os

import pytest

from sloplet.engines import registry


@pytest.fixture(params=["container", "gvisor"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the rungs with a root of its own that works here; files that mean others have one of their own."""
    if request.param == "gvisor" and (named := os.environ.get("SLOPLET_TEST_RUNSC")):
        monkeypatch.setenv("SLOPLET_RUNSC", named)
    probe = registry.load(request.param).probe()
    if not probe.available:
        pytest.skip(f"{request.param}: {probe.reason}")
    return str(request.param)
