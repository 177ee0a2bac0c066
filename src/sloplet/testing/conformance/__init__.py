"""The conformance suite: what every engine and every Controller must do, as pytest classes.

A test module of yours runs it::

    import pytest
    from sloplet.testing.conformance import *

    @pytest.fixture
    def engine():
        return "my-engine"

Override the fixture ``controller`` too if the sandboxes are held by something else than this process. Tests skip by
capability (``engines.base.Capabilities``), never by the engine's name. Commands are those that the ``fake`` engine
knows and every Linux image has; paths are relative to the sandbox's workdir.
"""

from __future__ import annotations

from .attaching import TestAttach, TestProcesses
from .commands import TestInput, TestOutput, TestRun, TestTimeout
from .entries import TestAttributes, TestEntries, TestInPlace
from .files import TestFileErrors, TestFiles, TestLinks
from .flow import TestConcurrency, TestFlowControl
from .lifecycle import TestDeath, TestLifeCycle, TestNames
from .limits import TestGuarantees, TestLimits, TestMetricsAndEvents
from .living import TestLiveState, TestSnapshots
from .network import TestEgress, TestPorts
from .refusals import TestBadCommands, TestBadInput, TestBadPlaces
from .sleeping import TestFilesOnly, TestTimeToLive
from .spawning import TestCancel, TestSpawn
from .support import box, capabilities, controller, make_box
from .terminals import TestTerminal
from .transfers import TestDownload, TestUpload
from .volumes import TestVolumes, folder, volume
from .watching import TestWatch
from .wire import TestWire

__all__ = [
    "TestAttach", "TestAttributes", "TestBadCommands", "TestBadInput", "TestBadPlaces", "TestCancel",
    "TestConcurrency", "TestDeath", "TestDownload", "TestEgress", "TestEntries", "TestFileErrors", "TestFiles",
    "TestFilesOnly", "TestFlowControl", "TestGuarantees", "TestInPlace", "TestInput", "TestLifeCycle", "TestLimits",
    "TestLinks", "TestLiveState", "TestMetricsAndEvents", "TestNames", "TestOutput", "TestPorts", "TestProcesses",
    "TestRun", "TestSnapshots", "TestSpawn", "TestTerminal", "TestTimeToLive", "TestTimeout", "TestUpload",
    "TestVolumes", "TestWatch", "TestWire", "box", "capabilities", "controller", "folder", "make_box", "volume",
]  # fmt: skip
