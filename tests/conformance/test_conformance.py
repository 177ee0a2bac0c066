"""The shipped conformance suite, on every engine of this machine."""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("sloplet.testing.conformance")

from sloplet.engines import registry  # noqa: E402
from sloplet.testing.conformance import *  # noqa: E402, F403

#: A sandbox of gVisor's takes a tenth of a second to make: it is spared what is refused before any kernel sees it ...
_BEFORE_ANY_KERNEL = {"TestBadCommands", "TestBadInput", "TestBadPlaces"}
#: ... and an ordinary user runs what his rights, his ids and his kind of disk have to do with: the rest is gVisor's
#: kernel and our agent, the same as for root.
_DIFFERS = {
    "TestDeath", "TestEgress", "TestGuarantees", "TestLifeCycle", "TestLimits", "TestLinks", "TestLiveState",
    "TestMetricsAndEvents", "TestSnapshots", "TestFilesOnly", "TestTimeToLive",
}  # fmt: skip


def same_for_everyone(tests: str) -> bool:
    return tests in ("TestBadCommands", "TestBadInput")


def engines_for(tests: str) -> tuple[str, ...]:
    names = registry.all_names()
    wanted = tests not in _BEFORE_ANY_KERNEL if os.geteuid() == 0 else tests in _DIFFERS
    return names if wanted else tuple(name for name in names if name != "gvisor")
