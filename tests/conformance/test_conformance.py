"""The shipped conformance suite, on every engine of this machine."""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("sloplet.testing.conformance")

from sloplet.engines import registry  # noqa: E402
from sloplet.testing.conformance import *  # noqa: E402, F403

#: A sandbox of gVisor's takes a tenth of a second to make. As root the whole suite runs; as an ordinary user what his
#: rights, his ids and his kind of disk have to do with: the rest is gVisor's kernel and our agent, the same for both.
_DIFFERS = {
    "TestDeath", "TestDownload", "TestFileErrors", "TestGuarantees", "TestLifeCycle", "TestLimits", "TestLinks",
    "TestMetricsAndEvents", "TestTerminal", "TestTimeout", "TestUpload",
}  # fmt: skip


def engines_for(tests: str) -> tuple[str, ...]:
    names = registry.all_names()
    return names if os.geteuid() == 0 or tests in _DIFFERS else tuple(name for name in names if name != "gvisor")
