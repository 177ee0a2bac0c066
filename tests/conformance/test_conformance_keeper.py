"""The conformance suite over the keeper: the same sandboxes, held by another process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("sloplet.testing.conformance")

from sloplet.controller import Controller  # noqa: E402
from sloplet.keeper.client import keeper_controller  # noqa: E402
from sloplet.portal import portal  # noqa: E402
from sloplet.testing.conformance import *  # noqa: E402, F403


def engines_for(tests: str) -> tuple[str, ...]:
    # of gVisor's what the keeper itself does: the rest goes the same way for every engine, or is refused before any
    if tests in ("TestBadCommands", "TestBadInput"):
        return ("fake",)
    all_of_them = ("TestLifeCycle", "TestDeath", "TestTimeToLive")
    return ("fake", "container", "gvisor") if tests in all_of_them else ("fake", "container")


#: What the engine does differently for root, or the keeper with what belongs to somebody. The rest is the keeper's
#: relay, which is the same for all, over sandboxes that test_conformance.py has tried as root.
_DIFFERS = {
    "TestDeath", "TestFilesOnly", "TestGuarantees", "TestLifeCycle", "TestLimits", "TestMetricsAndEvents",
    "TestSnapshots", "TestTimeToLive",
}  # fmt: skip


def same_for_everyone(tests: str) -> bool:
    return tests not in _DIFFERS


@pytest.fixture
def controller() -> Iterator[Controller]:
    return portal().call(keeper_controller())
