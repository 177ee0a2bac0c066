"""The engine under test, by the names that each file's ``engines_for`` gives for a class of tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sloplet.engines import registry
from sloplet.state.home import Home

#: Where runsc is for tests (scripts/test fetches it). A machine without it skips gvisor's.
RUNSC = os.environ.get("SLOPLET_TEST_RUNSC", "")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine_name" in metafunc.fixturenames:
        tests = metafunc.cls.__name__ if metafunc.cls else ""
        same = getattr(metafunc.module, "same_for_everyone", lambda _: False)(tests)
        metafunc.parametrize(
            "engine_name",
            [
                pytest.param(name, marks=pytest.mark.anyone if same or name == "fake" else ())
                for name in metafunc.module.engines_for(tests)
            ],
        )


@pytest.fixture
def runsc_is_here() -> Iterator[None]:
    """For gvisor's tests alone: in all others "auto" is what it is on a machine without runsc. In SLOPLET_HOME and not
    in a variable: a keeper that runs already must find it, too."""
    place = Home().open().path / "bin" / "runsc"
    if not RUNSC:
        yield
        return
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(Path(RUNSC))
    yield
    place.unlink()


@pytest.fixture
def engine(engine_name: str, request: pytest.FixtureRequest) -> str:
    if engine_name == "gvisor":
        request.getfixturevalue("runsc_is_here")
    probe = registry.load(engine_name).probe()
    if not probe.available:
        pytest.skip(f"capability: {engine_name} cannot run here: {probe.reason}")
    return engine_name
